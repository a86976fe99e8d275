"""Where the time of a round goes, sampled from outside a running server with py-spy.

Nothing is added to the server: py-spy looks at the scheduler's Python stack a few hundred times a second
while prompts are answered, and each look is filed under the innermost frame that ``PARTS`` knows. On an
accelerator the host only launches work, so its stack does not tell where time goes.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from dflash2_sglang.bench import BenchError
from dflash2_sglang.cli.servers import Server

RATE = 200  # looks a second

FRAME = re.compile(r"(?:[\w<>]+\.)*([\w<>]+) \(.*?([^/]+\.py):\d+\)")
PARTS = {  # by function and file
    ("block", "draft.py"): "drafter forward",
    ("_logits", "candidates.py"): "drafter forward",
    ("__call__", "draft.py"): "candidates, lattice, tree",
    ("forward_batch_generation", "tp_worker.py"): "target forward",
    ("accept_tree", "acceptance.py"): "acceptance",
    ("_commit", "worker.py"): "draft KV commit",
    ("_round", "worker.py"): "rest of the round",
}
STOCK = ("forward_batch_generation", "dflash_worker_v2.py")  # SGLang's own chain
MODEL = ("forward", "model_runner.py")
EXTEND = ("_execute_extend", "eager_runner.py")  # prefill, and the verify pass
FORWARDS = ("drafter forward", "target forward")
SCHEDULER = "scheduler"
PREFILL, WAITING = "prefill", "waiting for requests"
AWAY = (PREFILL, WAITING)
ORDER = (*reversed(FORWARDS), *dict.fromkeys(p for p in PARTS.values() if p not in FORWARDS))


def part_of(stack: str) -> str | None:
    """The part that a collapsed stack belongs to; None for threads other than the scheduler's."""
    frames = stack.split(";")
    if not any("event_loop" in frame for frame in frames):
        return None
    named = [FRAME.match(frame) for frame in frames]
    places = [(match[1], match[2]) for match in named if match]
    speculates = STOCK in places or any(file == "worker.py" for _, file in places)
    if ("_prefill", "worker.py") in places or (EXTEND in places and not speculates):
        return PREFILL
    for place in reversed(places):
        if place in PARTS:
            return PARTS[place]
    if STOCK in places:  # its prefill is not told from its verify pass
        return "drafter forward" if MODEL in places else "rest of the round"
    if any("zmq" in frame or "poll" in frame or "recv" in frame for frame in frames[-3:]):
        return WAITING
    return SCHEDULER


def scheduler_of(server: Server) -> int:
    """The process id of the server's (first) scheduler; BenchError where there is none."""
    if server.pid is not None:
        for process in psutil.Process(server.pid).children(recursive=True):
            if any("scheduler" in word for word in process.cmdline()[:1]):
                return process.pid
    raise BenchError("No scheduler process was found below the server.")


def sample(server: Server, work: Callable[[], object], folder: Path) -> Counter[str]:
    """Looks by part while ``work`` runs; empty where py-spy was not let at the process."""
    out = folder / "stacks"
    out.unlink(missing_ok=True)
    command = [
        py_spy() or "py-spy",
        "record",
        "--pid",
        str(scheduler_of(server)),
        "--format",
        "raw",
    ]
    command += ["--rate", str(RATE), "--full-filenames", "--idle", "--output", str(out)]
    command += ["--duration", "3600", "--nonblocking"]
    spy = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        work()
    finally:
        spy.send_signal(signal.SIGINT)  # py-spy writes its file at Ctrl-C
        spy.wait()
    looks: Counter[str] = Counter()
    for line in out.read_text().splitlines() if out.exists() else []:
        stack, count = line.rsplit(" ", 1)
        part = part_of(stack)
        if part is not None:
            looks[part] += int(count)
    return looks


def py_spy() -> str | None:
    """The program, on the path or beside the Python that runs us."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def why_not() -> str | None:
    """Why a round's time cannot be split here; None where it can."""
    from dflash2_sglang.cli.checkup import accelerators

    if py_spy() is None:
        return "py-spy is not installed (pip install py-spy)"
    if accelerators():
        return "on an accelerator the host's stack does not tell where a round's time goes"
    return None
