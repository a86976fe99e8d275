"""The path of GPUs, held to account without one: SGLang's Triton attention in Triton's interpreter.

The tree mask, its layout over the prefix, page sizes and the drafter's block pass are those of a GPU. Each
server also raises where a decode round would wait for the device (``no_sync.py``).
"""

from __future__ import annotations

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

GRAPHS = {"DFLASH2_TEST_HOOKS": "stand_in_graphs"}
CAPTURE = ("--cuda-graph-bs-decode", "1", "2", "4", "--disable-prefill-cuda-graph")


@pytest.fixture(scope="module")
def captured_server(plain: Answers, serve_triton: Any, pairs: Pairs) -> Iterator[Server]:
    pair = pairs.pair(window=48)
    flags = (*TREE, *CAPTURE, "--max-running-requests", "4", "--page-size", "16")
    with serve_triton(pair.target, pair.drafter, *flags, env=GRAPHS) as server:
        yield server
        assert server.errors() == []


@pytest.mark.xfail(reason="texts go wrong after the first round; graphs are off", strict=True)
@pytest.mark.parametrize("batch", [1, 3])
def test_captured_passes_equal_plain_decoding(
    captured_server: Server, plain: Answers, batch: int
) -> None:
    asked = slice(1, 2) if batch == 1 else slice(0, 3)
    answers = run(captured_server, PROMPTS[asked], concurrency=batch, tokens=TOKENS)
    assert_same(answers, plain[asked])
    assert acceptance(answers) > 1.8
    log = captured_server.log.read_text()
    assert "self-check: trees verified as text" in log
    assert ", captured;" in log
