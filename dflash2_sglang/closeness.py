"""How far two passes lie apart."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """Of logits [N, V], by node: the distance in units of how far ``theirs`` spread, [N]."""
    spread = (theirs - theirs.mean(-1, keepdim=True)).norm(dim=-1)
    return (ours - theirs).norm(dim=-1) / spread


def worst(differences: Iterable[Tensor]) -> float:
    """The largest, NaN if there is one."""
    return float(torch.cat([part.flatten() for part in differences]).max())
