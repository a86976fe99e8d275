"""Triton's interpreter without a needless third of its time.

It replaces Triton's language when a kernel is launched, and again for each function that a kernel calls, a
search through some hundred names. Once is enough for each module such a function comes from: only what a
launch replaced is restored after it, and the next launch replaces that again.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    from triton.runtime import interpreter

    function = interpreter.InterpretedFunction
    if not hasattr(interpreter, "_patch_lang"):  # another version of triton: slower
        return
    replaced: set[str] = set()

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        if self.fn.__module__ not in replaced:
            interpreter._patch_lang(self.fn)
            replaced.add(self.fn.__module__)
        return self.rewrite()(*args, **keywords)

    function.__call__ = call
