"""A request's sampling filters, applied to the target's logits after each node of its tree."""

from __future__ import annotations

import torch
from torch import Tensor


def filtered_probs(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    max_top_k: int | None = None,
) -> Tensor:
    """The distribution that plain decoding samples from, [B, N, V] float32.

    logits       [B, N, V]
    temperature  [B] or [B, 1], positive
    top_k        [B] int: so many tokens are kept; V or more keeps all
    top_p        [B]: a token is kept while those ranked above it hold at most this much
    min_p        [B]: a token below this share of the most probable one is dropped
    max_top_k    a bound on all of top_k, if the caller has one on the host: ranks no further

    The filters are those of SGLang's sampler: top-k and top-p are both measured on the whole
    distribution ("joint"). Of tokens that tie at a rank limit SGLang keeps some; here it is those with
    the lowest ids, so that what a request may draw does not depend on what else is in its batch.
    """
    probs = (logits.float() / temperature.view(-1, 1, 1)).softmax(-1)
    if top_k is None and top_p is None and min_p is None:
        return probs
    width = probs.shape[-1]
    if max_top_k is not None and max_top_k < width:
        ranked, index = _first_of_equals(probs, max_top_k)
    else:
        ranked, index = probs.sort(dim=-1, descending=True, stable=True)
    kept = _kept(ranked, top_k, top_p, min_p)
    ranked = ranked.where(kept, 0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, index, ranked)


def _first_of_equals(probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of probs [..., V] float32, not negative, and their places; ties by place."""
    # Bits of such floats, read as an integer, have their order; below them, the place from behind.
    low = (1 << 32) - 1
    behind = low - torch.arange(probs.shape[-1], device=probs.device)
    key = probs.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(behind)
    index = low - (key.topk(k, dim=-1).values & low)
    return probs.gather(-1, index), index


def filter_ranked(
    log_probs: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    sharpness: Tensor | None = None,
) -> Tensor:
    """A drafter's guess at a filtered distribution of which it sees the K best tokens only.

    log_probs  [B, M, K] best first, of the whole vocabulary; returned likewise, -inf if dropped
    sharpness  [B], how much hotter log_probs are than the distribution that is filtered

    If a candidate is dropped, so is all that ranks below it, and the kept ones hold everything. If
    none is, they hold their share of what top-p keeps. So a request whose filters keep everything
    (top_k K or more, top_p 1, min_p 0) gets its rows back to the bit.
    """
    probs = log_probs.exp()
    # Rounding may put what ranks above a candidate at more than 1.
    limit = None if top_p is None else top_p.masked_fill(top_p >= 1, torch.inf)
    kept = _kept(_sharpened(log_probs, probs, sharpness), top_k, limit, min_p)
    held = probs.where(kept, 0).sum(-1, keepdim=True)
    whole = torch.ones_like(held)
    if top_p is not None:
        share = top_p.view(-1, 1, 1)
        whole = torch.where(share < 1, held.maximum(share), whole)
    total = torch.where(kept.all(-1, keepdim=True), whole, held)
    total = total.masked_fill(total == 0, 1)  # of impossible candidates
    return (log_probs - total.log()).masked_fill(~kept, -torch.inf).clamp_(max=0)


def _sharpened(log_probs: Tensor, probs: Tensor, sharpness: Tensor | None) -> Tensor:
    """The probabilities [B, M, K] at the request's own temperature, those unseen taken as one."""
    power = 1.0 if sharpness is None else sharpness.view(-1, 1, 1)
    # All relative to the best, or a high power would make everything 0.
    best = log_probs[..., :1].clamp(min=-1e30)
    sharp = ((log_probs - best) * power).exp()
    missing = (1 - probs.sum(-1, keepdim=True)).clamp(min=0)
    missing = ((missing.log() - best) * power).exp().clamp(max=1e30)
    return sharp / (sharp.sum(-1, keepdim=True) + missing)


def _kept(
    ranked: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Which of the probabilities [B, M, K], best first, the filters keep."""
    kept = torch.ones_like(ranked, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(ranked.shape[-1], device=ranked.device)
        kept &= rank < top_k.view(-1, 1, 1)
    if top_p is not None:
        kept &= ranked.cumsum(-1) - ranked <= top_p.view(-1, 1, 1)
    if min_p is not None:
        kept &= ranked >= ranked[..., :1] * min_p.view(-1, 1, 1)
    return kept
