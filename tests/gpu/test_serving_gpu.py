"""The demo pair on CUDA: parity with plain decoding, acceptance, captured graphs and their self-check.

Not run by anybody yet who had a GPU; the same paths run under Triton's interpreter in
``tests/server/test_triton_backend.py``.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from self_check_faults import FAULTS
from serving import Server, acceptance
from test_parity import MIXED

HERE = Path(__file__).parent
TOKENS = 64
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
# FlashAttention and flashinfer have no float32: there, near ties may fall otherwise.
BACKENDS = [
    pytest.param("triton", "float32", 1, id="triton-float32-page1"),
    pytest.param("triton", "float32", 16, id="triton-float32-page16"),
    pytest.param("triton", "float32", 64, id="triton-float32-page64"),
    pytest.param("flashinfer", "bfloat16", 1, id="flashinfer-page1"),
    pytest.param("flashinfer", "bfloat16", 16, id="flashinfer-page16"),
    pytest.param(
        "fa3",
        "bfloat16",
        64,
        marks=pytest.mark.skipif(not HOPPER, reason="FlashAttention 3 needs Hopper"),
    ),
]


GRAPHS = {"DFLASH2_CUDA_GRAPHS": "1"}


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("gpu")
    return (folder / f"{number}.log" for number in itertools.count())


@pytest.fixture(scope="module")
def start(numbered: Iterator[Path], demo_target: Path, demo_drafter: Path) -> Any:
    def start(speculate: bool, *flags: str, env: dict[str, str] | None = None) -> Server:
        argv = ["--model-path", str(demo_target), "--mem-fraction-static", "0.3", *flags]
        argv += ["--cuda-graph-max-bs-decode", "8", "--max-running-requests", "8"]
        if speculate:
            argv += ["--speculative-algorithm", "DFLASH2"]
            argv += ["--speculative-draft-model-path", str(demo_drafter)]
        return Server(argv, next(numbered), None, env)

    return start


def ask(server: Server, concurrency: int) -> list[dict[str, Any]]:
    return server.ask_all(MIXED, concurrency=concurrency, max_new_tokens=TOKENS)


@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize(("backend", "dtype", "page"), BACKENDS)
def test_parity_and_acceptance(
    start: Any, backend: str, dtype: str, page: int, graphs: bool
) -> None:
    flags = ["--attention-backend", backend, "--dtype", dtype, "--page-size", str(page)]
    if not graphs:
        flags.append("--disable-cuda-graph")
    with start(False, *flags) as server:
        plain = ask(server, 8)
    with start(True, *flags, env=GRAPHS) as server:
        answers = [ask(server, 1), ask(server, 8)]
        log = server.log.read_text()
        assert server.errors() == []
    assert f"in {'captured' if graphs else 'eager'};" in _path_of(log)
    for ours in answers:
        same = [a["output_ids"] == b["output_ids"] for a, b in zip(ours, plain, strict=True)]
        print(f"{backend} {dtype} page {page}: {sum(same)} of {len(same)} identical, ", end="")
        print(f"{acceptance(ours):.2f} tokens a pass")
        assert all(same) or (dtype != "float32" and sum(same) >= len(same) // 2)
        assert acceptance(ours) > 1.8


def _path_of(log: str) -> str:
    found = re.search(r"self-check: trees verified as text in [\d.]+ s, (\w+);", log)
    assert found is not None, log[-2000:]
    return f"in {found[1]};"


def hooked(**more: str) -> dict[str, str]:
    more |= GRAPHS
    places = [str(HERE / "hooks"), str(HERE.parent / "server"), str(HERE.parent)]
    path = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "DFLASH2_TEST_HOOKS": "self_check_faults", **more}


def test_the_self_check_catches_faults(start: Any) -> None:
    with start(True, "--attention-backend", "triton", env=hooked()) as server:
        log = server.log.read_text()
    for fault in FAULTS:
        assert f"fault caught: {fault}: DFLASH2 refuses to serve: " in log
    assert "in captured;" in _path_of(log)
