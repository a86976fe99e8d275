"""The greedy walk against a pointer walk, and batches of greedy and sampled requests."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integration import Shape, tensors
from torch import Tensor

from dflash2_sglang.tree.accept import Walk, greedy_walk, mixed_walk, sampling_walk

torch.set_num_threads(1)


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
    tokens, parent, mask, depth = tensors(shapes)
    max_depth = int(depth.max()) + spare
    walk = greedy_walk(tokens, parent, mask, depth, target_next, max_depth)
    paths = [_pointer_walk(s, t) for s, t in zip(shapes, target_next.tolist(), strict=True)]
    _check_walk(walk, paths, max_depth)
    want = [int(target_next[b, path[-1]]) for b, path in enumerate(paths)]
    assert walk.next_token.tolist() == want


def test_greedy_extremes() -> None:
    """Everything accepted, and nothing."""
    tokens, parent, mask, depth = tensors([Shape((-1, 0, 1, 2), (9, 1, 2, 3))] * 2)
    target_next = torch.tensor([[1, 2, 3, 4], [5, 2, 3, 4]])
    walk = greedy_walk(tokens, parent, mask, depth, target_next, 3)
    assert walk.path.tolist() == [[0, 1, 2, 3], [0, -1, -1, -1]]
    assert walk.next_token.tolist() == [4, 5]


@settings(max_examples=300, deadline=None)
@given(_batches(), st.integers(0, 10**6))
def test_mixed_is_each_kind_alone(batch: tuple[list[Shape], Tensor, int], seed: int) -> None:
    shapes, target_next, vocab = batch
    fields = tensors(shapes)
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
    fields = tensors(shapes)
    max_depth = int(fields[3].max())
    rng = torch.Generator().manual_seed(seed)
    probs = torch.nn.functional.one_hot(target_next, vocab).float()
    coins = torch.rand(len(shapes), max_depth, generator=rng)
    final = torch.rand(len(shapes), generator=rng)
    walk = sampling_walk(*fields, probs, coins, final, max_depth)
    for got, want in zip(walk, greedy_walk(*fields, target_next, max_depth), strict=True):
        assert torch.equal(got, want)
