"""``dflash2-sglang bench`` as a user runs it: real servers, SGLang's load generator, all files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tinypair import Pairs

PROMPTS = ("the sea is", "one two three", "a cat and a dog", "rain on the roof")


def test_bench_on_the_tiny_pair(pairs: Pairs, tmp_path: Path) -> None:
    """float32, so all texts agree."""
    pytest.importorskip("matplotlib", reason="matplotlib (extra `bench`) is not installed")
    pair = pairs.pair()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, PROMPTS)))
    words = ["--model-path", str(pair.target), "--speculative-draft-model-path", str(pair.drafter)]
    words += ["--workload", str(prompts), "--widths", "8", "--concurrency", "2", "--repeats", "1"]
    words += ["--max-tokens", "24", "--dtype", "float32", "--max-total-tokens", "4096"]
    found, out = bench(tmp_path, *words)
    assert "6 cells, 6 of them to measure" in out or "4 cells, 4 of them to measure" in out
    plain, tree = found["figures"]
    assert (plain["configuration"], tree["configuration"]) == ("plain", "DFLASH2 8")
    assert plain["same_text"] == tree["same_text"] == len(PROMPTS)
    assert tree["acceptance_length"]["median"] > 1.2  # the drafter agrees with its target by design
    assert tree["ratio"]["median"] > 0 and tree["first_token_ms"]["median"] > 0
    # The server's own two counts of the same passes: what was accepted, and what came of it.
    depth = tree["acceptance_by_depth"]
    assert depth[0] == 1 and depth == sorted(depth, reverse=True)
    assert 1 + sum(depth[1:]) >= tree["acceptance_length"]["median"] - 1e-9
    assert found["servers"]["DFLASH2 8"]["info"]["speculative_algorithm"] == "DFLASH2"
    names = {path.name for path in (tmp_path / "out" / "plots").iterdir()}
    assert {"speed.png", "ratio.svg", "acceptance-by-depth.png", "round.svg"} <= names


def bench(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """Run it; the record it wrote, and what it printed."""
    script = Path(sys.executable).with_name("dflash2-sglang")
    done = subprocess.run(
        [script, "bench", "--out", folder / "out", *words],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out" / "bench.json").read_text()), done.stdout
