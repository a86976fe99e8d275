"""Finished cells, one JSON line each, so that a benchmark goes on where it was stopped."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from dflash2_sglang.bench import BenchError

NAME = "journal.jsonl"
HEADER = "benchmark"


class Journal:
    """``results`` by key; ``add`` writes through to the disk.

    A folder that holds another benchmark is refused (BenchError): its cells would be mixed with
    this one's.
    """

    def __init__(self, folder: Path, fingerprint: dict[str, Any]):
        self.path = folder / NAME
        self.results: dict[str, Any] = {}
        self.begun = time.time()
        wanted = json.loads(json.dumps(fingerprint))  # as it is read back
        lines = self._read()
        if not lines:
            self._write({"key": HEADER, "result": wanted, "at": self.begun})
            return
        header, *cells = lines
        _refuse_other(folder, header, wanted)
        self.begun = header["at"]
        self.results = {line["key"]: line["result"] for line in cells}

    def add(self, key: str, result: Any) -> None:
        self._write({"key": key, "result": result, "at": time.time()})
        self.results[key] = json.loads(json.dumps(result))

    def _read(self) -> list[dict[str, Any]]:
        """Whole lines; what a killed run left of a last line is cut off."""
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            self.path.write_bytes(whole)
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise BenchError(
                f"{self.path} is not a journal of this command ({error}): use another --out."
            ) from error

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _refuse_other(folder: Path, header: dict[str, Any], wanted: dict[str, Any]) -> None:
    if header.get("key") != HEADER:
        raise BenchError(f"{folder} holds a journal without a header: use another --out.")
    had = header["result"]
    changed = [name for name in {**had, **wanted} if had.get(name) != wanted.get(name)]
    if changed:
        name = changed[0]
        raise BenchError(
            f"{folder} holds a benchmark of other settings ({_difference(name, had, wanted)}): "
            "give the same ones to go on with it, or another --out to begin a new one."
        )


def _difference(name: str, had: dict[str, Any], wanted: dict[str, Any]) -> str:
    a, b = had.get(name), wanted.get(name)
    if isinstance(a, dict) and isinstance(b, dict):
        part = next(key for key in {**a, **b} if a.get(key) != b.get(key))
        return f"{name}: {part!r} differs"
    return f"{name} was {a!r} and is {b!r}"
