"""Grouped dynamic convolution: each sublayer of the drafter is wrapped in one."""

from __future__ import annotations

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from torch import Tensor, nn

from dflash2_sglang import kernels


class GroupedDynamicConv(nn.Module):
    """``prepare`` convolves a sublayer's input and ``finish`` its output.

    Both kernels come from one projection of the input. All channels are needed, so the weights are
    replicated under tensor parallelism and ``finish`` follows the all-reduce.
    """

    def __init__(self, hidden_size: int, block_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.block_size, self.taps, self.group_size = block_size, taps, group_size
        self.groups = hidden_size // group_size
        # [input or output side, tap, channel]
        base = torch.zeros(2, taps, hidden_size, dtype=torch.float32)
        self.base_kernel = nn.Parameter(base, requires_grad=False)
        self.kernel_projection = ReplicatedLinear(hidden_size, 2 * taps * self.groups, bias=False)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B*G, H] -> (convolved x [B*G, H], what ``finish`` needs [B*G, 2, taps, groups])."""
        projected, _ = self.kernel_projection(x)
        delta = projected.view(-1, 2, self.taps, self.groups)
        return kernels.convolve(x, delta, self.base_kernel, 0, self.block_size), delta

    def finish(self, x: Tensor, delta: Tensor) -> Tensor:
        """x [B*G, H], the sublayer's output, with what ``prepare`` returned."""
        return kernels.convolve(x, delta, self.base_kernel, 1, self.block_size)
