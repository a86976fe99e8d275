"""From a tree to the input of SGLang's tree verifier."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from dflash2_sglang.state import TreeVerifyInput
from dflash2_sglang.tree.build import Tree
from dflash2_sglang.tree_mask import TreeMask, mask_reader


class VerifyInputs:
    """Makes the verify input of each round; its mask lies in a buffer that the next round refills.

    depth D, nodes N, children C of a tree
    runner  SGLang's ModelRunner of the target, whose attention backend reads the mask
    """

    def __init__(self, runner: Any, depth: int, nodes: int, children: int, parameters: Any) -> None:
        self.runner, self.parameters = runner, parameters
        self.depth, self.nodes, self.children = depth, nodes, children
        self.node_index = torch.arange(nodes, device=runner.device)
        self.mask: TreeMask | None = None

    def __call__(self, tree: Tree, prefix: torch.Tensor, slots: torch.Tensor) -> TreeVerifyInput:
        """tree of B requests; prefix [B] int64, their committed tokens; slots [B, >= N] int64."""
        size, nodes = tree.tokens.shape
        first = torch.arange(0, size * nodes, nodes, device=prefix.device)
        return TreeVerifyInput(
            tree=tree,
            parameters=self.parameters,
            draft_token=tree.tokens.flatten(),
            custom_mask=self._mask(tree, prefix),
            positions=(prefix.unsqueeze(1) + tree.depth).flatten(),
            retrieve_index=first.unsqueeze(1) + self.node_index,
            retrieve_next_token=tree.first_child,
            retrieve_next_sibling=tree.next_sibling,
            retrieve_cum_len=None,
            spec_steps=self.depth,
            topk=self.children,
            draft_token_num=nodes,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            prepared_out_cache_loc=slots[:, :nodes].reshape(-1),
        )

    def reserve(self, batch: int) -> None:
        """Allocate the mask of batches of up to ``batch`` requests, before the first is served."""
        backend = mask_reader(self.runner.attn_backend)
        if not getattr(backend, "reads_tree_mask", False):
            self._flat().reserve(batch, backend)

    def _mask(self, tree: Tree, prefix: torch.Tensor) -> torch.Tensor:
        backend = mask_reader(self.runner.attn_backend)
        if getattr(backend, "reads_tree_mask", False):
            return tree.mask.flatten()  # the CPU's backend takes ``TreeVerifyInput.tree_mask``
        return self._flat()(tree.mask, prefix, backend)

    def _flat(self) -> TreeMask:
        if self.mask is None:
            table = self.runner.req_to_token_pool.req_to_token
            self.mask = TreeMask(self.nodes, table.shape[1] + self.nodes, self.runner.device)
        return self.mask
