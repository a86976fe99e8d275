"""What rounds tell about themselves, and what becomes of it in metrics and log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

import dflash2_sglang.patches.round_metrics as patch
from dflash2_sglang import telemetry
from dflash2_sglang.metrics import Exporter, Reporter
from dflash2_sglang.telemetry import (
    DRAFT,
    OTHER,
    VERIFY,
    GrammarCut,
    RoundClock,
    RoundRecord,
    Tally,
)


class Ticks:
    """A clock that shows what it is told to."""

    def __init__(self, *times: float) -> None:
        self._times = iter(times)

    def perf_counter(self) -> float:
        return next(self._times)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> RoundRecord:
    """Other 1 s, draft 2 s, other 4 s, verify 8 s, other 16 s."""
    monkeypatch.setattr(telemetry, "time", Ticks(0, 1, 3, 7, 15, 31))
    record = RoundRecord(16, RoundClock("cpu"), GrammarCut(trees=1, empty_nodes=5))
    for part in (OTHER, DRAFT, OTHER, VERIFY, OTHER):
        record.clock.lap(part)
    return record


class Collector:
    """As much of SGLang's collector as is read."""

    _gauge_cls = None
    _counter_cls = None

    def __init__(self) -> None:
        self.labels = {"model_name": "tiny", "tp_rank": 0}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    registry = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge"):
        original = getattr(prometheus_client, name)
        monkeypatch.setattr(
            prometheus_client, name, lambda *a, o=original, **k: o(*a, registry=registry, **k)
        )
    return registry


def test_laps_add_up_by_part(record: RoundRecord) -> None:
    assert record.clock.seconds() == {DRAFT: 2, VERIFY: 8, OTHER: 21}


def test_tally_of_two_rounds(record: RoundRecord) -> None:
    tally = Tally()
    tally.add(record, [0, 2, 3])
    tally.add(record, [5])
    assert (tally.rounds, tally.verified, tally.tokens, tally.nodes) == (2, 4, 14, 64)
    assert tally.by_depth == [3, 3, 2, 1, 1]
    assert tally.seconds == {DRAFT: 4, VERIFY: 16, OTHER: 42}
    assert (tally.grammar_trees, tally.grammar_empty_nodes) == (2, 10)
    assert tally.acceptance_length == 3.5 == 1 + sum(tally.by_depth) / tally.verified


def test_a_round_without_wanted_requests_counts_as_a_round_only(record: RoundRecord) -> None:
    tally = Tally()
    tally.add(record, [])
    assert (tally.rounds, tally.verified, tally.tokens, tally.by_depth) == (1, 0, 0, [])
    assert tally.acceptance_length == 0 and "accepted by depth: -" in tally.line()


def test_exported_counters(
    record: RoundRecord, registry: prometheus_client.CollectorRegistry
) -> None:
    reporter = Reporter(Exporter(Collector()), None)
    reporter.round(record, [0, 2])
    reporter.round(record, [1])
    labels = {"model_name": "tiny", "tp_rank": "0"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"sglang:dflash2_{name}", labels | more)

    assert value("verify_rounds_total") == 2
    assert value("verified_requests_total") == 3
    assert value("accepted_tokens_total") == 6
    assert value("verified_nodes_total") == 48
    assert value("grammar_trees_total") == 2
    assert value("grammar_empty_nodes_total") == 10
    by_depth = [value("accepted_drafts_by_depth_total", depth=str(d)) for d in (1, 2, 3)]
    assert by_depth == [2, 1, None]
    seconds = [value("round_seconds_total", part=part) for part in (DRAFT, VERIFY, OTHER)]
    assert seconds == [4, 16, 42]
    assert value("width") == 16


def test_a_line_each_interval(record: RoundRecord, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reporter = Reporter(None, 2)
    for drafts in ([1], [2, 0], [3]):
        reporter.round(record, drafts)
    assert [r.message for r in caplog.records] == [
        "DFLASH2, #round: 2, accept len: 2.00, accepted by depth: 0.67 0.33, "
        "draft ms: 2000.0, verify ms: 8000.0, other ms: 21000.0, #grammar-tree: 2"
    ]


@pytest.mark.parametrize("on, logs", [(True, True), (True, False), (False, True), (False, False)])
def test_only_ranks_that_report_do(
    on: bool, logs: bool, registry: prometheus_client.CollectorRegistry
) -> None:
    theirs = SimpleNamespace(
        enable_metrics=True,
        current_scheduler_metrics_enabled=on,
        is_stats_logging_rank=logs,
        decode_log_interval=40,
        metrics_collector=Collector(),
    )
    ours = Reporter.of(theirs)
    assert (ours._exporter is not None, ours._log_interval) == (on, 40 if logs else None)


def req(finished: bool = False, retracted: bool = False) -> Any:
    return SimpleNamespace(finished=lambda: finished, is_retracted=retracted)


def test_requests_whose_tokens_are_dropped_do_not_count(record: RoundRecord) -> None:
    seen: list[Any] = []
    reporter = SimpleNamespace(dflash2=SimpleNamespace(round=lambda *args: seen.append(args)))
    processor = SimpleNamespace(metrics_reporter=reporter)
    batch = SimpleNamespace(reqs=[req(), req(finished=True), req(retracted=True), req()])
    result = SimpleNamespace(num_correct_drafts_per_req_cpu=None)

    def stock(processor: Any, result: Any, batch: Any) -> str:
        result.num_correct_drafts_per_req_cpu = [4, 5, 6, 7]
        batch.reqs[0].is_retracted = True  # what becomes of a request later is not of interest
        return "tokens"

    assert patch.resolve_spec_v2_tokens(stock, processor, result, batch) == "tokens"
    assert seen == []  # another algorithm's round
    batch.reqs[0].is_retracted = False
    record.attach(result)
    assert patch.resolve_spec_v2_tokens(stock, processor, result, batch) == "tokens"
    assert seen == [(record, [4, 7])]


def test_server_info_tells_the_configuration() -> None:
    state: dict[str, Any] = {}
    worker = SimpleNamespace(describe=lambda: {"nodes": 16})
    controller = SimpleNamespace(scheduler=SimpleNamespace(draft_worker=worker))
    patch.add_speculative(lambda c, s: s.update(stock=1), controller, state)
    assert state == {"stock": 1, "dflash2": {"nodes": 16}}
