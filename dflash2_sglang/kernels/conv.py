"""`tree.convolution.convolve` in one launch: the coefficients are never written to memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 128  # of one program, which takes all rows of a block


@triton.jit
def _convolve(
    x_ptr,
    delta_ptr,
    base_ptr,
    out_ptr,
    block,
    channels,
    groups,
    delta_row,
    x_row,
    TAPS: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (row < block) & (channel < channels)
    at = tl.program_id(0).to(tl.int64) * block + row
    group = channel // (channels // groups)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    for tap in tl.static_range(TAPS):
        x = tl.load(x_ptr + (at - tap) * x_row + channel, mask=inside & (row >= tap), other=0.0)
        base = tl.load(
            base_ptr + (SIDE * TAPS + tap) * channels + channel, mask=channel < channels, other=0.0
        )
        part = delta_ptr + at * delta_row + (SIDE * TAPS + tap) * groups + group
        delta = tl.load(part, mask=inside, other=0.0)
        out += (delta.to(tl.float32) + base) * x.to(tl.float32)
    tl.store(out_ptr + at * channels + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


def convolve(x: Tensor, delta: Tensor, base: Tensor, side: int, block_size: int) -> Tensor:
    rows, channels = x.shape
    _, _, taps, groups = delta.shape
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    x, delta = x.contiguous(), delta.contiguous()
    grid = (rows // block_size, triton.cdiv(channels, CHANNELS))
    _convolve[grid](
        x,
        delta,
        base,
        out,
        block_size,
        channels,
        groups,
        2 * taps * groups,
        channels,
        TAPS=taps,
        SIDE=side,
        ROWS=triton.next_power_of_2(block_size),
        WIDTH=CHANNELS,
        num_warps=4,
    )
    return out
