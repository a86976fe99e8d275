"""Candidates from quantised heads are those of the target's own ``LogitsProcessor``.

The heads are SGLang's, with SGLang's quant methods. Of those whose kernels need another device the
kernel alone is replaced, by the arithmetic it stands for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads import HIDDEN, WORDS, check, make, numbers
from torch import Tensor

pytestmark = pytest.mark.usefixtures("engine")


def quantised(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(1, keepdim=True) / most
    return rows / scale, scale


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.float16, torch.bfloat16, "Q8_0", "Q4_0"], ids=str
)
def test_gguf(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head without a ``weight``. Blocks of 32 numbers share a scale; the words are not padded."""
    import gguf
    import hooks
    from sglang.srt.layers.quantization import gguf as layers

    for name in ("ggml_mul_mat_vec_a8", "ggml_mul_mat_a8", "ggml_dequantize"):
        monkeypatch.setattr(layers, name, None, raising=False)
    hooks.gguf_kernels()
    head = make(layers.GGUFConfig())
    assert not hasattr(head, "weight")
    rows = numbers(WORDS, HIDDEN)
    if isinstance(kind, str):
        name = gguf.GGMLQuantizationType[kind]
        data = torch.from_numpy(gguf.quantize(rows.numpy(), name))
    else:
        names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
        name, data = gguf.GGMLQuantizationType[names[kind]], rows.to(kind)
    head.qweight_type.weight_loader(head.qweight_type, torch.tensor(int(name)))
    head.qweight.weight_loader(head.qweight, data)
    head.quant_method.process_weights_after_loading(head)
    check(head, kind if isinstance(kind, torch.dtype) else torch.float32)


def compressed(number: str) -> Any:
    """compressed-tensors with a group that names the head, as llm-compressor writes it: 8 bits, "int" or
    "float", weights scaled by channel and activations by token."""
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    shared = {"num_bits": 8, "type": number, "symmetric": True}
    group = {
        "targets": ["re:.*lm_head"],
        "weights": {**shared, "strategy": "channel", "dynamic": False},
        "input_activations": {**shared, "strategy": "token", "dynamic": True},
    }
    return CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": f"{number}-quantized",
            "config_groups": {"group_0": group},
            "ignore": [],
        }
    )


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ask CUDA which compute capability there is."""
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    monkeypatch.setattr(CompressedTensorsConfig, "_check_scheme_supported", lambda *_, **__: True)


@pytest.mark.usefixtures("any_device")
def test_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weight lies transposed, [H, V]."""
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_int8 as module,
    )

    def per_token(x: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = quantised(x.float(), 127)
        return values.round().to(torch.int8), scale

    def product(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out_dtype: Any, bias: Any) -> Tensor:
        return ((a.float() @ b.float()) * sa * sb.view(1, -1)).to(out_dtype)

    monkeypatch.setattr(module, "per_token_quant_int8", per_token)
    monkeypatch.setattr(module, "int8_scaled_mm", product, raising=False)
    head = make(compressed("int"))
    values, scale = quantised(numbers(WORDS, HIDDEN), 127)
    head.weight.data.fill_(100)[:WORDS] = values.round().to(torch.int8)
    head.weight_scale.data.fill_(1)[:WORDS] = scale
    head.quant_method.process_weights_after_loading(head)
    assert head.weight.shape[0] == HIDDEN
    check(head)


@pytest.mark.usefixtures("any_device")
def test_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_fp8 as module,
    )

    def product(input: Tensor, weight: Tensor, weight_scale: Tensor, **_: Any) -> Tensor:
        return input @ (weight.to(input.dtype) * weight_scale.view(1, -1).to(input.dtype))

    monkeypatch.setattr(module, "apply_fp8_linear", product)
    head = make(compressed("float"))
    values, scale = quantised(numbers(WORDS, HIDDEN), 448)
    head.weight.data.fill_(100)[:WORDS] = values.to(torch.float8_e4m3fn)
    head.weight_scale.data.fill_(1)[:WORDS] = scale
    head.quant_method.process_weights_after_loading(head)
    check(head)
