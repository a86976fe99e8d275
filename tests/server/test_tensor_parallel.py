"""Two ranks on the CPU (gloo) answer what one rank answers without speculation.

SGLang pads the vocabulary to a multiple of 64 a rank. Of 150 words the second rank has 22, fewer than
the drafter's 64 candidates; of 8 it has none, nothing but padding.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import answers as exact
import pytest
import test_distribution as distribution
import test_parameters as parameters
from answers import Answer
from serving import Server, ServerError, acceptance, ids
from tinypair import EOS, Pairs
from workload import Answers, assert_same, prompts, random_ids, run

VOCAB = 150
PROMPTS = prompts(VOCAB)[3:13]
FLAGS = ("--enable-custom-logit-processor", "--skip-tokenizer-init")

Asked = list[tuple[list[int], dict[str, Any]]]


def kinds() -> dict[str, dict[str, Any]]:
    """Those of the parameter tests that need no tokenizer."""
    found = parameters.kinds()
    return {name: found[name] for name in found if "min_new_tokens" not in found[name]}


def asked() -> Asked:
    return [
        (prompt, {"max_new_tokens": 40, "ignore_eos": True, **kind})
        for prompt in PROMPTS[:3]
        for kind in kinds().values()
    ]


@pytest.fixture(scope="module")
def target(pairs: Pairs) -> Path:
    return pairs.target(vocab=VOCAB)


@pytest.fixture(scope="module")
def plain(serve: Any, target: Path) -> tuple[Answers, Answers]:
    """Plain decoding's answers, without and with parameters; its server has ended."""
    with serve(target, None, *FLAGS, "--disable-overlap-schedule") as server:
        found = run(server, PROMPTS), parameters.ask_all(server, asked())
        assert server.errors() == []
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


@pytest.fixture(scope="module")
def server(plain: Any, serve: Any, pairs: Pairs, target: Path, folder: Path) -> Iterator[Server]:
    env = {"DFLASH2_TEST_HOOKS": "hooks:record_trees", "TREES": str(folder)}
    with serve(target, pairs.drafter(target), "--tp-size", "2", *FLAGS, env=env) as server:
        yield server


@pytest.fixture
def healthy(server: Server) -> Iterator[Server]:
    yield server
    assert server.errors() == []


def test_equals_plain_decoding(healthy: Server, plain: tuple[Answers, Answers]) -> None:
    answers = run(healthy, PROMPTS)
    assert_same(answers, plain[0])
    assert acceptance(answers) > 1.2  # 64 of 150 words are candidates
    assert max(max(tokens) for tokens in ids(answers)) >= 128  # the other rank's words


def test_penalties_and_processors(healthy: Server, plain: tuple[Answers, Answers]) -> None:
    answers = parameters.ask_all(healthy, asked())
    assert_same(answers, plain[1])
    by_kind = [[a["output_ids"] for a in answers[n :: len(kinds())]] for n in range(len(kinds()))]
    changed = [kind for kind in by_kind[1:] if kind != by_kind[0]]
    assert len(changed) >= len(kinds()) - 3  # what a kind asks for shows in its answers
    assert acceptance(answers) > 1.1


def test_seeds(healthy: Server) -> None:
    """The same answer alone and in a crowd; each seed another one."""

    def seeded(number: int) -> list[int]:
        options = {**parameters.SEEDED[number % 4], "sampling_seed": number}
        return healthy.ask(PROMPTS[0], max_new_tokens=24, ignore_eos=True, **options)["output_ids"]

    alone = [seeded(number) for number in range(8)]
    assert len({tuple(tokens) for tokens in alone}) == 8
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(seeded, range(8))) == alone


def test_ranks_agree_on_sampled_paths(healthy: Server) -> None:
    """Each rank draws coins of its own; if they did not agree, their KV would drift apart."""
    asked = [random_ids(12, ("tp", n), VOCAB) for n in range(16)]
    options = {"max_new_tokens": 60, "ignore_eos": True}
    drawn = healthy.ask_all(asked, temperature=1.2, top_p=0.95, **options)
    assert len({tuple(tokens) for tokens in ids(drawn)}) == 16
    assert acceptance(drawn) > 1.1
    # Greedy continuations of what was drawn read that KV from the cache.
    longer = [p + a["output_ids"][:-1] for p, a in zip(asked, drawn, strict=True)][:6]
    warm = healthy.ask_all(longer, max_new_tokens=24, ignore_eos=True)
    assert all(a["meta_info"]["cached_tokens"] > 12 + 50 for a in warm)
    healthy.flush()
    cold = healthy.ask_all(longer, max_new_tokens=24, ignore_eos=True)
    assert ids(warm) == ids(cold)


def test_law(serve: Any, pairs: Pairs) -> None:
    """Random children, seeds, penalties, processors: the exact distribution, as on one rank."""
    names = ("temperature", "seed, penalties and filters", "processor, bias and penalties")
    target = pairs.target(vocab=distribution.VOCAB)
    flags = ("--tp-size", "2", "--enable-custom-logit-processor", "--max-running-requests", "128")
    parts = 20
    orders = [(name, part) for part in range(parts) for name in names]
    with serve(target, pairs.drafter(target), *flags) as server, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda order: draw(server, *order), orders))
        greedy = server.ask(distribution.PROMPT, max_new_tokens=exact.PLACES, ignore_eos=True)
        assert server.errors() == []
    logits = exact.target_logits(target, distribution.PROMPT, distribution.VOCAB)
    assert greedy["output_ids"] == greedily(logits)
    for name in names:
        answers = [
            a for (kind, _), some in zip(orders, found, strict=True) if kind == name for a in some
        ]
        check_law(name, answers, logits)


def draw(server: Server, name: str, part: int) -> Answers:
    return distribution.draw(server, distribution.KINDS[name], part)


def greedily(logits: dict[Answer, list[float]]) -> list[int]:
    answer: Answer = ()
    while len(answer) < exact.PLACES:
        row = logits[answer]
        answer = (*answer, row.index(max(row)))
    return list(answer)


def check_law(name: str, answers: Answers, logits: dict[Answer, list[float]]) -> None:
    joint = exact.law(logits, distribution.KINDS[name], EOS)
    other = distribution.alternative(distribution.KINDS[name], logits)[1]
    chances, powers = [], []
    for places in distribution.TESTED:
        counts = Counter(tuple(a["output_ids"][i] for i in places) for a in answers)
        probs = exact.marginal(joint, places)
        chances.append(exact.surprise(counts, probs))
        powers.append(
            exact.power(probs, exact.marginal(other, places), len(answers), distribution.LEVEL)
        )
    assert min(chances) > distribution.LEVEL, name
    assert max(powers) > 0.95, name
    assert acceptance(answers) > 1.05, name


# Every rank builds the same tree. Rank 1 is made to err at the end, when the server is needed no more.


def trees(folder: Path) -> tuple[list[str], list[str]]:
    """What both ranks wrote down, once they have come to rest."""
    found: tuple[list[str], ...] = ([], [])
    for _ in range(100):
        time.sleep(0.1)
        files = [folder / str(rank) for rank in (0, 1)]
        before, found = found, tuple(f.read_text().splitlines() for f in files)
        if before == found and len(found[0]) == len(found[1]):
            break
    return found[0], found[1]


@contextlib.contextmanager
def fault(folder: Path, name: str) -> Iterator[None]:
    (folder / "fault").write_text(name)
    try:
        yield
    finally:
        (folder / "fault").unlink()


def test_ranks_build_the_same_trees(healthy: Server, folder: Path) -> None:
    options = {"max_new_tokens": 24, "ignore_eos": True}
    healthy.ask_all(PROMPTS, **options)
    healthy.ask_all(PROMPTS, temperature=1.0, top_k=20, **options)
    zero, one = trees(folder)
    assert len(zero) > 100
    assert zero == one
    assert len(set(zero)) > len(zero) // 4  # of greedy requests asked again the trees are the same


@pytest.mark.parametrize("name", ["coins", "candidates"])
def test_ranks_that_differ_are_noticed(server: Server, folder: Path, name: str) -> None:
    """The test above fails if ranks throw coins of their own, or rank candidates differently."""
    before = len(trees(folder)[0])
    with fault(folder, name):
        server.ask(PROMPTS[0], temperature=1.5, max_new_tokens=16, ignore_eos=True)
    zero, one = trees(folder)
    assert len(zero) == len(one) > before
    assert zero[before:] != one[before:]


def test_a_rank_that_fails_takes_the_server_down(server: Server, folder: Path) -> None:
    """It does not leave the other rank, and whoever waits for the answer, hanging for ever."""
    with fault(folder, "raise"):
        with pytest.raises(ServerError):
            server.ask(PROMPTS[0], max_new_tokens=400, ignore_eos=True)
        deadline = time.monotonic() + 60
        while server.alive() and time.monotonic() < deadline:
            time.sleep(0.2)
    assert not server.alive()
    assert "an injected fault" in server.log.read_text()
