"""DFLASH2's own numbers in SGLang's Prometheus endpoint and log.

SGLang's ``sglang:spec_accept_length`` is that of the last few rounds, and counts requests that had ended
already. These are counters, so that a rate over any window gives exact means:

    rate(sglang:dflash2_accepted_tokens_total[5m]) / rate(sglang:dflash2_verified_requests_total[5m])
"""

from __future__ import annotations

import logging
from typing import Any

from dflash2_sglang.telemetry import RoundRecord, Tally

logger = logging.getLogger(__name__)

PREFIX = "sglang:dflash2_"
COUNTERS = {
    "verify_rounds": "Decode rounds, each one target pass over the trees of a batch.",
    "verified_requests": "Requests verified, summed over rounds (those whose tokens were wanted).",
    "accepted_tokens": "Tokens gained by these requests, the bonus tokens included.",
    "verified_nodes": "Tree nodes verified for these requests, the anchors included.",
    "grammar_trees": "Trees that a grammar cut to what it allows.",
    "grammar_empty_nodes": "Nodes of those trees that stayed empty, as the grammar allowed no more.",
}
BY_DEPTH = "accepted_drafts_by_depth"
SECONDS = "round_seconds"
WIDTH = "width"


class Exporter:
    """The counters of one scheduler, in the labels of its own metrics collector."""

    def __init__(self, collector: Any) -> None:
        # Only now: SGLang first sets PROMETHEUS_MULTIPROC_DIR.
        from prometheus_client import Counter, Gauge

        counter = collector._counter_cls or Counter
        gauge = collector._gauge_cls or Gauge
        self._labels = labels = dict(collector.labels)
        names = list(labels)
        self._counters = {
            name: counter(f"{PREFIX}{name}_total", text, names).labels(**labels)
            for name, text in COUNTERS.items()
        }
        self._by_depth = counter(
            f"{PREFIX}{BY_DEPTH}_total", "Drafted tokens accepted, by depth.", [*names, "depth"]
        )
        self._seconds = counter(
            f"{PREFIX}{SECONDS}_total",
            "Seconds of decode rounds: draft (drafter, lattice, tree), verify (target, acceptance), other.",
            [*names, "part"],
        )
        self._width = gauge(
            f"{PREFIX}{WIDTH}",
            "Nodes of a tree in the last round, the anchor included.",
            names,
            multiprocess_mode="mostrecent",
        ).labels(**labels)

    def add(self, tally: Tally, width: int) -> None:
        """Add a tally of what happened since the last call."""
        values = {
            "verify_rounds": tally.rounds,
            "verified_requests": tally.verified,
            "accepted_tokens": tally.tokens,
            "verified_nodes": tally.nodes,
            "grammar_trees": tally.grammar_trees,
            "grammar_empty_nodes": tally.grammar_empty_nodes,
        }
        for name, value in values.items():
            self._counters[name].inc(value)
        for depth, number in enumerate(tally.by_depth, 1):
            self._by_depth.labels(**self._labels, depth=str(depth)).inc(number)
        for part, seconds in tally.seconds.items():
            self._seconds.labels(**self._labels, part=part).inc(seconds)
        self._width.set(width)


class Reporter:
    """Takes the records of finished rounds, for one scheduler."""

    def __init__(self, exporter: Exporter | None, log_interval: int | None) -> None:
        """log_interval: rounds between two lines of the log, None for no lines."""
        self._exporter, self._log_interval = exporter, log_interval
        self._since_line = Tally()

    @classmethod
    def of(cls, reporter: Any) -> Reporter:
        """For SGLang's own metrics reporter, whose settings and labels hold for ours too."""
        exports = reporter.enable_metrics and reporter.current_scheduler_metrics_enabled
        return cls(
            Exporter(reporter.metrics_collector) if exports else None,
            reporter.decode_log_interval if reporter.is_stats_logging_rank else None,
        )

    def round(self, record: RoundRecord, correct_drafts: list[int]) -> None:
        """correct_drafts: accepted drafted tokens of each request whose tokens were wanted."""
        if self._exporter is not None:
            tally = Tally()
            tally.add(record, correct_drafts)
            self._exporter.add(tally, record.nodes)
        if self._log_interval is None:
            return
        self._since_line.add(record, correct_drafts)
        if self._since_line.rounds >= self._log_interval:
            logger.info(self._since_line.line())
            self._since_line = Tally()
