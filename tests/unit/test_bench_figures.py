"""Figures of a benchmark: what is counted, how sure it is, and how it is shown."""

import json
import random

import pytest

from dflash2_sglang.bench import figures, report, rounds
from dflash2_sglang.bench.figures import Difference, Figure, first_difference
from dflash2_sglang.bench.journal import Journal
from dflash2_sglang.bench.plan import ANSWERS, LOAD, ROUNDS, Cell, Config, Plan, Workload

TREE = ("--speculative-algorithm", "DFLASH2")
CONFIGS = (Config("plain", ()), Config("DFLASH2 8", TREE))


def plan_of(temperature=0.0, concurrencies=(1, 4), workloads=("maths", "code"), repeats=2):
    settings = {"temperature": temperature, "max tokens": 8, "target": "T"}
    loads = tuple(Workload(name, ("p", "q")) for name in workloads)
    return Plan(CONFIGS, loads, concurrencies, repeats, True, True, settings)


def load(speed, passes=(0, 0), tokens=(5, 9)):
    """Two requests, each of 0.1 s to the first token and 1 s in all."""
    return {
        "output_throughput": speed,
        "median_ttft_ms": 100.0,
        "median_tpot_ms": 20.0,
        "passes": list(passes),
        "output_lens": list(tokens),
        "latencies": [1.0, 1.0],
        "ttfts": [0.1, 0.1],
    }


def answer(*ids, histogram=(), top=None):
    found = {"ids": list(ids), "passes": sum(histogram), "histogram": list(histogram)}
    return found if top is None else {**found, "top": top}


def results_of(plan, speeds, answers=None):
    """The same loads at every place, ``speeds[config][repeat]``; ``answers[config]`` likewise."""
    found = {}
    for cell in plan.cells():
        if cell.kind == LOAD:
            passes = (0, 0) if cell.config == "plain" else (2, 4)
            found[cell.key] = load(speeds[cell.config][cell.repeat], passes)
        elif cell.kind == ANSWERS and answers:
            found[cell.key] = answers[cell.config]
    return found


SPEEDS = {"plain": (10.0, 20.0), "DFLASH2 8": (15.0, 28.0)}


# --- what is counted -------------------------------------------------------------------------


def test_acceptance_leaves_out_the_prefill_token():
    assert figures.acceptance_length(load(1, passes=(2, 4), tokens=(5, 9))) == 12 / 6
    assert figures.acceptance_length(load(1)) is None


def test_round_is_the_time_after_the_first_token():
    assert figures.round_ms(load(1, passes=(3, 3))) == pytest.approx(300.0)
    assert figures.round_ms(load(1, tokens=(10, 10))) == pytest.approx(100.0)  # one pass a token
    assert figures.round_ms(load(1, tokens=(1, 1))) is None


def test_reach_adds_up_passes():
    found = [answer(histogram=(2, 1)), answer(histogram=(0, 3, 0, 4))]
    assert figures.reach(found) == [1.0, 0.8, 0.4, 0.4]
    assert figures.reach([answer()]) == []


def test_shares_leave_out_prefill_and_waiting():
    looks = {"target forward": 30, "acceptance": 10, rounds.PREFILL: 50, rounds.WAITING: 7}
    assert figures.shares(looks) == {"target forward": 0.75, "acceptance": 0.25}
    assert figures.shares({rounds.WAITING: 7}) == {}


def test_ratio_is_taken_within_a_repeat():
    plan = plan_of(workloads=("maths",), concurrencies=(1,))
    plain, tree = figures.places(plan, results_of(plan, SPEEDS))
    assert tree.figures["ratio"].values == (1.5, 1.4)
    assert plain.figures["ratio"].values == (1.0, 1.0)
    assert tree.figures["acceptance_length"].median == 2.0
    assert "acceptance_length" not in plain.figures


def test_an_unfinished_repeat_has_no_ratio():
    plan = plan_of(workloads=("maths",), concurrencies=(1,))
    results = results_of(plan, SPEEDS)
    del results[Cell(LOAD, "maths", 1, "plain", 1).key]
    tree = figures.places(plan, results)[1]
    assert tree.figures["ratio"].values == (1.5,)
    assert tree.figures["tokens_per_second"].values == (15.0, 28.0)
    assert figures.places(plan, {}) == []


# --- texts -----------------------------------------------------------------------------------

TOP = [[[7, 8], [-0.1, -0.3]], [[5, 6], [-0.2, -1.7]], [[9, 3], [-0.01, -5.0]]]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((7, 6, 9), Difference(3, 1, 5, 6, 1.5)),
        ((8, 1, 1), Difference(3, 0, 7, 8, 0.2)),
        ((7, 5, 4), Difference(3, 2, 9, 4, 4.99, at_least=True)),  # not among the recorded
        ((7, 5), Difference(3, 2, 9, None, None)),  # ends early
        ((7, 5, 9, 1), Difference(3, 3, None, 1, None)),
    ],
)
def test_first_difference(ids, expected):
    assert first_difference(3, answer(7, 5, 9, top=TOP), ids) == expected


def test_the_reference_is_the_first_at_the_least_concurrency():
    plan = plan_of(workloads=("maths",))
    same, other = answer(7, 5, 9, top=TOP), answer(7, 6, 9)
    results = {
        Cell(ANSWERS, "maths", 1, "plain").key: [same, same],
        Cell(ANSWERS, "maths", 4, "plain").key: [same, other],
        Cell(ANSWERS, "maths", 1, "DFLASH2 8").key: [other, other],
    }
    found = {(p.config, p.concurrency): p for p in figures.places(plan, results)}
    assert [found[key].same for key in (("plain", 1), ("plain", 4), ("DFLASH2 8", 1))] == [2, 1, 0]
    text = report.agreement(plan, list(found.values()))
    assert "Texts that differ: 3; largest gap 1.50; not near ties" in text and ": 3." in text
    assert "| maths | 1 | DFLASH2 8 | 1 | 2 | 5 | 6 | 1.500 |" in text


def test_near_ties_are_reported_too():
    plan = plan_of(workloads=("maths",), concurrencies=(1,))
    results = {
        Cell(ANSWERS, "maths", 1, "plain").key: [answer(7, 5, top=TOP)],
        Cell(ANSWERS, "maths", 1, "DFLASH2 8").key: [answer(8, 5)],
    }
    text = report.agreement(plan, figures.places(plan, results))
    assert "Texts that differ: 1; largest gap 0.20; not near ties" in text and ": 0." in text
    assert "| maths | 1 | DFLASH2 8 | 1 | 1 | 7 | 8 | 0.200 |" in text


def test_samples_are_not_compared():
    plan = plan_of(temperature=0.7)
    answers = {"plain": [answer(1)], "DFLASH2 8": [answer(2)]}
    found = figures.places(plan, results_of(plan, SPEEDS, answers))
    assert all(place.differences is None for place in found)
    assert "were not compared" in report.agreement(plan, found)
    assert "| sampled |" in report.table(plan, found, "maths")


# --- how sure --------------------------------------------------------------------------------


def test_a_single_repeat_has_no_spread():
    (figure,) = figures.pool([Figure((3.0,))])
    assert figure.median == 3.0 and figure.spread is None
    assert report.show(figure, 1) == "3.0"
    assert report.show(None, 1) == ""


@pytest.mark.parametrize(("repeats", "like"), [(2, 6), (3, 6), (3, 30), (5, 4)])
def test_a_second_run_agrees_within_the_spread(repeats, like):
    """Normal noise, many benchmarks: about 19 of 20 medians of a second run are inside."""
    chance = random.Random(repeats * 100 + like)
    levels = [10.0 * (i + 1) for i in range(like)]
    inside = trials = 0
    for _ in range(600):
        first, second = (
            [Figure(tuple(chance.gauss(m, 0.05 * m) for _ in range(repeats))) for m in levels]
            for _ in range(2)
        )
        for a, b in zip(figures.pool(first), second, strict=True):
            inside += abs(a.median - b.median) <= a.spread
            trials += 1
    assert 0.93 < inside / trials < 0.995


def test_the_spread_covers_the_values_themselves():
    steady = [Figure((5.0, 5.0, 5.0)) for _ in range(20)]
    wild = figures.pool([*steady, Figure((4.0, 5.0, 8.0))])[-1]
    assert wild.spread >= 2.0


def test_the_references_ratio_does_not_count_as_steady():
    plan = plan_of(workloads=("maths",), concurrencies=(1,))
    plain, tree = figures.places(plan, results_of(plan, SPEEDS))
    assert plain.figures["ratio"].spread is None
    assert tree.figures["ratio"].freedom == 1


# --- tables and JSON -------------------------------------------------------------------------


def written(tmp_path, plan, results, notes=()):
    journal = Journal(tmp_path, plan.fingerprint())
    for key, value in results.items():
        journal.add(key, value)
    text = report.write(plan, journal, figures.places(plan, results), tmp_path, notes)
    return text, json.loads((tmp_path / "bench.json").read_text())


def test_report_of_a_whole_run(tmp_path):
    plan = plan_of()
    answers = {"plain": [answer(7, 5, top=TOP)], "DFLASH2 8": [answer(7, 5, histogram=(1, 1))]}
    results = results_of(plan, SPEEDS, answers)
    for concurrency in plan.concurrencies:
        for config in plan.configs:
            key = Cell(ROUNDS, "maths", concurrency, config.name).key
            results[key] = {"target forward": 3, "scheduler": 1}
    results["server/plain"] = {"command": ["python"], "info": {"version": "x"}}
    text, whole = written(tmp_path, plan, results, ["one thing more"])
    assert text == (tmp_path / "bench.md").read_text()
    assert "Note: one thing more" in text and "Unfinished" not in text and "No text differs" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| DFLASH2 8 | ")]
    summary, *places = rows
    assert summary[1:] == ["1.45 (1.45 to 1.45)", "1.45 (1.45 to 1.45) |"]
    assert [(row[1], row[2][:4], row[-1]) for row in places] == [
        ("1", "2.00", "1 of 1 |"),
        ("4", "2.00", "1 of 1 |"),
    ] * 2
    assert {"command", "versions", "machine", "revision", "environment", "prompts"} < set(whole)
    assert whole["prompts"]["maths"] == {"sha256": plan.workloads[0].digest, "texts": ["p", "q"]}
    assert whole["servers"]["plain"]["command"] == ["python"]
    assert len(whole["figures"]) == 8 and len(whole["raw"]) == len(results) - 1
    assert whole["figures"][1]["tokens_per_second"]["values"] == [15.0, 28.0]
    assert whole["figures"][1]["acceptance_by_depth"] == [1.0, 0.5]
    assert whole["figures"][1]["round_parts"] == {"target forward": 0.75, "scheduler": 0.25}
    kept = whole["raw"][Cell(ANSWERS, "maths", 1, "plain").key]
    assert kept == [{"ids": [7, 5], "passes": 0, "histogram": []}]


def test_report_of_half_a_run(tmp_path):
    plan = plan_of(workloads=("maths",), concurrencies=(1,))
    results = {Cell(LOAD, "maths", 1, "plain", 0).key: load(10.0)}
    text, _ = written(tmp_path, plan, results)
    assert "Unfinished: 1 of 8 cells are measured" in text
    assert "| plain | 1 |  | 10.0 | 1 | 100 | 20.0 | reference |" in text
