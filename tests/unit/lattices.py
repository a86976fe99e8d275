"""Lattices of every kind, honest and broken, and the trees that are built from them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from dflash2_sglang.tree.build import Tree, build_tree, capacity
from dflash2_sglang.tree.lattice import Lattice

VOCAB = 200
ANCHOR = 777
KINDS = ["random", "ties", "holes", "constant", "hopeless", "broken"]


def _tokens(rng: np.random.Generator, batch: int, depth: int, width: int) -> Tensor:
    """Distinct within a position, not between positions."""
    ids = [[rng.permutation(VOCAB)[:width] for _ in range(depth)] for _ in range(batch)]
    return torch.tensor(np.array(ids).reshape(batch, depth, width))


def lattice_of(seed: int, batch: int, depth: int, width: int, kind: str) -> Lattice:
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


def build(lattice: Lattice, num_nodes: int, max_children: int) -> Tree:
    anchor = torch.full((lattice.tokens.shape[0],), ANCHOR)
    return build_tree(lattice, anchor, num_nodes, max_children)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Lattice, int, int]:
    depth, width = draw(st.integers(1, 9)), draw(st.integers(1, 8))
    max_children = draw(st.integers(1, width))
    num_nodes = draw(st.integers(2, min(40, capacity(depth, max_children))))
    kind = draw(st.sampled_from(KINDS))
    lattice = lattice_of(draw(st.integers(0, 10**6)), draw(st.integers(1, 3)), depth, width, kind)
    return lattice, num_nodes, max_children
