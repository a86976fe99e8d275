"""Every place where stock SGLang bends for this package, one small file each.

A patch goes through SGLang's own ``HookRegistry``; no file on disk is edited. ``dflash2-sglang doctor``
and the start-up self-check read the same list.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from .base import Patch, PatchError, Scope


def discover() -> list[Patch]:
    """All patches, in the order of their file names."""
    found: list[Patch] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        found += getattr(importlib.import_module(f"{__name__}.{module.name}"), "PATCHES", ())
    return found


def register(scopes: Iterable[Scope]) -> None:
    """Hand the patches of ``scopes`` to SGLang, which applies them after all plugins have loaded.

    Raises:
        PatchError: the installed SGLang does not have what a patch expects.
    """
    chosen = [patch for patch in discover() if patch.scope in set(scopes)]
    problems = [problem for patch in chosen if (problem := patch.problem())]
    if problems:
        raise PatchError(_advice(problems))
    for patch in chosen:
        patch.register()


def verify(scopes: Iterable[Scope]) -> None:
    """Check that SGLang did apply them: it only logs a hook that failed.

    Raises:
        PatchError: a patch is missing, and what would be lost without it.
    """
    missing = [p for p in discover() if p.scope in set(scopes) and not p.applied()]
    if missing:
        raise PatchError(
            _advice(f"{p.target} was not patched; without it {p.without}." for p in missing)
        )


def _advice(problems: Iterable[str]) -> str:
    return (
        "dflash2-sglang does not fit the installed SGLang: "
        + " ".join(problems)
        + " Install sglang==0.5.23, or a dflash2-sglang made for your SGLang."
    )
