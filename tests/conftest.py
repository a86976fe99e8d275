"""Fixtures for all tests: the demo pair, and tiny pairs written on demand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Read when torch is imported: models that tests run in this process are not compiled.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Two workers and their servers with as many threads each as there are cores would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from tinypair import Pairs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--draws",
        type=int,
        default=1500,
        help="answers of each kind in tests/server/test_distribution.py (20000 takes a quarter hour)",
    )


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """SmolLM2-135M-Instruct, from the cache; fetched once if it is not there."""
    from dflash2_sglang.cli.demo_model import ensure_demo_model

    return ensure_demo_model(progress=False)


@pytest.fixture(scope="session")
def demo_drafter() -> Path:
    from dflash2_sglang.cli.demo_model import demo_drafter

    return demo_drafter()


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("pairs"))
