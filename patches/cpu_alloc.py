"""Slot bookkeeping of speculative decoding, which stock SGLang does in Triton."""

from __future__ import annotations

import torch

from .base import Patch


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write newly allocated slots into columns start .. end of each request's row."""
    done = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start]
        done += end - start


def get_last_loc(
    req_to_token: torch.Tensor,
    req_pool_indices_tensor: torch.Tensor,
    prefix_lens_tensor: torch.Tensor,
) -> torch.Tensor:
    """The slot before each request's next one, -1 where it has none."""
    last = req_to_token[req_pool_indices_tensor, (prefix_lens_tensor - 1).clamp_min(0)]
    return torch.where(prefix_lens_tensor > 0, last, -1)


PATCHES = (
    Patch(
        target="sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        hook=assign_req_to_token_pool,
        kind="replace",
        scope="cpu",
        parameters=(
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "end_offset",
            "out_cache_loc",
            "batch_size",
        ),
        reason="launches Triton on every device but the stock CPU engine",
        without="no speculative algorithm can reserve KV slots on the CPU",
    ),
    Patch(
        target="sglang.srt.mem_cache.allocation.get_last_loc",
        hook=get_last_loc,
        kind="replace",
        scope="cpu",
        parameters=("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        reason="chooses Triton by the name of the attention backend",
        without="page sizes above 1 fail on the CPU",
    ),
)
