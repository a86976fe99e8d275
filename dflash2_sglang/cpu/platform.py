"""The CPU as an SGLang platform, for machines without an accelerator.

``import sglang`` loads this module early, so at module level it imports only the platform seam, torch and
the standard library.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

NAME = "dflash2_cpu"
ATTENTION_BACKEND = "dflash2_cpu"
ALGORITHMS = ("DFLASH", "DFLASH2")

logger = logging.getLogger(__name__)


def has_accelerator() -> bool:
    """Whether SGLang would find a device it supports itself."""
    if torch.cuda.is_available() or torch.xpu.is_available():
        return True
    if torch.backends.mps.is_available():
        return True
    return bool(getattr(getattr(torch, "npu", None), "is_available", lambda: False)())


def attention_backends() -> tuple[str, ...]:
    """Attention backends that run on a CPU; SGLang's Triton kernels do in Triton's interpreter.

    That is slow. It is there to try the path of GPUs without one.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (ATTENTION_BACKEND, "triton") if interpreted else (ATTENTION_BACKEND,)


def activate() -> str | None:
    """Entry point: the platform's class path, or None to leave the machine to SGLang."""
    chosen = os.environ.get("SGLANG_PLATFORM", "")
    stock_cpu_engine = os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"
    if chosen == NAME or (not stock_cpu_engine and not has_accelerator()):
        return f"{__name__}.CpuPlatform"
    return None


class CpuPlatform(SRTPlatform):
    """Serves on the CPU with torch alone: no Triton launch, no device graph."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        import psutil

        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        import psutil

        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        return torch.profiler.ProfilerActivity.CPU

    def get_dispatch_key_name(self) -> str:
        return "dflash2_cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from dflash2_sglang.cpu.defaults import apply

        apply(server_args)

    def init_backend(self) -> None:
        from dflash2_sglang.cpu import ops

        ops.register()

    def post_load_model(self, model: torch.nn.Module) -> None:
        import dflash2_sglang.patches as patches
        from dflash2_sglang.cpu.weights import prepare

        patches.verify(["cpu"])
        prepare(model)

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ALGORITHMS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm in ALGORITHMS and backend in attention_backends()

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from dflash2_sglang.cpu.kv_pool import CpuKVPool

        return CpuKVPool

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        from dflash2_sglang.cpu.kernels import cache_locs

        return cache_locs
