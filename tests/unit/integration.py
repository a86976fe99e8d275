"""Exact integration of a walk over its coins: the law of what it emits, without drawing anything.

A walk is a step function of its coins. So its law can be computed: cut the unit interval of every
coin at all points where any decision can change, try one coin in each piece, and weigh the outcome
by the size of the piece. The trees are given; `exact.py` also integrates over how they are drawn.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from exact import Law, Target, Text, line, pieces
from torch import Tensor

from dflash2_sglang.tree import accept
from dflash2_sglang.tree.accept import Walk, follow

# (tokens, parent, mask, depth, target_probs, coins, final_coins, max_depth)
Sampler = Callable[..., Walk]


class Shape(NamedTuple):
    """A tree in plain Python: parents before children; tokens[0] is not a word of the target."""

    parent: tuple[int, ...]
    tokens: tuple[int, ...]

    def line(self, node: int) -> list[int]:
        return line(self.parent, node)

    def text(self, node: int) -> Text:
        return tuple(self.tokens[i] for i in self.line(node)[1:])

    def children(self, node: int) -> list[int]:
        return [i for i, p in enumerate(self.parent) if p == node]


def tensors(shapes: list[Shape]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, parent, mask, depth) of trees of one size."""
    nodes = len(shapes[0].parent)
    lines = [[shape.line(i) for i in range(nodes)] for shape in shapes]
    mask = torch.zeros(len(shapes), nodes, nodes, dtype=torch.bool)
    for b, i in itertools.product(range(len(shapes)), range(nodes)):
        mask[b, i, lines[b][i]] = True
    depth = torch.tensor([[len(line) - 1 for line in tree] for tree in lines])
    tokens = torch.tensor([shape.tokens for shape in shapes])
    return tokens, torch.tensor([shape.parent for shape in shapes]), mask, depth


@cache
def all_trees(vocab: int, nodes: int) -> list[Shape]:
    """Every prefix-closed set of `nodes` texts, once, its siblings in a random order."""

    def grow(chosen: list[Text], open_texts: list[Text]) -> Iterator[list[Text]]:
        if len(chosen) == nodes:
            yield chosen
            return
        for i, text in enumerate(open_texts):
            more = [(*text, x) for x in range(vocab)]
            yield from grow([*chosen, text], open_texts[i + 1 :] + more)

    rng = np.random.default_rng(vocab * 10 + nodes)
    trees = []
    for texts in grow([], [()]):
        texts = sorted(texts, key=lambda text: (len(text), rng.random()))
        index = {text: i for i, text in enumerate(texts)}
        parent = tuple(index[text[:-1]] if text else -1 for text in texts)
        trees.append(Shape(parent, tuple(text[-1] if text else 0 for text in texts)))
    return trees


def coin_cells(
    shape: Shape, rows: list[np.ndarray], max_depth: int
) -> Iterator[tuple[list[float], float]]:
    """(max_depth coins and the final one, the volume of their cell): all cells of one tree."""
    cuts: list[set[float]] = [set() for _ in range(max_depth + 1)]
    for node in range(len(shape.parent)):
        children = [shape.tokens[c] for c in shape.children(node)]
        if children:
            cuts[len(shape.line(node)) - 1] |= set(np.cumsum(rows[node][children]).tolist())
        rest = rows[node].copy()
        rest[children] = 0
        if rest.sum() > 0:
            cuts[-1] |= set((np.cumsum(rest) / rest.sum()).tolist())
    for cell in itertools.product(*(pieces(c) for c in cuts)):
        yield [coin for coin, _ in cell], float(np.prod([size for _, size in cell]))


def laws(
    shapes: list[Shape], target: Target, sampler: Sampler, starts: list[Text] | None = None
) -> list[Law]:
    """What each tree's walk emits (accepted tokens, then the next token), with probabilities."""
    starts = starts or [()] * len(shapes)
    max_depth = len(shapes[0].parent) - 1
    rows = [
        [target.after(start + shape.text(i)) for i in range(max_depth + 1)]
        for shape, start in zip(shapes, starts, strict=True)
    ]
    cells = [
        (s, coins, volume)
        for s, shape in enumerate(shapes)
        for coins, volume in coin_cells(shape, rows[s], max_depth)
    ]
    which = torch.tensor([s for s, _, _ in cells])
    coins = torch.tensor([c for _, c, _ in cells], dtype=torch.float64)
    fields = [x[which] for x in tensors(shapes)]
    probs = torch.tensor(np.array(rows))[which]
    walk = sampler(*fields, probs, coins[:, :-1], coins[:, -1], max_depth)
    found: list[Law] = [defaultdict(float) for _ in shapes]
    outcomes = zip(
        cells, walk.path.tolist(), walk.length.tolist(), walk.next_token.tolist(), strict=True
    )
    for (s, _, volume), path, length, next_token in outcomes:
        found[s][(*(shapes[s].tokens[i] for i in path[1:length]), next_token)] += volume
    return found


def error(shapes: list[Shape], target: Target, sampler: Sampler) -> float:
    """How far the walks are from the target, at worst.

    Whoever emits a text that is a node of the tree goes on with at least one more token. So for
    each node and each word x, the output must begin with (text of the node, x) with the target's
    probability of just that; with the root as node this is the law of the first token.
    """
    worst = 0.0
    for shape, law in zip(shapes, laws(shapes, target, sampler), strict=True):
        worst = max(worst, abs(sum(law.values()) - 1))
        begins: Law = defaultdict(float)
        for text, weight in law.items():
            for i in range(1, len(text) + 1):
                begins[text[:i]] += weight
        expected = {
            (*shape.text(i), x): target.prob((*shape.text(i), x))
            for i in range(len(shape.parent))
            for x in range(target.vocab)
        }
        worst = max(worst, *(abs(begins[text] - p) for text, p in expected.items()))
        stray = [text for text, weight in law.items() if weight > 0 and text not in expected]
        worst = max(worst, float(bool(stray)))
    return worst


def rewired(
    tokens: Tensor,
    parent: Tensor,
    mask: Tensor,
    depth: Tensor,
    probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    max_depth: int,
    *,
    edges: Callable[..., Tensor] | None = None,
    final: Callable[..., Tensor] | None = None,
) -> Walk:
    """sampling_walk with one of its two halves replaced."""
    accepted = (edges or accept.sampling_edges)(tokens, parent, depth, probs, coins)
    path, length, last = follow(accepted, mask, depth, max_depth)
    if final is None:
        return Walk(path, length, accept.final_draw(tokens, parent, last, probs, final_coins))
    return Walk(path, length, final(tokens, parent, last, probs, final_coins, coins, length))
