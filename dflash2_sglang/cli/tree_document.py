"""Answers and their rounds as one JSON document: what ``--json`` prints and the page shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dflash2_sglang.cli.tree_stats import statistics
from dflash2_sglang.cli.tree_trace import Answer, Round

VERSION = 1  # of the document
BROKEN = "\ufffd"  # what decoding gives for half a character


class Spelling:
    """The text of tokens, alone and in a row.

    Decoders may drop a space at the start of a text, so a token is decoded after another one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skip = len(self._decode([]))
        self._known: dict[int, str] = {}

    def token(self, token: int) -> str:
        """One token; part of a character is given by its name in the vocabulary."""
        if token not in self._known:
            text = self._decode([token])[self._skip :]
            if BROKEN in text or not text:
                text = str(self._tokenizer.convert_ids_to_tokens(token) or f"[{token}]")
            self._known[token] = text
        return self._known[token]

    def row(self, tokens: Sequence[int]) -> list[str]:
        """Pieces that make up the whole text; a character of several tokens is with its last."""
        pieces, waiting = [], []
        for place, token in enumerate(tokens):
            waiting.append(token)
            text = self._decode(waiting)[self._skip :]
            if text.endswith(BROKEN) and place + 1 < len(tokens) and len(waiting) < 8:
                pieces.append("")
            else:
                pieces.append(text)
                waiting = []
        return pieces

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            [*self._before, *tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def document(
    answers: Sequence[Answer], settings: dict[str, Any], spelling: Spelling
) -> dict[str, Any]:
    """``texts`` has the text of each token id that occurs, ids as strings."""
    ids = sorted({token for answer in answers for token in _occurring(answer)})
    return {
        "version": VERSION,
        "settings": settings,
        "statistics": statistics(answers),
        "texts": {str(token): spelling.token(token) for token in ids},
        "answers": [_answer(answer, spelling) for answer in answers],
    }


def _occurring(answer: Answer) -> Iterable[int]:
    yield from answer.tokens
    for one in answer.rounds:
        yield from one.tokens
        yield from one.chain
        yield one.bonus


def _answer(answer: Answer, spelling: Spelling) -> dict[str, Any]:
    return {
        "prompt": answer.prompt,
        "prompt_tokens": answer.prompt_length,
        "tokens": list(answer.tokens),
        "pieces": spelling.row(answer.tokens),
        "finish": answer.finish,
        "rounds": [_round(one) for one in answer.rounds],
    }


def _round(one: Round) -> dict[str, Any]:
    """As recorded, with what follows from it; ``place`` counts the answer's tokens from 0."""
    return {
        "place": one.place,
        "tokens": list(one.tokens),
        "parent": list(one.parent),
        "depth": one.depth,
        "prob": list(one.prob),
        "random": list(one.random),
        "accepted": list(one.accepted),
        "bonus": one.bonus,
        "gain": one.gain,
        "chain": list(one.chain),
        "chain_prob": list(one.chain_prob),
        "chain_hits": one.chain_hits,
        "chain_gain": one.chain_gain,
        "candidates": [len(position) for position in one.candidates],
    }
