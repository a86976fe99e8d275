"""The tree against brute force, against best-first search, and against its own definition."""

from __future__ import annotations

import ast
import heapq
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dflash2_sglang.tree
from dflash2_sglang.tree.build import Tree, ancestor_mask, assemble, build_tree, capacity, links
from dflash2_sglang.tree.lattice import Lattice

torch.set_num_threads(1)

VOCAB = 200
ANCHOR = 777
# A node for the oracles: its place in the order, and the candidates on its path.
Key = tuple[Any, ...]
Node = tuple[Key, tuple[int, ...]]


# --- Oracles: plain Python on one request, floats rounded as float32 sums are ---


def _ranks(row: list[float], max_children: int) -> list[int]:
    """Candidates of a row, best first, at most max_children."""
    return sorted(range(len(row)), key=lambda c: (-row[c], c))[:max_children]


def _children(node: Node, rows: list[list[list[float]]], max_children: int) -> list[Node]:
    key, path = node
    if len(path) == len(rows):
        return []
    row = rows[len(path)][path[-1] if path else 0]
    row = [min(x, 0.0) if x == x else -np.inf for x in row]
    out = []
    for rank, c in enumerate(_ranks(row, max_children)):
        total = float(np.float32(-key[0]) + np.float32(row[c]))
        out.append(((-total, len(path) + 1, key, rank), (*path, c)))
    return out


ROOT: Node = ((-0.0, 0), ())


def _brute_force(rows: list[list[list[float]]], num_nodes: int, max_children: int) -> list[Node]:
    """Sort every path of the lattice."""
    level, everything = [ROOT], [ROOT]
    for _ in rows:
        level = [child for node in level for child in _children(node, rows, max_children)]
        everything += level
    return sorted(everything)[:num_nodes]


def _best_first(rows: list[list[list[float]]], num_nodes: int, max_children: int) -> list[Node]:
    """Pop the best open path, push its children."""
    heap, out = [ROOT], []
    while heap and len(out) < num_nodes:
        node = heapq.heappop(heap)
        out.append(node)
        for child in _children(node, rows, max_children):
            heapq.heappush(heap, child)
    return out


def _check_against(oracle: Any, lattice: Lattice, tree: Tree, max_children: int) -> None:
    num_nodes = tree.tokens.shape[1]
    for b in range(tree.tokens.shape[0]):
        want = oracle(lattice.log_probs[b].tolist(), num_nodes, max_children)
        index = {path: i for i, (_, path) in enumerate(want)}
        tokens = [
            int(lattice.tokens[b, len(path) - 1, path[-1]]) if path else ANCHOR for _, path in want
        ]
        assert tree.tokens[b].tolist() == tokens
        assert tree.parent[b].tolist() == [index[path[:-1]] if path else -1 for _, path in want]
        assert tree.depth[b].tolist() == [len(path) for _, path in want]
        assert tree.log_prob[b].tolist() == [-key[0] for key, _ in want]


# --- Inputs ---


def _tokens(rng: np.random.Generator, batch: int, depth: int, width: int) -> Tensor:
    """Distinct within a position, not between positions."""
    ids = [[rng.permutation(VOCAB)[:width] for _ in range(depth)] for _ in range(batch)]
    return torch.tensor(np.array(ids).reshape(batch, depth, width))


def _lattice(seed: int, batch: int, depth: int, width: int, kind: str) -> Lattice:
    rng = np.random.default_rng(seed)
    shape = (batch, depth, width, width)
    if kind == "random":
        values = torch.log_softmax(torch.tensor(rng.normal(size=shape) * 3).float(), -1)
    elif kind == "ties":  # multiples of 0.25: sums are exact, so equal paths are exactly equal
        values = torch.tensor(-0.25 * rng.integers(0, 4, shape)).float()
    elif kind == "holes":
        values = torch.tensor(-0.25 * rng.integers(0, 4, shape)).float()
        values[torch.tensor(rng.random(shape) < 0.5)] = -torch.inf
    elif kind == "constant":
        values = torch.full(shape, -0.5)
    elif kind == "hopeless":
        values = torch.full(shape, -torch.inf)
    elif kind == "broken":
        values = torch.tensor(-0.25 * rng.integers(0, 4, shape)).float()
        values[torch.tensor(rng.random(shape) < 0.3)] = torch.nan
        values[torch.tensor(rng.random(shape) < 0.1)] = torch.inf
    else:
        raise AssertionError(kind)
    values[:, 0] = values[:, 0, :1]  # the anchor is the only predecessor of position 0
    return Lattice(_tokens(rng, batch, depth, width), values)


KINDS = ["random", "ties", "holes", "constant", "hopeless", "broken"]


def _build(lattice: Lattice, num_nodes: int, max_children: int) -> Tree:
    anchor = torch.full((lattice.tokens.shape[0],), ANCHOR)
    return build_tree(lattice, anchor, num_nodes, max_children)


# --- Which nodes ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (1, 4), (2, 3), (3, 3), (4, 2), (3, 4)])
def test_brute_force(kind: str, depth: int, width: int) -> None:
    for max_children in range(1, width + 1):
        most = capacity(depth, max_children)
        for num_nodes in sorted({2, 3, depth, depth + 1, most // 2, most - 1, most}):
            if not 2 <= num_nodes <= most:
                continue
            lattice = _lattice(num_nodes * 7 + max_children, 2, depth, width, kind)
            tree = _build(lattice, num_nodes, max_children)
            _check_against(_brute_force, lattice, tree, max_children)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("depth", "width", "num_nodes", "max_children"),
    [
        (7, 16, 16, 4),
        (7, 16, 64, 16),
        (15, 16, 8, 16),  # fewer nodes than positions
        (31, 32, 64, 32),
        (31, 8, 32, 1),  # a chain
        (2, 32, 500, 32),
        (5, 3, 2, 3),
        (31, 2, 100, 2),
    ],
)
def test_best_first(kind: str, depth: int, width: int, num_nodes: int, max_children: int) -> None:
    lattice = _lattice(3, 3, depth, width, kind)
    tree = _build(lattice, num_nodes, max_children)
    _check_against(_best_first, lattice, tree, max_children)


def test_one_child_per_node_is_the_greedy_chain() -> None:
    lattice = _lattice(5, 2, 6, 5, "random")
    tree = _build(lattice, 7, 1)
    for b in range(2):
        chain, at = [], 0
        for t in range(6):
            at = int(lattice.log_probs[b, t, at].argmax())
            chain.append(int(lattice.tokens[b, t, at]))
        assert tree.tokens[b].tolist() == [ANCHOR, *chain]
        assert tree.parent[b].tolist() == list(range(-1, 6))


def test_no_set_of_the_same_size_has_more_mass() -> None:
    """The sum of path probabilities is the expected length of the walk: nothing beats the tree."""
    lattice = _lattice(8, 1, 3, 2, "random")
    rows = lattice.log_probs[0].tolist()
    paths = _brute_force(rows, capacity(3, 2), 2)[1:]
    for num_nodes in range(2, 7):
        mass = float(_build(lattice, num_nodes, 2).log_prob[0, 1:].double().exp().sum())
        best = max(
            sum(np.exp(-key[0]) for key, _ in chosen)
            for chosen in itertools.combinations(paths, num_nodes - 1)
        )
        assert mass == pytest.approx(best, abs=1e-12)


# --- What holds for every tree ---


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Lattice, int, int]:
    depth, width = draw(st.integers(1, 9)), draw(st.integers(1, 8))
    max_children = draw(st.integers(1, width))
    num_nodes = draw(st.integers(2, min(40, capacity(depth, max_children))))
    kind = draw(st.sampled_from(KINDS))
    lattice = _lattice(draw(st.integers(0, 10**6)), draw(st.integers(1, 3)), depth, width, kind)
    return lattice, num_nodes, max_children


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
@given(_cases())
def test_properties(case: tuple[Lattice, int, int]) -> None:
    lattice, num_nodes, max_children = case
    before = lattice.log_probs.clone()
    tree = _build(lattice, num_nodes, max_children)
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

    again = _build(lattice, num_nodes, max_children)
    assert all(torch.equal(x, y) for x, y in zip(tree[:-1], again[:-1], strict=True))
    for b in range(lattice.tokens.shape[0]):
        one = _build(Lattice(*(x[b : b + 1] for x in lattice)), num_nodes, max_children)
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(tree[:-1], one[:-1], strict=True))


@settings(max_examples=400, deadline=None)
@given(_cases())
def test_best_first_everywhere(case: tuple[Lattice, int, int]) -> None:
    lattice, num_nodes, max_children = case
    tree = _build(lattice, num_nodes, max_children)
    _check_against(_best_first, lattice, tree, max_children)


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
    lattice = _lattice(0, 1, 4, 2, "constant")
    lattice.log_probs.fill_(1e-7)
    tree = _build(lattice, 6, 2)
    assert tree.log_prob.tolist() == [[0.0] * 6]
    assert tree.depth.tolist() == [[0, 1, 1, 2, 2, 2]]


def test_marginals_expanded_over_predecessors() -> None:
    """A plain DFlash lattice is an expanded view; it gives the tree of its contiguous copy."""
    dense = _lattice(4, 2, 5, 6, "random")
    row = dense.log_probs[:, :, :1]
    view = Lattice(dense.tokens, row.expand(2, 5, 6, 6))
    copy = Lattice(dense.tokens, view.log_probs.contiguous())
    for x, y in zip(_build(view, 20, 6)[:-1], _build(copy, 20, 6)[:-1], strict=True):
        assert torch.equal(x, y)


def test_empty_batch() -> None:
    lattice = Lattice(torch.zeros(0, 3, 4, dtype=torch.int64), torch.zeros(0, 3, 4, 4))
    assert _build(lattice, 5, 2).mask.shape == (0, 5, 5)


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
        _build(_lattice(0, 1, 3, 4, "random"), num_nodes, max_children)


def test_bad_lattice() -> None:
    lattice = Lattice(torch.zeros(1, 3, 4, dtype=torch.int64), torch.zeros(1, 3, 4, 5))
    with pytest.raises(ValueError, match=r"\(1, 3, 4, 5\).*\(1, 3, 4, 4\)"):
        _build(lattice, 4, 2)


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
