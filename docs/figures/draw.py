"""Write the figures of the documentation: ``python docs/figures/draw.py [FOLDER]``.

The default folder is docs/images. ``tests/unit/test_docs.py`` draws them anew and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lattice
import round as rounds
import tree

FIGURES = {
    "round": rounds.draw,
    "lattice": lattice.draw,
    "tree": tree.draw_tree,
    "acceptance": tree.draw_acceptance,
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(draw().render(), encoding="utf-8")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0]) if given else Path(__file__).parents[1] / "images")
