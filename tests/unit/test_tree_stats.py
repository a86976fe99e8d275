"""Calibration and recall, on rounds whose figures were worked out by hand."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_rounds import OUTPUT, PROMPT_LENGTH, answer, records

from dflash2_sglang.cli.tree_stats import (
    EDGES,
    Depth,
    binned,
    by_depth,
    edge_guesses,
    path_guesses,
    statistics,
    wilson,
)
from dflash2_sglang.cli.tree_trace import Answer, TreeError, join, read_trace

RESPONSE = {"output_ids": OUTPUT, "meta_info": {"finish_reason": {"type": "stop"}}}


def test_rounds_after_the_end_are_left_out():
    found = answer()
    assert [one.place for one in found.rounds] == [0, 3, 4]
    assert found.finish == "stop"
    assert found.rounds[0].truth == OUTPUT[1:]
    assert found.rounds[0].depth == [0, 1, 1, 2, 2]


def test_gains_stop_at_the_end_of_the_answer():
    rounds = answer().rounds
    assert [one.gain for one in rounds] == [3, 1, 1]  # the last accepted two, and a bonus
    assert sum(one.gain for one in rounds) == len(OUTPUT) - 1
    assert [one.chain_hits for one in rounds] == [2, 2, 1]
    assert [one.chain_gain for one in rounds] == [3, 2, 1]


def test_what_was_not_answered_is_an_error():
    wrong = records()
    wrong[1]["bonus"] = 99
    with pytest.raises(TreeError, match="recorded at token 3 is not what it answered"):
        join("?", PROMPT_LENGTH, RESPONSE, wrong)
    moved = records()[:1]
    moved[0]["start"] += 1
    with pytest.raises(TreeError, match="token 1"):
        join("?", PROMPT_LENGTH, RESPONSE, moved)


def test_guesses():
    rounds = answer().rounds
    assert path_guesses(rounds) == [
        *((0.6, True), (0.3, False), (0.4, True), (0.1, False)),
        *((0.5, False), (0.2, False), (0.1, False)),
        (0.9, True),  # the node below it lies beyond the end
    ]
    edges = edge_guesses(rounds)
    assert [came_true for _, came_true in edges] == [True, False, True, False, False, False, True]
    expected = [0.6, 0.3, 0.4 / 0.6, 0.1 / 0.6, 0.5, 0.2, 0.9]
    assert [prob for prob, _ in edges] == pytest.approx(expected)


def test_bins():
    found = [
        (b.low, b.high, b.count, round(b.predicted, 6), b.accepted, b.share)
        for b in binned(path_guesses(answer().rounds))
    ]
    assert found == [
        (0.1, 0.2, 2, 0.1, 0, 0.0),
        (0.2, 0.3, 1, 0.2, 0, 0.0),
        (0.3, 0.5, 2, 0.35, 1, 0.5),
        (0.5, 0.7, 2, 0.55, 1, 0.5),
        (0.9, 1.0, 1, 0.9, 1, 1.0),
    ]


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans())))
def test_every_guess_is_in_one_bin(guesses):
    bins = binned(guesses)
    assert sum(b.count for b in bins) == len(guesses)
    assert sum(b.accepted for b in bins) == sum(came_true for _, came_true in guesses)
    for b in bins:
        inside = [p for p, _ in guesses if b.low <= p < b.high or p == b.high == 1]
        assert len(inside) == b.count and (b.low, b.high) in pairwise(EDGES)
        assert min(inside) - 1e-12 <= b.predicted <= max(inside) + 1e-12
        assert 0 <= b.share_low <= b.share + 1e-12 and b.share - 1e-12 <= b.share_high <= 1


def test_wilson():
    # Newcombe (1998), Table I: 81 of 263, and 0 of 20.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 2) == pytest.approx((0.0945, 0.9055), abs=5e-5)


def test_depths():
    first, second, third = by_depth(answer().rounds)
    assert first == Depth(1, 3, 5, pytest.approx(2.5), 2, 2, 3, 3)
    assert second == Depth(2, 2, 3, pytest.approx(0.6), 2, 1, 2, 1)
    assert third == Depth(3, 1, 0, 0, 0, 0, 0, 1)


def test_statistics():
    found = statistics([answer(), answer()])
    assert (found["rounds"], found["tokens"]) == (6, 10)
    assert found["acceptance_length"] == pytest.approx(5 / 3)
    assert found["chain_acceptance_length"] == pytest.approx(2)
    assert found["predicted_nodes"] == pytest.approx(2 * 3.1)
    assert found["accepted_nodes"] == 2 * 3
    assert len(found["paths"]) == 5 and len(found["depths"]) == 3


def test_no_round_at_all():
    found = statistics([Answer("?", 3, [4], "stop", [])])
    assert found["acceptance_length"] is None and found["depths"] == found["paths"] == []


def test_reading_a_trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"config": {"nodes": 5}}, *records("a"), *records("b")[:1]]
    half = '{"rid": "a", "sta'  # a round that is just being written
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + half)
    config, found = read_trace(path)
    assert config == {"nodes": 5}
    assert found == {"a": records("a"), "b": records("b")[:1]}


def test_a_server_that_records_nothing(tmp_path):
    with pytest.raises(TreeError, match="recorded no round"):
        read_trace(tmp_path / "none")
