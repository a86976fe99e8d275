"""The ways to ask: OpenAI's interface, frontend programs, the offline engine, ids without text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from agree import Order, assert_agree, both, visible
from serving import Server, acceptance
from tinypair import SPECIAL, VOCAB, Pairs, decode
from workload import prompts, random_ids

TEXTS = [decode(random_ids(n, ("text", n))) for n in (5, 12, 30)]
Both = tuple[Server, Server]


@pytest.fixture(scope="module")
def servers(plain_server: Server, tree_server: Server) -> Both:
    """DFLASH2 and plain decoding."""
    return tree_server, plain_server


FLAGS = ("--skip-tokenizer-init", "--enable-return-hidden-states", "--disable-radix-cache")
ORIGINAL = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}


@pytest.fixture(scope="module")
def bare_servers(serve: Any, pairs: Pairs) -> Iterator[Both]:
    """Without tokenizer and radix cache, with hidden states.

    Of what a cache holds no hidden states are computed, so that they would depend on its contents.
    """
    pair = pairs.pair()
    with (
        serve(pair.target, pair.drafter, *FLAGS, env=ORIGINAL) as tree,
        serve(pair.target, None, *FLAGS, env=ORIGINAL) as plain,
    ):
        yield tree, plain
        assert tree.errors() == []


def answers_agree(servers: Both, ask: Callable[[Server], Any]) -> Any:
    ours, theirs = (ask(server) for server in servers)
    assert_agree(ours, theirs)
    return ours


# OpenAI's interface, through its own client.


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": TEXTS[0], "max_tokens": 20},
    "several": {"prompt": TEXTS, "max_tokens": 9},
    "ids": {"prompt": random_ids(9, "ids"), "max_tokens": 20},
    "lists of ids": {"prompt": [random_ids(9, 1), random_ids(4, 2)], "max_tokens": 11},
    "n": {"prompt": TEXTS[1], "max_tokens": 8, "n": 3},
    "logprobs": {"prompt": TEXTS[1], "max_tokens": 17, "logprobs": 3},
    "chosen logprobs only": {"prompt": TEXTS[1], "max_tokens": 3, "logprobs": 0},
    "echo": {"prompt": TEXTS[2], "max_tokens": 6, "logprobs": 2, "echo": True},
    "one token": {"prompt": TEXTS[2], "max_tokens": 1, "logprobs": 1},
    "stop": {"prompt": TEXTS[0], "max_tokens": 60, "stop": ["a", "e", "5"]},
    "SGLang's own": {
        "prompt": TEXTS[0],
        "max_tokens": 60,
        "logprobs": 1,
        "extra_body": {
            "stop_token_ids": [9, 10, 11],
            "no_stop_trim": True,
            "return_token_ids": True,
        },
    },
    "regex": {"prompt": TEXTS[0], "max_tokens": 30, "extra_body": {"regex": "[a-f]{3}[0-9]+x"}},
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(servers: Both, name: str) -> None:
    body = {"model": "m", "temperature": 0, **COMPLETIONS[name]}

    def ask(server: Server) -> Any:
        return client(server).completions.create(**body).model_dump()

    whole = answers_agree(servers, ask)
    for choice in whole["choices"]:
        if body.get("logprobs") is not None and "echo" not in body:
            tokens = choice["logprobs"]["tokens"]
            if "stop" not in body and choice["finish_reason"] == "length":
                assert "".join(tokens) == choice["text"]
            # Stock SGLang gives no offsets, speculation or not.
            assert choice["logprobs"]["text_offset"] == [-1] * len(tokens)


def joined(stream: Any) -> dict[int, dict[str, Any]]:
    """The choices put together from their pieces."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        for piece in chunk.choices:
            whole = choices.setdefault(piece.index, {"text": "", "logprobs": None, "ids": []})
            whole["text"] += piece.text
            whole["ids"] += getattr(piece, "token_ids", None) or []
            if piece.logprobs is not None:
                told = piece.logprobs.model_dump()
                if whole["logprobs"] is None:
                    whole["logprobs"] = told
                else:
                    for field, values in told.items():
                        whole["logprobs"][field] += values
            if piece.finish_reason is not None:
                assert "finish_reason" not in whole
                whole["finish_reason"] = piece.finish_reason
                whole["matched_stop"] = piece.matched_stop
        if chunk.usage is not None:
            choices.setdefault(-1, {})["usage"] = chunk.usage.model_dump()
    return choices


@pytest.mark.parametrize("name", [name for name in COMPLETIONS if name != "chosen logprobs only"])
def test_completions_in_pieces(tree_server: Server, name: str) -> None:
    """Every token once; together they are what is answered without a stream."""
    body = {"model": "m", "temperature": 0, **COMPLETIONS[name]}
    if isinstance(body["prompt"][0], (str, list)) and not isinstance(body["prompt"], str):
        body["prompt"] = body["prompt"][0]
    create = client(tree_server).completions.create
    whole = create(**body)
    pieces = joined(create(**body, stream=True, stream_options={"include_usage": True}))
    usage = pieces.pop(-1)["usage"]
    assert usage["completion_tokens"] == whole.usage.completion_tokens
    assert usage["prompt_tokens"] == whole.usage.prompt_tokens
    assert sorted(pieces) == [choice.index for choice in whole.choices]
    for choice in whole.choices:
        found = pieces[choice.index]
        assert found["text"] == choice.text
        assert found["finish_reason"] == choice.finish_reason
        assert found["matched_stop"] == choice.matched_stop
        told = choice.logprobs.model_dump() if choice.logprobs else None
        assert_agree(found["logprobs"], told)
        assert found["ids"] == (getattr(choice, "token_ids", None) or [])


CHATS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 20},
    "logprobs": {"max_tokens": 17, "logprobs": True, "top_logprobs": 3},
    "chosen logprobs only": {"max_tokens": 5, "logprobs": True},
    "n": {"max_tokens": 6, "n": 2, "logprobs": True, "top_logprobs": 1},
    "stop": {"max_completion_tokens": 60, "stop": ["o", "7"], "logprobs": True},
    "long": {"max_tokens": 200},
    "schema": {
        "max_tokens": 50,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"enum": ["abc", "abd", 5]}},
        },
    },
}
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is 5+7?"}]


@pytest.mark.parametrize("name", CHATS)
def test_chat(servers: Both, name: str) -> None:
    body = {"model": "m", "temperature": 0, "messages": MESSAGES, **CHATS[name]}

    def ask(server: Server) -> Any:
        return client(server).chat.completions.create(**body).model_dump()

    def in_pieces(server: Server) -> Any:
        found: dict[int, list[Any]] = {}
        for chunk in client(server).chat.completions.create(**body, stream=True):
            for piece in chunk.choices:
                whole = found.setdefault(piece.index, ["", [], None, None])
                whole[0] += piece.delta.content or ""
                whole[1] += (piece.logprobs.model_dump()["content"] if piece.logprobs else []) or []
                whole[2] = piece.finish_reason or whole[2]
                matched = getattr(piece, "matched_stop", None)
                whole[3] = whole[3] if matched is None else matched
        return found

    whole = answers_agree(servers, ask)
    streamed = in_pieces(servers[0])
    for choice in whole["choices"]:
        told = (choice["logprobs"] or {}).get("content") or []
        ending = [choice["finish_reason"], choice["matched_stop"]]
        assert_agree(streamed[choice["index"]], [choice["message"]["content"], told, *ending])
        if body.get("logprobs") and choice["finish_reason"] == "length":
            assert "".join(entry["token"] for entry in told) == choice["message"]["content"]


def test_scores(servers: Both) -> None:
    """Of the next token, without generating one."""
    body = {"query": TEXTS[1], "items": TEXTS[:2], "label_token_ids": [4, 9, 30], "model": "m"}

    def ask(server: Server) -> Any:
        response = server.post("/v1/score", body)
        assert response.status_code == 200, response.text
        return response.json()["scores"]

    assert len(answers_agree(servers, ask)) == 2


def test_special_tokens_in_the_text(servers: Both) -> None:
    tree, plain = servers
    options = {"max_new_tokens": 120, "ignore_eos": True}
    orders: list[Order] = [
        (prompt, {**options, "skip_special_tokens": skip, "spaces_between_special_tokens": spaces})
        for prompt in prompts()[3:7]
        for skip, spaces in ((True, True), (False, True), (False, False))
    ]
    answers = both(plain, tree, orders)
    assert any(SPECIAL[0] in answer["text"] for answer in answers)


def test_what_cannot_be_told_is_refused(servers: Both) -> None:
    parameters = {"temperature": 0, "max_new_tokens": 5}
    body = {"input_ids": [5, 6], "sampling_params": parameters, "return_sampling_mask": True}
    response = servers[0].post("/generate", body)
    assert response.status_code == 400
    assert "DFLASH2 does not support return_sampling_mask yet: leave it out." in response.text
    body = {"input_ids": [5, 6], "sampling_params": {**parameters, "beam_width": 2}}
    response = servers[0].post("/generate", body)
    assert response.status_code == 400
    assert "Beam search is not supported with speculative decoding." in response.text


# SGLang frontend programs.


def program() -> Any:
    import sglang as sgl

    @sgl.function
    def program(s: Any, question: str) -> None:
        s += question
        s += sgl.gen("first", max_tokens=12, stop=["e"])
        s += "\n" + sgl.select("pick", ["abc", "xyz", "hello"])
        forks = s.fork(3)
        for number, fork in enumerate(forks):
            fork += f" {number}: "
            fork += sgl.gen("part", max_tokens=6 + number, regex="[a-z ]+")
        s += " ".join(fork["part"] for fork in forks)
        s += sgl.gen("last", max_tokens=20, return_logprob=True, top_logprobs_num=2)
        s += sgl.gen("kind", choices=["yes", "no"])

    return program


def test_frontend_programs(servers: Both) -> None:
    import sglang as sgl

    function = program()

    def ask(server: Server) -> Any:
        backend = sgl.RuntimeEndpoint(server.url)
        asked = [{"question": text} for text in TEXTS]
        states = function.run_batch(asked, backend=backend, temperature=0, num_threads=3)
        streaming = function.run(question=TEXTS[0], backend=backend, temperature=0, stream=True)
        pieces = "".join(streaming.text_iter())
        assert pieces == streaming.text() == states[0].text()
        told = [state.get_meta_info("last")["output_top_logprobs"] for state in states]
        names = ("first", "pick", "last", "kind")
        return [[state[name] for name in names] for state in states], told

    texts, _ = answers_agree(servers, ask)
    assert {pick for _, pick, *_ in texts} <= {"abc", "xyz", "hello"}


# The offline engine.


def test_the_offline_engine(
    servers: Both, bare_servers: Both, pairs: Pairs, logs: Iterator[Path]
) -> None:
    """Texts and ids, one after another, awaited together, as a batch, as a stream."""
    pair, extra = pairs.pair(), {"return_logprob": True, "top_logprobs_num": 2}
    greedy = {"temperature": 0, "max_new_tokens": 20}
    asked: list[dict[str, Any]] = [
        {"prompt": TEXTS[1], "sampling_params": greedy},
        {"prompt": TEXTS[0], "sampling_params": {**greedy, "stop": ["e", "n"]}, **extra},
        *({"input_ids": ids, "sampling_params": greedy, **extra} for ids in prompts()[2:5]),
        # The interface over HTTP does not take this value.
        *(
            {**one, "sampling_params": {**greedy, "max_new_tokens": n}}
            for one in ({"input_ids": prompts()[6], "return_hidden_states": "last"},)
            for n in (1, 2, 9, 20)
        ),
    ]
    keywords = {
        "model_path": str(pair.target),
        "dtype": "float32",
        "max_total_tokens": 4096,
        "speculative_algorithm": "DFLASH2",
        "speculative_draft_model_path": str(pair.drafter),
        "return_hidden_states_mode": "last",
        "log_level": "error",
    }
    log = next(logs)
    with log.open("w") as errors:
        script = Path(__file__).with_name("offline.py")
        done = subprocess.run(
            [sys.executable, str(script), json.dumps(keywords), json.dumps(asked)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(log.parent)},
            timeout=240,
            text=True,
        )
    line = next((s for s in done.stdout.splitlines() if s.startswith("ANSWERS")), None)
    assert line is not None, log.read_text()[-3000:]
    found = json.loads(line.removeprefix("ANSWERS "))
    tree, plain_with_states = servers[0], bare_servers[1]
    for number, one in enumerate(asked):
        if "return_hidden_states" in one:
            last = found["alone"][number]["meta_info"]["hidden_states"]
            states = {"return_hidden_states": True}
            answer = plain_with_states.ask(one["input_ids"], states, **one["sampling_params"])
            # Of the first token there are those of the whole prompt.
            rows = answer["meta_info"]["hidden_states"]
            assert_agree(last, rows[-1] if len(rows) > 1 else rows[0][-1])
            assert found["alone"][number]["output_ids"] == answer["output_ids"]
            continue
        prompt = one.get("prompt", one.get("input_ids"))
        more = {key: value for key, value in one.items() if key in extra}
        expected = visible(tree.ask(prompt, more, **one["sampling_params"]))
        for way in ("alone", "awaited"):
            assert_agree(visible(found[way][number]), expected)
        if number == 0:
            assert_agree(visible(found["streamed"][-1]), expected)
            assert len(found["streamed"]) > 2
    for answer, ids in zip(found["together"], prompts()[2:5], strict=False):
        assert_agree(visible(answer), visible(tree.ask(ids, max_new_tokens=12)))


# Ids in, ids out, and hidden states.


def test_ids_without_a_tokenizer(bare_servers: Both) -> None:
    tree, plain = bare_servers
    extra = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    kinds: list[dict[str, Any]] = [
        {"max_new_tokens": 24, "ignore_eos": True},
        {"max_new_tokens": 150},
        {"max_new_tokens": 40, "stop_token_ids": [9, 10, 11]},
        {"max_new_tokens": 12, "extra": extra},
        {"max_new_tokens": 8, "logit_bias": {"9": 4.0}},
    ]
    orders: list[Order] = [(prompt, kind) for prompt in prompts()[3:9] for kind in kinds]
    answers = both(plain, tree, orders)
    assert all("text" not in answer for answer in answers)
    assert any(a["meta_info"]["finish_reason"]["type"] == "stop" for a in answers)


def test_hidden_states(bare_servers: Both) -> None:
    """Of the prompt and of each token, or none: all in one batch."""
    tree, plain = bare_servers
    kinds: list[dict[str, Any]] = [
        {"max_new_tokens": 20, "extra": {"return_hidden_states": True}},
        {"max_new_tokens": 20},
        {"max_new_tokens": 1, "extra": {"return_hidden_states": True}},
        {
            "max_new_tokens": 40,
            "stop_token_ids": [9, 10, 11],
            "extra": {"return_hidden_states": True},
        },
        {"max_new_tokens": 9, "extra": {"return_hidden_states": True, "return_logprob": True}},
    ]
    orders: list[Order] = [(prompt, kind) for prompt in prompts()[2:10] for kind in kinds]
    answers = both(plain, tree, orders)
    for answer, (prompt, options) in zip(answers, orders, strict=True):
        states = answer["meta_info"].get("hidden_states")
        wanted = options.get("extra", {}).get("return_hidden_states")
        if wanted:
            assert len(states) == len(answer["output_ids"])
            assert len(states[0]) == len(prompt)
        else:
            assert states is None
    assert acceptance(answers) > 1.5


def test_logprobs_before_the_temperature(bare_servers: Both, pairs: Pairs) -> None:
    import torch
    from test_sampling import Exact

    tree, plain = bare_servers
    model = Exact(pairs.target()).model
    for server in (tree, plain):
        answer = server.ask(
            prompts()[4], {"return_logprob": True}, temperature=2.0, top_k=20, max_new_tokens=30
        )
        tokens = answer["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompts()[4] + tokens])).logits[0]
        expected = logits[len(prompts()[4]) - 1 : -1].log_softmax(-1)
        found = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
        chosen = [row[token].item() for row, token in zip(expected, tokens, strict=True)]
        assert_agree(found, chosen)


def test_what_needs_a_tokenizer_is_refused(bare_servers: Both) -> None:
    for parameters in ({"stop": ["a"]}, {"stop_regex": ["a+"]}):
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, **parameters}}
        ours, theirs = (server.post("/generate", body) for server in bare_servers)
        assert ours.status_code == theirs.status_code == 400
        assert ours.json() == theirs.json()


# Everything at once.


def test_all_interfaces_together(servers: Both) -> None:
    """Requests of every interface in one batch do not disturb one another."""
    tree, plain = servers

    def alone(server: Server) -> list[Callable[[], Any]]:
        asked = client(server)
        return [
            lambda: visible(server.ask(TEXTS[0], max_new_tokens=40, stop=["q", "j"])),
            lambda: asked.completions.create(
                model="m", prompt=TEXTS[1], max_tokens=40, temperature=0, logprobs=2
            ).model_dump(),
            lambda: asked.chat.completions.create(
                model="m", messages=MESSAGES, max_tokens=40, temperature=0
            ).model_dump(),
            lambda: visible(server.ask(random_ids(20, "all"), max_new_tokens=40, n=2)[1]),
        ]

    with ThreadPoolExecutor(12) as pool:
        noise = [
            pool.submit(tree.ask, random_ids(9, ("noise", n)), temperature=1.2, max_new_tokens=50)
            for n in range(6)
        ]
        found = list(pool.map(lambda ask: ask(), alone(tree)))
        assert all(max(f.result()["output_ids"]) < VOCAB for f in noise)
    assert_agree(found, [ask() for ask in alone(plain)])
