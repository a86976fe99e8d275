"""The best tree of N nodes in one launch a batch: tokens, parents, depths, mask and links.

Best first, one program a request. Every node of the tree so far offers its best child that is not in
the tree yet, and the best offer becomes the next node. Offers are compared as one integer that holds
what `tree.build.build_tree` orders by: log-probability, depth, parent. (The rank among siblings is
settled before, as a node has one offer; and of nodes of one depth, the earlier one is the earlier in
its level.) So trees equal those of torch, ties included.

Costs, -log p >= +0, take the place of log-probabilities: their bits are ordered like themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash2_sglang.tree.build import Tree, check_sizes
from dflash2_sglang.tree.lattice import Lattice


@triton.jit
def row_keys(row_ptr, stride, width, valid, CANDIDATES: tl.constexpr, NONE: tl.constexpr):
    """Cost and place of each candidate of a row, ordered as `search.ranked_rows` does.

    row_ptr and valid are of one row, or [R, 1].
    """
    c = tl.arange(0, CANDIDATES)
    inside = (c < width) & valid
    x = tl.load(row_ptr + c * stride, mask=inside, other=0.0)
    x = tl.where(x != x, -float("inf"), x)
    cost = 0.0 - tl.where(x > 0, 0.0, x)
    key = (cost.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (c << 16).to(tl.int64)
    return tl.where(inside, key, NONE)


@triton.jit
def _offer(cost, row_key, depth, parent, NONE: tl.constexpr):
    """What a node at this cost offers: its child of this row key, which has this depth."""
    step = (row_key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    bits = (cost + step).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(row_key == NONE, NONE, (bits << 32) | (depth << 16) | parent)


@triton.jit
def _tree(
    log_prob_ptr,
    stride_b,
    stride_t,
    stride_a,
    stride_c,
    token_ptr,
    anchor_ptr,
    out_token_ptr,
    out_parent_ptr,
    out_depth_ptr,
    out_log_prob_ptr,
    out_mask_ptr,
    out_child_ptr,
    out_sibling_ptr,
    num_nodes,
    max_depth,
    width,
    max_children,
    NODES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WORDS: tl.constexpr,
):
    NONE: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    LOW: tl.constexpr = 0xFFFF
    b = tl.program_id(0).to(tl.int64)
    rows = log_prob_ptr + b * stride_b
    node = tl.arange(0, NODES)
    word = tl.arange(0, WORDS)
    bit = tl.arange(0, 64)
    column = word[:, None] * 64 + bit[None, :]

    # Of every node:
    first = tl.min(row_keys(rows, stride_c, width, True, CANDIDATES, NONE), 0)
    root = node == 0
    offer = tl.where(root, _offer(0.0, first, 1, 0, NONE), NONE)
    # the row key of the offered child; in its low bits, the last child that is in the tree
    tail = tl.where(root, first, 0)
    # its cost, how many children it has in the tree, its place among the candidates
    state = tl.zeros((NODES,), tl.int64)
    # itself and its ancestors, 64 to a word
    line = tl.where(root[:, None] & (word == 0)[None, :], 1, 0).to(tl.int64)
    child = tl.full((NODES,), -1, tl.int64)
    sibling = tl.full((NODES,), -1, tl.int64)

    base = b * num_nodes
    tl.store(out_token_ptr + base, tl.load(anchor_ptr + b))
    tl.store(out_parent_ptr + base, -1)
    tl.store(out_depth_ptr + base, 0)
    tl.store(out_log_prob_ptr + base, 0.0)
    tl.store(out_mask_ptr + base * num_nodes + column, column == 0, mask=column < num_nodes)

    for i in range(1, num_nodes):
        best = tl.min(offer, 0)
        parent = best & LOW
        depth = (best >> 16) & LOW
        cost = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        is_parent = node == parent
        is_new = node == i
        chosen = tl.sum(tl.where(is_parent, tail, 0), 0)
        above = tl.sum(tl.where(is_parent, state, 0), 0)
        ancestors = tl.sum(tl.where(is_parent[:, None], line, 0), 0)
        elder = chosen & LOW
        candidate = (chosen >> 16) & LOW
        chosen = chosen - elder
        parent_cost = (above >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        count = ((above >> 16) & LOW) + 1

        own_row = rows + (depth - 1) * stride_t + (above & LOW) * stride_a
        own = row_keys(own_row, stride_c, width, count < max_children, CANDIDATES, NONE)
        next_row = rows + depth * stride_t + candidate * stride_a
        below = row_keys(next_row, stride_c, width, depth < max_depth, CANDIDATES, NONE)
        second = tl.min(tl.where(own > chosen, own, NONE), 0)
        first = tl.min(below, 0)
        offer = tl.where(is_parent, _offer(parent_cost, second, depth, parent, NONE), offer)
        offer = tl.where(is_new, _offer(cost, first, depth + 1, i, NONE), offer)
        # A node without another child is not chosen again, so its low bits may hold anything.
        tail = tl.where(is_parent, (second - (second & LOW)) | i, tail)
        tail = tl.where(is_new, first - (first & LOW), tail)
        state = tl.where(is_parent, above + 65536, state)
        state = tl.where(is_new, ((best >> 32) << 32) | candidate, state)
        child = tl.where(is_parent & (elder == 0), i, child)
        sibling = tl.where((node == elder) & (elder > 0), i, sibling)
        mine = ancestors | tl.where(word == i // 64, tl.full((WORDS,), 1, tl.int64) << (i % 64), 0)
        line = tl.where(is_new[:, None], mine[None, :], line)

        token = tl.load(token_ptr + (b * max_depth + depth - 1) * width + candidate)
        tl.store(out_token_ptr + base + i, token)
        tl.store(out_parent_ptr + base + i, parent)
        tl.store(out_depth_ptr + base + i, depth)
        tl.store(out_log_prob_ptr + base + i, 0.0 - cost)
        seen = (mine[:, None] >> bit[None, :]) & 1
        tl.store(out_mask_ptr + (base + i) * num_nodes + column, seen != 0, mask=column < num_nodes)

    tl.store(out_child_ptr + base + node, child, mask=node < num_nodes)
    tl.store(out_sibling_ptr + base + node, sibling, mask=node < num_nodes)


def empty_tree(batch: int, num_nodes: int, device: torch.device) -> Tree:
    def nodes() -> Tensor:
        return torch.empty(batch, num_nodes, dtype=torch.int64, device=device)

    log_prob = torch.empty(batch, num_nodes, dtype=torch.float32, device=device)
    mask = torch.empty(batch, num_nodes, num_nodes, dtype=torch.bool, device=device)
    return Tree(nodes(), nodes(), nodes(), log_prob, mask, nodes(), nodes())


def pointers(tree: Tree) -> tuple[Tensor, ...]:
    return *tree[:4], tree.mask.view(torch.uint8), tree.first_child, tree.next_sibling


def blocks(num_nodes: int, width: int) -> dict[str, int]:
    return {
        "NODES": triton.next_power_of_2(num_nodes),
        "CANDIDATES": triton.next_power_of_2(width),
        "WORDS": triton.next_power_of_2(triton.cdiv(num_nodes, 64)),
    }


def build_tree(lattice: Lattice, anchor: Tensor, num_nodes: int, max_children: int) -> Tree:
    check_sizes(lattice, num_nodes, max_children)
    batch, depth, width = lattice.tokens.shape
    out = empty_tree(batch, num_nodes, anchor.device)
    if not batch:
        return out
    _tree[(batch,)](
        lattice.log_probs,
        *lattice.log_probs.stride(),
        lattice.tokens.contiguous(),
        anchor.contiguous(),
        *pointers(out),
        num_nodes,
        depth,
        width,
        max_children,
        **blocks(num_nodes, width),
        num_warps=1,  # each step reduces over all nodes and waits for it
    )
    return out
