"""How the plots look: colours, markers, panels, legends.

Colours are those of Okabe and Ito, which stay apart for colour-blind eyes; a configuration has the
same colour and marker in every plot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash2_sglang.bench.plan import Plan

PLAIN, CHAIN = "#595959", "#E69F00"
OTHERS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B59F00", "#8C5A2B")
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
    number = [config.name for config in plan.configs].index(name)
    arguments = plan.configs[number].arguments
    if "--speculative-algorithm" not in arguments:
        return PLAIN, MARKERS[0]
    if arguments[arguments.index("--speculative-algorithm") + 1] == "DFLASH":
        return CHAIN, MARKERS[1]
    return OTHERS[(number - 2) % len(OTHERS)], MARKERS[number % len(MARKERS)]


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
