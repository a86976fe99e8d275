"""The K best tokens of a row of logits, and how ranks put theirs together."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2_sglang import candidates, head
from dflash2_sglang.candidates import BLOCK, CandidateHead, first_argmax, radix_top_k, top_k


def check(logits: torch.Tensor, k: int) -> None:
    """The values of torch.topk, each at the place it claims, no place twice."""
    values, index = top_k(logits, k)
    assert values.shape == index.shape == (logits.shape[0], k)
    assert torch.equal(values, torch.topk(logits, k, dim=-1).values)
    assert torch.equal(logits.gather(1, index), values)
    assert all(len(set(row)) == k for row in index.tolist())


# Around the places where the two stages begin, and where blocks end.
WIDTHS = [1, 5, 63, 64, 65, 2 * 16 * BLOCK - 1, 2 * 16 * BLOCK, 2 * 16 * BLOCK + 1, 4999, 49152]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("k", [1, 4, 16])
def test_top_k(width: int, k: int) -> None:
    g = torch.Generator().manual_seed(width * 100 + k)
    check(torch.randn(5, width, generator=g), min(k, width))


@pytest.mark.parametrize("width", [700, 2048, 3001])
def test_top_k_with_ties(width: int) -> None:
    g = torch.Generator().manual_seed(width)
    for levels in (1, 2, 7):
        check(torch.randint(0, levels, (6, width), generator=g).float(), 16)


def test_the_best_in_one_block_or_in_the_odd_end() -> None:
    width = 40 * BLOCK + 17
    for first in (0, 5 * BLOCK + 3, 40 * BLOCK):
        logits = torch.zeros(1, width)
        logits[0, first : first + 16] = torch.arange(16, 0, -1.0)
        _, index = top_k(logits, 16)
        assert index[0].tolist() == list(range(first, first + 16))


def test_top_k_with_masked_tokens() -> None:
    logits = torch.full((2, 3000), -torch.inf)
    logits[:, 2990:] = torch.arange(10.0)
    check(logits, 10)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 2600), st.integers(1, 20), st.booleans())
def test_top_k_of_any_shape(seed: int, width: int, k: int, tied: bool) -> None:
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(seed))
    check(logits.round() if tied else logits, min(k, width))


@pytest.mark.parametrize("width", [1, 63, 64, 128, 4096, 4097, 49152])
def test_first_argmax(width: int) -> None:
    g = torch.Generator().manual_seed(width)
    for levels in (1, 2, 5, 10**6):
        logits = torch.randint(0, levels, (9, width), generator=g).float()
        found = first_argmax(logits)
        assert found.dtype == torch.int64
        assert found.tolist() == [row.index(max(row)) for row in logits.tolist()]


# The head.


class FakeHead:
    """A head as SGLang shards it: rows are padded, and each rank knows where its words begin."""

    def __init__(self, weight: torch.Tensor, words: int, ranks: int = 1, rank: int = 0) -> None:
        padded = -(-words // (BLOCK * ranks)) * BLOCK * ranks
        share = padded // ranks
        rows = torch.zeros(padded, weight.shape[1])
        rows[:words] = weight
        rows[words:] = 100.0  # what lies in the padding must never be seen
        self.weight = rows[rank * share : (rank + 1) * share]
        self.org_vocab_size = words
        start = min(rank * share, words)
        own = min((rank + 1) * share, words) - start
        self.shard_indices = SimpleNamespace(org_vocab_start_index=start, num_org_elements=own)


def make_head(
    monkeypatch: pytest.MonkeyPatch, fake: FakeHead, k: int, ranks: int = 1, **options: Any
) -> CandidateHead:
    monkeypatch.setattr(head, "get_parallel", lambda: SimpleNamespace(tp_size=ranks))
    return CandidateHead(head.TargetHead(fake), k, **options)


@pytest.mark.parametrize("words", [50, 64, 200, 3333])
def test_padding_is_no_candidate(monkeypatch: pytest.MonkeyPatch, words: int) -> None:
    g = torch.Generator().manual_seed(words)
    weight, hidden = torch.randn(words, 8, generator=g), torch.randn(4, 8, generator=g)
    found = make_head(monkeypatch, FakeHead(weight, words), 16)(hidden, None)
    logits = hidden @ weight.T
    assert torch.allclose(found.logits, logits.topk(16).values, atol=1e-5)
    assert torch.allclose(logits.gather(1, found.tokens), found.logits, atol=1e-5)
    assert torch.allclose(found.log_norm, logits.logsumexp(-1), atol=1e-5)


def test_temperature_and_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint's transform comes first; the temperature is in ``log_norm`` alone."""
    g = torch.Generator().manual_seed(3)
    weight, hidden = torch.randn(90, 8, generator=g), torch.randn(2, 8, generator=g)
    heat = torch.tensor([[0.5], [2.0]])
    capped = make_head(
        monkeypatch, FakeHead(weight, 90), 5, transform=lambda x: 3 * torch.tanh(x / 3)
    )
    found = capped(hidden, heat)
    logits = 3 * torch.tanh(hidden @ weight.T / 3)
    assert torch.allclose(found.logits, logits.topk(5).values, atol=1e-5)
    assert torch.allclose(found.log_norm, (logits / heat).logsumexp(-1), atol=1e-5)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [(200, 2), (1000, 2), (1000, 4), (63, 2), (75, 2), (130, 4)],
    ids=lambda n: str(n),
)
def test_ranks_together(monkeypatch: pytest.MonkeyPatch, words: int, ranks: int) -> None:
    """Global ids, whatever a rank's share is: fewer words than K, or none at all."""
    g = torch.Generator().manual_seed(words + ranks)
    weight, hidden = torch.randn(words, 8, generator=g), torch.randn(6, 8, generator=g)
    heat = torch.full((6, 1), 0.7)
    k, parts = 16, []
    monkeypatch.setattr(
        candidates, "tensor_model_parallel_all_gather", lambda x, dim: parts.append(x) or x
    )
    for rank in range(ranks):
        make_head(monkeypatch, FakeHead(weight, words, ranks, rank), k, ranks)(hidden, heat)
    # Each rank handed over its values, its tokens and its norm: now all receive all of them.
    gathered = iter([torch.cat(parts[i::3], -1) for i in range(3)])
    monkeypatch.setattr(
        candidates, "tensor_model_parallel_all_gather", lambda x, dim: next(gathered)
    )
    found = make_head(monkeypatch, FakeHead(weight, words, ranks, 0), k, ranks)(hidden, heat)
    logits = hidden @ weight.T
    assert found.tokens.shape == (6, k)
    assert torch.equal(found.tokens, logits.topk(k).indices)
    assert torch.allclose(found.logits, logits.topk(k).values, atol=1e-5)
    assert torch.allclose(found.log_norm, (logits / heat).logsumexp(-1), atol=1e-5)


def test_flashinfer_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own signature, and rows that follow one another, which its kernel requires."""
    flashinfer = pytest.importorskip("flashinfer")
    signature = inspect.signature(flashinfer.top_k)

    def stand_in(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = signature.bind(*args, **kwargs).arguments
        assert given["input"].is_contiguous() and given["sorted"] and given["deterministic"]
        values, index = given["input"].topk(given["k"])
        return values, index.int()

    monkeypatch.setattr(flashinfer, "top_k", stand_in)
    cut = torch.randn(3, 80)[:, :70]
    values, index = radix_top_k(cut, 5)
    assert index.dtype == torch.int64
    assert torch.equal(cut.gather(1, index), values)
    assert torch.equal(values, cut.topk(5).values)
