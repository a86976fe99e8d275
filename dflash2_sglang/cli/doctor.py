"""``dflash2-sglang doctor``: can DFLASH2 serve here, and what would a launch become?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash2_sglang.cli.checkup import Checkup

HELP = "check versions, device, patches and a model pair before a launch"
EPILOG = (
    "All other arguments are those of sglang.launch_server, for example --model-path TARGET "
    "--speculative-draft-model-path DRAFTER --tp-size 2. The exit code is 1 if DFLASH2 cannot serve."
)
TAKES_SERVER_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--at-context", type=int, default=4096, metavar="TOKENS", help="for the memory (4096)"
    )
    parser.add_argument(
        "--at-batch", type=int, default=8, metavar="REQUESTS", help="for the memory (8)"
    )


def run(args: argparse.Namespace) -> int:
    from dflash2_sglang.cli.checkup import check

    found = check(args.server_flags, args.at_context, args.at_batch)
    if args.json:
        print(json.dumps(_record(found), indent=2, default=str))
    else:
        _print(found)
    return 1 if found.problems else 0


def _record(found: Checkup) -> dict[str, Any]:
    return {
        **found.sections,
        "notes": found.notes,
        "problems": found.problems,
        "can_serve": not found.problems,
    }


def _print(found: Checkup) -> None:
    """The same for people; nothing is wrapped or cut, so that names can be copied."""
    for title, record in found.sections.items():
        print(title)
        width = max(map(len, record))
        for name, value in record.items():
            print(f"  {name:{width}}  {_shown(value)}")
        print()
    for note in found.notes:
        print(f"note: {note}")
    for problem in found.problems:
        print(f"problem: {problem}")
    print("DFLASH2 cannot serve this." if found.problems else "DFLASH2 can serve.")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
