"""Supervision of server processes: none may outlive its stop, whatever happens."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from dflash2_sglang.cli.servers import Server, ServerError, free_port, running, wait_ready

FAKE = (sys.executable, str(Path(__file__).with_name("cli_fake_server.py")))


def fake(folder, behave="", name="Fake one"):
    return Server(name, [f"--behave={behave}"], folder, program=FAKE)


def gone(processes):
    psutil.wait_procs(processes, timeout=5)
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def wait_for_child(server):
    """The server's processes, once its child runs too."""
    deadline = time.monotonic() + 20
    while len(server.processes()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return server.processes()


def test_starts_serves_and_leaves_nothing(tmp_path):
    with fake(tmp_path) as server:
        ready = []
        wait_ready([server], on_ready=ready.append)
        assert ready == [server] and server.healthy()
        processes = wait_for_child(server)
    assert gone(processes)
    assert not server.healthy() and server.processes() == []
    assert server.log == tmp_path / "fake-one.log"


@pytest.mark.parametrize("behave", ["stubborn", "orphan"])
def test_stop_kills_what_does_not_end(tmp_path, behave):
    with fake(tmp_path, behave) as server:
        wait_ready([server])
        processes = wait_for_child(server)
        server.stop(grace=0.5)
        assert gone(processes)


def test_death_while_starting_is_noticed_at_once(tmp_path):
    good, bad = fake(tmp_path), fake(tmp_path, "die", "bad")
    with pytest.raises(ServerError) as caught, running([good, bad]):
        wait_ready([good, bad], timeout=60)
    first, *rest = str(caught.value).splitlines()
    assert first == (
        "the bad server died while starting (exit code 3): ValueError: no such drafter; "
        f"its log {bad.log} ends:"
    )
    assert rest[-1] == "  the end"
    assert good.processes() == bad.processes() == []


def test_a_server_that_never_gets_ready(tmp_path):
    server = fake(tmp_path, "hang")
    with pytest.raises(ServerError, match="did not start within 0 seconds"), server:
        wait_ready([server], timeout=0.3)
    assert server.processes() == []


def test_a_program_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError), running([Server("x", [], tmp_path, ["/no/such"])]):
        pass


def test_a_kept_server_survives(tmp_path):
    with fake(tmp_path) as server:
        wait_ready([server])
        server.keep()
    try:
        assert server.healthy()
    finally:
        server.kept = False
        server.stop()
    assert server.processes() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["starting", "serving"])
def test_signals_stop_the_servers(tmp_path, number, moment):
    """A command that is told to end leaves no server, in whatever phase it is."""
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from types import SimpleNamespace
        from dflash2_sglang.cli import main
        from dflash2_sglang.cli.servers import Server, running, wait_ready

        def run(args):
            behave = "--behave=" + ("hang" if {moment!r} == "starting" else "")
            server = Server("fake", [behave], Path({str(tmp_path)!r}), {FAKE!r})
            with running([server]):
                print(server.pid, flush=True)
                wait_ready([server])
                print("ready", flush=True)
                time.sleep(60)

        main.COMMANDS["wait"] = SimpleNamespace(HELP="", add_arguments=lambda p: None, run=run)
        sys.exit(main.main(["wait"]))
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        leader = psutil.Process(int(process.stdout.readline()))
        if moment == "serving":
            assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 20
        while not (children := leader.children(recursive=True)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, number)
        assert process.wait(timeout=30) == 128 + number
        errors = process.stderr.read()
    assert gone([leader, *children])
    assert "Traceback" not in errors


def test_free_ports_are_distinct():
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50 and all(1024 < port < 65536 for port in ports)
