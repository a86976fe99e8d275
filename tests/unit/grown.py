"""Trees as the package grows them from a lattice, with every outcome of every draw."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from exact import KINDS, Drawn, Law, Target, emitted, error
from torch import Tensor

from dflash2_sglang.tree import build, draw
from dflash2_sglang.tree.draw import Draws
from dflash2_sglang.tree.lattice import Lattice

NO_ANCHOR = 0


def grow(lattice: Lattice, nodes: int, children: int) -> list[tuple[Drawn, float]]:
    """Every tree of `nodes` nodes that may come of a lattice of one request, with its probability.

    Level by level: what the package says it draws from is cut into its outcomes, one coin in each.
    """
    depth = min(lattice.tokens.shape[1], nodes - 1)
    coins = torch.full((1, lattice.tokens.shape[1], nodes - 1), 0.5, dtype=torch.float64)
    weights = torch.ones(1, dtype=torch.float64)
    start = 0
    for level in range(depth):
        wide = Lattice(*(field.expand(len(coins), *field.shape[1:]) for field in lattice))
        found = draw.draw_search(wide, nodes, children, draws(coins))
        count = found.levels[level].row.shape[1]
        laws = found.law[:, start : start + count]
        start += count
        parts = [_outcomes(*row, level) for row in zip(coins, weights, laws, strict=True)]
        coins, weights = (torch.cat(part) for part in zip(*parts, strict=True))
    wide = Lattice(*(field.expand(len(coins), *field.shape[1:]) for field in lattice))
    anchor = torch.full((len(coins),), NO_ANCHOR)
    tree = build.build_tree(wide, anchor, nodes, children, draws(coins))
    total: dict[Drawn, float] = {}
    for found_tree, weight in zip(_plain(tree), weights.tolist(), strict=True):
        total[found_tree] = total.get(found_tree, 0.0) + weight
    return list(total.items())


def draws(coins: Tensor) -> Draws:
    return Draws(coins, torch.zeros(len(coins), dtype=torch.bool))


def _outcomes(coins: Tensor, weight: Tensor, laws: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """A row for each combination of what the nodes of this level draw."""
    slots = []
    for law in laws.tolist():
        ends = np.cumsum(law)
        slots.append([(end - x / 2, x) for end, x in zip(ends, law, strict=True) if x > 0])
    combos = list(itertools.product(*slots))
    out = coins.expand(len(combos), *coins.shape).clone()
    chosen = torch.tensor([[coin for coin, _ in combo] for combo in combos], dtype=torch.float64)
    out[:, level, : len(slots)] = chosen
    sizes = torch.tensor([np.prod([x for _, x in c]) for c in combos], dtype=torch.float64)
    return out, weight * sizes


def _plain(tree: build.Tree) -> Iterator[Drawn]:
    assert tree.proposal is not None
    fields = (tree.parent, tree.tokens, *tree.proposal)
    for parent, tokens, random, words, probs in zip(*(f.tolist() for f in fields), strict=True):
        law = tuple(
            tuple((w, x) for w, x in zip(*node, strict=True) if x > 0)
            for node in zip(words, probs, strict=True)
        )
        yield Drawn(tuple(parent), tuple(tokens), tuple(random), law)


def lattice(seed: int, depth: int, width: int, vocab: int, kind: str) -> Lattice:
    """One request; float64. Position t of it holds `width` distinct words."""
    rng = np.random.default_rng(seed)
    tokens = np.array([rng.permutation(vocab)[:width] for _ in range(depth)])
    shape = (depth, width, width)
    if kind == "random":
        rows = rng.dirichlet(np.full(width, 0.7), shape[:2])
    elif kind == "ties":
        rows = np.full(shape, 1 / width)
    elif kind == "holes":
        weights = rng.integers(0, 3, shape).astype(float)
        weights[..., 0] += weights.sum(-1) == 0
        rows = weights / weights.sum(-1, keepdims=True)
    else:
        raise AssertionError(kind)
    rows[0] = rows[0, 0]
    with np.errstate(divide="ignore"):
        logs = np.log(rows * rng.uniform(0.6, 1))
    return Lattice(torch.tensor(tokens)[None], torch.tensor(logs)[None])


def grown_error(depth: int, width: int, vocab: int, nodes: int, children: int, kind: int) -> float:
    """How far one round over all trees of a lattice is from the target."""
    target = Target(vocab, KINDS[kind])
    shape = lattice(kind, depth, width, vocab, ["random", "ties", "holes"][(kind + nodes) % 3])
    trees, weights = zip(*grow(shape, nodes, children), strict=True)
    total: Law = {}
    for law in emitted(list(trees), list(weights), target):
        for text, weight in law.items():
            total[text] = total.get(text, 0.0) + weight
    return error(total, target, depth + 1)
