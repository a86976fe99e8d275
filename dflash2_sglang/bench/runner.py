"""Start servers, measure cell by cell, stop servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_sglang.bench import answers, rounds
from dflash2_sglang.bench.figures import reference
from dflash2_sglang.bench.journal import Journal
from dflash2_sglang.bench.load import LoadGenerator, command, write_dataset
from dflash2_sglang.bench.plan import ANSWERS, LOAD, Cell, Plan
from dflash2_sglang.bench.record import load_average
from dflash2_sglang.cli.servers import Server, running, wait_ready

if TYPE_CHECKING:
    from rich.console import Console

Tick = Callable[[], None]


@dataclass
class Runner:
    """Measures what the journal lacks of a plan; ``model`` is the target's path or name."""

    plan: Plan
    folder: Path
    journal: Journal
    model: str
    console: Console
    generator: LoadGenerator = field(init=False)
    servers: dict[str, Server] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = LoadGenerator(self.folder / "logs" / "load.log")

    def run(self) -> None:
        """Each finished cell is in the journal at once; no server is left, whatever happens."""
        left = [cell for cell in self.plan.cells() if cell.key not in self.journal.results]
        if not left:
            return
        for workload in self.plan.workloads:
            write_dataset(self._dataset(workload.name), workload.prompts)
        with progress(self.console, len(left)) as bar:
            for turn in self.plan.turns(left):
                names = list(dict.fromkeys(cell.config for cell in turn))
                with self._serving(names, bar):
                    for cell in turn:
                        self._measure(cell, bar)

    @contextmanager
    def _serving(self, names: Sequence[str], bar: Progress) -> Iterator[None]:
        self.servers = {
            name: Server(name, self.plan.config(name).arguments, self.folder / "logs")
            for name in names
        }
        started = list(self.servers.values())
        with running(started):
            bar.doing(f"starting {', '.join(names)}")
            wait_ready(started)
            for server in started:
                bar.doing(f"warming up {server.name}")
                workload = self.plan.workloads[0]
                answers.warm_up(server, workload, self.plan.concurrencies, self.plan.settings)
                self._keep_info(server)
            yield

    def _keep_info(self, server: Server) -> None:
        key = f"server/{server.name}"
        if key not in self.journal.results:
            told = answers.server_info(server)
            self.journal.add(key, {"command": server.command, "info": told})

    def _measure(self, cell: Cell, bar: Progress) -> None:
        server, workload = self.servers[cell.config], self.plan.workload(cell.workload)
        bar.begin(cell.label, len(workload.prompts))
        measure = {ANSWERS: self._answers, LOAD: self._load}.get(cell.kind, self._rounds)
        before = load_average()
        try:
            result = measure(cell, server, bar.tick)
        except Exception:
            time.sleep(1.0)  # a server whose scheduler dies takes a moment to end
            server.check_alive("answering")  # says more than a failed request
            raise
        self.journal.add(cell.key, result)
        if cell.kind == LOAD:
            self.journal.add(f"machine/{cell.key}", {"load_average": before, "at": time.time()})
        bar.end(cell.label, _outcome(cell, result))

    def _answers(self, cell: Cell, server: Server, tick: Tick) -> Any:
        greedy = self.plan.settings["temperature"] == 0
        top = greedy and cell == reference(self.plan, cell.workload)
        workload = self.plan.workload(cell.workload)
        return answers.ask_all(server, workload, cell.concurrency, self.plan.settings, top, tick)

    def _load(self, cell: Cell, server: Server, tick: Tick) -> Any:
        count = len(self.plan.workload(cell.workload).prompts)
        words = command(
            server.url,
            self.model,
            self._dataset(cell.workload),
            count,
            cell.concurrency,
            self.plan.settings,
        )
        result = self.generator.run(words, self.folder / "logs" / "load.jsonl", tick)
        return {"command": ["python", "-m", "sglang.benchmark.serving", *words], **result}

    def _rounds(self, cell: Cell, server: Server, tick: Tick) -> Any:
        workload = self.plan.workload(cell.workload)
        warm = {**self.plan.settings, "warm cache": True}
        # The prompts into the cache first, so that few of the looks are of prefill.
        answers.ask_all(server, workload, cell.concurrency, {**warm, "max tokens": 1}, False)

        def work() -> None:
            answers.ask_all(server, workload, cell.concurrency, warm, False, tick)

        return dict(rounds.sample(server, work, self.folder / "logs"))

    def _dataset(self, workload: str) -> Path:
        return self.folder / "prompts" / f"{workload}.jsonl"


def _outcome(cell: Cell, result: Any) -> str:
    return f"{result['output_throughput']:.1f} tokens/s" if cell.kind == LOAD else "done"


class Progress:
    """How far a benchmark is; a line a cell where there is no terminal."""

    def __init__(self, console: Console, total: int):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bars

        self.console = console
        self.total, self.done = total, 0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bars = Bars(
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.cells = self.bars.add_task("cells", total=total)
        self.requests = self.bars.add_task("starting", total=None)

    def doing(self, what: str) -> None:
        self.bars.update(self.requests, description=what, total=None, completed=0)
        if not self.console.is_terminal:
            self.console.print(what, markup=False)

    def begin(self, label: str, requests: int) -> None:
        self.bars.update(self.requests, description=label, total=requests, completed=0)

    def tick(self) -> None:
        self.bars.advance(self.requests)

    def end(self, label: str, outcome: str) -> None:
        self.done += 1
        self.bars.advance(self.cells)
        self.console.print(f"{self.done}/{self.total} {label}: {outcome}", markup=False)


@contextmanager
def progress(console: Console, total: int) -> Iterator[Progress]:
    bar = Progress(console, total)
    with bar.bars:
        yield bar
