"""Sampling is exact: the law of the walk, integrated over its coins, is the target's."""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict

import pytest
import torch
from exact import EXACT, KINDS, Law, Target
from integration import Shape, all_trees, error, laws

from dflash2_sglang.tree.accept import sampling_walk

torch.set_num_threads(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("vocab", "nodes"),
    [
        (2, 2),
        (2, 3),
        (2, 4),
        (2, 5),
        (2, 6),
        (3, 2),
        (3, 3),
        (3, 4),
        (3, 5),
        (3, 6),
        (4, 2),
        (4, 3),
        (4, 4),
        (4, 5),
        (5, 2),
        (5, 3),
        (5, 4),
        (6, 2),
        (6, 3),
        (6, 4),
    ],
)
def test_sampling_is_exact_for_every_small_tree(vocab: int, nodes: int, kind: str) -> None:
    target = Target(vocab, kind)
    trees = all_trees(vocab, nodes)
    for i in range(0, len(trees), 60):
        assert error(trees[i : i + 60], target, sampling_walk) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_all_words_as_children(kind: str) -> None:
    """Nothing is left for the final draw at the root."""
    shapes = [
        Shape((-1, *[0] * 5, 2), (0, *order, 3)) for order in ((0, 1, 2, 3, 4), (4, 2, 0, 1, 3))
    ]
    assert error(shapes, Target(5, kind), sampling_walk) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_two_rounds_are_exact(kind: str) -> None:
    """The second tree may depend on what the first round emitted, not on its coins."""
    target, trees = Target(3, kind), all_trees(3, 3)
    for t, first in enumerate(all_trees(3, 4)):
        (law,) = laws([first], target, sampling_walk)
        starts = list(law)
        seconds = [trees[zlib.crc32(repr((t, start)).encode()) % len(trees)] for start in starts]
        begins: Law = defaultdict(float)
        second_laws = laws(seconds, target, sampling_walk, starts)
        for start, second in zip(starts, second_laws, strict=True):
            for text, weight in second.items():
                begins[(start + text)[:2]] += law[start] * weight
        for text in itertools.product(range(3), repeat=2):
            assert abs(begins[text] - target.prob(text)) < EXACT
