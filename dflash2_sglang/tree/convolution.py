"""The drafter's convolution inside a block, whose taps are its own at every position.

B blocks of G tokens, T = B * G rows, H channels in `groups` groups of H / groups neighbours.
"""

from __future__ import annotations

from torch import Tensor


def convolve(x: Tensor, delta: Tensor, base: Tensor, side: int, block_size: int) -> Tensor:
    """Causal convolution inside each block; a tap never reaches into the block before.

    out[t] = sum over taps j of (base[side, j] + delta[t, side, j]) * x[t - j], the channels of a
    group sharing delta, and x[t - j] counting as 0 where it is not in the block of t.

    x      [T, H]                any dtype, which is also the result's
    delta  [T, 2, taps, groups]  any dtype
    base   [2, taps, H]          float32
    side   0 before a sublayer, 1 after it
    """
    taps, groups = delta.shape[2:]
    # In float32 both for accuracy and because bfloat16 broadcasts are three times as slow on CPUs.
    own = delta[:, side].float().view(-1, block_size, taps, groups, 1)
    coefficients = own + base[side].view(taps, groups, -1)
    wide = x.float().view(-1, block_size, groups, x.shape[-1] // groups)
    out = coefficients[:, :, 0] * wide
    for tap in range(1, min(taps, block_size)):
        out[:, tap:].addcmul_(coefficients[:, tap:, tap], wide[:, :-tap])
    return out.to(x.dtype).view(x.shape)
