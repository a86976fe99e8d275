"""The lattice in one launch: selector scores, softmax and candidate mass of a position at a time.

The rows of the codebooks are gathered by the program that needs them, and the products over the rank
are summed as they are formed: nothing of the size of [B, D, K, K, rank] or [B, D, K, rank] exists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash2_sglang.tree.lattice import Lattice

RANKS = 64  # of the selector's rank, at a time


@triton.jit
def _lattice(
    token_ptr,
    unary_ptr,
    norm_ptr,
    heat_ptr,
    pair_ptr,
    anchor_ptr,
    hidden_ptr,
    predecessor_ptr,
    successor_ptr,
    out_ptr,
    depth,
    width,
    rank,
    HEAT: tl.constexpr,
    PAIR: tl.constexpr,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)  # b * D + t
    batch = place // depth
    a = tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    inside = c < width
    heat = 1.0
    if HEAT:
        heat = tl.load(heat_ptr + batch)
    unary = tl.load(unary_ptr + place * width + c, mask=inside, other=-float("inf"))
    unary = unary.to(tl.float32) / heat
    scores = tl.zeros((ROWS, WIDTH), tl.float32)
    both = (a[:, None] < width) & inside[None, :]
    if CODES:
        after = tl.load(token_ptr + place * width + c, mask=inside, other=0)
        earlier = place % depth > 0  # the anchor precedes position 0
        before = tl.load(token_ptr + (place - 1) * width + a, mask=(a < width) & earlier, other=0)
        before = tl.where(earlier, before, tl.load(anchor_ptr + batch))
        for start in range(0, rank, RANKS):
            r = start + tl.arange(0, RANKS)
            some = r < rank
            hidden = tl.load(hidden_ptr + place * rank + r, mask=some, other=0.0).to(tl.float32)
            one = predecessor_ptr + before[:, None] * rank + r[None, :]
            left = tl.load(one, mask=some[None, :], other=0.0).to(tl.float32) * hidden[None, :]
            two = successor_ptr + after[None, :] * rank + r[:, None]
            right = tl.load(two, mask=some[:, None], other=0.0).to(tl.float32)
            scores = tl.dot(left, right, scores, input_precision="ieee")
    if PAIR:
        at = pair_ptr + (place * width + a[:, None]) * width + c[None, :]
        scores = tl.load(at, mask=both, other=0.0).to(tl.float32)
    scores = scores / heat + unary[None, :]

    # The mass of the candidates in the whole vocabulary; rounding must not lift it above 1.
    top = tl.max(unary, 0)
    top = tl.where((top == float("inf")) | (top == -float("inf")), 0.0, top)
    mass = tl.log(tl.sum(tl.exp(unary - top), 0)) + top
    mass = mass - tl.load(norm_ptr + place).to(tl.float32)
    mass = tl.where(mass > 0, 0.0, mass)  # unlike a minimum, keeps a NaN

    shifted = scores - tl.max(scores, 1)[:, None]
    total = tl.sum(tl.where(inside[None, :], tl.exp(shifted), 0.0), 1)
    out = shifted - tl.log(total)[:, None] + mass
    # Without scores all rows are one, of which the caller shows K views.
    rows = width if CODES or PAIR else 1
    at = out_ptr + (place * rows + a[:, None]) * width + c[None, :]
    tl.store(at, out, mask=inside[None, :] & (a[:, None] < rows))


def build_lattice(
    tokens: Tensor,
    unary: Tensor,
    log_norm: Tensor,
    temperature: Tensor | None = None,
    pair: Tensor | None = None,
) -> Lattice:
    return _launch(tokens, unary, log_norm, temperature, pair, None)


def selector_lattice(
    tokens: Tensor,
    unary: Tensor,
    log_norm: Tensor,
    temperature: Tensor | None,
    anchor: Tensor,
    hidden_codes: Tensor,
    predecessors: Tensor,
    successors: Tensor,
) -> Lattice:
    codes = (anchor, hidden_codes, predecessors, successors)
    return _launch(tokens, unary, log_norm, temperature, None, codes)


def _launch(
    tokens: Tensor,
    unary: Tensor,
    log_norm: Tensor,
    temperature: Tensor | None,
    pair: Tensor | None,
    codes: tuple[Tensor, ...] | None,
) -> Lattice:
    batch, depth, width = tokens.shape
    rows = 1 if pair is None and codes is None else width
    out = torch.empty(batch, depth, rows, width, dtype=torch.float32, device=tokens.device)
    full = out.expand(batch, depth, width, width)
    if not out.numel():
        return Lattice(tokens, full)
    heat = None if temperature is None else temperature.float().contiguous()
    given = [None] * 4 if codes is None else [code.contiguous() for code in codes]
    columns = triton.next_power_of_2(width)
    if codes is not None:
        columns = max(columns, 16)  # the least that tl.dot takes
    _lattice[(batch * depth,)](
        tokens.contiguous(),
        unary.contiguous(),
        log_norm.contiguous(),
        heat,
        None if pair is None else pair.contiguous(),
        *given,
        out,
        depth,
        width,
        0 if codes is None else codes[2].shape[1],
        HEAT=heat is not None,
        PAIR=pair is not None,
        CODES=codes is not None,
        ROWS=1 if rows == 1 else columns,
        WIDTH=columns,
        RANKS=RANKS,
        num_warps=4 if columns > 32 else 2,
    )
    return Lattice(tokens, full)
