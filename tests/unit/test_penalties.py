"""Penalties at each node of a tree equal SGLang's own, run token by token along the node's path."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pathwise import Batch, Request, accumulated, make_tree, orchestrator, path, penalised
from torch import Tensor

from dflash2_sglang.penalties import Penalties, is_penalised, path_tokens
from dflash2_sglang.tree.build import Tree

SLOTS = 7


@dataclass
class Case:
    """Requests with their anchor, which is the last token of an answer, and a tree for each."""

    reqs: list[Request]
    tree: Tree
    logits: Tensor
    depth: int
    slots: Tensor
    told: int = 0

    @property
    def vocab(self) -> int:
        return self.logits.shape[-1]

    def info(self) -> Any:
        """As SGLang makes it: its own penalizers were told of one token a round, some late."""
        batch = Batch(self.reqs)
        found = orchestrator(batch, self.vocab)
        for _ in range(min(self.told, *(len(req.answer) for req in self.reqs))):
            found.cumulate_output_tokens(torch.tensor([req.answer[0] for req in self.reqs]))
        additive, scaling = accumulated(found, batch, self.vocab)
        return SimpleNamespace(acc_additive_penalties=additive, acc_scaling_penalties=scaling)

    def expected(self) -> Tensor:
        rows = []
        for row, req in enumerate(self.reqs):
            for node in range(self.tree.tokens.shape[1]):
                tokens = req.answer + path(self.tree, row, node)
                rows.append(penalised(req, tokens, self.logits[row, node]))
        return torch.stack(rows).view_as(self.logits)


PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "frequency_penalty": st.sampled_from([0.1, 0.5, -0.3, 2.0]),
        "presence_penalty": st.sampled_from([0.7, -1.1]),
        "repetition_penalty": st.sampled_from([1.2, 0.8, 1.05]),
        "min_new_tokens": st.integers(1, 9),
    },
)


@st.composite
def cases(draw: Any) -> Case:
    size, nodes, vocab = draw(st.integers(1, 3)), draw(st.integers(2, 7)), draw(st.integers(3, 6))
    token = st.integers(0, vocab - 1)
    tokens, parents, reqs = [], [], []
    for row in range(size):
        answer = draw(st.lists(token, min_size=1, max_size=6))
        parents.append([-1] + [draw(st.integers(0, node - 1)) for node in range(1, nodes)])
        tokens.append([answer[-1]] + [draw(token) for _ in range(1, nodes)])
        reqs.append(Request(f"r{row}", draw(PARAMETERS), [1, 2], answer))
    tree = make_tree(tokens, parents, nodes - 1)
    # Few values: ties, zeros of both signs and equal magnitudes happen.
    value = st.sampled_from([-2.5, -1.0, -0.1, -0.0, 0.0, 0.3, 1.0, 7.7])
    count = size * nodes * vocab
    logits = torch.tensor(draw(st.lists(value, min_size=count, max_size=count)))
    depth = int(tree.depth.max()) + draw(st.integers(0, 1))
    slots = torch.tensor(draw(st.permutations(range(SLOTS)))[:size])
    told = draw(st.integers(0, 3))
    return Case(reqs, tree, logits.view(size, nodes, vocab), max(depth, 1), slots, told)


def committed(case: Case, prefilled: list[int]) -> Penalties:
    """The state after each request came with so many tokens and got the others in rounds."""
    state = Penalties("cpu")
    for req, count in zip(case.reqs, prefilled, strict=True):
        req.output_ids = req.output_ids[:count]
    state.reset(case.reqs, case.slots.tolist(), case.vocab, SLOTS)
    left = [req.answer[count:] for req, count in zip(case.reqs, prefilled, strict=True)]
    if state.vocab == 0:
        return state
    state.add(case.slots, torch.tensor([row[0] for row in left]).unsqueeze(1))
    width = 4  # of a round; what lies past a row's length is padding, and any token
    for start in range(1, max(map(len, left)), width):
        parts = [row[start : start + width] for row in left]
        padded = torch.tensor([row + [0] * (width - len(row)) for row in parts])
        state.add(case.slots, padded, torch.tensor([len(row) for row in parts]))
    return state


@given(cases(), st.data())
@settings(max_examples=300, deadline=None)
def test_each_node_is_penalised_after_its_path(case: Case, data: Any) -> None:
    expected = case.expected()
    prefilled = [data.draw(st.integers(0, len(req.answer) - 1)) for req in case.reqs]
    state = committed(case, prefilled)
    info = case.info()
    if not state.applies(info):
        assert not any(is_penalised(req.sampling_params) for req in case.reqs)
        return
    found = case.logits.clone()
    state.apply(found, case.tree, case.depth, info, case.slots)
    assert torch.equal(found, expected)  # to the last bit


@given(cases())
@settings(max_examples=100, deadline=None)
def test_prefill_after_a_retraction(case: Case) -> None:
    """SGLang's sampler gets what its penalizers would hold, had they seen the answer."""
    case.told = 0  # they are new
    state, info = Penalties("cpu"), case.info()
    state.reset(case.reqs, case.slots.tolist(), case.vocab, SLOTS)
    if not state.applies(info):
        return
    state.before_prefill(info, case.slots)
    for row, req in enumerate(case.reqs):
        logits = case.logits[row, 0].clone().unsqueeze(0)
        logits.add_(info.acc_additive_penalties[row])
        if info.acc_scaling_penalties is not None:
            scale = info.acc_scaling_penalties[row]
            logits = torch.where(logits < 0, logits * scale, logits / scale)
        assert torch.equal(logits[0], penalised(req, req.answer, case.logits[row, 0]))


@given(cases())
@settings(max_examples=50, deadline=None)
def test_a_slot_that_is_used_again(case: Case) -> None:
    """Whoever had the slot before leaves nothing behind, a request without penalties included."""
    state = Penalties("cpu")
    strong = {"repetition_penalty": 1.9, "frequency_penalty": 1.3, "min_new_tokens": 40}
    before = [Request("old", strong, [1], [0, 1, 2]) for _ in range(SLOTS)]
    everywhere = torch.arange(SLOTS)
    state.reset(before, everywhere.tolist(), case.vocab, SLOTS)
    state.add(everywhere, torch.tensor([[1, 2]] * SLOTS))
    state.reset(case.reqs, case.slots.tolist(), case.vocab, SLOTS)
    info = case.info()
    if not state.applies(info):  # alone they would not be looked at: put a penalised one beside
        info.acc_additive_penalties = torch.zeros(len(case.reqs), case.vocab)
        info.acc_scaling_penalties = torch.ones(len(case.reqs), case.vocab)
    found = case.logits.clone()
    state.apply(found, case.tree, case.depth, info, case.slots)
    assert torch.equal(found, case.expected())


def test_chunks_of_a_prompt_count_once() -> None:
    """The token after each chunk but the last is thrown away."""
    req = Request("a", {"frequency_penalty": 0.5}, [1] * 9)
    state, slots = Penalties("cpu"), torch.tensor([3])
    for token in (2, 2, 4):
        state.reset([req], [3], 6, SLOTS)
        state.add(slots, torch.tensor([[token]]))
    assert state.frequency[3, :6].tolist() == [0, 0, 0, 0, 0.5, 0]
    assert state.length[3] == 1


def test_nothing_is_kept_until_a_penalty_is_asked_for() -> None:
    state = Penalties("cpu")
    state.reset([Request("a", {"temperature": 0.5, "top_k": 3}, [1], [4, 4])], [2], 1000, SLOTS)
    assert not hasattr(state, "frequency")
    state.reset([Request("b", {"presence_penalty": 0.5}, [1], [4])], [2], 1000, SLOTS)
    assert state.frequency.shape == (SLOTS, 1001)


def test_path_tokens() -> None:
    tree = make_tree([[9, 5, 6, 5, 8]], [[-1, 0, 0, 1, 3]], 4)
    assert path_tokens(tree, 4)[0].tolist() == [
        [9, 9, 9, 9],
        [5, 5, 5, 5],
        [6, 6, 6, 6],
        [5, 5, 5, 5],
        [5, 5, 8, 8],
    ]


@pytest.mark.parametrize("kind", ["frequency_penalty", "repetition_penalty", "min_new_tokens"])
def test_the_path_matters(kind: str) -> None:
    """Penalties of the root alone, the fault that these tests are to notice, differ."""
    value = 4 if kind == "min_new_tokens" else 1.5
    req = Request("a", {kind: value}, [1], [3])
    tree = make_tree([[3, 2, 2, 2]], [[-1, 0, 1, 2]], 3)
    case = Case([req], tree, torch.ones(1, 4, 4), 3, torch.tensor([0]))
    expected = case.expected()
    at_root = torch.stack([penalised(req, [3], case.logits[0, node]) for node in range(4)])
    assert not torch.equal(expected[0], at_root)
    state = committed(case, [0])
    found = case.logits.clone()
    state.apply(found, tree, 3, case.info(), case.slots)
    assert torch.equal(found, expected)
