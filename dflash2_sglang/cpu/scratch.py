"""Values shared by the layers of one forward, dropped when the next forward begins.

A forward is told by the context that SGLang publishes for it, whatever attention backend serves: a pass
that is run again on static buffers, as a graph is, has the tensors of the pass before but not its values.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.forward_context import get_forward_context, has_forward_context

_forward: dict[Any, Any] = {}
_context: Any = None  # that of the values; kept, so that no other object gets its identity


def new_forward() -> None:
    """Forget what the last forward shared."""
    _forward.clear()


def get(key: Any) -> Any:
    global _context
    context = get_forward_context() if has_forward_context() else None
    if context is not _context:
        new_forward()
        _context = context
    return _forward.get(key)


def put(key: Any, value: Any) -> Any:
    """Only after ``get`` in the same forward, which looks whether it is still the same."""
    _forward[key] = value
    return value
