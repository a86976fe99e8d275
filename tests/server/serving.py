"""Real SGLang servers for the tests: started, asked over HTTP, and ended as a process group."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

START_LIMIT = 240.0  # seconds; generous, for machines that do other things as well
REQUEST_LIMIT = 240.0
Prompt = str | list[int]


class ServerError(RuntimeError):
    """A server did not start or died; the message ends with what it logged last."""


class Launcher:
    """Forks servers from one warm process, see ``launcher.py``."""

    def __init__(self, log: Path, env: dict[str, str] | None = None) -> None:
        script = Path(__file__).with_name("launcher.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=_environment(log) | (env or {}),
        )
        if self._answer() != "ready":
            raise ServerError(f"The launcher did not start:\n{tail(log)}")

    def start(self, argv: Sequence[str], log: Path, env: dict[str, str]) -> int:
        assert self.process.stdin is not None
        print(
            json.dumps({"argv": list(argv), "log": str(log), "env": env}),
            file=self.process.stdin,
            flush=True,
        )
        return int(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


class Server:
    """One running server. Use as a context manager; without a launcher it is a plain command."""

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        launcher: Launcher | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.log = log
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        # Without --sleep-on-idle the scheduler of a waiting server keeps a core busy.
        self.argv = [*argv, "--port", str(port), "--sleep-on-idle"]
        self._command: subprocess.Popen[bytes] | None = None
        if launcher is not None:
            self.pid = launcher.start(self.argv, log, env or {})
        else:
            self._command = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *self.argv],
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(log) | (env or {}),
            )
            self.pid = self._command.pid

    def __enter__(self) -> Server:
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def alive(self) -> bool:
        if self._command is not None:
            return self._command.poll() is None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            if not self.alive():
                raise ServerError(f"The server died while starting:\n{tail(self.log)}")
            try:
                if requests.get(f"{self.url}/health", timeout=30).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.1)
        raise ServerError(f"The server was not ready after {START_LIMIT} s:\n{tail(self.log)}")

    def stop(self) -> None:
        """Kill the server and all its processes: a graceful end takes five seconds."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + 20
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def post(self, path: str, body: dict[str, Any]) -> requests.Response:
        try:
            return requests.post(f"{self.url}{path}", json=body, timeout=REQUEST_LIMIT)
        except requests.RequestException as error:
            raise ServerError(f"{path} failed: {error}\n{tail(self.log)}") from error

    def ask(self, prompt: Prompt, extra: dict[str, Any] | None = None, **sampling: Any) -> Any:
        """``/generate``: the answer of one prompt (a list when sampling says ``n``)."""
        key = "text" if isinstance(prompt, str) else "input_ids"
        sampling = {"temperature": 0, **sampling}
        body = {key: prompt, "sampling_params": sampling, **(extra or {})}
        response = self.post("/generate", body)
        if response.status_code != 200:
            raise ServerError(f"HTTP {response.status_code}: {response.text}\n{tail(self.log)}")
        return response.json()

    def ask_all(
        self, prompts: Iterable[Prompt], concurrency: int = 8, **keywords: Any
    ) -> list[dict[str, Any]]:
        """The answers in the order of the prompts, at most ``concurrency`` in flight."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda p: self.ask(p, **keywords), prompts))

    def flush(self) -> None:
        """Empty the radix cache; refused while the round after the last answer is under way."""
        deadline = time.monotonic() + 30
        while (code := self.post("/flush_cache", {}).status_code) != 200:
            assert time.monotonic() < deadline, code
            time.sleep(0.05)

    def info(self) -> dict[str, Any]:
        """What the server is set to and how its scheduler stands."""
        return requests.get(f"{self.url}/server_info", timeout=60).json()

    def errors(self) -> list[str]:
        """Lines of the log that tell of a fault."""
        pattern = re.compile(r"Traceback|xception|leak")
        return [line for line in self.log.read_text().splitlines() if pattern.search(line)]


def ids(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def verify_count(answers: Sequence[dict[str, Any]]) -> int:
    """Verify passes of all answers; the field is absent where prefill gave the only token."""
    return sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)


def acceptance(answers: Sequence[dict[str, Any]]) -> float:
    """Tokens a verify pass gained on average; the first token of an answer comes from prefill."""
    gained = sum(a["meta_info"]["completion_tokens"] - 1 for a in answers)
    return gained / verify_count(answers)


def _environment(log: Path) -> dict[str, str]:
    """SGLang's sockets lie in the temporary folder: beside the log, they go when it goes."""
    environment = {**os.environ, "TMPDIR": str(log.parent)}
    environment.pop("TORCHDYNAMO_DISABLE", None)  # that was meant for the tests' own process
    return environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
