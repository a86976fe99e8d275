"""A target with gated delta net layers: DFLASH2 answers what plain decoding does, as transformers would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Server, acceptance, ids
from tinyhybrid import write_hybrid
from tinypair import Pairs
from transformers import AutoModelForCausalLM
from workload import TOKENS, Answers, assert_same, random_ids, run

GRID = 64  # the prefix cache keeps states at multiples of this
INTERVAL = ("--mamba-track-interval", str(GRID))


def prompts() -> list[list[int]]:
    """Lengths around the chunks of the kernels, and two families on common beginnings."""
    alone = [random_ids(n, ("hybrid", n)) for n in (1, 2, 3, 17, 63, 64, 65, 130)]
    stem = random_ids(150, "hybrid stem")
    family = [stem[:n] + random_ids(7, ("hybrid family", n)) for n in (40, 70, 100, 128, 150)]
    return [*alone, *family, family[-1]]


PROMPTS = prompts()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def drafter(pairs: Pairs, target: Path) -> Path:
    return pairs.drafter(target)


@dataclass(frozen=True)
class Plain:
    """What plain decoding answers: to the prompts, to their continuations, and those prompts."""

    first: Answers
    longer: list[list[int]]
    second: Answers


@pytest.fixture(scope="module")
def plain(serve: Any, target: Path) -> Plain:
    with serve(target, None, *INTERVAL) as server:
        first = run(server, PROMPTS)
        assert len({tuple(a) for a in ids(first)}) == len(PROMPTS) - 1
        longer = follow_ups(first)
        second = run(server, longer, concurrency=1)
        assert server.errors() == []
        server.flush()
        assert ids(run(server, PROMPTS, concurrency=1)) == ids(first)  # no ties in this workload
        server.flush()
        assert ids(run(server, longer)) == ids(second)
    return Plain(first, longer, second)


def follow_ups(answers: Answers) -> list[list[int]]:
    """Each prompt, its answer, and another turn."""
    return [
        [*prompt, *answer["output_ids"], *random_ids(5, ("hybrid turn", n))]
        for n, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True))
    ]


def test_plain_decoding_is_the_models(plain: Plain, target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for prompt, answer in list(zip(PROMPTS, plain.first, strict=True))[::3]:
        with torch.no_grad():
            whole = torch.tensor([prompt + answer["output_ids"][:-1]])
            logits = model(whole).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == answer["output_ids"]


@dataclass(frozen=True)
class Setup:
    flags: tuple[str, ...]
    accepts: float
    env: dict[str, str] = field(default_factory=dict)


CHAIN = ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "8")
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"}
SETUPS = {
    "default": Setup(INTERVAL, 1.7),
    "chain, chunked prefill": Setup((*INTERVAL, *CHAIN, "--chunked-prefill-size", "64"), 1.5),
    "24 nodes, pages, retraction": Setup(
        (*INTERVAL, "--speculative-num-draft-tokens", "24", "--page-size", "16"), 1.9, RETRACT
    ),
    "live states cached, small chunks": Setup((*NO_BUFFER, "--chunked-prefill-size", "32"), 1.7),
}


@pytest.fixture(scope="module", params=SETUPS)
def server(
    request: pytest.FixtureRequest, plain: Plain, serve: Any, target: Path, drafter: Path
) -> Iterator[tuple[Server, Setup]]:
    setup = SETUPS[request.param]
    with serve(target, drafter, *setup.flags, env=setup.env) as server:
        yield server, setup
        assert server.errors() == []


def test_answers_are_those_of_plain_decoding(server: tuple[Server, Setup], plain: Plain) -> None:
    """Four at once, then one by one, on what the cache holds from before."""
    running, setup = server
    retracted = 0
    for concurrency in (4, 1):
        answers = run(running, PROMPTS, concurrency)
        retracted += sum(answer["meta_info"].get("num_retractions", 0) for answer in answers)
        assert_same(answers, plain.first)
        assert acceptance(answers) > setup.accepts
    assert (retracted > 0) is bool(setup.env)
    hits = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert max(hits) >= GRID  # a repeated prompt starts from states that were kept


def test_continued_answers(server: tuple[Server, Setup], plain: Plain) -> None:
    """Prompts that extend earlier answers start from states that a verified tree left."""
    running, _ = server
    running.flush()
    cold = run(running, PROMPTS, 4)
    answers = run(running, plain.longer, 1)
    assert_same(answers, plain.second)
    gains = [
        answer["meta_info"]["cached_tokens"] - len(prompt)
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    assert max(gains) > 0
    assert_same(run(running, plain.longer, 4), plain.second)
    assert_same(cold, plain.first)


def test_answers_that_end_in_an_accepted_path(server: tuple[Server, Setup], plain: Plain) -> None:
    """What was accepted past the limit must not be in the states that the cache keeps."""
    running, _ = server
    running.flush()
    for tokens in (3, 6):
        answers = run(running, PROMPTS, 4, tokens)
        assert ids(answers) == [answer[:tokens] for answer in ids(plain.first)]
        again = run(running, PROMPTS, 4)
        assert_same(again, plain.first)


def test_sampled_answers(server: tuple[Server, Setup]) -> None:
    running, _ = server
    answers = running.ask_all(
        PROMPTS, concurrency=4, temperature=0.8, top_p=0.9, max_new_tokens=TOKENS, ignore_eos=True
    )
    assert all(len(answer) == TOKENS for answer in ids(answers))
