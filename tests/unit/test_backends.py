"""Attention backends: what each can do with a tree, what is refused, and what is chosen instead."""

from __future__ import annotations

import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash2_sglang import backends
from dflash2_sglang.backends import BY_NAME, NAMES, TABLE, Case, able, obstacle, refusal

GPU = backends.available(on_cpu=False)
CASES = [
    Case(children, page, kv, window, mla)
    for children, page, kv, window, mla in product(
        (1, 8), (1, 16, 64), ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2", "nvfp4"), (0, 1), (0, 1)
    )
]


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("children", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_all_serve_a_dense_target(name: str, children: int, page: int) -> None:
    assert obstacle(BY_NAME[name], Case(children, page)) is None


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (Case(8, 1, window=True), ["fa3"]),
        (Case(8, 16, window=True), []),
        (Case(1, 16, window=True), ["fa3", "triton"]),
        (Case(8, 16, mla=True), ["fa3", "triton"]),
        (Case(8, 64, "fp8_e4m3"), ["fa3", "flashinfer"]),
        (Case(8, 64, "fp8_e5m2"), ["flashinfer"]),
        (Case(8, 1, "mxfp8"), []),
        (Case(8, 1, "fp8_e5m2", window=True), []),
    ],
    ids=str,
)
def test_who_can(case: Case, names: list[str]) -> None:
    assert able(case, GPU) == names


@pytest.mark.parametrize("case", CASES, ids=str)
def test_refusals_name_a_way_that_works(case: Case) -> None:
    """Whatever is refused says why, and what it tells to use is served."""
    for name in GPU:
        message = refusal("--attention-backend", name, case, GPU)
        assert (message is None) == (obstacle(BY_NAME[name], case) is None)
        if message is None:
            continue
        assert message.count(".") == 1 + message.count("0.5.")
        assert f"--attention-backend {name}: " in message
        told = dict(re.findall(r"(--[a-z-]+) (\S+?)(?=[ ;:.]|$)", message.rsplit("; use ", 1)[-1]))
        if message.endswith("serve this target without DFLASH2."):
            assert case.window or case.kv == "nvfp4"
            continue
        changed = Case(
            int(told.get("--speculative-eagle-topk", case.children)),
            int(told.get("--page-size", case.page)),
            told.get("--kv-cache-dtype", case.kv),
            case.window,
            case.mla,
        )
        assert told["--attention-backend"] in able(changed, GPU)


def test_reasons_are_given_for_all_that_cannot() -> None:
    for backend, case in product(TABLE, CASES):
        if found := obstacle(backend, case):
            assert all(found), (backend.name, case)


# What a launch becomes.


def arguments(**changes: Any) -> Any:
    unset = dict.fromkeys(backends.FLAGS)
    given = {
        **unset,
        "speculative_attention_mode": "prefill",
        "speculative_draft_attention_backend": None,
        "page_size": 1,
        "kv_cache_dtype": "auto",
        "dtype": "bfloat16",
        "_raw_input": {name: value for name, value in changes.items() if name in unset},
    }
    return SimpleNamespace(**{**given, **changes})


def test_the_users_choice_is_kept_or_refused() -> None:
    args = arguments(attention_backend="triton")
    backends.resolve(args, Case(8), on_cpu=False)
    assert args.attention_backend == "triton"
    with pytest.raises(ValueError, match="triton: it reads the tree's own keys") as caught:
        backends.resolve(args, Case(8, kv="fp8_e4m3"), on_cpu=False)
    assert "use --attention-backend fa3 or flashinfer" in str(caught.value)
    for other in ("trtllm_mha", "torch_native", "fa4"):
        with pytest.raises(ValueError, match=f"--attention-backend {other}, which cannot mask"):
            backends.resolve(arguments(attention_backend=other), Case(8), on_cpu=False)


@pytest.mark.parametrize(
    ("theirs", "case", "chosen"),
    [
        ("flashinfer", Case(8), "flashinfer"),
        ("triton", Case(8), "triton"),
        ("trtllm_mha", Case(8), "fa3"),
        ("fa3", Case(8, kv="fp8_e5m2"), "flashinfer"),
        ("flashinfer", Case(8, window=True), "fa3"),
        ("flashinfer", Case(8, mla=True), "fa3"),
    ],
)
def test_sglangs_choice_is_kept_where_it_can(theirs: str, case: Case, chosen: str) -> None:
    args = arguments(attention_backend=theirs, _raw_input={})
    backends.resolve(args, case, on_cpu=False)
    assert args.attention_backend == chosen


def test_nobody_can() -> None:
    args = arguments(attention_backend="flashinfer", _raw_input={})
    with pytest.raises(ValueError, match="use --page-size 1 and --attention-backend fa3"):
        backends.resolve(args, Case(8, 64, window=True), on_cpu=False)


def test_only_the_verifying_backend_has_to_mask() -> None:
    mixed = {"prefill_attention_backend": "fa4", "decode_attention_backend": "triton"}
    with pytest.raises(ValueError, match="--prefill-attention-backend fa4, which cannot mask"):
        backends.resolve(arguments(**mixed), Case(8), on_cpu=False)
    backends.resolve(arguments(**mixed, speculative_attention_mode="decode"), Case(8), on_cpu=False)
    with pytest.raises(ValueError, match="--decode-attention-backend triton, which"):
        backends.resolve(arguments(decode_attention_backend="triton"), Case(8), on_cpu=True)


def test_the_drafters_backend() -> None:
    for name in GPU:
        args = arguments(speculative_draft_attention_backend=name)
        backends.resolve(args, Case(8, 64, "fp8_e5m2"), on_cpu=False)
    with pytest.raises(ValueError, match="--speculative-draft-attention-backend trtllm_mha"):
        backends.resolve(
            arguments(speculative_draft_attention_backend="trtllm_mha"), Case(8), on_cpu=False
        )


@pytest.mark.parametrize(("interpreted", "names"), [("1", 2), ("0", 1)])
def test_the_cpu(monkeypatch: pytest.MonkeyPatch, interpreted: str, names: int) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    assert backends.available(on_cpu=True) == ("dflash2_cpu", "triton")[:names]


def test_caches_of_another_type_on_the_cpu() -> None:
    kept = arguments(attention_backend="dflash2_cpu")
    backends.resolve(kept, Case(8, kv="bf16"), on_cpu=True)
    with pytest.raises(ValueError, match="--kv-cache-dtype bf16 with --dtype float32 on a CPU"):
        backends.resolve(arguments(dtype="float32"), Case(8, kv="bf16"), on_cpu=True)


# What is known only when the target is loaded.


def runner(**changes: Any) -> Any:
    usual = {
        "page_size": 1,
        "kv_cache_dtype": torch.bfloat16,
        "sliding_window_size": None,
        "prefill_attention_backend_str": "triton",
        "decode_attention_backend_str": "fa3",
    }
    return SimpleNamespace(**{**usual, **changes})


def test_a_checkpoint_with_a_cache_or_window_of_its_own() -> None:
    backends.refuse_loaded(runner(), 8, "prefill")
    backends.refuse_loaded(runner(kv_cache_dtype=torch.float8_e4m3fn), 8, "decode")
    backends.refuse_loaded(runner(sliding_window_size=128), 1, "prefill")
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8_e4m3"):
        backends.refuse_loaded(runner(kv_cache_dtype=torch.float8_e4m3fn), 8, "prefill")
    with pytest.raises(ValueError, match="sliding-window layers"):
        backends.refuse_loaded(runner(sliding_window_size=128), 8, "prefill")
    with pytest.raises(ValueError, match="at --page-size 16"):
        backends.refuse_loaded(runner(sliding_window_size=128, page_size=16), 8, "decode")
