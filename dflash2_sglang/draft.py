"""One draft: a block of masks through the drafter, its lattice, and the best tree in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.draft_worker_common import (
    make_draft_block_spec_info,
    make_draft_sampler_capture_hook,
)

from dflash2_sglang import kernels
from dflash2_sglang.candidates import CandidateHead
from dflash2_sglang.folded import FoldedDraft
from dflash2_sglang.head import TargetHead
from dflash2_sglang.tree.build import Tree
from dflash2_sglang.tree.draw import Draws, lattice_heat
from dflash2_sglang.tree.lattice import Lattice


class Block(NamedTuple):
    """hidden [B, D, H] of the mask positions that are used; replayed: from a captured graph."""

    hidden: torch.Tensor
    replayed: bool


class Drafting:
    """Turns the anchors of a batch into a tree for each request.

    block  G tokens: the anchor, then mask tokens; depth D <= G - 1 of its positions are used
    nodes  N nodes of the tree, children C at most of each
    """

    def __init__(
        self, runner: Any, target_model: Any, *, depth: int, nodes: int, children: int
    ) -> None:
        self.runner, self.drafter = runner, runner.model
        self.config = self.drafter.drafter_config
        self.depth, self.nodes, self.children = depth, nodes, children
        self.drafter.borrow_embedding(_target_embedding(target_model))
        width = self.config.selector_top_k if self.config.has_selector else max(children, 16)
        device = runner.device
        head = TargetHead.of(target_model, self.config.vocab_size)
        head.check(torch.ones(1, self.config.hidden_size, dtype=runner.dtype, device=device))
        self.head = CandidateHead(head, width, self._transform())
        self.offsets = torch.arange(self.config.block_size, device=device)
        kernels.uses_triton(self.offsets)  # refuses a wrong switch now, not in the first round
        self.spec_info = make_draft_block_spec_info(
            draft_token_num=self.config.block_size, device=device
        )
        self.folded: FoldedDraft | None = None

    def fold(self, most: int) -> None:
        """Before the drafter's pass is captured for up to ``most`` requests: draft whole trees in it."""
        self.folded = FoldedDraft(
            self.lattice,
            most=most,
            block=self.config.block_size,
            depth=self.depth,
            width=self.head.top_k,
            nodes=self.nodes,
            children=self.children,
            device=self.runner.device,
        )
        self.runner.capture_tail_hooks.append(make_draft_sampler_capture_hook(self.folded))

    def _transform(self) -> Any:
        config = self.config
        if config.output_multiplier == 1.0 and config.final_logit_softcapping is None:
            return None
        return self.drafter.transform_unary

    def __call__(
        self, batch: Any, anchor: torch.Tensor, slots: torch.Tensor
    ) -> tuple[Tree, Lattice]:
        """anchor [B] int64; slots [B, >= G] int64, the requests' KV slots from seq_lens on."""
        info = batch.sampling_info
        heat = None if info.is_all_greedy else lattice_heat(info.temperatures.view(-1))
        draws = self._draws(info, anchor.shape[0], anchor.device)
        return self.grow(self.block(batch, anchor, slots, heat), anchor, heat, draws)

    def grow(
        self,
        block: Block,
        anchor: torch.Tensor,
        heat: torch.Tensor | None = None,
        draws: Draws | None = None,
    ) -> tuple[Tree, Lattice]:
        """The trees of the last ``block``; heat as it was given to it."""
        if block.replayed and self.folded is not None:
            tree, lattice = self.folded.read(anchor.shape[0])
            if draws is None:
                return tree, lattice
        else:
            lattice = self.lattice(block.hidden, anchor, heat)
        return kernels.build_tree(lattice, anchor, self.nodes, self.children, draws), lattice

    def _draws(self, info: Any, size: int, device: Any) -> Draws | None:
        """Coins for random children; None where no request can use one."""
        if info.is_all_greedy:
            return None
        coins = torch.rand(size, self.depth, self.nodes - 1, device=device)
        group = get_parallel().tp_group
        if group.world_size > 1:  # all ranks build rank 0's tree
            group.broadcast(coins, src=0)
        # Limits that filter nothing change nothing: a kernel is then compiled once, not for each choice.
        every = kernels.uses_triton(coins)
        return Draws(
            coins,
            info.top_ks.view(-1) == 1,
            info.top_ks if every or info.need_top_k_sampling else None,
            info.top_ps if every or info.need_top_p_sampling else None,
            info.min_ps if every or info.need_min_p_sampling else None,
            info.temperatures.view(-1),
        )

    def block(
        self,
        batch: Any,
        anchor: torch.Tensor,
        slots: torch.Tensor,
        heat: torch.Tensor | None = None,
    ) -> Block:
        """One pass of the drafter over the anchors and their masks; heat [B] float32, None for 1."""
        size, block = anchor.shape[0], self.config.block_size
        if self.folded is not None:
            self.folded.stage(heat, size)
        ids = anchor.new_full((size, block), self.config.mask_token_id)
        ids[:, 0] = anchor
        # Host mirrors count the block, as SGLang's planner for captured block passes expects.
        seq_lens_cpu = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu + block
        forward = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=size,
            input_ids=ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=slots[:, :block].reshape(-1),
            seq_lens_sum=None if seq_lens_cpu is None else int(seq_lens_cpu.sum()),
            seq_lens_cpu=seq_lens_cpu,
            positions=(batch.seq_lens.unsqueeze(1) + self.offsets).flatten(),
            spec_algorithm=batch.spec_algorithm,
            spec_info=self.spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        out = self.runner.forward(forward)
        hidden = out.logits_output.hidden_states.view(size, block, -1)
        return Block(hidden[:, 1 : self.depth + 1], out.can_run_graph)

    def lattice(
        self, hidden: torch.Tensor, anchor: torch.Tensor, heat: torch.Tensor | None
    ) -> Lattice:
        """hidden [B, D, H]; anchor [B] int64; heat [B] float32, the rows' temperatures, None for 1."""
        size, depth = anchor.shape[0], self.depth
        per_row = None if heat is None else heat.repeat_interleave(depth)[:, None]
        found = self.head(hidden.reshape(size * depth, -1), per_row)
        tokens = found.tokens.view(size, depth, -1)
        unary, log_norm = found.logits.view(size, depth, -1), found.log_norm.view(size, depth)
        selector = self.drafter.candidate_selector
        if selector is None:
            return kernels.build_lattice(tokens, unary, log_norm, heat)
        return selector.lattice(hidden, anchor, tokens, unary, log_norm, heat)


def _target_embedding(target_model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The target's embedding, with the scale that some targets put between it and their layers."""
    embed = target_model.get_input_embeddings()
    scale_of = getattr(target_model, "get_dflash_noise_embedding_scale", None)
    if scale_of is None or float(scale_of()) == 1.0:
        return embed
    scale = float(scale_of())
    return lambda ids: embed(ids) * scale
