"""Weights laid out once for oneDNN, so that no product re-orders them.

Measured on two AMX cores with SmolLM2-135M's shapes: a pass over all layers takes 12.3 ms instead of 19.1
for one token and 12.6 instead of 20.1 for 16 (``docs/benchmarks.md``).
"""

from __future__ import annotations

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
_product = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)

# The layout oneDNN picks for this many rows also serves one row and hundreds well.
ROWS_HINT = 16


def supported() -> bool:
    """Whether this machine and this build of torch have bfloat16 products with packed weights."""
    if _product is None or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinearMethod(UnquantizedLinearMethod):
    """``y = x W^T + b`` with W packed; ``layer.weight`` stays as it was loaded."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _product(x, self.packed, bias, "none", [], "")


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """A vocabulary head with packed weights; embedding look-ups still read ``layer.weight``."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _product(x, self.packed, bias, "none", [], "")


def prepare(model: torch.nn.Module) -> None:
    """Pack the dense bfloat16 linear layers and the head of ``model`` in place."""
    for layer in model.modules():
        # The stock DFlash attention would launch a fused Triton kernel for norm and rope.
        if getattr(layer, "use_table_qk_norm_rope", False):
            layer.use_table_qk_norm_rope = False
    if not supported():
        return
    chosen = [(layer, method) for layer in model.modules() if (method := _method(model, layer))]
    size = sum(layer.weight.nbytes for layer, _ in chosen)
    if size > psutil.virtual_memory().available // 4:
        logger.info(
            "Weights stay unpacked: a packed copy needs %.1f GB, over a quarter of free memory.",
            size / 2**30,
        )
        return
    for layer, method in chosen:
        layer.quant_method = method(layer.weight)
    if chosen:
        logger.info("Packed %d weight matrices (%.2f GB) for oneDNN.", len(chosen), size / 2**30)


def _method(model: torch.nn.Module, layer: Any) -> type | None:
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.bfloat16:
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
