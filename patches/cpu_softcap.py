"""Logits capped with tanh, as Gemma-like targets want them, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .base import Patch


def softcap(
    original: Callable[..., Any], full_logits: torch.Tensor, final_logit_softcapping: float
) -> torch.Tensor:
    """cap * tanh(logits / cap), in place."""
    if not full_logits.is_cpu:
        return original(full_logits, final_logit_softcapping)
    cap = final_logit_softcapping
    return full_logits.div_(cap).tanh_().mul_(cap)


PATCHES = (
    Patch(
        target="sglang.kernels.ops.activation.softcap.softcap_inplace_logits",
        hook=softcap,
        kind="around",
        scope="cpu",
        parameters=("full_logits", "final_logit_softcapping"),
        reason="a Triton kernel caps the logits on every device that is not SGLang's own CPU engine",
        without="targets with final_logit_softcapping fail at their first token on the CPU",
    ),
)
