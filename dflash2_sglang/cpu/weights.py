"""Weights laid out once for oneDNN, so that no product re-orders them.

Measured on two AMX cores with SmolLM2-135M's shapes: a pass over all layers takes 12.3 ms instead of 19.1
for one token and 12.6 instead of 20.1 for 16 (``docs/benchmarks.md``).
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import psutil
import torch
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)

logger = logging.getLogger(__name__)

# The overload itself: resolving it anew would cost more than a small layer's arithmetic.
_products: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_product: Any = getattr(_products, "default", None)
_product_with: Any = getattr(_products, "binary", None)

# The layout oneDNN picks for this many rows also serves one row and hundreds well.
ROWS_HINT = 16

# Classes whose forward is down(silu(gate) * up) and nothing else.
GATED_MLPS = ("LlamaMLP", "Qwen2MLP", "DFlashMLP", "DrafterMLP")


def supported() -> bool:
    """Whether this machine and this build of torch have bfloat16 products with packed weights."""
    if _product is None or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _Packed:
    """A quant method that keeps a packed copy of ``layer.weight``, which stays as it was loaded."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.pack(weight)

    def pack(self, weight: torch.Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)

    def process_weights_after_loading(self, layer: Any) -> None:
        """SGLang calls this again at the end of an online weight update."""
        self.pack(layer.weight)


class PackedLinearMethod(_Packed, UnquantizedLinearMethod):
    """``y = x W^T + b``."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _product(x, self.packed, bias, "none", [], "")


class PackedHeadMethod(_Packed, UnquantizedEmbeddingMethod):
    """A vocabulary head with packed weights; embedding look-ups still read ``layer.weight``."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _product(x, self.packed, bias, "none", [], "")


class PackedGateUp(_Packed, UnquantizedLinearMethod):
    """gate and up as two products, the first ending in SiLU and the second in the multiplication.

    oneDNN applies both while the results are still in float32 registers.
    """

    def pack(self, weight: torch.Tensor) -> None:
        self.gate, self.up = (
            torch.ops.mkldnn._reorder_linear_weight(half.contiguous(), ROWS_HINT)
            for half in weight.detach().chunk(2)
        )

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        halves = [_product(x, half, None, "none", [], "") for half in (self.gate, self.up)]
        return torch.cat(halves, -1)

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        """silu(x Wg^T) * (x Wu^T) for x [T, H]."""
        gate = _product(x, self.gate, None, "swish", [], "")
        return _product_with(x, gate, self.up, None, "mul")


def _gated_mlp(mlp: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of a SwiGLU block whose gate_up_proj is packed."""
    return mlp.down_proj(mlp.gate_up_proj.quant_method.activated(x))[0]


def prepare(model: torch.nn.Module) -> None:
    """Pack the dense bfloat16 linear layers and the head of ``model`` in place."""
    modules: list[Any] = list(model.modules())
    for layer in modules:
        # The stock DFlash attention would launch a fused Triton kernel for norm and rope.
        if getattr(layer, "use_table_qk_norm_rope", False):
            layer.use_table_qk_norm_rope = False
    if not supported():
        return
    chosen = [(layer, method) for layer in modules if (method := _method(model, layer))]
    size = sum(layer.weight.nbytes for layer, _ in chosen)
    if size > psutil.virtual_memory().available // 4:
        logger.info(
            "Weights stay unpacked: a packed copy needs %.1f GB, over a quarter of free memory.",
            size / 2**30,
        )
        return
    gates = {mlp.gate_up_proj: mlp for mlp in modules if _is_gated(mlp)}
    for layer, method in chosen:
        if layer in gates and layer.bias is None:
            layer.quant_method = PackedGateUp(layer.weight)
            gates[layer].forward = functools.partial(_gated_mlp, gates[layer])
        else:
            layer.quant_method = method(layer.weight)
    if chosen:
        logger.info("Packed %d weight matrices (%.2f GB) for oneDNN.", len(chosen), size / 2**30)


def _is_gated(mlp: torch.nn.Module) -> bool:
    """A SwiGLU block as SGLang's Llama and Qwen classes and the drafters write it."""
    from sglang.srt.layers.activation import SiluAndMul

    activation = getattr(mlp, "act_fn", None) or getattr(mlp, "act", None)
    return type(mlp).__name__ in GATED_MLPS and isinstance(activation, SiluAndMul)


def _method(model: torch.nn.Module, layer: Any) -> type | None:
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.bfloat16:
        return None
    if weight.dim() != 2:  # the convolution of a gated delta net is stored as a linear layer
        return None
    kind = type(getattr(layer, "quant_method", None))
    if kind is UnquantizedLinearMethod:
        return PackedLinearMethod
    # With --enable-fp32-lm-head the logits processor must keep its own float32 product.
    if kind is UnquantizedEmbeddingMethod and layer is getattr(model, "lm_head", None):
        return None if _fp32_head() else PackedHeadMethod
    return None


def _fp32_head() -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().features.enable_fp32_lm_head)
