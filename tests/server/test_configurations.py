"""Every way to set up a server gives plain decoding's tokens, and drafts are really accepted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tinypair
from serving import Server, acceptance, ids, verify_count
from tinypair import Pairs
from workload import Answers, assert_same, prompts, run

PROMPTS = prompts()


@dataclass(frozen=True)
class Setup:
    """``accepts``: a lower bound of the acceptance length, from what was measured here."""

    flags: tuple[str, ...] = ()
    drafter: dict[str, Any] = field(default_factory=dict)
    target: str = "LlamaForCausalLM"
    accepts: float = 2.0
    caches: bool = True


SETUPS = {
    "default": Setup(),
    "chunked prefill": Setup(("--chunked-prefill-size", "32")),
    "no overlap": Setup(("--disable-overlap-schedule",)),
    "no radix cache": Setup(("--disable-radix-cache",), caches=False),
    "no overlap, no radix cache, chunked": Setup(
        ("--disable-overlap-schedule", "--disable-radix-cache", "--chunked-prefill-size", "32"),
        caches=False,
    ),
    "page size 16": Setup(("--page-size", "16")),
    "page size 16, chunked": Setup(("--page-size", "16", "--chunked-prefill-size", "32")),
    "chain of 8": Setup(
        ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "8"), accepts=1.7
    ),
    "32 nodes": Setup(
        ("--speculative-eagle-topk", "8", "--speculative-num-draft-tokens", "32"), accepts=2.4
    ),
    "depth 3": Setup(
        ("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "12"), accepts=1.8
    ),
    "block 16": Setup(drafter={"block": 16}),
    "fewer nodes than the block is long": Setup(
        ("--speculative-num-draft-tokens", "4"), {"block": 16}, accepts=1.6
    ),
    # The block needs more slots than depth times branching, or the tree.
    "chain of 3 from a block of 16": Setup(
        (
            *("--speculative-num-steps", "2", "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", "3"),
        ),
        {"block": 16},
        accepts=1.4,
    ),
    "sliding window": Setup(drafter={"window": 12}),
    "sliding window, chunked": Setup(("--chunked-prefill-size", "32"), {"window": 12}),
    "no selector": Setup(drafter={"architecture": "DFlashDraftModel"}, accepts=1.01),
    "Qwen3": Setup(target="Qwen3ForCausalLM"),
    "Qwen3, page size 16": Setup(("--page-size", "16"), target="Qwen3ForCausalLM"),
}


@pytest.fixture(scope="module")
def plain(serve: Any, pairs: Pairs) -> dict[str, Answers]:
    """Plain decoding's answers by target."""
    answers = {}
    for architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        with serve(pairs.target(architecture)) as server:
            answers[architecture] = run(server, PROMPTS)
            # The workload must be worth comparing: varied, and free of ties between batch sizes.
            assert len({tuple(a) for a in ids(answers[architecture])}) == len(PROMPTS) - 2
            assert ids(run(server, PROMPTS, concurrency=1)) == ids(answers[architecture])
    return answers


@pytest.mark.parametrize("name", SETUPS)
def test_equals_plain_decoding(
    name: str, serve: Any, pairs: Pairs, plain: dict[str, Answers]
) -> None:
    setup = SETUPS[name]
    target = pairs.target(setup.target)
    drafter = pairs.drafter(target, **setup.drafter)
    with serve(target, drafter, *setup.flags) as server:
        cold = run(server, PROMPTS)
        assert_same(cold, plain[setup.target])
        assert acceptance(cold) > setup.accepts
        warm = run(server, PROMPTS)
        assert_same(warm, plain[setup.target])
        check_cached_drafts(cold, warm, setup.caches)
        alone = run(server, PROMPTS[:6], concurrency=1)
        assert_same(alone, plain[setup.target][:6])
        assert server.errors() == []


def check_cached_drafts(cold: Answers, warm: Answers, caches: bool) -> None:
    """The drafter of this pair reads its KV, so a prompt without it would be drafted otherwise."""
    hits = sum(answer["meta_info"]["cached_tokens"] for answer in warm)
    assert (hits > 0.6 * sum(map(len, PROMPTS))) == caches
    assert abs(verify_count(warm) - verify_count(cold)) <= 0.01 * verify_count(cold)


def test_stock_chain_on_the_cpu_platform(serve: Any, pairs: Pairs) -> None:
    """The baseline that we are measured against runs on the same server, in its only type here.

    The stock model runner rounds the block's embeddings to bfloat16, so float32 fails there.
    """
    pair = pairs.pair()
    flags = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path")
    with serve(pair.target, None, *flags, str(pair.drafter), "--dtype", "bfloat16") as server:
        assert acceptance(run(server, PROMPTS)) > 1.5
        assert server.errors() == []


def test_retraction(serve: Any, pairs: Pairs, plain: dict[str, Answers]) -> None:
    """SGLang's own stress test: every other round a request is put back, and resumed later."""
    pair = pairs.pair()
    stress = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "2"}
    with serve(pair.target, pair.drafter, env=stress) as server:
        answers = run(server, PROMPTS, concurrency=len(PROMPTS))
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 5
        assert_same(answers, plain["LlamaForCausalLM"])
        assert acceptance(answers) > 1.5  # a resumed request drafts from KV that was written anew
        assert_same(run(server, PROMPTS[:8]), plain["LlamaForCausalLM"][:8])
        assert server.errors() == []


def test_little_memory(serve: Any, pairs: Pairs, plain_server: Server) -> None:
    """With too little KV for all, some wait or are put back, and nothing leaks."""
    pair = pairs.pair()
    expected = run(plain_server, PROMPTS, tokens=160)
    # Requests are let in for little more than their prompts, and then all grow to thrice of this.
    flags = ("--max-total-tokens", "1400", "--schedule-conservativeness", "0.01")
    with serve(pair.target, pair.drafter, *flags) as server:
        answers = run(server, PROMPTS, concurrency=len(PROMPTS), tokens=160)
        assert_same(answers, expected)
        assert_same(run(server, PROMPTS[:8], tokens=160), expected[:8])
        assert server.errors() == []


def test_drafter_of_a_random_target_is_not_needed_for_parity(
    serve: Any, pairs: Pairs, plain: dict[str, Answers], tmp_path: Path
) -> None:
    """A drafter that is always wrong costs speed, never tokens."""
    target = pairs.target()
    other = pairs.target(seed=5)
    wrong = tinypair.write_drafter(tmp_path / "wrong", other)
    with serve(target, wrong) as server:
        answers = run(server, PROMPTS)
        assert_same(answers, plain["LlamaForCausalLM"])
        assert 1.0 <= acceptance(answers) < 1.5
        assert server.errors() == []


def test_server_reports_its_tree(serve: Any, pairs: Pairs) -> None:
    pair = pairs.pair()
    with serve(pair.target, pair.drafter, "--speculative-num-draft-tokens", "12") as server:
        info = server.info()
    shape = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    assert [info[name] for name in shape] == [7, 8, 12]
