"""The best tree with random children, and how they were drawn, in one launch a batch.

Best first, as in `kernels.tree`: one program a request, one offer a node, the smallest one is the next
node. A step needs the children of two nodes, the one that gets a child and the new one, and finds both
side by side as two rows of candidates, best first. Of every candidate it knows whether it is a fixed
child, the random one or a spare, hence its column in `draw.spawn` and its weight; children are compared
as one integer (cost of the path, column). Nothing of a node's row is kept: it is filtered, drawn from and
ordered again, with the same result, whenever the node gets a child.

A node's place among those of its depth, which names its coin, is that of its level in `search`: the
nodes of a depth that are in the tree are the first of their level.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash2_sglang.kernels.spawn import children, in_order
from dflash2_sglang.kernels.tree import blocks, empty_tree, pointers, row_keys
from dflash2_sglang.tree.build import Tree, check_sizes
from dflash2_sglang.tree.draw import FIXED_REACH, Draws, Proposal
from dflash2_sglang.tree.lattice import Lattice


@triton.jit
def _drawn_tree(
    log_prob_ptr,
    stride_b,
    stride_t,
    stride_a,
    stride_c,
    token_ptr,
    anchor_ptr,
    coin_ptr,
    coin_b,
    coin_t,
    coin_i,
    fixed_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    heat_ptr,
    out_token_ptr,
    out_parent_ptr,
    out_depth_ptr,
    out_log_prob_ptr,
    out_mask_ptr,
    out_child_ptr,
    out_sibling_ptr,
    random_ptr,
    word_ptr,
    law_ptr,
    num_nodes,
    max_depth,
    width,
    max_children,
    likely,
    NODES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WORDS: tl.constexpr,
):
    NONE: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    LOW: tl.constexpr = 0xFFFF
    NINE: tl.constexpr = 0x1FF
    b = tl.program_id(0).to(tl.int64)
    rows, coins = log_prob_ptr + b * stride_b, coin_ptr + b * coin_b
    fixed = tl.load(fixed_ptr + b) != 0
    top_k, top_p, min_p, power = CANDIDATES, 1.0, 0.0, 1.0
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + b)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + b).to(tl.float32)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + b).to(tl.float32)
    if heat_ptr is not None:
        power = 1.0 / tl.minimum(tl.load(heat_ptr + b).to(tl.float32), 1.0)
    FILTERS: tl.constexpr = top_k_ptr is not None or top_p_ptr is not None or min_p_ptr is not None
    anchor = tl.load(anchor_ptr + b)
    node = tl.arange(0, NODES)
    side = tl.arange(0, 2)[:, None]  # the node that gets a child, the new one
    rank = tl.arange(0, CANDIDATES)[None, :]
    word = tl.arange(0, WORDS)
    bit = tl.arange(0, 64)
    column = word[:, None] * 64 + bit[None, :]
    deepest = tl.minimum(max_depth, num_nodes - 1)

    # Of every node: its offer (cost, depth, parent); the child that it offers, and in its 9 low bits the
    # last child that is in the tree; its cost, its place among the candidates, its place in its depth.
    offer = tl.where(node == 0, 0, NONE).to(tl.int64)  # the root offers itself
    tail = tl.zeros((NODES,), tl.int64)
    state = tl.zeros((NODES,), tl.int64)
    level = tl.full((NODES,), -1, tl.int32)
    draws_one = node < 0
    line = tl.zeros((NODES, WORDS), tl.int64)
    child = tl.full((NODES,), -1, tl.int64)
    sibling = tl.full((NODES,), -1, tl.int64)

    base = b * num_nodes
    for i in range(num_nodes):
        best = tl.min(offer, 0)
        parent = best & LOW
        depth = ((best >> 16) & LOW).to(tl.int32)
        is_parent = (node == parent) & (i > 0)
        is_new = node == i
        chosen = tl.sum(tl.where(is_parent, tail, 0), 0)
        above = tl.sum(tl.where(is_parent, state, 0), 0)
        ancestors = tl.sum(tl.where(is_parent[:, None], line, 0), 0)
        place = tl.sum((level == depth).to(tl.int64), 0)
        elder = chosen & NINE
        is_random = (chosen >> 9) & 1
        chosen = chosen - elder
        candidate = (chosen >> 10) & NINE
        mine = ((best >> 32) << 32) | (candidate << 16) | place

        of = tl.where(side == 0, above, mine)
        at = tl.where(side == 0, depth - 1, depth)  # also the position that holds the children
        valid = (at >= 0) & (at < deepest)
        inside = (rank < width) & valid
        row = rows + at * stride_t + ((of >> 16) & LOW) * stride_a
        keys = row_keys(row, stride_c, width, valid, CANDIDATES, NONE)
        keys = in_order(keys, rank)
        reach = (of >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        coin = coins + at * coin_t + (of & LOW) * coin_i
        coin = tl.load(coin, mask=valid, other=0.0).to(tl.float32)
        offers, law = children(
            keys,
            rank,
            inside,
            reach,
            coin,
            fixed,
            power,
            top_k,
            top_p,
            min_p,
            likely,
            max_children,
            FILTERS,
            CANDIDATES,
            NONE,
        )
        second = tl.min(tl.min(tl.where((side == 0) & (offers > chosen), offers, NONE), 1), 0)
        first = tl.min(tl.min(tl.where(side == 1, offers, NONE), 1), 0)
        ours = tl.where(second == NONE, NONE, ((second >> 32) << 32) | (depth << 16) | parent)
        next = tl.where(first == NONE, NONE, ((first >> 32) << 32) | ((depth + 1) << 16) | i)
        offer = tl.where(is_parent, ours, tl.where(is_new, next, offer))
        # A node without another child is not chosen again, so its low bits may hold anything.
        tail = tl.where(is_parent, (second - (second & NINE)) | i, tail)
        tail = tl.where(is_new, first - (first & NINE), tail)
        state = tl.where(is_new, mine, state)
        level = tl.where(is_new, depth, level)
        draws_one = draws_one | (is_parent & (is_random != 0))
        child = tl.where(is_parent & (elder == 0), i, child)
        sibling = tl.where((node == elder) & (elder > 0), i, sibling)
        own = ancestors | tl.where(word == i // 64, tl.full((WORDS,), 1, tl.int64) << (i % 64), 0)
        line = tl.where(is_new[:, None], own[None, :], line)

        token = anchor
        if i > 0:
            token = tl.load(token_ptr + (b * max_depth + depth - 1) * width + candidate)
        cost = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(out_token_ptr + base + i, token)
        tl.store(out_parent_ptr + base + i, tl.where(i > 0, parent, -1))
        tl.store(out_depth_ptr + base + i, depth.to(tl.int64))
        tl.store(out_log_prob_ptr + base + i, 0.0 - cost)
        tl.store(random_ptr + base + i, is_random != 0)
        seen = (own[:, None] >> bit[None, :]) & 1
        tl.store(out_mask_ptr + (base + i) * num_nodes + column, seen != 0, mask=column < num_nodes)
        # The parent's law, once its random child is in the tree; the new node's candidates.
        to = tl.where(side == 0, parent, i)
        to = (base + to) * width + rank
        tl.store(law_ptr + to, law, mask=inside & (side == 0) & (is_random != 0))
        words = token_ptr + (b * max_depth + at) * width + ((keys >> 16) & LOW)
        words = tl.load(words, mask=inside & (side == 1), other=0)
        words = tl.where(depth < deepest, words, token)
        tl.store(word_ptr + to, words, mask=(rank < width) & (side == 1))

    tl.store(out_child_ptr + base + node, child, mask=node < num_nodes)
    tl.store(out_sibling_ptr + base + node, sibling, mask=node < num_nodes)
    for c in range(width):
        at = (base + node) * width + c
        tl.store(law_ptr + at, 0.0, mask=(node < num_nodes) & (draws_one == 0))


def build_tree(
    lattice: Lattice, anchor: Tensor, num_nodes: int, max_children: int, draws: Draws
) -> Tree:
    check_sizes(lattice, num_nodes, max_children)
    batch, depth, width = lattice.tokens.shape
    out = empty_tree(batch, num_nodes, anchor.device)
    size = (batch, num_nodes, width)
    proposal = Proposal(
        torch.empty(size[:2], dtype=torch.bool, device=anchor.device),
        torch.empty(size, dtype=torch.int64, device=anchor.device),
        torch.empty(size, dtype=torch.float32, device=anchor.device),
    )
    if batch:
        options = (draws.top_k, draws.top_p, draws.min_p, draws.heat)
        shape = blocks(num_nodes, width)
        _drawn_tree[(batch,)](
            lattice.log_probs,
            *lattice.log_probs.stride(),
            lattice.tokens.contiguous(),
            anchor.contiguous(),
            draws.coins,
            *draws.coins.stride(),
            draws.fixed.contiguous().view(torch.uint8),
            *(None if x is None else x.contiguous() for x in options),
            *pointers(out),
            proposal.random.view(torch.uint8),
            *proposal[1:],
            num_nodes,
            depth,
            width,
            max_children,
            -math.log(FIXED_REACH / num_nodes),
            **shape,
            num_warps=max(1, min(16, shape["CANDIDATES"] ** 2 // 1024)),
        )
    return out._replace(proposal=proposal)
