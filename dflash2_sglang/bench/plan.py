"""What a benchmark measures, and in which order."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

ANSWERS, LOAD, ROUNDS = "answers", "load", "rounds"


@dataclass(frozen=True)
class Config:
    """A way to serve; ``arguments`` are those of ``sglang.launch_server``, without host and ports."""

    name: str
    arguments: tuple[str, ...]

    @property
    def speculative(self) -> bool:
        return "--speculative-algorithm" in self.arguments


@dataclass(frozen=True)
class Workload:
    """Prompts as a server gets them, the chat template applied."""

    name: str
    prompts: tuple[str, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    ``answers``: all prompts once, untimed, for texts and acceptance by depth. ``load``: one run of
    the load generator. ``rounds``: samples of the scheduler's stack while prompts are answered.
    """

    kind: str
    workload: str
    concurrency: int
    config: str
    repeat: int = 0

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.workload}/{self.concurrency}/{self.config}/{self.repeat}"

    @property
    def label(self) -> str:
        what = {ANSWERS: "texts", LOAD: f"repeat {self.repeat + 1}", ROUNDS: "stack samples"}
        place = f"{self.workload}, concurrency {self.concurrency}"
        return f"{place}, {self.config}, {what[self.kind]}"


@dataclass(frozen=True)
class Plan:
    """A whole benchmark; ``settings`` are the load's own (tokens, temperature, seed ...)."""

    configs: tuple[Config, ...]
    workloads: tuple[Workload, ...]
    concurrencies: tuple[int, ...]
    repeats: int
    together: bool
    rounds: bool
    settings: dict[str, Any]

    def cells(self) -> list[Cell]:
        """In the order of measurement.

        Repeats are the outermost loop, so that an interrupted run has a whole table of fewer
        repeats. Within a repeat the configurations take turns, forwards in one and backwards in
        the next, so that a steady drift of the machine favours none. One server at a time, a
        configuration keeps its turn for all workloads, since changing turns means a new start.
        """
        cells = [cell for repeat in range(self.repeats) for cell in self._repeat(repeat)]
        if self.rounds and self.together:
            cells += [cell for config in self.configs for cell in self._rounds(config)]
        return cells

    def _repeat(self, repeat: int) -> Iterator[Cell]:
        configs = self.configs[:: -1 if repeat % 2 else 1]
        places = [(w.name, c) for w in self.workloads for c in self.concurrencies]
        # What is measured in one go: a place by all configurations, or all places by one.
        blocks: list[list[tuple[str, int, Config]]]
        if self.together:
            blocks = [[(w, c, config) for config in configs] for w, c in places]
        else:
            blocks = [[(w, c, config) for w, c in places] for config in configs]
        for block in blocks:
            if repeat == 0:
                yield from (Cell(ANSWERS, w, c, config.name) for w, c, config in block)
            yield from (Cell(LOAD, w, c, config.name, repeat) for w, c, config in block)
            if self.rounds and not self.together and repeat == 0:
                yield from self._rounds(block[0][2])

    def _rounds(self, config: Config) -> Iterator[Cell]:
        for concurrency in self.concurrencies:
            yield Cell(ROUNDS, self.workloads[0].name, concurrency, config.name)

    def turns(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """``cells`` in groups that one start of servers serves."""
        if self.together:
            return [list(cells)] if cells else []
        return [list(group) for _, group in itertools.groupby(cells, lambda cell: cell.config)]

    def config(self, name: str) -> Config:
        return next(config for config in self.configs if config.name == name)

    def workload(self, name: str) -> Workload:
        return next(workload for workload in self.workloads if workload.name == name)

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for two runs to be parts of one benchmark; repeats may be added."""
        return {
            "configurations": {c.name: list(c.arguments) for c in self.configs},
            "workloads": {w.name: w.digest for w in self.workloads},
            "concurrency": list(self.concurrencies),
            **self.settings,
        }
