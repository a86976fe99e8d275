"""The children of nodes whose rows of candidates are ordered, for `kernels.drawn_tree`: `draw.spawn`.

Costs take the place of log-probabilities. R rows at once, [R, K] in all; keys are those of
`kernels.tree.row_keys`, and what is not a candidate costs infinity.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from dflash2_sglang.tree.draw import RANDOM_WEIGHT, SPARE_WEIGHT

RANDOM_COST = tl.constexpr(-math.log(RANDOM_WEIGHT))
SPARE_COST = tl.constexpr(-math.log(SPARE_WEIGHT))


@triton.jit
def in_order(keys, rank):
    """Rows of distinct keys, smallest first. By comparing all pairs: rows are short."""
    place = tl.sum((keys[:, None, :] < keys[:, :, None]).to(tl.int32), 2)
    return tl.max(tl.where(place[:, :, None] == rank[:, None, :], keys[:, :, None], 0), 1)


@triton.jit
def _filter(step, rank, inside, power, top_k, top_p, min_p):
    """`filters.filter_ranked`, of costs."""
    prob = tl.exp(0.0 - step)
    best = tl.min(step, 1)[:, None]
    best = tl.where(best == float("inf"), 0.0, best)
    sharp = tl.exp((best - step) * power)
    missing = tl.maximum(1.0 - tl.sum(prob, 1)[:, None], 0.0)
    total = tl.sum(sharp, 1)[:, None] + tl.exp((tl.log(missing) + best) * power)
    kept = inside & (rank < top_k) & (sharp >= min_p)
    limit = tl.where(top_p < 1, top_p * total, float("inf"))
    kept = kept & (tl.cumsum(sharp, 1) - sharp <= limit)
    held = tl.sum(tl.where(kept, prob, 0.0), 1)[:, None]
    whole = tl.where(top_p < 1, tl.maximum(held, top_p), 1.0)
    dropped = tl.max((inside & (kept == 0)).to(tl.int32), 1)[:, None]
    mass = tl.where(dropped > 0, held, whole)
    # A row that is kept whole is not changed by a bit.
    shift = tl.where((mass == 1) | (mass == 0), 0.0, tl.log(mass))
    return tl.where(kept, tl.maximum(step + shift, 0.0), float("inf"))


@triton.jit
def _draw(law, coin, rank, CANDIDATES: tl.constexpr):
    """`draw.draw`."""
    end = tl.cumsum(law, 1)
    whole = tl.sum(tl.where(rank == CANDIDATES - 1, end, 0.0), 1)[:, None]
    drawn = tl.sum((end <= coin * whole).to(tl.int32), 1)
    return tl.minimum(drawn, tl.max(tl.where(law > 0, rank, 0), 1))[:, None]


@triton.jit
def children(
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
    FILTERS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    NONE: tl.constexpr,
):
    """`draw.spawn`: the children as integers that have their order, by rank; and the law.

    From the high bits: 32 of the cost of the path, 13 of the column, 9 of the candidate, 1 of whether it
    is random, 9 that are free.
    """
    step = (keys >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    step = tl.where(inside, step, float("inf"))
    if FILTERS:
        step = tl.where(fixed, step, _filter(step, rank, inside, power, top_k, top_p, min_p))
    count = tl.sum((reach + step <= likely).to(tl.int32), 1)[:, None]
    count = tl.minimum(count, max_children - 1)
    others = inside & (rank >= count)
    least = tl.min(tl.where(others, step, float("inf")), 1)[:, None]
    hopeless = least == float("inf")
    least = tl.where(hopeless, 0.0, least)
    past = tl.where(others, least - step, -float("inf"))
    mass = tl.maximum(least - tl.log(tl.sum(tl.exp(past), 1)[:, None]), 0.0)
    own = tl.exp(past * power)
    whole = tl.where(hopeless, 1.0, tl.sum(own, 1)[:, None])
    law = tl.where(hopeless, tl.where(rank == count, 1.0, 0.0), own / whole)
    drawn = _draw(law, coin, rank, CANDIDATES)

    count = tl.where(fixed, max_children, count)
    is_drawn = (rank == drawn) & (rank >= count)
    spare = tl.where(rank < drawn, rank + 1, rank)
    column = tl.where(rank < count, rank, tl.where(is_drawn, count, spare))
    heaviest = mass + RANDOM_COST
    weight = tl.where(is_drawn, heaviest, tl.maximum(step + SPARE_COST, heaviest))
    cost = reach + tl.where(rank < count, step, weight)
    bits = cost.to(tl.int32, bitcast=True).to(tl.int64)
    child = (bits << 32) | (column.to(tl.int64) << 19)
    child = child | (((keys >> 16) & 511) << 10) | (is_drawn.to(tl.int64) << 9)
    return tl.where(inside & (column < max_children), child, NONE), law
