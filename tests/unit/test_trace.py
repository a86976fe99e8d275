"""The recorder of rounds: what it writes, and that it is off unless asked for."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt import runtime_context

from dflash2_sglang import trace
from dflash2_sglang.trace import VARIABLE, Recorder, greedy_chain, recorder
from dflash2_sglang.tree.build import build_tree
from dflash2_sglang.tree.draw import Draws
from dflash2_sglang.tree.lattice import Lattice

# Position 0: b after the anchor. Position 1: after a comes a, after b comes b. One request.
PROBS = torch.tensor([[[[0.3, 0.6], [0.3, 0.6]], [[0.9, 0.1], [0.2, 0.5]]]])
TOKENS = torch.tensor([[[5, 6], [7, 8]]])


def test_greedy_chain_by_hand():
    tokens, log_probs = greedy_chain(Lattice(TOKENS, PROBS.log()))
    assert tokens.tolist() == [[6, 8]]
    assert log_probs.exp().tolist()[0] == pytest.approx([0.6, 0.3])


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 5), st.integers(2, 6))
def test_greedy_chain_is_the_tree_of_one_child(seed, batch, depth, width):
    torch.manual_seed(seed)
    tokens = torch.rand(batch, depth, 50).argsort(-1)[..., :width]
    rows = torch.randn(batch, depth, width, width).log_softmax(-1)
    rows[:, 0] = rows[:, 0, :1].expand(-1, width, -1)
    lattice = Lattice(tokens, rows)
    chain = build_tree(lattice, torch.zeros(batch, dtype=torch.long), depth + 1, 1)
    found, log_probs = greedy_chain(lattice)
    assert torch.equal(found, chain.tokens[:, 1:])
    assert torch.allclose(log_probs, chain.log_prob[:, 1:])


def outcome(accept_index, accept_lens, bonus):
    return SimpleNamespace(
        accept_index=torch.tensor(accept_index, dtype=torch.int32),
        accept_lens=torch.tensor(accept_lens, dtype=torch.int32),
        next_draft_input=SimpleNamespace(bonus_tokens=torch.tensor(bonus)),
    )


def requests(*rids):
    return SimpleNamespace(reqs=[SimpleNamespace(rid=rid) for rid in rids])


def test_records_by_hand(tmp_path):
    """Two requests with the same lattice; the second accepts b and is told 9."""
    path = tmp_path / "trace.jsonl"
    lattice = Lattice(TOKENS.repeat(2, 1, 1), PROBS.log().repeat(2, 1, 1, 1))
    tree = build_tree(
        lattice, torch.tensor([1, 2]), 4, 2
    )  # anchor, b .6, a .3, then bb .3 or aa .27
    record = Recorder(str(path), {"nodes": 4})
    result = outcome([[0, -1, -1], [4, 5, -1]], [1, 2], [3, 9])
    record(requests("one", "two"), tree, lattice, torch.tensor([20, 30]), result)
    config, one, two = [json.loads(line) for line in path.read_text().splitlines()]
    assert config == {"config": {"nodes": 4}}
    assert (one["rid"], one["start"], one["accepted"], one["bonus"]) == ("one", 20, [0], 3)
    assert (two["rid"], two["start"], two["accepted"], two["bonus"]) == ("two", 30, [0, 1], 9)
    assert (one["tokens"][0], two["tokens"][0]) == (1, 2)
    assert one["tokens"][1:] == two["tokens"][1:] == [6, 5, 8]
    assert one["parent"] == [-1, 0, 0, 1]
    assert one["prob"] == pytest.approx([1, 0.6, 0.3, 0.3], rel=1e-5)
    assert one["candidates"] == [[5, 6], [7, 8]]
    assert one["chain"] == [6, 8] and one["chain_prob"] == pytest.approx([0.6, 0.3], rel=1e-5)
    assert one["random"] == []


def test_impossible_paths_stay_valid_json(tmp_path):
    path = tmp_path / "trace.jsonl"
    probs = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [float("nan"), 0.0]]]])
    lattice = Lattice(TOKENS, probs.log())
    tree = build_tree(lattice, torch.tensor([1]), 5, 2)
    record = Recorder(str(path), {})
    record(requests("r"), tree, lattice, torch.tensor([2]), outcome([[0, -1, -1]], [1], [3]))

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(path.read_text().splitlines()[1], parse_constant=refuse)
    assert sorted(found["prob"]) == [0, 0, 1, 1, 1]


def test_random_children_are_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    lattice = Lattice(TOKENS, PROBS.log())
    draws = Draws(torch.full((1, 2, 3), 0.5), torch.tensor([False]))
    tree = build_tree(lattice, torch.tensor([1]), 4, 2, draws)
    record = Recorder(str(path), {})
    record(requests("r"), tree, lattice, torch.tensor([2]), outcome([[0, -1, -1]], [1], [3]))
    found = json.loads(path.read_text().splitlines()[1])
    assert found["random"] == tree.proposal.random[0].nonzero().flatten().tolist() != []


def test_off_without_the_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert recorder(nodes=4) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_writes(monkeypatch, tmp_path, rank):
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_rank=rank))
    assert isinstance(recorder(nodes=4), trace.Recorder) == path.exists() == (rank == 0)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{VARIABLE}=.*cannot be written"):
        Recorder(str(tmp_path / "no" / "such"), {})
