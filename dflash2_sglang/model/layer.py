"""One layer of the drafter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from dflash2_sglang.config import DrafterConfig
from dflash2_sglang.model.attention import BlockAttention, Rotary, make_norm
from dflash2_sglang.model.conv import GroupedDynamicConv


class DrafterMLP(nn.Module):
    def __init__(self, c: DrafterConfig, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            c.hidden_size, [c.intermediate_size] * 2, bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            c.intermediate_size, c.hidden_size, bias=False, prefix=f"{prefix}.down_proj"
        )
        self.act = SiluAndMul() if c.hidden_act == "silu" else self._swiglu_oai
        self.alpha, self.limit = c.swiglu_alpha, c.swiglu_limit

    def _swiglu_oai(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + 1)

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        return self.down_proj(self.act(gate_up))[0]


class DrafterLayer(nn.Module):
    """Pre-norm attention and MLP, each between the two halves of a convolution if there is one."""

    def __init__(self, c: DrafterConfig, index: int, rotary: Rotary, prefix: str) -> None:
        super().__init__()

        def conv() -> GroupedDynamicConv | None:
            if not c.has_conv:
                return None
            return GroupedDynamicConv(
                c.hidden_size, c.block_size, c.conv_kernel_size, c.conv_group_size
            )

        self.input_layernorm = make_norm(c, c.hidden_size)
        self.post_attention_layernorm = make_norm(c, c.hidden_size)
        self.self_attn = BlockAttention(c, index, rotary, f"{prefix}.self_attn")
        self.mlp = DrafterMLP(c, f"{prefix}.mlp")
        self.attention_conv, self.mlp_conv = conv(), conv()

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        attend: Callable[[BlockAttention, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """x [T, H] and the sum of all outputs before it (None in the first layer)."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = _between(self.attention_conv, lambda y: attend(self.self_attn, y), x)
        x, residual = self.post_attention_layernorm(x, residual)
        return _between(self.mlp_conv, self.mlp, x), residual


def _between(
    conv: GroupedDynamicConv | None, sublayer: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    if conv is None:
        return sublayer(x)
    x, delta = conv.prepare(x)
    return conv.finish(sublayer(x), delta)
