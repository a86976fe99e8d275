"""What the demo prints at the end: one table, what was run, and what is still running."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from dflash2_sglang.cli import measure
from dflash2_sglang.cli.measure import Round, Sampling
from dflash2_sglang.cli.servers import Server

Results = Mapping[str, Sequence[Round]]  # by configuration; the first one is the reference

NEAR_TIES = (
    "A text that differs is no fault: in bfloat16 the two best tokens often tie or nearly tie, and "
    "which one wins depends on how many tokens a pass holds. --dtype float32 gives identical texts."
)
NO_CHAIN = "The stock DFLASH chain is left out: SGLang 0.5.23 serves it in bfloat16 only."
UNEXPECTED = "In float32 the texts should be identical: please report this with your prompts."


def print_results(
    console: Console, results: Results, args: argparse.Namespace, together: bool
) -> None:
    greedy = args.temperature == 0
    console.print()
    console.print(table(results, greedy))
    console.print(_conditions(results, args, together))
    if args.dtype == "float32":
        console.print(NO_CHAIN)
    if greedy and not all_identical(results):
        console.print(UNEXPECTED if args.dtype == "float32" else NEAR_TIES)


def _conditions(results: Results, args: argparse.Namespace, together: bool) -> str:
    rounds = next(iter(results.values()))
    prompts = len(rounds[0].answers)
    asked = "1 prompt" if prompts == 1 else f"{prompts} prompts"
    times = "1 round" if len(rounds) == 1 else f"median of {len(rounds)} rounds"
    order = "the servers taking turns" if together else "one server started after the other"
    return (
        f"{asked}, at most {args.max_tokens} tokens an answer, temperature {args.temperature:g}, "
        f"concurrency {args.concurrency}, {args.dtype}; {times}, {order}."
    )


def table(results: Results, greedy: bool) -> Table:
    """One row a configuration, each compared with the first."""
    reference = next(iter(results.values()))
    base = measure.median_speed(reference)
    out = Table()
    out.add_column("configuration", no_wrap=True)
    out.add_column("text identical to plain")
    out.add_column("acceptance length", justify="right")
    out.add_column("tokens/s", justify="right")
    out.add_column("ratio to plain", justify="right")
    for name, rounds in results.items():
        speed = measure.median_speed(rounds)
        same = identity(rounds, reference) if greedy else "sampled"
        length = "1.00" if rounds is reference else acceptance(rounds)
        style = "bold" if name == list(results)[-1] else None
        out.add_row(name, same, length, f"{speed:.1f}", f"{speed / base:.2f}x", style=style)
    return out


def identity(rounds: Sequence[Round], reference: Sequence[Round]) -> str:
    """How many prompts got, in every round, the text of plain decoding's first round."""
    asked = len(reference[0].answers)
    same = measure.identical_texts(rounds, reference[0])
    if rounds is reference:
        return "-" if same == asked else f"{same} of {asked} (with itself)"
    verdict = {asked: f"yes, {same} of {asked}", 0: f"no, 0 of {asked}"}
    return verdict.get(same, f"{same} of {asked}")


def acceptance(rounds: Sequence[Round]) -> str:
    length = measure.acceptance_length(rounds)
    return "-" if length is None else f"{length:.2f}"


def all_identical(results: Results) -> bool:
    reference = next(iter(results.values()))[0]
    return all(
        measure.identical_texts(rounds, reference) == len(reference.answers)
        for rounds in results.values()
    )


def print_command(console: Console, server: Server) -> None:
    console.print(f"\nThe {server.name} server was started with")
    _print_verbatim(console, pasteable(server.command))


def print_kept(console: Console, server: Server, prompt: str, sampling: Sampling) -> None:
    console.print(f"\nIt keeps running, as process {server.pid}, with its log in {server.log}. Try")
    _print_verbatim(console, curl(server, prompt, sampling))
    console.print("and stop it with")
    _print_verbatim(console, f"  kill {server.pid}")


def pasteable(command: Sequence[str]) -> str:
    """The command for a shell, each option on a line of its own."""
    return " \\\n".join(
        ("    " if line[0].startswith("--") else "  ") + shlex.join(line)
        for line in _option_lines(command)
    )


def curl(server: Server, prompt: str, sampling: Sampling) -> str:
    body = {
        "model": measure.MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
    }
    return (
        f"  curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    )


def _option_lines(command: Sequence[str]) -> Iterator[list[str]]:
    line: list[str] = []
    for word in command:
        if word.startswith("--") and line:
            yield line
            line = []
        line.append(word)
    if line:
        yield line


def _print_verbatim(console: Console, text: str) -> None:
    """Unwrapped and unstyled, so that it can be copied."""
    console.print(text, markup=False, soft_wrap=True)
