"""Faults put into the package's own functions: each must break the proof of `test_proof`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import CAUGHT, EXACT, KINDS, Target, error
from grown import grown_error
from plans import plans
from torch import Tensor

from dflash2_sglang.tree import accept, build, draw

torch.set_num_threads(1)

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]

# Shapes with siblings, depth, and both.
SHAPES = [((-1, 0, 0, 0), 4), ((-1, 0, 0, 1, 1), 3), ((-1, 0, 1, 2), 3)]
# Deep ones, and some whose nodes share rows of the lattice; with few fixed children.
GROWN = [(2, 3, 4, 4, 2), (2, 3, 3, 5, 3), (2, 3, 3, 6, 3), (3, 2, 3, 6, 2)]


@pytest.fixture(autouse=True)
def few_fixed_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "FIXED_REACH", 1.5)


def rule_error() -> float:
    worst = 0.0
    for parent, vocab in SHAPES:
        for i, plan in enumerate(plans(parent, vocab)):
            target = Target(vocab, KINDS[i % 3])
            worst = max(worst, error(plan.emitted(target), target, len(parent)))
    return worst


def tree_error() -> float:
    return max(grown_error(*sizes, kind) for sizes in GROWN for kind in range(3))


def test_without_a_fault() -> None:
    assert rule_error() < EXACT
    assert tree_error() < EXACT


# --- The acceptance rule ---


def _walk_with(patch: Patch, change: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    """`change` the coins (fixed, random, final) that the walk is given."""
    walk = accept.sampling_walk

    def changed(*args: Any) -> accept.Walk:
        *tree, coins, final, depth, proposal, random = args
        coins, random, final = change(coins, random, final)
        return walk(*tree, coins, final, depth, proposal, random)

    patch.setattr(accept, "sampling_walk", changed)


def final_coin_used_before(patch: Patch) -> None:
    _walk_with(patch, lambda fixed, random, final: (fixed, random, fixed[:, 0]))


def final_coin_is_the_random_one(patch: Patch) -> None:
    _walk_with(patch, lambda fixed, random, final: (fixed, random, random[:, 0]))


def one_coin_for_random_and_fixed(patch: Patch) -> None:
    _walk_with(patch, lambda fixed, random, final: (random, random, final))


def one_coin_for_all_depths(patch: Patch) -> None:
    def change(fixed: Tensor, random: Tensor, final: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return fixed[:, :1].expand_as(fixed), random[:, :1].expand_as(random), final

    _walk_with(patch, change)


def dropped_sibling(patch: Patch) -> None:
    """The last node is not taken out of the final draw although it had its chance."""
    final_draw = accept.final_draw

    def changed(tokens: Tensor, parent: Tensor, *args: Any) -> Tensor:
        short = parent.clone()
        short[:, -1] = -1
        return final_draw(tokens, short, *args)

    patch.setattr(accept, "final_draw", changed)


def unnormalised_remainder(patch: Patch) -> None:
    def changed(probs: Tensor, proposal: draw.Proposal) -> Tensor:
        return torch.ones(probs.shape[:2], dtype=torch.float64)

    patch.setattr(accept, "refusal", changed)


def law_left_in_the_final_draw(patch: Patch) -> None:
    final_draw = accept.final_draw
    patch.setattr(accept, "final_draw", lambda *args: final_draw(*args[:5]))


def law_left_in_the_fixed_children(patch: Patch) -> None:
    law_of = accept._law_of

    def changed(tokens: Tensor, above: Tensor, proposal: draw.Proposal) -> Tensor:
        return law_of(tokens, above, proposal) * proposal.random

    patch.setattr(accept, "_law_of", changed)


def random_child_taken_for_fixed(patch: Patch) -> None:
    """Accepted with p, not p / q."""
    law_of = accept._law_of

    def changed(tokens: Tensor, above: Tensor, proposal: draw.Proposal) -> Tensor:
        return law_of(tokens, above, proposal).masked_fill(proposal.random, 1)

    patch.setattr(accept, "_law_of", changed)


def fixed_children_not_stacked(patch: Patch) -> None:
    def changed(prob: Tensor, siblings: Tensor, coin: Tensor) -> Tensor:
        hit = coin < prob
        return hit & ~(siblings.tril(-1) & hit.unsqueeze(1)).any(2)

    patch.setattr(accept, "_fixed_edges", changed)


@pytest.mark.parametrize(
    "fault",
    [
        final_coin_used_before,
        final_coin_is_the_random_one,
        one_coin_for_random_and_fixed,
        one_coin_for_all_depths,
        dropped_sibling,
        unnormalised_remainder,
        law_left_in_the_final_draw,
        law_left_in_the_fixed_children,
        random_child_taken_for_fixed,
        fixed_children_not_stacked,
    ],
)
def test_faults_of_the_rule_are_caught(fault: Fault, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert rule_error() > CAUGHT


# --- The tree ---


def _spawn_with(patch: Patch, change: Callable[[Tensor, draw.Children], draw.Children]) -> None:
    spawn = draw.spawn
    patch.setattr(draw, "spawn", lambda ranked, *args: change(ranked, spawn(ranked, *args)))


def _is_random(children: draw.Children) -> Tensor:
    return torch.arange(children.rank.shape[2]) == children.fixed.unsqueeze(2)


def duplicated_sibling(patch: Patch) -> None:
    """The fixed children after the random one all carry the best candidate.

    One that repeats the random child would do no harm: once r is refused, (p - q)+ is 0 at r.
    """

    def change(ranked: Tensor, children: draw.Children) -> draw.Children:
        later = torch.arange(children.rank.shape[2]) > children.fixed.unsqueeze(2)
        return children._replace(rank=children.rank.masked_fill(later, 0))

    _spawn_with(patch, change)


def inclusion_depends_on_the_draw(patch: Patch) -> None:
    """A random child weighs what its own candidate does."""

    def change(ranked: Tensor, children: draw.Children) -> draw.Children:
        own = ranked.gather(2, children.rank)
        return children._replace(weight=torch.where(_is_random(children), own, children.weight))

    _spawn_with(patch, change)


def late_children_may_come_first(patch: Patch) -> None:
    """They are whatever was not drawn, so their weight tells what was."""

    def change(ranked: Tensor, children: draw.Children) -> draw.Children:
        own = ranked.gather(2, children.rank)
        return children._replace(weight=torch.where(_is_random(children), children.weight, own))

    _spawn_with(patch, change)


def shared_draw(patch: Patch) -> None:
    """All nodes of a depth draw with one coin."""
    original = draw.draw
    patch.setattr(
        draw, "draw", lambda law, coins: original(law, coins[:, :1].expand_as(coins).contiguous())
    )


def law_without_a_child(patch: Patch) -> None:
    """A node keeps the law of its random child although that is not in the tree."""
    original = draw.proposal

    def changed(found: draw.Found, tokens: Tensor, chosen: Tensor, parent: Tensor) -> Any:
        wide = chosen.unsqueeze(2).expand(-1, -1, found.law.shape[2])
        return original(found, tokens, chosen, parent)._replace(probs=found.law.gather(1, wide))

    patch.setattr(build, "proposal", changed)


@pytest.mark.parametrize(
    "fault",
    [
        duplicated_sibling,
        inclusion_depends_on_the_draw,
        late_children_may_come_first,
        shared_draw,
        law_without_a_child,
    ],
)
def test_faults_of_the_tree_are_caught(fault: Fault, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert tree_error() > CAUGHT
