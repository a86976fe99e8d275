"""Which path of a verified tree to keep, and the token that follows it.

The target has scored every node. From the root, the walk moves to a child as long as the target
agrees with one, and ends with one token of the target's own. Which child it would move to is
decided for every node at once (an edge is accepted or not); the path is then the set of nodes with
no rejected edge above them.

Node 0 is the root, siblings carry distinct tokens and are ordered by index.
B requests, N nodes, V words, P = max_depth + 1 nodes on the longest path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Walk(NamedTuple):
    """The accepted path of each request.

    path        [B, P]  int64  nodes from the root (0) down, then -1
    length      [B]     int64  nodes on the path, the root included: 1 .. P
    next_token  [B]     int64  the target's own token after the last node
    """

    path: Tensor
    length: Tensor
    next_token: Tensor


def greedy_walk(
    tokens: Tensor,
    parent: Tensor,
    mask: Tensor,
    depth: Tensor,
    target_next: Tensor,
    max_depth: int,
) -> Walk:
    """The longest path of tokens that the target itself would have chosen.

    tokens, parent, depth  [B, N] int64 and mask [B, N, N] bool, see Tree
    target_next            [B, N] int64 the target's argmax after each node
    max_depth              at least the depth of the deepest node
    """
    accepted = greedy_edges(tokens, parent, target_next)
    path, length, last = follow(accepted, mask, depth, max_depth)
    return Walk(path, length, _pick(target_next, last))


def sampling_walk(
    tokens: Tensor,
    parent: Tensor,
    mask: Tensor,
    depth: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    max_depth: int,
) -> Walk:
    """A path and a next token that together are distributed as samples of the target.

    tokens, parent, depth  [B, N] int64 and mask [B, N, N] bool, see Tree
    target_probs           [B, N, V] float, the target's distribution after each node, every
                           filter applied
    coins                  [B, max_depth] uniform in [0, 1): coins[:, d] decides at depth d
    final_coins            [B] uniform in [0, 1), independent of coins
    max_depth              at least the depth of the deepest node

    At a node the coin picks child c with the target's probability of c, or none with the rest;
    if none, the next token is drawn from the target without the children. So the token after the
    node is c with p(c) either way. This holds only if the tree was chosen before the coins, and
    if the final draw has a coin of its own: the used one is known to be large.

    A token of probability zero is never accepted or drawn.
    """
    accepted = sampling_edges(tokens, parent, depth, target_probs, coins)
    path, length, last = follow(accepted, mask, depth, max_depth)
    return Walk(path, length, final_draw(tokens, parent, last, target_probs, final_coins))


def mixed_walk(
    tokens: Tensor,
    parent: Tensor,
    mask: Tensor,
    depth: Tensor,
    target_next: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    is_greedy: Tensor,
    max_depth: int,
) -> Walk:
    """`greedy_walk` where is_greedy ([B] bool), `sampling_walk` elsewhere.

    Neither kind reads what belongs to the other: target_next of a sampled request, target_probs
    and coins of a greedy one may hold anything, NaN included.
    """
    greedy = greedy_edges(tokens, parent, target_next)
    sampled = sampling_edges(tokens, parent, depth, target_probs, coins)
    accepted = torch.where(is_greedy.unsqueeze(1), greedy, sampled)
    path, length, last = follow(accepted, mask, depth, max_depth)
    drawn = final_draw(tokens, parent, last, target_probs, final_coins)
    return Walk(path, length, torch.where(is_greedy, _pick(target_next, last), drawn))


def greedy_edges(tokens: Tensor, parent: Tensor, target_next: Tensor) -> Tensor:
    """[B, N] bool: the node's token is the target's choice after its parent (root: undefined)."""
    return tokens == target_next.gather(1, parent.clamp(min=0))


def sampling_edges(
    tokens: Tensor, parent: Tensor, depth: Tensor, target_probs: Tensor, coins: Tensor
) -> Tensor:
    """[B, N] bool: the coin of the parent's depth picks this node (root: undefined).

    The children's probabilities are laid end to end from 0 in the order of the siblings; a coin
    picks the first one that ends beyond it.
    """
    batch = torch.arange(tokens.shape[0], device=tokens.device).unsqueeze(1)
    # The sum below must not carry a NaN from one family to all others.
    prob = target_probs[batch, parent.clamp(min=0), tokens].nan_to_num(nan=0.0)
    siblings = parent.unsqueeze(2) == parent.unsqueeze(1)  # [B, i, j], i itself included
    end = (siblings.tril().double() @ prob.double().unsqueeze(2)).squeeze(2)
    coin = coins.gather(1, (depth - 1).clamp(min=0))
    beyond = (coin < end) & (prob > 0)
    # "First" is looked up and not computed from where a child starts, so that rounding can
    # neither pick two siblings nor leave a gap between them.
    return beyond & ~(siblings.tril(-1) & beyond.unsqueeze(1)).any(2)


def follow(
    accepted: Tensor, mask: Tensor, depth: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The path along accepted edges: (path [B, P], length [B], last [B] its last node).

    accepted [B, N] bool, at most one child of a node; the root's entry is not read.
    """
    nodes = depth.shape[1]
    rejected = ~accepted & (depth > 0)
    on_path = ~(mask & rejected.unsqueeze(1)).any(2)
    index = torch.arange(nodes, device=depth.device).expand_as(depth)
    # One column more than P swallows the nodes that are not on the path.
    path = depth.new_full((depth.shape[0], max_depth + 2), -1)
    path.scatter_(1, torch.where(on_path, depth, max_depth + 1), index)
    path = path[:, : max_depth + 1]
    length = on_path.sum(1)
    return path, length, _pick(path, length - 1)


def final_draw(
    tokens: Tensor, parent: Tensor, last: Tensor, target_probs: Tensor, final_coins: Tensor
) -> Tensor:
    """The target's own token after node `last`, none of whose children was accepted; [B] int64.

    Drawn from the target without the children's tokens, renormalised; at a leaf there are none.
    Where rounding leaves nothing to draw from (the children hold all the mass, yet the coin lay
    beyond them), it is the most probable token of the node.
    """
    # The indexing copies this one row per request, so it may be changed in place below.
    row = target_probs[torch.arange(last.shape[0], device=last.device), last]  # [B, V]
    likeliest = row.max(1, keepdim=True).indices  # faster than argmax on a CPU
    is_child = parent == last.unsqueeze(1)
    # Adding -p leaves an exact zero; other nodes, which may carry the same token, add nothing.
    residual = row.scatter_add_(1, tokens, torch.where(is_child, -row.gather(1, tokens), 0))
    cumulative = residual.cumsum(1, dtype=torch.float64)
    threshold = final_coins.double().unsqueeze(1) * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=row.shape[1] - 1)
    # A coin of 1, or a parallel scan that rounds unevenly, may land on a token of probability 0.
    possible = residual.gather(1, token) > 0
    return torch.where(possible, token, likeliest).squeeze(1)


def _pick(values: Tensor, column: Tensor) -> Tensor:
    """values[b, column[b]]; [B, M] and [B] -> [B]."""
    return values.gather(1, column.unsqueeze(1)).squeeze(1)
