"""Triton's interpreter patches triton.language at every call of a jitted function, tl.sum among them.

Once a process is enough where all kernels are interpreted, and saves a third of the time or more.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


class _Kept:
    def restore(self) -> None:
        """Nothing in this process needs the language as it was."""


def patch_once() -> None:
    patch, patched = getattr(interpreter, "_patch_lang", None), set()
    if patch is None:  # another version of triton: slower
        return

    def once(function: Any) -> _Kept:
        module = id(function.__globals__)
        if module not in patched:
            patched.add(module)
            patch(function)
        return _Kept()

    interpreter._patch_lang = once
