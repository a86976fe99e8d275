"""Every small tree with and without random children, its draws still to be made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from exact import Drawn, Law, Target, emitted


class Family(NamedTuple):
    """The children of a node. Column j of it is, as in `draw.spawn`: word order[j] while j < k; at
    j = k a word drawn from `law` over order[k:]; beyond, what is left of order[k:], in order.
    Without a random child k is the vocabulary."""

    order: tuple[int, ...]
    k: int
    law: tuple[float, ...]


class Plan(NamedTuple):
    parent: tuple[int, ...]
    column: tuple[int, ...]
    family: tuple[Family, ...]

    def random(self, node: int) -> bool:
        return node > 0 and self.column[node] == self.family[self.parent[node]].k

    def draws(self) -> Iterator[tuple[Drawn, float]]:
        """Every tree that may come of it, with its probability."""
        nodes = range(len(self.parent))
        drawing = [self.parent[i] for i in nodes if self.random(i)]
        options = [[(i, x) for i, x in enumerate(self.family[v].law) if x > 0] for v in drawing]
        for choice in itertools.product(*options):
            rank = {v: self.family[v].k + i for v, (i, _) in zip(drawing, choice, strict=True)}
            tokens = [0, *(self._token(i, rank) for i in nodes[1:])]
            law = [
                tuple(zip(f.order[f.k :], f.law, strict=True)) if v in rank else ()
                for v, f in enumerate(self.family)
            ]
            random = tuple(self.random(i) for i in nodes)
            tree = Drawn(self.parent, tuple(tokens), random, tuple(law))
            yield tree, float(np.prod([x for _, x in choice]))

    def _token(self, node: int, rank: dict[int, int]) -> int:
        family, j = self.family[self.parent[node]], self.column[node]
        if j >= family.k:
            r = rank[self.parent[node]]
            j = r if j == family.k else j - 1 if j <= r else j
        return family.order[j]

    def emitted(self, target: Target) -> Law:
        trees, weights = zip(*self.draws(), strict=True)
        total: Law = {}
        for law in emitted(list(trees), list(weights), target):
            for text, weight in law.items():
                total[text] = total.get(text, 0.0) + weight
        return total


@cache
def shapes(nodes: int, depth: int) -> list[tuple[int, ...]]:
    """Parents of every rooted tree of `nodes` nodes and at most this depth, once."""
    found: dict[object, tuple[int, ...]] = {}
    for parents in itertools.product(*(range(i) for i in range(1, nodes))):
        parent = (-1, *parents)
        deep = [0] * nodes
        for i in range(1, nodes):
            deep[i] = deep[parent[i]] + 1
        if max(deep) <= depth and list(parent) == sorted(parent):
            found.setdefault(_canonical(parent, 0), parent)
    return list(found.values())


def _canonical(parent: tuple[int, ...], node: int) -> tuple:
    return tuple(sorted(_canonical(parent, i) for i, p in enumerate(parent) if p == node))


def plans(parent: tuple[int, ...], vocab: int, seed: int = 0) -> Iterator[Plan]:
    """A tree of this shape for every choice of which child of each node, if any, is random."""
    rng = np.random.default_rng([seed, vocab, len(parent), *(p + 1 for p in parent)])
    sizes = [parent.count(i) for i in range(len(parent))]
    if max(sizes) > vocab:
        return
    options = [[vocab, *range(size)] for size in sizes]
    for ks in itertools.product(*options):
        seen = [0] * len(parent)
        column = [0]
        for p in parent[1:]:
            column.append(seen[p])
            seen[p] += 1
        families = tuple(_family(rng, vocab, k) for k in ks)
        yield Plan(parent, tuple(column), families)


def _family(rng: np.random.Generator, vocab: int, k: int) -> Family:
    order = tuple(int(x) for x in rng.permutation(vocab))
    left = vocab - k
    if not left:
        return Family(order, k, ())
    kind = rng.integers(4)
    weights = [rng.random(left), np.ones(left), rng.integers(0, 2, left), np.zeros(left)][kind]
    weights = weights.astype(float)
    weights[rng.integers(left)] += 1e-3 if kind == 0 else 1  # holes, ties, a single word
    return Family(order, k, tuple((weights / weights.sum()).tolist()))
