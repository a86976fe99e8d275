"""Exact integration of the sampled walk over its coins and the tree's draws, without drawing.

A walk is a step function of its coins. Cut the unit interval of every coin where any decision can
change, try one coin in each piece, and weigh the outcome by the size of the piece: that is the law
of what the walk emits. Emitted texts are then completed by the target itself to a fixed length, and
the law of those texts must be the target's. Only the cuts are worked out here; every decision is
made by the package's own functions, in float64.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash2_sglang.tree import accept
from dflash2_sglang.tree.accept import Walk
from dflash2_sglang.tree.draw import Proposal

Text = tuple[int, ...]
Law = dict[Text, float]

EXACT = 1e-12
CAUGHT = 1e-3
KINDS = ["random", "uniform", "holes"]


class Target:
    """A language model on a small vocabulary: a fixed distribution after every text."""

    def __init__(self, vocab: int, kind: str) -> None:
        self.vocab, self.kind = vocab, kind
        self._memory: dict[Text, np.ndarray] = {}

    def after(self, text: Text) -> np.ndarray:
        if text not in self._memory:
            rng = np.random.default_rng(zlib.crc32(repr((text, self.vocab)).encode()))
            self._memory[text] = self._draw(rng)
        return self._memory[text]

    def _draw(self, rng: np.random.Generator) -> np.ndarray:
        if self.kind == "random":
            return rng.dirichlet(np.ones(self.vocab))
        if self.kind == "uniform":
            return np.full(self.vocab, 1 / self.vocab)
        if self.kind == "holes":  # some words impossible, often all but one
            weights = rng.integers(0, 3, self.vocab).astype(float)
            weights[rng.integers(self.vocab)] += 1
            return weights / weights.sum()
        raise AssertionError(self.kind)

    def prob(self, text: Text, start: Text = ()) -> float:
        out = 1.0
        for i, x in enumerate(text):
            out *= float(self.after(start + text[:i])[x])
        return out


def line(parent: tuple[int, ...], node: int) -> list[int]:
    """The nodes from the root down to one."""
    out = [node]
    while parent[out[-1]] >= 0:
        out.append(parent[out[-1]])
    return out[::-1]


class Drawn(NamedTuple):
    """One tree, all draws made. `law` is over words, {} where the node has no random child."""

    parent: tuple[int, ...]
    tokens: tuple[int, ...]  # of the root: anything
    random: tuple[bool, ...]
    law: tuple[tuple[tuple[int, float], ...], ...]

    def line(self, node: int) -> list[int]:
        return line(self.parent, node)

    def text(self, node: int) -> Text:
        return tuple(self.tokens[i] for i in self.line(node)[1:])

    def children(self, node: int, random: bool) -> list[int]:
        both = zip(self.parent, self.random, strict=True)
        return [i for i, found in enumerate(both) if found == (node, random)]


def coin_cells(tree: Drawn, rows: list[np.ndarray], depth: int) -> tuple[Tensor, Tensor]:
    """([M, 2 depth + 1] coins: fixed, random, final; [M] volumes of their cells)."""
    cuts: list[set[float]] = [set() for _ in range(2 * depth + 1)]
    for node, p in enumerate(rows):
        level, q = len(tree.line(node)) - 1, np.zeros_like(p)
        for word, x in tree.law[node]:
            q[word] = x
        rest = np.maximum(p - q, 0)
        for child in tree.children(node, True):
            word = tree.tokens[child]
            cuts[depth + level].add(float(p[word] / q[word]) if q[word] else 0.0)
        fixed = [tree.tokens[c] for c in tree.children(node, False)]
        if rest.sum() > 0:
            if fixed:
                cuts[level] |= set((np.cumsum(rest[fixed]) / rest.sum()).tolist())
            rest[fixed] = 0
        if rest.sum() > 0:
            cuts[-1] |= set((np.cumsum(rest) / rest.sum()).tolist())
    # Coins of levels without nodes are not read.
    cells = [pieces(c) for c in cuts]
    coins = torch.cartesian_prod(
        *(torch.tensor([x for x, _ in p], dtype=torch.float64) for p in cells)
    )
    sizes = torch.cartesian_prod(
        *(torch.tensor([x for _, x in p], dtype=torch.float64) for p in cells)
    )
    return coins.view(-1, len(cuts)), sizes.view(-1, len(cuts)).prod(1)


def pieces(cuts: set[float]) -> list[tuple[float, float]]:
    """(a coin, the size of its piece) for each piece of the unit interval."""
    edges = sorted({0.0, 1.0, *(x for x in cuts if 0 < x < 1)})
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(edges)]


class Batch(NamedTuple):
    """What `accept.sampling_walk` is called with, a row for each cell of each tree."""

    tokens: Tensor
    parent: Tensor
    mask: Tensor
    depth: Tensor
    probs: Tensor
    proposal: Proposal


def tensors(trees: list[Drawn], target: Target, starts: list[Text]) -> Batch:
    """Trees of one size, [T, N]."""
    nodes, vocab = len(trees[0].parent), target.vocab
    lines = [[tree.line(i) for i in range(nodes)] for tree in trees]
    mask = torch.zeros(len(trees), nodes, nodes, dtype=torch.bool)
    law = torch.zeros(len(trees), nodes, vocab, dtype=torch.float64)
    for t, i in itertools.product(range(len(trees)), range(nodes)):
        mask[t, i, lines[t][i]] = True
        for word, x in trees[t].law[i]:
            law[t, i, word] = x
    rows = [
        [target.after(start + tree.text(i)) for i in range(nodes)]
        for tree, start in zip(trees, starts, strict=True)
    ]
    words = torch.arange(vocab).expand_as(law)
    return Batch(
        torch.tensor([tree.tokens for tree in trees]),
        torch.tensor([tree.parent for tree in trees]),
        mask,
        mask.sum(2) - 1,
        torch.tensor(np.array(rows)),
        Proposal(torch.tensor([tree.random for tree in trees]), words, law),
    )


def emitted(
    trees: list[Drawn], weights: list[float], target: Target, starts: list[Text] | None = None
) -> list[Law]:
    """What each tree's walk emits (accepted tokens, then the next one), times the tree's weight."""
    starts = starts or [()] * len(trees)
    batch = tensors(trees, target, starts)
    depth = int(batch.depth.max()) or 1
    cells = [
        coin_cells(tree, list(p), depth) for tree, p in zip(trees, batch.probs.numpy(), strict=True)
    ]
    which = torch.repeat_interleave(torch.tensor([len(v) for _, v in cells]))
    coins, volume = (torch.cat(parts) for parts in zip(*cells, strict=True))
    volume = volume * torch.tensor(weights, dtype=torch.float64)[which]
    walk = accept.sampling_walk(
        *(field[which] for field in batch[:5]),
        coins[:, :depth],
        coins[:, -1],
        depth,
        Proposal(*(field[which] for field in batch.proposal)),
        coins[:, depth:-1],
    )
    laws: list[Law] = [defaultdict(float) for _ in trees]
    for (tree, *text), weight in _summed(which, batch.tokens[which], walk, volume):
        laws[tree][tuple(text)] += weight
    return laws


def _summed(
    which: Tensor, tokens: Tensor, walk: Walk, volume: Tensor
) -> Iterator[tuple[list[int], float]]:
    """(tree, *text) of every distinct outcome, and its weight."""
    text = tokens.gather(1, walk.path.clamp(min=0)).masked_fill(walk.path < 0, -1).roll(-1, 1)
    text[:, -1] = -1
    text.scatter_(1, walk.length.unsqueeze(1) - 1, walk.next_token.unsqueeze(1))
    keys = torch.cat((which.unsqueeze(1), text), 1)
    distinct, place = keys.unique(dim=0, return_inverse=True)
    sums = torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, place, volume)
    for key, weight in zip(distinct.tolist(), sums.tolist(), strict=True):
        yield [key[0], *(x for x in key[1:] if x >= 0)], weight


def error(law: Law, target: Target, length: int) -> float:
    """How far texts of `length` words are from the target's law, the target ending those begun."""
    worst = abs(sum(law.values()) - 1)

    def visit(text: Text, begun: float, wanted: float) -> None:
        nonlocal worst
        begun += law.get(text, 0.0)
        if len(text) == length:
            worst = max(worst, abs(begun - wanted))
            return
        row = target.after(text)
        for x in range(target.vocab):
            visit((*text, x), begun * float(row[x]), wanted * float(row[x]))

    visit((), 0.0, 1.0)
    return worst
