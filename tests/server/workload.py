"""Requests that the tests of tiny servers share, and the check against plain decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from serving import Server
from tinypair import SPECIAL, VOCAB

TOKENS = 48
Answers = list[dict[str, Any]]


def random_ids(length: int, seed: object, vocab: int = VOCAB) -> list[int]:
    dice = random.Random(repr(seed))
    return [dice.randrange(len(SPECIAL), vocab) for _ in range(length)]


def prompts(vocab: int = VOCAB) -> list[list[int]]:
    """Short and long ones, ones with a common beginning, and twins."""
    alone = [random_ids(n, ("alone", n), vocab) for n in (1, 2, 3, 7, 15, 16, 17, 31, 33, 60, 150)]
    stem = random_ids(40, "stem", vocab)
    family = [stem + random_ids(n, ("family", n), vocab) for n in (1, 2, 5, 9, 14, 20)]
    return [*alone, *family, family[-1], alone[0]]


def run(
    server: Server, prompts: Sequence[list[int]], concurrency: int = 8, tokens: int = TOKENS
) -> Answers:
    """Fixed lengths: the end-of-text token has tests of its own."""
    return server.ask_all(prompts, concurrency=concurrency, max_new_tokens=tokens, ignore_eos=True)


def assert_same(answers: Answers, plain: Answers) -> None:
    """Token for token, with the same reason to finish."""
    for number, (ours, theirs) in enumerate(zip(answers, plain, strict=True)):
        assert ours["output_ids"] == theirs["output_ids"], f"answer {number}"
        reason = ours["meta_info"]["finish_reason"]
        assert reason == theirs["meta_info"]["finish_reason"], f"answer {number}"
