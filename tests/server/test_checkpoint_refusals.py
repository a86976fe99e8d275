"""Drafters that do not fit are refused at start-up, in SGLang's own argument pipeline or on loading."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import ServerError
from tinypair import Pair, Pairs

from dflash2_sglang.config_refusals import CheckpointError

Resolve = Callable[..., Any]


@pytest.fixture(scope="module")
def pair(pairs: Pairs) -> Pair:
    return pairs.pair()


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
