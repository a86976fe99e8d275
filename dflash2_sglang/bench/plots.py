"""The plots of a benchmark, as PNG and SVG.

Bars through a point show the spread that the table prints.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash2_sglang.bench import BenchError
from dflash2_sglang.bench.figures import BETWEEN, FIRST, LENGTH, RATIO, ROUND, SPEED, Place
from dflash2_sglang.bench.plan import Plan
from dflash2_sglang.bench.rounds import ORDER, SCHEDULER
from dflash2_sglang.bench.style import (
    PARTS,
    PLAIN,
    STYLE,
    finish,
    label_left,
    look,
    panels_of,
    patch,
)

INSTALL = (
    "the plots need matplotlib: pip install 'dflash2-sglang[bench]', or give --no-plots "
    "(the same command draws them later without measuring again)"
)


def check() -> None:
    """BenchError with what to install where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(f"Refused before measuring: {INSTALL}.")


def draw(plan: Plan, found: Sequence[Place], folder: Path) -> list[Path]:
    """Each plot that has figures; returns the files written."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(exist_ok=True)
    written: list[Path] = []
    with matplotlib.rc_context(STYLE):
        for name, make in PLOTS.items():
            figure = make(plan, found)
            if figure is not None:
                written += _save(figure, folder / name)
    return written


def _save(figure: Any, path: Path) -> list[Path]:
    from matplotlib import pyplot

    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    figure.savefig(files[0], dpi=160)
    figure.savefig(files[1], metadata={"Date": None})
    pyplot.close(figure)
    return files


def speed(plan: Plan, found: Sequence[Place]) -> Any:
    return _against_concurrency(plan, found, SPEED, "tokens/s", "Tokens per second, all requests")


def ratio(plan: Plan, found: Sequence[Place]) -> Any:
    base = plan.configs[0].name
    title = f"Tokens per second, relative to {base}"
    return _against_concurrency(plan, found, RATIO, f"ratio to {base}", title, level=1.0)


def first_token(plan: Plan, found: Sequence[Place]) -> Any:
    return _against_concurrency(plan, found, FIRST, "ms", "Time to first token, median")


def between_tokens(plan: Plan, found: Sequence[Place]) -> Any:
    return _against_concurrency(plan, found, BETWEEN, "ms", "Time between tokens, median")


def acceptance(plan: Plan, found: Sequence[Place]) -> Any:
    """Acceptance length by workload, at the least concurrency."""
    least = min(plan.concurrencies)
    shown = [p for p in found if p.concurrency == least and LENGTH in p.figures]
    names = [c.name for c in plan.configs if any(p.config == c.name for p in shown)]
    loads = [w.name for w in plan.workloads if any(p.workload == w.name for p in shown)]
    if not shown:
        return None
    figure, (axes,) = panels_of(1, width=max(4.2, 1.3 + 0.32 * (len(names) + 1) * len(loads)))
    step = min(0.8 / len(names), 0.25)
    for place in shown:
        at = loads.index(place.workload) + (names.index(place.config) - (len(names) - 1) / 2) * step
        value = place.figures[LENGTH]
        colour, _ = look(plan, place.config)
        axes.bar(
            at, value.median, step * 0.9, color=colour, yerr=value.spread or 0, ecolor="#333333"
        )
        axes.annotate(
            f"{value.median:.2f}",
            (at, value.median + (value.spread or 0)),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    axes.axhline(1, color=PLAIN, linewidth=0.8)
    axes.set_xticks(range(len(loads)), loads)
    axes.set_xlim(-0.6, len(loads) - 0.4)
    axes.margins(y=0.1)
    axes.set_ylabel("tokens a verify pass")
    finish(plan, figure, names, f"Acceptance length, concurrency {least}", bars=True)
    return figure


def depth(plan: Plan, found: Sequence[Place]) -> Any:
    """The share of verify passes that accept at least so many drafted tokens."""
    least = min(plan.concurrencies)
    shown = [p for p in found if p.concurrency == least and len(p.reach) > 1]
    if not shown:
        return None
    loads = [w.name for w in plan.workloads if any(p.workload == w.name for p in shown)]
    figure, panels = panels_of(len(loads), sharey=True)
    for axes, load in zip(panels, loads, strict=True):
        for place in (p for p in shown if p.workload == load):
            colour, marker = look(plan, place.config)
            steps = range(1, len(place.reach))
            axes.plot(
                steps, [100 * share for share in place.reach[1:]], color=colour, marker=marker
            )
        axes.set_title(load)
        axes.set_ylim(0, 100)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("drafted tokens accepted, at least")
    label_left(panels, "% of verify passes")
    names = [c.name for c in plan.configs if any(p.config == c.name for p in shown)]
    finish(plan, figure, names, f"Acceptance by depth, concurrency {least}")
    return figure


def rounds(plan: Plan, found: Sequence[Place]) -> Any:
    """Milliseconds a decoding pass, split where the split was measured."""
    load = plan.workloads[0].name
    shown = [p for p in found if p.workload == load and ROUND in p.figures]
    if not shown:
        return None
    levels = [c for c in plan.concurrencies if any(p.concurrency == c for p in shown)]
    names = [c.name for c in plan.configs if any(p.config == c.name for p in shown)]
    parts = [p for p in (*ORDER, SCHEDULER) if any(p in place.parts for place in shown)]
    figure, panels = panels_of(len(levels), sharex=True, height=0.9 + 0.36 * len(names))
    for axes, level in zip(panels, levels, strict=True):
        for place in (p for p in shown if p.concurrency == level):
            _round_bar(axes, names.index(place.config), place, parts)
        axes.set_title(f"concurrency {level}")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        axes.set_xlabel("ms a pass")
        axes.margins(x=0.12)
    for axes in panels[1:]:
        if axes.get_subplotspec().colspan.start:
            axes.set_yticklabels([])
    handles = [patch(PARTS[i % len(PARTS)], part) for i, part in enumerate(parts)]
    finish(plan, figure, [], f"Where the time of a pass goes: {load}", handles=handles)
    return figure


def _round_bar(axes: Any, at: int, place: Place, parts: Sequence[str]) -> None:
    total, left = place.figures[ROUND].median, 0.0
    if not place.parts:
        axes.barh(at, total, 0.62, color="#bbbbbb")
    for number, part in enumerate(parts):
        width = total * place.parts.get(part, 0.0)
        axes.barh(at, width, 0.62, left=left, color=PARTS[number % len(PARTS)])
        left += width
    axes.annotate(
        f"{total:.0f}" if total >= 10 else f"{total:.1f}",
        (total, at),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def _against_concurrency(
    plan: Plan, found: Sequence[Place], name: str, unit: str, title: str, level: float | None = None
) -> Any:
    shown = [p for p in found if name in p.figures]
    loads = [w.name for w in plan.workloads if any(p.workload == w.name for p in shown)]
    if not shown:
        return None
    figure, panels = panels_of(len(loads), sharey=True)
    for axes, load in zip(panels, loads, strict=True):
        for number, config in enumerate(plan.configs):
            own = [p for p in shown if (p.workload, p.config) == (load, config.name)]
            if own and not (level is not None and number == 0):
                _line(axes, plan, own, name)
        if level is not None:
            axes.axhline(level, color=PLAIN, linewidth=1.2)
        axes.set_title(load)
        _concurrency_axis(axes, plan)
        if level is None:
            axes.set_ylim(bottom=0)
    label_left(panels, unit)
    drawn = plan.configs if level is None else plan.configs[1:]
    names = [c.name for c in drawn if any(p.config == c.name for p in shown)]
    finish(plan, figure, names, title)
    return figure


def _line(axes: Any, plan: Plan, own: Sequence[Place], name: str) -> None:
    colour, marker = look(plan, own[0].config)
    # A little apart, so that bars at the same concurrency do not hide each other.
    at = [c.name for c in plan.configs].index(own[0].config) - (len(plan.configs) - 1) / 2
    axes.errorbar(
        [p.concurrency * 1.025**at for p in own],
        [p.figures[name].median for p in own],
        yerr=[p.figures[name].spread or 0 for p in own],
        color=colour,
        marker=marker,
        elinewidth=1,
        capsize=2,
    )


def _concurrency_axis(axes: Any, plan: Plan) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(plan.concurrencies, [str(c) for c in plan.concurrencies])
    axes.minorticks_off()
    low, high = min(plan.concurrencies), max(plan.concurrencies)
    axes.set_xlim(low / 1.25, high * 1.25)
    axes.set_xlabel("concurrency")


PLOTS: dict[str, Callable[[Plan, Sequence[Place]], Any]] = {
    "speed": speed,
    "ratio": ratio,
    "acceptance": acceptance,
    "acceptance-by-depth": depth,
    "round": rounds,
    "first-token": first_token,
    "between-tokens": between_tokens,
}
