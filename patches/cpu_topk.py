"""Top-k of the stock DFlash selector, which takes flashinfer whenever that is installed."""

from __future__ import annotations

import torch

from .base import Patch


def radix_topk(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices of the k largest of scores [N, V], in falling order."""
    values, indices = torch.topk(scores, k, dim=-1)
    return values, indices


PATCHES = (
    Patch(
        target="sglang.srt.models.dflash._radix_topk",
        hook=radix_topk,
        kind="replace",
        scope="cpu",
        parameters=("scores", "k"),
        reason="flashinfer's top-k runs on CUDA only",
        without="the stock DFLASH baseline fails on the CPU",
    ),
)
