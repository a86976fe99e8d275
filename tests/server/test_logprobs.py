"""Log-probabilities are plain decoding's: of tokens, of alternatives, of chosen ids, of prompts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import requests
import torch
from agree import CLOSE, Order, ask_all, assert_agree, both, visible
from serving import Server, acceptance
from test_sampling import Exact
from tinypair import EOS, VOCAB, Pairs, decode
from workload import TOKENS, prompts, random_ids

PROMPTS = prompts()[3:11]
KINDS: list[dict[str, Any]] = [
    {"return_logprob": False},
    {"return_logprob": True},
    {"return_logprob": True, "top_logprobs_num": 1},
    {"return_logprob": True, "top_logprobs_num": 5, "return_text_in_logprobs": True},
    {"return_logprob": True, "token_ids_logprob": [EOS, 7, 7, VOCAB - 1]},
    {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
    {
        "return_logprob": True,
        "top_logprobs_num": 3,
        "token_ids_logprob": [9, 4],
        "logprob_start_len": 4,
        "return_text_in_logprobs": True,
    },
]


def lengths(answer: dict[str, Any]) -> set[int]:
    """Of the list of tokens and of all lists that tell something of each of them."""
    meta = answer["meta_info"]
    names = [name for name in meta if name.startswith("output_") and name.endswith("logprobs")]
    assert names
    told = {len(meta[name]) for name in names if meta[name]}
    return told | {meta["completion_tokens"], len(answer["output_ids"])}


def test_all_kinds_in_one_batch(plain_server: Server, tree_server: Server) -> None:
    orders: list[Order] = [
        (prompt, {"extra": kind, "max_new_tokens": 24, "ignore_eos": True})
        for prompt in PROMPTS
        for kind in KINDS
    ]
    random.Random(0).shuffle(orders)
    answers = both(plain_server, tree_server, orders)
    for answer, (_, options) in zip(answers, orders, strict=True):
        kind, meta = options["extra"], answer["meta_info"]
        if kind["return_logprob"]:
            assert lengths(answer) == {24}
            assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
        else:
            assert "output_token_logprobs" not in meta
        if kind.get("top_logprobs_num") and kind["return_logprob"]:
            for (best, *_), (chosen, *_) in zip(
                meta["output_top_logprobs"], meta["output_token_logprobs"], strict=True
            ):
                assert best[0] == pytest.approx(chosen, abs=CLOSE)  # greedy takes the best
    assert acceptance(answers) > 2


def test_all_of_the_vocabulary(plain_server: Server, tree_server: Server) -> None:
    """Each token once, the best first; the two tokens with equal logits may change places."""
    extra = {"return_logprob": True, "top_logprobs_num": VOCAB}
    options = {"extra": extra, "max_new_tokens": 12, "ignore_eos": True}
    orders: list[Order] = [(prompt, options) for prompt in PROMPTS[:3]]
    ours, theirs = ask_all(tree_server, orders), ask_all(plain_server, orders)
    for a, b in zip(ours, theirs, strict=True):
        rows = [answer["meta_info"]["output_top_logprobs"] for answer in (a, b)]
        for mine, other in zip(*rows, strict=True):
            values = [value for value, *_ in mine]
            assert values == sorted(values, reverse=True)
            assert sum(torch.tensor(values).exp()) == pytest.approx(1, abs=1e-4)
            tables = [{str(token): value for value, token, _ in row} for row in (mine, other)]
            assert len(tables[0]) == VOCAB
            assert_agree(*tables)


def test_flat_lists(plain_server: Server, tree_server: Server) -> None:
    flat = {"return_flat_raw_top_logprobs": True, "return_flat_raw_output_top_logprobs": True}
    extra = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, **flat}
    orders: list[Order] = [(p, {"extra": extra, "max_new_tokens": 15}) for p in PROMPTS]
    answers = both(plain_server, tree_server, orders)
    assert any("flat" in name for name in answers[0]["meta_info"])


def test_at_every_ending(plain_server: Server, tree_server: Server) -> None:
    """Short limits, stop strings, stop tokens and the end of the text inside accepted paths."""
    free = plain_server.ask_all(PROMPTS, max_new_tokens=TOKENS, ignore_eos=True)
    extra = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [EOS]}
    orders: list[Order] = []
    for prompt, answer in zip(PROMPTS, free, strict=True):
        tokens = [t for t in answer["output_ids"] if t != EOS]
        for options in (
            *({"max_new_tokens": n, "ignore_eos": True} for n in (1, 2, 3, 5, 8)),
            {"max_new_tokens": TOKENS, "stop": decode(tokens[9:11])},
            {"max_new_tokens": TOKENS, "stop": decode(tokens[14:15]), "no_stop_trim": True},
            {"max_new_tokens": TOKENS, "stop_token_ids": [tokens[11]]},
            {"max_new_tokens": 150},
        ):
            orders.append((prompt, {"extra": extra, **options}))
    answers = both(plain_server, tree_server, orders)
    for answer in answers:
        assert lengths(answer) == {len(answer["output_ids"])}
    ends = {str(a["meta_info"]["finish_reason"].get("matched")) for a in answers}
    assert len(ends) > 6


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0},
    {"temperature": 1.4, "top_k": 5, "min_p": 0.05},
    {"temperature": 0.0},
    {"temperature": 1.2, "logit_bias": {"9": 3.0, "20": -2.0}},
]


def test_of_sampled_tokens(plain_server: Server, tree_server: Server, pairs: Pairs) -> None:
    """At the request's temperature, before its filters, for both servers; teacher-forced."""
    extra = {"return_logprob": True, "top_logprobs_num": 4, "token_ids_logprob": [5, EOS]}
    orders: list[Order] = [
        (prompt, {"extra": extra, "max_new_tokens": 24, "ignore_eos": True, **kind})
        for prompt in PROMPTS
        for kind in SAMPLED
    ]
    model = Exact(pairs.target()).model
    for server in (plain_server, tree_server):
        answers = ask_all(server, orders)
        for answer, (prompt, options) in zip(answers, orders, strict=True):
            check_teacher_forced(model, answer, list(prompt), options)
        assert server is plain_server or acceptance(answers) > 1.3


@torch.no_grad()
def check_teacher_forced(
    model: Any, answer: dict[str, Any], prompt: list[int], options: dict[str, Any]
) -> None:
    tokens, meta = answer["output_ids"], answer["meta_info"]
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    for token, bias in options.get("logit_bias", {}).items():
        logits[:, int(token)] += bias
    expected = (logits / (options["temperature"] or 1.0)).log_softmax(-1)
    assert lengths(answer) == {24}
    for row, token, chosen, top, ids in zip(
        expected,
        tokens,
        meta["output_token_logprobs"],
        meta["output_top_logprobs"],
        meta["output_token_ids_logprobs"],
        strict=True,
    ):
        assert chosen[:2] == [pytest.approx(row[token].item(), abs=CLOSE), token]
        best = row.topk(4)
        assert [entry[0] for entry in top] == pytest.approx(best.values.tolist(), abs=CLOSE)
        assert [row[entry[1]].item() for entry in top] == pytest.approx(
            best.values.tolist(), abs=CLOSE
        )
        assert [entry[1] for entry in ids] == [5, EOS]
        assert [entry[0] for entry in ids] == pytest.approx(row[[5, EOS]].tolist(), abs=CLOSE)


def test_of_parallel_samples(tree_server: Server, plain_server: Server, pairs: Pairs) -> None:
    extra = {"return_logprob": True, "top_logprobs_num": 4, "token_ids_logprob": [5, EOS]}
    greedy: Order = (PROMPTS[2], {"extra": extra, "n": 3, "max_new_tokens": 20})
    (ours,), (theirs,) = ask_all(tree_server, [greedy]), ask_all(plain_server, [greedy])
    assert len(ours) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert_agree(visible(mine), visible(other))
    options = {"extra": extra, "n": 6, "max_new_tokens": 24, "ignore_eos": True, "temperature": 1.1}
    drawn = tree_server.ask(PROMPTS[2], **options)
    assert len({tuple(answer["output_ids"]) for answer in drawn}) == 6
    for answer in drawn:
        check_teacher_forced(Exact(pairs.target()).model, answer, PROMPTS[2], options)


def test_of_prompts_alone(plain_server: Server, tree_server: Server) -> None:
    """No token at all is wanted: what scoring and ``select`` ask for."""
    for extra in (
        {"return_logprob": True, "logprob_start_len": 0},
        {"return_logprob": True, "logprob_start_len": 3, "top_logprobs_num": 2},
        {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [4, 5]},
    ):
        orders: list[Order] = [(p, {"extra": extra, "max_new_tokens": 0}) for p in PROMPTS]
        for ours, theirs in zip(
            ask_all(tree_server, orders), ask_all(plain_server, orders), strict=True
        ):
            found, expected = visible(ours), visible(theirs)
            assert found["output_ids"] == expected["output_ids"] == []
            # Stock SGLang tells the one token that its prefill drew, under any speculation.
            for document in (found, expected):
                for name in [name for name in document if name.startswith("output_")]:
                    del document[name]
            assert_agree(found, expected)


def stream(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    with requests.post(
        f"{server.url}/generate", json={**body, "stream": True}, stream=True, timeout=120
    ) as response:
        lines = [line.removeprefix(b"data: ") for line in response.iter_lines() if line]
    assert lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("interval", [1, 5, 100])
def test_while_streaming(plain_server: Server, tree_server: Server, interval: int) -> None:
    """Every piece tells all tokens so far; the last is what is answered without a stream."""
    prompt = random_ids(14, ("stream", interval))
    parameters = {"temperature": 0, "max_new_tokens": 40, "stream_interval": interval}
    extra = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [EOS]}
    expected = visible(plain_server.ask(prompt, extra, **parameters))
    body = {"input_ids": prompt, "sampling_params": parameters, **extra}
    pieces = stream(tree_server, body)
    assert_agree(visible(pieces[-1]), expected)
    assert len(pieces) > (3 if interval < 40 else 0)
    for piece in pieces:
        found, length = visible(piece), piece["meta_info"]["completion_tokens"]
        assert lengths(piece) == {length}
        assert found["output_ids"] == expected["output_ids"][:length]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert_agree(found[name], expected[name][:length])
        assert expected["text"].startswith(found["text"])
