"""The console script ``dflash2-sglang``: its parser, and how it ends.

A subcommand is a module of this package with ``HELP``, ``add_arguments(parser)`` and
``run(args) -> exit code``, listed in ``COMMANDS``; with ``TAKES_SERVER_FLAGS`` it also finds the
arguments of ``sglang.launch_server`` in ``args.server_flags``. At module level these modules import
only the standard library, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType

from dflash2_sglang import __version__
from dflash2_sglang.cli import bench, demo, doctor, tree

PROGRAM = "dflash2-sglang"
COMMANDS: dict[str, ModuleType] = {"demo": demo, "doctor": doctor, "bench": bench, "tree": tree}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="DFlash 2 tree speculative decoding as a plugin for stock SGLang.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = subparsers.add_parser(
            name,
            parents=[common],
            help=module.HELP,
            description=module.HELP,
            allow_abbrev=False,  # or a server's flag might be taken for ours
        )
        module.add_arguments(command)
        takes_more = getattr(module, "TAKES_SERVER_FLAGS", False)
        command.set_defaults(run=module.run, takes_server_flags=takes_more)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not getattr(args, "takes_server_flags", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.server_flags = rest
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    unwind_when_told_to_end()
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print(f"\n{PROGRAM}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        if args.debug:
            raise
        print(f"{PROGRAM}: error: {_describe(error)}", file=sys.stderr)
        return 1


def unwind_when_told_to_end() -> None:
    """Let SIGTERM and a closed terminal unwind like Ctrl-C does, so that servers are stopped."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP; leave that alone
            signal.signal(number, end)


def _describe(error: Exception) -> str:
    if type(error).__module__.startswith("dflash2_sglang."):
        return str(error)  # written for the user
    return f"{type(error).__name__}: {error} (--debug shows where)"


if __name__ == "__main__":
    sys.exit(main())
