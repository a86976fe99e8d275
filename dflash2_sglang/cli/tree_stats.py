"""Is the drafter right as often as it thinks, and how deep does it see?

Only positions inside the answer count; what a last round drafted beyond its end is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

from dflash2_sglang.cli.tree_trace import Answer, Round

EDGES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
Guess = tuple[float, bool]  # a predicted probability, and whether it came true


@dataclass(frozen=True)
class Bin:
    """Guesses of [low, high): how many, their mean probability, how many came true.

    ``share_low`` and ``share_high`` bound the true share at 95 % (Wilson's interval).
    """

    low: float
    high: float
    count: int
    predicted: float
    accepted: int
    share: float
    share_low: float
    share_high: float


@dataclass(frozen=True)
class Depth:
    """What happened at one depth, over the rounds whose answer reaches it.

    rounds      how many
    nodes       of the tree, all rounds together
    predicted   sum of their path probabilities
    candidates  rounds with the target's token among the K candidates of the position
    tree        rounds with it on a path of the tree, that is accepted
    chain       rounds in which the greedy chain is right up to here
    reached     rounds in which the tree was right up to the depth before
    """

    depth: int
    rounds: int
    nodes: int
    predicted: float
    candidates: int
    tree: int
    chain: int
    reached: int


def statistics(answers: Sequence[Answer]) -> dict[str, Any]:
    """All figures, as the JSON output has them."""
    rounds = [one for answer in answers for one in answer.rounds]
    depths = by_depth(rounds)
    gain = sum(one.gain for one in rounds)
    chain_gain = sum(one.chain_gain for one in rounds)
    return {
        "rounds": len(rounds),
        "tokens": gain,
        "acceptance_length": gain / len(rounds) if rounds else None,
        "chain_acceptance_length": chain_gain / len(rounds) if rounds else None,
        "predicted_nodes": sum(one.predicted for one in depths),
        "accepted_nodes": sum(one.tree for one in depths),
        "paths": [asdict(one) for one in binned(path_guesses(rounds))],
        "edges": [asdict(one) for one in binned(edge_guesses(rounds))],
        "depths": [asdict(one) for one in depths],
    }


def path_guesses(rounds: Iterable[Round]) -> list[Guess]:
    """Every node but the anchors: the probability of its path, and whether it was accepted."""
    return [
        (one.prob[node], node in one.accepted)
        for one in rounds
        for node in range(1, len(one.tokens))
        if one.depth[node] <= len(one.truth)
    ]


def edge_guesses(rounds: Iterable[Round]) -> list[Guess]:
    """The children of accepted nodes: their probability after the parent, and whether accepted."""
    found = []
    for one in rounds:
        for node in range(1, len(one.tokens)):
            parent = one.parent[node]
            if parent in one.accepted and one.depth[node] <= len(one.truth):
                found.append((edge_prob(one, node), node in one.accepted))
    return found


def edge_prob(one: Round, node: int) -> float:
    """Of a node after its parent."""
    above = one.prob[one.parent[node]]
    return min(one.prob[node] / above, 1.0) if above > 0 else 0.0


def binned(guesses: Iterable[Guess]) -> list[Bin]:
    """The bins that hold a guess; a probability of 1 is in the last."""
    members: list[list[Guess]] = [[] for _ in EDGES[1:]]
    for guess in guesses:
        place = sum(guess[0] >= edge for edge in EDGES[1:-1])
        members[place].append(guess)
    return [
        _bin(EDGES[place], EDGES[place + 1], inside)
        for place, inside in enumerate(members)
        if inside
    ]


def _bin(low: float, high: float, inside: list[Guess]) -> Bin:
    count, accepted = len(inside), sum(came_true for _, came_true in inside)
    mean = sum(prob for prob, _ in inside) / count
    return Bin(low, high, count, mean, accepted, accepted / count, *wilson(accepted, count))


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The interval of a share by E. B. Wilson (1927), for ``count`` > 0."""
    share, weight = hits / count, z * z / count
    middle = (share + weight / 2) / (1 + weight)
    reach = sqrt(share * (1 - share) * z * z / count + weight * weight / 4) / (1 + weight)
    return max(middle - reach, 0.0), min(middle + reach, 1.0)


def by_depth(rounds: Sequence[Round]) -> list[Depth]:
    """From depth 1 to the deepest position."""
    deepest = max((len(one.candidates) for one in rounds), default=0)
    return [_at_depth(rounds, depth) for depth in range(1, deepest + 1)]


def _at_depth(rounds: Sequence[Round], depth: int) -> Depth:
    known = [one for one in rounds if depth <= min(len(one.truth), len(one.candidates))]
    nodes = [one.prob[node] for one in known for node, its in enumerate(one.depth) if its == depth]
    return Depth(
        depth=depth,
        rounds=len(known),
        nodes=len(nodes),
        predicted=sum(nodes),
        candidates=sum(one.truth[depth - 1] in one.candidates[depth - 1] for one in known),
        tree=sum(len(one.accepted) > depth for one in known),
        chain=sum(one.chain_hits >= depth for one in known),
        reached=sum(len(one.accepted) >= depth for one in known),
    )
