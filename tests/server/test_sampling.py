"""Sampled tokens follow the target: counted on a running server, against exact probabilities.

The exact ones come from transformers and from filters written here as plain loops. The first token
is drawn by prefill, the others are accepted or drawn in a tree.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Server, acceptance
from tinypair import VOCAB, Pairs
from workload import random_ids

DRAWS = 2000  # of each kind
# Ten chi-square tests a run: one in 10,000 runs fails by chance.
TOO_UNLIKELY = 1e-5

KINDS: dict[str, dict[str, float]] = {
    "temperature 1": {"temperature": 1.0},
    "top_k": {"temperature": 1.4, "top_k": 6},
    "top_p": {"temperature": 1.0, "top_p": 0.75},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "all filters": {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.03},
}
PROMPT = random_ids(11, "sampling")


def filtered(
    probs: list[float], top_k: float = VOCAB, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """SGLang's filters, each measured on the whole distribution; what is left is renormalised."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, above = [0.0] * len(probs), 0.0
    for rank, token in enumerate(order):
        p = probs[token]
        if rank < top_k and above <= top_p and p >= min_p * probs[order[0]]:
            kept[token] = p
        above += p
    total = sum(kept)
    return [p / total for p in kept]


class Exact:
    """The target's own distribution of the next tokens after ``PROMPT``."""

    def __init__(self, target: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    @torch.no_grad()
    def after(self, endings: list[tuple[int, ...]], temperature: float = 1, **kind: Any) -> Any:
        """One filtered distribution for each ending of the prompt."""
        ids = torch.tensor([[*PROMPT, *ending] for ending in endings])
        logits = torch.cat([self.model(part).logits[:, -1] for part in ids.split(512)])
        probs = (logits.double() / temperature).softmax(-1)
        return [filtered(row, **kind) for row in probs.tolist()]

    def joint(self, **kind: Any) -> dict[tuple[int, int, int], float]:
        """Probability of each sequence of three tokens."""
        (first,) = self.after([()], **kind)
        starts = [(a,) for a in range(VOCAB) if first[a]]
        second = dict(zip(starts, self.after(starts, **kind), strict=True))
        pairs = [(a, b) for (a,), b in product(starts, range(VOCAB)) if second[(a,)][b]]
        third = dict(zip(pairs, self.after(pairs, **kind), strict=True))
        return {
            (a, b, c): first[a] * second[(a,)][b] * third[(a, b)][c]
            for (a, b), c in product(pairs, range(VOCAB))
            if third[(a, b)][c]
        }


def surprise(counts: Counter[Any], probs: dict[Any, float]) -> float:
    """p-value of Pearson's chi-square test, cells of small expectation put together."""
    from scipy.stats import chi2

    draws = sum(counts.values())
    assert set(counts) <= set(probs), "a token that a filter had excluded was drawn"
    statistic, cells, rest_seen, rest = 0.0, 0, 0, 0.0
    for key, p in probs.items():
        if p * draws < 8:
            rest_seen, rest = rest_seen + counts[key], rest + p * draws
        else:
            statistic += (counts[key] - p * draws) ** 2 / (p * draws)
            cells += 1
    if rest >= 8:
        statistic += (rest_seen - rest) ** 2 / rest
        cells += 1
    assert cells > 3
    return float(chi2.sf(statistic, cells - 1))


def marginal(joint: dict[Any, float], places: tuple[int, ...]) -> dict[Any, float]:
    out: dict[Any, float] = {}
    for key, p in joint.items():
        part = tuple(key[i] for i in places)
        out[part] = out.get(part, 0.0) + p
    return out


@pytest.fixture(scope="module")
def drawn(tree_server: Server) -> dict[str, list[dict[str, Any]]]:
    """``DRAWS`` answers of four tokens for every kind, all kinds in flight together."""

    def draw(order: tuple[str, int]) -> list[dict[str, Any]]:
        name, number = order
        return tree_server.ask(PROMPT, n=number, max_new_tokens=5, ignore_eos=True, **KINDS[name])

    part = 50
    orders = [(name, part) for _ in range(DRAWS // part) for name in KINDS]
    with ThreadPoolExecutor(len(KINDS)) as pool:
        found = list(pool.map(draw, orders))
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in KINDS}
    for (name, _), some in zip(orders, found, strict=True):
        answers[name] += some
    return answers


@pytest.mark.parametrize("name", KINDS)
def test_tokens_follow_the_target(
    name: str, drawn: dict[str, list[dict[str, Any]]], pairs: Pairs
) -> None:
    joint = Exact(pairs.target()).joint(**KINDS[name])
    assert abs(sum(joint.values()) - 1) < 1e-9
    sequences = [tuple(answer["output_ids"][:3]) for answer in drawn[name]]
    assert len(sequences) == DRAWS
    for places in ((0,), (0, 1), (1, 2)):
        counts = Counter(tuple(s[i] for i in places) for s in sequences)
        assert surprise(counts, marginal(joint, places)) > TOO_UNLIKELY, places
    # Tokens were accepted, not only drawn at the root.
    assert acceptance(drawn[name]) > 1.2


def test_the_test_notices_other_filters(
    drawn: dict[str, list[dict[str, Any]]], pairs: Pairs
) -> None:
    """Draws of one kind do not pass for those of another kind."""
    exact = Exact(pairs.target())
    sequences = [tuple(answer["output_ids"][:2]) for answer in drawn["temperature 1"]]
    counts = Counter(sequences)
    for other in ({"temperature": 1.3}, {"temperature": 0.75}):
        wrong = marginal(exact.joint(**other), (0, 1))
        assert surprise(counts, wrong) < TOO_UNLIKELY
