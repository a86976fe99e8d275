"""Compare ways to serve the demo pair, side by side and in turns; prints a Markdown table.

    python launch/compare.py --concurrency 1 4 8 --nodes 8 16 24 --rounds 5

Every configuration is a real server on this machine. In each round all of them answer the same prompts,
one server at a time, so that the machine's noise hits all alike; quoted are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from dflash2_sglang.cli.demo_model import demo_drafter, ensure_demo_model
from dflash2_sglang.cli.main import unwind_when_told_to_end
from dflash2_sglang.cli.measure import Client, Round, Sampling, acceptance_length
from dflash2_sglang.cli.servers import Server, running, wait_ready


@dataclass
class Config:
    name: str
    arguments: list[str]
    server: Server
    rounds: dict[int, list[Round]] = field(default_factory=dict)  # by concurrency


def configurations(args: argparse.Namespace, folder: Path) -> list[Config]:
    target = ["--model-path", str(ensure_demo_model()), *args.server_args]
    draft = ["--speculative-draft-model-path", str(demo_drafter())]

    def tree(nodes: int, children: int) -> list[str]:
        return [
            *("--speculative-algorithm", "DFLASH2", *draft),
            *("--speculative-num-draft-tokens", str(nodes)),
            *("--speculative-eagle-topk", str(children)),
        ]

    chosen: dict[str, list[str]] = {
        "plain": [],
        "DFLASH": ["--speculative-algorithm", "DFLASH", *draft],
    }
    if args.chain:
        chosen["DFLASH2 chain"] = tree(8, 1)
    for nodes in args.nodes:
        for children in args.branching:
            suffix = f" x{children}" if len(args.branching) > 1 else ""
            chosen[f"DFLASH2 {nodes}{suffix}"] = tree(nodes, children)
    return [
        Config(name, extra, Server(name, [*target, *extra], folder))
        for name, extra in chosen.items()
        if args.only is None or name in args.only
    ]


def measure(configs: Sequence[Config], prompts: list[str], args: argparse.Namespace) -> None:
    for concurrency in args.concurrency:
        sampling = Sampling(args.max_tokens, args.temperature, concurrency)
        for number in range(args.rounds + 1):
            for config in configs:
                if not number:  # caches and compilers get warm
                    Client(config.server, replace(sampling, max_tokens=16)).round(prompts)
                    continue
                result = Client(config.server, sampling).round(prompts)
                config.rounds.setdefault(concurrency, []).append(result)
                print(
                    f"# c={concurrency} round {number} {config.name}: {result.speed:.1f} tok/s",
                    flush=True,
                )


def table(configs: Sequence[Config], concurrency: int) -> str:
    plain = configs[0].rounds[concurrency]
    lines = [
        f"| concurrency {concurrency} | acceptance length | tok/s | ratio to plain | same text |",
        "|---|---|---|---|---|",
    ]
    for config in configs:
        rounds = config.rounds[concurrency]
        length = acceptance_length(rounds)
        # The ratio within each round, as both were measured within seconds of each other.
        ratio = median(r.speed / p.speed for r, p in zip(rounds, plain, strict=True))
        pairs = list(zip(rounds[0].answers, plain[0].answers, strict=True))
        same = sum(a.text == b.text for a, b in pairs)
        lines.append(
            f"| {config.name} | {'' if length is None else f'{length:.2f}'} "
            f"| {median(r.speed for r in rounds):.1f} | {ratio:.2f} | {same} of {len(pairs)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, help="JSON list of strings or of {prompt: ...}")
    parser.add_argument("--limit", type=int, help="take so many of the prompts, evenly spread")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1])
    parser.add_argument("--nodes", type=int, nargs="*", default=[16])
    parser.add_argument("--branching", type=int, nargs="+", default=[8])
    parser.add_argument(
        "--chain", action="store_true", help="DFLASH2 with --speculative-eagle-topk 1"
    )
    parser.add_argument("--only", nargs="+", help="names of the configurations to run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--server-args", nargs=argparse.REMAINDER, default=[])
    args = parser.parse_args()
    unwind_when_told_to_end()
    prompts = load_prompts(args.prompts, args.limit)
    with tempfile.TemporaryDirectory() as folder:
        configs = configurations(args, Path(folder))
        with running([config.server for config in configs]):
            wait_ready([config.server for config in configs])
            measure(configs, prompts, args)
    for concurrency in args.concurrency:
        print(f"\n{table(configs, concurrency)}")


def load_prompts(path: Path | None, limit: int | None) -> list[str]:
    if path is None:
        from dflash2_sglang.cli.demo import PROMPTS

        prompts = list(PROMPTS)
    else:
        prompts = [p if isinstance(p, str) else p["prompt"] for p in json.loads(path.read_text())]
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


if __name__ == "__main__":
    main()
