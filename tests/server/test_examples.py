"""The examples for users, against the tiny pair's server (tool calls: ``test_constrained.py``)."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import jsonschema
import pytest
from example_files import EXAMPLES, load
from recipes import server_parser
from serving import Server


def test_openai_client(tree_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("openai_client")
    found = example.main(["--base-url", tree_server.url])
    assert found["chat"] == found["stream"] != ""
    if not isinstance(found["json_schema"], str):  # the tiny model gets lost in white space
        jsonschema.validate(found["json_schema"], example.REVIEW)
    monkeypatch.setattr(example, "REVIEW", {"enum": ["good", 5]})
    assert example.Examples(tree_server.url).json_schema() in ("good", 5)
    assert len(found["several"]) == 3 and len(set(found["several"])) > 1
    assert "".join(token for token, _ in found["logprobs"]) == found["chat"][:8]
    assert all(logprob <= 0 for _, logprob in found["logprobs"])
    assert found["seeded"][0] == found["seeded"][1] != ""


def test_frontend(tree_server: Server) -> None:
    cities = load("frontend").main(
        ["--base-url", tree_server.url, "--city", "oslo", "rome", "bern"]
    )
    assert len(cities) == 3
    for answers in cities:
        assert answers["season"] in {"spring", "summer", "autumn", "winter"}
        assert re.fullmatch(r"[0-3]\d/[01]\d", answers["date"])
        assert "\n" not in answers["answer"] and len(answers["notes"]) == 2


def test_offline_engine(tree_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a server in place of the engine, which takes half a minute to start (``test_apis.py``)."""
    import sglang

    example = load("offline_engine")
    started: list[dict[str, Any]] = []

    class Engine:
        def __init__(self, **keywords: Any) -> None:
            started.append(keywords)

        def generate(self, prompt: list[str], sampling_params: dict[str, Any]) -> Any:
            body = {"text": prompt, "sampling_params": sampling_params}
            return tree_server.post("/generate", body).json()

        def shutdown(self) -> None:
            started.append({})

    monkeypatch.setattr(sglang, "Engine", Engine)
    engine = example.main(["--model-path", "T", "--draft-model-path", "D"])
    keywords, ended = started
    assert set(keywords) <= {action.dest for action in server_parser()._actions} and ended == {}
    assert keywords["speculative_algorithm"] == "DFLASH2"
    served = example.main(["--base-url", tree_server.url])
    assert [a["output_ids"] for a in engine] == [a["output_ids"] for a in served]
    assert all(a["meta_info"]["spec_verify_ct"] > 0 for a in served)


def test_curl(tree_server: Server) -> None:
    command = ["bash", str(EXAMPLES / "http.sh"), "--base-url", tree_server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    assert answers[0]["data"][0]["object"] == "model"
    assert answers[1]["internal_states"][0]["dflash2"]["nodes"] > 1
    assert answers[2]["choices"][0]["message"]["content"]
    assert re.fullmatch(r"[0-3]\d/[01]\d", answers[3]["text"])
    assert answers[4]["meta_info"]["spec_verify_ct"] > 0
    assert "data: [DONE]" in lines and sum(line.startswith("data: {") for line in lines) > 2
    assert "launch with --enable-metrics" in lines[-1]


def test_curl_fails_where_the_server_does(tree_server: Server) -> None:
    command = ["bash", str(EXAMPLES / "http.sh"), "--base-url", f"{tree_server.url}/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "404" in done.stderr
