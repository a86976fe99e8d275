"""What ``dflash2-sglang doctor`` looks at: versions, device, patches, a pair and what a launch becomes.

Nothing is loaded and no accelerator is touched: devices are asked through NVML, checkpoints through
their headers, and flags go through SGLang's own argument pipeline, which ends before any weights.
"""

from __future__ import annotations

import contextlib
import io
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
    "speculative_algorithm",
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
WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")


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
        "accelerators": [f"{name}, {size / 2**30:.0f} GiB" for name, size in accelerators()],
        "processor": processor(),
        "memory_gib": round(host_memory() / 2**30, 1),
        "platform": "CPU platform of this package" if on_cpu else type(current_platform).__name__,
        "attention_backends": list(available(on_cpu=on_cpu)),
    }


def accelerators() -> list[tuple[str, int]]:
    """Names and bytes of memory of NVIDIA devices, asked of the driver without opening them."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library: no device
        return []
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        found.append((str(pynvml.nvmlDeviceGetName(handle)), total))
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
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = prepare_server_args(flags)
        args.resolve_once()
        view = resolving_view(args)
        target = model_config_of(args)
    except SystemExit:
        reason = said.getvalue().strip().rpartition("\n")[2].partition("error: ")[2]
        found.problems.append(f"SGLang does not take these flags: {reason or 'see above'}.")
        return
    except Exception as error:  # whatever a launch would die of
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        found.problems.append(f"{name}{error}")
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
    cap = getattr(target.hf_text_config, "final_logit_softcapping", None)
    if cap and draft.final_logit_softcapping is None:
        found.notes.append(
            f"The target caps its logits (final_logit_softcapping={cap}) and the drafter's config.json "
            "says nothing of it: drafts are ranked without the cap."
        )
    memory(found, view, target, draft, context, batch)


def memory(found: Checkup, view: Any, target: Any, draft: Any, context: int, batch: int) -> None:
    """What one rank needs for ``batch`` requests of ``context`` tokens each, activations aside."""
    ranks = view.tp_size
    width = KV_BYTES.get(view.kv_cache_dtype, DTYPE_BYTES.get(view.dtype, 2))
    target_kv = 2 * target.num_hidden_layers * target.get_num_kv_heads(ranks) * target.head_dim
    draft_kv = 2 * draft.num_layers * max(1, draft.num_kv_heads // ranks) * draft.head_dim
    kv = (target_kv + draft_kv) * width * context * batch
    logits = 4 * batch * int(view.speculative_num_draft_tokens) * target.vocab_size
    weights = [weight_bytes(p) for p in (view.model_path, view.speculative_draft_model_path)]
    held = sum(size or 0 for size in weights) // ranks
    there = rank_memory(ranks)
    found.sections["memory of a rank"] = {
        "requests": batch,
        "tokens_each": context,
        "target_weights_gib": _gib(weights[0], ranks),
        "draft_weights_gib": _gib(weights[1], ranks),
        "target_kv_bytes_per_token": target_kv * width,
        "draft_kv_bytes_per_token": draft_kv * width,
        "kv_gib": _gib(kv),
        "logits_gib": _gib(logits),
        "total_gib": _gib(held + kv + logits),
        "available_gib": _gib(there),
    }
    if None in weights:
        found.notes.append(
            "Weights that are not on this machine yet are not counted in the memory."
        )
    if held > there:
        found.problems.append(
            f"The weights need {_gib(held)} GiB a rank and there are {_gib(there)}: raise --tp-size, or "
            "use a smaller or quantised target."
        )
    elif held + kv + logits > there:
        found.notes.append(
            f"{batch} requests of {context} tokens need more memory than there is; SGLang will keep fewer "
            "tokens in its cache, and requests will wait for each other."
        )


def weight_bytes(path: str) -> int | None:
    """Of a checkpoint folder, a GGUF file, or a name on the hub that was downloaded before; else None."""
    folder = Path(path)
    if folder.is_file():
        return folder.stat().st_size
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(path, local_files_only=True))
        except Exception:  # not here, or no such name
            return None
    sizes = [f.stat().st_size for kind in WEIGHTS for f in folder.glob(kind)]
    return sum(sizes) or None


def rank_memory(ranks: int) -> int:
    """Of one accelerator, or of this machine shared by the ranks; in bytes."""
    totals = [total for _, total in accelerators()]
    return min(totals[:ranks]) if totals else host_memory() // ranks


def _gib(size: int | None, ranks: int = 1) -> float | None:
    return None if size is None else round(size / ranks / 2**30, 3)
