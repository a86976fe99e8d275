"""Torch versions of the helpers that stock SGLang launches as Triton kernels."""

from __future__ import annotations

from typing import Any

import torch


def cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """Slots ``start .. start + draft_token_num`` of each request, flat [B * N] int64."""
    columns = start_offset.view(-1, 1) + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.view(-1, 1), columns].flatten().long()
