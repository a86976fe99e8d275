"""Steps of SGLang's tree verifier that launch Triton."""

from __future__ import annotations

from typing import Any

import torch

from .base import Patch


def move_accept_tokens(
    batch: Any,
    accept_index: torch.Tensor,
    num_correct_drafts: torch.Tensor,
    token_to_kv_pool_allocator: Any,
) -> None:
    """Move the KV of each accepted path to the front of its request's window.

    accept_index [B, P] holds places among the B * N nodes, then -1: there, a slot moves onto itself.
    """
    window = batch.out_cache_loc.view(accept_index.shape[0], -1)
    target = window[:, : accept_index.shape[1]]
    source = batch.out_cache_loc[accept_index.clamp_min(0)]
    source = torch.where(accept_index < 0, target, source)
    moved = source != target
    pool = token_to_kv_pool_allocator.get_kvcache()
    pool.move_kv_cache(target[moved], source[moved])


def fill_bonus_tokens(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """bonus_tokens[b] = the last accepted token of request b."""
    rows = accept_tokens.view(batch_size, accept_stride)
    bonus_tokens.copy_(rows.gather(1, accept_lens.long().unsqueeze(1) - 1).squeeze(1))


PATCHES = (
    Patch(
        target="sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache",
        hook=move_accept_tokens,
        kind="replace",
        scope="cpu",
        parameters=("batch", "accept_index", "num_correct_drafts", "token_to_kv_pool_allocator"),
        reason="packs slots with Triton kernels",
        without="no tree can be committed on the CPU",
    ),
    Patch(
        target="sglang.kernels.ops.speculative.eagle.fill_bonus_tokens_func",
        hook=fill_bonus_tokens,
        kind="replace",
        scope="cpu",
        parameters=(
            "accept_tokens",
            "accept_lens",
            "bonus_tokens",
            "accept_stride",
            "batch_size",
        ),
        reason="launches a Triton kernel",
        without="no tree can be committed on the CPU",
    ),
)
