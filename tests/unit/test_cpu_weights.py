"""Weights that are packed for the CPU: linear layers, blocks of SwiGLU, and what stays as it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rounding import assert_close, normal
from torch import Tensor, nn

from dflash2_sglang.cpu import weights

pytestmark = pytest.mark.usefixtures("engine")


class Method:
    """What a layer of SGLang looks like to ``prepare``."""


def linear(rows: int, columns: int, bias: bool = False, seed: int = 0) -> nn.Module:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    layer = nn.Linear(columns, rows, bias=bias).bfloat16()
    layer.weight.data = normal(rows, columns, seed=seed, dtype=torch.bfloat16)
    layer.quant_method = UnquantizedLinearMethod()  # type: ignore[assignment]
    return layer


@pytest.fixture
def packs() -> None:
    """A machine without bfloat16 products has nothing to pack, which is another test."""
    if not weights.supported():
        pytest.skip("this CPU has no bfloat16 products")


@pytest.mark.parametrize("rows", [1, 3, 16, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear(packs: None, rows: int, bias: bool) -> None:
    layer = linear(96, 64, bias)
    before = layer.weight.clone()
    weights.prepare(nn.ModuleDict({"proj": layer}))
    assert isinstance(layer.quant_method, weights.PackedLinearMethod)
    x = normal(rows, 64, seed=3, dtype=torch.bfloat16)
    found = layer.quant_method.apply(layer, x, layer.bias)
    exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    assert_close(found, exact, 1)
    assert torch.equal(layer.weight, before)


class LlamaMLP(nn.Module):
    """The name counts: ``prepare`` fuses blocks of the classes it knows."""

    def __init__(self) -> None:
        from sglang.srt.layers.activation import SiluAndMul

        super().__init__()
        self.gate_up_proj = linear(2 * 128, 64, seed=1)
        self.down_proj = _Tuple(linear(64, 128, seed=2))
        self.act_fn = SiluAndMul()


class _Tuple(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.inner.quant_method.apply(self.inner, x, None), None


@pytest.mark.parametrize("rows", [1, 16])
def test_packed_swiglu(packs: None, rows: int) -> None:
    mlp = LlamaMLP()
    weights.prepare(nn.ModuleDict({"mlp": mlp}))
    x = normal(rows, 64, seed=4, dtype=torch.bfloat16)
    gate, up = (x.double() @ mlp.gate_up_proj.weight.double().T).chunk(2, -1)
    hidden = F.silu(gate) * up
    assert isinstance(mlp.gate_up_proj.quant_method, weights.PackedGateUp)
    fused = mlp.gate_up_proj.quant_method.activated(x)
    assert_close(fused, hidden, 2)
    assert_close(mlp(x), hidden @ mlp.down_proj.inner.weight.double().T, 3)
    plain = mlp.gate_up_proj.quant_method.apply(mlp.gate_up_proj, x, None)
    assert_close(plain, torch.cat((gate, up), -1), 1)


def test_an_online_weight_update_is_packed_anew(packs: None) -> None:
    """SGLang ends every update with this call on all layers."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    layer, mlp = linear(96, 64), LlamaMLP()
    model = nn.ModuleDict({"proj": layer, "mlp": mlp})
    weights.prepare(model)
    for changed, seed in ((layer, 7), (mlp.gate_up_proj, 8)):
        new = normal(*changed.weight.shape, seed=seed, dtype=torch.bfloat16)
        changed.weight.data.copy_(new)
    DefaultModelLoader.postprocess_weights(model, torch.device("cpu"))
    x = normal(16, 64, seed=5, dtype=torch.bfloat16)
    assert_close(layer.quant_method.apply(layer, x), x.double() @ layer.weight.double().T, 1)
    gate, up = (x.double() @ mlp.gate_up_proj.weight.double().T).chunk(2, -1)
    assert_close(mlp.gate_up_proj.quant_method.activated(x), F.silu(gate) * up, 2)


def test_what_is_not_packed(packs: None) -> None:
    wide, other = linear(32, 64).float(), linear(32, 64)
    other.quant_method = Method()  # type: ignore[assignment]  # a quantised layer
    weights.prepare(nn.ModuleDict({"wide": wide, "other": other}))
    assert type(wide.quant_method).__name__ == "UnquantizedLinearMethod"
    assert type(other.quant_method) is Method


def test_nothing_is_packed_without_the_memory(packs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = linear(96, 64)
    monkeypatch.setattr(
        weights.psutil, "virtual_memory", lambda: SimpleNamespace(available=4 * 96 * 64)
    )
    weights.prepare(nn.ModuleDict({"proj": layer}))
    assert type(layer.quant_method).__name__ == "UnquantizedLinearMethod"


def test_machines_without_bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "supported", lambda: False)
    layer = linear(96, 64)
    attention = nn.Module()
    attention.use_table_qk_norm_rope = True  # the stock drafter's fused kernel
    weights.prepare(nn.ModuleDict({"proj": layer, "attention": attention}))
    assert type(layer.quant_method).__name__ == "UnquantizedLinearMethod"
    assert attention.use_table_qk_norm_rope is False
