"""The rounds of an answer, joined from what the server recorded and what it returned."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


class TreeError(RuntimeError):
    """The trees cannot be shown; the message says why and what to do."""


@dataclass(frozen=True)
class Round:
    """One draft and its verification.

    place       of the anchor among the answer's tokens
    tokens      [N] ids, the anchor first; parent [N], -1 at the root; prob [N], of the path
    random      the nodes that are random children
    candidates  [D][K] ids
    chain       [D] ids of the greedy path, chain_prob [D] of the path up to each
    accepted    the accepted nodes, the root included
    bonus       the target's token after them
    truth       the answer's tokens after the anchor; depth d is truth[d - 1]
    """

    place: int
    tokens: Sequence[int]
    parent: Sequence[int]
    prob: Sequence[float]
    random: Sequence[int]
    candidates: Sequence[Sequence[int]]
    chain: Sequence[int]
    chain_prob: Sequence[float]
    accepted: Sequence[int]
    bonus: int
    truth: Sequence[int]

    @cached_property
    def depth(self) -> list[int]:
        """Of each node; parents come before their children."""
        found: list[int] = []
        for parent in self.parent:
            found.append(0 if parent < 0 else found[parent] + 1)
        return found

    @property
    def gain(self) -> int:
        """Tokens of the answer that the round delivered: the accepted ones and the bonus."""
        return min(len(self.accepted), len(self.truth))

    @cached_property
    def chain_hits(self) -> int:
        """Leading tokens of the chain that are the answer's."""
        hits = 0
        for drafted, true in zip(self.chain, self.truth, strict=False):
            if drafted != true:
                break
            hits += 1
        return hits

    @property
    def chain_gain(self) -> int:
        """Tokens that a verified chain would have delivered in this place."""
        return min(self.chain_hits + 1, len(self.truth))


@dataclass(frozen=True)
class Answer:
    prompt: str
    prompt_length: int  # tokens, the chat template included
    tokens: Sequence[int]
    finish: str
    rounds: Sequence[Round]


def read_trace(path: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The recorder's configuration, and its records by request. A half-written line is left out."""
    config: dict[str, Any] = {}
    records = defaultdict(list)
    content = path.read_bytes() if path.is_file() else b""
    for line in content.split(b"\n")[:-1]:
        record = json.loads(line)
        if "config" in record:
            config = record["config"]
        else:
            records[record["rid"]].append(record)
    if not config:
        raise TreeError(
            "the server recorded no round: it runs another copy of dflash2-sglang than this command; "
            "install one of them only"
        )
    return config, dict(records)


def join(prompt: str, prompt_length: int, response: dict[str, Any], records: list[Any]) -> Answer:
    """One answer of ``/generate`` and its records.

    Rounds from the last token on are left out: under overlap one is drafted before the scheduler
    sees that the answer has ended.
    """
    tokens = response["output_ids"]
    finish = (response["meta_info"].get("finish_reason") or {}).get("type", "unknown")
    rounds = []
    for record in records:
        place = record["start"] - prompt_length
        if 0 <= place < len(tokens) - 1:
            rounds.append(_round(record, place, tokens))
    return Answer(prompt, prompt_length, tokens, finish, rounds)


def _round(record: dict[str, Any], place: int, tokens: Sequence[int]) -> Round:
    nodes = record["tokens"]
    truth = tokens[place + 1 :]
    gained = [*(nodes[node] for node in record["accepted"][1:]), record["bonus"]]
    if nodes[0] != tokens[place] or any(g != t for g, t in zip(gained, truth, strict=False)):
        raise TreeError(
            f"what the server recorded at token {place} is not what it answered; please report this "
            "with the command"
        )
    names = ("parent", "prob", "random", "candidates", "chain", "chain_prob", "accepted", "bonus")
    recorded = {name: record[name] for name in names}
    return Round(place=place, tokens=nodes, truth=truth, **recorded)
