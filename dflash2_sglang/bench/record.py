"""What one needs to know to measure again: command, versions, machine, revision."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

MORE_PACKAGES = ("matplotlib", "py-spy", "openai", "tokenizers")
VARIABLES = ("SGLANG_", "OMP_", "MKL_", "CUDA_VISIBLE", "DFLASH2_", "KMP_")


def versions() -> dict[str, str | None]:
    from dflash2_sglang.cli.checkup import PACKAGES

    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in (*PACKAGES, *MORE_PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    from dflash2_sglang.cli.checkup import accelerators, host_memory, processor

    return {
        "processor": processor(),
        "accelerators": accelerators(),
        "memory_gib": round(host_memory() / 2**30, 1),
        "system": platform.platform(),
    }


def revision(folder: Path | None = None) -> str | None:
    """Git revision of the package, with ``-dirty`` where files differ; None outside a checkout."""
    folder = folder or Path(__file__).parent
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + ("-dirty" if _git(folder, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def environment() -> dict[str, str]:
    """Variables that change how a server computes."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}


def command() -> str:
    return shlex.join(["dflash2-sglang", *sys.argv[1:]])


def identity() -> dict[str, Any]:
    """What two parts of one benchmark must share besides its settings."""
    found = versions()
    return {
        "package revision": revision() or found["dflash2-sglang"],
        "SGLang": found["sglang"],
        "torch": found["torch"],
        "processor": machine()["processor"],
        "accelerators": machine()["accelerators"],
    }


def load_average() -> float:
    return round(os.getloadavg()[0], 2)


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
