"""Random tensors, and how far a result of one dtype may be from the exact one."""

from __future__ import annotations

import torch
from torch import Tensor

# One rounding to the dtype, relative to the largest value.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, exact: Tensor, roundings: float = 2) -> None:
    """``exact`` in float64; ``found`` may be a few roundings of its dtype away."""
    assert found.shape == exact.shape
    bound = roundings * ROUNDING[found.dtype] * exact.abs().max()
    assert (found.double() - exact).abs().max() <= bound
