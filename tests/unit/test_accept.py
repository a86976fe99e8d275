"""The walks: greedy against a pointer walk, sampling by exact integration over its coins.

A walk is a step function of its coins. So its law can be computed without drawing anything: cut
the unit interval of every coin at all points where any decision can change, try one coin in each
piece, and weigh the outcome by the size of the piece. The law must equal the target's, and the
same machinery must notice when a rule is broken on purpose.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash2_sglang.tree import accept
from dflash2_sglang.tree.accept import Walk, follow, greedy_walk, mixed_walk, sampling_walk

torch.set_num_threads(1)

Text = tuple[int, ...]
Law = dict[Text, float]
# (tokens, parent, mask, depth, target_probs, coins, final_coins, max_depth)
Sampler = Callable[..., Walk]

EXACT = 1e-12
CAUGHT = 1e-3


class Shape(NamedTuple):
    """A tree in plain Python: parents before children; tokens[0] is not a word of the target."""

    parent: tuple[int, ...]
    tokens: tuple[int, ...]

    def line(self, node: int) -> list[int]:
        out = [node]
        while self.parent[out[-1]] >= 0:
            out.append(self.parent[out[-1]])
        return out[::-1]

    def text(self, node: int) -> Text:
        return tuple(self.tokens[i] for i in self.line(node)[1:])

    def children(self, node: int) -> list[int]:
        return [i for i, p in enumerate(self.parent) if p == node]


def _tensors(shapes: list[Shape]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, parent, mask, depth) of trees of one size."""
    nodes = len(shapes[0].parent)
    lines = [[shape.line(i) for i in range(nodes)] for shape in shapes]
    mask = torch.zeros(len(shapes), nodes, nodes, dtype=torch.bool)
    for b, i in itertools.product(range(len(shapes)), range(nodes)):
        mask[b, i, lines[b][i]] = True
    depth = torch.tensor([[len(line) - 1 for line in tree] for tree in lines])
    tokens = torch.tensor([shape.tokens for shape in shapes])
    return tokens, torch.tensor([shape.parent for shape in shapes]), mask, depth


@cache
def _all_trees(vocab: int, nodes: int) -> list[Shape]:
    """Every prefix-closed set of `nodes` texts, once, its siblings in a random order."""

    def grow(chosen: list[Text], open_texts: list[Text]) -> Iterator[list[Text]]:
        if len(chosen) == nodes:
            yield chosen
            return
        for i, text in enumerate(open_texts):
            more = [(*text, x) for x in range(vocab)]
            yield from grow([*chosen, text], open_texts[i + 1 :] + more)

    rng = np.random.default_rng(vocab * 10 + nodes)
    trees = []
    for texts in grow([], [()]):
        texts = sorted(texts, key=lambda text: (len(text), rng.random()))
        index = {text: i for i, text in enumerate(texts)}
        parent = tuple(index[text[:-1]] if text else -1 for text in texts)
        trees.append(Shape(parent, tuple(text[-1] if text else 0 for text in texts)))
    return trees


class Target:
    """A language model on a small vocabulary: a fixed distribution after every text."""

    def __init__(self, vocab: int, kind: str) -> None:
        self.vocab, self.kind = vocab, kind
        self._memory: dict[Text, np.ndarray] = {}

    def after(self, text: Text) -> np.ndarray:
        if text not in self._memory:
            rng = np.random.default_rng(zlib.crc32(repr((text, self.vocab)).encode()))
            self._memory[text] = self._draw(rng)
        return self._memory[text]

    def _draw(self, rng: np.random.Generator) -> np.ndarray:
        if self.kind == "random":
            return rng.dirichlet(np.ones(self.vocab))
        if self.kind == "uniform":
            return np.full(self.vocab, 1 / self.vocab)
        if self.kind == "holes":  # some words impossible, often all but one
            weights = rng.integers(0, 3, self.vocab).astype(float)
            weights[rng.integers(self.vocab)] += 1
            return weights / weights.sum()
        raise AssertionError(self.kind)

    def prob(self, text: Text, start: Text = ()) -> float:
        out = 1.0
        for i, x in enumerate(text):
            out *= float(self.after(start + text[:i])[x])
        return out


KINDS = ["random", "uniform", "holes"]


# --- Exact integration ---


def _pieces(cuts: set[float]) -> list[tuple[float, float]]:
    """(a coin, the size of its piece) for each piece of the unit interval."""
    edges = sorted({0.0, 1.0, *(x for x in cuts if 0 < x < 1)})
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(edges)]


def _coin_cells(
    shape: Shape, rows: list[np.ndarray], max_depth: int
) -> Iterator[tuple[list[float], float]]:
    """(max_depth coins and the final one, the volume of their cell): all cells of one tree."""
    cuts: list[set[float]] = [set() for _ in range(max_depth + 1)]
    for node in range(len(shape.parent)):
        children = [shape.tokens[c] for c in shape.children(node)]
        if children:
            cuts[len(shape.line(node)) - 1] |= set(np.cumsum(rows[node][children]).tolist())
        rest = rows[node].copy()
        rest[children] = 0
        if rest.sum() > 0:
            cuts[-1] |= set((np.cumsum(rest) / rest.sum()).tolist())
    for cell in itertools.product(*(_pieces(c) for c in cuts)):
        yield [coin for coin, _ in cell], float(np.prod([size for _, size in cell]))


def _laws(
    shapes: list[Shape], target: Target, sampler: Sampler, starts: list[Text] | None = None
) -> list[Law]:
    """What each tree's walk emits (accepted tokens, then the next token), with probabilities."""
    starts = starts or [()] * len(shapes)
    max_depth = len(shapes[0].parent) - 1
    rows = [
        [target.after(start + shape.text(i)) for i in range(max_depth + 1)]
        for shape, start in zip(shapes, starts, strict=True)
    ]
    cells = [
        (s, coins, volume)
        for s, shape in enumerate(shapes)
        for coins, volume in _coin_cells(shape, rows[s], max_depth)
    ]
    which = torch.tensor([s for s, _, _ in cells])
    coins = torch.tensor([c for _, c, _ in cells], dtype=torch.float64)
    fields = [x[which] for x in _tensors(shapes)]
    probs = torch.tensor(np.array(rows))[which]
    walk = sampler(*fields, probs, coins[:, :-1], coins[:, -1], max_depth)
    laws: list[Law] = [defaultdict(float) for _ in shapes]
    outcomes = zip(
        cells, walk.path.tolist(), walk.length.tolist(), walk.next_token.tolist(), strict=True
    )
    for (s, _, volume), path, length, next_token in outcomes:
        laws[s][(*(shapes[s].tokens[i] for i in path[1:length]), next_token)] += volume
    return laws


def _error(shapes: list[Shape], target: Target, sampler: Sampler) -> float:
    """How far the walks are from the target, at worst.

    Whoever emits a text that is a node of the tree goes on with at least one more token. So for
    each node and each word x, the output must begin with (text of the node, x) with the target's
    probability of just that; with the root as node this is the law of the first token.
    """
    worst = 0.0
    for shape, law in zip(shapes, _laws(shapes, target, sampler), strict=True):
        worst = max(worst, abs(sum(law.values()) - 1))
        begins: Law = defaultdict(float)
        for text, weight in law.items():
            for i in range(1, len(text) + 1):
                begins[text[:i]] += weight
        expected = {
            (*shape.text(i), x): target.prob((*shape.text(i), x))
            for i in range(len(shape.parent))
            for x in range(target.vocab)
        }
        worst = max(worst, *(abs(begins[text] - p) for text, p in expected.items()))
        stray = [text for text, weight in law.items() if weight > 0 and text not in expected]
        worst = max(worst, float(bool(stray)))
    return worst


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("vocab", "nodes"),
    [
        (2, 2),
        (2, 3),
        (2, 4),
        (2, 5),
        (2, 6),
        (3, 2),
        (3, 3),
        (3, 4),
        (3, 5),
        (3, 6),
        (4, 2),
        (4, 3),
        (4, 4),
        (4, 5),
        (5, 2),
        (5, 3),
        (5, 4),
        (6, 2),
        (6, 3),
        (6, 4),
    ],
)
def test_sampling_is_exact_for_every_small_tree(vocab: int, nodes: int, kind: str) -> None:
    target = Target(vocab, kind)
    trees = _all_trees(vocab, nodes)
    for i in range(0, len(trees), 60):
        assert _error(trees[i : i + 60], target, sampling_walk) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_all_words_as_children(kind: str) -> None:
    """Nothing is left for the final draw at the root."""
    shapes = [
        Shape((-1, *[0] * 5, 2), (0, *order, 3)) for order in ((0, 1, 2, 3, 4), (4, 2, 0, 1, 3))
    ]
    assert _error(shapes, Target(5, kind), sampling_walk) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_two_rounds_are_exact(kind: str) -> None:
    """The second tree may depend on what the first round emitted, not on its coins."""
    target, trees = Target(3, kind), _all_trees(3, 3)
    for t, first in enumerate(_all_trees(3, 4)):
        (law,) = _laws([first], target, sampling_walk)
        starts = list(law)
        seconds = [trees[zlib.crc32(repr((t, start)).encode()) % len(trees)] for start in starts]
        begins: Law = defaultdict(float)
        second_laws = _laws(seconds, target, sampling_walk, starts)
        for start, second in zip(starts, second_laws, strict=True):
            for text, weight in second.items():
                begins[(start + text)[:2]] += law[start] * weight
        for text in itertools.product(range(3), repeat=2):
            assert abs(begins[text] - target.prob(text)) < EXACT


# --- Injected faults: the machinery above must notice each ---


def _rewired(
    tokens: Tensor,
    parent: Tensor,
    mask: Tensor,
    depth: Tensor,
    probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    max_depth: int,
    *,
    edges: Callable[..., Tensor] | None = None,
    final: Callable[..., Tensor] | None = None,
) -> Walk:
    """sampling_walk with one of its two halves replaced."""
    accepted = (edges or accept.sampling_edges)(tokens, parent, depth, probs, coins)
    path, length, last = follow(accepted, mask, depth, max_depth)
    if final is None:
        return Walk(path, length, accept.final_draw(tokens, parent, last, probs, final_coins))
    return Walk(path, length, final(tokens, parent, last, probs, final_coins, coins, length))


def _coin_used_twice(*args):
    """The coin that rejected the children also draws the next token."""

    def final(tokens, parent, last, probs, final_coins, coins, length):
        used = torch.cat((coins, final_coins[:, None]), 1).gather(1, length[:, None] - 1)
        return accept.final_draw(tokens, parent, last, probs, used.squeeze(1))

    return _rewired(*args, final=final)


def _one_coin_for_all_depths(tokens, parent, mask, depth, probs, coins, final_coins, max_depth):
    coins = coins[:, :1].expand_as(coins)
    return sampling_walk(tokens, parent, mask, depth, probs, coins, final_coins, max_depth)


def _sibling_dropped(*args):
    """The last node is not taken out of the final draw although it had its chance."""

    def final(tokens, parent, last, probs, final_coins, coins, length):
        short = parent.clone()
        short[:, -1] = -1
        return accept.final_draw(tokens, short, last, probs, final_coins)

    return _rewired(*args, final=final)


def _nothing_removed(*args):
    def final(tokens, parent, last, probs, final_coins, coins, length):
        return accept.final_draw(tokens, torch.full_like(parent, -1), last, probs, final_coins)

    return _rewired(*args, final=final)


def _leaf_without_its_own_siblings(*args):
    """The children of the wrong node are removed: the last node's siblings."""

    def final(tokens, parent, last, probs, final_coins, coins, length):
        row = probs[torch.arange(len(last)), last].unsqueeze(1).expand_as(probs)
        above = parent.gather(1, last[:, None]).squeeze(1).clamp(min=0)
        return accept.final_draw(tokens, parent, above, row, final_coins)

    return _rewired(*args, final=final)


def _children_not_stacked(*args):
    """Each child compares the coin to its own probability, not to the sum so far."""

    def edges(tokens, parent, depth, probs, coins):
        batch = torch.arange(len(tokens)).unsqueeze(1)
        prob = probs[batch, parent.clamp(min=0), tokens]
        hit = coins.gather(1, (depth - 1).clamp(min=0)) < prob
        siblings = (parent.unsqueeze(2) == parent.unsqueeze(1)).tril(-1)
        return hit & ~(siblings & hit.unsqueeze(1)).any(2)

    return _rewired(*args, edges=edges)


def _coin_inverted_at_the_end(*args):
    """Not a fault: 1 - u is as uniform as u."""

    def final(tokens, parent, last, probs, final_coins, coins, length):
        return accept.final_draw(tokens, parent, last, probs, 1 - final_coins)

    return _rewired(*args, final=final)


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
    assert _error(_all_trees(4, 4), Target(4, kind), fault) > CAUGHT


def test_a_duplicated_sibling_is_caught() -> None:
    shape = Shape((-1, 0, 0), (0, 1, 1))
    assert _error([shape], Target(3, "random"), sampling_walk) > CAUGHT


def test_the_machinery_does_not_cry_wolf() -> None:
    """The harness used for the faults, without a fault."""
    target = Target(4, "random")
    assert _error(_all_trees(4, 3), target, _rewired) < EXACT
    # Cells are cut at u, not at 1 - u, so only trees with symmetric cuts integrate exactly.
    flat = [Shape((-1, 0), (0, x)) for x in range(3)]
    assert _error(flat, Target(3, "uniform"), _coin_inverted_at_the_end) < EXACT


# --- Coins on the edge, probabilities of zero ---


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
    tokens, parent, mask, depth = (x[which] for x in _tensors(shapes))
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

    return _rewired(*args, edges=edges)


def _unguarded_inverse(*args):
    """The first index whose cumulative probability is >= the coin, a zero at the front included."""

    def final(tokens, parent, last, probs, final_coins, coins, length):
        batch = torch.arange(len(last))
        child = parent == last.unsqueeze(1)
        gone = torch.where(child, -probs[batch, last].gather(1, tokens), 0)
        total = probs[batch, last].scatter_add(1, tokens, gone).cumsum(1)
        at = torch.searchsorted(total, final_coins.unsqueeze(1) * total[:, -1:])
        return at.squeeze(1).clamp(max=probs.shape[2] - 1)

    return _rewired(*args, final=final)


@pytest.mark.parametrize("fault", [_closed_intervals, _unguarded_inverse])
def test_edge_faults_are_caught(fault: Sampler) -> None:
    assert _zero_tokens(fault, torch.float64) > 0


def test_intervals_are_half_open() -> None:
    """Children of 1/4 and 1/2: [0, 1/4), [1/4, 3/4), and the rest."""
    shape = Shape((-1, 0, 0), (0, 2, 0))
    coins = torch.tensor([0.0, 0.25 - 2**-26, 0.25, 0.75 - 2**-24, 0.75, 1 - 2**-24])
    tokens, parent, mask, depth = _tensors([shape] * len(coins))
    probs = torch.tensor([0.5, 0.25, 0.25]).expand(len(coins), 3, 3)
    walk = sampling_walk(tokens, parent, mask, depth, probs, coins[:, None], coins, 1)
    assert walk.path.tolist() == [[0, 1], [0, 1], [0, 2], [0, 2], [0, -1], [0, -1]]
    assert walk.length.tolist() == [2, 2, 2, 2, 1, 1]
    assert walk.next_token[4:].tolist() == [1, 1]


def test_final_coin_is_half_open_too() -> None:
    coins = torch.tensor([0.0, 0.25, 0.5, 1 - 2**-24, 1.0])
    tokens, parent, _, _ = _tensors([Shape((-1,), (0,))] * len(coins))
    probs = torch.tensor([0.0, 0.25, 0.0, 0.25, 0.5, 0.0]).expand(len(coins), 1, 6)
    last = torch.zeros(len(coins), dtype=torch.int64)
    assert accept.final_draw(tokens, parent, last, probs, coins).tolist() == [1, 3, 4, 4, 4]


def test_no_mass_left_falls_back_to_the_most_probable_token() -> None:
    """The children's float32 probabilities sum to just below 1 and the coin lies above them."""
    almost = [0.33333328, 0.33333334, 0.33333328, 0.0]
    tokens, parent, mask, depth = _tensors([Shape((-1, 0, 0, 0), (0, 0, 1, 2))])
    probs = torch.tensor(almost).expand(1, 4, 4)
    coin = torch.tensor([[1 - 2**-24]])
    assert float(coin) > sum(probs[0, 0].tolist())
    for final in (0.0, 0.5, 1 - 2**-24):
        walk = sampling_walk(tokens, parent, mask, depth, probs, coin, torch.tensor([final]), 1)
        assert (walk.length.tolist(), walk.next_token.tolist()) == ([1], [1])


def test_nan_rows_stay_where_they_are() -> None:
    """A NaN distribution at one node neither crashes nor changes a walk that avoids the node."""
    shapes = [Shape((-1, 0, 0, 1, 2), (0, 0, 1, 1, 1))] * 2
    tokens, parent, mask, depth = _tensors(shapes)
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
    tokens, parent, _, _ = _tensors([Shape((-1,), (0,))] * len(coins))
    last = torch.zeros(len(coins), dtype=torch.int64)
    drawn = accept.final_draw(tokens, parent, last, probs.expand(len(coins), 1, -1), coins)
    total = np.cumsum(probs.double().numpy())
    want = np.searchsorted(total, coins.numpy() * total[-1], side="right")
    assert drawn.tolist() == want.tolist()


def test_the_children_are_summed_in_float64() -> None:
    """In float32, 1/2 and a little more is 1/2, and a coin of 1/2 would miss the little."""
    tokens, parent, mask, depth = _tensors([Shape((-1, 0, 0), (0, 0, 1))])
    probs = torch.tensor([0.5, 2**-26, 0.5]).expand(1, 3, 3)
    coin = torch.tensor([[0.5]])
    walk = sampling_walk(tokens, parent, mask, depth, probs, coin, coin[0], 1)
    assert walk.path.tolist() == [[0, 2]]


# --- Greedy and mixed ---


@st.composite
def _batches(draw: st.DrawFn) -> tuple[list[Shape], Tensor, int]:
    """Trees of one size with distinct siblings, the target's choices, and the vocabulary."""
    vocab, nodes = draw(st.integers(2, 5)), draw(st.integers(2, 14))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    shapes = []
    for _ in range(draw(st.integers(1, 4))):
        parent, tokens = [-1], [int(rng.integers(vocab))]
        while len(parent) < nodes:
            p, x = int(rng.integers(len(parent))), int(rng.integers(vocab))
            if (p, x) not in zip(parent, tokens, strict=True):
                parent.append(p)
                tokens.append(x)
        shapes.append(Shape(tuple(parent), tuple(tokens)))
    return shapes, torch.tensor(rng.integers(0, vocab, (len(shapes), nodes))), vocab


def _pointer_walk(shape: Shape, target_next: list[int]) -> list[int]:
    """As SGLang walks: down to the first child, along the siblings until one matches."""
    first = [next(iter(shape.children(i)), -1) for i in range(len(shape.parent))]
    path = [0]
    while True:
        child = first[path[-1]]
        while child >= 0 and shape.tokens[child] != target_next[path[-1]]:
            later = [c for c in shape.children(path[-1]) if c > child]
            child = later[0] if later else -1
        if child < 0:
            return path
        path.append(child)


def _check_walk(walk: Walk, paths: list[list[int]], max_depth: int) -> None:
    assert walk.path.dtype == walk.length.dtype == walk.next_token.dtype == torch.int64
    assert walk.path.tolist() == [p + [-1] * (max_depth + 1 - len(p)) for p in paths]
    assert walk.length.tolist() == [len(p) for p in paths]


@settings(max_examples=400, deadline=None)
@given(_batches(), st.integers(0, 3))
def test_greedy_is_the_pointer_walk(batch: tuple[list[Shape], Tensor, int], spare: int) -> None:
    shapes, target_next, _ = batch
    tokens, parent, mask, depth = _tensors(shapes)
    max_depth = int(depth.max()) + spare
    walk = greedy_walk(tokens, parent, mask, depth, target_next, max_depth)
    paths = [_pointer_walk(s, t) for s, t in zip(shapes, target_next.tolist(), strict=True)]
    _check_walk(walk, paths, max_depth)
    want = [int(target_next[b, path[-1]]) for b, path in enumerate(paths)]
    assert walk.next_token.tolist() == want


def test_greedy_extremes() -> None:
    """Everything accepted, and nothing."""
    tokens, parent, mask, depth = _tensors([Shape((-1, 0, 1, 2), (9, 1, 2, 3))] * 2)
    target_next = torch.tensor([[1, 2, 3, 4], [5, 2, 3, 4]])
    walk = greedy_walk(tokens, parent, mask, depth, target_next, 3)
    assert walk.path.tolist() == [[0, 1, 2, 3], [0, -1, -1, -1]]
    assert walk.next_token.tolist() == [4, 5]


@settings(max_examples=300, deadline=None)
@given(_batches(), st.integers(0, 10**6))
def test_mixed_is_each_kind_alone(batch: tuple[list[Shape], Tensor, int], seed: int) -> None:
    shapes, target_next, vocab = batch
    fields = _tensors(shapes)
    max_depth = int(fields[3].max())
    rng = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randn(*target_next.shape, vocab, generator=rng) * 2, -1)
    coins = torch.rand(len(shapes), max_depth, generator=rng)
    final = torch.rand(len(shapes), generator=rng)
    is_greedy = torch.rand(len(shapes), generator=rng) < 0.5
    greedy = greedy_walk(*fields, target_next, max_depth)
    before = probs.clone()
    sampled = sampling_walk(*fields, probs, coins, final, max_depth)
    assert torch.equal(probs, before)
    probs[is_greedy], coins[is_greedy], final[is_greedy] = torch.nan, torch.nan, torch.nan
    walk = mixed_walk(
        *fields, target_next, probs, coins, final, is_greedy=is_greedy, max_depth=max_depth
    )
    for b in range(len(shapes)):
        want = greedy if is_greedy[b] else sampled
        for got, alone in zip(walk, want, strict=True):
            assert torch.equal(got[b], alone[b])


@settings(max_examples=100, deadline=None)
@given(_batches(), st.integers(0, 10**6))
def test_one_hot_sampling_is_greedy(batch: tuple[list[Shape], Tensor, int], seed: int) -> None:
    """Temperature towards 0: the coins no longer matter."""
    shapes, target_next, vocab = batch
    fields = _tensors(shapes)
    max_depth = int(fields[3].max())
    rng = torch.Generator().manual_seed(seed)
    probs = torch.nn.functional.one_hot(target_next, vocab).float()
    coins = torch.rand(len(shapes), max_depth, generator=rng)
    final = torch.rand(len(shapes), generator=rng)
    walk = sampling_walk(*fields, probs, coins, final, max_depth)
    for got, want in zip(walk, greedy_walk(*fields, target_next, max_depth), strict=True):
        assert torch.equal(got, want)
