"""Answers end where plain decoding ends them: not a token later, and not one earlier."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import requests
from agree import Order, ask_all, assert_agree, both, visible
from serving import Server, acceptance
from tinypair import CONTEXT, EOS, SPECIAL, decode
from workload import TOKENS, Answers, prompts, random_ids, run

PROMPTS = prompts()
LONGEST = 9  # nodes on a path of the default tree, and one more


@pytest.fixture(scope="module")
def free_run(plain_server: Server) -> Answers:
    """Plain answers of 48 tokens to ``PROMPTS``, the end-of-text token ignored."""
    return run(plain_server, PROMPTS)


def reasons(answers: list[Any]) -> list[tuple[str, Any]]:
    found = [answer["meta_info"]["finish_reason"] for answer in answers]
    return [(reason["type"], reason.get("matched", reason.get("length"))) for reason in found]


def pieces(tokens: list[int], dice: random.Random, count: int) -> list[str]:
    """Parts of the text without an end-of-text token in them."""
    starts = [i for i in range(len(tokens) - 4) if EOS not in tokens[i : i + 4]]
    return [
        decode(tokens[(at := dice.choice(starts)) : at + dice.randint(1, 3)]) for _ in range(count)
    ]


def pattern(text: str, dice: random.Random) -> str:
    """A regex that may match around ``text``, often only if one looks after the right token."""
    literal = re.escape(text)
    anywhere = f"{literal[:-1] if text[-1:].isalnum() else literal}[a-z0-9 ]"
    return dice.choice(
        [literal, anywhere, f"{literal}$", f"^{literal}", f"[^a]{literal}$", f"{literal}.?$"]
    )


def any_stops(tokens: list[int], dice: random.Random) -> dict[str, Any]:
    """Several at once, close together, so that more than one lies in an accepted path."""
    near = tokens[(at := dice.randrange(len(tokens) - 14)) : at + 14]
    clean = near if sum(t != EOS for t in near) > 8 and EOS not in near else tokens
    options: dict[str, Any] = {"max_new_tokens": dice.choice([at + 3, at + 7, TOKENS, TOKENS])}
    if dice.random() < 0.7:
        options["stop"] = pieces(clean, dice, dice.randint(1, 3))
    if dice.random() < 0.5:
        options["stop_regex"] = [pattern(p, dice) for p in pieces(clean, dice, dice.randint(1, 2))]
    if dice.random() < 0.4:
        options["stop_token_ids"] = [dice.choice(near)]
    return options | {"ignore_eos": dice.random() < 0.4, "no_stop_trim": dice.random() < 0.5}


@pytest.mark.parametrize("seed", range(3))
def test_several_stops_at_once(
    plain_server: Server, tree_server: Server, free_run: Answers, seed: int
) -> None:
    dice = random.Random(seed)
    orders: list[Order] = [
        (prompt, any_stops(answer["output_ids"], dice))
        for prompt, answer in zip(PROMPTS, free_run, strict=True)
        for _ in range(8)
    ]
    answers = both(plain_server, tree_server, orders)
    assert len(set(reasons(answers))) > 40
    assert acceptance([a for a in answers if len(a["output_ids"]) > 12]) > 1.5


def test_a_stop_string_after_the_end_of_the_text(plain_server: Server, tree_server: Server) -> None:
    """The end-of-text token wins where it comes first, also within one accepted path."""
    orders: list[Order] = []
    asked = [random_ids(9, ("eos", number)) for number in range(40)]
    free = plain_server.ask_all(asked, max_new_tokens=60, ignore_eos=True)
    for prompt, answer in zip(asked, free, strict=True):
        tokens = answer["output_ids"]
        if EOS not in tokens[:50]:
            continue
        end = tokens.index(EOS)
        for after in range(1, 4):
            stop = decode(tokens[end + after : end + after + 1])
            if stop and stop not in decode(tokens[: end + 1]):
                orders.append((prompt, {"max_new_tokens": 60, "stop": [stop]}))
    assert len(orders) > 10
    answers = both(plain_server, tree_server, orders)
    assert set(reasons(answers)) == {("stop", EOS)}


def test_every_limit(plain_server: Server, tree_server: Server, free_run: Answers) -> None:
    """From none to more than two trees are deep, in one batch."""
    orders: list[Order] = [
        (prompt, {"max_new_tokens": limit, "ignore_eos": True})
        for prompt in PROMPTS[3:7]
        for limit in range(2 * LONGEST + 3)
    ]
    answers = both(plain_server, tree_server, orders)
    for answer, (prompt, options) in zip(answers, orders, strict=True):
        limit = options["max_new_tokens"]
        assert answer["output_ids"] == free_run[PROMPTS.index(prompt)]["output_ids"][:limit]
        assert reasons([answer]) == [("length", limit)]
        assert answer["meta_info"]["completion_tokens"] == limit


def test_no_limit_but_the_context(plain_server: Server, tree_server: Server) -> None:
    """With and without a limit beyond it; near its end a tree is wider than what is left."""
    orders: list[Order] = []
    for left in (*range(7, 7 + LONGEST), 24, 60):
        prompt = random_ids(CONTEXT - left, ("context", left))
        for limit in (None, left):
            orders.append((prompt, {"max_new_tokens": limit, "ignore_eos": True}))
    answers = both(plain_server, tree_server, orders)
    for answer, (prompt, _) in zip(answers, orders, strict=True):
        total = len(prompt) + len(answer["output_ids"])
        assert reasons([answer]) == [("length", len(answer["output_ids"]))]
        assert CONTEXT - 3 < total <= CONTEXT


def test_too_long_for_the_context(plain_server: Server, tree_server: Server) -> None:
    """Refused in the same words."""
    for length, limit in ((CONTEXT - 3, 2), (CONTEXT, 1), (CONTEXT - 20, 60)):
        body = {
            "input_ids": random_ids(length, "too long"),
            "sampling_params": {"temperature": 0, "max_new_tokens": limit},
        }
        ours, theirs = (s.post("/generate", body) for s in (tree_server, plain_server))
        assert ours.status_code == theirs.status_code == 400
        assert ours.json() == theirs.json()


def test_sampled_answers_end_at_the_first_stop(tree_server: Server) -> None:
    """No plain answer to compare with: the rule itself is checked on what was drawn."""
    dice = random.Random(5)
    orders: list[Order] = []
    for number in range(60):
        options = {
            "max_new_tokens": dice.randint(1, 60),
            "stop": [decode(random_ids(dice.randint(1, 2), (number, n))) for n in range(3)],
            "stop_token_ids": random_ids(1, ("id", number)),
            "temperature": dice.choice([0.7, 1.0, 1.3]),
            "no_stop_trim": True,
        }
        orders.append((random_ids(12, ("sampled", number)), options))
    answers = ask_all(tree_server, orders)
    for answer, (_, options) in zip(answers, orders, strict=True):
        tokens = answer["output_ids"]
        ends = {EOS, *options["stop_token_ids"]}
        assert not ends & set(tokens[:-1])
        assert not any(stop in decode(tokens[:-1]) for stop in options["stop"])
        kind, matched = reasons([answer])[0]
        if kind == "length":
            assert len(tokens) == options["max_new_tokens"] == matched
            assert tokens[-1] not in ends
        elif isinstance(matched, int):
            assert tokens[-1] == matched in ends
        elif matched not in SPECIAL[EOS]:  # SGLang's check reads the names of special tokens, too
            assert answer["text"].endswith(matched)
    assert len({kind for kind, _ in reasons(answers)}) == 2
    assert {type(matched) for _, matched in reasons(answers)} == {int, str}


def test_usage(plain_server: Server, tree_server: Server) -> None:
    """Prompt, completion and cached tokens over the turns of conversations, one after another."""
    found: list[list[Any]] = []
    for server in (plain_server, tree_server):
        server.flush()
        counts = []
        for number in range(4):
            text = random_ids(30 + number, ("usage", number % 2))  # twins find each other
            for turn in range(4):
                options = {"max_new_tokens": 5 + 6 * turn, "ignore_eos": turn % 2 == 0}
                answer = server.ask(text, **options)
                meta = answer["meta_info"]
                counts.append(
                    [meta[f"{kind}_tokens"] for kind in ("prompt", "completion", "cached")]
                )
                text = text + answer["output_ids"] + random_ids(3, (number, turn))
        for extra in ({"extra_key": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}, {}):
            meta = server.ask(text, extra, max_new_tokens=4)["meta_info"]
            counts.append([meta[f"{kind}_tokens"] for kind in ("prompt", "completion", "cached")])
        found.append(counts)
    plain, tree = found
    for (*ours, cached), (*theirs, expected) in zip(tree, plain, strict=True):
        assert ours == theirs
        # Of an answer's last token there is KV or not: with plain decoding if a step had begun
        # before the answer was known to have ended, with DFLASH2 if the tree went on.
        assert abs(cached - expected) <= 1
    assert any(cached for *_, cached in tree)


def test_sessions_go_on_from_the_end_of_the_answer(
    plain_server: Server, tree_server: Server, free_run: Answers
) -> None:
    """Tokens that a round accepted past a stop are in no later turn's prompt."""
    found: list[list[Any]] = []
    for server in (plain_server, tree_server):
        turns = []
        for number in range(3, 9):
            session = server.post("/open_session", {"capacity_of_str_len": 2000}).json()
            params: dict[str, Any] = {"id": session, "rid": None}
            prompt = PROMPTS[number]
            for turn in range(4):
                dice = random.Random(repr((number, turn)))
                options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": turn == 3}
                if turn < 2:
                    options["stop_token_ids"] = random_ids(6, (number, turn))
                elif turn == 2:
                    options["stop"] = list(decode(random_ids(4, (number, turn))))
                answer = server.ask(prompt, {"session_params": params}, **options)
                turns.append((visible(answer), reasons([answer])))
                params = {"id": session, "rid": answer["meta_info"]["id"]}
                prompt = random_ids(dice.randint(1, 3), (number, turn))
            server.post("/close_session", {"session_id": session})
        found.append(turns)
    assert_agree(*(json.loads(json.dumps(turns)) for turns in found))
    assert sum(kind == "stop" for _, [(kind, _)] in found[0]) > 8


def test_the_stop_string_is_never_streamed(
    plain_server: Server, tree_server: Server, free_run: Answers
) -> None:
    for number in (0, 4, 8, 12):
        tokens = free_run[number]["output_ids"]
        stops = pieces(tokens, random.Random(number), 2)
        parameters = {"temperature": 0, "max_new_tokens": TOKENS, "stop": stops, "ignore_eos": True}
        expected = plain_server.ask(PROMPTS[number], **parameters)
        body = {"input_ids": PROMPTS[number], "sampling_params": parameters, "stream": True}
        with requests.post(
            f"{tree_server.url}/generate", json=body, stream=True, timeout=60
        ) as response:
            lines = [line.removeprefix(b"data: ") for line in response.iter_lines() if line]
        found = [json.loads(line) for line in lines[:-1]]
        assert_agree(visible(found[-1]), visible(expected))
        for piece in found:
            assert expected["text"].startswith(piece["text"])
