"""A request's sampling filters against a plain loop, and against SGLang's own sampler."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2_sglang.tree.filters import filtered_probs

ALL = 1 << 30  # SGLang's top-k of a request that set none


def loop(logits: list[float], heat: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """In float64, one token at a time."""
    highest = max(logits)
    weights = [math.exp((x - highest) / heat) for x in logits]
    probs = [w / math.fsum(weights) for w in weights]
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, above = [0.0] * len(probs), 0.0
    for rank, token in enumerate(order):
        if rank < top_k and above <= top_p and probs[token] >= min_p * probs[order[0]]:
            kept[token] = probs[token]
        above += probs[token]
    total = math.fsum(kept)
    return [p / total for p in kept]


def is_clear(
    logits: list[float], heat: float, top_k: int, top_p: float, min_p: float, margin: float = 1e-4
) -> bool:
    """No token lies so near a limit that float32 may put it on the other side."""
    highest = max(logits)
    weights = [math.exp((x - highest) / heat) for x in logits]
    ranked = sorted((w / math.fsum(weights) for w in weights), reverse=True)
    above = 0.0
    for p in ranked:
        if abs(above - top_p) < margin or abs(p - min_p * ranked[0]) < margin * ranked[0]:
            return False
        above += p
    return top_k >= len(ranked) or ranked[top_k - 1] - ranked[top_k] > margin * ranked[0]


requests = st.tuples(
    st.floats(0.2, 3.0),
    st.sampled_from([1, 2, 3, 5, 8, ALL]),
    st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.95, 1.0]),
    st.sampled_from([0.0, 0.02, 0.1, 0.5]),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[float, int, float, float]]]:
    rows, nodes, words = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(2, 12))
    seed = draw(st.integers(0, 10**6))
    logits = torch.randn(rows, nodes, words, generator=torch.Generator().manual_seed(seed)) * 2
    return logits, [draw(requests) for _ in range(rows)]


def columns(kinds: list[tuple[float, int, float, float]]) -> tuple[torch.Tensor, ...]:
    heat, top_k, top_p, min_p = zip(*kinds, strict=True)
    return (
        torch.tensor(heat).view(-1, 1),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
    )


@settings(max_examples=150, deadline=None)
@given(batches())
def test_equals_the_loop(
    batch: tuple[torch.Tensor, list[tuple[float, int, float, float]]],
) -> None:
    logits, kinds = batch
    heat, top_k, top_p, min_p = columns(kinds)
    found = filtered_probs(logits, temperature=heat, top_k=top_k, top_p=top_p, min_p=min_p)
    assert found.shape == logits.shape
    assert found.dtype == torch.float32
    compared = 0
    for row, kind in zip(range(len(kinds)), kinds, strict=True):
        for node in range(logits.shape[1]):
            words = logits[row, node].double().tolist()
            if is_clear(words, *kind):
                compared += 1
                expected = torch.tensor(loop(words, *kind))
                assert torch.allclose(found[row, node], expected, atol=2e-6)
    assert torch.allclose(found.sum(-1), torch.ones(found.shape[:-1]), atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(batches(), st.booleans())
def test_equals_sglangs_sampler(
    batch: tuple[torch.Tensor, list[tuple[float, int, float, float]]], bounded: bool
) -> None:
    """The same tokens are kept, ties and limits included."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    logits, kinds = batch
    heat, top_k, top_p, min_p = columns(kinds)
    words = logits.shape[-1]
    bound = int(top_k.max()) if bounded else None
    found = filtered_probs(
        logits, temperature=heat, top_k=top_k, top_p=top_p, min_p=min_p, max_top_k=bound
    )
    for node in range(logits.shape[1]):
        probs = (logits[:, node] / heat).softmax(-1)
        out = top_k_top_p_min_p_sampling_from_probs_torch(
            probs.clone(), top_k, top_p, min_p, True, None, None, return_filtered_probs=True
        )
        weights, permutation = out[1], out[2]
        theirs = torch.zeros(len(kinds), words).scatter_(1, permutation.long(), weights)
        theirs /= theirs.sum(-1, keepdim=True)
        assert torch.equal(found[:, node] > 0, theirs > 0)
        assert torch.allclose(found[:, node], theirs, atol=1e-6)


def test_absent_filters_keep_everything() -> None:
    logits = torch.tensor([[[0.0, 1.0, -30.0]]])
    found = filtered_probs(logits, temperature=torch.tensor([2.0]))
    assert torch.allclose(found, (logits / 2).softmax(-1))
    assert (found > 0).all()


def test_a_bound_changes_nothing() -> None:
    logits = torch.randn(4, 3, 40, generator=torch.Generator().manual_seed(0))
    top_k = torch.tensor([1, 7, 3, 7])
    options = {"temperature": torch.ones(4), "top_k": top_k, "top_p": torch.full((4,), 0.9)}
    free = filtered_probs(logits, **options)
    bounded = filtered_probs(logits, max_top_k=7, **options)
    assert torch.equal(free > 0, bounded > 0)
    assert torch.allclose(free, bounded, atol=1e-6)
    assert ((free > 0).sum(-1) <= top_k.view(-1, 1)).all()


def test_of_tied_tokens_so_many_are_kept_as_top_k_says() -> None:
    found = filtered_probs(
        torch.zeros(1, 1, 10), temperature=torch.ones(1), top_k=torch.tensor([3])
    )
    assert (found > 0).sum() == 3
    assert found.max() == pytest.approx(1 / 3)


def test_bfloat16_logits_are_filtered_in_float32() -> None:
    logits = torch.randn(2, 2, 30, generator=torch.Generator().manual_seed(1)).bfloat16()
    options = {"temperature": torch.tensor([0.7, 1.3]), "top_p": torch.tensor([0.8, 0.6])}
    assert torch.equal(filtered_probs(logits, **options), filtered_probs(logits.float(), **options))


@given(
    st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), min_size=2, max_size=12),
    st.integers(1, 12),
    st.integers(0, 5),
)
def test_ties_go_to_the_lowest_ids_whatever_is_in_the_batch(
    logits: list[float], k: int, slack: int
) -> None:
    """The bound on top_k, which depends on the other requests, chooses how tokens are ranked."""
    row = torch.tensor([[logits]])
    asked = {"temperature": torch.ones(1), "top_k": torch.tensor([k])}
    bounded = filtered_probs(row, **asked, max_top_k=k + slack)
    free = filtered_probs(row, **asked)
    assert torch.equal(bounded > 0, free > 0) and torch.allclose(bounded, free)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    assert sorted(free[0, 0].nonzero().flatten().tolist()) == sorted(order[:k])
