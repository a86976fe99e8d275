"""Start, watch and stop SGLang servers on this machine.

A server is a tree of processes. Each gets a session of its own, so that Ctrl-C in the terminal
reaches only us, and stopping one means that none of its processes is left.
"""

from __future__ import annotations

import http.client
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil

HOST = "127.0.0.1"
SGLANG = (sys.executable, "-m", "sglang.launch_server")
START_SECONDS = 900.0  # the first start on a machine compiles
GRACE_SECONDS = 15.0  # SGLang looks for SIGTERM every five seconds
KILL_SECONDS = 5.0
HEALTH_SECONDS = 2.0
LOG_LINES = 15


class ServerError(RuntimeError):
    """A server did not start, died or did not answer; the message says which and why."""


class Server:
    """One ``sglang.launch_server`` on a free port of the loopback interface.

    As a context manager it is started on entry and gone on exit. ``arguments`` are SGLang's own,
    without host and ports; what the server prints goes to ``log``, a file in ``folder``.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        program: Sequence[str] | None = None,
    ):
        self.name = name
        self.port = free_port()
        ports = ("--host", HOST, "--port", str(self.port), "--nccl-port", str(free_port()))
        self.command = [*(program or SGLANG), *arguments, *ports]
        self.log = folder / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.log"
        self.kept = False
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: set[psutil.Process] = set()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Launch the process and return; ``wait_ready`` says when it serves."""
        with self.log.open("wb") as output, _signals_deferred():
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        stop_all([self], grace)

    def keep(self) -> None:
        """Let the server outlive us: from now on ``stop`` leaves it alone."""
        self.kept = True

    def healthy(self) -> bool:
        """Whether the server has finished starting and answers."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=HEALTH_SECONDS)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def check_alive(self, doing: str) -> None:
        """Raise ServerError when the process has ended; ``doing`` is what it was busy with."""
        code = self._process.poll() if self._process else None
        if code is None:
            return
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        reason = _last_error(self.log)
        raise ServerError(
            f"the {self.name} server died while {doing} ({how}){f': {reason}' if reason else ''}"
            f"{_log_note(self.log)}"
        )

    def main_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def terminate(self) -> None:
        """SIGTERM to the main process, after a note of the others."""
        self.processes()
        if self._process:
            self._process.terminate()

    def processes(self) -> list[psutil.Process]:
        """The living processes of the server, those that left its session included."""
        if self._process is None:
            return []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self._process.pid:
                    self._seen.add(process)
        with suppress(psutil.Error):
            self._seen.update(psutil.Process(self._process.pid).children(recursive=True))
        return [process for process in self._seen if _is_alive(process)]


def wait_ready(
    servers: Sequence[Server],
    timeout: float = START_SECONDS,
    on_ready: Callable[[Server], None] = lambda server: None,
) -> None:
    """Return once every server answers; raise ServerError as soon as one dies."""
    waiting = list(servers)
    deadline = time.monotonic() + timeout
    while waiting:
        for server in list(waiting):
            server.check_alive("starting")
            if server.healthy():
                waiting.remove(server)
                on_ready(server)
        if waiting and time.monotonic() > deadline:
            raise ServerError(
                f"the {waiting[0].name} server did not start within {timeout:.0f} seconds"
                f"{_log_note(waiting[0].log)}"
            )
        time.sleep(0.2 if waiting else 0.0)


@contextmanager
def running(servers: Sequence[Server]) -> Iterator[None]:
    """The servers started side by side, and stopped together whatever happens."""
    try:
        for server in servers:
            server.start()
        yield
    finally:
        stop_all(servers)


def stop_all(servers: Sequence[Server], grace: float = GRACE_SECONDS) -> None:
    """Ask all to end; kill what is left after ``grace`` seconds, or at once on a second Ctrl-C.

    SIGTERM goes to the main process only, which ends the others in order; sent to all of them, it
    looks to SGLang like a crash of its scheduler.
    """
    stopping = [server for server in servers if not server.kept]
    try:
        for server in stopping:
            server.terminate()
        deadline = time.monotonic() + grace
        while any(server.main_alive() for server in stopping) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        with _signals_deferred():
            _kill_all(stopping)


def _kill_all(servers: Sequence[Server]) -> None:
    deadline = time.monotonic() + KILL_SECONDS  # a process may be stuck in the kernel
    while left := [process for server in servers for process in server.processes()]:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for server in servers:
        server.main_alive()  # reaps it


def free_port() -> int:
    """A port that nobody listens on, never given out twice by this process.

    It lies below the ephemeral range where there is room: a server binds its ports half a minute
    after they are chosen, and by then an outgoing connection might have taken an ephemeral one
    (polling a dead loopback port can even connect to itself).
    """
    low = _first_ephemeral_port()
    for _ in range(200):
        port = random.randrange(20_000, low) if low > 21_000 else 0
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            port = probe.getsockname()[1]
            if port not in _given_out:
                _given_out.add(port)
                return port
    raise ServerError("no free TCP port was found on 127.0.0.1")


_given_out: set[int] = set()


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Hold back Ctrl-C and its like until the block ends, so that no child is born unseen."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled in the main thread only
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [
        signal.signal(number, lambda number, frame: held.append(number)) for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    for caught in held:
        signal.raise_signal(caught)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _log_note(log: Path) -> str:
    lines = _lines(log)[-LOG_LINES:]
    return "\n".join([f"; its log {log} ends:", *(f"  {line}" for line in lines)])


def _last_error(log: Path) -> str:
    """The last line such as ``ValueError: ...``, which in SGLang's log is seldom the last one."""
    found = [line for line in _lines(log) if re.match(r"(\w+\.)*\w*(Error|Exception): \S", line)]
    return found[-1].strip() if found else ""


def _lines(log: Path) -> list[str]:
    with suppress(OSError):
        return log.read_text(errors="replace").rstrip().splitlines()
    return []
