"""The Triton kernels on a CPU, under Triton's interpreter, against the torch functions.

triton reads TRITON_INTERPRET when it is imported, and here SGLang has imported it long since. So each
file of comparisons runs in an interpreter of its own.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import Maker, Sizes

import dflash2_sglang
from dflash2_sglang import kernels, tree
from dflash2_sglang.kernels import floors

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(Path(dflash2_sglang.__file__).parents[1]), *sys.path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("part", ["lattice", "tree", "drawn", "walk", "conv"])
def test_kernels_equal_torch(part: str) -> None:
    pytest.importorskip("triton")
    # The outer run's fixtures would import SGLang.
    arguments = (
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        f"tests/kernels/interpreted_{part}.py",
    )
    found = run("-m", "pytest", *arguments, TRITON_INTERPRET="1", DFLASH2_KERNELS="triton")
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert " passed" in found.stdout and "skipped" not in found.stdout


def test_standalone_checks_on_a_cpu() -> None:
    pytest.importorskip("triton")
    arguments = ("--check-only", "--interpret", "--batches", "2", "--nodes", "8")
    found = run("tests/gpu/standalone.py", *arguments)
    assert found.returncode == 0, found.stdout + found.stderr
    for kernel in (
        "lattice",
        "tree",
        "drawn tree",
        "greedy walk",
        "sampled walk",
        "random children",
        "convolution",
    ):
        assert f"{kernel}" in found.stdout, found.stdout


def test_importing_loads_neither_triton_nor_sglang() -> None:
    code = (
        "import sys, torch, dflash2_sglang.kernels as k, dflash2_sglang.tree\n"
        "k.convolve(torch.ones(4, 2), torch.ones(4, 2, 1, 1), torch.ones(2, 1, 2), 0, 2)\n"
        "print([m for m in ('triton', 'sglang', 'flashinfer') if m in sys.modules])"
    )
    found = run("-c", code)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


def test_kernels_need_torch_triton_and_the_tree_only() -> None:
    allowed = {"__future__", "os", "math", "functools", "importlib", "typing", "torch", "triton"}
    files = list(Path(kernels.__path__[0]).glob("*.py"))
    assert len(files) >= 6
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            own = [name for name in names if name.startswith("dflash2_sglang")]
            assert {name.split(".")[0] for name in set(names) - set(own)} <= allowed, file
            assert all(name.split(".")[1] in ("tree", "kernels") for name in own), file


def test_a_cpu_uses_torch_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.zeros(1)
    monkeypatch.delenv("DFLASH2_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not kernels.uses_triton(here)
    monkeypatch.setenv("DFLASH2_KERNELS", "torch")
    assert not kernels.uses_triton(here)
    monkeypatch.setenv("DFLASH2_KERNELS", "triton")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        kernels.uses_triton(here)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.uses_triton(here)
    monkeypatch.setenv("DFLASH2_KERNELS", "cuda")
    with pytest.raises(ValueError, match=r"auto, torch or triton.*'cuda'"):
        kernels.uses_triton(here)


def test_floors_count_the_bytes_of_the_tensors() -> None:
    """Of calls that must read and write all of their tensors, apart from rows that are looked up."""
    m, s = Maker(0), Sizes(3, 5, 4, 9, 3, rank=24, channels=48, group=8, taps=2, block=8)
    t = m.tree(s)
    found = tree.greedy_walk(t.tokens, t.parent, t.mask, t.depth, t.tokens, 8)
    tensors = (t.tokens, t.parent, t.mask, t.depth, t.tokens, *found)
    assert floors.greedy_walk(3, 9, 9).bytes == sum(x.nbytes for x in tensors)

    best = tree.build_tree(m.lattice(s, "random"), t.tokens[:, 0], 9, 3)
    rows, looked_up = 3 * 9 * 4 * 4, 3 * 8 * floors.SECTOR
    written = sum(x.nbytes for x in best[:-1])
    assert floors.tree(3, 4, 9).bytes == rows + looked_up + 3 * 8 + written

    drawn = tree.build_tree(m.lattice(s, "random"), t.tokens[:, 0], 9, 3, m.draws(s))
    written += sum(x.nbytes for x in drawn.proposal)
    given = rows + 3 * 5 * (4 * 8 + floors.SECTOR) + 3 * 8 + 3
    assert floors.drawn_tree(3, 5, 4, 9).bytes == given + written

    x, delta, base = m.normal(24, 48), m.normal(24, 2, 2, 6), m.normal(2, 2, 48)
    out = tree.convolve(x, delta, base, 1, 8)
    moved = x.nbytes + out.nbytes + delta.nbytes // 2 + base.nbytes // 2
    assert floors.convolve(3, 8, 48, 2, 6, itemsize=4).bytes == moved

    tokens, unary, norm = m.tokens(s), m.normal(3, 5, 4), m.normal(3, 5)
    made = tree.build_lattice(tokens, unary, norm, None, m.normal(3, 5, 4, 4)).log_probs
    codes = 3 * (5 + 1 + 9 * 4) * 24 * 4  # hidden, the anchor's, and of both codebooks
    given = tokens.nbytes + unary.nbytes + norm.nbytes + 3 * 8
    assert floors.lattice(3, 5, 4, 24, itemsize=4).bytes == given + codes + made.nbytes
    one_row = tree.build_lattice(tokens, unary, norm).log_probs[:, :, :1].contiguous()
    least = tokens.nbytes + unary.nbytes + norm.nbytes + one_row.nbytes
    assert floors.plain_lattice(3, 5, 4).bytes == least

    plain, drawn = floors.sampling_walk(3, 9, 9, 300), floors.sampling_walk(3, 9, 9, 300, K=4)
    assert plain.bytes == 3 * (9 * (3 * 8 + 9 + 32) + 2 * 9 * 4 + 300 * 4 + 11 * 8)
    assert drawn.bytes - plain.bytes == 3 * 9 * (1 + 4 * (8 + 4 + 32))


def test_a_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    floor = floors.Floor(bytes=1000, operations=4000, launches=3)
    assert floor.seconds(bandwidth=100.0, rate=1000.0) == 10
    assert floor.seconds(bandwidth=1000.0, rate=1000.0, launch=2.0) == 10
