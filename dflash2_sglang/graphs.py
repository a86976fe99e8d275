"""What is captured, whether a model runner replays it, and how to have it not do so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def largest_capture() -> int:
    """Most requests of a captured decode pass; 0 where passes are not captured on this device."""
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_exec

    graphs = get_exec().graph.cuda_graph_config
    if graphs is None or graphs.decode.backend == Backend.DISABLED:
        return 0
    if current_platform.is_out_of_tree() and not current_platform.capabilities.graph_capture:
        return 0
    return max(graphs.decode.bs)


def captured(runner: Any) -> bool:
    """Whether a ModelRunner replays graphs."""
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    graphs = runner.decode_cuda_graph_runner
    return graphs is not None and not isinstance(graphs, EagerRunner)


@contextlib.contextmanager
def eagerly(runner: Any) -> Iterator[None]:
    graphs, runner.decode_cuda_graph_runner = runner.decode_cuda_graph_runner, None
    try:
        yield
    finally:
        runner.decode_cuda_graph_runner = graphs
