"""Coins on the edge of their intervals, probabilities of zero, and sums that must not round."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from integration import Sampler, Shape, rewired, tensors

from dflash2_sglang.tree import accept
from dflash2_sglang.tree.accept import sampling_walk

torch.set_num_threads(1)


def _edge_coins(dtype: torch.dtype) -> list[float]:
    one, eighths = torch.ones((), dtype=dtype), torch.arange(8, dtype=dtype) / 8
    below = torch.nextafter(torch.cat((eighths[1:], one[None])), torch.zeros((), dtype=dtype))
    return [*eighths.tolist(), *below.tolist()]


def _zero_tokens(sampler: Sampler, dtype: torch.dtype) -> int:
    """How often an impossible token comes out, with coins on the edges of all intervals."""
    shapes = [
        Shape((-1, 0, 0, 0, 1), (0, *order, 2)) for order in itertools.permutations(range(4), 3)
    ]
    laws = [
        [0, 0.5, 0, 0.5],
        [0.5, 0, 0.5, 0],
        [0, 0, 0, 1.0],
        [0.25, 0.5, 0.25, 0],
        [1.0, 0, 0, 0],
    ]
    edge = _edge_coins(dtype)
    cells = list(itertools.product(range(len(shapes)), range(len(laws)), edge, edge))
    which = torch.tensor([s for s, _, _, _ in cells])
    rows = [[laws[(law + i) % len(laws)] for i in range(5)] for _, law, _, _ in cells]
    probs = torch.tensor(rows, dtype=dtype)
    coins = torch.tensor([[u, v] for _, _, u, v in cells], dtype=dtype)
    tokens, parent, mask, depth = (x[which] for x in tensors(shapes))
    walk = sampler(tokens, parent, mask, depth, probs, coins, coins.flip(1)[:, 0], 2)
    batch = torch.arange(len(cells)).unsqueeze(1)
    nodes = walk.path[:, 1:].clamp(min=0)
    came = probs[batch, parent[batch, nodes].clamp(min=0), tokens[batch, nodes]]
    last = walk.path.gather(1, walk.length[:, None] - 1).squeeze(1)
    drawn = probs[batch.squeeze(1), last, walk.next_token]
    return int(((came == 0) & (walk.path[:, 1:] >= 0)).sum() + (drawn == 0).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_tokens_never_come_out(dtype: torch.dtype) -> None:
    assert _zero_tokens(sampling_walk, dtype) == 0


def _closed_intervals(*args):
    """`<=` for `<`: a coin of exactly 0 hits a child of probability 0."""

    def edges(tokens, parent, depth, probs, coins):
        batch = torch.arange(len(tokens)).unsqueeze(1)
        prob = probs[batch, parent.clamp(min=0), tokens]
        siblings = parent.unsqueeze(2) == parent.unsqueeze(1)
        end = (siblings.tril().to(prob) @ prob.unsqueeze(2)).squeeze(2)
        hit = coins.gather(1, (depth - 1).clamp(min=0)) <= end
        return hit & ~(siblings.tril(-1) & hit.unsqueeze(1)).any(2)

    return rewired(*args, edges=edges)


def _unguarded_inverse(*args):
    """The first index whose cumulative probability is >= the coin, a zero at the front included."""

    def final(tokens, parent, last, probs, final_coins, coins, length):
        batch = torch.arange(len(last))
        child = parent == last.unsqueeze(1)
        gone = torch.where(child, -probs[batch, last].gather(1, tokens), 0)
        total = probs[batch, last].scatter_add(1, tokens, gone).cumsum(1)
        at = torch.searchsorted(total, final_coins.unsqueeze(1) * total[:, -1:])
        return at.squeeze(1).clamp(max=probs.shape[2] - 1)

    return rewired(*args, final=final)


@pytest.mark.parametrize("fault", [_closed_intervals, _unguarded_inverse])
def test_edge_faults_are_caught(fault: Sampler) -> None:
    assert _zero_tokens(fault, torch.float64) > 0


def test_intervals_are_half_open() -> None:
    """Children of 1/4 and 1/2: [0, 1/4), [1/4, 3/4), and the rest."""
    shape = Shape((-1, 0, 0), (0, 2, 0))
    coins = torch.tensor([0.0, 0.25 - 2**-26, 0.25, 0.75 - 2**-24, 0.75, 1 - 2**-24])
    tokens, parent, mask, depth = tensors([shape] * len(coins))
    probs = torch.tensor([0.5, 0.25, 0.25]).expand(len(coins), 3, 3)
    walk = sampling_walk(tokens, parent, mask, depth, probs, coins[:, None], coins, 1)
    assert walk.path.tolist() == [[0, 1], [0, 1], [0, 2], [0, 2], [0, -1], [0, -1]]
    assert walk.length.tolist() == [2, 2, 2, 2, 1, 1]
    assert walk.next_token[4:].tolist() == [1, 1]


def test_final_coin_is_half_open_too() -> None:
    coins = torch.tensor([0.0, 0.25, 0.5, 1 - 2**-24, 1.0])
    tokens, parent, _, _ = tensors([Shape((-1,), (0,))] * len(coins))
    probs = torch.tensor([0.0, 0.25, 0.0, 0.25, 0.5, 0.0]).expand(len(coins), 1, 6)
    last = torch.zeros(len(coins), dtype=torch.int64)
    assert accept.final_draw(tokens, parent, last, probs, coins).tolist() == [1, 3, 4, 4, 4]


def test_no_mass_left_falls_back_to_the_most_probable_token() -> None:
    """The children's float32 probabilities sum to just below 1 and the coin lies above them."""
    almost = [0.33333328, 0.33333334, 0.33333328, 0.0]
    tokens, parent, mask, depth = tensors([Shape((-1, 0, 0, 0), (0, 0, 1, 2))])
    probs = torch.tensor(almost).expand(1, 4, 4)
    coin = torch.tensor([[1 - 2**-24]])
    assert float(coin) > sum(probs[0, 0].tolist())
    for final in (0.0, 0.5, 1 - 2**-24):
        walk = sampling_walk(tokens, parent, mask, depth, probs, coin, torch.tensor([final]), 1)
        assert (walk.length.tolist(), walk.next_token.tolist()) == ([1], [1])


def test_nan_rows_stay_where_they_are() -> None:
    """A NaN distribution at one node neither crashes nor changes a walk that avoids the node."""
    shapes = [Shape((-1, 0, 0, 1, 2), (0, 0, 1, 1, 1))] * 2
    tokens, parent, mask, depth = tensors(shapes)
    probs = torch.tensor([0.5, 0.25, 0.25]).repeat(2, 5, 1)
    probs[:, 1] = torch.nan
    coins = torch.tensor([[0.6, 0.9], [0.1, 0.1]])
    walk = sampling_walk(tokens, parent, mask, depth, probs, coins, coins[:, 0], 2)
    assert walk.path.tolist() == [[0, 2, -1], [0, 1, -1]]
    assert 0 <= int(walk.next_token[1]) < 3


def test_the_final_draw_sums_in_float64() -> None:
    """Behind one probable word, float32 sums would move the borders of thousands of rare ones."""
    logits = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    logits[0] = 14
    probs = torch.softmax(logits, -1)
    coins = torch.linspace(float(probs[0]), 1 - 2**-24, 2000, dtype=torch.float64)
    tokens, parent, _, _ = tensors([Shape((-1,), (0,))] * len(coins))
    last = torch.zeros(len(coins), dtype=torch.int64)
    drawn = accept.final_draw(tokens, parent, last, probs.expand(len(coins), 1, -1), coins)
    total = np.cumsum(probs.double().numpy())
    want = np.searchsorted(total, coins.numpy() * total[-1], side="right")
    assert drawn.tolist() == want.tolist()


def test_the_children_are_summed_in_float64() -> None:
    """In float32, 1/2 and a little more is 1/2, and a coin of 1/2 would miss the little."""
    tokens, parent, mask, depth = tensors([Shape((-1, 0, 0), (0, 0, 1))])
    probs = torch.tensor([0.5, 2**-26, 0.5]).expand(1, 3, 3)
    coin = torch.tensor([[0.5]])
    walk = sampling_walk(tokens, parent, mask, depth, probs, coin, coin[0], 1)
    assert walk.path.tolist() == [[0, 2]]
