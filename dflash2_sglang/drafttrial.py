"""The drafter's part of the self-check. A fault there changes no text, but it costs acceptance unseen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash2_sglang.tree.build import Tree


class Drafted(NamedTuple):
    """What the drafter makes of one anchor.

    hidden  [D, H]  of the block
    scores  [1, N]  log-probabilities of the tree's nodes, best first
    tree    the tree of one request itself
    """

    hidden: Tensor
    scores: Tensor
    tree: Tree


class DraftTrial:
    """Drafts as in serving, for the request whose slot row is ``row`` [1] and whose KV is in ``slots``."""

    def __init__(self, drafting: Any, row: Tensor, slots: Tensor) -> None:
        self.drafting, self.row, self.slots = drafting, row, slots

    def __call__(self, length: int, anchor: Tensor) -> Drafted:
        """After ``length`` tokens; anchor [1] int64. Copies: the next replay overwrites what it read."""
        block = self.block(length, anchor)
        tree, _ = self.drafting.grow(block, anchor)
        kept = Tree._make(part.clone() if isinstance(part, Tensor) else None for part in tree)
        return Drafted(block.hidden[0].float().clone(), kept.log_prob, kept)

    def block(self, length: int, anchor: Tensor) -> Any:
        """The drafter's pass alone, which leaves the block's KV behind."""
        lengths = torch.tensor([length])
        batch = SimpleNamespace(
            seq_lens=lengths.to(anchor.device),
            seq_lens_cpu=lengths,
            req_pool_indices=self.row,
            spec_algorithm=self.drafting.runner.spec_algorithm,
        )
        return self.drafting.block(batch, anchor, self.slots[None, length:])
