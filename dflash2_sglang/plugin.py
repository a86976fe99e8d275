"""Entry point ``sglang.srt.plugins``: what SGLang runs once in every process."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms import current_platform

import dflash2_sglang.patches as patches
from dflash2_sglang import algorithm
from dflash2_sglang.cpu.platform import ATTENTION_BACKEND, CpuPlatform


def register() -> None:
    """Register the algorithm, the CPU's attention backend, and the patches of both."""
    algorithm.register()
    scopes: list[patches.Scope] = ["dflash2"]
    if isinstance(current_platform, CpuPlatform):
        _register_cpu_attention()
        scopes.append("cpu")
    patches.register(scopes)


def _register_cpu_attention() -> None:
    from sglang.srt.arg_groups.choices import (
        add_attention_backend_choices,
        add_draft_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_attention_backend_choices([ATTENTION_BACKEND])
    add_draft_attention_backend_choices([ATTENTION_BACKEND])

    @register_attention_backend(ATTENTION_BACKEND)
    def create(runner: Any) -> Any:
        from dflash2_sglang.cpu.attention import CpuAttnBackend

        return CpuAttnBackend(runner)
