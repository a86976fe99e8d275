"""Which nodes make up the tree: against brute force and against best-first search."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from lattices import ANCHOR, KINDS, build, cases, lattice_of

from dflash2_sglang.tree.build import Tree, capacity
from dflash2_sglang.tree.lattice import Lattice

torch.set_num_threads(1)

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


# --- Which nodes ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (1, 4), (2, 3), (3, 3), (4, 2), (3, 4)])
def test_brute_force(kind: str, depth: int, width: int) -> None:
    for max_children in range(1, width + 1):
        most = capacity(depth, max_children)
        for num_nodes in sorted({2, 3, depth, depth + 1, most // 2, most - 1, most}):
            if not 2 <= num_nodes <= most:
                continue
            lattice = lattice_of(num_nodes * 7 + max_children, 2, depth, width, kind)
            tree = build(lattice, num_nodes, max_children)
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
    lattice = lattice_of(3, 3, depth, width, kind)
    tree = build(lattice, num_nodes, max_children)
    _check_against(_best_first, lattice, tree, max_children)


def test_one_child_per_node_is_the_greedy_chain() -> None:
    lattice = lattice_of(5, 2, 6, 5, "random")
    tree = build(lattice, 7, 1)
    for b in range(2):
        chain, at = [], 0
        for t in range(6):
            at = int(lattice.log_probs[b, t, at].argmax())
            chain.append(int(lattice.tokens[b, t, at]))
        assert tree.tokens[b].tolist() == [ANCHOR, *chain]
        assert tree.parent[b].tolist() == list(range(-1, 6))


def test_no_set_of_the_same_size_has_more_mass() -> None:
    """The sum of path probabilities is the expected length of the walk: nothing beats the tree."""
    lattice = lattice_of(8, 1, 3, 2, "random")
    rows = lattice.log_probs[0].tolist()
    paths = _brute_force(rows, capacity(3, 2), 2)[1:]
    for num_nodes in range(2, 7):
        mass = float(build(lattice, num_nodes, 2).log_prob[0, 1:].double().exp().sum())
        best = max(
            sum(np.exp(-key[0]) for key, _ in chosen)
            for chosen in itertools.combinations(paths, num_nodes - 1)
        )
        assert mass == pytest.approx(best, abs=1e-12)


@settings(max_examples=400, deadline=None)
@given(cases())
def test_best_first_everywhere(case: tuple[Lattice, int, int]) -> None:
    lattice, num_nodes, max_children = case
    tree = build(lattice, num_nodes, max_children)
    _check_against(_best_first, lattice, tree, max_children)
