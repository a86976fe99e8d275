"""The exact distribution of sampled answers, from the target's logits and plain loops.

Written from the documented meaning of each parameter, in Python floats, and not from anybody's code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

PLACES = 4
Answer = tuple[int, ...]
Law = dict[Answer, float]


@dataclass(frozen=True)
class Kind:
    """Parameters of a request; ``forbid`` is what its processor does (answer -> tokens)."""

    sampling: Mapping[str, Any]
    forbid: Callable[[Answer], set[int]] | None = None
    processor: str | None = None
    custom_params: Mapping[str, Any] = field(default_factory=dict)


def contexts(vocab: int) -> Iterator[Answer]:
    for length in range(PLACES):
        yield from product(range(vocab), repeat=length)


@torch.no_grad()
def target_logits(target: Path, prompt: list[int], vocab: int) -> dict[Answer, list[float]]:
    """After each possible beginning of an answer, by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    found: dict[Answer, list[float]] = {}
    for length in range(PLACES):
        some = [answer for answer in contexts(vocab) if len(answer) == length]
        ids = torch.tensor([[*prompt, *answer] for answer in some])
        logits = torch.cat([model(part).logits[:, -1] for part in ids.split(512)])
        found |= dict(zip(some, logits.double().tolist(), strict=True))
    return found


def adjusted(
    logits: list[float], answer: Answer, kind: Kind, counted: Answer, eos: int
) -> list[float]:
    """``counted`` is the part of the answer that the penalties know: all of it, if all is right."""
    asked, counts = kind.sampling, Counter(counted)
    out = []
    for token, value in enumerate(logits):
        value -= asked.get("frequency_penalty", 0) * counts[token]
        if counts[token]:
            value -= asked.get("presence_penalty", 0)
            strength = asked.get("repetition_penalty", 1)
            value = value * strength if value < 0 else value / strength
        if token == eos and len(counted) < asked.get("min_new_tokens", 0):
            value = -math.inf
        value += asked.get("logit_bias", {}).get(str(token), 0)
        out.append(value)
    for token in kind.forbid(answer) if kind.forbid else ():
        out[token] = -math.inf
    return out


def filtered(logits: list[float], asked: Mapping[str, Any]) -> list[float]:
    """Temperature, then top-k, top-p and min-p, each measured on the whole distribution."""
    temperature, best = asked.get("temperature", 1.0), max(logits)
    weights = [math.exp((value - best) / temperature) for value in logits]
    total = sum(weights)
    probs = [weight / total for weight in weights]
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, above = [0.0] * len(probs), 0.0
    for rank, token in enumerate(order):
        likely = probs[token] >= asked.get("min_p", 0) * probs[order[0]]
        if rank < asked.get("top_k", len(probs)) and above <= asked.get("top_p", 1) and likely:
            kept[token] = probs[token]
        above += probs[token]
    total = sum(kept)
    return [p / total for p in kept]


def law(logits: dict[Answer, list[float]], kind: Kind, eos: int, *, late: int = 0) -> Law:
    """Probability of each answer of four tokens.

    late  so many tokens at the end of an answer are not counted by its penalties: the fault of a tree
          that is penalised as if the path were not there
    """
    probs: Law = {(): 1.0}
    for _ in range(PLACES):
        longer: Law = {}
        for answer, p in probs.items():
            known = answer[: max(len(answer) - late, min(len(answer), 1))]
            row = filtered(adjusted(logits[answer], answer, kind, known, eos), kind.sampling)
            longer |= {(*answer, token): p * q for token, q in enumerate(row) if q > 0}
        probs = longer
    return probs


def marginal(joint: Law, places: tuple[int, ...]) -> Law:
    out: Law = {}
    for key, p in joint.items():
        part = tuple(key[i] for i in places)
        out[part] = out.get(part, 0.0) + p
    return out


ENOUGH = 8  # expected draws of a cell


def cells(probs: Law, draws: int) -> dict[Answer, int]:
    """Which cell each outcome belongs to.

    Those with few expected draws share cell 0, with the next likelier one where together they are few
    as well: a chi-square test is no test where hardly anything is expected.
    """
    order = sorted(probs, key=probs.__getitem__)
    rare = sum(probs[key] * draws < ENOUGH for key in order)
    while 0 < rare < len(order) and sum(probs[key] for key in order[:rare]) * draws < ENOUGH:
        rare += 1
    return dict.fromkeys(order[:rare], 0) | {key: n for n, key in enumerate(order[rare:], 1)}


def surprise(counts: Counter[Answer], probs: Law) -> float:
    """p-value of Pearson's chi-square test; 0 if something impossible was drawn."""
    from scipy.stats import chi2

    if not set(counts) <= set(probs):
        return 0.0
    draws = sum(counts.values())
    seen, expected = pooled(counts, probs, draws), pooled(probs, probs, draws)
    statistic = sum((seen[c] - draws * e) ** 2 / (draws * e) for c, e in expected.items())
    return float(chi2.sf(statistic, len(expected) - 1)) if len(expected) > 1 else 1.0


def pooled(values: Mapping[Answer, float], probs: Law, draws: int) -> dict[int, float]:
    cell = cells(probs, draws)
    out: dict[int, float] = dict.fromkeys(cell.values(), 0.0)
    for key, value in values.items():
        out[cell[key]] += value
    return {
        c: value for c, value in out.items() if c or sum(probs[k] for k in probs if not cell[k]) > 0
    }


def power(probs: Law, other: Law, draws: int, level: float) -> float:
    """Chance that the test at this level rejects ``probs`` if ``other`` is true.

    An outcome that ``probs`` excludes is noticed when it comes; for the rest, the noncentral chi-square.
    """
    from scipy.stats import chi2, ncx2

    outside = sum(q for key, q in other.items() if key not in probs)
    inside = {key: other.get(key, 0.0) for key in probs}
    p, q = pooled(probs, probs, draws), pooled(inside, probs, draws)
    distance = draws * sum((q[c] - p[c]) ** 2 / p[c] for c in p)
    freedom = len(p) - 1
    missed = 1 - level
    if distance > 0 and freedom:
        missed = ncx2.cdf(chi2.isf(level, freedom), freedom, distance)
    return float(1 - missed * (1 - outside) ** draws)
