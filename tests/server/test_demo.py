"""``dflash2-sglang demo`` as a user runs it, with real servers.

It fetches the demo model if the cache lacks it, as it does for a user.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

MARK = "DFLASH2_SGLANG_TEST_RUN"
PROMPTS = ("Name three colours of the rainbow.", "Write a Python loop that prints 1 to 5.")


@pytest.mark.server
def test_demo_in_bfloat16() -> None:
    """The default: three rows, both drafts of some use, and no process left."""
    rows, output = demo("--max-tokens", "24", "--rounds", "1")
    names, texts, lengths, speeds, ratios = zip(*rows, strict=True)
    assert names == ("plain", "DFLASH chain", "DFLASH2 tree")
    assert all(re.fullmatch("-|yes, 2 of 2|1 of 2|no, 0 of 2", text) for text in texts)
    assert lengths[0] == "1.00" and all(float(length) > 1 for length in lengths[1:])
    assert all(float(speed) > 0 for speed in speeds)
    assert ratios[0] == "1.00x" and all(ratio.endswith("x") for ratio in ratios)
    assert "--speculative-algorithm DFLASH2" in output


@pytest.mark.server
def test_demo_in_float32() -> None:
    """Without near ties the texts agree to the letter."""
    rows, output = demo("--max-tokens", "24", "--rounds", "1", "--dtype", "float32")
    assert [row[:2] for row in rows] == [["plain", "-"], ["DFLASH2 tree", "yes, 2 of 2"]], output


def demo(*arguments: str) -> tuple[list[list[str]], str]:
    """Run it; its table's cells and all it printed. It must have left no process behind."""
    script = Path(sys.executable).with_name("dflash2-sglang")
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    run = uuid.uuid4().hex
    done = subprocess.run(
        [script, "demo", *prompts, *arguments],
        env={**os.environ, MARK: run, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"> {PROMPTS[0]}" in done.stdout
    assert marked(run) == []
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if "│" in line]
    return [[cell.strip() for cell in row] for row in rows], done.stdout


def marked(run: str) -> list[str]:
    """The living processes that the run started, by a variable they inherit."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(MARK) == run:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
