"""Two ranks on the CPU (gloo) answer what one rank answers without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, acceptance, ids
from tinypair import VOCAB, Pairs
from workload import Answers, assert_same, prompts, random_ids, run

# SGLang pads to a multiple of 64 a rank. Of the first the second rank has nothing but padding.
VOCABULARIES = (VOCAB, 200)


@pytest.fixture(scope="module", params=VOCABULARIES)
def vocab(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def target(pairs: Pairs, vocab: int) -> Path:
    return pairs.target(vocab=vocab) if vocab != VOCAB else pairs.target()


def flags(vocab: int) -> tuple[str, ...]:
    return () if vocab == VOCAB else ("--skip-tokenizer-init",)


@pytest.fixture(scope="module")
def plain(serve: Any, target: Path, vocab: int) -> Answers:
    with serve(target, None, *flags(vocab)) as server:
        return run(server, prompts(vocab)[3:13])


@pytest.fixture(scope="module")
def server(plain: Answers, serve: Any, pairs: Pairs, target: Path, vocab: int) -> Iterator[Server]:
    with serve(target, pairs.drafter(target), "--tp-size", "2", *flags(vocab)) as server:
        yield server
        assert server.errors() == []


def test_equals_plain_decoding(server: Server, plain: Answers, vocab: int) -> None:
    answers = run(server, prompts(vocab)[3:13])
    assert_same(answers, plain)
    assert acceptance(answers) > (2.0 if vocab == VOCAB else 1.2)  # 64 of 200 are candidates
    if vocab > VOCAB:
        assert max(max(tokens) for tokens in ids(answers)) >= 128  # the other rank's words


def test_ranks_agree_on_sampled_paths(server: Server, plain: Answers, vocab: int) -> None:
    """Each rank draws coins of its own; if they did not agree, their KV would drift apart."""
    asked = [random_ids(12, ("tp", n), vocab) for n in range(16)]
    options = {"max_new_tokens": 60, "ignore_eos": True}
    drawn = server.ask_all(asked, temperature=1.2, top_p=0.95, **options)
    assert len({tuple(tokens) for tokens in ids(drawn)}) == 16
    assert acceptance(drawn) > 1.1
    # Greedy continuations of what was drawn read that KV from the cache.
    longer = [p + a["output_ids"][:-1] for p, a in zip(asked, drawn, strict=True)][:6]
    warm = server.ask_all(longer, max_new_tokens=24, ignore_eos=True)
    assert all(a["meta_info"]["cached_tokens"] > 12 + 50 for a in warm)
    server.flush()
    cold = server.ask_all(longer, max_new_tokens=24, ignore_eos=True)
    assert ids(warm) == ids(cold)
