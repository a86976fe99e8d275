"""Figure: a block and its lattice, with the probability of each transition."""

from __future__ import annotations

import svg
from example import ANCHOR, CANDIDATES, MASS, example
from svg import Sheet

LEFT, STEP = 90, 215
ROWS = (150, 235, 320)
LABELLED = 0.2  # edges below this probability are faint and have no number


def draw() -> Sheet:
    found = example()
    probs = found.lattice.log_probs[0].exp()
    sheet = Sheet(860, 420, "A block of three masks and the lattice over its candidates")
    for i, name in enumerate((ANCHOR, *["mask"] * len(CANDIDATES))):
        x = LEFT + STEP * i
        sheet.box(x, 40, 96, 34, fill=svg.BLUE_FILL if i else svg.GREY_FILL, line=svg.BLUE)
        sheet.text(x, 40, name, colour=svg.INK if i == 0 else svg.BLUE)
        sheet.text(x, 72, f"position L + {i}" if i else "position L", size=12, colour=svg.MUTED)
        if i:
            held = f"its {len(CANDIDATES[0])} candidates hold {MASS[i - 1]:.2f}"
            sheet.text(x, 385, held, size=12, colour=svg.MUTED)
            sheet.path([(x, 84), (x, 124)], colour=svg.BLUE, arrow=True)
    sheet.text(LEFT, 385, "anchor", size=12, colour=svg.MUTED)
    middle = ROWS[1]
    edges = [
        (
            (LEFT + STEP * d + 42, ROWS[a] if d else middle),
            (LEFT + STEP * (d + 1) - 42, ROWS[c]),
            float(probs[d, a, c]),
        )
        for d in range(len(CANDIDATES))
        for a in range(len(ROWS) if d else 1)
        for c in range(len(ROWS))
    ]
    for start, end, probability in edges:
        colour = svg.BLUE if probability >= LABELLED else svg.FAINT
        sheet.path([start, end], colour=colour, width=1 + 6 * probability)
    for start, end, probability in edges:
        if probability >= LABELLED:
            _label(sheet, start, end, probability)
    sheet.box(LEFT, middle, 84, 36, fill=svg.GREY_FILL)
    sheet.text(LEFT, middle, ANCHOR)
    for d, position in enumerate(CANDIDATES):
        for row, word in zip(ROWS, position, strict=True):
            sheet.box(LEFT + STEP * (d + 1), row, 84, 36)
            sheet.text(LEFT + STEP * (d + 1), row, word)
    return sheet


def _label(
    sheet: Sheet, start: tuple[float, float], end: tuple[float, float], probability: float
) -> None:
    """The number near the start of an edge, so that edges that cross keep theirs apart."""
    at = 0.2 if start[1] == ROWS[-1] else 0.28
    x, y = (s + at * (e - s) for s, e in zip(start, end, strict=True))
    sheet.box(x, y, 34, 15, line="#ffffff")
    sheet.text(x, y, f"{probability:.2f}", size=12, colour=svg.BLUE)
