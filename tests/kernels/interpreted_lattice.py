"""The lattice kernel against torch. Run by test_interpreted.py, under Triton's interpreter."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import Maker, Sizes, lattice_pair, require_close
from quick_interpreter import install

from dflash2_sglang import kernels, tree

torch.set_num_threads(1)
install()

DTYPES = [torch.float32, torch.bfloat16]


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    width, depth = draw(st.integers(4, 32)), draw(st.integers(3, 31))
    batch = draw(st.integers(1, max(1, 24 // depth)))
    return Sizes(batch, depth, width, 2, 1, rank=draw(st.integers(1, 140)), vocab=64)


@settings(max_examples=120, deadline=None)
@given(sizes(), st.integers(0, 999), st.sampled_from(DTYPES), st.booleans(), st.booleans())
@example(Sizes(64, 3, 4, 2, 1), 0, torch.float32, True, True)
@example(Sizes(1, 31, 32, 2, 1, rank=256), 1, torch.bfloat16, False, True)
@example(Sizes(1, 7, 16, 2, 1, rank=256, vocab=5000), 2, torch.bfloat16, True, True)
def test_lattice(s: Sizes, seed: int, dtype: torch.dtype, heated: bool, from_codes: bool) -> None:
    source = "codes" if from_codes else "pair"
    require_close(lattice_pair(Maker(seed), s, dtype, heated, source), 2e-5)


@settings(max_examples=30, deadline=None)
@given(sizes(), st.integers(0, 999), st.booleans())
def test_without_a_selector(s: Sizes, seed: int, heated: bool) -> None:
    pair = lattice_pair(Maker(seed), s, torch.float32, heated, "none")
    require_close(pair, 2e-5)
    assert pair.ours().log_probs.stride(2) == 0  # one row, not K copies


def test_impossible_and_broken_logits() -> None:
    """A missing candidate of a sharded vocabulary, a position of none, and NaN."""
    m = Maker(0)
    tokens = m.tokens(Sizes(4, 3, 5, 2, 1))
    unary = m.normal(4, 3, 5)
    unary[0, :, 3:] = -torch.inf
    unary[1] = -torch.inf
    unary[2, 1, 2] = torch.nan
    norm = unary.nan_to_num(neginf=-9.0).logsumexp(-1)
    norm[3] -= 1  # candidates that hold more than everything
    for pair in (None, m.normal(4, 3, 5, 5)):
        want = tree.build_lattice(tokens, unary, norm, None, pair).log_probs
        ours = kernels.build_lattice(tokens, unary, norm, None, pair).log_probs
        torch.testing.assert_close(ours, want, rtol=2e-5, atol=2e-5, equal_nan=True)
        assert ours.isnan().any() and (ours == -torch.inf).any()
        assert bool((ours[3].exp().sum(-1) < 1.0001).all())


def test_no_requests() -> None:
    m, empty = Maker(0), Sizes(0, 3, 4, 2, 1)
    require_close(lattice_pair(m, empty, torch.float32, True), 0)
    require_close(lattice_pair(m, empty, torch.float32, False, "none"), 0)


def test_it_is_the_kernel_that_runs() -> None:
    assert kernels.uses_triton(torch.zeros(1))
