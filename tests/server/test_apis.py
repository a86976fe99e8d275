"""Other ways to ask: frontend programs, the offline engine, ids without text, hidden states."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agree import TEXTS, Both, Order, answers_agree, assert_agree, both, visible
from serving import Server, acceptance
from test_sampling import Exact
from tinypair import SPECIAL, Pairs
from workload import prompts

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
            timeout=600,
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


def test_hidden_states_of_sampled_tokens(bare_servers: Both) -> None:
    """Those that plain decoding computes when it reads the same tokens."""
    tree, plain = bare_servers
    wanted = {"return_hidden_states": True}
    for prompt in prompts()[3:7]:
        drawn = tree.ask(prompt, wanted, temperature=1.3, max_new_tokens=24, ignore_eos=True)
        tokens, states = drawn["output_ids"], drawn["meta_info"]["hidden_states"]
        read = plain.ask(prompt + tokens[:-1], wanted, max_new_tokens=1)["meta_info"]
        assert len(tokens) == 24
        assert_agree([*states[0], *states[1:]], read["hidden_states"][0])
        assert acceptance([drawn]) > 1.05


def test_logprobs_before_the_temperature(bare_servers: Both, pairs: Pairs) -> None:
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
    for parameters in ({"stop": ["a"]}, {"stop_regex": ["a+"]}, {"min_new_tokens": 2}):
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, **parameters}}
        ours, theirs = (server.post("/generate", body) for server in bare_servers)
        assert ours.status_code == theirs.status_code == 400
        assert ours.json() == theirs.json()
