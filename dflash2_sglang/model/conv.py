"""Grouped dynamic convolution: each sublayer of the drafter is wrapped in one."""

from __future__ import annotations

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from torch import Tensor, nn


def convolve(x: Tensor, coefficients: Tensor) -> Tensor:
    """Causal convolution inside each block, with coefficients of its own at every position.

    out[b, t] = sum over taps j <= t of coefficients[b, t, j] * x[b, t - j], so a tap never reaches
    into the block before.

    x             [B, G, groups, size]        any dtype, which is also the result's
    coefficients  [B, G, taps, groups, size]  float32
    """
    # In float32 both for accuracy and because bfloat16 broadcasts are three times as slow on CPUs.
    wide = x.float()
    out = coefficients[:, :, 0] * wide
    for tap in range(1, coefficients.shape[2]):
        out[:, tap:].addcmul_(coefficients[:, tap:, tap], wide[:, :-tap])
    return out.to(x.dtype)


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
        """x [B*G, H] -> (convolved x [B*G, H], kernels [B, G, 2, taps, groups, size] float32)."""
        projected, _ = self.kernel_projection(x)
        delta = projected.view(-1, self.block_size, 2, self.taps, self.groups, 1).float()
        kernels = delta + self.base_kernel.view(2, self.taps, self.groups, self.group_size)
        return self._convolve(x, kernels, 0), kernels

    def finish(self, x: Tensor, kernels: Tensor) -> Tensor:
        """x [B*G, H], the sublayer's output, with the kernels that ``prepare`` returned."""
        return self._convolve(x, kernels, 1)

    def _convolve(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        blocks = x.view(-1, self.block_size, self.groups, self.group_size)
        return convolve(blocks, kernels[:, :, side]).view(x.shape)
