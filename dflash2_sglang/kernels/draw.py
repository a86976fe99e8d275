"""The token after the path: a draw from what the target's row holds beyond the children.

The row is read once to sum its blocks, and the block in which the coin lies once more; nothing of the
size of the vocabulary is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash2_sglang.tree.draw import Proposal

BLOCK = 2048  # of the vocabulary, summed by one program
FAR = 2**31 - 1


@triton.jit
def _residual(
    row_ptr,
    start,
    vocab,
    base,
    last,
    token_ptr,
    parent_ptr,
    law_token_ptr,
    law_prob_ptr,
    num_nodes,
    candidates,
    RANDOM: tl.constexpr,
    NODES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of the target's row, and what is left of it, in its own precision or float32."""
    x = start + tl.arange(0, BLOCK)
    p = tl.load(row_ptr + x, mask=x < vocab, other=0.0)
    if p.dtype != tl.float64:
        p = p.to(tl.float32)
    left = p
    # Few blocks hold any of the tokens that lose something, and the others skip the search.
    if RANDOM:
        k = tl.arange(0, CANDIDATES)
        at = (base + last) * candidates
        word = tl.load(law_token_ptr + at + k, mask=k < candidates, other=-1)
        here = (word >= start) & (word < start + BLOCK)
        if tl.sum(here.to(tl.int32), 0) > 0:
            for j in range(candidates):
                token = tl.load(law_token_ptr + at + j)
                law = tl.load(law_prob_ptr + at + j).to(p.dtype)
                left = tl.where(x == token, p - tl.minimum(p, law), left)
    node = tl.arange(0, NODES)
    token = tl.load(token_ptr + base + node, mask=node < num_nodes, other=-1)
    parent = tl.load(parent_ptr + base + node, mask=node < num_nodes, other=-2)
    here = (parent == last) & (token >= start) & (token < start + BLOCK)
    if tl.sum(here.to(tl.int32), 0) > 0:
        for j in range(num_nodes):
            is_child = tl.load(parent_ptr + base + j) == last
            left = tl.where((x == tl.load(token_ptr + base + j)) & is_child, 0.0, left)
    return x, p, left


@triton.jit
def _sum_blocks(
    prob_ptr,
    last_ptr,
    is_greedy_ptr,
    token_ptr,
    parent_ptr,
    law_token_ptr,
    law_prob_ptr,
    sum_ptr,
    top_ptr,
    argtop_ptr,
    num_nodes,
    vocab,
    candidates,
    MIXED: tl.constexpr,
    RANDOM: tl.constexpr,
    NODES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    sampled = True
    if MIXED:
        sampled = tl.load(is_greedy_ptr + b) == 0
    if sampled:
        last = tl.load(last_ptr + b)
        base = b * num_nodes
        x, p, left = _residual(
            prob_ptr + (base + last) * vocab,
            tl.program_id(1) * BLOCK,
            vocab,
            base,
            last,
            token_ptr,
            parent_ptr,
            law_token_ptr,
            law_prob_ptr,
            num_nodes,
            candidates,
            RANDOM,
            NODES,
            CANDIDATES,
            BLOCK,
        )
        top = tl.max(p, 0)
        at = b * tl.num_programs(1) + tl.program_id(1)
        tl.store(sum_ptr + at, tl.sum(left.to(tl.float64), 0))
        tl.store(top_ptr + at, top)
        tl.store(argtop_ptr + at, tl.min(tl.where((p == top) & (x < vocab), x, vocab - 1), 0))


@triton.jit
def _pick(
    prob_ptr,
    last_ptr,
    is_greedy_ptr,
    token_ptr,
    parent_ptr,
    law_token_ptr,
    law_prob_ptr,
    sum_ptr,
    top_ptr,
    argtop_ptr,
    coin_ptr,
    coin_stride,
    out_ptr,
    num_nodes,
    vocab,
    candidates,
    num_blocks,
    MIXED: tl.constexpr,
    RANDOM: tl.constexpr,
    NODES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    FAR: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    sampled = True
    if MIXED:
        sampled = tl.load(is_greedy_ptr + b) == 0
    if sampled:
        i = tl.arange(0, BLOCKS)
        inside = i < num_blocks
        at = b * num_blocks + i
        end = tl.cumsum(tl.load(sum_ptr + at, mask=inside, other=0.0), 0)
        total = tl.sum(tl.where(i == num_blocks - 1, end, 0.0), 0)
        threshold = tl.load(coin_ptr + b * coin_stride).to(tl.float64) * total
        block = tl.min(tl.where(inside & (end > threshold), i, num_blocks - 1), 0)
        before = tl.sum(tl.where(i == block - 1, end, 0.0), 0)

        last = tl.load(last_ptr + b)
        base = b * num_nodes
        x, _, left = _residual(
            prob_ptr + (base + last) * vocab,
            block * BLOCK,
            vocab,
            base,
            last,
            token_ptr,
            parent_ptr,
            law_token_ptr,
            law_prob_ptr,
            num_nodes,
            candidates,
            RANDOM,
            NODES,
            CANDIDATES,
            BLOCK,
        )
        reach = before + tl.cumsum(left.to(tl.float64), 0)
        drawn = tl.min(tl.where((reach > threshold) & (left > 0), x, FAR), 0)
        # The block's sum may round above its last reach; the coin then lies at its very end.
        drawn = tl.where(drawn == FAR, tl.max(tl.where(left > 0, x, -1), 0), drawn)

        top = tl.load(top_ptr + at, mask=inside, other=-1.0)
        where = tl.load(argtop_ptr + at, mask=inside, other=0)
        likeliest = tl.min(tl.where(inside & (top == tl.max(top, 0)), where, vocab - 1), 0)
        drawn = tl.where((drawn < 0) | (total <= 0), likeliest, drawn)
        tl.store(out_ptr + b, drawn.to(tl.int64))


def final_draw(
    tokens: Tensor,
    parent: Tensor,
    last: Tensor | None,
    target_probs: Tensor,
    final_coins: Tensor,
    proposal: Proposal | None,
    is_greedy: Tensor | None,
    out: Tensor,
) -> None:
    """`tree.accept.final_draw`, written to out [B] where not is_greedy ([B] uint8 or None)."""
    batch, nodes, vocab = target_probs.shape
    if not batch:
        return
    blocks = triton.cdiv(vocab, BLOCK)
    kind = torch.float64 if target_probs.dtype == torch.float64 else torch.float32
    sums = torch.empty(batch, blocks, dtype=torch.float64, device=out.device)
    top = torch.empty(batch, blocks, dtype=kind, device=out.device)
    where = torch.empty(batch, blocks, dtype=torch.int32, device=out.device)
    law = (None, None) if proposal is None else (proposal.tokens, proposal.probs)
    width = 1 if proposal is None else proposal.tokens.shape[2]
    given = (target_probs, last, is_greedy, tokens, parent, *law, sums, top, where)
    shape = {
        "MIXED": is_greedy is not None,
        "RANDOM": proposal is not None,
        "NODES": triton.next_power_of_2(nodes),
        "CANDIDATES": triton.next_power_of_2(width),
        "BLOCK": BLOCK,
    }
    _sum_blocks[(batch, blocks)](*given, nodes, vocab, width, **shape)
    _pick[(batch,)](
        *given,
        final_coins,
        final_coins.stride(0),
        out,
        nodes,
        vocab,
        width,
        blocks,
        BLOCKS=triton.next_power_of_2(blocks),
        FAR=FAR,
        **shape,
        num_warps=8,
    )
