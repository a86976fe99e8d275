"""Rules broken on purpose: exact integration must notice each, and nothing else."""

from __future__ import annotations

import pytest
import torch
from exact import CAUGHT, EXACT, Target
from integration import Sampler, Shape, all_trees, error, rewired

from dflash2_sglang.tree import accept
from dflash2_sglang.tree.accept import sampling_walk

torch.set_num_threads(1)


def _coin_used_twice(*args):
    """The coin that rejected the children also draws the next token."""

    def final(tokens, parent, last, probs, final_coins, coins, length):
        used = torch.cat((coins, final_coins[:, None]), 1).gather(1, length[:, None] - 1)
        return accept.final_draw(tokens, parent, last, probs, used.squeeze(1))

    return rewired(*args, final=final)


def _one_coin_for_all_depths(tokens, parent, mask, depth, probs, coins, final_coins, max_depth):
    coins = coins[:, :1].expand_as(coins)
    return sampling_walk(tokens, parent, mask, depth, probs, coins, final_coins, max_depth)


def _sibling_dropped(*args):
    """The last node is not taken out of the final draw although it had its chance."""

    def final(tokens, parent, last, probs, final_coins, coins, length):
        short = parent.clone()
        short[:, -1] = -1
        return accept.final_draw(tokens, short, last, probs, final_coins)

    return rewired(*args, final=final)


def _nothing_removed(*args):
    def final(tokens, parent, last, probs, final_coins, coins, length):
        return accept.final_draw(tokens, torch.full_like(parent, -1), last, probs, final_coins)

    return rewired(*args, final=final)


def _leaf_without_its_own_siblings(*args):
    """The children of the wrong node are removed: the last node's siblings."""

    def final(tokens, parent, last, probs, final_coins, coins, length):
        row = probs[torch.arange(len(last)), last].unsqueeze(1).expand_as(probs)
        above = parent.gather(1, last[:, None]).squeeze(1).clamp(min=0)
        return accept.final_draw(tokens, parent, above, row, final_coins)

    return rewired(*args, final=final)


def _children_not_stacked(*args):
    """Each child compares the coin to its own probability, not to the sum so far."""

    def edges(tokens, parent, depth, probs, coins):
        batch = torch.arange(len(tokens)).unsqueeze(1)
        prob = probs[batch, parent.clamp(min=0), tokens]
        hit = coins.gather(1, (depth - 1).clamp(min=0)) < prob
        siblings = (parent.unsqueeze(2) == parent.unsqueeze(1)).tril(-1)
        return hit & ~(siblings & hit.unsqueeze(1)).any(2)

    return rewired(*args, edges=edges)


def _coin_inverted_at_the_end(*args):
    """Not a fault: 1 - u is as uniform as u."""

    def final(tokens, parent, last, probs, final_coins, coins, length):
        return accept.final_draw(tokens, parent, last, probs, 1 - final_coins)

    return rewired(*args, final=final)


@pytest.mark.parametrize(
    "fault",
    [
        _coin_used_twice,
        _one_coin_for_all_depths,
        _sibling_dropped,
        _nothing_removed,
        _leaf_without_its_own_siblings,
        _children_not_stacked,
    ],
)
@pytest.mark.parametrize("kind", ["random", "holes"])
def test_faults_are_caught(fault: Sampler, kind: str) -> None:
    assert error(all_trees(4, 4), Target(4, kind), fault) > CAUGHT


def test_a_duplicated_sibling_is_caught() -> None:
    shape = Shape((-1, 0, 0), (0, 1, 1))
    assert error([shape], Target(3, "random"), sampling_walk) > CAUGHT


def test_the_machinery_does_not_cry_wolf() -> None:
    """The harness used for the faults, without a fault."""
    target = Target(4, "random")
    assert error(all_trees(4, 3), target, rewired) < EXACT
    # Cells are cut at u, not at 1 - u, so only trees with symmetric cuts integrate exactly.
    flat = [Shape((-1, 0), (0, x)) for x in range(3)]
    assert error(flat, Target(3, "uniform"), _coin_inverted_at_the_end) < EXACT
