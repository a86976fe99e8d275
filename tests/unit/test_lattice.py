"""The lattice against naive float64 loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dflash2_sglang.tree.lattice import build_lattice, pair_scores

torch.set_num_threads(1)


def _logits(seed: int, batch: int, depth: int, width: int, vocab: int) -> tuple[Tensor, ...]:
    """(full logits [B, D, V], tokens [B, D, K] best first, unary [B, D, K])."""
    full = torch.randn(batch, depth, vocab, generator=torch.Generator().manual_seed(seed)) * 4
    unary, tokens = full.topk(width, -1)
    return full, tokens, unary


def _naive(
    full: Tensor, unary: Tensor, temperature: list[float], pair: Tensor | None
) -> list[list[list[list[float]]]]:
    """The formula of the design, one number at a time in Python floats."""
    batch, depth, width = unary.shape
    out = []
    for b in range(batch):
        heat = temperature[b]
        rows = []
        for t in range(depth):
            norm = math.fsum(math.exp(x / heat) for x in full[b, t].tolist())
            mass = math.fsum(math.exp(x / heat) for x in unary[b, t].tolist()) / norm
            block = []
            for a in range(width):
                scores = unary[b, t].tolist()
                if pair is None:
                    block.append([x / heat - math.log(norm) for x in scores])
                    continue
                scores = [x + p for x, p in zip(scores, pair[b, t, a].tolist(), strict=True)]
                total = math.fsum(math.exp(x / heat) for x in scores)
                block.append([x / heat - math.log(total) + math.log(mass) for x in scores])
            rows.append(block)
        out.append(rows)
    return out


@pytest.mark.parametrize(("batch", "depth", "width", "rank"), [(1, 1, 1, 1), (3, 4, 5, 2)])
def test_pair_scores_is_the_triple_product(batch: int, depth: int, width: int, rank: int) -> None:
    hidden = torch.randn(batch, depth, rank, dtype=torch.float64)
    before = torch.randn(batch, depth, width, rank, dtype=torch.float64)
    after = torch.randn(batch, depth, width, rank, dtype=torch.float64)
    want = torch.einsum("btr,btar,btcr->btac", hidden, before, after)
    assert torch.allclose(pair_scores(hidden, before, after), want, atol=1e-12)


@pytest.mark.parametrize("temperature", [None, [1.0, 1.0, 1.0], [0.3, 1.0, 1.7]])
@pytest.mark.parametrize("selector", [True, False])
def test_against_the_naive_loop(temperature: list[float] | None, selector: bool) -> None:
    full, tokens, unary = _logits(0, 3, 4, 5, 40)
    pair = torch.randn(3, 4, 5, 5) * 2 if selector else None
    heat = torch.ones(3) if temperature is None else torch.tensor(temperature)
    log_norm = (full / heat.view(-1, 1, 1)).logsumexp(-1)
    got = build_lattice(tokens, unary, log_norm, None if temperature is None else heat, pair)
    want = torch.tensor(_naive(full, unary, heat.tolist(), pair))
    assert got.tokens is tokens
    assert got.log_probs.dtype == torch.float32
    assert got.log_probs.shape == (3, 4, 5, 5)
    assert torch.allclose(got.log_probs, want, atol=2e-5)


def test_low_precision_inputs_are_computed_in_float32() -> None:
    full, tokens, unary = _logits(1, 2, 3, 4, 20)
    unary = unary.bfloat16()
    pair = torch.randn(2, 3, 4, 4).bfloat16()
    got = build_lattice(tokens, unary, full.logsumexp(-1), None, pair)
    want = build_lattice(tokens, unary.float(), full.logsumexp(-1), None, pair.float())
    assert got.log_probs.dtype == torch.float32
    assert torch.equal(got.log_probs, want.log_probs)


@pytest.mark.parametrize("selector", [True, False])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("vocab", [8, 9, 500])
def test_mass_of_a_row(selector: bool, temperature: float, vocab: int) -> None:
    """A row holds what its candidates hold in the vocabulary: all of it when K = V, never more."""
    width = 8
    full, tokens, unary = _logits(vocab, 4, 6, width, vocab)
    heat = torch.full((4,), temperature)
    log_norm = (full / temperature).logsumexp(-1)
    pair = torch.randn(4, 6, width, width) if selector else None
    got = build_lattice(tokens, unary, log_norm, heat, pair).log_probs
    assert bool((got <= 1e-6).all())
    mass = got.double().exp().sum(-1)
    share = (full / temperature).double().softmax(-1).gather(2, tokens).sum(-1, keepdim=True)
    assert torch.allclose(mass, share.expand_as(mass), atol=1e-5)
    assert bool((mass <= 1 + 1e-6).all())


@pytest.mark.parametrize("selector", [True, False])
def test_rounding_of_the_norm_cannot_create_mass(selector: bool) -> None:
    """log_norm a little too small, as a sum in another order gives, does not push mass above 1."""
    _, tokens, unary = _logits(2, 2, 3, 4, 4)
    pair = torch.zeros(2, 3, 4, 4) if selector else None
    low = unary.logsumexp(-1) - 1e-3
    got = build_lattice(tokens, unary, low, None, pair).log_probs
    assert bool((got <= 0).all())
    assert bool((got.exp().sum(-1) <= 1 + 1e-6).all())


def test_equal_pair_scores_leave_the_marginals() -> None:
    full, tokens, unary = _logits(3, 2, 3, 4, 30)
    log_norm = full.logsumexp(-1)
    flat = build_lattice(tokens, unary, log_norm, None, torch.full((2, 3, 4, 4), 1.5))
    plain = build_lattice(tokens, unary, log_norm)
    assert torch.allclose(flat.log_probs, plain.log_probs, atol=1e-5)


def test_batch_invariance() -> None:
    full, tokens, unary = _logits(4, 3, 2, 4, 30)
    pair, log_norm = torch.randn(3, 2, 4, 4), full.logsumexp(-1)
    heat = torch.tensor([0.5, 1.0, 2.0])
    whole = build_lattice(tokens, unary, log_norm, heat, pair).log_probs
    for b in range(3):
        one = slice(b, b + 1)
        part = build_lattice(tokens[one], unary[one], log_norm[one], heat[one], pair[one])
        assert torch.equal(whole[one], part.log_probs)
