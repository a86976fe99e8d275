"""What holds for every tree, of which sizes there are, and what the core of the package imports."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lattices import build, cases, lattice_of

import dflash2_sglang.tree
from dflash2_sglang.tree.build import Tree, ancestor_mask, assemble, capacity, links
from dflash2_sglang.tree.lattice import Lattice

torch.set_num_threads(1)


def _check_well_formed(tree: Tree, max_children: int) -> None:
    """Everything but `tokens` and `log_prob` follows from `parent`, in plain Python."""
    for b in range(tree.tokens.shape[0]):
        parent = tree.parent[b].tolist()
        assert parent[0] == -1
        assert all(0 <= p < i for i, p in enumerate(parent[1:], 1))
        children: dict[int, list[int]] = {i: [] for i in range(len(parent))}
        for i, p in enumerate(parent[1:], 1):
            children[p].append(i)
        for i in range(len(parent)):
            line = [i]
            while parent[line[-1]] >= 0:
                line.append(parent[line[-1]])
            assert tree.mask[b, i].nonzero().flatten().tolist() == sorted(line)
            assert int(tree.depth[b, i]) == len(line) - 1
            assert int(tree.first_child[b, i]) == (children[i][0] if children[i] else -1)
            after = [c for c in children[parent[i]] if c > i] if i else []
            assert int(tree.next_sibling[b, i]) == (after[0] if after else -1)
            tokens = tree.tokens[b, children[i]].tolist()
            assert len(set(tokens)) == len(tokens) <= max_children


@settings(max_examples=400, deadline=None)
@given(cases())
def test_properties(case: tuple[Lattice, int, int]) -> None:
    lattice, num_nodes, max_children = case
    before = lattice.log_probs.clone()
    tree = build(lattice, num_nodes, max_children)
    assert torch.equal(lattice.log_probs.nan_to_num(), before.nan_to_num())  # inputs untouched

    _check_well_formed(tree, max_children)
    log_prob = tree.log_prob
    assert not bool(log_prob.isnan().any())
    assert bool((log_prob[:, 0] == 0).all())
    assert bool((log_prob[:, 1:] <= log_prob[:, :-1]).all())  # sorted
    assert bool((log_prob[:, 1:] <= log_prob.gather(1, tree.parent[:, 1:])).all())
    assert tree.tokens.dtype == tree.parent.dtype == tree.depth.dtype == torch.int64
    assert tree.first_child.dtype == tree.next_sibling.dtype == torch.int64
    assert log_prob.dtype == torch.float32
    assert tree.mask.dtype == torch.bool

    again = build(lattice, num_nodes, max_children)
    assert all(torch.equal(x, y) for x, y in zip(tree[:-1], again[:-1], strict=True))
    for b in range(lattice.tokens.shape[0]):
        one = build(Lattice(*(x[b : b + 1] for x in lattice)), num_nodes, max_children)
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(tree[:-1], one[:-1], strict=True))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(0, 10**6), st.booleans())
def test_links_and_mask_of_any_tree(nodes: int, seed: int, deep: bool) -> None:
    """Also of trees that no lattice gives: a node may have any parent before it."""
    rng = np.random.default_rng(seed)
    low = [max(0, i - 2) if deep else 0 for i in range(nodes)]
    parent = torch.tensor(
        [[-1, *(int(rng.integers(low[i], i)) for i in range(1, nodes))] for _ in range(2)]
    )
    tokens = torch.arange(nodes).expand(2, nodes)
    _check_well_formed(assemble(tokens, parent, torch.zeros(2, nodes), nodes - 1), nodes)
    assert torch.equal(ancestor_mask(parent, nodes - 1), ancestor_mask(parent, 4 * nodes))
    assert [x.shape for x in links(parent)] == [(2, nodes)] * 2


def test_log_probs_above_zero_are_cut() -> None:
    """Softmax may round to just above 1; a child must not overtake its parent for that."""
    lattice = lattice_of(0, 1, 4, 2, "constant")
    lattice.log_probs.fill_(1e-7)
    tree = build(lattice, 6, 2)
    assert tree.log_prob.tolist() == [[0.0] * 6]
    assert tree.depth.tolist() == [[0, 1, 1, 2, 2, 2]]


def test_marginals_expanded_over_predecessors() -> None:
    """A plain DFlash lattice is an expanded view; it gives the tree of its contiguous copy."""
    dense = lattice_of(4, 2, 5, 6, "random")
    row = dense.log_probs[:, :, :1]
    view = Lattice(dense.tokens, row.expand(2, 5, 6, 6))
    copy = Lattice(dense.tokens, view.log_probs.contiguous())
    for x, y in zip(build(view, 20, 6)[:-1], build(copy, 20, 6)[:-1], strict=True):
        assert torch.equal(x, y)


def test_empty_batch() -> None:
    lattice = Lattice(torch.zeros(0, 3, 4, dtype=torch.int64), torch.zeros(0, 3, 4, 4))
    assert build(lattice, 5, 2).mask.shape == (0, 5, 5)


# --- Sizes ---


def test_capacity() -> None:
    assert [capacity(d, 1) for d in (0, 1, 7)] == [1, 2, 8]
    assert [capacity(d, 3) for d in (0, 1, 2, 3)] == [1, 4, 13, 40]


@pytest.mark.parametrize(
    ("num_nodes", "max_children", "message"),
    [
        (1, 2, "num_nodes.*2 and 15.*got 1"),
        (16, 2, "num_nodes.*15.*depth 3.*2 children.*got 16"),
        (5, 1, "num_nodes.*2 and 4.*got 5"),
        (4, 5, "max_children.*4 candidates.*got 5"),
        (4, 0, "max_children.*got 0"),
    ],
)
def test_bad_sizes(num_nodes: int, max_children: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(lattice_of(0, 1, 3, 4, "random"), num_nodes, max_children)


def test_bad_lattice() -> None:
    lattice = Lattice(torch.zeros(1, 3, 4, dtype=torch.int64), torch.zeros(1, 3, 4, 5))
    with pytest.raises(ValueError, match=r"\(1, 3, 4, 5\).*\(1, 3, 4, 4\)"):
        build(lattice, 4, 2)


def test_the_core_imports_no_engine() -> None:
    allowed = {"__future__", "math", "typing", "torch", "dflash2_sglang"}
    for file in Path(dflash2_sglang.tree.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert {name.split(".")[0] for name in names} <= allowed, file
            own = [name for name in names if name.startswith("dflash2_sglang")]
            assert all(name.startswith("dflash2_sglang.tree") for name in own), file
