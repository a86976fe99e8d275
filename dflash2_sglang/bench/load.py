"""SGLang's load generator (``sglang.benchmark.serving``), run in this process.

Its import takes ten seconds, so it is done once and not for every cell; its arguments go through its
own parser. What it prints goes to a log file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash2_sglang.bench import BenchError

BACKEND = "sglang"
FILLER = "."  # the answer that SGLang's format wants beside each prompt; its length is not used


def write_dataset(path: Path, prompts: Sequence[str]) -> None:
    """In the JSONL format of ``--dataset-name custom``."""
    lines = [
        json.dumps({"conversations": [{"content": text}, {"content": FILLER}]}) for text in prompts
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def command(
    url: str, model: str, dataset: Path, count: int, concurrency: int, settings: dict[str, Any]
) -> list[str]:
    """The generator's command line for one cell; the same seed gives all the same order."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    words = ["--backend", BACKEND, "--host", host, "--port", port, "--model", model]
    words += ["--dataset-name", "custom", "--dataset-path", str(dataset)]
    words += ["--num-prompts", str(count), "--max-concurrency", str(concurrency)]
    words += ["--sharegpt-output-len", str(settings["max tokens"])]
    words += ["--temperature", str(settings["temperature"]), "--seed", str(settings["seed"])]
    words += ["--warmup-requests", "0", "--disable-tqdm", "--output-details"]
    if not settings["ignore eos"]:
        words.append("--disable-ignore-eos")
    if not settings["warm cache"]:
        words.append("--flush-cache")
    return words


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The generator's own reading of its command line."""
    from sglang.benchmark import serving

    caught: list[argparse.Namespace] = []
    with _replaced(serving, "run_benchmark", caught.append), _replaced(sys, "argv", ["", *words]):
        serving.cli_main()
    return caught[0]


class LoadGenerator:
    """Runs cells; ``log`` gets what SGLang prints."""

    def __init__(self, log: Path):
        self.log = log

    def run(
        self, words: Sequence[str], output: Path, on_answer: Callable[[], None]
    ) -> dict[str, Any]:
        """SGLang's record of one run with its details, and ``passes`` and ``latencies`` per request.

        ``passes`` is 0 for a request whose server tells of no verify passes. ``output`` is the
        generator's own output file, which it appends to. Raises BenchError where a request failed.
        """
        from sglang.benchmark import serving

        seen: dict[int, tuple[Any, Any]] = {}
        ask = serving.ASYNC_REQUEST_FUNCS[BACKEND]

        async def watched(request_func_input: Any, pbar: Any = None) -> Any:
            number = len(seen)
            seen[number] = (request_func_input, None)
            answer = await ask(request_func_input=request_func_input, pbar=pbar)
            seen[number] = (request_func_input, answer)
            on_answer()
            return answer

        with self._logged(), _entry(serving.ASYNC_REQUEST_FUNCS, BACKEND, watched):
            result = serving.run_benchmark(parse([*words, "--output-file", str(output)]))
        failed = [error for error in result["errors"] if error]
        if failed or result["completed"] != len(seen):
            raise BenchError(f"{len(failed)} of {len(seen)} requests failed: {failed[:1]}")
        # Requests begin in the order of the data set, which is that of the details.
        answers = [answer for _, answer in seen.values()]
        result["passes"] = [_passes(answer) for answer in answers]
        result["latencies"] = [answer.latency for answer in answers]
        if [answer.output_len for answer in answers] != result["output_lens"]:
            raise BenchError("SGLang's load generator gave its details in an unknown order.")
        result.pop("server_info", None)  # kept once a server
        for name in ("ttfts", "latencies"):
            result[name] = [round(value, 6) for value in result[name]]
        result["itls"] = [[round(value, 6) for value in row] for row in result["itls"]]
        return result

    def rows(self, name: str, count: int, model: str, tokenizer: Any) -> list[str]:
        """Prompts of a data set that SGLang knows, ``NAME`` or ``NAME=PATH``."""
        from sglang.benchmark.datasets import get_dataset

        name, _, path = name.partition("=")
        words = ["--dataset-name", name, "--dataset-path", path, "--num-prompts", str(count)]
        try:
            with self._logged():
                arguments = parse(words)
        except BenchError as error:
            raise BenchError(f"SGLang's load generator knows no data set {name!r}.") from error
        try:
            with self._logged():
                found = get_dataset(arguments, tokenizer, model)
        except Exception as error:  # whatever a download or a file may die of
            raise BenchError(
                f"SGLang could not load its data set {name} ({type(error).__name__}: {error}): give "
                f"the file as --workload sglang:{name}=PATH, or take a built-in set."
            ) from error
        prompts = [row.prompt for row in found]
        if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
            raise BenchError(f"The data set {name} holds no plain texts: it cannot be used here.")
        return prompts

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        with self.log.open("a") as log:
            try:
                with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                    yield
            except SystemExit as end:
                if isinstance(end.code, int) and end.code > 128:
                    raise  # we were told to end
                raise BenchError(f"SGLang's load generator gave up; {self.log} says why.") from end


def _passes(answer: Any) -> int:
    """Verify passes of a request: SGLang tells completion tokens per pass."""
    length = getattr(answer, "spec_accept_length", 0.0)
    return round(answer.output_len / length) if length else 0


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _entry(table: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    before = table[name]
    table[name] = value
    try:
        yield
    finally:
        table[name] = before
