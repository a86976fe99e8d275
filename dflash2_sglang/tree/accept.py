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

from dflash2_sglang.tree.draw import Proposal


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
    proposal: Proposal | None = None,
    random_coins: Tensor | None = None,
) -> Walk:
    """A path and a next token that together are distributed as samples of the target.

    tokens, parent, depth  [B, N] int64 and mask [B, N, N] bool, see Tree
    target_probs           [B, N, V] float, the target's distribution after each node, every
                           filter applied
    coins                  [B, max_depth] uniform in [0, 1): coins[:, d] decides at depth d
    final_coins            [B] uniform in [0, 1), independent of coins
    max_depth              at least the depth of the deepest node
    proposal               of a tree with random children, see Tree
    random_coins           [B, max_depth] uniform in [0, 1), for these, independent of the others

    At a node whose children are all fixed, the coin picks child c with the target's probability of
    c, or none with the rest; if none, the next token is drawn from the target without the children.
    So the token after the node is c with p(c) either way. A random child r of law q is tried first,
    and accepted with min(1, p(r) / q(r)): then x is the next token by way of r with min(p(x), q(x)).
    If it is refused, all the above is done with what p lacks, (p - q)+ over its sum.

    This holds only if the tree was chosen before the coins (of random children: see `draw`), and if
    every decision has a coin of its own: a used one is known to be large.

    A token of probability zero is never accepted or drawn.
    """
    accepted = sampling_edges(tokens, parent, depth, target_probs, coins, proposal, random_coins)
    path, length, last = follow(accepted, mask, depth, max_depth)
    drawn = final_draw(tokens, parent, last, target_probs, final_coins, proposal)
    return Walk(path, length, drawn)


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
    proposal: Proposal | None = None,
    random_coins: Tensor | None = None,
) -> Walk:
    """`greedy_walk` where is_greedy ([B] bool), `sampling_walk` elsewhere.

    Neither kind reads what belongs to the other: target_next of a sampled request, target_probs
    and coins of a greedy one may hold anything, NaN included.
    """
    greedy = greedy_edges(tokens, parent, target_next)
    sampled = sampling_edges(tokens, parent, depth, target_probs, coins, proposal, random_coins)
    accepted = torch.where(is_greedy.unsqueeze(1), greedy, sampled)
    path, length, last = follow(accepted, mask, depth, max_depth)
    drawn = final_draw(tokens, parent, last, target_probs, final_coins, proposal)
    return Walk(path, length, torch.where(is_greedy, _pick(target_next, last), drawn))


def greedy_edges(tokens: Tensor, parent: Tensor, target_next: Tensor) -> Tensor:
    """[B, N] bool: the node's token is the target's choice after its parent (root: undefined)."""
    return tokens == target_next.gather(1, parent.clamp(min=0))


def sampling_edges(
    tokens: Tensor,
    parent: Tensor,
    depth: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    proposal: Proposal | None = None,
    random_coins: Tensor | None = None,
) -> Tensor:
    """[B, N] bool: the coins of the parent's depth pick this node (root: undefined).

    The probabilities of the fixed children are laid end to end from 0 in the order of the siblings;
    a coin picks the first one that ends beyond it.
    """
    batch = torch.arange(tokens.shape[0], device=tokens.device).unsqueeze(1)
    above = parent.clamp(min=0)
    # The sum below must not carry a NaN from one family to all others.
    prob = target_probs[batch, above, tokens].nan_to_num(nan=0.0).double()
    siblings = parent.unsqueeze(2) == parent.unsqueeze(1)  # [B, i, j], i itself included
    coin = coins.gather(1, (depth - 1).clamp(min=0)).double()
    if proposal is None or random_coins is None:
        return _fixed_edges(prob, siblings, coin)
    law = _law_of(tokens, above, proposal)
    chance = random_coins.gather(1, (depth - 1).clamp(min=0)).double()
    drawn = proposal.random & (chance * law < prob)
    # (p - q)+ and (q - p)+ have the same sum, and the second is over few tokens.
    lacking = (prob - law).clamp_(min=0).masked_fill_(proposal.random, 0)
    fixed = _fixed_edges(lacking, siblings, coin * refusal(target_probs, proposal).gather(1, above))
    return drawn | fixed & ~(siblings & drawn.unsqueeze(1)).any(2)


def _fixed_edges(prob: Tensor, siblings: Tensor, coin: Tensor) -> Tensor:
    end = (siblings.tril().double() @ prob.unsqueeze(2)).squeeze(2)
    beyond = (coin < end) & (prob > 0)
    # "First" is looked up and not computed from where a child starts, so that rounding can
    # neither pick two siblings nor leave a gap between them.
    return beyond & ~(siblings.tril(-1) & beyond.unsqueeze(1)).any(2)


def _law_of(tokens: Tensor, above: Tensor, proposal: Proposal) -> Tensor:
    """How likely the random child of the node's parent was to carry the node's token; [B, N]."""
    wide = above.unsqueeze(2).expand_as(proposal.tokens)
    same = proposal.tokens.gather(1, wide) == tokens.unsqueeze(2)
    return proposal.probs.gather(1, wide).masked_fill(~same, 0).sum(2, dtype=torch.float64)


def refusal(target_probs: Tensor, proposal: Proposal) -> Tensor:
    """How often each node's random child is refused, 1 where there is none; [B, N] float64."""
    target = target_probs.gather(2, proposal.tokens).nan_to_num(nan=0.0).double()
    refused = (proposal.probs.double() - target).clamp_(min=0).sum(2)
    return torch.where((proposal.probs > 0).any(2), refused, 1)


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
    tokens: Tensor,
    parent: Tensor,
    last: Tensor,
    target_probs: Tensor,
    final_coins: Tensor,
    proposal: Proposal | None = None,
) -> Tensor:
    """The target's own token after node `last`, none of whose children was accepted; [B] int64.

    Drawn from the target less the law of the refused random child, without the fixed children's
    tokens, renormalised; at a leaf there are none.
    Where rounding leaves nothing to draw from (the children hold all the mass, yet the coin lay
    beyond them), it is the most probable token of the node.
    """
    # The indexing copies this one row per request, so it may be changed in place below.
    batch = torch.arange(last.shape[0], device=last.device)
    row = target_probs[batch, last]  # [B, V]
    likeliest = row.max(1, keepdim=True).indices  # faster than argmax on a CPU
    if proposal is not None:
        candidates, law = proposal.tokens[batch, last], proposal.probs[batch, last].to(row)
        row.scatter_add_(1, candidates, -torch.minimum(row.gather(1, candidates), law))
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
