"""What ``dflash2-sglang doctor`` looks at: versions, device, patches, a pair and what a launch becomes.

Nothing is loaded and no accelerator is touched: devices are asked through NVML, checkpoints through
their headers, and flags go through SGLang's own argument pipeline, which ends before any weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "dflash2-sglang",
    "sglang",
    "torch",
    "triton",
    "flashinfer-python",
    "transformers",
    "numpy",
)
RESOLVED = (
    "device",
    "dtype",
    "kv_cache_dtype",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_attention_mode",
    "speculative_draft_attention_backend",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "page_size",
    "tp_size",
    "max_running_requests",
    "max_total_tokens",
    "disable_overlap_schedule",
)
DTYPE_BYTES = {"float32": 4, "float": 4, "auto": 2, "bfloat16": 2, "half": 2, "float16": 2}
KV_BYTES = {"fp8_e5m2": 1, "fp8_e4m3": 1}


@dataclass
class Checkup:
    """Findings by section, each a flat record; ``problems`` is empty where DFLASH2 can serve."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(flags: Sequence[str], context: int, batch: int) -> Checkup:
    """Everything that can be told before a launch; ``flags`` are those of ``sglang.launch_server``."""
    found = Checkup()
    versions(found)
    device(found)
    patch_targets(found)
    if flags and not found.problems:
        launch(found, list(flags), context, batch)
    return found


def versions(found: Checkup) -> None:
    from dflash2_sglang.patches.base import TESTED_VERSIONS

    installed: dict[str, Any] = {}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = None
    found.sections["versions"] = installed
    if installed["sglang"] not in TESTED_VERSIONS:
        found.notes.append(
            f"SGLang {installed['sglang']} is not one this package was tested with "
            f"({', '.join(TESTED_VERSIONS)})."
        )


def device(found: Checkup) -> None:
    from sglang.srt.platforms import current_platform

    from dflash2_sglang.backends import available
    from dflash2_sglang.cpu.platform import CpuPlatform

    on_cpu = isinstance(current_platform, CpuPlatform)
    found.sections["device"] = {
        "accelerators": accelerators() or None,
        "processor": processor(),
        "memory_gib": round(host_memory() / 2**30, 1),
        "platform": "CPU platform of this package" if on_cpu else type(current_platform).__name__,
        "attention_backends": list(available(on_cpu=on_cpu)),
    }


def accelerators() -> list[str]:
    """Names and memory of NVIDIA devices, asked of the driver without opening them."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library: no device
        return []
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
        found.append(f"{pynvml.nvmlDeviceGetName(handle)}, {total / 2**30:.0f} GiB")
    pynvml.nvmlShutdown()
    return found


def processor() -> str:
    import os

    from dflash2_sglang.algorithm import has_amx

    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    amx = "with AMX" if has_amx() else "no AMX"
    return f"{names[0] if names else 'unknown'}, {len(os.sched_getaffinity(0))} cores, {amx}"


def host_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def patch_targets(found: Checkup) -> None:
    import dflash2_sglang.patches as patches

    found.sections["patches"] = {
        patch.target: patch.problem() or f"fits ({patch.scope})" for patch in patches.discover()
    }
    found.problems += [problem for patch in patches.discover() if (problem := patch.problem())]


def launch(found: Checkup, flags: list[str], context: int, batch: int) -> None:
    """What SGLang makes of the flags, and whether the pair fits."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    if "--speculative-algorithm" not in flags:
        flags += ["--speculative-algorithm", "DFLASH2"]
    load_plugins()
    try:
        args = prepare_server_args(flags)
        args.resolve_once()
        view = resolving_view(args)
        target = model_config_of(args)
    except SystemExit:
        found.problems.append("SGLang does not know these flags; its own message says which.")
        return
    except Exception as error:  # whatever a launch would die of
        found.problems.append(str(error))
        return
    found.sections["launch"] = {name: getattr(view, name, None) for name in RESOLVED}
    if view.speculative_algorithm != "DFLASH2":
        found.notes.append(f"--speculative-algorithm is {view.speculative_algorithm}, not DFLASH2.")
        return
    pair(found, view, target, context, batch)


def pair(found: Checkup, view: Any, target: Any, context: int, batch: int) -> None:
    from dflash2_sglang.algorithm import draft_config
    from dflash2_sglang.config import parse

    draft = parse(draft_config(view, view.speculative_draft_model_path))
    found.sections["drafter"] = {
        "architecture": draft.architecture,
        "layers": draft.num_layers,
        "hidden_size": draft.hidden_size,
        "block_size": draft.block_size,
        "taps": list(draft.target_layer_ids),
        "mask_token_id": draft.mask_token_id,
        "sliding_window": draft.sliding_window,
        "convolution": f"{draft.conv_kernel_size} taps" if draft.has_conv else None,
        "selector": f"rank {draft.selector_rank}" if draft.has_selector else None,
    }
    width = KV_BYTES.get(view.kv_cache_dtype, DTYPE_BYTES.get(view.dtype, 2))
    heads = target.get_num_kv_heads(view.tp_size)
    target_kv = 2 * target.num_hidden_layers * heads * target.head_dim * width
    draft_heads = max(1, draft.num_kv_heads // view.tp_size)
    draft_kv = 2 * draft.num_layers * draft_heads * draft.head_dim * width
    rows = batch * int(view.speculative_num_draft_tokens)
    logits = 4 * rows * target.vocab_size // view.tp_size
    weights = [_weight_bytes(p) for p in (view.model_path, view.speculative_draft_model_path)]
    total = sum(w or 0 for w in weights) // view.tp_size + (target_kv + draft_kv) * context * batch
    found.sections["memory a rank"] = {
        "target_weights_gib": _gib(weights[0], view.tp_size),
        "draft_weights_gib": _gib(weights[1], view.tp_size),
        "target_kv_bytes_a_token": target_kv,
        "draft_kv_bytes_a_token": draft_kv,
        "verify_logits_mib": round(logits / 2**20, 1),
        f"all_gib at {batch} x {context} tokens": round((total + logits) / 2**30, 2),
    }


def _weight_bytes(path: str) -> int | None:
    """Of a local checkpoint; None for a name on the hub, whose files are elsewhere."""
    folder = Path(path)
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    return sum(file.stat().st_size for file in files) or None


def _gib(size: int | None, ranks: int) -> float | None:
    return None if size is None else round(size / ranks / 2**30, 2)
