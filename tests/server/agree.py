"""Whole answers of two servers compared: numbers closely, everything else exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serving import Prompt, Server
from tinypair import decode
from workload import random_ids

CLOSE = 1e-4  # float32, two different orders of summation
KEPT = ("finish_reason", "prompt_tokens", "completion_tokens", "reasoning_tokens", "hidden_states")
VOLATILE = ("id", "created", "metadata", "sglext")

TEXTS = [decode(random_ids(n, ("text", n))) for n in (5, 12, 30)]
Both = tuple[Server, Server]
Order = tuple[Prompt, dict[str, Any]]  # a prompt and the keywords of ``Server.ask``


def visible(answer: dict[str, Any]) -> dict[str, Any]:
    """What a user reads of an answer of ``/generate``, times and statistics left out."""
    meta = answer["meta_info"]
    kept = {key: meta[key] for key in meta if key in KEPT or "logprobs" in key}
    return {key: answer[key] for key in ("text", "output_ids") if key in answer} | kept


def differences(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """One line for each place where two JSON documents differ."""
    if isinstance(ours, float) and isinstance(theirs, float):
        if not abs(ours - theirs) < CLOSE:
            yield f"{where}: {ours} instead of {theirs}"
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs} - set(VOLATILE), key=str):
            missing = f"no {key}"
            yield from differences(
                ours.get(key, missing), theirs.get(key, missing), f"{where}.{key}"
            )
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            yield f"{where}: {len(ours)} entries instead of {len(theirs)}"
        for number, pair in enumerate(zip(ours, theirs, strict=False)):
            yield from differences(*pair, f"{where}[{number}]")
    elif ours != theirs:
        yield f"{where}: {ours!r} instead of {theirs!r}"


def assert_agree(ours: Any, theirs: Any) -> None:
    found = list(differences(ours, theirs))
    assert not found, "\n".join(found[:20])


def ask_all(server: Server, orders: Sequence[Order], concurrency: int = 8) -> list[Any]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda order: server.ask(order[0], **order[1]), orders))


def both(plain: Server, tree: Server, orders: Sequence[Order], concurrency: int = 8) -> list[Any]:
    """Ask both servers all of these together; compare; return DFLASH2's answers."""
    theirs = ask_all(plain, orders, concurrency)
    ours = ask_all(tree, orders, concurrency)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        found = list(differences(visible(a), visible(b)))
        assert not found, "\n".join([f"answer {number} to {orders[number][1]}:", *found[:20]])
    return ours


def answers_agree(servers: Both, ask: Callable[[Server], Any]) -> Any:
    ours, theirs = (ask(server) for server in servers)
    assert_agree(ours, theirs)
    return ours
