"""Custom logit processors see, at each node, the answer up to it, as plain decoding shows it."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pathwise import Batch, Request, accumulated, make_tree, orchestrator, path, penalised
from torch import Tensor

from dflash2_sglang import processors
from dflash2_sglang.parameters import RequestParameters
from dflash2_sglang.processors import Answers
from dflash2_sglang.tree.build import Tree

VOCAB = 9


class Repeats:
    """Forbids what would complete an n-gram that the sequence holds already."""

    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        for row, given in enumerate(params):
            req = given["__req__"]
            ids = req.origin_input_ids + req.output_ids
            for a, b in pairwise(ids):
                if a == ids[-1]:
                    logits[row, b] = -torch.inf
        return logits


class Shift:
    """Does not look at the request."""

    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        return logits + torch.tensor([[given["by"]] for given in params])


def information(reqs: list[Request], kinds: dict[int, tuple[Any, list[int]]]) -> Any:
    """kinds: key to (processor, batch rows)."""
    from sglang.srt.sampling.sampling_batch_info import ProcessorEntry

    entries = {
        key: ProcessorEntry(processor=processor, rows=rows, indices=torch.tensor(rows))
        for key, (processor, rows) in kinds.items()
    }
    return SimpleNamespace(
        custom_params=[req.sampling_params.custom_params for req in reqs],
        custom_logit_processor=entries,
        has_custom_logit_processor=True,
        device="cpu",
        acc_additive_penalties=None,
        logit_bias=None,
    )


def random_tree(dice: random.Random, anchors: list[int], nodes: int = 6) -> Tree:
    parents = [[-1] + [dice.randrange(node) for node in range(1, nodes)] for _ in anchors]
    tokens = [[a] + [dice.randrange(VOCAB) for _ in range(1, nodes)] for a in anchors]
    return make_tree(tokens, parents, nodes - 1)


def plainly(req: Request, answer: list[int], processor: Any, logits: Tensor) -> Tensor:
    """One row through the processor, with a request that has answered this."""
    seen = Request(req.rid, req.parameters, list(req.origin_input_ids), answer)
    return processor(logits.clone().unsqueeze(0), [seen.sampling_params.custom_params])[0]


@pytest.mark.parametrize("number", range(20))
def test_each_node_sees_its_own_path(number: int) -> None:
    dice = random.Random(number)
    answers = [[dice.randrange(VOCAB) for _ in range(dice.randint(1, 9))] for _ in range(4)]
    reqs = [
        Request(f"r{row}", {"custom_params": {"by": float(row)}}, [1, 2, row], answer)
        for row, answer in enumerate(answers)
    ]
    tree = random_tree(dice, [answer[-1] for answer in answers])
    repeats, shift = Repeats(), Shift()
    info = information(reqs, {1: (repeats, [0, 3]), 2: (shift, [1])})
    logits = torch.randn(4 * 6, VOCAB, generator=torch.Generator().manual_seed(number))
    found = logits.clone()
    processors.apply(found, tree, info, Answers())
    chosen = {0: repeats, 3: repeats, 1: shift}
    for row, req in enumerate(reqs):
        for node in range(6):
            expected = logits[row * 6 + node]
            if row in chosen:
                answer = answers[row] + path(tree, row, node)
                expected = plainly(req, answer, chosen[row], expected)
            assert torch.equal(found[row * 6 + node], expected)


def test_sglangs_own_processors() -> None:
    """Their code reads more of the request than the answer, and relies on its types."""
    from sglang.srt.sampling.custom_logit_processor import (
        DeepseekOCRNoRepeatNGramLogitProcessor,
        ThinkingBudgetLogitProcessor,
    )

    class Budget(ThinkingBudgetLogitProcessor):
        THINKING_START_TOKEN_ID, THINKING_END_TOKEN_ID, NEW_LINE_TOKEN_ID = 3, 4, 5

    dice = random.Random(0)
    for processor, custom in (
        (DeepseekOCRNoRepeatNGramLogitProcessor(), {"ngram_size": 2, "window_size": 50}),
        (Budget(), {"thinking_budget": 1}),
    ):
        answers = [[dice.randrange(5, VOCAB) for _ in range(n)] for n in (1, 2, 4, 7)]
        reqs = [
            Request(f"r{row}", {"custom_params": custom}, [1, 3, 2], answer)
            for row, answer in enumerate(answers)
        ]
        tree = random_tree(dice, [answer[-1] for answer in answers])
        logits = torch.randn(4 * 6, VOCAB, generator=torch.Generator().manual_seed(1))
        found = logits.clone()
        processors.apply(found, tree, information(reqs, {0: (processor, [0, 1, 2, 3])}), Answers())
        changed = 0
        for row, node in ((row, node) for row in range(4) for node in range(6)):
            answer = answers[row] + path(tree, row, node)
            before = logits[row * 6 + node]
            expected = plainly(reqs[row], answer, processor, before)
            assert torch.equal(found[row * 6 + node], expected)
            changed += not torch.equal(expected, before)
        assert changed > 5


# What the scheduler has not processed yet.


class Scheduled:
    """A request whose answer the scheduler learns of one forward late."""

    def __init__(self, name: str, prompt: int) -> None:
        self.req = Request(name, {}, [1] * prompt)
        self.answer: list[int] = []


def batch(*members: Scheduled, anchored: bool) -> Any:
    """With ``anchored`` the last token of an answer is not part of the sequence yet."""
    lengths = [len(m.req.origin_input_ids) + len(m.answer) - anchored for m in members]
    return SimpleNamespace(reqs=[m.req for m in members], seq_lens=torch.tensor(lengths))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("number", range(5))
def test_answers_under_overlap(number: int, late: bool) -> None:
    dice, answers = random.Random(number), Answers()
    members: list[Scheduled] = []
    unprocessed: list[tuple[Scheduled, list[int]]] = []

    def forward(chosen: list[Scheduled], gains: list[list[int]]) -> None:
        nonlocal unprocessed
        for member, tokens in zip(chosen, gains, strict=True):
            member.answer += tokens
        if not late:
            unprocessed, now = [], list(zip(chosen, gains, strict=True))
        else:
            now, unprocessed = unprocessed, list(zip(chosen, gains, strict=True))
        for member, tokens in now:
            member.req.output_ids.extend(tokens)
        for member in members:
            assert answers.of(member.req).tolist() == member.answer

    for step in range(30):
        if step % 7 == 0:
            new = [Scheduled(f"{step}-{i}", dice.randint(1, 5)) for i in range(dice.randint(1, 2))]
            members += new
            first = [dice.randrange(VOCAB) for _ in new]
            answers.after_prefill(batch(*new, anchored=False), torch.tensor(first))
            forward(new, [[token] for token in first])
            continue
        gains = [[dice.randrange(VOCAB) for _ in range(dice.randint(1, 4))] for _ in members]
        padded = torch.tensor([row + [0] * (4 - len(row)) for row in gains])
        lengths = torch.tensor([len(row) for row in gains])
        answers.after_round(batch(*members, anchored=True), padded, lengths)
        forward(members, gains)


def test_a_retracted_request_forgets_what_was_never_processed() -> None:
    answers, member = Answers(), Scheduled("a", 3)
    answers.after_prefill(batch(member, anchored=False), torch.tensor([7]))
    member.answer = [7]
    member.req.output_ids.extend([7])
    answers.after_round(batch(member, anchored=True), torch.tensor([[4, 5]]), torch.tensor([2]))
    # That round is dropped; the prompt and [7] are prefilled anew, and give another token.
    answers.after_prefill(batch(member, anchored=False), torch.tensor([6]))
    assert answers.of(member.req).tolist() == [7, 6]


def test_tokens_after_parts_of_a_prompt_are_not_kept() -> None:
    answers, member = Answers(), Scheduled("a", 9)
    for length, token in ((4, 8), (8, 7), (9, 2)):
        part = SimpleNamespace(reqs=[member.req], seq_lens=torch.tensor([length]))
        answers.after_prefill(part, torch.tensor([token]))
        assert answers.of(member.req).tolist() == ([2] if length == 9 else [])


def test_nothing_is_fetched_for_a_processor_that_does_not_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that its batches stay free of synchronisation."""
    req = Request("a", {"custom_params": {"by": 1.0}}, [1], [2])
    tree = random_tree(random.Random(0), [2])
    monkeypatch.setattr(Tensor, "tolist", lambda _: pytest.fail("fetched"))
    monkeypatch.setattr(Tensor, "item", lambda _: pytest.fail("fetched"))
    logits = torch.zeros(6, VOCAB)
    processors.apply(logits, tree, information([req], {0: (Shift(), [0])}), Answers())
    assert (logits != 0).any()  # it ran


# Everything together, in plain decoding's order.


class Mask:
    """As a grammar's: some words are not allowed."""

    def __init__(self, forbidden: Tensor) -> None:
        self.forbidden = forbidden

    def apply(self, logits: Tensor) -> None:
        logits.masked_fill_(self.forbidden, -torch.inf)


@pytest.mark.parametrize("number", range(10))
def test_order_of_all_parameters(number: int) -> None:
    """Penalties, grammar, bias, processors: another order would give other numbers."""
    dice, g = random.Random(number), torch.Generator().manual_seed(number)
    answers = [[dice.randrange(VOCAB) for _ in range(4)] for _ in range(3)]
    asked: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2},
        {"min_new_tokens": 6},
        {},
    ]
    reqs = [
        Request(f"r{row}", {**asked[row], "custom_params": {"by": 0.1}}, [1, 2], answers[row])
        for row in range(3)
    ]
    tree = random_tree(dice, [answer[-1] for answer in answers])
    repeats = Repeats()
    info = information(reqs, {0: (repeats, [0, 1])})
    batch_of = Batch(reqs)
    additive, scaling = accumulated(orchestrator(batch_of, VOCAB), batch_of, VOCAB)
    info.acc_additive_penalties, info.acc_scaling_penalties = additive, scaling
    info.logit_bias = torch.randn(3, VOCAB, generator=g)
    logits = torch.randn(18, VOCAB, generator=g)
    forbidden = torch.rand(18, VOCAB, generator=g) < 0.3
    parameters = RequestParameters("cpu")
    parameters.penalties.reset(reqs, [2, 0, 1], VOCAB, 4)
    verify = SimpleNamespace(tree=tree, draft_token_num=6, max_tree_depth=6)
    scheduled = SimpleNamespace(
        reqs=reqs, sampling_info=info, req_pool_indices=torch.tensor([2, 0, 1])
    )
    found = logits.clone()
    parameters.adjust(found, verify, scheduled, Mask(forbidden))
    for row, req in enumerate(reqs):
        for node in range(6):
            answer = answers[row] + path(tree, row, node)
            expected = penalised(req, answer, logits[row * 6 + node])
            expected = expected.masked_fill(forbidden[row * 6 + node], -torch.inf)
            expected = expected + info.logit_bias[row]
            if row < 2:
                expected = plainly(req, answer, repeats, expected)
            assert torch.equal(found[row * 6 + node], expected)
