"""Where the time of a DFLASH2 round goes, sampled from outside a running server with py-spy.

    pip install py-spy
    python launch/rounds.py --prompts heldout.json --limit 10

Nothing is added to the server: py-spy looks at the scheduler's Python stack a few hundred times a second
while prompts are answered, and each look is filed under the innermost frame that ``PARTS`` knows.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import psutil
from compare import load_prompts

from dflash2_sglang.cli.demo_model import demo_drafter, ensure_demo_model
from dflash2_sglang.cli.main import unwind_when_told_to_end
from dflash2_sglang.cli.measure import Client, Sampling
from dflash2_sglang.cli.servers import Server, running, wait_ready

RATE = 200  # looks a second

FRAME = re.compile(r"(?:[\w<>]+\.)*([\w<>]+) \(.*?([^/]+\.py):\d+\)")
PARTS = {  # by function and file
    ("_block", "draft.py"): "drafter forward",
    ("_logits", "candidates.py"): "drafter forward",
    ("__call__", "draft.py"): "candidates, lattice, tree",
    ("forward_batch_generation", "tp_worker.py"): "target forward",
    ("accept_tree", "acceptance.py"): "acceptance",
    ("_commit", "worker.py"): "draft KV commit",
    ("_round", "worker.py"): "rest of the round",
}
FORWARDS = ("drafter forward", "target forward")
SCHEDULER = "scheduler"


def part_of(stack: str) -> str | None:
    """The part that a collapsed stack belongs to; None for threads other than the scheduler's."""
    frames = stack.split(";")
    if not any("event_loop" in frame for frame in frames):
        return None
    named = [FRAME.match(frame) for frame in frames]
    places = [(match[1], match[2]) for match in named if match]
    if ("_prefill", "worker.py") in places:
        return "prefill"
    for place in reversed(places):
        if place in PARTS:
            return PARTS[place]
    if any("zmq" in frame or "poll" in frame or "recv" in frame for frame in frames[-3:]):
        return "waiting for requests"
    return SCHEDULER


def scheduler_of(server: Server) -> int:
    assert server.pid is not None
    for process in psutil.Process(server.pid).children(recursive=True):
        if any("scheduler" in word for word in process.cmdline()[:1]):
            return process.pid
    raise SystemExit("No scheduler process found below the server.")


def sample(server: Server, prompts: list[str], sampling: Sampling, folder: Path) -> Counter[str]:
    out = folder / "stacks"
    client = Client(server, sampling)
    client.round(prompts)
    command = ["py-spy", "record", "--pid", str(scheduler_of(server)), "--format", "raw"]
    command += ["--rate", str(RATE), "--full-filenames", "--idle", "--output", str(out)]
    command += ["--duration", "3600", "--nonblocking"]
    spy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client.round(prompts)
    finally:
        spy.send_signal(2)  # py-spy writes its file at Ctrl-C
        spy.wait()
    looks: Counter[str] = Counter()
    for line in out.read_text().splitlines():
        stack, count = line.rsplit(" ", 1)
        part = part_of(stack)
        if part is not None:
            looks[part] += int(count)
    return looks


def report(looks: Counter[str]) -> None:
    for away in ("prefill", "waiting for requests"):
        print(f"{away}: {looks.pop(away, 0) / RATE:.1f} s, left out below")
    total = sum(looks.values())
    print("| part | share of decoding |\n|---|---|")
    for part, count in looks.most_common():
        print(f"| {part} | {count / total:.1%} |")
    outside = sum(count for part, count in looks.items() if part not in FORWARDS)
    print(f"| all outside the two forwards | {outside / total:.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, help="JSON list of strings or of {prompt: ...}")
    parser.add_argument("--limit", type=int, help="take so many of the prompts, evenly spread")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--server-args", nargs=argparse.REMAINDER, default=[])
    args = parser.parse_args()
    unwind_when_told_to_end()
    prompts = load_prompts(args.prompts, args.limit)
    arguments = ["--model-path", str(ensure_demo_model()), "--speculative-algorithm", "DFLASH2"]
    arguments += ["--speculative-draft-model-path", str(demo_drafter()), *args.server_args]
    with tempfile.TemporaryDirectory() as folder:
        server = Server("DFLASH2", arguments, Path(folder))
        with running([server]):
            wait_ready([server])
            sampling = Sampling(args.max_tokens, 0.0, args.concurrency)
            report(sample(server, prompts, sampling, Path(folder)))


if __name__ == "__main__":
    main()
