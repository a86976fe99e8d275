"""Values shared by the layers of one forward, dropped when the next forward begins."""

from __future__ import annotations

from typing import Any

_forward: dict[Any, Any] = {}


def new_forward() -> None:
    """Forget what the last forward shared; the attention backend calls this once a forward."""
    _forward.clear()


def get(key: Any) -> Any:
    return _forward.get(key)


def put(key: Any, value: Any) -> Any:
    _forward[key] = value
    return value
