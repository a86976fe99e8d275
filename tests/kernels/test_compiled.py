"""The Triton kernels compile for a GPU, which the interpreter does not show and which takes no GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from test_interpreted import run

LEAST_SHARED = 99 << 10  # bytes a block may have on the smallest GPUs that SGLang serves on


def test_all_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not tools.exists():
        pytest.skip(f"this triton comes without {tools}")
    variables = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    found = run("tests/kernels/compiled.py", "90", **variables)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-6000:]
    assert found.stdout.endswith("all compiled\n")
    compiled = {re.split(r"\s", line)[0] for line in found.stdout.splitlines()}
    wanted = {"_lattice", "_tree", "_drawn_tree", "_walk", "_sum_blocks", "_pick", "_convolve"}
    assert wanted <= compiled
    assert max(map(int, re.findall(r" shared (\d+) ", found.stdout))) <= LEAST_SHARED
    assert os.listdir(tmp_path)
