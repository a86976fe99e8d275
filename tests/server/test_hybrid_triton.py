"""A hybrid target on the path of GPUs: SGLang's Triton kernels in attention and gated delta net layers.

In Triton's interpreter, a round is SGLang's own from the verify pass to the commit (``own_kernels.py``);
prompts go through torch in the gated delta nets, as SGLang's prompt kernels refuse float32. The servers also
raise where a round would wait for the device (``no_sync.py``), or replay captured
passes (``stand_in_graphs.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from serving import Server, acceptance
from tinyhybrid import write_hybrid
from tinypair import Pairs
from workload import Answers, assert_same, random_ids, run

GRID = 64  # the prefix cache keeps states at multiples of this
PROMPTS = [random_ids(n, ("hybrid on triton", n)) for n in (1, 17, 60, 70)]
CROSSING = 2  # the prompt whose answer passes a multiple of GRID
TOKENS = 10  # an interpreted round of four requests takes two seconds
TREE = ("--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "6")
CHAIN = ("--speculative-eagle-topk", "1", "--speculative-num-steps", "4")
CAPTURE = ("--cuda-graph-bs-decode", "1", "2", "4", "--disable-prefill-cuda-graph")
KERNELS = {
    "_fwd_kernel",  # attention, in target and drafter
    "_causal_conv1d_update_kernel",
    "fused_sigmoid_gating_delta_rule_update_kernel",
    "_layer_norm_fwd_1pass_kernel",
    "_fused_commit_track_indices_kernel",
    "_fused_mamba_state_scatter_with_mask_kernel",
    "_fused_conv_window_scatter_with_mask_kernel",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of each kind, with few heads: what the interpreter has to go through one by one."""
    return write_hybrid(tmp_path_factory.mktemp("hybrid"), interval=2, heads=2)


@dataclass(frozen=True)
class Plain:
    """What plain decoding answers: to the prompts, and to one that goes on where an answer ended."""

    first: Answers
    longer: list[int]
    second: Answers


@pytest.fixture(scope="module")
def plain(serve: Any, target: Path) -> Plain:
    with serve(target) as server:
        first = run(server, PROMPTS, tokens=TOKENS)
        longer = [*PROMPTS[CROSSING], *first[CROSSING]["output_ids"], *random_ids(5, "turn")]
        second = run(server, [longer], tokens=TOKENS)
        assert server.errors() == []
    return Plain(first, longer, second)


@pytest.fixture(
    scope="module",
    params=[
        (TREE, 1, "no_sync"),
        (TREE, 16, "no_sync"),
        (CHAIN, 16, "no_sync"),
        ((*TREE, *CAPTURE), 16, "stand_in_graphs"),
    ],
    ids=["tree-page1", "tree-page16", "chain-page16", "tree-page16-captured"],
)
def server(
    request: pytest.FixtureRequest, plain: Plain, serve_triton: Any, target: Path, pairs: Pairs
) -> Iterator[Server]:
    shape, page, hook = request.param
    flags = (*shape, "--page-size", str(page), "--mamba-track-interval", str(GRID))
    flags += ("--max-running-requests", "4")
    env = {"DFLASH2_TEST_HOOKS": f"own_kernels {hook}"}
    with serve_triton(target, pairs.drafter(target), *flags, env=env) as server:
        captured = "replayed: target" in server.log.read_text()
        assert captured is (hook == "stand_in_graphs")
        yield server
        assert server.errors() == []


def test_equals_plain_decoding(server: Server, plain: Plain) -> None:
    answers = run(server, PROMPTS, concurrency=4, tokens=TOKENS)
    assert_same(answers, plain.first)
    assert acceptance(answers) > 1.6
    launched = set(re.findall(r"launched: (\w+)", server.log.read_text()))
    assert launched >= KERNELS


def test_one_request_from_states_that_a_verified_tree_left(server: Server, plain: Plain) -> None:
    run(server, [PROMPTS[CROSSING]], tokens=TOKENS)
    answers = run(server, [plain.longer], concurrency=1, tokens=TOKENS)
    assert_same(answers, plain.second)
    assert answers[0]["meta_info"]["cached_tokens"] == GRID > len(PROMPTS[CROSSING])
    assert acceptance(answers) > 1.0
