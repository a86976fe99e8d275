"""The trees in a terminal, and the figures that judge the drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

ACCEPTED, BONUS, REFUSED = "bold green", "bold yellow", "dim"
MARKS = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"}
LEGEND = (
    "Percentages: of the path, then (of the token after its parent). ✓ accepted, + the target's own "
    "token, ~ drawn at random for all tokens that are no other child."
)
CHAIN = (
    "The chain is the drafter's greedy path, which stock DFLASH verifies; what it would have got is "
    "read off the answer, from the same anchors."
)
SAMPLED = (
    "Above temperature 0 stock DFLASH draws its chain, so its figure is a guide only; and path "
    "probabilities estimate how often a node is accepted, which a random child raises."
)
Show = Callable[[int], str]  # the visible text of a token id


def print_all(console: Console, whole: dict[str, Any], limit: int) -> None:
    """Answers with their first ``limit`` rounds, then calibration and recall over all rounds."""
    show = _spelling(whole["texts"])
    for number, answer in enumerate(whole["answers"], 1):
        console.rule(f"prompt {number} of {len(whole['answers'])}", align="left")
        _print_answer(console, answer, limit, show)
    if limit:
        console.print(LEGEND, markup=False)
    _print_figures(console, whole)


def visible(text: str) -> str:
    """Spaces and line ends as signs, other control characters as their numbers."""
    return "".join(MARKS.get(c) or (c if c.isprintable() else f"\\x{ord(c):02x}") for c in text)


def _spelling(texts: dict[str, str]) -> Show:
    return lambda token: visible(texts[str(token)])


def _print_answer(console: Console, answer: dict[str, Any], limit: int, show: Show) -> None:
    console.print(Text(f"> {answer['prompt']}", style="bold"))
    console.print(_answer_text(answer))
    console.print()
    rounds = answer["rounds"]
    for number, one in enumerate(rounds[:limit], 1):
        console.print(_round(number, one, show))
        console.print()
    if 0 < limit < len(rounds):
        left = len(rounds) - limit
        console.print(f"... and {left} more rounds: --show {len(rounds)}, or --html FILE\n")


def _answer_text(answer: dict[str, Any]) -> Text:
    """Each round's tokens: accepted ones underlined, the target's own in its colour."""
    styles = [""] * len(answer["tokens"])
    for one in answer["rounds"]:
        first = one["place"] + 1
        for place in range(first, first + one["gain"]):
            last = place == one["place"] + len(one["accepted"])
            styles[place] = "yellow" if last else "green underline"
    return Text.assemble(*zip(answer["pieces"], styles, strict=True))


def _round(number: int, one: dict[str, Any], show: Show) -> Group:
    label = f"round {number}: tree {_gained(one['gain'])}, chain {one['chain_gain']}"
    tree = Tree(Text(show(one["tokens"][0]), style="bold"), guide_style="dim")
    branches = [tree]
    for node in range(1, len(one["tokens"])):
        branches.append(branches[one["parent"][node]].add(_node(one, node, show)))
    branches[one["accepted"][-1]].add(Text(f"+ {show(one['bonus'])}", style=BONUS))
    return Group(Text(label, style="bold"), tree, _chain(one, show))


def _gained(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _node(one: dict[str, Any], node: int, show: Show) -> Text:
    accepted, prob = node in one["accepted"], one["prob"][node]
    above = one["prob"][one["parent"][node]]
    after = prob / above if above > 0 else 0.0
    mark = "✓ " if accepted else ("~ " if node in one["random"] else "")
    figures = f"  {prob:.1%}" + (f" ({after:.1%})" if one["parent"][node] else "")
    style = ACCEPTED if accepted else ""
    return Text.assemble((mark, style), (show(one["tokens"][node]), style), (figures, REFUSED))


def _chain(one: dict[str, Any], show: Show) -> Text:
    parts: list[tuple[str, str]] = [("chain: ", REFUSED)]
    for place, token in enumerate(one["chain"]):
        style = ACCEPTED if place < one["chain_hits"] else REFUSED
        parts.append((show(token), style))
        parts.append((" · " if place + 1 < len(one["chain"]) else "", REFUSED))
    return Text.assemble(*parts)


# --- figures ---------------------------------------------------------------------------------


def _print_figures(console: Console, whole: dict[str, Any]) -> None:
    found, settings = whole["statistics"], whole["settings"]
    console.rule("the drafter", align="left")
    if not found["rounds"]:
        console.print("No answer was long enough for a round.")
        return
    console.print(
        f"{found['rounds']} rounds of {settings['nodes']} nodes, at most {settings['depth']} deep, at "
        f"temperature {settings['temperature']:g}. Acceptance length [bold]"
        f"{found['acceptance_length']:.2f}[/bold], of the chain "
        f"{found['chain_acceptance_length']:.2f}. Nodes predicted to be accepted: "
        f"{found['predicted_nodes']:.0f}; accepted: {found['accepted_nodes']}."
    )
    console.print(CHAIN)
    if settings["temperature"] > 0:
        console.print(SAMPLED)
    for title, of, bins in (
        ("Calibration of paths", "nodes", found["paths"]),
        ("Calibration of steps: children of accepted nodes", "children", found["edges"]),
    ):
        console.print()
        console.print(calibration(title, of, bins))
    console.print()
    console.print(recall(found["depths"]))


def calibration(title: str, of: str, bins: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("predicted, from - to", of, "mean predicted", "accepted", "95 % interval"):
        table.add_column(name, justify="right")
    for one in bins:
        table.add_row(
            f"{one['low']:.0%} - {one['high']:.0%}",
            str(one["count"]),
            f"{one['predicted']:.1%}",
            f"{one['share']:.1%}",
            f"{one['share_low']:.1%} - {one['share_high']:.1%}",
        )
    return table


def recall(depths: list[dict[str, Any]]) -> Table:
    """Shares of the rounds by depth, and how calibrated the tree is there."""
    table = Table(title="Recall by depth: where the target's token is", title_justify="left")
    columns = ("depth", "rounds", "candidates", "tree", "chain", "next child", "predicted in tree")
    for name in columns:
        table.add_column(name, justify="right")
    for one in depths:
        share = _share_of(one["rounds"])
        table.add_row(
            str(one["depth"]),
            str(one["rounds"]),
            share(one["candidates"]),
            share(one["tree"]),
            share(one["chain"]),
            _share_of(one["reached"])(one["tree"]),
            share(one["predicted"]),
        )
    table.caption = "next child: of the rounds in which the tree was right up to the depth before"
    return table


def _share_of(count: int) -> Callable[[float], str]:
    return lambda hits: f"{hits / count:.1%}" if count else "-"
