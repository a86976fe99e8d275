"""The drafter's attention: a block against the draft KV of its context, and itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from torch import Tensor, nn

from dflash2_sglang.config import DrafterConfig


def make_norm(c: DrafterConfig, size: int) -> nn.Module:
    kind = GemmaRMSNorm if c.gemma_norm else RMSNorm
    return kind(size, eps=c.rms_norm_eps)


def norm_scale(norm: Any) -> Tensor:
    """The factor that a norm applies, [size] float32."""
    return norm.weight.float() + (1.0 if isinstance(norm, GemmaRMSNorm) else 0.0)


class RopeTable(NamedTuple):
    """out = x * cos + partner(x) * sin; both [T, 1, head_dim] float32, sin with its sign."""

    cos: Tensor
    sin: Tensor


class Rotary(nn.Module):
    """SGLang's rotary table, applied to any number of heads and layers at once.

    Only ``cos_sin_cache`` of the SGLang module is used, so every scaling that shares its layout
    (linear, dynamic, YaRN, Llama 3) is right, and SGLang may still extend it for long contexts.
    """

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        rope = c.rope
        self.head_dim, self.dim, self.neox = c.head_dim, rope.dim, rope.neox
        self.rotary_emb = get_rope(
            c.head_dim,
            rotary_dim=rope.dim,
            max_position=rope.max_position,
            base=rope.theta,
            rope_scaling=None if rope.scaling is None else dict(rope.scaling),
            is_neox_style=rope.neox,
        )

    @property
    def cos_sin_cache(self) -> Tensor:
        """[positions, dim]: cosines, then sines."""
        return self.rotary_emb.cos_sin_cache

    def table(self, positions: Tensor) -> RopeTable:
        """positions [T] int64, any order."""
        rows = self.cos_sin_cache.index_select(0, positions).float().unsqueeze(1)
        cos, sin = rows.chunk(2, -1)
        if self.neox:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        else:
            cos = cos.repeat_interleave(2, -1)
            sin = torch.stack((-sin, sin), -1).flatten(-2)
        if self.dim < self.head_dim:
            rest = (0, self.head_dim - self.dim)
            cos, sin = F.pad(cos, rest, value=1.0), F.pad(sin, rest)
        return RopeTable(cos, sin)

    def rotate(self, x: Tensor, table: RopeTable) -> Tensor:
        """x [T, ..., heads, head_dim] float32."""
        return torch.addcmul(x * table.cos, self._partner(x), table.sin)

    def _partner(self, x: Tensor) -> Tensor:
        """The other coordinate of each rotated pair; what lies beyond ``dim`` stays."""
        head = x[..., : self.dim]
        pairs = head.unflatten(-1, (2, -1) if self.neox else (-1, 2))
        head = pairs.flip(-2 if self.neox else -1).flatten(-2)
        return head if self.dim == self.head_dim else torch.cat((head, x[..., self.dim :]), -1)


class BlockAttention(nn.Module):
    """Projections, per-head norm and rope, then SGLang's attention, which stores the block's KV."""

    qk_scale: Tensor  # [heads + kv_heads, head_dim] float32

    def __init__(self, c: DrafterConfig, layer: int, rotary: Rotary, prefix: str) -> None:
        super().__init__()
        # In a list: the rotary module belongs to the drafter and must not appear once per layer.
        self._rotary = [rotary]
        self.eps, self.head_dim = c.rms_norm_eps, c.head_dim
        self.qkv_proj = QKVParallelLinear(
            hidden_size=c.hidden_size,
            head_size=c.head_dim,
            total_num_heads=c.num_heads,
            total_num_kv_heads=c.num_kv_heads,
            bias=c.attention_bias,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            c.num_heads * c.head_dim,
            c.hidden_size,
            bias=c.attention_bias,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm, self.k_norm = make_norm(c, c.head_dim), make_norm(c, c.head_dim)
        self.heads, self.kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_size, self.kv_size = self.heads * c.head_dim, self.kv_heads * c.head_dim
        scale = torch.ones(self.heads + self.kv_heads, c.head_dim, dtype=torch.float32)
        self.register_buffer("qk_scale", scale, persistent=False)
        self.attn = RadixAttention(
            num_heads=self.heads,
            head_dim=c.head_dim,
            scaling=c.head_dim**-0.5,
            num_kv_heads=self.kv_heads,
            layer_id=layer,
            sliding_window_size=c.layer_window(layer),
            attn_type=AttentionType.DECODER if c.is_causal[layer] else AttentionType.ENCODER_ONLY,
        )
        # The conditions of SGLang's kernel, besides the device and dtype.
        self.can_fuse = (
            not c.gemma_norm
            and rotary.neox
            and rotary.dim == c.head_dim
            and c.head_dim & (c.head_dim - 1) == 0
        )

    def set_scale(self) -> None:
        """Once the norms are loaded."""
        q, k = norm_scale(self.q_norm), norm_scale(self.k_norm)
        self.qk_scale[: self.heads].copy_(q.expand(self.heads, -1))
        self.qk_scale[self.heads :].copy_(k.expand(self.kv_heads, -1))

    @property
    def kv_rows(self) -> slice:
        """Rows of the fused projection that make K and V."""
        return slice(self.q_size, self.q_size + 2 * self.kv_size)

    def forward(
        self, x: Tensor, positions: Tensor, table: RopeTable | None, forward_batch: object
    ) -> Tensor:
        """x [T, H] -> [T, H]. Without a table the norm and rope run in SGLang's fused kernel."""
        qkv, _ = self.qkv_proj(x)
        sizes = [self.q_size, self.kv_size, self.kv_size]
        if table is None:
            self._norm_rope_fused(qkv, positions)
            q, k, v = qkv.split(sizes, -1)
        else:
            heads, v = qkv.split([self.q_size + self.kv_size, self.kv_size], -1)
            heads = heads.unflatten(-1, (-1, self.head_dim))
            heads = norm_rope(heads, self.qk_scale, self.eps, self._rotary[0], table)
            q, k = heads.flatten(1).split(sizes[:2], -1)
        return self.o_proj(self.attn(q, k, v, forward_batch))[0]

    def _norm_rope_fused(self, qkv: Tensor, positions: Tensor) -> None:
        """In place on qkv [T, q + 2 kv]; a CUDA device and bfloat16 only."""
        from sglang.kernels.ops.attention.table_qk_norm_rope import table_qk_norm_rope_

        table_qk_norm_rope_(
            qkv,
            positions,
            self.q_norm.weight,
            self.k_norm.weight,
            self._rotary[0].cos_sin_cache,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.eps,
        )


def norm_rope(x: Tensor, scale: Tensor, eps: float, rotary: Rotary, table: RopeTable) -> Tensor:
    """Per-head RMS norm, then rope, in float32 and rounded once.

    x [T, ..., heads, head_dim]; scale broadcasts to x's shape without T; the table to x's.
    """
    normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps)
    return rotary.rotate(normed * scale, table).to(x.dtype)
