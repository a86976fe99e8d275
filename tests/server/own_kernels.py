"""SGLang's own kernels where the CPU platform has torch in their place, and a note of what was launched.

Installed into an interpreted server by ``DFLASH2_TEST_HOOKS=own_kernels``. SGLang's wrappers of the commit
refuse tensors that are not on a GPU; while it commits they are told that these are.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any

import torch

ELEMENTWISE = (
    "sglang.kernels.ops.attention.fla.layernorm_gated.layernorm_fn",
    "sglang.kernels.ops.elementwise.elementwise.fused_sigmoid_mul",
    "sglang.kernels.ops.attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous",
)
COMMIT = "sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify"

logger = logging.getLogger(__name__)


def install() -> None:
    for target in (*ELEMENTWISE, COMMIT):
        bring_back(target)
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.srt.speculative import eagle_worker_common, spec_utils

    layernorm_gated._get_sm_count = lambda device: 1
    layernorm_gated.device_context = contextlib.nullcontext

    commit = spec_utils.commit_mamba_states_after_verify

    @functools.wraps(commit)
    def on_a_gpu(*args: Any, **keywords: Any) -> Any:
        torch.Tensor.is_cuda = property(lambda _: True)  # type: ignore[assignment]
        try:
            return commit(*args, **keywords)
        finally:
            del torch.Tensor.is_cuda

    for module in (spec_utils, eagle_worker_common):
        module.commit_mamba_states_after_verify = on_a_gpu
    note_launches()


def bring_back(target: str) -> None:
    """Undo the patch of ``target``, wherever it has been imported."""
    import pkgutil

    from sglang.srt.plugins.hook_registry import _propagate_patch

    module_name, _, name = target.rpartition(".")
    module = pkgutil.resolve_name(module_name)
    patched = getattr(module, name)
    setattr(module, name, patched.__wrapped__)
    _propagate_patch(patched, patched.__wrapped__, module)


def note_launches() -> None:
    """A line of the log for each kernel, the first time that it is launched in a decode round."""
    from triton.runtime.interpreter import GridExecutor

    from dflash2_sglang.worker import DFlash2Worker

    launch, decode_round = GridExecutor.__call__, DFlash2Worker._round
    known: set[str] = set()
    inside = False

    def launched(self: Any, *args: Any, **keywords: Any) -> Any:
        if inside and self.fn.__name__ not in known:
            known.add(self.fn.__name__)
            logger.info("launched: %s", self.fn.__name__)
        return launch(self, *args, **keywords)

    @functools.wraps(decode_round)
    def noted(*args: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return decode_round(*args)
        finally:
            inside = False

    GridExecutor.__call__ = launched
    DFlash2Worker._round = noted
