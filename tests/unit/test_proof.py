"""Losslessness of sampling as a proof: the acceptance rule, integrated exactly, is the target's law.

Every tree shape of up to 6 nodes and depth 3, with every choice of random children; and faults put
into the package's functions, each of which must break the proof.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest
import torch
from exact import EXACT, KINDS, Law, Target, emitted, error
from grown import grow, grown_error, lattice
from plans import Plan, plans, shapes

from dflash2_sglang.tree import draw

torch.set_num_threads(1)

SHAPES = [shape for nodes in range(2, 7) for shape in shapes(nodes, 3)]


def _plans(parent: tuple[int, ...], vocab: int) -> list[Plan]:
    return list(plans(parent, vocab))


def _depth(parent: tuple[int, ...]) -> int:
    deep = [0]
    for p in parent[1:]:
        deep.append(deep[p] + 1)
    return max(deep)


def test_all_shapes_are_there() -> None:
    """1, 2, 4, 9, 20 rooted trees of 2 to 6 nodes; 1, 3 of them are deeper than 3 at 5, 6."""
    assert [len(shapes(n, 3)) for n in range(2, 7)] == [1, 2, 4, 8, 15]


@pytest.mark.parametrize("parent", SHAPES)
def test_the_walk_is_exact(parent: tuple[int, ...]) -> None:
    """With zero probabilities, ties, one child, and all words as children."""
    least = max(2, *(parent.count(i) for i in range(len(parent))))
    for vocab in range(least, 7):
        for i, plan in enumerate(_plans(parent, vocab)):
            target = Target(vocab, KINDS[(i + vocab) % 3])
            assert error(plan.emitted(target), target, _depth(parent) + 1) < EXACT


# --- Trees as the package draws them ---

GROWN = [
    # depth, candidates, vocabulary, nodes, most children
    (1, 3, 4, 3, 3),
    (1, 4, 4, 4, 3),
    (2, 2, 2, 4, 2),
    (2, 3, 4, 4, 2),
    (2, 3, 3, 5, 3),
    (2, 4, 5, 6, 4),
    (3, 2, 3, 6, 2),
    (3, 3, 3, 5, 2),
    (3, 3, 6, 4, 1),
]


@pytest.mark.parametrize("reach", [0.1, 0.6, 2.0])
@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("sizes", GROWN)
def test_drawn_trees_are_exact(
    sizes: tuple[int, ...], kind: int, reach: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of a round: draws, search, acceptance; with many and with few fixed children."""
    monkeypatch.setattr(draw, "FIXED_REACH", reach)
    assert grown_error(*sizes, kind) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_three_rounds_are_exact(kind: str) -> None:
    """The joint law. Each round's tree depends on all the text so far, not on its coins."""
    target, length = Target(3, kind), 4
    law: Law = {(): 1.0}
    for turn in range(3):
        trees, weights, starts = [], [], []
        for start, begun in law.items():
            if len(start) >= length:
                continue
            seed = zlib.crc32(repr((turn, start)).encode())
            for tree, weight in grow(lattice(seed, 2, 3, 3, "random"), 4, 2):
                trees.append(tree)
                weights.append(weight * begun)
                starts.append(start)
        after: Law = defaultdict(float)
        for text, begun in law.items():
            if len(text) >= length:
                after[text] += begun
        for start, found in zip(starts, emitted(trees, weights, target, starts), strict=True):
            for text, weight in found.items():
                after[(start + text)[:length]] += weight
        law = after
    assert error(law, target, length) < EXACT
