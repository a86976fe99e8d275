"""Which metrics a Grafana dashboard asks for, and which ones a server has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

COLLECTORS = "sglang.srt.observability.metrics_collector"
KINDS = {"Counter", "Gauge", "Histogram", "Summary"}
NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*:[a-zA-Z0-9_:]*")


def series(kind: str, name: str) -> set[str]:
    """The names under which Prometheus stores a metric."""
    if kind == "Counter":
        return {name if name.endswith("_total") else f"{name}_total"}
    if kind == "Gauge":
        return {name}
    parts = {f"{name}_sum", f"{name}_count"}
    return parts | {f"{name}_bucket"} if kind == "Histogram" else parts


def of_sglang() -> set[str]:
    """Read from the source of SGLang's collectors: most are made only in a running server."""
    spec = util.find_spec(COLLECTORS)
    assert spec is not None and spec.origin is not None
    found: set[str] = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
            names = [k.value for k in node.keywords if k.arg == "name"] or node.args[:1]
            for name in names:
                if isinstance(name, ast.Constant):
                    found |= series(node.func.id, name.value)
    return found


def of_dflash2() -> set[str]:
    from dflash2_sglang import metrics

    counters = [*metrics.COUNTERS, metrics.BY_DEPTH, metrics.SECONDS]
    return {f"{metrics.PREFIX}{name}_total" for name in counters} | {
        f"{metrics.PREFIX}{metrics.WIDTH}"
    }


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that show data."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(board: dict[str, Any]) -> Iterator[str]:
    for panel in panels(board):
        for target in panel["targets"]:
            yield target["expr"]


def asked(texts: Iterable[str]) -> set[str]:
    """Names of metrics in expressions; what stands in quotes is a label's value."""
    return {name for text in texts for name in NAME.findall(re.sub(r'"[^"]*"', '""', text))}


def unknown(texts: Iterable[str]) -> set[str]:
    """Metrics that no server has."""
    return asked(texts) - of_sglang() - of_dflash2()


def overlaps(board: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs of panels that share a place."""
    boxes = [(p["title"], p["gridPos"]) for p in board["panels"]]
    return [
        (first, second)
        for i, (first, a) in enumerate(boxes)
        for second, b in boxes[i + 1 :]
        if a["x"] < b["x"] + b["w"]
        and b["x"] < a["x"] + a["w"]
        and a["y"] < b["y"] + b["h"]
        and b["y"] < a["y"] + a["h"]
    ]
