"""Each sampling parameter, and six combinations, on a running server against exact probabilities.

Four tokens of an answer: the first is drawn by prefill, the others are accepted or drawn in trees. The
target has eight words, so that all 4096 answers have exact probabilities (``answers.py``). For each kind the
tokens at places 1 to 4 and all pairs of neighbours are tested. ``pytest --draws 20000`` for the long run;
``-s`` prints p-values and the power of each test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import answers as exact
import pytest
from answers import Answer, Kind, Law
from serving import Server, acceptance
from tinypair import EOS, Pairs

VOCAB = 8
PROMPT = [5, 3, 6, 4, 7, 3, 5]
TESTED = [(0,), (1,), (2,), (3,), (0, 1), (1, 2), (2, 3)]
# One run in 10,000 fails by chance; Bonferroni over all tests of a run.
RUN_LEVEL = 1e-4
PART = 50  # answers a request


def no_repeats() -> str:
    from sglang.srt.sampling.custom_logit_processor import DeepseekOCRNoRepeatNGramLogitProcessor

    return DeepseekOCRNoRepeatNGramLogitProcessor.to_str()


def repeats(answer: Answer) -> set[int]:
    """What the processor forbids: words that followed the last word before."""
    ids = [*PROMPT, *answer]
    return {b for a, b in pairwise(ids) if a == ids[-1]}


WARM = {"temperature": 2.0}  # the tiny target is sure of itself
PROCESSOR: dict[str, Any] = {
    "forbid": repeats,
    "processor": no_repeats(),
    "custom_params": {"ngram_size": 2, "window_size": 64},
}
COOL = {"temperature": 1.4}  # penalties are 2 at most
MILD = {"4": 0.8, "6": -0.6, "0": 0.5}
BIAS = {"4": 3.0, "6": -2.5, "0": 1.5}
KINDS = {
    "temperature": Kind({"temperature": 1.4}),
    "top_k": Kind({**WARM, "top_k": 4}),
    "top_p": Kind({**WARM, "top_p": 0.8}),
    "min_p": Kind({**WARM, "min_p": 0.12}),
    "repetition_penalty": Kind({**WARM, "repetition_penalty": 2.0}),
    "frequency_penalty": Kind({**COOL, "frequency_penalty": 2.0}),
    "presence_penalty": Kind({**COOL, "presence_penalty": 2.0}),
    "min_new_tokens": Kind({**WARM, "min_new_tokens": 3}),
    "logit_bias": Kind({**WARM, "logit_bias": BIAS}),
    "processor": Kind(WARM, **PROCESSOR),
    "seed": Kind({**WARM, "sampling_seed": 0}),
    "all filters": Kind({**WARM, "top_k": 6, "top_p": 0.93, "min_p": 0.04}),
    "all penalties": Kind(
        {**COOL, "repetition_penalty": 1.4, "frequency_penalty": 1.2, "presence_penalty": 0.9}
    ),
    "penalties and filters": Kind(
        {**WARM, "frequency_penalty": 0.8, "top_p": 0.9, "min_p": 0.03, "min_new_tokens": 2}
    ),
    "bias and penalties": Kind({**WARM, "logit_bias": BIAS, "repetition_penalty": 2.0}),
    "processor, bias and penalties": Kind(
        {**COOL, "logit_bias": MILD, "presence_penalty": 2.0}, **PROCESSOR
    ),
    "seed, penalties and filters": Kind(
        {**WARM, "sampling_seed": 0, "frequency_penalty": 2.0, "top_k": 5, "min_p": 0.03}
    ),
}
LEVEL = RUN_LEVEL / (len(KINDS) * len(TESTED))


@pytest.fixture(scope="module")
def server(serve: Any, pairs: Pairs) -> Iterator[Server]:
    target = pairs.target(vocab=VOCAB)
    flags = ("--enable-custom-logit-processor", "--max-running-requests", "128")
    with serve(target, pairs.drafter(target), *flags) as server:
        yield server
        assert server.errors() == []


@pytest.fixture(scope="module")
def draws(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--draws")) // PART * PART


def draw(server: Server, kind: Kind, part: int) -> list[dict[str, Any]]:
    """``PART`` answers; each has a seed of its own where the kind has seeds."""
    sampling = {**kind.sampling, "max_new_tokens": exact.PLACES + 1, "ignore_eos": True}
    if kind.processor:
        sampling["custom_params"] = dict(kind.custom_params)
    each = [dict(sampling) for _ in range(PART)]
    if "sampling_seed" in sampling:
        for number, one in enumerate(each):
            one["sampling_seed"] = part * PART + number
    body: dict[str, Any] = {"input_ids": [PROMPT] * PART, "sampling_params": each}
    if kind.processor:
        body["custom_logit_processor"] = kind.processor
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def drawn(server: Server, draws: int) -> dict[str, list[dict[str, Any]]]:
    """All kinds in flight together."""
    orders = [(name, part) for part in range(draws // PART) for name in KINDS]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda order: draw(server, KINDS[order[0]], order[1]), orders))
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in KINDS}
    for (name, _), some in zip(orders, found, strict=True):
        answers[name] += some
    return answers


@pytest.fixture(scope="module")
def logits(pairs: Pairs) -> dict[Answer, list[float]]:
    return exact.target_logits(pairs.target(vocab=VOCAB), PROMPT, VOCAB)


def alternative(kind: Kind, logits: dict[Answer, list[float]]) -> tuple[str, Law]:
    """What a likely fault would give instead."""
    asked = kind.sampling
    if any("penalty" in name for name in asked):
        return "penalties from the root only", exact.law(logits, kind, EOS, late=exact.PLACES)
    if kind.forbid:
        wrong = replace(kind, forbid=lambda answer: repeats(answer[:-1]))
        return "processor one token late", exact.law(logits, wrong, EOS)
    if "min_new_tokens" in asked:
        wrong = replace(kind, sampling={**asked, "min_new_tokens": 2})
        return "one token fewer", exact.law(logits, wrong, EOS)
    if "logit_bias" in asked:
        wrong = replace(kind, sampling={**asked, "logit_bias": {"4": 3.0}})
        return "only the first bias", exact.law(logits, wrong, EOS)
    wrong = replace(kind, sampling={**asked, "temperature": asked["temperature"] * 1.3})
    return "temperature 1.3 times as high", exact.law(logits, wrong, EOS)


@pytest.mark.parametrize("name", KINDS)
def test_tokens_follow_the_target(
    name: str,
    drawn: dict[str, list[dict[str, Any]]],
    logits: dict[Answer, list[float]],
    draws: int,
) -> None:
    joint = exact.law(logits, KINDS[name], EOS)
    assert abs(sum(joint.values()) - 1) < 1e-9
    fault, other = alternative(KINDS[name], logits)
    answers = [tuple(answer["output_ids"][: exact.PLACES]) for answer in drawn[name]]
    assert len(answers) == draws
    chances, powers = [], []
    for places in TESTED:
        counts = Counter(tuple(answer[i] for i in places) for answer in answers)
        probs = exact.marginal(joint, places)
        chances.append(exact.surprise(counts, probs))
        powers.append(exact.power(probs, exact.marginal(other, places), draws, LEVEL))
    print(
        f"\n{name}: {draws} draws, acceptance {acceptance(drawn[name]):.2f}, "
        f"p {' '.join(f'{p:.3f}' for p in chances)}; "
        f"power against '{fault}' {' '.join(f'{p:.3f}' for p in powers)}"
    )
    assert min(chances) > LEVEL
    assert max(powers) > 0.99  # the kind's tests together are no weaker than the best of them
    assert acceptance(drawn[name]) > 1.05  # tokens were accepted, not only drawn at the root
