"""The little example of the figures, computed by the package's own lattice, tree and walk.

The logits and selector scores are made up; everything that follows from them is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash2_sglang.tree import Lattice, Tree, Walk, build_lattice, build_tree, greedy_walk

WORDS = ("the", "cat", "dog", "old", "sat", "ran", "man", "on", "down", "off", ".", "and")
ID = {word: number for number, word in enumerate(WORDS)}
ANCHOR = "the"
CANDIDATES = (("cat", "dog", "old"), ("sat", "ran", "man"), ("on", "down", "off"))  # [D, K]
NODES, CHILDREN = 9, 3

UNARY = ((2.0, 1.7, 1.3), (1.6, 1.5, 1.3), (1.5, 1.2, 1.1))  # logits
# What the K candidates hold of each position's full vocabulary.
MASS = (0.92, 0.85, 0.80)
# Selector: row = candidate before, column = candidate of this position.
PAIR = (
    ((0.0, 0.0, 0.0),) * 3,
    ((1.6, 0.2, -4.0), (0.0, 1.8, -4.0), (-2.5, -2.5, 2.5)),
    ((1.2, 0.6, -2.0), (-1.0, -0.4, 1.6), (-0.5, -0.5, -0.5)),
)
# The target's choice after each path of the tree that it might be asked about.
TARGET = {
    ("the",): "dog",
    ("the", "cat"): "sat",
    ("the", "dog"): "ran",
    ("the", "old"): "man",
    ("the", "cat", "sat"): "on",
    ("the", "dog", "ran"): "off",
    ("the", "old", "man"): "sat",
    ("the", "dog", "ran", "off"): ".",
}
DEFAULT = "and"


@dataclass(frozen=True)
class Example:
    lattice: Lattice
    tree: Tree
    walk: Walk
    choice: tuple[str, ...]  # the target's, after each node

    def word(self, node: int) -> str:
        return WORDS[int(self.tree.tokens[0, node])]

    def parent(self, node: int) -> int:
        return int(self.tree.parent[0, node])

    def probability(self, node: int) -> float:
        return float(self.tree.log_prob[0, node].exp())

    @property
    def accepted(self) -> list[int]:
        return [int(node) for node in self.walk.path[0] if node >= 0]

    @property
    def bonus(self) -> str:
        return WORDS[int(self.walk.next_token[0])]


def example() -> Example:
    """One request, from logits to the accepted path."""
    tokens = torch.tensor([[[ID[w] for w in position] for position in CANDIDATES]])
    unary = torch.tensor([UNARY], dtype=torch.float64)
    log_norm = unary.logsumexp(-1) - torch.tensor([MASS], dtype=torch.float64).log()
    lattice = build_lattice(tokens, unary, log_norm, pair=torch.tensor([PAIR]))
    tree = build_tree(lattice, torch.tensor([ID[ANCHOR]]), NODES, CHILDREN)
    choice = tuple(TARGET.get(_path(tree, node), DEFAULT) for node in range(NODES))
    target_next = torch.tensor([[ID[word] for word in choice]])
    depth = len(CANDIDATES)
    walk = greedy_walk(tree.tokens, tree.parent, tree.mask, tree.depth, target_next, depth)
    return Example(lattice, tree, walk, choice)


def _path(tree: Tree, node: int) -> tuple[str, ...]:
    words: list[str] = []
    while node >= 0:
        words.insert(0, WORDS[int(tree.tokens[0, node])])
        node = int(tree.parent[0, node])
    return tuple(words)
