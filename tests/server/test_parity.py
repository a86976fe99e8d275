"""With the demo models in float32, DFLASH2 answers what plain decoding answers, token for token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from serving import Server, acceptance, ids, verify_count

TOKENS = 64


def chat(question: str, system: str = "You are a helpful AI assistant.") -> str:
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


MIXED = [
    chat("What is the capital of France?"),
    chat("Write a Python function that returns the n-th Fibonacci number."),
    chat("List five fruits, one per line."),
    chat("Explain in two sentences why the sky is blue."),
    chat("Translate to German: The weather is nice today."),
    chat("A train goes 60 km in 45 minutes. How fast is it? Think step by step."),
    "Once upon a time, in a village by the sea,",
    "import numpy as np\n\ndef softmax(x):",
    'Return only JSON.\n{"name": "Alice", "age":',
    "Hello",
]
PREFIX = (
    "You answer questions about a small library. It opens at nine in the morning and closes at six "
    "in the evening, from Monday to Saturday. Members may borrow five books for three weeks, and "
    "renew each of them twice unless somebody else has asked for it. The reading room has forty "
    "seats, the children's corner twelve. On the first Friday of a month there is a concert in the "
    "main hall, and on Wednesdays a volunteer reads fairy tales. Lost cards cost two euros. Be "
    "brief and friendly."
)
SHARED = [
    chat(question, PREFIX)
    for question in (
        "When do you open?",
        "How many books may I borrow, and for how long?",
        "I lost my card. What now?",
        "Is there something for children?",
        "Can I come on a Sunday?",
        "Where is the concert?",
        "May I renew a book three times?",
        "Write a short advertisement for the library.",
    )
]
PROMPTS = MIXED + SHARED

Answers = list[dict[str, Any]]


def ask(server: Server, prompts: Sequence[str], concurrency: int) -> Answers:
    return server.ask_all(prompts, concurrency=concurrency, max_new_tokens=TOKENS)


def arguments(target: Path) -> list[str]:
    return ["--model-path", str(target), "--dtype", "float32", "--max-total-tokens", "16384"]


@pytest.fixture(scope="module")
def plain(demo_target: Path, logs: Iterator[Path]) -> dict[str, dict[str, Any]]:
    """The answer of plain decoding to each prompt; its server has ended."""
    with Server(arguments(demo_target), next(logs)) as server:
        answers = ask(server, PROMPTS, 8)
    assert all("spec_verify_ct" not in answer["meta_info"] for answer in answers)
    return dict(zip(PROMPTS, answers, strict=True))


@pytest.fixture(scope="module")
def server(
    plain: Any, demo_target: Path, demo_drafter: Path, logs: Iterator[Path]
) -> Iterator[Server]:
    """DFLASH2 as a user would start it; after ``plain``, so that never two servers compute."""
    flags = ["--speculative-algorithm", "DFLASH2", "--speculative-draft-model-path"]
    with Server([*arguments(demo_target), *flags, str(demo_drafter)], next(logs)) as server:
        yield server
        assert server.errors() == []


def check(answers: Answers, prompts: Sequence[str], plain: dict[str, dict[str, Any]]) -> None:
    for answer, prompt in zip(answers, prompts, strict=True):
        expected = plain[prompt]
        assert answer["output_ids"] == expected["output_ids"], prompt
        assert answer["text"] == expected["text"]
        for field in ("finish_reason", "prompt_tokens", "completion_tokens"):
            assert answer["meta_info"][field] == expected["meta_info"][field]


@pytest.mark.parametrize("concurrency", [8, 1])
def test_equals_plain_decoding(
    server: Server, plain: dict[str, dict[str, Any]], concurrency: int
) -> None:
    server.flush()
    answers = ask(server, PROMPTS, concurrency)
    check(answers, PROMPTS, plain)
    # A silent fault in the drafter (wrong KV, a tree verified as a chain) lowers this towards 1.
    assert acceptance(answers) > 1.8
    # Each shared prompt found the prefix of the one before; the prefix has over 100 tokens.
    if concurrency == 1:
        hits = [answer["meta_info"]["cached_tokens"] for answer in answers[len(MIXED) + 1 :]]
        assert min(hits) > 100


def test_cached_prefixes_are_drafted_as_well(
    server: Server, plain: dict[str, dict[str, Any]]
) -> None:
    """Draft KV comes with a radix-cache hit, whether a prefill or a decode round wrote it."""
    prompts = SHARED[:4]
    follow_ups = [p + plain[p]["text"] + "<|im_end|>\n<|im_start|>user\nWhy?" for p in prompts]
    server.flush()
    cold = ask(server, prompts, 1)
    warm = ask(server, prompts, 1)
    check(warm, prompts, plain)
    assert all(a["meta_info"]["cached_tokens"] >= a["meta_info"]["prompt_tokens"] - 1 for a in warm)
    assert verify_count(warm) == verify_count(cold)
    # The second turn finds the first turn's answer in the cache, too.
    warm = ask(server, follow_ups, 1)
    for answer, first in zip(warm, cold, strict=True):
        gained = answer["meta_info"]["cached_tokens"] - first["meta_info"]["prompt_tokens"]
        assert gained > 0.8 * first["meta_info"]["completion_tokens"]
    server.flush()
    cold = ask(server, follow_ups, 1)
    assert ids(warm) == ids(cold)
    # Chunks of another length round differently; the drafter's near ties may then fall otherwise.
    assert abs(verify_count(warm) - verify_count(cold)) <= 0.03 * verify_count(cold)
