"""Faults put into the package's own functions: each must break the proof of `test_proof`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from exact import CAUGHT, EXACT, KINDS, Drawn, Target, error, tensors
from grown import draws, grown_error, lattice
from plans import plans
from torch import Tensor

from dflash2_sglang.tree import accept, build, draw, filters
from dflash2_sglang.tree.lattice import Lattice

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


# --- A tree that knows the coins ---


def _acceptance_error(share: bool) -> float:
    """How far a single random child's acceptance is from min(p, q), at worst over the words.

    share: the coin that drew the child also decides on it.
    """
    target, shape = Target(3, "random"), lattice(1, 1, 3, 3, "random")
    law = draw.draw_search(shape, 2, 1, draws(torch.zeros(1, 1, 1).double())).law[0, 0]
    order = shape.log_probs[0, 0, 0].argsort(descending=True)
    words = shape.tokens[0, 0][order]
    p = torch.tensor(target.after(()))[words]
    ends = torch.cat((law.new_zeros(1), law.cumsum(0), (p / law).clamp(max=1))).unique()
    middle, size = (ends[1:] + ends[:-1]) / 2, ends.diff()
    if share:
        first, second, volume = middle, middle, size
    else:
        first, second = torch.cartesian_prod(middle, middle).unbind(1)
        volume = torch.cartesian_prod(size, size).prod(1)
    rows = len(volume)
    wide = Lattice(*(field.expand(rows, *field.shape[1:]) for field in shape))
    coins = first.view(-1, 1, 1)
    tree = build.build_tree(wide, torch.zeros(rows).long(), 2, 1, draws(coins))
    probs = torch.tensor(target.after(())).expand(rows, 2, 3)
    accepted = accept.sampling_edges(
        tree.tokens, tree.parent, tree.depth, probs, second[:, None], tree.proposal, second[:, None]
    )[:, 1]
    found = [float(volume[accepted & (tree.tokens[:, 1] == word)].sum()) for word in words]
    return float((torch.tensor(found, dtype=torch.float64) - torch.minimum(p, law)).abs().max())


def test_a_tree_that_depends_on_the_coin_is_caught() -> None:
    assert _acceptance_error(share=False) < EXACT
    assert _acceptance_error(share=True) > CAUGHT


# --- `<=` for `<`, and words that are impossible ---


def _impossible_words() -> int:
    """How often one comes out with coins on the edges of their intervals, 0 among them."""
    count = 0
    edges = [0.0, 0.25, 0.5, 0.75, 1 - 2**-53]
    for p in ([0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5], [0, 0, 0, 1.0], [0.25, 0.5, 0.25, 0]):
        for random, fixed in itertools.permutations(range(4), 2):
            law = tuple((w, 1 / 3) for w in range(4) if w != fixed)
            tree = Drawn((-1, 0, 0), (0, fixed, random), (False, False, True), ((law), (), ()))
            target = Target(4, "random")
            batch = tensors([tree] * len(edges) ** 3, target, [()] * len(edges) ** 3)
            probs = torch.tensor(p, dtype=torch.float64).expand(len(batch.tokens), 3, 4)
            coins = torch.cartesian_prod(*[torch.tensor(edges, dtype=torch.float64)] * 3)
            walk = accept.sampling_walk(
                *batch[:4], probs, coins[:, :1], coins[:, 1], 1, batch.proposal, coins[:, 2:]
            )
            first = batch.tokens.gather(1, walk.path[:, 1:].clamp(min=0)).squeeze(1)
            word = torch.where(walk.length == 2, first, walk.next_token)
            count += int((torch.tensor(p)[word] == 0).sum())
    return count


def _closed_fixed(patch: Patch) -> None:
    def changed(prob: Tensor, siblings: Tensor, coin: Tensor) -> Tensor:
        end = (siblings.tril().double() @ prob.unsqueeze(2)).squeeze(2)
        hit = coin <= end
        return hit & ~(siblings.tril(-1) & hit.unsqueeze(1)).any(2)

    patch.setattr(accept, "_fixed_edges", changed)


def _closed_random(patch: Patch) -> None:
    edges = accept.sampling_edges

    def closed(*args: Any) -> Tensor:
        *rest, random = args
        return edges(*rest, random.masked_fill(random == 0, -1e-300))  # 0 <= 0, as it were

    patch.setattr(accept, "sampling_edges", closed)


def test_intervals_are_half_open(monkeypatch: Patch) -> None:
    assert _impossible_words() == 0
    for fault in (_closed_fixed, _closed_random):
        with monkeypatch.context() as patch:
            fault(patch)
            assert _impossible_words() > 0


# --- The request's filters ---


def _filter_error(words: int = 6) -> float:
    """One round at top-k 2 and top-p 0.7, drafted from filtered rows, against a plain loop."""
    target, worst = Target(words, "random"), 0.0
    top_k, top_p = torch.tensor([2]), torch.tensor([0.7])

    class Filtered(Target):
        def _draw(self, rng: np.random.Generator) -> np.ndarray:
            logits = torch.tensor(rng.dirichlet(np.ones(words))).log().view(1, 1, -1)
            heat = torch.ones(1)
            found = filters.filtered_probs(logits, temperature=heat, top_k=top_k, top_p=top_p)
            return found[0, 0].double().numpy()

    served = Filtered(words, "random")
    for text in [(), (0,), (1,), (2, 3)]:
        raw = target.after(text)
        order = np.argsort(-raw)
        kept = [raw[order[0]], raw[order[1]] if raw[order[0]] <= 0.7 else 0.0]
        want = np.zeros(words)
        want[order[:2]] = np.array(kept) / sum(kept)
        worst = max(worst, float(abs(served.after(text) - want).max()))
    return worst


def test_a_filter_on_the_proposal_only_is_caught(monkeypatch: Patch) -> None:
    assert _filter_error() < 1e-6  # float32
    monkeypatch.setattr(filters, "filtered_probs", lambda logits, **_: logits.float().softmax(-1))
    assert _filter_error() > CAUGHT
