"""Figures: the tree of the lattice with its mask, and which path of it the target accepts."""

from __future__ import annotations

import svg
from example import NODES, Example, example
from svg import Sheet

# Place of each node: column by depth, row by hand, so that no edges cross.
ROW = {0: 2.0, 1: 0.5, 3: 0.5, 7: 0.5, 2: 2.0, 4: 2.0, 8: 2.0, 5: 3.5, 6: 3.5}
LEFT, COLUMN, TOP, LINE = 75, 130, 60, 68


def _place(found: Example, node: int) -> tuple[float, float]:
    return LEFT + COLUMN * int(found.tree.depth[0, node]), TOP + LINE * ROW[node]


def _edges(sheet: Sheet, found: Example, highlighted: set[int]) -> None:
    for node in range(1, NODES):
        x0, y0 = _place(found, found.parent(node))
        x1, y1 = _place(found, node)
        chosen = node in highlighted
        colour, width = (svg.GREEN, 3.0) if chosen else (svg.MUTED, 1.5)
        sheet.path([(x0 + 40, y0), (x1 - 40, y1)], colour=colour, width=width)


def _nodes(sheet: Sheet, found: Example, highlighted: set[int]) -> None:
    for node in range(NODES):
        x, y = _place(found, node)
        fill, line = ("#ffffff", svg.INK) if node else (svg.GREY_FILL, svg.INK)
        if node in highlighted:
            fill, line = svg.GREEN_FILL, svg.GREEN
        sheet.box(x, y, 80, 36, fill=fill, line=line)
        sheet.text(x - 33, y - 1, str(node), size=11, colour=svg.MUTED, anchor="start")
        sheet.text(x + 4, y, found.word(node))


def draw_tree() -> Sheet:
    found = example()
    sheet = Sheet(860, 375, "The tree of the nine best nodes and its ancestor mask")
    sheet.text(LEFT + 1.5 * COLUMN, 30, "the tree, and the probability of each path", bold=True)
    _edges(sheet, found, set())
    _nodes(sheet, found, set())
    for node in range(1, NODES):
        x, y = _place(found, node)
        sheet.text(x, y + 29, f"{found.probability(node):.2f}", size=12, colour=svg.BLUE)
    _mask(sheet, found, 600, 95, 25)
    total = sum(found.probability(node) for node in range(1, NODES))
    sheet.text(
        LEFT + 1.5 * COLUMN,
        354,
        f"sum over the paths: {total:.2f} drafted tokens expected",
        size=12,
        colour=svg.MUTED,
    )
    return sheet


def _mask(sheet: Sheet, found: Example, x: float, y: float, side: float) -> None:
    sheet.text(x + NODES * side / 2, 30, "the mask: what each node sees", bold=True)
    sheet.text(
        x + NODES * side / 2, 56, "of the tree (the context, all do)", size=12, colour=svg.MUTED
    )
    for i in range(NODES):
        sheet.text(x + (i + 0.5) * side, y - 11, str(i), size=11, colour=svg.MUTED)
        label = f"{found.word(i)} {i}"
        sheet.text(x - 8, y + (i + 0.5) * side, label, size=12, colour=svg.MUTED, anchor="end")
        for j in range(NODES):
            seen = bool(found.tree.mask[0, i, j])
            sheet.cell(x + j * side, y + i * side, side, svg.BLUE if seen else "#ffffff")


def draw_acceptance() -> Sheet:
    found = example()
    accepted = found.accepted
    sheet = Sheet(860, 375, "The path of the tree that the target accepts")
    sheet.text(LEFT + 2 * COLUMN, 30, "what the target says after each node", bold=True)
    _edges(sheet, found, set(accepted))
    _nodes(sheet, found, set(accepted))
    for node in range(NODES):
        x, y = _place(found, node)
        agreed = any(found.parent(n) == node for n in accepted)
        colour = svg.GREEN if agreed or node == accepted[-1] else svg.ORANGE
        sheet.text(x, y + 29, f"says: {found.choice[node]}", size=12, colour=colour)
    x, y = _place(found, accepted[-1])
    sheet.path([(x + 40, y), (x + 92, y)], colour=svg.GREEN, width=3, arrow=True)
    sheet.box(x + 135, y, 80, 36, fill=svg.ORANGE_FILL, line=svg.ORANGE)
    sheet.text(x + 135, y, found.bonus)
    sheet.text(x + 135, y + 29, "bonus token", size=12, colour=svg.ORANGE)
    words = " ".join(found.word(node) for node in accepted[1:])
    told = (
        f"This round: {words} {found.bonus}",
        f"acceptance length {len(accepted)}",
        "A chain would have",
        "drafted: cat sat on",
        "and got: dog",
    )
    for row, line in enumerate(told):
        sheet.text(668, 255 + 20 * row + (8 if row > 1 else 0), line, size=13, anchor="start")
    return sheet
