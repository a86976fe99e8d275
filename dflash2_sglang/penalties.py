"""Repetition, frequency and presence penalties and ``min_new_tokens``, exact at each node of a tree.

SGLang's own penalizers count what the scheduler has processed: that lags behind the rounds and knows
nothing of a tree. So the counts are kept here, on the device, by request slot. They hold every committed
token of an answer, the anchor included; at a node, the tokens on its own path are added to them.

The arithmetic is SGLang's, operation by operation: a token's frequency penalty is a repeated float32
addition, all additive penalties are summed before they meet the logit, the repetition penalty comes after.
S slots, B requests, N nodes, V words, D most nodes on a path below the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
DTYPES = {float: torch.float32, int: torch.int64}


def is_penalised(params: Any) -> bool:
    return any(getattr(params, name) != value for name, value in NEUTRAL.items())


class _Rows(NamedTuple):
    """What is kept of the requests of one batch.

    frequency   [B, V]  float32  frequency penalty, accumulated over the answer
    seen        [B, V]  bool     the answer holds the token
    length      [B]     int64    tokens of the answer
    each, presence, repetition [B, 1] float32 and minimum [B] int64 are the requests' parameters
    """

    frequency: Tensor
    seen: Tensor
    length: Tensor
    each: Tensor
    presence: Tensor
    repetition: Tensor
    minimum: Tensor

    def additive(self) -> Tensor:
        return (0 - self.frequency).sub_(torch.where(self.seen, self.presence, 0))

    def scaling(self) -> Tensor:
        return torch.where(self.seen, self.repetition, 1)


class Penalties:
    """The state of all slots, made when the first penalised request arrives.

    Where a method takes ``info``, a forward's SamplingBatchInfo, this batch has a penalised request
    (``applies``). SGLang's penalties in it count one token a round: they only tell whether repetition
    penalties are in use, and which tokens ``min_new_tokens`` forbids.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.vocab = 0
        self._used: set[int] = set()  # slots whose parameters are not neutral
        self._minimums: set[int] = set()  # of these, the ones with min_new_tokens

    @staticmethod
    def applies(info: Any) -> bool:
        return info.acc_additive_penalties is not None

    def reset(self, reqs: Sequence[Any], slots: Sequence[int], vocab: int, capacity: int) -> None:
        """Before a prefill: the slots hold these requests from now on, with what they have answered.

        The server has ``capacity`` slots, numbered from 0, and a vocabulary of ``vocab`` words.
        A request that comes back after a retraction has an answer already; one whose prompt comes in
        chunks is reset with each chunk, and so loses the token that was sampled after it.
        """
        rows = [
            (slot, req)
            for slot, req in zip(slots, reqs, strict=True)
            if slot in self._used or is_penalised(req.sampling_params)
        ]
        if not rows:
            return
        if not self.vocab:
            self._allocate(vocab, capacity)
        for slot, req in rows:
            self._note(slot, req.sampling_params)
        index = self._tensor([slot for slot, _ in rows], torch.int64)
        self.frequency[index] = 0
        self.seen[index] = False
        self.length[index] = self._tensor([len(req.output_ids) for _, req in rows], torch.int64)
        for name, tensor in self.parameters.items():
            values = [getattr(req.sampling_params, name) for _, req in rows]
            tensor[index] = self._tensor(values, tensor.dtype)
        owners = [slot for slot, req in rows for _ in req.output_ids]
        if owners:
            tokens = [token for _, req in rows for token in req.output_ids]
            self._count(self._tensor(owners, torch.int64), self._tensor(tokens, torch.int64))

    def add(self, slots: Tensor, tokens: Tensor, lengths: Tensor | None = None) -> None:
        """Count committed tokens [B, P] of the requests at slots [B]; of each row the first lengths [B]."""
        if lengths is None:
            lengths = torch.full_like(slots, tokens.shape[1])
        place = torch.arange(tokens.shape[1], device=tokens.device)
        tokens = torch.where(place < lengths.unsqueeze(1), tokens.long(), self.vocab)
        self._count(slots.unsqueeze(1).expand_as(tokens).flatten(), tokens.flatten())
        self.length[slots] += lengths

    def before_prefill(self, info: Any, slots: Tensor) -> None:
        """SGLang's sampler takes the penalties of the first token from here, not from its own counts."""
        rows = self._rows(slots)
        short = (rows.length < rows.minimum).unsqueeze(1)
        forbidden = short & _forbidden(info)
        info.acc_additive_penalties = rows.additive().masked_fill_(forbidden, -torch.inf)
        if info.acc_scaling_penalties is not None:
            info.acc_scaling_penalties = rows.scaling()

    def apply(self, logits: Tensor, tree: Any, max_depth: int, info: Any, slots: Tensor) -> None:
        """Penalise logits [B, N, V] of a tree in place, each node after its own path.

        First every node by what the answer holds at the root, which broadcasts; then the tokens of its
        path, D at most, once more from their untouched logits.
        """
        rows = self._rows(slots)
        tokens = path_tokens(tree, max_depth)
        own = logits.flatten(0, 1).gather(1, tokens.flatten(0, 1)).view(tokens.shape)
        count = self._on_path(tokens, tree.depth)
        scale = info.acc_scaling_penalties is not None
        _penalise(logits, rows.additive().unsqueeze(1), rows.scaling().unsqueeze(1), scale)
        _penalise(own, *self._corrected(rows, tokens, count), scale)
        logits.scatter_(2, tokens, own)
        if self._minimums:
            short = rows.length.unsqueeze(1) + tree.depth < rows.minimum.unsqueeze(1)
            forbidden = _forbidden(info).unsqueeze(1)
            logits.masked_fill_(short.unsqueeze(2) & forbidden, -torch.inf)

    @staticmethod
    def _on_path(tokens: Tensor, depth: Tensor) -> Tensor:
        """How often the path of a node holds each token of tokens [B, N, D]; int64 of that shape."""
        place = torch.arange(tokens.shape[2], device=tokens.device)
        real = place < depth.unsqueeze(2)
        return ((tokens.unsqueeze(3) == tokens.unsqueeze(2)) & real.unsqueeze(2)).sum(3)

    @staticmethod
    def _corrected(rows: _Rows, tokens: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """(additive, scaling), both [B, N, D], of tokens that the paths hold count times."""
        flat = tokens.flatten(1)
        frequency = rows.frequency.gather(1, flat).view(tokens.shape)
        each = rows.each.unsqueeze(2)
        for times in range(tokens.shape[2]):
            frequency = torch.where(count > times, frequency + each, frequency)
        seen = rows.seen.gather(1, flat).view(tokens.shape) | (count > 0)
        additive = (0 - frequency).sub_(torch.where(seen, rows.presence.unsqueeze(2), 0))
        return additive, torch.where(seen, rows.repetition.unsqueeze(2), 1)

    def _note(self, slot: int, params: Any) -> None:
        for slots, member in (
            (self._used, is_penalised(params)),
            (self._minimums, params.min_new_tokens > 0),
        ):
            (slots.add if member else slots.discard)(slot)

    def _allocate(self, vocab: int, capacity: int) -> None:
        # Column V swallows the padding of shorter paths.
        self.vocab = vocab
        shape = (capacity, vocab + 1)
        self.frequency = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self.length = torch.zeros(capacity, dtype=torch.int64, device=self.device)
        self.parameters = {
            name: torch.full((capacity,), value, dtype=DTYPES[type(value)], device=self.device)
            for name, value in NEUTRAL.items()
        }

    def _rows(self, slots: Tensor) -> _Rows:
        values = self.parameters
        return _Rows(
            self.frequency[slots][:, : self.vocab],
            self.seen[slots][:, : self.vocab],
            self.length[slots],
            values["frequency_penalty"][slots].unsqueeze(1),
            values["presence_penalty"][slots].unsqueeze(1),
            values["repetition_penalty"][slots].unsqueeze(1),
            values["min_new_tokens"][slots],
        )

    def _count(self, slots: Tensor, tokens: Tensor) -> None:
        """slots and tokens [M] int64; equal pairs add the same number, so their order does not matter."""
        index = slots * (self.vocab + 1) + tokens
        each = self.parameters["frequency_penalty"][slots]
        self.frequency.view(-1).scatter_add_(0, index, each)
        self.seen.view(-1)[index] = True

    def _tensor(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        return to_device(values, dtype, self.device)


def path_tokens(tree: Any, max_depth: int) -> Tensor:
    """[B, N, D] int64: the tokens from below the root to each node; then its own token, repeated."""
    tokens, depth = tree.tokens, tree.depth
    shape = tree.mask.shape
    out = tokens.unsqueeze(2).repeat(1, 1, max_depth + 1)
    # Column D swallows the root and what is not an ancestor.
    column = torch.where(tree.mask & (depth > 0).unsqueeze(1), depth.unsqueeze(1) - 1, max_depth)
    out.scatter_(2, column, tokens.unsqueeze(1).expand(shape))
    return out[:, :, :max_depth].contiguous()


def _forbidden(info: Any) -> Tensor:
    """[B, V] bool: tokens that end the answer, of requests with ``min_new_tokens``.

    SGLang lifts them by its own count, which is never ahead of ours.
    """
    return info.acc_additive_penalties == -torch.inf


def to_device(values: list[Any], dtype: torch.dtype, device: Any) -> Tensor:
    """A copy that does not wait for the device."""
    on_cpu = torch.device(device).type == "cpu"
    tensor = torch.tensor(values, dtype=dtype, pin_memory=not on_cpu)
    return tensor.to(device, non_blocking=True)


def _penalise(logits: Tensor, additive: Tensor, scaling: Tensor, scale: bool) -> None:
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    logits.add_(additive)
    if scale:
        apply_scaling_penalties(logits, scaling)
