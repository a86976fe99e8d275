"""The walks: one launch decides all edges and follows them, two more draw the last token.

Probabilities are summed in float64, as `tree.accept` does. bfloat16 ones are widened on load.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash2_sglang.kernels.draw import final_draw
from dflash2_sglang.tree.accept import Walk
from dflash2_sglang.tree.draw import Proposal

NONE, SOME, ALL = 0, 1, 2  # requests that are greedy


@triton.jit
def _known(x):
    """float64, 0 for NaN: a sum must not carry it from one family to all others."""
    x = x.to(tl.float64)
    return tl.where(x == x, x, 0.0)


@triton.jit
def _fixed_edges(prob, coin, family, node, NODES: tl.constexpr):
    """Whose stretch of probability, laid end to end by siblings, is the first to end beyond the coin."""
    earlier = family & (node[None, :] <= node[:, None])
    end = tl.sum(tl.where(earlier, prob[None, :], 0.0), 1)
    beyond = (coin < end) & (prob > 0)
    first = tl.min(tl.where(family & beyond[None, :], node[None, :], NODES), 1)
    return beyond & (first == node)


@triton.jit
def _walk(
    token_ptr,
    parent_ptr,
    mask_ptr,
    depth_ptr,
    next_ptr,
    prob_ptr,
    coin_ptr,
    coin_stride_b,
    coin_stride_d,
    is_greedy_ptr,
    random_ptr,
    law_token_ptr,
    law_prob_ptr,
    random_coin_ptr,
    random_stride_b,
    random_stride_d,
    path_ptr,
    length_ptr,
    last_ptr,
    out_ptr,
    num_nodes,
    vocab,
    candidates,
    path_nodes,
    GREEDY: tl.constexpr,
    RANDOM: tl.constexpr,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    base = b * num_nodes
    node = tl.arange(0, NODES)
    inside = node < num_nodes
    token = tl.load(token_ptr + base + node, mask=inside, other=0)
    parent = tl.load(parent_ptr + base + node, mask=inside, other=-2)
    depth = tl.load(depth_ptr + base + node, mask=inside, other=0)
    above = base + tl.where(parent > 0, parent, 0)
    greedy = GREEDY == 2
    if GREEDY == 1:
        greedy = tl.load(is_greedy_ptr + b) != 0
    accepted = node < 0
    if GREEDY > 0:
        accepted = token == tl.load(next_ptr + above, mask=inside, other=-1)
    if GREEDY < 2:
        wanted = inside & (greedy == 0)
        at = tl.where(depth > 0, depth - 1, 0)
        prob = _known(tl.load(prob_ptr + above * vocab + token, mask=wanted, other=0.0))
        coin = tl.load(coin_ptr + b * coin_stride_b + at * coin_stride_d, mask=wanted, other=0.0)
        coin = coin.to(tl.float64)
        family = (parent[:, None] == parent[None, :]) & inside[None, :]
        if RANDOM:
            k = tl.arange(0, CANDIDATES)
            some = wanted[:, None] & (k < candidates)[None, :]
            wide = above[:, None] * candidates + k[None, :]
            words = tl.load(law_token_ptr + wide, mask=some, other=-1)
            law = tl.load(law_prob_ptr + wide, mask=some, other=0.0).to(tl.float64)
            held = tl.load(prob_ptr + above[:, None] * vocab + words, mask=some, other=0.0)
            lost = law - _known(held)
            refused = tl.sum(tl.where(lost > 0, lost, 0.0), 1)
            refused = tl.where(tl.max(law, 1) > 0, refused, 1.0)
            own = tl.sum(tl.where(words == token[:, None], law, 0.0), 1)
            random = tl.load(random_ptr + base + node, mask=inside, other=0) != 0
            chance = random_coin_ptr + b * random_stride_b + at * random_stride_d
            chance = tl.load(chance, mask=wanted, other=0.0).to(tl.float64)
            drawn = random & (chance * own < prob)
            lacking = tl.where(random | (prob < own), 0.0, prob - own)
            fixed = _fixed_edges(lacking, coin * refused, family, node, NODES)
            taken = tl.max(tl.where(family & drawn[None, :], 1, 0), 1)
            sampled = drawn | (fixed & (taken == 0))
        else:
            sampled = _fixed_edges(prob, coin, family, node, NODES)
        accepted = (accepted & (greedy != 0)) | (sampled & (greedy == 0))

    rejected = (accepted == 0) & (depth > 0)
    line = mask_ptr + (base + node[:, None]) * num_nodes + node[None, :]
    line = tl.load(line, mask=inside[:, None] & inside[None, :], other=0) != 0
    on_path = inside & (tl.max(tl.where(line & rejected[None, :], 1, 0), 1) == 0)
    d = tl.arange(0, PATH)
    there = on_path[None, :] & (depth[None, :] == d[:, None])
    path = tl.max(tl.where(there, node[None, :], -1), 1)
    length = tl.sum(on_path.to(tl.int32), 0)
    last = tl.sum(tl.where(d == length - 1, path, 0), 0)
    tl.store(path_ptr + b * path_nodes + d, path.to(tl.int64), mask=d < path_nodes)
    tl.store(length_ptr + b, length.to(tl.int64))
    if GREEDY < 2:
        tl.store(last_ptr + b, last.to(tl.int64))
    if GREEDY == 1:
        tl.store(out_ptr + b, tl.load(next_ptr + base + last), mask=greedy)
    if GREEDY == 2:
        tl.store(out_ptr + b, tl.load(next_ptr + base + last))


def greedy_walk(
    tokens: Tensor,
    parent: Tensor,
    mask: Tensor,
    depth: Tensor,
    target_next: Tensor,
    max_depth: int,
) -> Walk:
    tree = tuple(x.contiguous() for x in (tokens, parent, mask, depth))
    return _follow(tree, max_depth, ALL, target_next=target_next)[0]


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
    tree = tuple(x.contiguous() for x in (tokens, parent, mask, depth))
    probs = target_probs.contiguous()
    proposal, drawn = _pair(proposal), (coins, random_coins)
    walk, last = _follow(tree, max_depth, NONE, None, probs, drawn, None, proposal)
    final_draw(tree[0], tree[1], last, probs, final_coins, proposal, None, walk.next_token)
    return walk


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
    tree = tuple(x.contiguous() for x in (tokens, parent, mask, depth))
    probs, greedy = target_probs.contiguous(), is_greedy.contiguous().view(torch.uint8)
    proposal, drawn = _pair(proposal), (coins, random_coins)
    walk, last = _follow(tree, max_depth, SOME, target_next, probs, drawn, greedy, proposal)
    final_draw(tree[0], tree[1], last, probs, final_coins, proposal, greedy, walk.next_token)
    return walk


def _pair(proposal: Proposal | None) -> Proposal | None:
    return None if proposal is None else Proposal(*(x.contiguous() for x in proposal))


def _follow(
    tree: tuple[Tensor, ...],
    max_depth: int,
    greedy: int,
    target_next: Tensor | None = None,
    probs: Tensor | None = None,
    coins: tuple[Tensor | None, Tensor | None] = (None, None),
    is_greedy: Tensor | None = None,
    proposal: Proposal | None = None,
) -> tuple[Walk, Tensor | None]:
    """The walk, and each request's last node; next_token is of greedy requests so far."""
    tokens, parent, mask, depth = tree
    batch, nodes = tokens.shape
    path = tokens.new_empty(batch, max_depth + 1)
    walk = Walk(path, tokens.new_empty(batch), tokens.new_empty(batch))
    last = None if greedy == ALL else tokens.new_empty(batch)
    if not batch:
        return walk, last
    random_coins = coins[1] if proposal is not None else None
    use_random = proposal is not None and random_coins is not None
    width = proposal.tokens.shape[2] if proposal is not None else 1
    size = triton.next_power_of_2(nodes)
    _walk[(batch,)](
        tokens,
        parent,
        mask.view(torch.uint8),
        depth,
        None if target_next is None else target_next.contiguous(),
        probs,
        coins[0],
        *_strides(coins[0]),
        is_greedy,
        *(_proposal_parts(proposal) if use_random else (None, None, None)),
        random_coins,
        *_strides(random_coins),
        *walk[:2],
        last,
        walk.next_token,
        nodes,
        1 if probs is None else probs.shape[2],
        width,
        max_depth + 1,
        GREEDY=greedy,
        RANDOM=use_random,
        NODES=size,
        PATH=triton.next_power_of_2(max_depth + 1),
        CANDIDATES=triton.next_power_of_2(width),
        num_warps=max(1, min(16, size * size // 1024)),
    )
    return walk, last


def _strides(coins: Tensor | None) -> tuple[int, int]:
    return (0, 0) if coins is None else (coins.stride(0), coins.stride(1))


def _proposal_parts(proposal: Proposal | None) -> tuple[Tensor, Tensor, Tensor]:
    assert proposal is not None
    return proposal.random.view(torch.uint8), proposal.tokens, proposal.probs
