"""What the CPU platform sets where the user said nothing."""

from __future__ import annotations

import logging
import os
from typing import Any

from dflash2_sglang import hybrid
from dflash2_sglang.cpu.platform import ATTENTION_BACKEND

logger = logging.getLogger(__name__)

KV_BUDGET_BYTES = 1 << 30
MIN_KV_TOKENS = 4096
MEMORY_SHARE = 0.98
STATE_BUDGET_BYTES = 2 << 30
MOST_REQUESTS = 48
USUAL_NODES = 8


def apply(args: Any) -> None:
    """Fill unset server arguments; each choice is logged with the flag that overrides it."""
    chosen: dict[str, Any] = {}

    def default(flag: str, value: Any, unset: tuple[Any, ...] = (None,)) -> None:
        if value is not None and getattr(args, flag) in unset:
            setattr(args, flag, value)
            chosen[flag] = value

    # The stock default for a CPU was filled in before the platform is asked, and cannot serve here.
    default("attention_backend", ATTENTION_BACKEND, (None, "torch_native", "intel_amx"))
    default("dtype", "bfloat16", ("auto",))
    default("max_total_tokens", _kv_tokens(args))
    default("max_mamba_cache_size", _state_slots(args))
    # The KV cache is sized above; a share of the free memory would only make a start beside a busy
    # neighbour fail, since what others take during the load counts as used up.
    default("mem_fraction_static", MEMORY_SHARE)
    default("disable_cuda_graph", True, (False,))
    # The scheduler would otherwise spin on a core that the next request needs.
    default("sleep_on_idle", True, (False,))
    _use_huge_pages()
    if args.tp_size > 1:
        _bind_threads(args.tp_size)
    if chosen:
        logger.info(
            "CPU platform defaults: %s", " ".join(f"{k}={v}" for k, v in sorted(chosen.items()))
        )


def _kv_tokens(args: Any) -> int | None:
    """KV slots within the budget, and never more than the requests could fill.

    Without a limit SGLang would give the cache most of the memory, 10 GB for a model of 270 MB.
    """
    from sglang.srt.arg_groups.overrides import model_config_of

    config = model_config_of(args)
    width = config.get_num_kv_heads(args.tp_size) * config.head_dim
    per_token = 2 * config.num_hidden_layers * width * (4 if args.dtype == "float32" else 2)
    return max(MIN_KV_TOKENS, KV_BUDGET_BYTES // per_token)


def _state_slots(args: Any) -> int | None:
    """Slots for states of recurrent layers within the budget; None for a target without such layers.

    Counted with the states that a verify pass keeps for its nodes. SGLang derives from the slots how many
    requests may run at once.
    """
    from sglang.srt.arg_groups.overrides import model_config_of

    target = model_config_of(args)
    config = hybrid.delta_net(target)
    if config is None:
        return None
    dtype = hybrid.compute_dtype(args, target)
    hybrid.keep_conv_inputs_exact(dtype)
    nodes = 0
    if args.speculative_algorithm is not None:
        nodes = args.speculative_num_draft_tokens or USUAL_NODES
    per_request = hybrid.state_bytes(config, dtype) * (hybrid.SLOTS_PER_REQUEST + nodes)
    most = args.max_running_requests or MOST_REQUESTS
    requests = max(1, min(most, STATE_BUDGET_BYTES // per_request))
    return requests * hybrid.SLOTS_PER_REQUEST


def _use_huge_pages() -> None:
    """Ask glibc for huge pages in the workers started from here.

    A forward streams all weights through the cores; with 4 kB pages a sixth of its time goes to page
    walks (18.9 ms instead of 15.9 for the products of SmolLM2-135M, docs/benchmarks.md).
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        ours = "glibc.malloc.hugetlb=1"
        os.environ["GLIBC_TUNABLES"] = f"{tunables}:{ours}" if tunables else ours


def _bind_threads(ranks: int) -> None:
    """Give each tensor-parallel rank its share of the cores this process may use."""
    if os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        return
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    groups = [cores[(r * share) % len(cores) :][:share] for r in range(ranks)]
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, g)) for g in groups)
