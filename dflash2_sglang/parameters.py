"""What requests ask of the target's logits, applied to each node as plain decoding would after its path.

One object a worker: ``before_prefill`` and ``after_prefill`` around the target's prefill, ``adjust`` and
``commit`` in the acceptance of a tree. The order is plain decoding's: penalties, grammar, bias, processors.
"""

from __future__ import annotations

from typing import Any

import torch

from dflash2_sglang import processors, seeds
from dflash2_sglang.penalties import Penalties
from dflash2_sglang.processors import Answers


class RequestParameters:
    """Batches that use no parameter cost a look at the host's list of requests."""

    def __init__(self, device: Any) -> None:
        self.penalties = Penalties(device)
        self.answers = Answers()

    def before_prefill(self, batch: Any) -> None:
        info = batch.sampling_info
        capacity = batch.req_to_token_pool.req_to_token.shape[0]
        slots = batch.req_pool_indices_cpu.tolist()
        self.penalties.reset(batch.reqs, slots, info.vocab_size, capacity)
        if self.penalties.applies(info):
            self.penalties.before_prefill(info, batch.req_pool_indices)
        if not info.is_all_greedy:
            info.dflash2_seeds = seeds.find(batch.reqs, info.device)

    def after_prefill(self, batch: Any, tokens: torch.Tensor) -> None:
        """tokens [B], the first of each answer."""
        if self.penalties.applies(batch.sampling_info):
            self.penalties.add(batch.req_pool_indices, tokens.unsqueeze(1))
        if batch.sampling_info.has_custom_logit_processor:
            self.answers.after_prefill(batch, tokens)

    def adjust(self, logits: torch.Tensor, verify: Any, batch: Any, grammar_mask: Any) -> None:
        """logits [B * N, V] of a tree, in place."""
        info, nodes = batch.sampling_info, verify.draft_token_num
        by_node = logits.view(-1, nodes, logits.shape[-1])
        if self.penalties.applies(info):
            depth = verify.max_tree_depth - 1
            self.penalties.apply(by_node, verify.tree, depth, info, batch.req_pool_indices)
        if grammar_mask is not None:
            grammar_mask.apply(logits)
        if info.logit_bias is not None:
            by_node.add_(info.logit_bias.unsqueeze(1))
        if info.has_custom_logit_processor:
            processors.apply(logits, verify.tree, info, self.answers)

    def commit(
        self, batch: Any, predict: torch.Tensor, lens: torch.Tensor, index: torch.Tensor
    ) -> None:
        """What ``accept_tree`` returns has become part of the answers."""
        info = batch.sampling_info
        penalised = self.penalties.applies(info)
        if not penalised and not info.has_custom_logit_processor:
            return
        tokens, lens = predict[index.long().clamp_min(0)], lens.long()  # [B, P]
        if penalised:
            self.penalties.add(batch.req_pool_indices, tokens, lens)
        if info.has_custom_logit_processor:
            self.answers.after_round(batch, tokens, lens)
