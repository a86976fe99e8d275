"""Installs the modules of ``DFLASH2_TEST_HOOKS`` when the worker is imported, in whatever process that is.

Servers on a GPU are spawned, not forked: each process starts anew and reads this file, because its folder
is on ``PYTHONPATH``. The modules are those of ``tests/server``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

TARGET = "dflash2_sglang.worker"


class Hooks:
    """Finds ``TARGET`` once, and has its loader install the hooks after it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute: Any = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for hook in os.environ["DFLASH2_TEST_HOOKS"].split():
                importlib.import_module(hook).install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("DFLASH2_TEST_HOOKS"):
    sys.meta_path.insert(0, Hooks())
