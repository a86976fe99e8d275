"""Requests that no forward can compute: each is refused, and the server lives on."""

from __future__ import annotations

from typing import Any

import pytest
from serving import Server, ids
from workload import VOCAB, random_ids, run

PROMPT = random_ids(12, "odd")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"text": ""}, "a prompt of no tokens"),
        ({"input_ids": [5, VOCAB]}, "outside the vocabulary"),
        ({"input_ids": [5, -1]}, "outside the vocabulary"),
        (
            {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 10 * VOCAB},
            "at most",
        ),
    ],
    ids=["no tokens", "a token too high", "a token too low", "too many log-probabilities"],
)
def test_refused_and_alive(tree_server: Server, body: dict[str, Any], said: str) -> None:
    before = run(tree_server, [PROMPT], tokens=6)
    answer = tree_server.post("/generate", {**body, "sampling_params": {"max_new_tokens": 4}})
    assert answer.status_code == 400, answer.text
    assert said in answer.text
    assert ids(run(tree_server, [PROMPT], tokens=6)) == ids(before)
