"""Figure: the steps of a round."""

from __future__ import annotations

from itertools import pairwise

import svg
from svg import Sheet

STEPS = (
    ("1 Block", "anchor and masks", "[B, G]", "drafter"),
    ("2 Candidates", "the head's K best", "[B, D, K]", "drafter"),
    ("3 Lattice", "what follows what", "[B, D, K, K]", "drafter"),
    ("4 Tree", "the best N - 1 paths", "[B, N]", "drafter"),
    ("5 Verify", "one pass over all nodes", "[B, N, V]", "target"),
    ("6 Accept", "the longest agreed path", "[B, up to D + 1]", "walk"),
    ("7 Commit", "KV of the path", "draft and target", "walk"),
)
COLOURS = {
    "drafter": (svg.BLUE_FILL, svg.BLUE),
    "target": (svg.ORANGE_FILL, svg.ORANGE),
    "walk": (svg.GREEN_FILL, svg.GREEN),
}


def draw() -> Sheet:
    sheet = Sheet(860, 300, "The seven steps of a decode round")
    places = [(115 + 210 * i, 75) for i in range(4)] + [(745 - 210 * i, 205) for i in range(3)]
    for (name, what, shape, kind), (x, y) in zip(STEPS, places, strict=True):
        fill, line = COLOURS[kind]
        sheet.box(x, y, 176, 84, fill=fill, line=line)
        sheet.text(x, y - 24, name, bold=True)
        sheet.text(x, y, what, size=12.5)
        sheet.text(x, y + 24, shape, size=12.5, colour=svg.MUTED)
    for (x0, y0), (x1, y1) in pairwise(places):
        if y0 != y1:
            sheet.path([(x0, y0 + 44), (x1, y1 - 44)], arrow=True)
        else:
            step = 90 if x1 > x0 else -90
            sheet.path([(x0 + step, y0), (x1 - step, y1)], arrow=True)
    sheet.path([(325 - 90, 205), (115, 205), (115, 75 + 44)], arrow=True)
    sheet.text(115, 222, "the bonus token is", size=12, colour=svg.MUTED)
    sheet.text(115, 238, "the next anchor", size=12, colour=svg.MUTED)
    legend = (("drafter and selector", "drafter"), ("target", "target"), ("after the pass", "walk"))
    for i, (words, kind) in enumerate(legend):
        fill, line = COLOURS[kind]
        sheet.box(262 + (180 if i < 2 else 140) * i, 276, 16, 14, fill=fill, line=line)
        sheet.text(
            276 + (180 if i < 2 else 140) * i, 276, words, size=12, colour=svg.MUTED, anchor="start"
        )
    return sheet
