"""The best tree that a grammar allows, found in the lattice of one request.

Best first: the most probable open path becomes a node, the grammar moves there and says which tokens may
follow, and those become open paths. So a forbidden token never takes a node, and the grammar's mask is
computed once for each node that will be verified, and for no other.

A path's probability is the target's chance of taking it, as the drafter sees it. Under a mask the target
renormalises over what is allowed, hence so do we: a token that is the only one allowed is certain.
D positions, K candidates, N nodes, C most children of a node.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from dflash2_sglang.grammar.legal import Array, Legal

# Candidates may hold the whole mass, or none of it: what is allowed is never impossible to us.
LEAST = 1e-9
# Log-probability of anything after a stop token: taken only where nothing else is left.
AFTER_STOP = -1e4
OUTSIDE = -1


@dataclass(frozen=True)
class Block:
    """What the drafter offers one request.

    tokens  [D, K]     int64    candidates, distinct within a position
    probs   [D, K, K]  float64  probs[t, a, c]: candidate c of position t follows a of position t-1
    """

    tokens: Array
    probs: Array

    @classmethod
    def from_logs(cls, tokens: Array, log_probs: Array) -> Block:
        """From the parts of a Lattice; NaN counts as probability zero."""
        return cls(tokens, np.exp(np.nan_to_num(log_probs.astype(np.float64), nan=-np.inf)))

    def after(self, depth: int, candidate: int) -> Array:
        """Probabilities [K] of position ``depth`` after a candidate of the position before it, or
        after the average one where a token from outside the lattice stands there."""
        return self.probs[depth, candidate] if candidate >= 0 else self.probs[depth].mean(0)


@dataclass(frozen=True)
class Node:
    """path holds the tokens from below the root to the node; candidate is its place in the lattice."""

    path: tuple[int, ...]
    candidate: int
    parent: int
    log_prob: float


@dataclass
class Growth:
    """Nodes in order of falling probability, and what may follow each: None where the grammar has
    ended. The last nodes may be padding: forbidden, with log-probability -inf."""

    nodes: list[Node] = field(default_factory=list)
    legal: list[Legal | None] = field(default_factory=list)

    @property
    def empty(self) -> int:
        """How many nodes are padding."""
        return sum(node.log_prob == -math.inf for node in self.nodes)

    def add(self, node: Node, legal: Legal | None) -> int:
        self.nodes.append(node)
        self.legal.append(legal)
        return len(self.nodes) - 1


def grow(
    block: Block,
    enter: Callable[[tuple[int, ...], int], Legal | None],
    stops: frozenset[int],
    num_nodes: int,
    max_children: int,
) -> Growth:
    """A tree of ``num_nodes`` nodes; exactly so many, padded where the grammar leaves fewer.

    enter  (path, node) -> what the grammar allows after the path of this node, None if it has ended
    stops  tokens that end the request: what follows them is dropped

    Ties go to the path that was opened first, so all ranks of a group grow the same tree.
    """
    out, order = Growth(), count()
    open_paths = [(0.0, next(order), Node((), 0, -1, 0.0))]
    while open_paths and len(out.nodes) < num_nodes:
        node = heapq.heappop(open_paths)[2]
        index = len(out.nodes)
        out.add(node, legal := enter(node.path, index))
        if legal is None or len(node.path) == block.tokens.shape[0]:
            continue
        stopped = bool(node.path) and node.path[-1] in stops
        start = node.log_prob + (AFTER_STOP if stopped else 0.0)
        for share, token, candidate in _children(block, node, legal, max_children):
            child = Node((*node.path, token), candidate, index, start + share)
            heapq.heappush(open_paths, (-child.log_prob, next(order), child))
    _pad(out, block, num_nodes, max_children)
    return out


def _children(
    block: Block, node: Node, legal: Legal, most: int
) -> Iterator[tuple[float, int, int]]:
    """(log of its share of what is allowed, token, candidate) of the best ``most`` allowed tokens.

    Where no more than that are allowed, those outside the lattice are among them; all of these share
    evenly what the candidates leave of the vocabulary.
    """
    tokens = block.tokens[len(node.path)]
    probs = block.after(len(node.path), node.candidate)
    inside = np.flatnonzero(legal.allows(tokens))
    weight = np.maximum(probs[inside], LEAST * LEAST)
    missing = legal.count - inside.size
    rest = max(1.0 - float(probs.sum()), LEAST) / max(legal.vocab - tokens.size, 1)
    total = float(weight.sum()) + missing * rest
    found = list(zip(weight.tolist(), tokens[inside].tolist(), inside.tolist(), strict=True))
    if missing and legal.count <= most:
        known = set(tokens[inside].tolist())
        found += [(rest, token, OUTSIDE) for token in legal.list() if token not in known]
    found.sort(key=lambda entry: -entry[0])
    for mass, token, candidate in found[:most]:
        yield min(math.log(mass / total), 0.0), token, candidate


def _pad(out: Growth, block: Block, num_nodes: int, max_children: int) -> None:
    """Fill up with forbidden nodes, which have probability zero, and with nodes below those.

    There is room: a node with fewer children than it may have has used up its allowed candidates, so
    the others of its position are forbidden. After the end of a grammar anything will do, as it is
    dropped, but it would count as accepted; so that place comes last.
    """
    children: dict[int, set[int]] = {}
    for node in out.nodes:
        children.setdefault(node.parent, set()).add(node.path[-1] if node.path else -1)
    ended = [index for index, legal in enumerate(out.legal) if legal is None]
    places = deque(index for index, legal in reversed([*enumerate(out.legal)]) if legal is not None)
    while len(out.nodes) < num_nodes:
        parent = places.popleft() if places else ended.pop()
        path, legal = out.nodes[parent].path, out.legal[parent]
        if len(path) == block.tokens.shape[0]:
            continue
        tokens = block.tokens[len(path)]
        if legal is not None:
            tokens = tokens[~legal.allows(tokens)]
        taken = children.get(parent, set())
        free = [token for token in tokens.tolist() if token not in taken]
        for token in free[: min(max_children - len(taken), num_nodes - len(out.nodes))]:
            node = Node((*path, token), OUTSIDE, parent, -math.inf)
            places.append(out.add(node, None))
