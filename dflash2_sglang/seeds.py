"""Requests with a seed: each node gets the token that plain decoding draws there.

SGLang's seeded draw is a function of logits, seed and position. At each node of a tree it is asked for the
node's own position, and the walk then follows the drawn tokens as it follows the best ones of a greedy
request. The draws of different positions are independent and the tree knows none of them, so the answer
follows the target's distribution, and it is the answer of plain decoding with this seed.

Plain decoding heeds seeds only with --enable-deterministic-inference; here they are heeded always, except
for the copies of ``n`` above 1, which would all be the same. Whether a draw ranks the tokens first (which
changes what a seed means) depends on the request's own filters, never on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash2_sglang.penalties import to_device

UNSEEDED = 42  # SGLang's own, under deterministic inference


class Seeds(NamedTuple):
    """The sampled requests of a batch that have a seed.

    rows    places in the batch, ascending
    values  [R] int64 seeds
    ranked  for each whether its filters rank the tokens
    fixed   every other request of the batch is greedy
    """

    rows: list[int]
    values: Tensor
    ranked: list[bool]
    fixed: bool


def find(reqs: Sequence[Any], device: Any) -> Seeds | None:
    """None where no sampled request has a seed."""
    deterministic = _deterministic()
    found: list[tuple[int, int, bool]] = []
    sampled = 0
    for row, req in enumerate(reqs):
        params = req.sampling_params
        if params.top_k <= 1:
            continue
        sampled += 1
        seed = params.sampling_seed
        if seed is None or (params.n > 1 and not deterministic):
            if not deterministic:
                continue
            seed = UNSEEDED
        found.append((row, _signed(seed), _ranks(params)))
    if not found:
        return None
    rows, values, ranked = (list(column) for column in zip(*found, strict=True))
    return Seeds(rows, to_device(values, torch.int64, device), ranked, sampled == len(rows))


def draw(probs: Tensor, positions: Tensor, seeds: Seeds, info: Any) -> Tensor:
    """Tokens [R, N] int64 drawn from probs [B, N, V] at positions [B, N] for the R seeded requests.

    probs are those of SGLang's sampler: after temperature and softmax, before the filters.
    """
    from sglang.srt.layers.sampler import sampling_from_probs_torch

    nodes = probs.shape[1]
    out = torch.empty(len(seeds.rows), nodes, dtype=torch.int64, device=probs.device)
    for ranked in (False, True):
        chosen = [i for i, kind in enumerate(seeds.ranked) if kind == ranked]
        if not chosen:
            continue
        place = to_device(chosen, torch.int64, probs.device)
        rows = to_device([seeds.rows[i] for i in chosen], torch.int64, probs.device)
        part = probs.index_select(0, rows).flatten(0, 1)
        where = positions.index_select(0, rows).flatten()
        values = seeds.values.index_select(0, place).repeat_interleave(nodes)
        if ranked:
            tokens = _draw_ranked(part, values, where, rows.repeat_interleave(nodes), info)
        else:
            tokens = sampling_from_probs_torch(part, sampling_seed=values, positions=where)
        out.index_copy_(0, place, tokens.long().view(-1, nodes))
    return out


def at_nodes(logits: Tensor, positions: Tensor, seeds: Seeds, info: Any) -> Tensor:
    """Tokens [R, N] int64 drawn from logits [B, N, V] of trees; see ``draw``."""
    rows = to_device(seeds.rows, torch.int64, logits.device)
    scaled = logits.index_select(0, rows).div_(
        info.temperatures.index_select(0, rows).view(-1, 1, 1)
    )
    probs = torch.softmax(scaled, -1)
    local = seeds._replace(rows=list(range(len(seeds.rows))))
    return draw(probs, positions.index_select(0, rows), local, _Part(info, rows))


def redraw(tokens: Tensor, probs: Tensor, positions: Tensor, seeds: Seeds, info: Any) -> Tensor:
    """tokens [B] of SGLang's sampler, drawn from probs [B, V], with the seeded ones drawn as here."""
    drawn = draw(probs.unsqueeze(1), positions.unsqueeze(1), seeds, info)
    rows = to_device(seeds.rows, torch.int64, tokens.device)
    return tokens.index_copy(0, rows, drawn.squeeze(1).to(tokens.dtype))


class _Part:
    """The filters of some rows of a SamplingBatchInfo."""

    def __init__(self, info: Any, rows: Tensor) -> None:
        self.top_ks, self.top_ps, self.min_ps = (
            values.index_select(0, rows) for values in (info.top_ks, info.top_ps, info.min_ps)
        )


def _draw_ranked(
    probs: Tensor, seeds: Tensor, positions: Tensor, rows: Tensor, info: Any
) -> Tensor:
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    # SGLang's function takes no seeds with min-p. What min-p drops has the lowest ranks, so to drop it
    # first changes nothing for the ranks that top-k and top-p keep.
    min_p = info.min_ps.index_select(0, rows).unsqueeze(1)
    probs = torch.where(probs < probs.amax(-1, keepdim=True) * min_p, 0, probs)
    return top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        info.top_ks.index_select(0, rows),
        info.top_ps.index_select(0, rows),
        info.min_ps.index_select(0, rows),
        need_min_p_sampling=False,
        sampling_seed=seeds,
        positions=positions,
    )


def _ranks(params: Any) -> bool:
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    return params.top_k != TOP_K_ALL or params.top_p != 1.0 or params.min_p > 0


def _signed(seed: int) -> int:
    """The lowest 64 bits, as SGLang's int64 holds them."""
    return (int(seed) + 2**63) % 2**64 - 2**63


def _deterministic() -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)
