"""Trees with random children, for requests above temperature 0.

A fixed child c of a node is accepted with the target's p(c). A child r drawn from a distribution q
is accepted with min(1, p(r) / q(r)), on average with sum over x of min(p(x), q(x)): one node for all
the mass that many unlikely candidates hold together. So a node gets its k most probable candidates
as fixed children and at most one random child, drawn from the others.

What `accept.sampling_walk` needs to be exact, and how it is kept here:

- Whether r is a node does not depend on which candidate it is. Its weight in the search is its
  node's reach times the mass of the others, and whatever depends on it (its descendants, and the
  fixed children after it) comes later in the order.
- k is decided before the draw, from the node's reach and its row of the lattice.
- Every node draws for itself, with a coin that is used nowhere else.

B requests, D positions, K candidates, N nodes, C most children of a node.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from dflash2_sglang.tree.filters import filter_ranked
from dflash2_sglang.tree.lattice import Lattice
from dflash2_sglang.tree.search import Level, best, ranked_rows, root_level

# Measured on the demo pair, see launch/proposals.py.
FIXED_REACH = 0.7  # a fixed child reaches at least this much over N
RANDOM_WEIGHT = 0.5  # how often a random child is accepted, of the mass it stands for
SPARE_WEIGHT = 0.1  # the same for a fixed child that comes after the random one


def lattice_heat(temperature: Tensor) -> Tensor:
    """The temperature of the rows that trees are drawn from, for a request's own temperature.

    A colder target is surer of its next token, but the drafter is not surer what that is: below 1
    its rows would put too much trust in single paths.
    """
    return temperature.clamp(min=1)


def sharpness(temperature: Tensor) -> Tensor:
    """The power that makes rows at `lattice_heat` rows at the request's own temperature."""
    return lattice_heat(temperature) / temperature


class Draws(NamedTuple):
    """What the random children of a batch are drawn with.

    coins  [B, D, N-1]  uniform in [0, 1): coins[b, t, i] is of the i-th best node of depth t
    fixed  [B] bool     requests that get no random child: the greedy ones
    top_k  [B] int, top_p [B] and min_p [B], see `filters.filtered_probs`; None where none is set
    heat   [B]          the requests' own temperatures; None: those of the lattice
    """

    coins: Tensor
    fixed: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    heat: Tensor | None = None


class Proposal(NamedTuple):
    """How the random children of a tree were drawn.

    random  [B, N]     bool   the node is a random child; a node has at most one
    tokens  [B, N, K]  int64  distinct tokens
    probs   [B, N, K]  float  the law of the node's random child over them; all 0 where it has none
    """

    random: Tensor
    tokens: Tensor
    probs: Tensor


class Children(NamedTuple):
    """The C children of F nodes, and the law of the random one among them.

    rank   [B, F, C]  place of each among the ranked candidates of its row
    weight [B, F, C]  log of how often a node that is reached leads there; fixed for the first k,
                      then the random child, then what is left by rank
    fixed  [B, F]     k
    law    [B, F, K]  of the random child, over the ranked candidates
    """

    rank: Tensor
    weight: Tensor
    fixed: Tensor
    law: Tensor


class Found(NamedTuple):
    """The levels as in `search.search`, and of all their nodes, M in number:

    random  [B, M]     bool   the node is a random child
    rows    [B, M, K]  int64  its candidates, rows as in `Level`
    law     [B, M, K]  float  of its own random child over them
    """

    levels: list[Level]
    random: Tensor
    rows: Tensor
    law: Tensor


def draw_search(lattice: Lattice, num_nodes: int, max_children: int, draws: Draws) -> Found:
    """The best nodes of each depth, random children among them."""
    log_probs, below = ranked_rows(lattice)
    log_probs = _filtered(log_probs, draws)
    levels = [root_level(lattice)]
    random, rows, laws = [torch.zeros_like(levels[0].row, dtype=torch.bool)], [], []
    column = torch.arange(max_children, device=below.device)
    start = 0  # of the parents' level
    for above in range(min(lattice.tokens.shape[1], num_nodes - 1)):
        parents = levels[-1]
        ranked, after = embedding(parents.row, log_probs), embedding(parents.row, below)
        children = spawn(ranked, parents.log_prob, draws, above, num_nodes, max_children)
        paths = (children.weight + parents.log_prob.unsqueeze(-1)).flatten(1)
        path, index = best(paths, num_nodes, above)
        row = after.gather(2, children.rank).flatten(1).gather(1, index)
        parent = index.div(max_children, rounding_mode="floor").add_(start)
        start += parents.row.shape[1]
        levels.append(Level(path, row, parent))
        is_random = column == children.fixed.unsqueeze(-1)
        random.append(is_random.flatten(1).gather(1, index))
        rows.append(after)
        laws.append(children.law)
    leaves = levels[-1].row.unsqueeze(-1).expand(-1, -1, log_probs.shape[1])
    rows.append(leaves)
    laws.append(log_probs.new_zeros(leaves.shape))
    return Found(levels, torch.cat(random, 1), torch.cat(rows, 1), torch.cat(laws, 1))


def spawn(
    ranked: Tensor, reach: Tensor, draws: Draws, above: int, num_nodes: int, max_children: int
) -> Children:
    """The children of the F nodes of depth `above`.

    ranked  [B, F, K]  log-probabilities of the candidates after each node, best first
    reach   [B, F]     log of how often each node is reached
    """
    width = ranked.shape[2]
    place = torch.arange(width, device=ranked.device)
    likely = reach.unsqueeze(-1) + ranked >= math.log(FIXED_REACH / num_nodes)
    count = likely.sum(-1).clamp(max=max_children - 1)  # one candidate at least is left to draw
    others = ranked.masked_fill(place < count.unsqueeze(-1), -torch.inf)
    mass = others.logsumexp(-1).clamp_(max=0)  # rounding must not put a child before its parent
    # Where all others are impossible, one of them is drawn for certain.
    certain = (place == count.unsqueeze(-1)).to(ranked)
    own = others if draws.heat is None else others * sharpness(draws.heat).view(-1, 1, 1)
    law = torch.where(mass.unsqueeze(-1) == -torch.inf, certain, own.softmax(-1))
    drawn = draw(law, draws.coins[:, above, : reach.shape[1]])
    count = count.masked_fill(draws.fixed.unsqueeze(-1), max_children)

    column = torch.arange(max_children, device=ranked.device)
    k, r = count.unsqueeze(-1), drawn.unsqueeze(-1)
    spare = torch.where(column <= r, column - 1, column)  # r is not a child twice
    rank = torch.where(column < k, column, torch.where(column == k, r, spare))
    weight = ranked.gather(2, rank)
    # Never above the random child's, or its place would depend on what was drawn.
    heaviest = mass.unsqueeze(-1) + math.log(RANDOM_WEIGHT)
    late = torch.minimum(weight + math.log(SPARE_WEIGHT), heaviest)
    weight = torch.where(column < k, weight, torch.where(column == k, heaviest, late))
    return Children(rank, weight, count, law)


def draw(law: Tensor, coins: Tensor) -> Tensor:
    """law [..., K] and coins [...] in [0, 1) -> [...] int64; never one of probability 0."""
    cumulative = law.cumsum(-1)
    drawn = (cumulative <= (coins.to(law) * cumulative[..., -1]).unsqueeze(-1)).sum(-1)
    place = torch.arange(law.shape[-1], device=law.device)
    return torch.minimum(drawn, (place * (law > 0)).amax(-1))


def proposal(found: Found, tokens: Tensor, chosen: Tensor, parent: Tensor) -> Proposal:
    """For the nodes `chosen` [B, N] of all that were found, with their parents among themselves."""
    nodes, width = chosen.shape[1], found.law.shape[2]
    random = found.random.gather(1, chosen)
    # Column N swallows the nodes that are not random children.
    draws_one = random.new_zeros(random.shape[0], nodes + 1)
    draws_one.scatter_(1, parent.masked_fill(~random, nodes), True)
    wide = chosen.unsqueeze(-1).expand(-1, -1, width)
    law = found.law.gather(1, wide).masked_fill(~draws_one[:, :nodes].unsqueeze(-1), 0)
    return Proposal(random, tokens.take(found.rows.gather(1, wide) - width), law)


def _filtered(log_probs: Tensor, draws: Draws) -> Tensor:
    """The rows [B*D*K, K] as the requests' filters leave them; `fixed` requests keep theirs."""
    if draws.top_k is None and draws.top_p is None and draws.min_p is None:
        return log_probs
    size, width = draws.fixed.shape[0], log_probs.shape[1]
    grouped = log_probs.view(size, log_probs.shape[0] // max(size, 1), width)
    power = None if draws.heat is None else sharpness(draws.heat)
    found = filter_ranked(grouped, draws.top_k, draws.top_p, draws.min_p, power)
    return torch.where(draws.fixed.view(-1, 1, 1), grouped, found).flatten(0, 1)
