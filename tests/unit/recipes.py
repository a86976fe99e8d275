"""Finds the command lines in recipes and documents, and what SGLang says to their flags."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SERVER, ROUTER = "sglang.launch_server", "sglang_router.launch_router"
ENDS = {"&", "&&", "|", ";", ">", "2>&1", ">>"}  # of a command, in a shell
Flags = list[str]

# Takes the place of Python in a recipe: answers where the demo pair is, and records all other calls. A router
# ends its servers when it ends, so it first waits for as many calls as it has URLs.
STUB = """#!/bin/bash
if [ "$1" = -c ]; then echo /models/demo; exit; fi
urls=$(printf '%s\\n' "$@" | grep -c ^http)
until [ "$(ls "$RECORD" | wc -l)" -ge "$urls" ]; do sleep 0.02; done
call=$(mktemp "$RECORD.XXXXXXXX")
printf '%s\\n' "$@" > "$call"
mv "$call" "$RECORD/"
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@cache
def server_parser() -> argparse.ArgumentParser:
    """SGLang's own, with our plugin loaded; flags must be spelt out, though SGLang takes less."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(allow_abbrev=False, add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser


def objection(flags: Flags) -> str | None:
    """What SGLang's parser, the list of its speculative algorithms or our refusals say, or None."""
    try:
        args = server_parser().parse_args(flags)
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        SpeculativeAlgorithm.from_string(args.speculative_algorithm)
        from dflash2_sglang import backends, support

        if args.speculative_algorithm == "DFLASH2":
            support.refuse_settings(args)
            for flag in (*backends.FLAGS, "speculative_draft_attention_backend"):
                if (name := getattr(args, flag)) not in (None, *backends.NAMES):
                    return f"{backends.flag_of(flag)} {name} cannot mask a tree"
    except ValueError as error:
        return str(error)
    return None


def value(flags: Flags, name: str) -> str | None:
    """What a flag is set to, in either spelling."""
    for flag, following in zip(flags, [*flags[1:], ""], strict=True):
        if flag == name:
            return following
        if flag.startswith(f"{name}="):
            return flag.partition("=")[2]
    return None


def run_shell(script: Path, folder: Path, *more: str, **environment: str) -> list[Flags]:
    """Run a recipe with a stub for Python: the arguments of each call."""
    folder.mkdir(parents=True, exist_ok=True)
    record, programs = folder / "record", folder / "bin"
    record.mkdir()
    programs.mkdir()
    (programs / "python3").write_text(STUB)
    (programs / "python3").chmod(0o755)
    path = f"{programs}:{os.defpath}"
    done = subprocess.run(
        ["bash", str(script), *more],
        env={"PATH": path, "HOME": str(folder), "RECORD": str(record), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return sorted(call.read_text().splitlines() for call in record.iterdir())


def after(words: Sequence[str], marks: Sequence[str] = (SERVER,)) -> Flags | None:
    """The arguments of the program among ``words``, up to the end of its command."""
    start = next((i for i, word in enumerate(words) if word in marks), None)
    if start is None:
        return None
    rest = list(words[start + 1 :])
    end = next((i for i, word in enumerate(rest) if word in ENDS), len(rest))
    return rest[:end]


def joined(text: str) -> Iterator[str]:
    """Lines, with those that end in a backslash continued."""
    yield from re.sub(r"\\\n\s*", " ", text).splitlines()


def in_markdown(text: str) -> list[Flags]:
    """Of each server that a block of code starts; "..." stands for what a reader fills in."""
    found, fenced = [], False
    for line in joined(text):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif (fenced or line.startswith("    ")) and SERVER in line:
            flags = after(shlex.split(line, comments=True))
            if flags is not None and "--help" not in flags:
                filled = ["--model-path", "TARGET"] if "..." in flags else []
                found.append([*filled, *(flag for flag in flags if flag != "...")])
    return found


def in_comments(text: str, image: str) -> list[Flags]:
    """Of each ``docker run`` in the comments of a Dockerfile."""
    comments = "\n".join(s[1:] for s in text.splitlines() if s.startswith("#"))
    commands = [shlex.split(line) for line in joined(comments) if "docker run" in line]
    return [flags for words in commands if (flags := after(words, (image,))) is not None]


def dockerfile(text: str) -> dict[str, list[str]]:
    """The values of each instruction."""
    steps: dict[str, list[str]] = {}
    for line in joined(text):
        name, _, rest = line.partition(" ")
        if name.isupper() and name.isalpha():
            steps.setdefault(name, []).append(rest.strip())
    return steps


def unit_file(text: str) -> dict[str, list[str]]:
    """The values of each key of a systemd unit."""
    lines: dict[str, list[str]] = {}
    for line in joined(text):
        if "=" in line and not line.startswith("#"):
            key, _, rest = line.partition("=")
            lines.setdefault(key, []).append(rest)
    return lines


def in_unit(text: str) -> list[Flags]:
    unit = unit_file(text)
    variables = dict(line.split("=", 1) for line in unit["Environment"])
    command = re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], unit["ExecStart"][0])
    return [flags for flags in (after(shlex.split(command)),) if flags is not None]


def in_compose(text: str) -> list[Flags]:
    services = yaml.safe_load(text)["services"].values()
    return [service["command"] for service in services if "command" in service]


def in_manifest(text: str) -> list[Flags]:
    found = []
    for document in yaml.safe_load_all(text):
        if document["kind"] == "Deployment":
            for container in document["spec"]["template"]["spec"]["containers"]:
                flags = after([*container["command"], *container["args"]])
                assert flags is not None
                found.append(flags)
    return found


def dashboard(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
