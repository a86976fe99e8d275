"""The drafter's safetensors files against its config, from their headers alone (engine-free).

A header is 8 bytes (its length, little endian) and a JSON object that gives each tensor's dtype,
shape and place, so a truncated download or a wrong config is found before anything is loaded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from dflash2_sglang.config import CheckpointError, DrafterConfig

_HEADER_LIMIT = 100 << 20
_DTYPES = ("BF16", "F16", "F32")
# What some exports call a tensor -> the name that everything else uses.
_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}


class TensorHeader(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def canonical(name: str) -> str:
    """A tensor's name without the optional ``model.`` prefix and under its usual spelling."""
    name = name.removeprefix("model.")
    return _ALIASES.get(name, name)


def expected_tensors(c: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor that the configured drafter needs."""
    h, hd, ffn = c.hidden_size, c.head_dim, c.intermediate_size
    q, kv = c.num_heads * hd, c.num_kv_heads * hd
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_norm.weight": (hd,),
        "self_attn.k_norm.weight": (hd,),
        "mlp.gate_proj.weight": (ffn, h),
        "mlp.up_proj.weight": (ffn, h),
        "mlp.down_proj.weight": (h, ffn),
    }
    for name, rows, columns in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
        layer[f"self_attn.{name}_proj.weight"] = (rows, columns)
        if c.attention_bias:
            layer[f"self_attn.{name}_proj.bias"] = (rows,)
    if c.has_conv:
        kernels = 2 * c.conv_kernel_size * (h // c.conv_group_size)
        for conv in ("attention_conv", "mlp_conv"):
            layer[f"{conv}.base_kernel"] = (2, c.conv_kernel_size, h)
            layer[f"{conv}.kernel_projection.weight"] = (kernels, h)
    tensors = {
        f"layers.{i}.{name}": shape for i in range(c.num_layers) for name, shape in layer.items()
    }
    tensors["fc.weight"] = (h, len(c.target_layer_ids) * h)
    tensors["hidden_norm.weight"] = tensors["norm.weight"] = (h,)
    if c.has_selector:
        tensors["candidate_selector.hidden_projection.weight"] = (c.selector_rank, h)
        for side in ("predecessor", "successor"):
            tensors[f"candidate_selector.{side}_codebook"] = (c.vocab_size, c.selector_rank)
    return tensors


def check_weights(folder: str | Path, config: DrafterConfig) -> list[str]:
    """Verify the files of a checkpoint folder; returns unexpected tensor names, to log."""
    headers, expected = read_headers(folder), expected_tensors(config)
    for name, header in headers.items():
        if canonical(name) in expected and header.dtype not in _DTYPES:
            raise CheckpointError(
                f"Tensor {name} is stored as {header.dtype}; DFLASH2 serves drafters in bf16, fp16 "
                f"or fp32 only, so use the unquantised checkpoint."
            )
    return check_tensors(config, {name: header.shape for name, header in headers.items()})


def check_tensors(
    c: DrafterConfig, shapes: Mapping[str, tuple[int, ...]], *, complete: bool = True
) -> list[str]:
    """Names and shapes against the config; returns the names that have no place in the drafter.

    ``complete`` tells whether every tensor must be there.
    """
    expected = expected_tensors(c)
    found = {canonical(name): tuple(shape) for name, shape in shapes.items()}
    for name, shape in found.items():
        if name in expected:
            check_shape(name, shape, expected[name])
    missing = [name for name in expected if name not in found]
    if missing and complete:
        raise CheckpointError(
            f"The drafter's weights lack {_some(missing)}; download the checkpoint again or "
            f"correct its config.json."
        )
    unexpected = [name for name in shapes if canonical(name) not in expected]
    # A rotary table is harmless; any other tensor of a layer would change what the layer computes.
    unused = [n for n in unexpected if ".rotary_emb." not in n and _in_the_way(canonical(n))]
    if unused:
        raise CheckpointError(
            f"The drafter's weights hold {_some(unused)}, which config.json leaves no place for; "
            f"correct its architectures, num_hidden_layers, attention_bias or conv_kernel_size."
        )
    return unexpected


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(shape) != expected:
        raise CheckpointError(
            f"Tensor {name} has shape {list(shape)} but config.json asks for {list(expected)}; "
            f"config.json and the weights are of different drafters."
        )


def _in_the_way(name: str) -> bool:
    return name.startswith(("layers.", "candidate_selector."))


def _some(names: Iterable[str]) -> str:
    names = list(names)
    rest = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def read_headers(folder: str | Path) -> dict[str, TensorHeader]:
    """Headers of all tensors of a folder, through its index file when it is sharded."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    files = _indexed_files(index) if index.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} holds no *.safetensors file; download or convert the drafter's weights."
        )
    headers: dict[str, TensorHeader] = {}
    for file in files:
        headers.update(_read_header(file))
    return headers


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index} is not a valid index; download it again.") from None
    files = [index.parent / name for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{index.name} names {_some(absent)}, absent from {index.parent}; download it again."
        )
    return files


def _read_header(file: Path) -> dict[str, TensorHeader]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise CheckpointError(f"{file} is truncated; download it again.")
        try:
            if length > _HEADER_LIMIT:
                raise ValueError
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            tensors = {n: TensorHeader(e["dtype"], tuple(e["shape"])) for n, e in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise CheckpointError(f"{file} is not a safetensors file; download it again.") from None
    if 8 + length + end > size:
        raise CheckpointError(
            f"{file} is truncated ({size} bytes of {8 + length + end}); download it again."
        )
    return tensors
