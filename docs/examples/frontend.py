#!/usr/bin/env python3
"""A program in SGLang's frontend language: it generates, chooses, branches and fills in a form.

python docs/examples/frontend.py --base-url http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import sglang as sgl


@sgl.function
def travel(s: Any, city: str) -> None:
    s += f"q: tell me about {city}.\na:"
    # Free text, up to the end of the line.
    s += sgl.gen("answer", max_tokens=40, stop="\n")
    # One of several: SGLang scores each of them and takes the likeliest.
    s += "\nbest season: " + sgl.select("season", ["spring", "summer", "autumn", "winter"])
    # Branches continue the same text and run at the same time; what they share is computed once.
    forks = s.fork(2)
    for fork, subject in zip(forks, ("food", "museums"), strict=True):
        fork += f"\n{subject}:"
        fork += sgl.gen("note", max_tokens=24, stop="\n")
    s["notes"] = [fork["note"] for fork in forks]
    # Constrained: only what the regular expression allows.
    s += "\nday and month: " + sgl.gen("date", max_tokens=8, regex=r"[0-3][0-9]/[01][0-9]")


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description="Run a program in SGLang's frontend language.")
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--city", nargs="+", default=["oslo", "paris"])
    args = parser.parse_args(argv)
    backend = sgl.RuntimeEndpoint(args.base_url)
    # All cities at once: the server batches what arrives together.
    states = travel.run_batch(
        [{"city": city} for city in args.city], backend=backend, temperature=0, num_threads=4
    )
    found = []
    for city, state in zip(args.city, states, strict=True):
        answers = {name: state[name] for name in ("answer", "season", "notes", "date")}
        print(f"--- {city}\n{answers}")
        found.append(answers)
    return found


if __name__ == "__main__":
    main()
