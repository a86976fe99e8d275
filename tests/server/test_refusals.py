"""Settings that cannot be served are refused at start-up, in SGLang's own argument pipeline, with the fix."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from serving import ServerError
from tinypair import Pairs

from dflash2_sglang.algorithm import usual_nodes
from dflash2_sglang.support import REFUSALS

Resolve = Callable[..., Any]


def tree_of(view: Any) -> tuple[int, int, int]:
    return (
        view.speculative_num_steps,
        view.speculative_eagle_topk,
        view.speculative_num_draft_tokens,
    )


# What is served.


USUAL = usual_nodes("cpu")  # depends on the machine


@pytest.mark.parametrize(
    ("flags", "tree"),
    [
        ("", (7, 8, USUAL)),
        ("--speculative-eagle-topk 1", (7, 1, 8)),
        ("--speculative-num-steps 2", (2, 8, USUAL)),
        ("--speculative-num-steps 1", (1, 8, min(9, USUAL))),
        ("--speculative-num-draft-tokens 2", (7, 8, 2)),
        ("--speculative-eagle-topk 1 --speculative-num-draft-tokens 8", (7, 1, 8)),
        ("--speculative-eagle-topk 63 --speculative-num-draft-tokens 64", (7, 63, 64)),
        ("--page-size 16 --tp-size 2 --chunked-prefill-size 64", (7, 8, USUAL)),
    ],
)
def test_trees(resolve: Resolve, flags: str, tree: tuple[int, int, int]) -> None:
    view = resolve(*flags.split())
    assert tree_of(view) == tree
    assert view.attention_backend == "dflash2_cpu"
    assert view.speculative_draft_attention_backend == "dflash2_cpu"
    assert view.max_running_requests == 48


def test_the_drafter_is_not_quantised_with_the_target(resolve: Resolve) -> None:
    for flags in ("--quantization fp8", "--speculative-draft-model-quantization unquant"):
        assert resolve(*flags.split()).speculative_draft_model_quantization is None


def test_the_users_limit_of_requests_is_kept(resolve: Resolve) -> None:
    assert resolve("--max-running-requests", "7").max_running_requests == 7


def test_cpu_servers_never_use_the_stock_backend(resolve: Resolve) -> None:
    """SGLang turns an unset backend into torch_native on a CPU; it cannot be told from a wish."""
    assert resolve("--attention-backend", "torch_native").attention_backend == "dflash2_cpu"


# Settings.


# Flags for each refusal, by the beginning of its setting.
ASKED = {
    "--pp-size": "--pp-size 2",
    "--disaggregation-mode": "--disaggregation-mode prefill",
    "LoRA": "--enable-lora",
    "data-parallel attention": "--enable-dp-attention --tp-size 2 --dp-size 2",
    "--enable-unified-memory": "--enable-unified-memory",
    "--enable-two-batch-overlap": "--enable-two-batch-overlap",
    "--enable-linear-replayssm-spec": "--enable-linear-replayssm-spec",
    "--enable-hierarchical-cache": "--enable-hierarchical-cache",
    "--enable-mixed-chunk": "--enable-mixed-chunk",
    "--enable-watermark": "--enable-watermark",
    "--speculative-use-rejection-sampling": "--speculative-use-rejection-sampling",
    "--speculative-draft-model-quantization": "--speculative-draft-model-quantization fp8",
    "--speculative-draft-window-size": "--speculative-draft-window-size 64",
    "--speculative-dflash-block-size": "--speculative-dflash-block-size 8",
    "--speculative-accept-threshold-single": "--speculative-accept-threshold-single 0.5",
}
# SGLang itself answers before it asks the algorithm; tests/unit/test_support.py has these.
ANSWERED_BY_SGLANG = {"--rl-on-policy-target", "--speculative-adaptive"}


def test_every_refusal_is_tried() -> None:
    settings = {refusal.setting for refusal in REFUSALS}
    for setting in settings:
        known = [start for start in (*ASKED, *ANSWERED_BY_SGLANG) if setting.startswith(start)]
        assert len(known) == 1, setting
    assert len(settings) == len(ASKED) + len(ANSWERED_BY_SGLANG)


@pytest.mark.parametrize("setting", ASKED)
def test_settings(resolve: Resolve, setting: str) -> None:
    (refusal,) = (r for r in REFUSALS if r.setting.startswith(setting))
    with pytest.raises(ValueError, match=r"^DFLASH2 does not support") as caught:
        resolve(*ASKED[setting].split())
    assert str(caught.value) == refusal.message
    flag = ASKED[setting].split()[0]
    assert flag in refusal.message


@pytest.mark.parametrize(
    "flags",
    [
        "--lora-paths a=b",
        "--attn-dp-size 2 --tp-size 2",
        "--speculative-accept-threshold-acc 0.5",
        "--disaggregation-mode decode",
    ],
)
def test_other_spellings(resolve: Resolve, flags: str) -> None:
    with pytest.raises(ValueError, match=r"^DFLASH2 does not support"):
        resolve(*flags.split())


@pytest.mark.parametrize(
    "flag",
    [
        "--prefill-attention-backend",
        "--decode-attention-backend",
        "--speculative-draft-attention-backend",
    ],
)
def test_backends_that_cannot_mask(resolve: Resolve, flag: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{flag} torch_native, which")) as caught:
        resolve(flag, "torch_native")
    assert str(caught.value).endswith("use one of dflash2_cpu.")


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_float8_caches_on_the_cpu(resolve: Resolve, kind: str) -> None:
    with pytest.raises(ValueError, match=f"--kv-cache-dtype {kind} with .*dflash2_cpu") as caught:
        resolve("--kv-cache-dtype", kind)
    assert str(caught.value).endswith(
        "use --kv-cache-dtype auto and --attention-backend dflash2_cpu."
    )


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        ("--speculative-num-draft-tokens 1", None),
        ("--speculative-num-draft-tokens 0", None),
        ("--speculative-num-draft-tokens 9 --speculative-eagle-topk 1", "8"),
        ("--speculative-num-draft-tokens 10 --speculative-num-steps 1", "9"),
        ("--speculative-eagle-topk 0", "63"),
        ("--speculative-eagle-topk 64", "63"),
        ("--speculative-num-steps 0", "7"),
        ("--speculative-num-steps 8", "7"),
    ],
)
def test_impossible_trees(resolve: Resolve, flags: str, most: str | None) -> None:
    flag, value = flags.split()[:2]
    with pytest.raises(ValueError, match=re.escape(f"{flag} {value} must lie between")) as caught:
        resolve(*flags.split())
    assert most is None or f"and {most}, " in str(caught.value)


def test_ranks_that_cannot_share_the_drafter(resolve: Resolve) -> None:
    with pytest.raises(ValueError, match=r"--tp-size 4 cannot split .*num_key_value_heads=2"):
        resolve("--tp-size", "4")


def test_a_refusal_ends_the_command(serve: Any, pairs: Pairs) -> None:
    """Through the command line: the process ends and the message is the last thing said."""
    message = "ValueError: DFLASH2 does not support --enable-mixed-chunk"
    pair = pairs.pair()
    with (
        pytest.raises(ServerError, match=message),
        serve(pair.target, pair.drafter, "--enable-mixed-chunk"),
    ):
        pass
