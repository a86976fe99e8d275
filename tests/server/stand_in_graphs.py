"""CUDA graphs without CUDA: what a graph would replay is run again, on what the graph would read.

Installed into a server by ``DFLASH2_TEST_HOOKS=stand_in_graphs``. SGLang's own runner captures and replays;
only the graph itself is replaced. A capture runs the pass once on the runner's static buffers. A replay
runs the same closure: same forward batch, same spec input, same attention metadata objects. Whatever was
frozen at capture (a mask, a position, a link) is still frozen then, and the text comes out wrong. Outputs
are copied into the tensors of the capture, as a graph would overwrite them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

logger = logging.getLogger(__name__)


def backend_class() -> type:
    from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import (
        BaseCudaGraphBackend,
    )

    class StandIn(BaseCudaGraphBackend):
        def __init__(self, runner: Any, **_: Any) -> None:
            self.runner = runner
            self.captured: dict[Any, tuple[Any, Any, Any]] = {}

        @contextlib.contextmanager
        def capture_session(self, stream: Any) -> Iterator[None]:
            yield

        def capture_one(self, shape_key: Any, forward_fn: Any, *_: Any, **__: Any) -> None:
            metadata = [backend.forward_metadata for backend in self.backends()]
            self.captured[shape_key] = (forward_fn, metadata, forward_fn())

        def backends(self) -> list[Any]:
            """One, or one for each kind of layer."""
            backend = self.runner.attn_backend
            return getattr(backend, "attn_backend_list", None) or [backend]

        def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
            return shape_key in self.captured

        @contextlib.contextmanager
        def replay_session(self) -> Iterator[None]:
            yield

        def replay(self, shape_key: Any, static_forward_batch: Any, **_: Any) -> Any:
            forward, metadata, output = self.captured[shape_key]
            now = [backend.forward_metadata for backend in self.backends()]
            self.plan(metadata)
            overwrite(output, forward())
            self.plan(now)
            model = "draft" if self.runner.model_runner.is_draft_worker else "target"
            logger.info("replayed: %s, batch %d", model, shape_key.size)
            return output

        def plan(self, metadata: list[Any]) -> None:
            for backend, its in zip(self.backends(), metadata, strict=True):
                backend.forward_metadata = its

        def cleanup(self) -> None:
            self.captured.clear()

    return StandIn


def overwrite(old: Any, new: Any) -> None:
    for field in dataclasses.fields(old):
        was, now = getattr(old, field.name), getattr(new, field.name)
        if isinstance(was, torch.Tensor):
            was.copy_(now)
        else:
            assert was is None, f"{field.name} is neither a tensor nor empty"


def install() -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module
    from sglang.srt.platforms.interface import PlatformCapabilities

    from dflash2_sglang import algorithm
    from dflash2_sglang.cpu.platform import CpuPlatform

    runner = module.DecodeCudaGraphRunner
    CpuPlatform.capabilities = PlatformCapabilities(graph_capture=True)
    stand_in = backend_class()
    CpuPlatform.get_full_graph_backend_cls = lambda self: stand_in
    CpuPlatform.get_graph_runner_cls = lambda self: runner
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    # SGLang captures nothing on a CPU unless torch.compile is on.
    cuda_graph_setup.capture_decode_graph = lambda model_runner: cuda_graph_setup.GraphCapture(
        runner=runner(model_runner), memory_phase="decode", memory_usage_gb=0, capture_time=0
    )
    algorithm.leave_graphs_on = lambda args: True  # as on CUDA

    @contextlib.contextmanager
    def no_stream(stream: Any = None) -> Iterator[Any]:
        yield SimpleNamespace(stream=None)

    module.graph_capture = no_stream
    module.get_or_create_global_graph_capture_stream = lambda: None
    module.maybe_flashinfer_autotune_speculative_draft = lambda *args, **kwargs: None
    runner._record_in_graph_metadata_prep_done = lambda self: None
    runner._publish_read_done = lambda self, in_graph: None
