"""The page of ``dflash2-sglang tree --html``: one file that asks for nothing from anywhere."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

PARTS = {"/*STYLE*/": ("style.css",), "/*SCRIPT*/": ("parts.js", "tree.js", "charts.js", "page.js")}


def page(whole: dict[str, Any]) -> str:
    """The document of ``tree_document``, with the style and scripts that show it."""
    html = _asset("page.html")
    for mark, names in PARTS.items():
        html = html.replace(mark, "\n".join(_asset(name) for name in names))
    return html.replace("/*DATA*/", embedded(whole))


def embedded(whole: dict[str, Any]) -> str:
    """JSON that no text in it can end or turn into markup: of < > & only escapes are left."""
    text = json.dumps(whole, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return (resources.files("dflash2_sglang") / "assets" / "tree" / name).read_text("utf-8")
