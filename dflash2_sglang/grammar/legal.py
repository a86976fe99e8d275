"""The tokens that a grammar allows next, as its backend's mask tells them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

Array = np.ndarray


class Legal:
    """One row of a vocabulary mask, on the host.

    row    either int32, 32 tokens a word and a set bit for an allowed one (xgrammar, llguidance), or
           bool, one token each and True for a forbidden one (outlines)
    vocab  tokens of the vocabulary; the row may be padded beyond, or end before it
    """

    def __init__(self, row: Array, vocab: int) -> None:
        self._packed = row.dtype != np.bool_
        self._row = row.view(np.uint32) if self._packed else row
        self.vocab = min(vocab, row.shape[0] * (32 if self._packed else 1))

    def allows(self, tokens: Array) -> Array:
        """[M] bool for tokens [M] int64; what lies outside the vocabulary is not allowed."""
        inside = (tokens >= 0) & (tokens < self.vocab)
        tokens = np.where(inside, tokens, 0)
        if self._packed:
            bit = (self._row[tokens >> 5] >> (tokens & 31).astype(np.uint32)) & 1
            return inside & (bit == 1)
        return inside & ~self._row[tokens]

    @cached_property
    def count(self) -> int:
        """How many tokens are allowed."""
        if self._packed:
            return int(np.bitwise_count(self._words).sum())
        return self.vocab - int(np.count_nonzero(self._row[: self.vocab]))

    def list(self) -> list[int]:
        """The allowed tokens in rising order; meant for few."""
        if not self._packed:
            return np.flatnonzero(~self._row[: self.vocab]).tolist()
        words = self._words
        return [
            int(i) * 32 + bit
            for i in np.flatnonzero(words)
            for bit in range(32)
            if int(words[i]) >> bit & 1
        ]

    @cached_property
    def _words(self) -> Array:
        """The words of the vocabulary, with nothing set beyond it."""
        words, left = self._row[: -(-self.vocab // 32)], self.vocab % 32
        if not left:
            return words
        words = words.copy()
        words[-1] &= np.uint32((1 << left) - 1)
        return words
