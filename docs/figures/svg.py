"""Just enough SVG to draw the figures: shapes and text on a white sheet, the same bytes on every run."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INK, MUTED, FAINT = "#1f2933", "#616e7c", "#cbd2d9"
BLUE, BLUE_FILL = "#1d5fa8", "#e3eefa"
GREEN, GREEN_FILL = "#1b7f4b", "#ddf3e6"
ORANGE, ORANGE_FILL = "#b4540a", "#fdebdc"
GREY_FILL = "#f2f4f6"


class Sheet:
    """A drawing of a given size in pixels; y grows downwards, text is centred unless told otherwise."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.title = title
        self.size = (width, height)
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, *, fill: str = "#ffffff", line: str = INK
    ) -> None:
        """A rounded rectangle; x and y are those of its middle."""
        self._add(
            f'<rect x="{_n(x - w / 2)}" y="{_n(y - h / 2)}" width="{_n(w)}" height="{_n(h)}" rx="6" '
            f'fill="{fill}" stroke="{line}" stroke-width="1.5"/>'
        )

    def cell(self, x: float, y: float, side: float, fill: str) -> None:
        """A square; x and y are those of its upper left corner."""
        self._add(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(side)}" height="{_n(side)}" fill="{fill}" '
            f'stroke="{FAINT}" stroke-width="1"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 14,
        colour: str = INK,
        bold: bool = False,
        anchor: str = "middle",
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._add(
            f'<text x="{_n(x)}" y="{_n(y + size * 0.36)}" font-size="{_n(size)}" fill="{colour}" '
            f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def path(
        self,
        points: Iterable[tuple[float, float]],
        *,
        colour: str = INK,
        width: float = 1.5,
        arrow: bool = False,
        dashed: bool = False,
    ) -> None:
        """Straight lines through ``points``, with an arrow head at the last one if asked for."""
        line = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        head = f' marker-end="url(#head-{colour[1:]})"' if arrow else ""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._add(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{_n(width)}"'
            f"{dashes}{head}/>"
        )

    def _add(self, part: str) -> None:
        self._parts.append(part)

    def render(self) -> str:
        """The whole file."""
        width, height = self.size
        heads = "".join(_head(colour) for colour in (INK, MUTED, BLUE, GREEN, ORANGE))
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" role="img" '
                'font-family="DejaVu Sans, Verdana, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f"<defs>{heads}</defs>",
                f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
                *self._parts,
                "</svg>\n",
            )
        )


def _head(colour: str) -> str:
    return (
        f'<marker id="head-{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0,0.5 L8,4 L0,7.5 z" fill="{colour}"/></marker>'
    )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
