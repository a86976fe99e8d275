"""The walk kernels against torch: every token equal. Run by test_interpreted.py."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import Maker, Sizes, greedy_pair, require_equal, sampled_pair
from quick_interpreter import install

from dflash2_sglang import kernels, tree
from dflash2_sglang.tree.build import capacity

torch.set_num_threads(1)
install()

SHAPES = ["random", "chain", "best"]


@st.composite
def sizes(draw: st.DrawFn, most: int = 128) -> Sizes:
    width, depth = draw(st.integers(4, 32)), draw(st.integers(3, 31))
    nodes = draw(st.integers(2, min(most, capacity(depth, width))))
    batch = draw(st.integers(1, max(1, min(64, most // nodes))))
    return Sizes(batch, depth, width, nodes, width, vocab=draw(st.integers(nodes + 32, 400)))


@settings(max_examples=150, deadline=None)
@given(sizes(), st.integers(0, 999), st.sampled_from(SHAPES))
@example(Sizes(64, 3, 4, 2, 1), 0, "chain")
@example(Sizes(64, 7, 16, 16, 4), 1, "best")
@example(Sizes(2, 31, 16, 128, 4), 2, "best")
def test_greedy(s: Sizes, seed: int, kind: str) -> None:
    require_equal(greedy_pair(Maker(seed), s, kind))


@settings(max_examples=120, deadline=None)
@given(
    sizes(64),
    st.integers(0, 999),
    st.sampled_from(SHAPES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
@example(Sizes(64, 7, 16, 16, 4), 1, "best", True, False, False)
@example(Sizes(2, 31, 16, 128, 4), 2, "best", True, True, False)
@example(Sizes(2, 7, 16, 32, 4, vocab=9000), 3, "best", True, True, False)  # more than one block
@example(Sizes(2, 7, 16, 32, 4, vocab=4096), 4, "random", False, True, True)
@example(Sizes(2, 7, 16, 32, 4, vocab=4097), 5, "random", False, False, True)
def test_sampled(s: Sizes, seed: int, kind: str, mixed: bool, random: bool, exact: bool) -> None:
    require_equal(sampled_pair(Maker(seed), s, kind, mixed=mixed, random=random, exact=exact))


@settings(max_examples=25, deadline=None)
@given(sizes(32), st.integers(0, 999), st.booleans())
def test_other_precisions(s: Sizes, seed: int, random: bool) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        require_equal(sampled_pair(Maker(seed), s, "best", random=random, dtype=dtype))


def test_neither_kind_reads_what_belongs_to_the_other() -> None:
    m, s = Maker(1), Sizes(6, 4, 5, 12, 5)
    t = m.tree(s, "best")
    probs, follows = m.target(s, t, False), t.tokens.gather(1, t.first_child.clamp(min=0))
    greedy = torch.tensor([True, False] * 3)
    probs[greedy], follows[~greedy] = torch.nan, -5
    coins = m.uniform(6, 5)
    nodes = (t.tokens, t.parent, t.mask, t.depth, follows, probs)
    parts = (*nodes, coins[:, :4], coins[:, 4], greedy, 4)
    ours, want = kernels.mixed_walk(*parts), tree.mixed_walk(*parts)
    assert all(torch.equal(x, y) for x, y in zip(ours, want, strict=True))


def test_nothing_left_to_draw_from_gives_the_likeliest() -> None:
    """The children hold all mass, and the coin lies beyond them."""
    tokens, parent = torch.tensor([[0, 3, 5]]), torch.tensor([[-1, 0, 0]])
    t = tree.build.assemble(tokens, parent, torch.zeros(1, 3), 1)
    probs = torch.zeros(1, 3, 8)
    probs[0, :, 3], probs[0, :, 5] = 0.25, 0.5
    one = torch.tensor([[0.99]])
    parts = (t.tokens, t.parent, t.mask, t.depth, probs, one, one[0], 1)
    ours = kernels.sampling_walk(*parts)
    assert (ours.length.tolist(), ours.next_token.tolist()) == ([1], [5])
    assert all(torch.equal(x, y) for x, y in zip(ours, tree.sampling_walk(*parts), strict=True))


def test_a_coin_on_the_edge_between_two_blocks_of_the_vocabulary() -> None:
    """The word before the edge ends at the coin, so the draw is the first one after it."""
    tokens, parent = torch.tensor([[0, 4096]]), torch.tensor([[-1, 0]])
    t = tree.build.assemble(tokens, parent, torch.zeros(1, 2), 1)
    probs = torch.full((1, 2, 4097), 2.0**-12)
    half = torch.tensor([[0.5]])
    parts = (t.tokens, t.parent, t.mask, t.depth, probs, half, half[0], 1)
    ours = kernels.sampling_walk(*parts)
    assert (ours.length.tolist(), ours.next_token.tolist()) == ([1], [2048])
    assert all(torch.equal(x, y) for x, y in zip(ours, tree.sampling_walk(*parts), strict=True))


def test_no_requests() -> None:
    empty = Sizes(0, 3, 4, 5, 4)
    require_equal(greedy_pair(Maker(0), empty, "random"))
    require_equal(sampled_pair(Maker(0), empty, "random"))
