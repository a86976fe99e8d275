"""Medians and spreads of the cells of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

from dflash2_sglang.bench.plan import ANSWERS, LOAD, ROUNDS, Cell, Config, Plan
from dflash2_sglang.bench.rounds import AWAY

# Two-sided 95 % points of Student's t, by degrees of freedom 1 .. 12; then that of 12.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18)
MEDIAN_LOSS = 1.25  # standard error of a median over that of a mean, sqrt(pi / 2), normal values


@dataclass(frozen=True)
class Figure:
    """Values of the repeats, and how much such values vary.

    ``noise`` is the relative standard deviation between repeats, with ``freedom`` degrees of freedom:
    that of these values, or, since a few values tell little, one pooled over like figures.
    """

    values: tuple[float, ...]
    noise: float | None = None
    freedom: int = 0

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def spread(self) -> float | None:
        """A second run of as many repeats has its median within ``median +- spread`` 19 times in 20.

        That is for independent, normal repeats: the difference of two medians of n values of
        standard deviation s has a standard error of about 1.25 s sqrt(2 / n). It is not less than
        half the distance between the least and the greatest value. None for a single repeat.
        """
        n = len(self.values)
        if n < 2 or self.noise is None:
            return None
        student = STUDENT[min(self.freedom, len(STUDENT)) - 1]
        pooled = student * MEDIAN_LOSS * self.noise * abs(self.median) * math.sqrt(2 / n)
        return max(pooled, (max(self.values) - min(self.values)) / 2)

    def record(self) -> dict[str, Any]:
        low, high = min(self.values), max(self.values)
        return {
            "median": self.median,
            "spread": self.spread,
            "min": low,
            "max": high,
            "values": list(self.values),
        }


def pool(figures: Sequence[Figure]) -> list[Figure]:
    """The same figures, with the relative standard deviation of all of them together."""
    squares, freedom = 0.0, 0
    for figure in figures:
        middle = mean(figure.values)
        if len(figure.values) > 1 and middle:
            squares += sum((value / middle - 1) ** 2 for value in figure.values)
            freedom += len(figure.values) - 1
    if not freedom:
        return list(figures)
    return [
        replace(figure, noise=math.sqrt(squares / freedom), freedom=freedom) for figure in figures
    ]


@dataclass(frozen=True)
class Difference:
    """Where a greedy answer first differs from the reference's.

    ``gap`` is how much likelier the reference's target finds its own token, in nats; with
    ``at_least``, the other token was not among the likeliest that were recorded.
    """

    prompt: int
    position: int
    expected: int | None
    found: int | None
    gap: float | None
    at_least: bool = False


@dataclass
class Place:
    """The figures of one configuration under one load; those that cannot be had are left out."""

    workload: str
    concurrency: int
    config: str
    figures: dict[str, Figure] = field(default_factory=dict)
    prompts: int = 0
    differences: list[Difference] | None = None  # None where texts were not compared
    reach: list[float] = field(default_factory=list)  # by depth: share of passes that accept it
    parts: dict[str, float] = field(default_factory=dict)  # share of a round's time

    @property
    def same(self) -> int | None:
        return None if self.differences is None else self.prompts - len(self.differences)


SPEED, RATIO, LENGTH = "tokens_per_second", "ratio", "acceptance_length"
FIRST, BETWEEN, ROUND = "first_token_ms", "between_tokens_ms", "round_ms"


def places(plan: Plan, results: dict[str, Any]) -> list[Place]:
    """Every place that has a finished cell, in the plan's order."""
    found = []
    for workload in plan.workloads:
        for concurrency in plan.concurrencies:
            for config in plan.configs:
                place = _place(plan, results, workload.name, concurrency, config)
                if place.figures or place.differences is not None or place.reach:
                    found.append(place)
    for concurrency in plan.concurrencies:
        _pool([place for place in found if place.concurrency == concurrency], plan.configs[0].name)
    return found


def _pool(found: Sequence[Place], base: str) -> None:
    """Take the noise of each figure from all configurations and workloads at one concurrency."""
    for name in {name for place in found for name in place.figures}:
        # The reference's ratio is 1 in every repeat and would make the others look steadier.
        own = [p for p in found if name in p.figures and (name, p.config) != (RATIO, base)]
        for place, figure in zip(own, pool([p.figures[name] for p in own]), strict=True):
            place.figures[name] = figure


def _place(
    plan: Plan, results: dict[str, Any], workload: str, concurrency: int, config: Config
) -> Place:
    place = Place(workload, concurrency, config.name)
    loads = _loads(plan, results, workload, concurrency, config.name)
    if loads:
        place.figures = _figures(list(loads.values()))
    base = _loads(plan, results, workload, concurrency, plan.configs[0].name)
    ratios = [
        load["output_throughput"] / base[repeat]["output_throughput"]
        for repeat, load in loads.items()
        if repeat in base
    ]
    if ratios:  # within a repeat, as both were measured close to each other
        place.figures[RATIO] = Figure(tuple(ratios))
    answers = results.get(Cell(ANSWERS, workload, concurrency, config.name).key)
    if answers:
        place.prompts = len(answers)
        place.reach = reach(answers)
        place.differences = _differences(plan, results, place, answers)
    looks = results.get(Cell(ROUNDS, workload, concurrency, config.name).key)
    if looks:
        place.parts = shares(looks)
    return place


def _loads(
    plan: Plan, results: dict[str, Any], workload: str, concurrency: int, config: str
) -> dict[int, Any]:
    cells = {
        repeat: results.get(Cell(LOAD, workload, concurrency, config, repeat).key)
        for repeat in range(plan.repeats)
    }
    return {repeat: load for repeat, load in cells.items() if load}


def _figures(loads: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    by_name = {
        SPEED: [load["output_throughput"] for load in loads],
        LENGTH: [acceptance_length(load) for load in loads],
        FIRST: [load["median_ttft_ms"] for load in loads],
        BETWEEN: [load["median_tpot_ms"] for load in loads],
        ROUND: [round_ms(load) for load in loads],
    }
    return {
        name: Figure(tuple(values))
        for name, values in by_name.items()
        if all(value is not None for value in values)
    }


def acceptance_length(load: dict[str, Any]) -> float | None:
    """Tokens that a verify pass delivered, on average; None where there was no such pass.

    The first token of an answer comes from the prefill, so it is left out. What a last pass
    accepted beyond the end of the answer is not delivered, so it does not count either.
    """
    passes = sum(load["passes"])
    return sum(tokens - 1 for tokens in load["output_lens"]) / passes if passes else None


def round_ms(load: dict[str, Any]) -> float | None:
    """Milliseconds a decoding pass took, as a request sees it: prefills of others are included."""
    found = [
        1e3 * (latency - first) / (passes or tokens - 1)
        for latency, first, passes, tokens in zip(
            load["latencies"], load["ttfts"], load["passes"], load["output_lens"], strict=True
        )
        if tokens > 1
    ]
    return median(found) if found else None


def reach(answers: Sequence[dict[str, Any]]) -> list[float]:
    """Of all verify passes, the share that accepted at least 0, 1, 2 ... drafted tokens."""
    depth = max((len(answer["histogram"]) for answer in answers), default=0)
    counts = [
        sum(answer["histogram"][d] for answer in answers if d < len(answer["histogram"]))
        for d in range(depth)
    ]
    total = sum(counts)
    return [sum(counts[d:]) / total for d in range(depth)] if total else []


def shares(looks: dict[str, int]) -> dict[str, float]:
    """Of decoding time; prefill and waiting are left out."""
    kept = {part: count for part, count in looks.items() if part not in AWAY}
    total = sum(kept.values())
    return {part: count / total for part, count in kept.items()} if total else {}


def reference(plan: Plan, workload: str) -> Cell:
    """Whose texts the others are compared with: the first configuration at the least concurrency.

    So the same configuration at a higher one shows what the batch size alone changes.
    """
    return Cell(ANSWERS, workload, min(plan.concurrencies), plan.configs[0].name)


def _differences(
    plan: Plan, results: dict[str, Any], place: Place, answers: Sequence[dict[str, Any]]
) -> list[Difference] | None:
    expected = results.get(reference(plan, place.workload).key)
    if plan.settings["temperature"] != 0 or expected is None:
        return None
    found = []
    for number, (a, b) in enumerate(zip(expected, answers, strict=True)):
        if a["ids"] != b["ids"]:
            found.append(first_difference(number, a, b["ids"]))
    return found


def first_difference(number: int, expected: dict[str, Any], ids: Sequence[int]) -> Difference:
    """``expected`` is the reference's answer, with the likeliest tokens of each position in ``top``."""
    theirs = expected["ids"]
    shorter = min(len(theirs), len(ids))
    at = next((i for i in range(shorter) if theirs[i] != ids[i]), shorter)
    a = theirs[at] if at < len(theirs) else None
    b = ids[at] if at < len(ids) else None
    rows = expected.get("top") or []
    if a is None or b is None or at >= len(rows):
        return Difference(number, at, a, b, None)  # one text ends, or nothing was recorded
    known = dict(zip(*rows[at], strict=True))
    least = min(known.values())
    gap = known.get(a, least) - known.get(b, least)
    return Difference(number, at, a, b, round(gap, 4), b not in known)
