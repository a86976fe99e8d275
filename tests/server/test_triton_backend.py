"""The path of GPUs, held to account without one: SGLang's Triton attention in Triton's interpreter.

The tree mask, its layout over the prefix, page sizes and the drafter's block pass are those of a GPU. Each
server also raises where a decode round would wait for the device (``no_sync.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Server, acceptance, ids
from tinypair import Pairs
from workload import Answers, assert_same, random_ids, run

NO_SYNC = {"DFLASH2_TEST_HOOKS": "no_sync"}
PROMPTS = [random_ids(n, ("triton", n)) for n in (1, 17, 33, 70)]
TOKENS = 18  # an interpreted round takes up to a second
CHAIN = ("--speculative-eagle-topk", "1")
TREE = ("--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "12")


@pytest.fixture(scope="module")
def plain(plain_server: Server) -> Answers:
    return run(plain_server, PROMPTS, tokens=TOKENS)


@pytest.fixture(
    scope="module",
    params=[(CHAIN, 1), (CHAIN, 16), (TREE, 1), (TREE, 16)],
    ids=["chain-page1", "chain-page16", "tree-page1", "tree-page16"],
)
def server(
    request: pytest.FixtureRequest, plain: Answers, serve_triton: Any, pairs: Pairs
) -> Iterator[Server]:
    shape, page = request.param
    pair = pairs.pair(window=48)
    flags = (*shape, "--page-size", str(page), "--max-running-requests", "4")
    with serve_triton(pair.target, pair.drafter, *flags, env=NO_SYNC) as server:
        yield server
        assert server.errors() == []


@pytest.mark.parametrize("batch", [1, 4])
def test_equals_plain_decoding(server: Server, plain: Answers, batch: int) -> None:
    asked = slice(None) if batch > 1 else slice(1, 3)
    answers = run(server, PROMPTS[asked], concurrency=batch, tokens=TOKENS)
    assert_same(answers, plain[asked])
    assert acceptance(answers) > 1.8


def test_sampled_rounds(server: Server) -> None:
    """No parity to check: that they run, differ, and never wait for the device."""
    options = {"temperature": 1.2, "top_p": 0.95, "top_k": 40, "max_new_tokens": 8}
    drawn = server.ask_all([PROMPTS[1]] * 4, concurrency=4, ignore_eos=True, **options)
    assert len({tuple(tokens) for tokens in ids(drawn)}) > 1
    assert acceptance(drawn) > 1.0


# Captured graphs. Batches of 1, 2 and 4 are captured, so that three requests are padded.

CAPTURE = ("--cuda-graph-bs-decode", "1", "2", "4", "--disable-prefill-cuda-graph")
# "frozen mask in the pass" concerns a CPU's mask; that of a GPU lies in a buffer.
CAUGHT = {
    "frozen mask": "a mask is wrong",
    "frozen buffer": "otherwise than the same text",
    "swapped sibling link": "a link to a sibling is wrong",
    "wrong position": "a position is wrong",
    "wrong position in the pass": "otherwise than the same text",
    "stale positions of a graph": "a round from the captured CUDA graphs differs",
    "stale rope": "a round from the captured CUDA graphs differs",
    "stale draft": "a token is at the wrong place in a drafted tree",
    "frozen anchor": "a round from the captured CUDA graphs differs",
}


@pytest.fixture(scope="module", params=[CHAIN, TREE], ids=["chain", "tree"])
def captured_server(
    request: pytest.FixtureRequest, plain: Answers, serve_triton: Any, pairs: Pairs
) -> Iterator[tuple[Server, dict[str, str]]]:
    """The server, and which faults its self-check shall have caught; a chain has no siblings to swap."""
    pair, hooks, caught = pairs.pair(window=48), "stand_in_graphs", {}
    if request.param == TREE:
        hooks, caught = f"{hooks} self_check_faults", CAUGHT
    flags = (*request.param, *CAPTURE, "--max-running-requests", "4", "--page-size", "16")
    env = {"DFLASH2_TEST_HOOKS": hooks}
    with serve_triton(pair.target, pair.drafter, *flags, env=env) as server:
        yield server, caught
        assert server.errors() == []


@pytest.mark.parametrize("batch", [1, 3])
def test_captured_passes_equal_plain_decoding(
    captured_server: tuple[Server, dict[str, str]], plain: Answers, batch: int
) -> None:
    server, _ = captured_server
    before = len(server.log.read_text())
    asked = slice(1, 2) if batch == 1 else slice(0, 3)
    answers = run(server, PROMPTS[asked], concurrency=batch, tokens=TOKENS)
    assert_same(answers, plain[asked])
    assert acceptance(answers) > 1.8
    replayed = re.findall(r"replayed: (\w+), batch (\d)", server.log.read_text()[before:])
    for model in ("target", "draft"):
        sizes = {int(size) for name, size in replayed if name == model}
        assert max(sizes) == (1 if batch == 1 else 4)


def test_greedy_beside_sampled_in_captured_passes(
    captured_server: tuple[Server, dict[str, str]], plain: Answers
) -> None:
    """Temperatures are given to a replay and taken back after it; random children come behind it."""
    server, _ = captured_server
    options: dict[str, Any] = {"max_new_tokens": 10, "ignore_eos": True}
    sampling = [{**options, "temperature": heat} for heat in (1.3, 0, 0.7)]
    body = {"input_ids": [PROMPTS[1]] * 3, "sampling_params": sampling}
    answers = server.post("/generate", body).json()
    assert ids(answers)[1] == ids(plain)[1][:10]
    assert_same(run(server, PROMPTS[1:2], concurrency=1, tokens=TOKENS), plain[1:2])


def test_self_check_of_captured_passes(captured_server: tuple[Server, dict[str, str]]) -> None:
    server, faults = captured_server
    log = server.log.read_text()
    caught = dict(re.findall(r"fault caught: ([^:]*): (.*)", log))
    assert caught.keys() == faults.keys()
    for fault, said in faults.items():
        assert said in caught[fault]
    assert re.search("self-check: trees verified as text in .*, captured; .* to eager 0.0e", log)
