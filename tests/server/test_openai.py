"""OpenAI's interface, through its own client, with DFLASH2 and with plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from agree import TEXTS, Both, answers_agree, assert_agree, visible
from serving import Server
from tinypair import VOCAB
from workload import random_ids


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
