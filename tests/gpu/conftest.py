"""What a GPU's owner runs: ``pytest tests/gpu``. Without CUDA all of it is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False")
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(skip)
