"""What a round tells about itself: its time by part, and what it verified.

A ``RoundRecord`` travels on the round's result to where SGLang processes it, on the CPU and after the device
has finished. So nothing here waits for the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

DRAFT, VERIFY, OTHER = "draft", "verify", "other"
PARTS = (DRAFT, VERIFY, OTHER)

RECORD = "dflash2_record"  # name of the attribute on SGLang's result


class RoundClock:
    """Times the parts of one round: host time on a CPU, events of the current stream on a device.

    ``lap(part)`` ends a part that began at the lap before it, or at the construction.
    """

    def __init__(self, device: Any) -> None:
        self._on_device = torch.device(device).type == "cuda"
        self._laps: list[tuple[str, Any]] = [("", self._now())]

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, part: str) -> None:
        self._laps.append((part, self._now()))

    def seconds(self) -> dict[str, float]:
        """Time by part; to be asked when the round's results are on the host."""
        total = dict.fromkeys(PARTS, 0.0)
        for (_, begin), (part, end) in zip(self._laps, self._laps[1:], strict=False):
            total[part] += begin.elapsed_time(end) / 1e3 if self._on_device else end - begin
        return total


@dataclass
class GrammarCut:
    """What grammars did to the trees of a round: trees regrown, and nodes for which nothing was left."""

    trees: int = 0
    empty_nodes: int = 0


@dataclass
class RoundRecord:
    """nodes: of each request's tree, the anchor included."""

    nodes: int
    clock: RoundClock
    grammar: GrammarCut = field(default_factory=GrammarCut)

    def attach(self, result: Any) -> None:
        setattr(result, RECORD, self)

    @staticmethod
    def of(result: Any) -> RoundRecord | None:
        return getattr(result, RECORD, None)


@dataclass
class Tally:
    """Sums over rounds. A request counts in a round if its tokens were still wanted: not those of one that
    had ended or was aborted before the round came back, nor of one that was retracted."""

    rounds: int = 0
    verified: int = 0
    tokens: int = 0
    nodes: int = 0
    by_depth: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    grammar_trees: int = 0
    grammar_empty_nodes: int = 0

    def add(self, record: RoundRecord, correct_drafts: list[int]) -> None:
        """correct_drafts: of the requests that count, so many drafted tokens were accepted."""
        self.rounds += 1
        self.verified += len(correct_drafts)
        self.tokens += sum(correct_drafts) + len(correct_drafts)
        self.nodes += record.nodes * len(correct_drafts)
        deepest = max(correct_drafts, default=0)
        self.by_depth += [0] * (deepest - len(self.by_depth))
        for length in correct_drafts:
            for depth in range(length):
                self.by_depth[depth] += 1
        for part, seconds in record.clock.seconds().items():
            self.seconds[part] += seconds
        self.grammar_trees += record.grammar.trees
        self.grammar_empty_nodes += record.grammar.empty_nodes

    @property
    def acceptance_length(self) -> float:
        """Tokens a request gains in a round, the bonus token included."""
        return self.tokens / self.verified if self.verified else 0.0

    def line(self) -> str:
        """For the log, in the style of SGLang's own line on a decode batch."""
        shares = (
            " ".join(f"{n / self.verified:.2f}" for n in self.by_depth) if self.verified else ""
        )
        times = ", ".join(
            f"{part} ms: {1e3 * self.seconds[part] / self.rounds:.1f}" for part in PARTS
        )
        grammar = f", #grammar-tree: {self.grammar_trees}" if self.grammar_trees else ""
        return (
            f"DFLASH2, #round: {self.rounds}, accept len: {self.acceptance_length:.2f}, "
            f"accepted by depth: {shares or '-'}, {times}{grammar}"
        )
