"""Servers, and their arguments, for the tests of this folder; all of these carry the marker ``server``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Launcher, Server
from tinypair import Pairs

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new log file for each server."""
    folder = tmp_path_factory.mktemp("servers")
    return (folder / f"{number}.log" for number in itertools.count())


@pytest.fixture(scope="session")
def launcher(logs: Iterator[Path]) -> Iterator[Launcher]:
    launcher = Launcher(next(logs))
    yield launcher
    launcher.close()


Serve = Callable[..., Server]


def starter(logs: Iterator[Path], launcher: Launcher, *always: str) -> Serve:
    """``with start(target, drafter, "--flag", ...) as server``: float32, quickly forked.

    Without a drafter the server decodes plainly.
    """

    def start(
        target: Path, drafter: Path | None = None, *flags: str, env: dict[str, str] | None = None
    ) -> Server:
        argv = ["--model-path", str(target), "--dtype", "float32", *always]
        if "--max-total-tokens" not in flags:
            argv += ["--max-total-tokens", "8192"]
        if drafter is not None:
            argv += ["--speculative-algorithm", "DFLASH2"]
            argv += ["--speculative-draft-model-path", str(drafter)]
        return Server([*argv, *flags], next(logs), launcher, env)

    return start


@pytest.fixture(scope="session")
def serve(logs: Iterator[Path], launcher: Launcher) -> Serve:
    return starter(logs, launcher)


@pytest.fixture(scope="session")
def serve_triton(logs: Iterator[Path]) -> Iterator[Serve]:
    """SGLang's Triton attention backend, in Triton's interpreter: the path of GPUs, slowly."""
    launcher = Launcher(next(logs), {"TRITON_INTERPRET": "1"})
    draft = ("--speculative-draft-attention-backend", "triton")
    yield starter(logs, launcher, "--attention-backend", "triton", *draft)
    launcher.close()


@pytest.fixture(scope="session")
def plain_server(serve: Serve, pairs: Pairs) -> Iterator[Server]:
    """Plain decoding with the usual tiny target; shared, and idle most of the time."""
    with serve(pairs.target()) as server:
        yield server
        assert server.errors() == []


@pytest.fixture(scope="session")
def tree_server(serve: Serve, pairs: Pairs) -> Iterator[Server]:
    """DFLASH2 with the usual tiny pair; shared."""
    pair = pairs.pair()
    with serve(pair.target, pair.drafter) as server:
        yield server
        assert server.errors() == []


@pytest.fixture(scope="session")
def servers(plain_server: Server, tree_server: Server) -> tuple[Server, Server]:
    """DFLASH2 and plain decoding."""
    return tree_server, plain_server


Resolve = Callable[..., Any]


@pytest.fixture(scope="module")
def resolve(pairs: Pairs) -> Resolve:
    """What ``sglang.launch_server`` does with its arguments before it starts a process."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    pair = pairs.pair()

    def resolve(
        *flags: str, drafter: Path | None = pair.drafter, target: Path = pair.target
    ) -> Any:
        argv = ["--model-path", str(target), "--speculative-algorithm", "DFLASH2"]
        if drafter is not None:
            argv += ["--speculative-draft-model-path", str(drafter)]
        args = prepare_server_args([*argv, *flags])
        args.resolve_once()
        return resolving_view(args)

    return resolve
