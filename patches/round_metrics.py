"""Where a round's result is on the host: its numbers go to the log and the metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Patch


def resolve_spec_v2_tokens(
    original: Callable[..., Any], processor: Any, result: Any, batch: Any
) -> Any:
    from dflash2_sglang.metrics import Reporter
    from dflash2_sglang.telemetry import RoundRecord

    record = RoundRecord.of(result)
    if record is None:
        return original(processor, result, batch)
    # The stock code counts the same requests in their own statistics.
    wanted = [not (req.is_retracted or req.finished()) for req in batch.reqs]
    tokens = original(processor, result, batch)
    reporter = processor.metrics_reporter
    if not hasattr(reporter, "dflash2"):
        reporter.dflash2 = Reporter.of(reporter)
    drafts = result.num_correct_drafts_per_req_cpu
    reporter.dflash2.round(record, [n for n, counts in zip(drafts, wanted, strict=True) if counts])
    return tokens


def add_speculative(original: Callable[..., None], controller: Any, state: dict[str, Any]) -> None:
    """``/server_info`` tells what DFLASH2's settings were resolved to."""
    original(controller, state)
    describe = getattr(controller.scheduler.draft_worker, "describe", None)
    if describe is not None:
        state["dflash2"] = describe()


PATCHES = (
    Patch(
        target="sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        hook=resolve_spec_v2_tokens,
        kind="around",
        scope="dflash2",
        parameters=("self", "result", "batch"),
        reason="on_verify_complete_cpu does not tell which requests had ended, nor the metrics' labels",
        without="the sglang:dflash2_* metrics and their log line would be missing",
    ),
    Patch(
        target="sglang.srt.managers.scheduler_components.internal_state."
        "SchedulerInternalStateController._add_speculative",
        hook=add_speculative,
        kind="around",
        scope="dflash2",
        parameters=("self", "state"),
        reason="/server_info knows SGLang's own arguments only",
        without="/server_info would not tell the drafter, its block and the tree",
    ),
)
