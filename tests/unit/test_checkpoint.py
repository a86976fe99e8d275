"""A checkpoint's files against its config, from the headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import qwen
from safetensors.torch import save_file

from dflash2_sglang import checkpoint, config
from dflash2_sglang.config import CheckpointError

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "layer_types": ["full_attention"],
    "mask_token_id": 3,
    "selector_rank": 4,
}


@pytest.fixture
def small() -> config.DrafterConfig:
    return config.parse(qwen(**SMALL))


def tensors(c: config.DrafterConfig) -> dict[str, torch.Tensor]:
    return {n: torch.zeros(s).bfloat16() for n, s in checkpoint.expected_tensors(c).items()}


def test_complete_weights(tmp_path: Path, small: config.DrafterConfig) -> None:
    weights = tensors(small) | {
        "embed_tokens.weight": torch.zeros(2),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    save_file(weights, tmp_path / "model.safetensors")
    unexpected = ["embed_tokens.weight", "layers.0.self_attn.rotary_emb.inv_freq"]
    assert sorted(checkpoint.check_weights(tmp_path, small)) == unexpected


def test_sharded_weights_and_other_spellings(tmp_path: Path, small: config.DrafterConfig) -> None:
    renamed = {
        f"model.{n}.weight" if "codebook" in n else f"model.{n}": w
        for n, w in tensors(small).items()
    }
    names = sorted(renamed)
    places = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(places.values()):
        save_file({n: renamed[n] for n in names if places[n] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert checkpoint.check_weights(tmp_path, small) == []
    (tmp_path / places[names[0]]).unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors, absent from"):
        checkpoint.check_weights(tmp_path, small)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="is not a valid index"):
        checkpoint.check_weights(tmp_path, small)


def test_truncated_and_foreign_files(tmp_path: Path, small: config.DrafterConfig) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors file"):
        checkpoint.check_weights(tmp_path, small)
    file = tmp_path / "model.safetensors"
    save_file(tensors(small), file)
    whole = file.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 200, 5, 0):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="is truncated"):
            checkpoint.check_weights(tmp_path, small)
    for junk in (b"\x08" + bytes(7) + b"not json", b"\x02" + bytes(7) + b"[]"):
        file.write_bytes(junk)
        with pytest.raises(CheckpointError, match="is not a safetensors file"):
            checkpoint.check_weights(tmp_path, small)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, "weights lack fc.weight; download"),
        ({"norm.weight": (31,)}, r"norm.weight has shape \[31\] but config.json asks for \[32\]"),
        ({"layers.0.self_attn.q_proj.bias": (32,)}, "q_proj.bias, which config.json leaves no"),
        ({"layers.1.mlp.up_proj.weight": (4,)}, "layers.1.mlp.up_proj.weight, which config.json"),
    ],
)
def test_weights_of_another_config(
    tmp_path: Path, small: config.DrafterConfig, change: dict[str, Any], message: str
) -> None:
    weights = tensors(small)
    for name, shape in change.items():
        weights.pop(name, None)
        if shape:
            weights[name] = torch.zeros(shape)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.check_weights(tmp_path, small)


def test_many_missing_tensors_are_counted(small: config.DrafterConfig) -> None:
    with pytest.raises(CheckpointError, match=r"lack .*, .*, .* and \d+ more tensors;"):
        checkpoint.check_tensors(small, {})


def test_weights_without_their_section_of_the_config(small: config.DrafterConfig) -> None:
    """A convolution or selector that the config forgets must not be dropped in silence."""
    shapes = {n: tuple(w.shape) for n, w in tensors(small).items()}
    no_conv = config.parse(qwen(**SMALL, conv_kernel_size=None))
    with pytest.raises(CheckpointError, match=r"attention_conv.base_kernel.* no place"):
        checkpoint.check_tensors(no_conv, shapes)
    plain = config.parse(qwen(**SMALL, architectures=["DFlashDraftModel"]))
    with pytest.raises(CheckpointError, match=r"candidate_selector.* correct its architectures"):
        checkpoint.check_tensors(plain, shapes)


def test_quantised_tensors(tmp_path: Path, small: config.DrafterConfig) -> None:
    weights = tensors(small)
    weights["fc.weight"] = weights["fc.weight"].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc.weight is stored as F8_E4M3"):
        checkpoint.check_weights(tmp_path, small)
