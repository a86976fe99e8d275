"""The tree kernel against torch: every tensor equal. Run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import KINDS, Maker, Sizes, require_equal, tree_pair
from quick_interpreter import install

from dflash2_sglang import kernels, tree
from dflash2_sglang.tree.build import capacity
from dflash2_sglang.tree.lattice import Lattice

torch.set_num_threads(1)
install()


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    width, depth = draw(st.integers(4, 32)), draw(st.integers(3, 31))
    children = draw(st.integers(1, width))
    nodes = draw(st.integers(2, min(48, capacity(depth, children))))
    batch = draw(st.integers(1, max(1, 48 // nodes)))
    return Sizes(batch, depth, width, nodes, children)


@settings(max_examples=100, deadline=None)
@given(sizes(), st.integers(0, 999), st.sampled_from(KINDS))
@example(Sizes(64, 3, 4, 2, 1), 0, "ties")
@example(Sizes(64, 7, 16, 8, 4), 1, "ties")
@example(Sizes(2, 7, 16, 64, 16), 2, "ties")
@example(Sizes(1, 31, 32, 128, 32), 3, "ties")
@example(Sizes(1, 31, 8, 32, 1), 4, "random")  # a chain
@example(Sizes(1, 31, 32, 128, 32), 5, "holes")
@example(Sizes(1, 31, 4, 128, 2), 6, "broken")
@example(Sizes(1, 5, 16, 66, 16), 7, "hopeless")  # more nodes than bits in a word
@example(Sizes(2, 3, 4, 85, 4), 8, "constant")  # every path there is
@example(Sizes(2, 2, 1, 3, 1), 9, "random")
def test_tree(s: Sizes, seed: int, kind: str) -> None:
    require_equal(tree_pair(Maker(seed), s, kind))


def test_rounded_sums_tie_as_in_torch() -> None:
    """Numbers so small that adding them to their parents' often changes nothing."""
    m, s = Maker(3), Sizes(4, 5, 6, 40, 6)
    lattice = m.lattice(s, "random")
    small = torch.where(m.uniform(*lattice.log_probs.shape) < 0.5, 2.0**-26, 1.0)
    small[:, 0] = small[:, 0, :1].clone()
    parts = (Lattice(lattice.tokens, lattice.log_probs * small), m.integers(0, 9, 4), 40, 6)
    want = tree.build_tree(*parts)
    path = want.log_prob
    assert bool((path[:, 1:] == path[:, :-1]).any())
    assert all(
        torch.equal(x, y) for x, y in zip(kernels.build_tree(*parts)[:-1], want[:-1], strict=True)
    )


def test_one_row_for_all_predecessors() -> None:
    """A lattice without a selector is a view with a stride of 0."""
    m, s = Maker(5), Sizes(2, 4, 6, 20, 6)
    dense = m.lattice(s, "random")
    view = Lattice(dense.tokens, dense.log_probs[:, :, :1].expand(2, 4, 6, 6))
    anchor = m.integers(0, 9, 2)
    ours, want = kernels.build_tree(view, anchor, 20, 6), tree.build_tree(view, anchor, 20, 6)
    assert all(torch.equal(x, y) for x, y in zip(ours[:-1], want[:-1], strict=True))


def test_no_requests() -> None:
    require_equal(tree_pair(Maker(0), Sizes(0, 3, 4, 5, 2), "random"))


def test_bad_sizes_are_refused_as_by_torch() -> None:
    m = Maker(0)
    lattice, anchor = m.lattice(Sizes(1, 3, 4, 2, 1), "random"), m.integers(0, 9, 1)
    for nodes, children in ((1, 2), (16, 2), (4, 5)):
        with pytest.raises(ValueError, match=r"num_nodes|max_children"):
            kernels.build_tree(lattice, anchor, nodes, children)
