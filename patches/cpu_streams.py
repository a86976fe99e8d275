"""``record_stream`` on a CPU tensor: there is no stream, so there is nothing to record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .base import Patch


def record_stream(original: Callable[..., Any], tensor: torch.Tensor, stream: Any) -> None:
    if not tensor.is_cpu:
        original(tensor, stream)


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
)
