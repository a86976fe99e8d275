"""Raises where a decode round would make the host wait for the device.

Installed into a server by ``DFLASH2_TEST_HOOKS=no_sync``. There is no device here, so tensors of the host
are told apart by where they come from: named ``*_cpu`` by the scheduler, made from Python values without a
device, or computed from such tensors alone. All others stand for device tensors, and the code under test
is told that they are not on a CPU. What runs only where there is no device is left out: Triton's
interpreter, and this package's replacements of Triton kernels.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

WAITS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "unique_consecutive",
    "equal",
    "allclose",
}
INDEXING = {"__getitem__", "__setitem__", "index_put", "index_put_"}
FACTORIES = {"tensor", "as_tensor", "arange", "zeros", "ones", "full", "empty", "from_numpy"}
CPU_ONLY = ("/triton/", "/patches/cpu_", "/dflash2_sglang/cpu/")


class HostWaits(RuntimeError):
    pass


class Guard(TorchFunctionMode):
    """Active in a round. ``host`` are tensors that lie on the host by design."""

    def __init__(self, host: list[torch.Tensor]) -> None:
        super().__init__()
        self.ids: dict[int, Any] = {}
        for tensor in host:
            self.mark(tensor)

    def mark(self, tensor: torch.Tensor) -> None:
        self.ids[id(tensor)] = tensor  # kept, so that no other tensor gets this id

    def on_device(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and id(tensor) not in self.ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_device = any(self.on_device(x) for x in inputs)
        if on_device and self._waits(name, args) and not _cpu_only():
            raise HostWaits(f"{name} on a device tensor in a decode round")
        result = func(*args, **kwargs)
        moved = name == "to" or kwargs.get("device") is not None
        stays = not moved and not on_device and (inputs or name in FACTORIES)
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            if stays:
                self.mark(tensor)
            else:
                self.ids.pop(id(tensor), None)
        return result

    def _waits(self, name: str, args: Any) -> bool:
        if name in WAITS:
            return True
        if name == "where":
            return len(args) == 1
        if name in INDEXING:
            leaves = tree_leaves(args[1])
            bounds = [b for x in leaves if isinstance(x, slice) for b in (x.start, x.stop, x.step)]
            masks = (torch.bool, torch.uint8)
            return any(self.on_device(b) for b in bounds) or any(
                isinstance(x, torch.Tensor) and x.dtype in masks for x in leaves
            )
        return name == "repeat_interleave" and any(self.on_device(x) for x in args[1:2])


def _cpu_only() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in CPU_ONLY):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_cpu(tensor: torch.Tensor) -> bool:
    """What the code of this package that chooses by device shall believe."""
    return "/dflash2_sglang/" not in (where := sys._getframe(1).f_code.co_filename) or (
        "/dflash2_sglang/cpu/" in where
    )


def host_tensors(batch: Any) -> list[torch.Tensor]:
    owners = [batch, batch.sampling_info]
    return [
        value
        for owner in owners
        for name, value in vars(owner).items()
        if name.endswith("_cpu") and isinstance(value, torch.Tensor)
    ]


def install() -> None:
    from dflash2_sglang.worker import DFlash2Worker

    unguarded = DFlash2Worker._round

    @functools.wraps(unguarded)
    def guarded(self: Any, batch: Any, *args: Any) -> Any:
        torch.Tensor.is_cpu = property(_is_cpu)  # type: ignore[assignment]
        try:
            with Guard(host_tensors(batch)):
                return unguarded(self, batch, *args)
        finally:
            del torch.Tensor.is_cpu

    DFlash2Worker._round = guarded
