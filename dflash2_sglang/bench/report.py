"""The tables, the JSON and the notes of a benchmark."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dflash2_sglang.bench import record
from dflash2_sglang.bench.figures import BETWEEN, FIRST, LENGTH, RATIO, SPEED, Figure, Place
from dflash2_sglang.bench.journal import Journal
from dflash2_sglang.bench.plan import LOAD, Plan

NEAR_TIE = 0.5  # nats; what the way of computing alone changes on the demo pair in bfloat16
SHOWN_DIFFERENCES = 5


def write(
    plan: Plan, journal: Journal, found: Sequence[Place], folder: Path, notes: Sequence[str]
) -> str:
    """``bench.json`` and ``bench.md`` in ``folder``; the Markdown is also returned."""
    text = markdown(plan, found, [*progress_notes(plan, journal), *notes])
    (folder / "bench.md").write_text(text, encoding="utf-8")
    whole = json.dumps(as_json(plan, journal, found, notes), indent=1, ensure_ascii=False)
    (folder / "bench.json").write_text(whole + "\n", encoding="utf-8")
    return text


def as_json(
    plan: Plan, journal: Journal, found: Sequence[Place], notes: Sequence[str]
) -> dict[str, Any]:
    """Everything needed to measure again, the figures, and the raw cells.

    Left in the journal are only the log-probabilities beside the reference's tokens.
    """
    raw = {key: value for key, value in journal.results.items() if not key.startswith("server/")}
    return {
        "command": record.command(),
        "begun": _when(journal.begun),
        "written": _when(time.time()),
        "revision": record.revision(),
        "versions": record.versions(),
        "machine": record.machine(),
        "environment": record.environment(),
        "settings": plan.fingerprint(),
        "repeats": plan.repeats,
        "one_server_at_a_time": not plan.together,
        "prompts": {w.name: {"sha256": w.digest, "texts": list(w.prompts)} for w in plan.workloads},
        "servers": {
            key.removeprefix("server/"): value
            for key, value in journal.results.items()
            if key.startswith("server/")
        },
        "notes": list(notes),
        "figures": [_place_record(place) for place in found],
        "raw": {key: _without_top(value) for key, value in raw.items()},
    }


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _place_record(place: Place) -> dict[str, Any]:
    return {
        "workload": place.workload,
        "concurrency": place.concurrency,
        "configuration": place.config,
        **{name: figure.record() for name, figure in place.figures.items()},
        "prompts": place.prompts,
        "same_text": place.same,
        "differences": [vars(d) for d in place.differences or []],
        "acceptance_by_depth": place.reach,
        "round_parts": place.parts,
    }


def _without_top(value: Any) -> Any:
    if isinstance(value, list):
        return [{k: v for k, v in one.items() if k != "top"} for one in value]
    return value


def progress_notes(plan: Plan, journal: Journal) -> list[str]:
    cells = plan.cells()
    done = sum(cell.key in journal.results for cell in cells)
    if done == len(cells):
        return []
    return [
        f"Unfinished: {done} of {len(cells)} cells are measured; the same command goes on with it."
    ]


# --- Markdown --------------------------------------------------------------------------------


def markdown(plan: Plan, found: Sequence[Place], notes: Sequence[str]) -> str:
    parts = [_head(plan)]
    if len(plan.workloads) > 1:
        parts.append(summary(plan, found))
    parts += [table(plan, found, workload.name) for workload in plan.workloads]
    parts.append(agreement(plan, found))
    parts += [f"Note: {note}" for note in notes]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(plan: Plan) -> str:
    where, versions = record.machine(), record.versions()
    devices = ", ".join(where["accelerators"]) or "no accelerator"
    settings = plan.settings
    order = "the servers taking turns" if plan.together else "one server at a time"
    prompts = ", ".join(f"{w.name} {len(w.prompts)}" for w in plan.workloads)
    repeats = "1 repeat" if plan.repeats == 1 else f"{plan.repeats} repeats"
    return (
        "# Benchmark\n\n"
        f"{time.strftime('%Y-%m-%d')}; {devices}; {where['processor']}; "
        f"SGLang {versions['sglang']}, torch {versions['torch']}, "
        f"dflash2-sglang {record.revision() or versions['dflash2-sglang']}.\n\n"
        f"    {record.command()}\n\n"
        f"Prompts: {prompts}. At most {settings['max tokens']} tokens an answer, temperature "
        f"{settings['temperature']:g}; {repeats}, {order}.\n\n"
        "Figures are medians over the repeats. A second run of as many repeats should agree within "
        "the ± in 19 of 20 figures while the machine stays as busy as it was; the ratio, taken within "
        "each repeat, also bears a slow drift. The ± is from how much repeats vary, pooled over all "
        "rows of the same concurrency. Acceptance length: tokens delivered a verify pass."
    )


def summary(plan: Plan, found: Sequence[Place]) -> str:
    """Ratios by concurrency: the median over the workloads, and the least and most of them."""
    base = plan.configs[0].name
    levels = " | ".join(f"concurrency {c}" for c in plan.concurrencies)
    lines = [
        f"Ratio of tokens/s to {base}: median over the workloads (least to most)",
        "",
        f"| configuration | {levels} |",
        "|---" * (len(plan.concurrencies) + 1) + "|",
    ]
    for config in plan.configs:
        cells = [
            [
                p.figures[RATIO].median
                for p in found
                if (p.config, p.concurrency) == (config.name, c) and RATIO in p.figures
            ]
            for c in plan.concurrencies
        ]
        texts = [
            f"{median(v):.2f} ({min(v):.2f} to {max(v):.2f})" if v else "not measured"
            for v in cells
        ]
        lines.append(f"| {config.name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def table(plan: Plan, found: Sequence[Place], workload: str) -> str:
    base = plan.configs[0].name
    lines = [
        f"| {workload} | concurrency | acceptance length | tokens/s | ratio to {base} "
        "| first token, ms | between tokens, ms | same text |",
        "|---" * 8 + "|",
    ]
    for place in found:
        if place.workload == workload:
            cells = [
                place.config,
                str(place.concurrency),
                show(place.figures.get(LENGTH), 2),
                show(place.figures.get(SPEED), 1),
                show(place.figures.get(RATIO), 2) if place.config != base else "1",
                show(place.figures.get(FIRST), 0),
                show(place.figures.get(BETWEEN), 1),
                _same(plan, place),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def show(figure: Figure | None, digits: int) -> str:
    if figure is None:
        return ""
    spread = "" if figure.spread is None else f" ± {figure.spread:.{digits}f}"
    return f"{figure.median:.{digits}f}{spread}"


def _same(plan: Plan, place: Place) -> str:
    if plan.settings["temperature"] != 0:
        return "sampled"
    if (place.config, place.concurrency) == (plan.configs[0].name, min(plan.concurrencies)):
        return "reference"
    return "" if place.same is None else f"{place.same} of {place.prompts}"


def agreement(plan: Plan, found: Sequence[Place]) -> str:
    """What differs from the reference's greedy texts, and how near a tie each difference was."""
    if plan.settings["temperature"] != 0:
        return "Temperature above 0: texts are samples and were not compared."
    first, least = plan.configs[0].name, min(plan.concurrencies)
    lines = [
        f"Texts are compared, token by token, with those of {first} at concurrency {least}; "
        f"{first} at another concurrency shows what the batch size alone changes. The gap is by how "
        "much its log-probability of its own token exceeds that of the other, in nats, where a text "
        "first differs."
    ]
    rows = [(place, d) for place in found for d in place.differences or []]
    if not rows:
        return lines[0] + "\n\nNo text differs."
    gaps = [d.gap for _, d in rows if d.gap is not None]
    wide = [(p, d) for p, d in rows if d.gap is None or d.at_least or abs(d.gap) > NEAR_TIE]
    lines.append(
        f"\nTexts that differ: {len(rows)}; largest gap {max(map(abs, gaps), default=0.0):.2f}; not near "
        f"ties (a gap above {NEAR_TIE}, or none that could be told): {len(wide)}."
    )
    lines += ["", *_difference_table(wide or rows)]
    return "\n".join(lines)


def _difference_table(rows: Sequence[tuple[Place, Any]]) -> list[str]:
    widest = sorted(rows, key=lambda row: -abs(row[1].gap if row[1].gap is not None else 1e9))
    lines = [
        "The widest gaps first; all are in bench.json:",
        "",
        "| workload | concurrency | configuration | prompt | token | expected id | found id | gap |",
        "|---" * 8 + "|",
    ]
    for place, d in widest[:SHOWN_DIFFERENCES]:
        gap = "not known" if d.gap is None else f"{'at least ' * d.at_least}{d.gap:.3f}"
        ids = [("end" if token is None else str(token)) for token in (d.expected, d.found)]
        cells = [place.workload, place.concurrency, place.config, d.prompt + 1, d.position + 1]
        lines.append(f"| {' | '.join(map(str, [*cells, *ids, gap]))} |")
    return lines


def load_notes(plan: Plan, journal: Journal) -> list[str]:
    """Whether the machine was busy with something else before the cells."""
    import os

    loads = [
        value["load_average"]
        for key, value in journal.results.items()
        if key.startswith(f"machine/{LOAD}/")
    ]
    cores = len(os.sched_getaffinity(0))
    if loads and plan.together and median(loads) > 2 * cores:
        return [
            f"The machine was busy with other work: a load average of {median(loads):.1f} on {cores} "
            "cores. Measure again when it is quiet."
        ]
    return []
