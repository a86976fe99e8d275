"""Whether a model runner replays captured graphs, and how to have it not do so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


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
