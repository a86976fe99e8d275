"""What cannot be served is refused at start-up, in SGLang's own argument pipeline, with the fix."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import ServerError
from tinypair import Pair, Pairs

from dflash2_sglang.algorithm import usual_nodes
from dflash2_sglang.config_refusals import CheckpointError
from dflash2_sglang.support import REFUSALS

Resolve = Callable[..., Any]


@pytest.fixture(scope="module")
def pair(pairs: Pairs) -> Pair:
    return pairs.pair()


@pytest.fixture(scope="module")
def resolve(pair: Pair) -> Resolve:
    """What ``sglang.launch_server`` does with its arguments before it starts a process."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()

    def resolve(
        *flags: str, drafter: Path | None = pair.drafter, target: Path = pair.target
    ) -> Any:
        argv = ["--model-path", str(target), "--speculative-algorithm", "DFLASH2"]
        if drafter is not None:
            argv += ["--speculative-draft-model-path", str(drafter)]
        args = prepare_server_args([*argv, *flags])
        args.resolve_once()
        return resolving_view(args)

    return resolve


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


# The checkpoint.


def altered(drafter: Path, folder: Path, **changes: Any) -> Path:
    """A copy whose config differs; None removes a field. The section's fields are found there."""
    shutil.copytree(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        place = config["dflash_config"] if name in config["dflash_config"] else config
        place[name] = value
        if value is None:
            del place[name]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_no_drafter(resolve: Resolve) -> None:
    with pytest.raises(ValueError, match="set --speculative-draft-model-path"):
        resolve(drafter=None)


def test_a_folder_without_config(resolve: Resolve, tmp_path: Path) -> None:
    """SGLang's own message, which names the folder and the file."""
    with pytest.raises(ValueError, match=rf"{tmp_path}.*config\.json"):
        resolve(drafter=tmp_path)


def test_the_target_as_its_own_drafter(resolve: Resolve, pair: Pair) -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM is not served by DFLASH2"):
        resolve(drafter=pair.target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "--speculative-algorithm EAGLE3"),
        ({"block_size": None}, "block_size is missing"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"mask_token_id": 1000}, "mask_token_id=1000 is outside the vocabulary"),
        ({"target_layer_ids": [0, 1, 7]}, "target_layer_ids names layer 7"),
        ({"selector_rank": None}, "selector_rank is missing"),
        ({"num_target_layers": 6}, "num_target_layers is 6 but the target has 4 layers"),
        ({"vocab_size": 80}, "vocab_size is 80 but the target's is 63"),
        ({"hidden_size": 128}, "hidden_size is 128 but the target's is 64"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "weights lack layers.2"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "weights hold layers.1"),
        ({"anchor_first": True}, "anchor-first layout"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configs(
    resolve: Resolve, pair: Pair, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    drafter = altered(pair.drafter, tmp_path / "drafter", **changes)
    with pytest.raises(CheckpointError) as caught:
        resolve(drafter=drafter)
    assert message in str(caught.value)


def test_a_drafter_for_another_target(resolve: Resolve, pairs: Pairs) -> None:
    with pytest.raises(CheckpointError, match="use the drafter that was trained for this target"):
        resolve(target=pairs.target(vocab=200))


def test_a_truncated_download(resolve: Resolve, pair: Pair, tmp_path: Path) -> None:
    drafter = altered(pair.drafter, tmp_path / "drafter")
    weights = drafter / "model.safetensors"
    content = weights.read_bytes()
    for length in (len(content) - 1, 200, 4):
        weights.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
            resolve(drafter=drafter)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        resolve(drafter=drafter)


# What only loading finds.


def test_weights_that_are_not_numbers(serve: Any, pair: Pair, tmp_path: Path) -> None:
    drafter = altered(pair.drafter, tmp_path / "drafter")
    weights = load_file(drafter / "model.safetensors")
    weights["layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, drafter / "model.safetensors")
    message = r"NaN or infinite values in tensor layers\.1\.mlp\.up_proj\.weight"
    with pytest.raises(ServerError, match=message), serve(pair.target, drafter):
        pass


def test_a_layer_that_the_target_does_not_hand_out(serve: Any, pair: Pair, tmp_path: Path) -> None:
    """SGLang's Llama captures the input of each layer, so there is no output of the last one."""
    drafter = altered(pair.drafter, tmp_path / "drafter", target_layer_ids=[0, 1, 3])
    message = r"width 128 where target_layer_ids=\[0, 1, 3\] make 192"
    with pytest.raises(ServerError, match=message), serve(pair.target, drafter):
        pass


def test_a_refusal_ends_the_command(serve: Any, pair: Pair) -> None:
    """Through the command line: the process ends and the message is the last thing said."""
    message = "ValueError: DFLASH2 does not support --enable-mixed-chunk"
    with (
        pytest.raises(ServerError, match=message),
        serve(pair.target, pair.drafter, "--enable-mixed-chunk"),
    ):
        pass
