"""Steps of SGLang's sampler that are compiled or launch a kernel when they are first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .base import Patch

MASK = 0xFFFFFFFF


def apply_scaling_penalties(logits: torch.Tensor, scaling_penalties: torch.Tensor) -> None:
    """Repetition penalties [..., V] on logits [..., V], in place."""
    weaker, stronger = logits / scaling_penalties, logits * scaling_penalties
    logits.copy_(torch.where(logits < 0, stronger, weaker))


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 (32 bits) of (seed, position, column), 8 + 4 + 4 bytes; [N, M] int64.

    seed [N] of 64 bits, positions [N], col_indices [M]
    """
    seed = seed.to(torch.int64)
    h = torch.zeros_like(seed)
    for word in (seed, seed >> 32, positions.to(torch.int64)):
        h = _mix(h, word & MASK)
    h = _mix(h.unsqueeze(1), col_indices.to(torch.int64) & MASK)
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


def _mix(h: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    # Products pass 63 bits and wrap, which leaves the lowest 32 as they should be.
    word = (_rotate((word * 0xCC9E2D51) & MASK, 15) * 0x1B873593) & MASK
    return (_rotate(h ^ word, 13) * 5 + 0xE6546B64) & MASK


def _rotate(x: torch.Tensor, by: int) -> torch.Tensor:
    return ((x << by) | (x >> (32 - by))) & MASK


def multinomial_with_seed(original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    return getattr(original, "_torchdynamo_orig_callable", original)(*args, **kw)


PATCHES = (
    Patch(
        target="sglang.srt.sampling.penaltylib.repetition_penalty.apply_scaling_penalties",
        hook=apply_scaling_penalties,
        kind="replace",
        scope="cpu",
        parameters=("logits", "scaling_penalties"),
        reason="it is compiled at its first use",
        without="all requests wait for seconds when the first repetition penalty arrives",
    ),
    Patch(
        target="sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        hook=murmur_hash32,
        kind="replace",
        scope="cpu",
        parameters=("seed", "positions", "col_indices"),
        reason="needs SGLang's kernels for CPUs, which its wheel lacks",
        without="requests with a seed fail on the CPU",
    ),
    Patch(
        target="sglang.srt.layers.sampler.multinomial_with_seed",
        hook=multinomial_with_seed,
        kind="around",
        scope="cpu",
        parameters=("logprobs", "seed", "positions"),
        reason="it is compiled at its first use",
        without="all requests wait for seconds when the first seed arrives",
    ),
)
