"""Candidates, lattice and tree as the tail of the drafter's captured pass.

A replay then drafts whole trees: none of the launches between the drafter's last layer and the tree is
made by the host. What they read and write lies in tensors that stay where they are. SGLang calls the
tail, at capture, with the pass's static hidden states and token ids.

Random children are drawn after the replay, from the lattice it leaves: most batches have none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dflash2_sglang import kernels
from dflash2_sglang.tree.build import Tree
from dflash2_sglang.tree.lattice import Lattice

ToLattice = Callable[[Tensor, Tensor, Tensor | None], Lattice]


class FoldedDraft:
    """``read`` gives what the last replay drafted, and is overwritten by the next one.

    G tokens a block, D positions that are used, K candidates, N nodes, C most children of a node.
    """

    def __init__(
        self,
        to_lattice: ToLattice,
        *,
        most: int,
        block: int,
        depth: int,
        width: int,
        nodes: int,
        children: int,
        device: torch.device | str,
    ) -> None:
        """to_lattice: hidden [B, D, H], anchor [B] and heat [B] to a Lattice; most: the largest B."""
        self.to_lattice = to_lattice
        self.block, self.depth, self.nodes, self.children = block, depth, nodes, children
        self.heat = torch.ones(most, device=device)
        self.heated = False
        tokens = torch.zeros(most, depth, width, dtype=torch.int64, device=device)
        self.lattice = Lattice(tokens, torch.zeros(most, depth, width, width, device=device))
        self.tree = kernels.build_tree(self.lattice, self.heat.long(), nodes, children)

    def stage(self, heat: Tensor | None, size: int) -> None:
        """Before a replay: the temperatures of its requests, [B] float32; None for 1."""
        if heat is not None:
            self.heat[:size].copy_(heat)
        elif self.heated:
            self.heat.fill_(1)
        self.heated = heat is not None

    def __call__(self, hidden: Tensor, ids: Tensor) -> None:
        """What is captured: hidden [B * G, H] and ids [B * G] of the blocks, anchors first."""
        hidden = hidden.view(-1, self.block, hidden.shape[-1])
        size, anchor = hidden.shape[0], ids.view(-1, self.block)[:, 0]
        lattice = self.to_lattice(hidden[:, 1 : self.depth + 1], anchor, self.heat[:size])
        tree = kernels.build_tree(lattice, anchor, self.nodes, self.children)
        for buffer, value in zip(self._kept(), [*_tensors(lattice), *_tensors(tree)], strict=True):
            buffer[:size].copy_(value)

    def read(self, size: int) -> tuple[Tree, Lattice]:
        """Views of the first ``size`` requests."""
        tree = Tree._make([*(part[:size] for part in _tensors(self.tree)), None])
        return tree, Lattice(*(part[:size] for part in self.lattice))

    def _kept(self) -> list[Tensor]:
        return [*_tensors(self.lattice), *_tensors(self.tree)]


def _tensors(record: Tree | Lattice) -> list[Tensor]:
    return [part for part in record if isinstance(part, Tensor)]
