"""What the CPU platform sets where the user said nothing."""

from __future__ import annotations

import logging
import os
from typing import Any

from dflash2_sglang.cpu.platform import ATTENTION_BACKEND

logger = logging.getLogger(__name__)

KV_BUDGET_BYTES = 1 << 30
MIN_KV_TOKENS = 4096


def apply(args: Any) -> None:
    """Fill unset server arguments; each choice is logged with the flag that overrides it."""
    chosen: dict[str, Any] = {}

    def default(flag: str, value: Any, unset: tuple[Any, ...] = (None,)) -> None:
        if getattr(args, flag) in unset:
            setattr(args, flag, value)
            chosen[flag] = value

    # The stock default for a CPU was filled in before the platform is asked, and cannot serve here.
    default("attention_backend", ATTENTION_BACKEND, (None, "torch_native", "intel_amx"))
    default("dtype", "bfloat16", ("auto",))
    default("max_total_tokens", _kv_tokens(args))
    default("disable_cuda_graph", True, (False,))
    if args.tp_size > 1:
        _bind_threads(args.tp_size)
    if chosen:
        logger.info(
            "CPU platform defaults: %s", " ".join(f"{k}={v}" for k, v in sorted(chosen.items()))
        )


def _kv_tokens(args: Any) -> int:
    return 65536


def _bind_threads(ranks: int) -> None:
    """Give each tensor-parallel rank its share of the cores this process may use."""
    if os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        return
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    groups = [cores[(r * share) % len(cores) :][:share] for r in range(ranks)]
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, g)) for g in groups)
