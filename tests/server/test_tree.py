"""``dflash2-sglang tree`` with a real server, and rounds of a batch as they are recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Serve
from serving import Server, acceptance
from test_demo import MARK, marked
from tinypair import Pairs
from workload import random_ids

from dflash2_sglang.cli.tree_stats import statistics
from dflash2_sglang.cli.tree_trace import Answer, Round, join, read_trace
from dflash2_sglang.trace import VARIABLE

PROMPTS = [random_ids(n, ("traced", n)) for n in (5, 9, 17, 30)]


@pytest.mark.server
def test_tree_as_a_user_runs_it(pairs: Pairs, tmp_path: Path) -> None:
    pair = pairs.pair()
    words = ["--model-path", str(pair.target), "--speculative-draft-model-path", str(pair.drafter)]
    words += ["--prompt", "why is it so?", "--prompt", "[1, 2, 3]", "--max-tokens", "40", "--json"]
    words += ["--html", str(tmp_path / "page.html"), "--dtype", "float32"]
    words += ["--speculative-num-draft-tokens", "12"]
    script = Path(sys.executable).with_name("dflash2-sglang")
    done = subprocess.run(
        [script, "tree", *words],
        env={**os.environ, MARK: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert marked(str(tmp_path)) == []
    assert found["settings"]["nodes"] == 12 and found["settings"]["target"] == str(pair.target)
    assert [a["prompt"] for a in found["answers"]] == ["why is it so?", "[1, 2, 3]"]
    for answer in found["answers"]:
        gains = [one["gain"] for one in answer["rounds"]]
        assert sum(gains) == len(answer["tokens"]) - 1 and max(gains) > 1
        assert all(len(one["tokens"]) == 12 for one in answer["rounds"])
    assert found["statistics"]["acceptance_length"] > 1.5
    assert 'id="data">{' in (tmp_path / "page.html").read_text()


@pytest.fixture(scope="module")
def recorded(serve: Serve, pairs: Pairs, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server that records, and a function that asks it and joins its answers with the rounds."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    pair = pairs.pair()
    with serve(pair.target, pair.drafter, env={VARIABLE: str(path)}) as server:
        yield lambda name, **sampling: ask(server, path, name, **sampling)
        assert server.errors() == []


def ask(server: Server, path: Path, name: str, **sampling: Any) -> tuple[list[Answer], float]:
    """All prompts in one batch; the answers, and the acceptance length SGLang counts."""
    rids = [f"{name}-{number}" for number in range(len(PROMPTS))]
    params = {"temperature": 0, "max_new_tokens": 40, **sampling}
    body = {"input_ids": PROMPTS, "sampling_params": params, "rid": rids}
    responses = server.post("/generate", body).json()
    _, records = read_trace(path)
    joined = [
        join(rid, len(prompt), response, records[rid])
        for rid, prompt, response in zip(rids, PROMPTS, responses, strict=True)
    ]
    return joined, acceptance(responses)


def test_greedy_rounds_are_the_answer(recorded: Any) -> None:
    """Every token comes from one round; SGLang counts as we do; a matching path was accepted."""
    answers, counted = recorded("greedy")
    rounds = [one for answer in answers for one in answer.rounds]
    for answer in answers:
        assert sum(one.gain for one in answer.rounds) == len(answer.tokens) - 1
        places = [one.place for one in answer.rounds]
        assert places == sorted(set(places)) and places[0] == 0
    assert statistics(answers)["acceptance_length"] == pytest.approx(counted)
    assert all(deepest_match(one) == min(len(one.accepted) - 1, len(one.truth)) for one in rounds)
    assert all(one.prob == sorted(one.prob, reverse=True) for one in rounds)
    assert not any(one.random for one in rounds)


def test_sampled_rounds_are_the_answer(recorded: Any) -> None:
    answers, counted = recorded("sampled", temperature=1.0)
    rounds = [one for answer in answers for one in answer.rounds]
    assert all(sum(o.gain for o in a.rounds) == len(a.tokens) - 1 for a in answers)
    assert statistics(answers)["acceptance_length"] == pytest.approx(counted)
    assert any(one.random for one in rounds)


def deepest_match(one: Round) -> int:
    """How far the answer can be followed in the tree, from its nodes alone."""
    at, depth = 0, 0
    for token in one.truth:
        below = [n for n, above in enumerate(one.parent) if above == at and one.tokens[n] == token]
        if not below:
            break
        at, depth = below[0], depth + 1
    return depth
