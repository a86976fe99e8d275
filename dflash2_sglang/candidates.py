"""The K best tokens of each block position, from the target's own head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather

from dflash2_sglang.head import TargetHead

# A two-stage top-k reads the logits once, vectorised, and then sorts K blocks of this size.
BLOCK = 64


class Candidates(NamedTuple):
    """tokens [R, K] int64 global ids, best first; logits [R, K] float32; log_norm [R] float32,
    the logsumexp over the whole vocabulary of logits / temperature."""

    tokens: torch.Tensor
    logits: torch.Tensor
    log_norm: torch.Tensor


class CandidateHead:
    """Under tensor parallelism each rank ranks its own shard first."""

    def __init__(self, head: TargetHead, top_k: int, transform: Any = None) -> None:
        self.head, self.top_k, self.transform = head, top_k, transform

    def __call__(self, hidden: torch.Tensor, temperature: torch.Tensor | None) -> Candidates:
        """hidden [R, H]; temperature [R, 1] float32 or None for 1."""
        logits = self._logits(hidden)
        width = self.head.width
        values, index = top_k(logits, min(self.top_k, width))
        if width < self.top_k:  # the last ranks' parts of a vocabulary may be all padding
            missing = (0, self.top_k - width)
            values, index = F.pad(values, missing, value=-torch.inf), F.pad(index, missing)
        norm = logits if temperature is None else logits / temperature
        log_norm = norm.logsumexp(-1)
        tokens = index + self.head.first
        if self.head.ranks > 1:
            values, tokens, log_norm = self._gather(values, tokens, log_norm)
        return Candidates(tokens, values, log_norm)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's part of the real vocabulary, [R, width] float32."""
        logits = self.head(hidden).float()
        return logits if self.transform is None else self.transform(logits)

    def _gather(
        self, values: torch.Tensor, tokens: torch.Tensor, log_norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = tensor_model_parallel_all_gather(values, dim=-1)
        tokens = tensor_model_parallel_all_gather(tokens, dim=-1)
        log_norm = tensor_model_parallel_all_gather(log_norm.unsqueeze(-1), dim=-1).logsumexp(-1)
        values, order = values.sort(dim=-1, descending=True, stable=True)
        return values[:, : self.top_k], tokens.gather(1, order)[:, : self.top_k], log_norm


def first_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the largest logit of each row of [R, V], the first of equals; [R] int64.

    On a CPU in two stages, five times as fast as torch's argmax: the best block, then its best token.
    """
    rows, width = logits.shape
    if not logits.is_cpu or width % BLOCK:
        return logits.argmax(-1)
    blocks = logits.unflatten(-1, (-1, BLOCK))
    best = blocks.amax(-1).argmax(-1)
    return best * BLOCK + blocks[torch.arange(rows), best].argmax(-1)


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of logits [R, V], best first.

    On a CPU in two stages: the k best tokens lie in the k blocks with the best maxima.
    """
    if logits.is_cuda:
        return radix_top_k(logits, k)
    rows, width = logits.shape
    whole = width // BLOCK
    if whole < 2 * k:
        return torch.topk(logits, k, dim=-1)
    blocks = logits[:, : whole * BLOCK].unflatten(-1, (whole, BLOCK))
    best = blocks.amax(-1).topk(k, dim=-1).indices
    index = (best * BLOCK).unsqueeze(-1) + torch.arange(BLOCK)
    index = index.flatten(1)
    if width > whole * BLOCK:
        tail = torch.arange(whole * BLOCK, width).expand(rows, -1)
        index = torch.cat((index, tail), -1)
    values, order = logits.gather(1, index).topk(k, dim=-1)
    return values, index.gather(1, order)


def radix_top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """flashinfer's: one read of the logits, equal values in the same order every time.

    It refuses rows that do not follow one another, as those of a float32 head without its padding.
    """
    import flashinfer

    values, index = flashinfer.top_k(logits.contiguous(), k, sorted=True, deterministic=True)
    return values, index.long()
