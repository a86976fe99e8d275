"""Metrics under load against what the responses say, on one and on two ranks."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from conftest import Serve
from prometheus_client.parser import text_string_to_metric_families
from serving import Server
from tinypair import Pairs

INTERVAL = 4
NODES = 8
PROMPTS = [[5 + n, 9, 11 + n % 3, 7] for n in range(12)]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def server(request: pytest.FixtureRequest, serve: Serve, pairs: Pairs) -> Iterator[Server]:
    pair = pairs.pair()
    flags = ["--enable-metrics", "--decode-log-interval", str(INTERVAL)]
    flags += ["--speculative-num-draft-tokens", str(NODES), "--tp-size", str(request.param)]
    with serve(pair.target, pair.drafter, *flags) as server:
        yield server
        assert server.errors() == []


def scrape(server: Server) -> dict[str, float]:
    """Samples of ours, by name without prefix, with the value of their own label."""
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("sglang:dflash2_") and not sample.name.endswith("_created"):
                own = sample.labels.get("depth") or sample.labels.get("part")
                key = sample.name.removeprefix("sglang:dflash2_") + (f" {own}" if own else "")
                assert key not in found, "two ranks export"
                assert {"model_name", "tp_rank"} <= set(sample.labels)
                found[key] = sample.value
    return found


def settled(server: Server, wanted: int) -> dict[str, float]:
    """A scrape after the last round was told: a scheduler answers before it writes."""
    for _ in range(50):
        found = scrape(server)
        if found.get("verified_requests_total", 0) >= wanted:
            break
        time.sleep(0.1)
    return found


def cut_short(answer: dict[str, Any]) -> bool:
    info = answer["meta_info"]
    return info["finish_reason"]["type"] == "abort" and info.get("spec_verify_ct", 0) > 0


def given_up(server: Server) -> Iterator[dict[str, Any]]:
    """Long answers that their client aborts sooner or later, until one was aborted after its first round."""
    with ThreadPoolExecutor(1) as pool:
        for attempt in range(20):
            rid, sampling = f"gone-{attempt}", {"max_new_tokens": 480, "ignore_eos": True}
            answer = pool.submit(server.ask, PROMPTS[0], {"rid": rid}, **sampling)
            time.sleep(0.03 * attempt)
            while not answer.done():
                server.post("/abort_request", {"rid": rid})
                time.sleep(0.01)
            yield answer.result()
            if cut_short(answer.result()):
                return


def test_counters_are_the_sums_over_the_responses(server: Server) -> None:
    before = settled(server, 0)
    answers = server.ask_all(PROMPTS, max_new_tokens=24, ignore_eos=True)
    answers += server.ask_all(PROMPTS[:4], max_new_tokens=16, temperature=1.0)
    answers += server.ask_all(PROMPTS[:4], max_new_tokens=16, regex="[a-c]{3}[x-z]{2}")
    answers += given_up(server)
    assert cut_short(answers[-1])
    infos = [answer["meta_info"] for answer in answers]
    verified = sum(info.get("spec_verify_ct", 0) for info in infos)
    drafts = sum(info.get("spec_num_correct_drafts", 0) for info in infos)
    by_length: Counter[int] = Counter()
    for info in infos:
        by_length.update(dict(enumerate(info.get("spec_correct_drafts_histogram", []))))

    after = settled(server, int(before.get("verified_requests_total", 0)) + verified)
    gained = {name: value - before.get(name, 0) for name, value in after.items()}
    assert gained["verified_requests_total"] == verified > 0
    assert gained["accepted_tokens_total"] == verified + drafts
    assert gained["verified_nodes_total"] == NODES * verified
    for depth in range(1, max(by_length) + 1):
        reached = sum(number for length, number in by_length.items() if length >= depth)
        assert gained.get(f"accepted_drafts_by_depth_total {depth}", 0) == reached
    assert 0 < gained["verify_rounds_total"] <= verified
    assert gained["grammar_trees_total"] >= 4
    assert all(gained[f"round_seconds_total {part}"] > 0 for part in ("draft", "verify", "other"))
    assert after["width"] == NODES


def test_the_log_tells_it_at_the_interval(server: Server) -> None:
    server.ask(PROMPTS[0], max_new_tokens=100, ignore_eos=True)
    lines = [line for line in server.log.read_text().splitlines() if "DFLASH2, #round:" in line]
    assert lines and all(f"#round: {INTERVAL}," in line for line in lines)
    assert re.search(r"accept len: \d+\.\d\d, accepted by depth: [\d. ]+, draft ms: \d", lines[-1])


def test_server_info_tells_the_resolved_configuration(server: Server, pairs: Pairs) -> None:
    (state,) = server.info()["internal_states"]
    told = state["dflash2"]
    assert told["draft_model_path"] == str(pairs.pair().drafter)
    assert told["nodes"] == NODES == state["speculative_num_draft_tokens"]
    assert told["depth"] == told["block_size"] - 1 == state["speculative_num_steps"]
    assert told["branching"] == state["speculative_eagle_topk"]
    assert told["draft_attention_backend"] == "dflash2_cpu"
