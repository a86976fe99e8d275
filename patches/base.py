"""What a patch is, and how one is checked before SGLang serves with it."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["around", "after", "before", "replace"]
Scope = Literal["cpu", "dflash2"]

TESTED_VERSIONS = ("0.5.23",)


class PatchError(RuntimeError):
    """A patch cannot be applied to the installed SGLang."""


@dataclass(frozen=True)
class Patch:
    """One place where stock SGLang bends.

    ``parameters`` are the parameter names the target must have, in order: a release that changes them is
    refused at start-up instead of failing in the middle of a round.
    """

    target: str
    hook: Callable[..., Any]
    kind: Kind
    scope: Scope
    parameters: tuple[str, ...]
    reason: str
    without: str

    @property
    def name(self) -> str:
        return self.target.rsplit(".", 1)[-1]

    def problem(self) -> str | None:
        """None, or one sentence saying why the installed SGLang does not fit."""
        try:
            found = pkgutil.resolve_name(self.target)
        except (ImportError, AttributeError) as error:
            return f"{self.target} is not in the installed SGLang ({error})."
        if not self.parameters:
            return None
        actual = tuple(inspect.signature(found).parameters)
        if actual == self.parameters:
            return None
        return f"{self.target} takes {actual} where {self.parameters} is expected."

    def applied(self) -> bool:
        from sglang.srt.plugins.hook_registry import HookRegistry

        return self.target in HookRegistry._patched

    def register(self) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(self.target, self.hook, HookType(self.kind))
