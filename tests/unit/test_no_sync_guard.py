"""The guard of ``tests/server/no_sync.py`` notices what it is there for, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from no_sync import Guard, HostWaits

Use = Callable[[torch.Tensor], Any]
WAITS: dict[str, Use] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "bool": lambda x: bool(x[0]),
    "if": lambda x: 1 if x[0] > 0 else 2,
    "int": lambda x: int(x.max()),
    "float": lambda x: float(x.sum()),
    "slice": lambda x: x[: x[0]],
    "mask read": lambda x: x[x > 1],
    "mask read in a tuple": lambda x: x.view(2, 2)[:, torch.tensor([True, False])],
    "mask written": lambda x: x.__setitem__(x > 1, 0),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(x),
}
FREE: dict[str, Use] = {
    "arithmetic": lambda x: (x + 1).cumsum(0) * 2,
    "gather": lambda x: x[torch.tensor([0, 1])],
    "index": lambda x: x[x.argsort()],
    "where of three": lambda x: torch.where(x > 1, x, 0),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0),
    "shape": lambda x: x.shape[0] + x.numel(),
    "host value": lambda x: torch.tensor([1, 2]).tolist(),
    "host sum": lambda x: int(torch.tensor([1, 2]).cumsum(0).max()),
    "repeat by a number": lambda x: x.repeat_interleave(2),
    "upload": lambda x: torch.tensor([1]).to("cpu", non_blocking=True) + x,
}


def device_tensor() -> torch.Tensor:
    return torch.tensor([2, 1, 3, 2])


@pytest.mark.parametrize("use", WAITS.values(), ids=WAITS)
def test_waits_are_noticed(use: Use) -> None:
    x = device_tensor()
    with pytest.raises(HostWaits), Guard([]):
        use(x)


@pytest.mark.parametrize("use", FREE.values(), ids=FREE)
def test_nothing_else_is(use: Use) -> None:
    x = device_tensor()
    with Guard([]):
        use(x)


def test_host_tensors_are_told_apart() -> None:
    mirror = device_tensor()
    with Guard([mirror]):
        assert mirror.tolist() == [2, 1, 3, 2]
        assert int((mirror + 1).sum()) == 12
    with pytest.raises(HostWaits), Guard([mirror]):
        mirror.to("cpu").tolist()  # as a stand-in of a copy to the device
