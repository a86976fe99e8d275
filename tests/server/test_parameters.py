"""Penalties, bias, processors and seeds on running servers.

Greedy answers equal those of plain decoding without overlap: with it, SGLang's penalties are a token late.
All kinds of requests are in one batch, so that each is beside requests that do not have its parameters.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dill
import pytest
from serving import Server, acceptance, ids
from tinypair import EOS, VOCAB, Pairs
from workload import TOKENS, Answers, assert_same, prompts, random_ids

PROMPTS = prompts()[2:8]
Asked = list[tuple[list[int], dict[str, Any]]]


def no_repeats() -> str:
    """SGLang's own processor that looks at the whole sequence."""
    from sglang.srt.sampling.custom_logit_processor import DeepseekOCRNoRepeatNGramLogitProcessor

    return DeepseekOCRNoRepeatNGramLogitProcessor.to_str()


def disallowed() -> str:
    """SGLang's own processor that looks at its parameters only."""
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    return DisallowedTokensLogitsProcessor.to_str()


def thinking_budget() -> str:
    """SGLang's own thinking budget with words of the tiny vocabulary; it travels by value."""
    from sglang.srt.sampling.custom_logit_processor import ThinkingBudgetLogitProcessor

    names = ("THINKING_START_TOKEN_ID", "THINKING_END_TOKEN_ID", "NEW_LINE_TOKEN_ID")
    words = dict(zip(names, THINKING, strict=True))
    kind = type("Budget", (ThinkingBudgetLogitProcessor,), {**words, "__module__": "__main__"})
    return json.dumps({"callable": dill.dumps(kind).hex()})


THINKING = (20, 21, 22)
BIAS = {str(token): value for token, value in ((5, 2.0), (9, -3.0), (30, 1.0), (EOS, -1.0))}
# Without overlap SGLang scales and adds in the order of a set of classes, which differs from start to
# start; so these two are apart here, and together in test_distribution.py and tests/unit.
ADDED = {
    "frequency_penalty": 0.3,
    "presence_penalty": 0.4,
    "min_new_tokens": 20,
    "logit_bias": BIAS,
}
SCALED = {"repetition_penalty": 1.15, "min_new_tokens": 20, "logit_bias": BIAS}


def kinds() -> dict[str, dict[str, Any]]:
    """``extra`` goes beside the sampling parameters."""
    repeats = {"extra": {"custom_logit_processor": no_repeats()}}
    ngrams = {"custom_params": {"ngram_size": 2, "window_size": 200}}
    return {
        "nothing": {},
        "repetition_penalty": {"repetition_penalty": 1.2},
        "frequency_penalty": {"frequency_penalty": 0.5},
        "presence_penalty": {"presence_penalty": 0.7},
        "min_new_tokens": {"min_new_tokens": 30, "ignore_eos": False},
        "logit_bias": {"logit_bias": BIAS},
        "no repeats": {**repeats, **ngrams},
        "disallowed": {
            "extra": {"custom_logit_processor": disallowed()},
            "custom_params": {"token_ids": list(range(40, 50))},
        },
        "thinking budget": {
            "extra": {"custom_logit_processor": thinking_budget()},
            "custom_params": {"thinking_budget": 6},
            "logit_bias": {str(THINKING[0]): 3.0},
        },
        "all that adds, and a processor": {**ADDED, **repeats, **ngrams},
        "all that adds": ADDED,
        "scaling, bias and a processor": {**SCALED, **repeats, **ngrams},
    }


def requests_of(chosen: list[list[int]]) -> tuple[list[str], Asked]:
    """Every kind for every prompt, shuffled: the names, and (prompt, keywords) of each."""
    asked = [
        (name, (prompt, {"max_new_tokens": TOKENS, "ignore_eos": True, **kind}))
        for prompt in chosen
        for name, kind in kinds().items()
    ]
    random.Random(5).shuffle(asked)
    return [name for name, _ in asked], [order for _, order in asked]


def ask_all(server: Server, asked: Asked, concurrency: int = 8) -> Answers:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda order: server.ask(order[0], **order[1]), asked))


@pytest.fixture(scope="module")
def asked() -> tuple[list[str], Asked]:
    return requests_of(PROMPTS)


LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}


@pytest.fixture(scope="module")
def plain(serve: Any, pairs: Pairs, asked: tuple[list[str], Asked]) -> dict[str, Answers]:
    """Plain decoding's answers; its server has ended."""
    flags = ("--disable-overlap-schedule", "--enable-custom-logit-processor")
    with serve(pairs.target(), None, *flags) as server:
        answers = {"text": ask_all(server, asked[1]), "scores": ask_all(server, scored(asked[1]))}
        assert server.errors() == []
    return answers


def scored(asked: Asked) -> Asked:
    return [
        (prompt, {**options, "extra": {**options.get("extra", {}), **LOGPROBS}})
        for prompt, options in asked[:22]
    ]


SETUPS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "tree": ((), {}),
    "tree, page size 16, retraction": (
        ("--page-size", "16", "--chunked-prefill-size", "32"),
        {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"},
    ),
    "chain, page size 16, no overlap": (
        (
            *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "8"),
            *("--page-size", "16", "--disable-overlap-schedule"),
        ),
        {},
    ),
}


@pytest.fixture(scope="module", params=SETUPS)
def server(
    request: pytest.FixtureRequest, plain: Any, serve: Any, pairs: Pairs
) -> Iterator[Server]:
    flags, stress = SETUPS[request.param]
    pair = pairs.pair()
    flags = ("--enable-custom-logit-processor", *flags)
    with serve(pair.target, pair.drafter, *flags, env=stress) as server:
        yield server
        assert server.errors() == []


def test_plain_answers_are_worth_comparing(
    plain: dict[str, Answers], asked: tuple[list[str], Asked]
) -> None:
    """Each kind changes most answers."""
    by_kind: dict[str, list[list[int]]] = {name: [] for name in kinds()}
    order = sorted(range(len(asked[0])), key=lambda i: repr(asked[1][i][0]))
    for i in order:
        by_kind[asked[0][i]].append(plain["text"][i]["output_ids"])
    for name, answers in by_kind.items():
        same = sum(a == b for a, b in zip(answers, by_kind["nothing"], strict=True))
        assert name == "nothing" or same <= len(PROMPTS) // 2, name


def test_equals_plain_decoding(
    server: Server, plain: dict[str, Answers], asked: tuple[list[str], Asked]
) -> None:
    answers = ask_all(server, asked[1])
    assert_same(answers, plain["text"])
    assert [a["text"] for a in answers] == [a["text"] for a in plain["text"]]
    free = [a for a, name in zip(answers, asked[0], strict=True) if name == "nothing"]
    assert acceptance(free) > 1.5
    # Tokens are accepted below the root under each parameter.
    for name in kinds():
        some = [a for a, kind in zip(answers, asked[0], strict=True) if kind == name]
        assert acceptance(some) > 1.02, name


def test_logprobs(
    server: Server, plain: dict[str, Answers], asked: tuple[list[str], Asked]
) -> None:
    """Those of the penalised distribution, as plain decoding reports them."""
    answers = ask_all(server, scored(asked[1]))
    assert_same(answers, plain["scores"])
    for field in ("output_token_logprobs", "output_top_logprobs"):
        for ours, theirs in zip(answers, plain["scores"], strict=True):
            flat = [
                [
                    e
                    for entry in a["meta_info"][field]
                    for e in (entry if "top" in field else [entry])
                ]
                for a in (ours, theirs)
            ]
            assert [e[1] for e in flat[0]] == [e[1] for e in flat[1]]
            gaps = [abs(a[0] - b[0]) for a, b in zip(*flat, strict=True) if b[0] > -1e30]
            assert max(gaps) < 1e-3


def test_requests_join_leave_and_are_given_up(
    server: Server, plain: dict[str, Answers], asked: tuple[list[str], Asked]
) -> None:
    """Slots pass from penalised requests to others at any moment, also from aborted ones."""
    strong = {**ADDED, **SCALED, "temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
    orders = list(range(0, len(asked[1]), 3))

    def abandoned(number: int) -> None:
        body = {"input_ids": PROMPTS[number], "sampling_params": strong, "rid": f"gone-{number}"}
        server.post("/generate", body)

    def ask(number: int) -> list[int]:
        time.sleep(random.Random(number).random() * 0.2)
        prompt, options = asked[1][number]
        limit = random.Random(number).randint(options.get("min_new_tokens", 1), TOKENS)
        return server.ask(prompt, **{**options, "max_new_tokens": limit})["output_ids"]

    threads = [threading.Thread(target=abandoned, args=(n,)) for n in range(6)]
    with ThreadPoolExecutor(10) as pool:
        for thread in threads:
            thread.start()
        found = pool.map(ask, orders)
        time.sleep(0.3)
        for number in range(6):
            server.post("/abort_request", {"rid": f"gone-{number}"})
        for number, tokens in zip(orders, found, strict=True):
            assert tokens == plain["text"][number]["output_ids"][: len(tokens)], asked[0][number]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


# Seeds.

SEEDED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 1.2, "top_k": 8},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
]


def test_a_seed_gives_the_same_answer_whatever_is_beside_it(server: Server) -> None:
    """Alone, among its like, and among greedy, unseeded and constrained requests."""

    def seeded(number: int) -> list[int]:
        options = {"max_new_tokens": 40, "ignore_eos": True, "sampling_seed": number // 2}
        return server.ask(PROMPTS[number % 6], **options, **SEEDED[number % 5])["output_ids"]

    def noise(number: int) -> None:
        others = [
            {},
            {"temperature": 1.0},
            {"temperature": 1.5, "top_p": 0.7},
            {"regex": "[a-z]{40}"},
        ]
        prompt = random_ids(10, ("noise", number))
        server.ask(prompt, max_new_tokens=40, **(others[number % 4]))

    numbers = list(range(20))
    alone = [seeded(number) for number in numbers]
    assert len({tuple(tokens) for tokens in alone}) == len(numbers)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(seeded, numbers)) == alone
    with ThreadPoolExecutor(12) as pool:
        mixed = [
            (pool.submit(seeded, n), pool.submit(noise, n), pool.submit(noise, n + 1))
            for n in numbers
        ]
        assert [first.result() for first, *_ in mixed] == alone


def test_copies_of_a_seeded_request_differ(server: Server) -> None:
    """As in plain decoding, where n copies are n samples."""
    options = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 3}
    answers = server.ask(PROMPTS[2], n=4, **options)
    assert len({tuple(tokens) for tokens in ids(answers)}) == 4
    huge = server.ask(PROMPTS[2], **{**options, "sampling_seed": 2**63 - 1})
    assert max(huge["output_ids"]) < VOCAB
