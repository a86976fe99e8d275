"""Seeded draws at the nodes of a tree are those of SGLang's sampler at that place of the answer."""

from __future__ import annotations

import random
import struct
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash2_sglang import seeds
from dflash2_sglang.patches import seeded_prefill
from dflash2_sglang.patches.cpu_sampling import murmur_hash32

VOCAB, NODES = 12, 5
PLAIN = {"temperature": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "cold": {"temperature": 0.6},
    "top_k": {"temperature": 1.3, "top_k": 4},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.15},
    "all": {"temperature": 0.9, "top_k": 7, "top_p": 0.9, "min_p": 0.02},
}


@pytest.fixture(autouse=True)
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's sampler on the CPU, without deterministic inference."""
    from sglang.srt.layers import sampler

    monkeypatch.setattr(sampler, "murmur_hash32", murmur_hash32)
    monkeypatch.setattr(seeds, "_deterministic", lambda: False)
    return sampler


def request(kind: dict[str, Any], seed: int | None = None, n: int = 1) -> SimpleNamespace:
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**kind, sampling_seed=seed, n=n)
    params.normalize(None)
    return SimpleNamespace(sampling_params=params)


def information(reqs: list[Any]) -> SimpleNamespace:
    """The filters as ``SamplingBatchInfo`` holds them."""

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(r.sampling_params, name) for r in reqs], dtype=dtype)

    return SimpleNamespace(
        temperatures=column("temperature", torch.float32).view(-1, 1),
        top_ks=column("top_k", torch.int32),
        top_ps=column("top_p", torch.float32),
        min_ps=column("min_p", torch.float32),
        device="cpu",
    )


def alone(sampler: Any, req: Any, logits: Tensor, position: int) -> int:
    """What SGLang's sampler draws for this request in a batch of its own."""
    info, params = information([req]), req.sampling_params
    probs = torch.softmax(logits.clone().unsqueeze(0).div_(info.temperatures), -1)
    seed, place = torch.tensor([params.sampling_seed]), torch.tensor([position])
    if params.top_p == 1 and params.top_k >= 2**20 and params.min_p == 0:
        token = sampler.sampling_from_probs_torch(probs, sampling_seed=seed, positions=place)
        return int(token)
    if params.min_p:  # SGLang refuses it with a seed: the filter is written out here
        probs[probs < probs.max() * params.min_p] = 0
    return int(
        sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probs, info.top_ks, info.top_ps, info.min_ps, False, seed, place
        )
    )


def test_hash_is_murmur3() -> None:
    def reference(data: bytes) -> int:
        def rotate(x: int, by: int) -> int:
            return ((x << by) | (x >> (32 - by))) & 0xFFFFFFFF

        h = 0
        for (word,) in struct.iter_unpack("<I", data):
            word = rotate(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
            h = (rotate(h ^ word, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
        h ^= len(data)
        h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return h ^ h >> 16

    assert reference(b"test") == 0xBA6BD213  # a published value
    dice = random.Random(0)
    drawn = [
        0,
        1,
        42,
        2**31,
        2**32 - 1,
        2**32,
        2**63 - 1,
        *(dice.getrandbits(63) for _ in range(9)),
    ]
    places = [0, 1, 7, 2**31 - 1, *(dice.getrandbits(20) for _ in drawn[4:])]
    columns = [0, 1, 5, 63, 151935]
    found = murmur_hash32(torch.tensor(drawn), torch.tensor(places), torch.tensor(columns))
    for row, (seed, place) in enumerate(zip(drawn, places, strict=True)):
        for column, index in enumerate(columns):
            assert found[row, column] == reference(struct.pack("<QII", seed, place, index))
    negative = murmur_hash32(torch.tensor([-3]), torch.tensor([1]), torch.tensor([2]))
    assert negative == reference(struct.pack("<qII", -3, 1, 2))


def test_who_has_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    reqs = [
        request(PLAIN),
        request(PLAIN, 7),
        request({"temperature": 0.0}, 7),
        request(KINDS["top_p"], 2**64 - 1),
        request(PLAIN, 7, n=2),
    ]
    found = seeds.find(reqs, "cpu")
    assert found is not None
    assert (found.rows, found.values.tolist()) == ([1, 3], [7, -1])
    assert (found.ranked, found.fixed) == ([False, True], False)
    assert seeds.find([reqs[0], reqs[2], reqs[4]], "cpu") is None
    only = seeds.find([reqs[1], reqs[2]], "cpu")
    assert only is not None
    assert only.fixed
    monkeypatch.setattr(seeds, "_deterministic", lambda: True)
    found = seeds.find(reqs, "cpu")
    assert found is not None
    assert (found.rows, found.values.tolist()) == ([0, 1, 3, 4], [42, 7, -1, 7])
    assert found.fixed


@pytest.mark.parametrize("beside", ["seeded", "anything"])
def test_nodes_are_drawn_as_plain_decoding_would(sampler: Any, beside: str) -> None:
    """Whatever else is in the batch, in which order."""
    torch.manual_seed(1)
    asked = [request(kind, 100 + n) for n, kind in enumerate(KINDS.values())]
    if beside == "anything":
        others = [request(PLAIN), request({"temperature": 0.0}), request(KINDS["all"])]
        asked = [others[0], *asked[:3], others[1], *asked[3:][::-1], others[2]]
    found = seeds.find(asked, "cpu")
    assert found is not None
    differs = 0
    for _ in range(20):
        logits = torch.randn(len(asked), NODES, VOCAB) * 2
        positions = torch.randint(0, 500, (len(asked), NODES))
        tokens = seeds.at_nodes(logits.clone(), positions, found, information(asked))
        for place, row in enumerate(found.rows):
            for node in range(NODES):
                at = int(positions[row, node])
                expected = alone(sampler, asked[row], logits[row, node], at)
                assert tokens[place, node] == expected
                differs += expected != logits[row, node].argmax()
    assert differs > 100  # it was sampled


def test_prefill_draws_the_same(sampler: Any) -> None:
    """The patch leaves the draws of other requests to SGLang."""
    torch.manual_seed(2)
    asked = [
        request(PLAIN, 5),
        request(PLAIN),
        request(KINDS["top_k"], 6),
        request(KINDS["min_p"], 8),
    ]
    info = information(asked)
    info.dflash2_seeds = seeds.find(asked, "cpu")
    logits, positions = torch.randn(4, VOCAB), torch.tensor([3, 4, 5, 6])
    probs = torch.softmax(logits / info.temperatures, -1)
    stock = torch.tensor([0, 11, 0, 0], dtype=torch.int32)

    def original(*_: Any) -> Any:
        return stock.clone(), "capture"

    tokens, capture = seeded_prefill.sample_from_probs(
        original, None, probs, info, positions, False
    )
    assert capture == "capture"
    assert tokens.dtype == torch.int32
    for row, token in enumerate(tokens.tolist()):
        if asked[row].sampling_params.sampling_seed is None:
            assert token == 11
        else:
            assert token == alone(sampler, asked[row], logits[row], int(positions[row]))
    del info.dflash2_seeds
    tokens, _ = seeded_prefill.sample_from_probs(original, None, probs, info, positions, False)
    assert tokens.tolist() == stock.tolist()


def test_prefill_where_all_are_seeded_or_greedy(sampler: Any) -> None:
    """SGLang's own sampler would refuse min-p with a seed: it is not asked."""
    asked = [request(KINDS["min_p"], 5), request({"temperature": 0.0})]
    info = information(asked)
    info.dflash2_seeds = seeds.find(asked, "cpu")
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    probs = torch.softmax(logits / info.temperatures, -1)
    positions = torch.tensor([3, 4])
    tokens, _ = seeded_prefill.sample_from_probs(
        lambda *_: pytest.fail("asked"), None, probs, info, positions, False
    )
    assert tokens.tolist() == [alone(sampler, asked[0], logits[0], 3), int(logits[1].argmax())]


@pytest.mark.parametrize("name", KINDS)
def test_draws_follow_the_filtered_distribution(name: str) -> None:
    """Over seeds, and over positions with one seed."""
    from scipy.stats import chisquare

    from dflash2_sglang.tree.filters import filtered_probs

    draws, torch_logits = 20_000, torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
    req = request(KINDS[name], 9)
    info = information([req])
    probs = filtered_probs(
        torch_logits.view(1, 1, -1),
        temperature=info.temperatures,
        top_k=info.top_ks,
        top_p=info.top_ps,
        min_p=info.min_ps,
    )[0, 0]
    found = seeds.find([req], "cpu")
    assert found is not None
    logits = torch_logits.expand(1, draws, VOCAB)
    places = torch.arange(draws).unsqueeze(0)
    by_place = seeds.at_nodes(logits, places, found, info)[0]
    many = information([req] * draws)
    other = found._replace(
        rows=list(range(draws)), values=torch.arange(draws) * 7919, ranked=found.ranked * draws
    )
    spread = torch_logits.expand(draws, 1, VOCAB)
    by_seed = seeds.at_nodes(spread, torch.full((draws, 1), 17), other, many)[:, 0]
    possible = probs > 0
    for tokens in (by_place, by_seed):
        counts = Counter(tokens.tolist())
        assert all(possible[token] for token in counts)
        seen = [counts[token] for token in possible.nonzero().flatten().tolist()]
        expected = (probs[possible].double() / probs[possible].double().sum() * draws).tolist()
        assert chisquare(seen, expected).pvalue > 1e-5
