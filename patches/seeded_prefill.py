"""The first token of a request with a seed, which SGLang's sampler draws at the end of a prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .base import Patch


def sample_from_probs(
    original: Callable[..., Any],
    sampler: Any,
    probs: torch.Tensor,
    sampling_info: Any,
    positions: torch.Tensor,
    simple_sampling_case: bool,
) -> Any:
    seeds = getattr(sampling_info, "dflash2_seeds", None)
    if seeds is None:
        return original(sampler, probs, sampling_info, positions, simple_sampling_case)
    from dflash2_sglang.seeds import redraw

    if seeds.fixed:  # the others are greedy; SGLang's own would refuse min-p here
        tokens, capture = probs.argmax(-1).int(), None
    else:
        tokens, capture = original(sampler, probs, sampling_info, positions, simple_sampling_case)
    return redraw(tokens, probs, positions, seeds, sampling_info), capture


PATCHES = (
    Patch(
        target="sglang.srt.layers.sampler.Sampler._sample_from_probs",
        hook=sample_from_probs,
        kind="around",
        scope="dflash2",
        parameters=("self", "probs", "sampling_info", "positions", "simple_sampling_case"),
        reason="it heeds seeds only under deterministic inference, and by what else is in the batch",
        without="the first token of a request with a seed would not be reproducible",
    ),
)
