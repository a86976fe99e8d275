"""Starts servers from one process that has imported SGLang already.

Importing SGLang takes ten seconds in each of a server's three processes. This process imports it
once and forks: a line of JSON on standard input, ``{"argv", "log", "env"}``, starts one server in a
process group of its own; the answer is its process id. Nothing else differs from
``python -m sglang.launch_server`` (on the CPU there is no device context that a fork would break),
unless ``env`` names hooks in ``DFLASH2_TEST_HOOKS``: ``module`` or ``module:function`` of this folder.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import traceback


def preload() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import dflash2_sglang.worker  # noqa: F401

    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.path.append(os.path.dirname(os.path.dirname(__file__)))
        importlib.import_module("quick_interpreter").install()


def read_environment() -> None:
    """Again, for what SGLang reads while it is imported."""
    from sglang.srt.environ import envs
    from sglang.srt.layers import sampler
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    sampler.SGLANG_RETURN_ORIGINAL_LOGPROB = envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()


def serve(argv: list[str], log: str, env: dict[str, str]) -> None:
    """In the child: become a server; does not return."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(env)
    read_environment()
    for name in env.get("DFLASH2_TEST_HOOKS", "").split():
        module, _, function = name.partition(":")  # a module of this folder
        getattr(importlib.import_module(module), function or "install")()
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang would ask for "spawn"
    code = 1
    try:
        from sglang.launch_server import run_server
        from sglang.srt.server_args import prepare_server_args

        run_server(prepare_server_args(argv))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        from sglang.srt.utils import kill_process_tree

        sys.stdout.flush()
        sys.stderr.flush()
        kill_process_tree(os.getpid(), include_parent=False)
        os._exit(code)


def main() -> None:
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    print("ready", flush=True)
    started = []
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            serve(order["argv"], order["log"], order["env"])
        started.append(child)
        print(child, flush=True)
    # The tests have ended, or were killed: nothing of theirs may stay behind.
    for child in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
