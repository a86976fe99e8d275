"""Calls that concern a device's streams and copies: without a device there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .base import Patch


def record_stream(original: Callable[..., Any], tensor: torch.Tensor, stream: Any) -> None:
    if not tensor.is_cpu:
        original(tensor, stream)


def pin_memory(
    original: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any
) -> torch.Tensor:
    return tensor


PATCHES = (
    Patch(
        target="torch.Tensor.record_stream",
        hook=record_stream,
        kind="around",
        scope="cpu",
        parameters=(),
        reason="the stock DFLASH worker calls it on whatever device it serves",
        without="the stock DFLASH baseline fails on the CPU",
    ),
    Patch(
        target="torch.Tensor.pin_memory",
        hook=pin_memory,
        kind="around",
        scope="cpu",
        parameters=(),
        reason="the scheduler calls it for hybrid models on whatever device it serves",
        without="plain decoding of hybrid models fails on the CPU",
    ),
)
