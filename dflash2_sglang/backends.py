"""What each attention backend of SGLang 0.5.23 can do with a tree, read from its source; one table.

Used to refuse at start-up what would be silently wrong, and to choose where the user did not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

logger = logging.getLogger(__name__)

UNROUNDED = ("auto", "bf16", "bfloat16")


@dataclass(frozen=True)
class Backend:
    """A backend that masks trees. All of them do at every page size where the target has no window.

    window_pages  page sizes at which trees in a target with sliding-window layers are exact, () for none,
                  None for all
    window_chain  whether a chain (branching 1) is, at every page size
    mla           whether trees in a target with latent attention (MLA) are masked
    float8        ``--kv-cache-dtype`` beyond the unrounded ones with which verifying and plain decoding
                  read the same keys and values
    captured      whether its verify pass can be captured and refilled
    waits         whether SGLang's planning of a verify pass waits for the device, once a round
    window_why, mla_why, float8_why  what of it cannot, for the refusal
    """

    name: str
    on_cpu: bool
    window_pages: tuple[int, ...] | None = None
    window_chain: bool = True
    mla: bool = True
    float8: tuple[str, ...] = ()
    captured: bool = True
    waits: bool = False
    window_why: str = ""
    mla_why: str = ""
    float8_why: str = ""


# In the order of preference, where SGLang's own choice cannot serve and the user made none.
TABLE = (
    # layers/attention/flashattention_backend.py: prefix and tree in two passes, the tree's part by a page
    # table of each node's ancestors; window layers get one row a node, with a check of the page size.
    Backend(
        "fa3",
        on_cpu=False,
        window_pages=(1,),
        float8=("fp8_e4m3",),
        window_why="its tables for window layers hold single tokens",
        float8_why="its kernels know fp8_e4m3 only",
    ),
    # layers/attention/flashinfer_backend.py: verify is a paged prefill of single slots with a packed mask.
    # Window layers get trimmed keys under a mask of full width. plan() copies lengths to the host.
    Backend(
        "flashinfer",
        on_cpu=False,
        window_pages=(),
        window_chain=False,
        mla=False,
        float8=("fp8_e4m3", "fp8_e5m2"),
        waits=True,
        window_why="it trims a window layer's keys but not the mask over them",
        mla_why="its planner for latent attention ignores the mask",
    ),
    # layers/attention/triton_backend.py: the extend kernel with a mask. It measures a window by a node's
    # index, which exceeds its depth, and reads the pass's own keys before the cache rounds them.
    Backend(
        "triton",
        on_cpu=False,
        window_pages=(),
        window_why="its kernel measures the window by a node's index instead of its depth",
        float8_why="it reads the tree's own keys and values before they are rounded, plain decoding after",
    ),
    # dflash2_sglang/cpu/attention.py
    Backend(
        "dflash2_cpu",
        on_cpu=True,
        mla=False,
        captured=False,
        mla_why="it serves plain self-attention",
        float8_why="torch's attention on a CPU computes in the type of the keys",
    ),
)
BY_NAME = {backend.name: backend for backend in TABLE}
NAMES = tuple(BY_NAME)
FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


@dataclass(frozen=True)
class Case:
    """What a launch asks of the backend that verifies.

    children   branching C of the tree; page: ``--page-size``; kv: ``--kv-cache-dtype``
    window     whether the target has sliding-window layers; mla: latent attention
    """

    children: int
    page: int = 1
    kv: str = "auto"
    window: bool = False
    mla: bool = False


def obstacle(backend: Backend, case: Case) -> tuple[str, str] | None:
    """(what, why) ``backend`` cannot do of ``case``, or None."""
    if case.kv not in UNROUNDED and case.kv not in backend.float8:
        why = (
            backend.float8_why
            or "it stores more than keys and values, which verifying does not read"
        )
        return f"--kv-cache-dtype {case.kv}", why
    if case.mla and not backend.mla:
        return "trees in a target with latent attention", backend.mla_why
    if case.window and case.children == 1 and not backend.window_chain:
        return "verifying a target with sliding-window layers", backend.window_why
    pages = backend.window_pages
    if case.window and case.children > 1 and pages is not None and case.page not in pages:
        at = f" at --page-size {case.page}" if pages else ""
        return f"trees in a target with sliding-window layers{at}", backend.window_why
    return None


def available(*, on_cpu: bool) -> tuple[str, ...]:
    """Names of the backends that run on this device."""
    if on_cpu:
        from dflash2_sglang.cpu.platform import attention_backends

        return attention_backends()
    return tuple(backend.name for backend in TABLE if not backend.on_cpu)


def able(case: Case, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that can serve ``case``, the preferred first."""
    return [b.name for b in TABLE if b.name in names and obstacle(b, case) is None]


def refusal(flag: str, name: str, case: Case, names: Sequence[str]) -> str | None:
    """Why the backend ``name`` of ``flag`` cannot verify, in one sentence with the fix; None: it can."""
    if name not in names:
        usable = ", ".join(able(case, names) or names)
        known = any(backend.name == name for backend in TABLE)
        why = "is not for this device" if known else "cannot mask a tree"
        return f"DFLASH2 does not support {flag} {name}, which {why}: use one of {usable}."
    found = obstacle(BY_NAME[name], case)
    if found is None:
        return None
    what, why = found
    return f"DFLASH2 does not support {what} with {flag} {name}: {why}; {_fix(case, names)}."


def _fix(case: Case, names: Sequence[str]) -> str:
    """What to change, the smallest change first."""
    changes = (
        ("", case),
        ("--page-size 1 and ", replace(case, page=1)),
        ("--kv-cache-dtype auto and ", replace(case, kv="auto")),
        ("--speculative-eagle-topk 1 and ", replace(case, children=1)),
    )
    for flag, changed in changes:
        if usable := able(changed, names):
            return f"use {flag}--attention-backend {' or '.join(usable)}"
    return "serve this target without DFLASH2"


def verifying(args: Any) -> tuple[str, str | None]:
    """(flag, backend) that runs the verify pass; prefill and decode may have backends of their own."""
    own = f"{args.speculative_attention_mode or 'prefill'}_attention_backend"
    used = own if getattr(args, own) is not None else "attention_backend"
    return flag_of(used), getattr(args, used)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def resolve(args: Any, case: Case, *, on_cpu: bool) -> None:
    """Refuse a backend that cannot serve ``case``; replace one that the user did not ask for.

    Raises:
        ValueError: one sentence naming the flag, the reason and backends that can.
    """
    names = available(on_cpu=on_cpu)
    for other in FLAGS[1:] if on_cpu else ():  # nothing else attends on a CPU, verifying or not
        if (value := getattr(args, other)) is not None and value not in names:
            raise ValueError(refusal(flag_of(other), value, case, names))
    if on_cpu and case.kv in UNROUNDED[1:] and args.dtype != "bfloat16":
        raise ValueError(
            f"DFLASH2 does not support --kv-cache-dtype {case.kv} with --dtype {args.dtype} on a CPU: "
            f"{BY_NAME['dflash2_cpu'].float8_why}; use --kv-cache-dtype auto."
        )
    flag, name = verifying(args)
    problem = None if name is None else refusal(flag, name, case, names)
    if problem is not None:
        usable = able(case, names)
        if not usable or _asked_for(args):
            raise ValueError(problem)
        args.attention_backend = usable[0]
        logger.info(
            "DFLASH2 verifies with --attention-backend %s instead of %s, which SGLang would have "
            "chosen: %s",
            usable[0],
            name,
            problem,
        )
    draft = args.speculative_draft_attention_backend
    if draft is not None and draft not in names:
        raise ValueError(
            f"DFLASH2 does not support --speculative-draft-attention-backend {draft}, which cannot mask a "
            f"tree's block: use one of {', '.join(names)}."
        )


def _asked_for(args: Any) -> bool:
    """Whether the user named a backend; SGLang has filled in the flag by now, but keeps what was given."""
    raw = getattr(args, "_raw_input", None)
    return raw is None or any(raw.get(flag) is not None for flag in FLAGS)


def case_of(args: Any, target: Any, children: int) -> Case:
    """What a launch asks; target: SGLang's ModelConfig."""
    text = target.hf_text_config
    kinds = getattr(text, "layer_types", None) or ()
    return Case(
        children=children,
        page=int(args.page_size or 1),
        kv=args.kv_cache_dtype or "auto",
        window=bool(target.is_hybrid_swa) or "sliding_attention" in kinds,
        mla=target.attention_arch.name == "MLA",
    )


def refuse_loaded(runner: Any, children: int, mode: str) -> None:
    """Once the target is loaded: whether it asks for more than the flags told.

    A checkpoint may bring a float8 cache of its own, and a model class a window of its own.
    runner: SGLang's ModelRunner; mode: ``--speculative-attention-mode``
    """
    import torch

    kinds = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
    name = getattr(runner, f"{mode}_attention_backend_str")
    case = Case(
        children=children,
        page=int(runner.page_size),
        kv=kinds.get(runner.kv_cache_dtype, "auto"),
        window=runner.sliding_window_size is not None and runner.sliding_window_size > -1,
    )
    if name in BY_NAME and (problem := refusal("--attention-backend", name, case, NAMES)):
        raise ValueError(problem)
