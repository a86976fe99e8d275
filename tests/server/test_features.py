"""What a request may ask for, against plain decoding: its end, grammars, log-probabilities."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import requests
from serving import Server, acceptance, ids
from tinypair import CONTEXT, EOS, VOCAB, decode, encode
from workload import TOKENS, Answers, assert_same, prompts, random_ids, run

PROMPTS = prompts()


@pytest.fixture(scope="module")
def free_run(plain_server: Server) -> Answers:
    """Plain answers of 48 tokens to ``PROMPTS``, the end-of-text token ignored."""
    return run(plain_server, PROMPTS)


def both(plain: Server, tree: Server, asked: list[tuple[Any, dict[str, Any]]]) -> Answers:
    """Ask both servers (prompt, keywords) each, compare, and return DFLASH2's answers."""

    def answers(server: Server) -> Answers:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda order: server.ask(order[0], **order[1]), asked))

    expected, found = answers(plain), answers(tree)
    assert_same(found, expected)
    assert [a["text"] for a in found] == [a["text"] for a in expected]
    return found


# Where an answer ends.


def test_end_of_text_inside_an_accepted_path(plain_server: Server, tree_server: Server) -> None:
    asked = [(random_ids(9, ("eos", n)), {"max_new_tokens": 200}) for n in range(24)]
    answers = both(plain_server, tree_server, asked)
    ended = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert len(ended) >= 12
    for answer in ended:
        assert answer["output_ids"].index(EOS) == len(answer["output_ids"]) - 1
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])


@pytest.mark.parametrize("trim", [True, False])
def test_stop_strings(
    plain_server: Server, tree_server: Server, free_run: Answers, trim: bool
) -> None:
    """Each cut out of the plain answer, at any place, so that it ends inside accepted paths too."""
    asked = []
    for number, answer in enumerate(free_run):
        tokens, dice = answer["output_ids"], random.Random(number)
        # The text leaves the end-of-text token out, but no stop string is found across one.
        starts = [i for i in range(TOKENS - 4) if EOS not in tokens[i : i + 4]]
        for length in (1, 2, 4):
            start = dice.choice(starts)
            stops = [decode(tokens[start : start + length]), "~never~"]
            options = {"stop": stops, "no_stop_trim": not trim, "ignore_eos": True}
            asked.append((PROMPTS[number], {**options, "max_new_tokens": TOKENS}))
    answers = both(plain_server, tree_server, asked)
    for answer, (_, options) in zip(answers, asked, strict=True):
        stop = options["stop"][0]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["text"].count(stop) == (0 if trim else 1)


def test_stop_tokens_and_the_length_limit(
    plain_server: Server, tree_server: Server, free_run: Answers
) -> None:
    """Whichever comes first ends the answer, also when both lie in one accepted path."""
    asked = []
    for number, answer in enumerate(free_run):
        tokens = answer["output_ids"]
        stop = random.Random(number).choice(tokens[2:40])
        first = tokens.index(stop)
        for limit in (first - 1, first, first + 1, first + 2, first + 4):
            if limit > 0:
                options = {"stop_token_ids": [stop], "max_new_tokens": limit, "ignore_eos": False}
                asked.append((PROMPTS[number], options))
    answers = both(plain_server, tree_server, asked)
    reasons = {answer["meta_info"]["finish_reason"]["type"] for answer in answers}
    assert reasons == {"stop", "length"}


def test_short_limits(plain_server: Server, tree_server: Server, free_run: Answers) -> None:
    asked = [
        (prompt, {"max_new_tokens": limit, "ignore_eos": True})
        for prompt in PROMPTS[:6]
        for limit in (1, 2, 3, 4, 5, 7, 8, 9)
    ]
    answers = both(plain_server, tree_server, asked)
    for answer, (prompt, options) in zip(answers, asked, strict=True):
        whole = free_run[PROMPTS.index(prompt)]["output_ids"]
        assert answer["output_ids"] == whole[: options["max_new_tokens"]]


def test_context_limit(plain_server: Server, tree_server: Server) -> None:
    """The tree is wider than what is left of the context; its last tokens must still be right."""
    asked = [
        (random_ids(CONTEXT - left, ("long", left)), {"max_new_tokens": limit, "ignore_eos": True})
        for left in (7, 8, 9, 10, 16, 17, 24, 40)  # SGLang itself wants more than 6 left
        for limit in (left - 1, left)
    ]
    answers = both(plain_server, tree_server, asked)
    for answer, (_, options) in zip(answers, asked, strict=True):
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert options["max_new_tokens"] - len(answer["output_ids"]) in (0, 1, 2)


# Constraints.


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{2,5}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)


def test_constrained_output(plain_server: Server, tree_server: Server) -> None:
    """Grammars that end inside an accepted path, in one batch with unconstrained requests."""
    kinds: list[dict[str, Any]] = [
        {"json_schema": SCHEMA},
        {"regex": "[a-z]{5}"},
        {"regex": "(ab|ba)+[0-9]{2}x?"},
        {"ebnf": 'root ::= "yes" | "no" ", " [a-z]+ "."'},
        {},
    ]
    asked = [
        (prompt, {**kind, "max_new_tokens": 60})
        for prompt in ("the answer is ", "q:", "x", "{}", "abcabc 123 ")
        for kind in kinds
    ]
    answers = both(plain_server, tree_server, asked)
    complete = 0
    for answer, (_, options) in zip(answers, asked, strict=True):
        finished = answer["meta_info"]["finish_reason"]["type"] == "stop"
        text = answer["text"]
        if "regex" in options and finished:
            complete += 1
            assert re.fullmatch(options["regex"], text)
        if "json_schema" in options and finished:
            complete += 1
            assert set(json.loads(text)) == {"name", "age", "tags"}
    assert complete > 8
    free = [a for a, (_, options) in zip(answers, asked, strict=True) if len(options) == 1]
    assert acceptance(free) > 1.5


def test_logit_bias(plain_server: Server, tree_server: Server, free_run: Answers) -> None:
    """The bias reaches every node of the tree."""
    asked = []
    for prompt, answer in zip(PROMPTS[:10], free_run, strict=False):
        tokens = answer["output_ids"]
        common = max(set(tokens), key=tokens.count)
        for bias in ({str(common): -100.0}, {str(common): 2.0, str(tokens[1]): -1.5}):
            asked.append((prompt, {"logit_bias": bias, "max_new_tokens": 32, "ignore_eos": True}))
    answers = both(plain_server, tree_server, asked)
    banned = [int(next(iter(options["logit_bias"]))) for _, options in asked][::2]
    assert not any(b in a["output_ids"] for a, b in zip(answers[::2], banned, strict=True))


def test_logprobs(plain_server: Server, tree_server: Server) -> None:
    """Of the accepted tokens, of the alternatives, and of the prompt."""
    extra = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}
    asked = [(p, {"extra": extra, "max_new_tokens": 24, "ignore_eos": True}) for p in PROMPTS[3:9]]
    plain = [plain_server.ask(p, **options)["meta_info"] for p, options in asked]
    tree = [a["meta_info"] for a in both(plain_server, tree_server, asked)]

    def numbers(infos: list[Any], field: str) -> list[tuple[float | None, int]]:
        flat = [entry for info in infos for entry in info[field]]
        if "top" in field:
            flat = [entry for entries in flat for entry in entries or ()]
        return [(entry[0], entry[1]) for entry in flat]

    for field in (
        "output_token_logprobs",
        "output_top_logprobs",
        "input_token_logprobs",
        "input_top_logprobs",
    ):
        ours, theirs = numbers(tree, field), numbers(plain, field)
        assert len(theirs) > 50
        assert [token for _, token in ours] == [token for _, token in theirs]
        gaps = [abs((a or 0) - (b or 0)) for (a, _), (b, _) in zip(ours, theirs, strict=True)]
        assert max(gaps) < 1e-3, field


# Requests that come, go and are given up.


def test_requests_join_and_leave(tree_server: Server, free_run: Answers) -> None:
    """At any moment, with lengths of their own: each answer is a beginning of its free run."""
    dice = random.Random(3)
    orders = [(dice.randrange(len(PROMPTS)), dice.randint(1, TOKENS)) for _ in range(60)]

    def ask(order: tuple[int, int]) -> list[int]:
        number, limit = order
        time.sleep(random.Random(repr(order)).random() * 0.15)
        answer = tree_server.ask(PROMPTS[number], max_new_tokens=limit, ignore_eos=True)
        return answer["output_ids"]

    with ThreadPoolExecutor(12) as pool:
        for found, (number, limit) in zip(pool.map(ask, orders), orders, strict=True):
            assert found == free_run[number]["output_ids"][:limit]


def test_aborts(tree_server: Server, free_run: Answers) -> None:
    """Some requests are aborted and some clients hang up; the others do not notice."""
    endless = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    ended: list[Any] = []

    def abandoned(number: int) -> None:
        body = {"input_ids": PROMPTS[number], "sampling_params": endless, "rid": f"gone-{number}"}
        ended.append(tree_server.post("/generate", body).json())

    def hang_up(number: int) -> None:
        body = {"input_ids": PROMPTS[number], "sampling_params": endless, "stream": True}
        with requests.post(f"{tree_server.url}/generate", json=body, stream=True, timeout=60) as r:
            next(r.iter_lines())

    threads = [threading.Thread(target=abandoned, args=(n,)) for n in range(4)]
    threads += [threading.Thread(target=hang_up, args=(n,)) for n in range(4, 8)]
    with ThreadPoolExecutor(1) as pool:
        for thread in threads:
            thread.start()
        others = pool.submit(run, tree_server, PROMPTS)
        time.sleep(0.3)
        for number in range(4):
            tree_server.post("/abort_request", {"rid": f"gone-{number}"})
        assert_same(others.result(), free_run)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert [a["meta_info"]["finish_reason"]["type"] for a in ended] == ["abort"] * 4
    assert all(len(a["output_ids"]) < 400 for a in ended)
    assert_same(run(tree_server, PROMPTS), free_run)


def test_streaming(tree_server: Server, free_run: Answers) -> None:
    """Pieces arrive while the answer grows, and together they are the whole answer."""
    parameters = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    for number in (0, 5):
        body = {"input_ids": PROMPTS[number], "sampling_params": parameters, "stream": True}
        with requests.post(f"{tree_server.url}/generate", json=body, stream=True, timeout=60) as r:
            lines = [line.removeprefix(b"data: ") for line in r.iter_lines() if line]
        assert lines.pop() == b"[DONE]"
        texts = [json.loads(line)["text"] for line in lines]
        assert len(texts) > 5
        assert all(b.startswith(a) for a, b in pairwise(texts))
        assert texts[-1] == decode(free_run[number]["output_ids"])


def test_text_prompts_and_parallel_samples(plain_server: Server, tree_server: Server) -> None:
    text = "hello world"
    expected = plain_server.ask(encode(text), max_new_tokens=20)
    answers = tree_server.ask(text, n=3, max_new_tokens=20)
    assert ids(answers) == [expected["output_ids"]] * 3
    assert [a["text"] for a in answers] == [expected["text"]] * 3


# Greedy and sampled requests together.


def test_greedy_requests_beside_sampled_ones(tree_server: Server, free_run: Answers) -> None:
    kinds: list[dict[str, float]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
    ]

    def sampled(number: int) -> list[int]:
        options = {**kinds[number % len(kinds)], "max_new_tokens": 60, "ignore_eos": True}
        return tree_server.ask(PROMPTS[number % len(PROMPTS)], **options)["output_ids"]

    with ThreadPoolExecutor(8) as pool:
        noise = [pool.submit(sampled, number) for number in range(40)]
        assert_same(run(tree_server, PROMPTS), free_run)
        drawn = [future.result() for future in noise]
    assert all(len(tokens) == 60 and max(tokens) < VOCAB for tokens in drawn)
    # Sampled requests really were sampled.
    assert len({tuple(tokens) for tokens in drawn}) == 40


def test_top_k_of_one_is_greedy(tree_server: Server, free_run: Answers) -> None:
    options = {"temperature": 0.8, "top_k": 1, "max_new_tokens": TOKENS, "ignore_eos": True}
    assert ids(tree_server.ask_all(PROMPTS, **options)) == ids(free_run)
