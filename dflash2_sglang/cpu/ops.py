"""CPU forwards of SGLang's fused operators, registered through its out-of-tree dispatch.

Same results as the stock native forwards to the rounding of the dtype, in fewer torch calls: at one token a
forward is bound by the count of calls, not by arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dflash2_sglang.cpu import scratch

DISPATCH_KEY = "dflash2_cpu"


def register() -> None:
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    for op, forward in ((RMSNorm, rms_norm), (SiluAndMul, silu_and_mul), (RotaryEmbedding, rope)):
        BaseFusedOp.register_oot_forward(op, forward, DISPATCH_KEY)


def rms_norm(
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of x (+ residual), [..., H]; with a residual also returns the sum.

    The sum is rounded to the residual's dtype before the norm, as the Hugging Face models do.
    """
    plain = not (
        self.variance_size_override or self.fp32_residual or self.cast_x_before_out_mul
    ) and self.override_orig_dtype in (None, x.dtype)
    if not plain or post_residual_addition is not None:
        return self.forward_native(x, residual, post_residual_addition)
    if residual is None:
        return _rms(x, self.weight, self.variance_epsilon)
    x = x + residual
    return _rms(x, self.weight, self.variance_epsilon), x


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps))
    normed = wide * scale.unsqueeze(-1)
    return normed.mul_(weight).to(x.dtype)


def silu_and_mul(self: Any, x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:] for x [..., 2d]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def rope(
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key [T, heads * head_dim]; sines and cosines are gathered once a forward."""
    if (
        offsets is not None
        or fused_set_kv_buffer_arg is not None
        or self.rotary_dim != self.head_size
        or not self.is_neox_style
    ):
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    cos, sin = _cos_sin(self, positions, query.dtype)
    both = _side_by_side(query, key)
    if both is None:
        return _rotate(query, cos, sin, self.head_size), _rotate(key, cos, sin, self.head_size)
    width = query.shape[1]
    return _rotate(both, cos, sin, self.head_size).split([width, both.shape[1] - width], -1)


def _side_by_side(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """query and key as one view, where both are neighbouring columns of a fused projection."""
    if (
        query.dim() == 2
        and query.stride() == key.stride()
        and query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
        and query.data_ptr() + query.shape[1] * query.element_size() == key.data_ptr()
    ):
        shape = (query.shape[0], query.shape[1] + key.shape[1])
        return query.as_strided(shape, query.stride())
    return None


def _cos_sin(
    self: Any, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin [T, 1, head_dim]: out = x * cos + roll(x, d/2) * sin."""
    cached = scratch.get(self)
    if cached is not None and cached[0] is positions and cached[1].dtype == dtype:
        return cached[1], cached[2]
    cos, sin = self.cos_sin_cache.index_select(0, positions.flatten()).to(dtype).chunk(2, -1)
    cos = torch.cat((cos, cos), -1).unsqueeze(1)
    sin = torch.cat((-sin, sin), -1).unsqueeze(1)
    scratch.put(self, (positions, cos, sin))
    return cos, sin


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head: int) -> torch.Tensor:
    heads = x.unflatten(-1, (-1, head))
    out = torch.addcmul(heads * cos, heads.roll(head // 2, -1), sin)
    return out.flatten(1)
