"""How the plots look: colours, markers, panels, legends.

Colours are those of Okabe and Ito, which stay apart for colour-blind eyes; a configuration has the
same colour and marker in every plot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash2_sglang.bench.plan import Plan

PLAIN, CHAIN = "#595959", "#E69F00"
OTHERS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B59F00")
MARKERS = "osD^vP*X"
PARTS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
COLUMNS = 3
PANEL = (3.6, 2.7)  # inches

STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "svg.hashsalt": "dflash2-sglang",  # the same figures give the same file
    "svg.fonttype": "none",
}


def look(plan: Plan, name: str) -> tuple[str, str]:
    """Colour and marker of a configuration."""
    kinds = {config.name: _kind(config.arguments) for config in plan.configs}
    same = [other for other, kind in kinds.items() if kind == kinds[name]]
    number = same.index(name)
    if kinds[name] == "plain":
        return (PLAIN, "#999999", "#000000")[number % 3], MARKERS[0]
    if kinds[name] == "chain":
        return (CHAIN, "#8C5A2B")[number % 2], MARKERS[1]
    return OTHERS[number % len(OTHERS)], MARKERS[2 + number % (len(MARKERS) - 2)]


def _kind(arguments: Sequence[str]) -> str:
    if "--speculative-algorithm" not in arguments:
        return "plain"
    algorithm = arguments[list(arguments).index("--speculative-algorithm") + 1]
    return "chain" if algorithm == "DFLASH" else "other"


def panels_of(
    count: int, width: float | None = None, height: float = PANEL[1], **share: Any
) -> Any:
    """A figure and ``count`` axes in rows of ``COLUMNS``."""
    from matplotlib import pyplot

    columns = min(count, COLUMNS)
    rows = -(-count // columns)
    size = (width or max(4.2, PANEL[0] * columns), height * rows + 0.9)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", **share
    )
    panels = list(grid.flat)
    for empty in panels[count:]:
        empty.remove()
    return figure, panels[:count]


def label_left(panels: Sequence[Any], text: str) -> None:
    for axes in panels:
        if not axes.get_subplotspec().colspan.start:
            axes.set_ylabel(text)


def finish(
    plan: Plan,
    figure: Any,
    names: Sequence[str],
    title: str,
    bars: bool = False,
    handles: Sequence[Any] | None = None,
) -> None:
    from matplotlib.lines import Line2D

    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    if handles is None:
        handles = []
        for name in names:
            colour, marker = look(plan, name)
            line = Line2D([], [], color=colour, marker=marker, label=name)
            handles.append(patch(colour, name) if bars else line)
    if handles:
        columns = max(1, int(figure.get_figwidth() // 1.7))
        figure.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), columns))


def patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)
