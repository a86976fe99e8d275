"""One start of ``dflash2-sglang bench``: from its arguments to files in the output folder."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash2_sglang.bench import BenchError, figures, plots, record, report, rounds
from dflash2_sglang.bench.configs import configurations, dtype_of, fit_together, reject
from dflash2_sglang.bench.journal import Journal
from dflash2_sglang.bench.load import LoadGenerator
from dflash2_sglang.bench.plan import ROUNDS, Config, Plan, Workload
from dflash2_sglang.bench.prompts import workload
from dflash2_sglang.bench.runner import Runner

NO_CHAIN = "The stock DFLASH chain is left out: SGLang 0.5.23 serves it in bfloat16 only."
LOADED_FLOAT32 = "In float32 greedy texts should be identical: please report differences."


class Session:
    """Refuses what cannot be measured before anything is started."""

    def __init__(self, args: argparse.Namespace):
        from rich.console import Console

        # Bound to the stream now: the load generator's output is redirected later.
        self.console = Console(file=sys.stdout, highlight=False)
        self.args = args
        self.notes: list[str] = []
        if not args.no_plots:
            plots.check()

    def run(self) -> None:
        """Measure, and write what there is, also after Ctrl-C or the death of a server."""
        warnings.simplefilter("ignore", UserWarning)  # SGLang's, about devices that are not here
        folder = self.args.out
        reject(self.args)
        plan, model = self._plan(folder)
        journal = Journal(folder, {**plan.fingerprint(), **record.identity()})
        left = sum(cell.key not in journal.results for cell in plan.cells())
        order = "side by side" if plan.together else "one at a time"
        self.console.print(
            f"{len(plan.cells())} cells, {left} of them to measure, with "
            f"{len(plan.configs)} servers {order}; results go to {folder}",
            markup=False,
            soft_wrap=True,
        )
        try:
            Runner(plan, folder, journal, model, self.console).run()
        finally:
            self._report(plan, journal, folder)

    def _plan(self, folder: Path) -> tuple[Plan, str]:
        args = self.args
        target, drafter = self._pair()
        configs = configurations(args, target, drafter)
        if dtype_of(args) not in ("bfloat16", "auto") and not args.no_chain:
            self.notes.append(NO_CHAIN)
        for name in ("logs", "prompts"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        workloads = self._workloads(target, folder)
        why_not = "--no-rounds was given" if args.no_rounds else rounds.why_not()
        if why_not:
            self.notes.append(f"The time of a round is not split: {why_not}.")
        plan = Plan(
            tuple(configs),
            tuple(workloads),
            tuple(sorted(set(args.concurrency))),
            args.repeats,
            self._together(configs, target, drafter),
            why_not is None,
            {
                "target": target,
                "drafter": drafter,
                "max tokens": args.max_tokens,
                "temperature": args.temperature,
                "seed": args.seed,
                "ignore eos": args.ignore_eos,
                "warm cache": args.warm_cache,
            },
        )
        return plan, target

    def _pair(self) -> tuple[str, str]:
        if self.args.model_path:
            return self.args.model_path, self.args.speculative_draft_model_path
        from dflash2_sglang.cli.demo_model import demo_drafter, ensure_demo_model

        return str(ensure_demo_model(wheel=self.args.wheel)), str(demo_drafter())

    def _together(self, configs: Sequence[Config], target: str, drafter: str) -> bool:
        return not self.args.one_at_a_time and fit_together(
            configs, [target, drafter], self.args.server_flags
        )

    def _workloads(self, target: str, folder: Path) -> list[Workload]:
        from transformers import AutoTokenizer

        args = self.args
        tokenizer: Any = AutoTokenizer.from_pretrained(
            target, trust_remote_code="--trust-remote-code" in args.server_flags
        )
        generator = LoadGenerator(folder / "logs" / "load.log")

        def rows(name: str, count: int) -> list[str]:
            return generator.rows(name, count, target, tokenizer)

        found = [
            workload(source, args.prompts, tokenizer, not args.no_chat_template, rows)
            for source in dict.fromkeys(args.workload)
        ]
        names = [one.name for one in found]
        if len(set(names)) < len(names):
            raise BenchError(f"Two --workload have one name ({', '.join(names)}): rename a file.")
        for one in found:
            if len(one.prompts) < max(args.concurrency):
                raise BenchError(
                    f"--concurrency {max(args.concurrency)} needs as many prompts at least, and "
                    f"workload {one.name} has {len(one.prompts)}: raise --prompts, or give a larger file."
                )
        return found

    def _report(self, plan: Plan, journal: Journal, folder: Path) -> None:
        found = figures.places(plan, journal.results)
        if not found:
            return
        notes = [
            *self.notes,
            *report.load_notes(plan, journal),
            *_warnings(plan, journal.results, found, self.args),
        ]
        text = report.write(plan, journal, found, folder, notes)
        self.console.print(f"\n{text}", markup=False, soft_wrap=True)
        written = [] if self.args.no_plots else plots.draw(plan, found, folder / "plots")
        drawn = f", and {len(written)} plots in {folder / 'plots'}" if written else ""
        self.console.print(
            f"Written: bench.md and bench.json in {folder}{drawn}.", markup=False, soft_wrap=True
        )


def _warnings(
    plan: Plan, results: dict[str, Any], found: Sequence[figures.Place], args: argparse.Namespace
) -> list[str]:
    notes = []
    if dtype_of(args) in ("float32", "float") and any(place.differences for place in found):
        notes.append(LOADED_FLOAT32)
    measured = [cell for cell in plan.cells() if cell.kind == ROUNDS and cell.key in results]
    if measured and not any(results[cell.key] for cell in measured):
        notes.append(
            "The time of a round is not split: py-spy may not look at other processes here."
        )
    speculative = {config.name for config in plan.configs if config.speculative}
    without = {
        place.config
        for place in found
        if place.config in speculative and place.figures and figures.LENGTH not in place.figures
    }
    if without:
        notes.append(
            f"No acceptance length: SGLang told of no verify passes for {', '.join(sorted(without))}."
        )
    return notes
