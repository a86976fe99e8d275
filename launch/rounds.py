"""Where the time of a DFLASH2 round goes, sampled from outside a running server with py-spy.

    pip install py-spy
    python launch/rounds.py --prompts heldout.json --limit 10

Nothing is added to the server: py-spy looks at the scheduler's Python stack a few hundred times a second
while prompts are answered, and each look is filed under the innermost frame that ``PARTS`` knows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from dflash2_sglang.bench.prompts import texts
from dflash2_sglang.bench.rounds import AWAY, FORWARDS, RATE, sample
from dflash2_sglang.cli.demo_model import demo_drafter, ensure_demo_model
from dflash2_sglang.cli.main import unwind_when_told_to_end
from dflash2_sglang.cli.measure import Client, Sampling
from dflash2_sglang.cli.servers import Server, running, wait_ready


def count(server: Server, prompts: list[str], sampling: Sampling, folder: Path) -> Counter[str]:
    client = Client(server, sampling)
    client.round(prompts)  # into the cache
    return sample(server, lambda: client.round(prompts), folder)


def report(looks: Counter[str]) -> None:
    for away in AWAY:
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
    prompts = texts(args.prompts, args.limit)
    arguments = ["--model-path", str(ensure_demo_model()), "--speculative-algorithm", "DFLASH2"]
    arguments += ["--speculative-draft-model-path", str(demo_drafter()), *args.server_args]
    with tempfile.TemporaryDirectory() as folder:
        server = Server("DFLASH2", arguments, Path(folder))
        with running([server]):
            wait_ready([server])
            sampling = Sampling(args.max_tokens, 0.0, args.concurrency)
            report(count(server, prompts, sampling, Path(folder)))


if __name__ == "__main__":
    main()
