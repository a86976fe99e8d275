"""Faults that the law of emitted texts does not show: each is put in, and measured on its own.

Exact integration takes the draws of the tree and the coins of the walk for independent, puts no coin
on the edge of an interval, and asks for the law of a target that filters nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from exact import CAUGHT, EXACT, Drawn, Target, tensors
from grown import draws, lattice
from torch import Tensor

from dflash2_sglang.tree import accept, build, draw, filters
from dflash2_sglang.tree.lattice import Lattice

torch.set_num_threads(1)

Patch = pytest.MonkeyPatch


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
