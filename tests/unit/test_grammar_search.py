"""The search under a grammar: masks read bit by bit, and trees against plain search."""

from __future__ import annotations

import functools
import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2_sglang.grammar.legal import Legal
from dflash2_sglang.grammar.search import LEAST, Block, Growth, grow
from dflash2_sglang.tree.build import capacity

torch.set_num_threads(1)
Path_ = tuple[int, ...]
WORDS = 70


def packed(allowed: set[int], width: int, noise: int = 0) -> np.ndarray:
    """A row of an int32 mask, whose bits from ``width`` on are ``noise``."""
    bits = np.full(-(-width // 32) * 32, noise, np.uint8)
    bits[:width] = 0
    bits[sorted(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


# --- One row of a mask ---


@given(st.integers(1, 100), st.data())
def test_both_kinds_of_mask_tell_the_same(width: int, data: st.DataObject) -> None:
    allowed = data.draw(st.sets(st.integers(0, width - 1)))
    forbidden = np.array([token not in allowed for token in range(width)])
    tokens = np.array([*range(width), -1, width, width + 31, 100_000])
    for noise in (0, 1):
        for row in (packed(allowed, width, noise), forbidden):
            legal = Legal(row, width)
            assert legal.count == len(allowed)
            assert legal.list() == sorted(allowed)
            assert [int(t) for t in tokens[legal.allows(tokens)]] == sorted(allowed)


def test_a_mask_wider_or_narrower_than_the_vocabulary() -> None:
    row = packed({0, 31, 32, 63}, 64)
    assert Legal(row, 33).list() == [0, 31, 32]
    assert Legal(row, 33).count == 3
    assert Legal(row, 1000).list() == [0, 31, 32, 63]
    assert not Legal(row, 1000).allows(np.array([64, 999])).any()


# --- The search, under grammars that are drawn by lot ---


class Lots:
    """A grammar without sense: what is allowed after a path is a matter of its hash."""

    def __init__(self, seed: int, tokens: np.ndarray, freedom: float) -> None:
        self.seed, self.tokens, self.freedom = seed, tokens, freedom
        self.entered: list[tuple[Path_, int]] = []

    @functools.cache  # noqa: B019
    def allowed(self, path: Path_) -> frozenset[int] | None:
        dice = random.Random(f"{self.seed} {path}")
        if path and dice.random() < 0.1:
            return None
        if dice.random() < 0.3:
            few = dice.sample(range(WORDS), dice.randint(1, 3))  # mostly not in the lattice
            return frozenset(few)
        return frozenset(t for t in range(WORDS) if dice.random() < self.freedom)

    def enter(self, path: Path_, node: int) -> Legal | None:
        self.entered.append((path, node))
        allowed = self.allowed(path)
        return None if allowed is None else Legal(packed(set(allowed), WORDS, 1), WORDS)


class Case(SimpleNamespace):
    block: Block
    grammar: Lots
    nodes: int
    children: int
    stops: frozenset[int]


@st.composite
def cases(draw: Any) -> Case:
    depth, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    children = draw(st.integers(1, width))
    nodes = draw(st.integers(2, min(capacity(depth, children), 24)))
    dice = np.random.default_rng(draw(st.integers(0, 2**20)))
    tokens = np.stack([dice.permutation(WORDS)[:width] for _ in range(depth)])
    share = dice.dirichlet(np.full(width, 0.5), (depth, width)) * dice.uniform(
        0.2, 1, (depth, 1, 1)
    )
    share[0] = share[0, 0]
    if draw(st.booleans()):
        share[dice.random(share.shape) < 0.2] = 0
    freedom = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    return Case(
        block=Block(tokens.astype(np.int64), share),
        grammar=Lots(draw(st.integers(0, 2**20)), tokens, freedom),
        nodes=nodes,
        children=children,
        stops=frozenset(dice.permutation(WORDS)[: draw(st.sampled_from([0, 5]))].tolist()),
    )


def run(case: Case) -> Growth:
    return grow(case.block, case.grammar.enter, case.stops, case.nodes, case.children)


def real(growth: Growth) -> list[int]:
    return [i for i, node in enumerate(growth.nodes) if node.log_prob > -math.inf]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_the_tree_is_a_tree_of_exactly_so_many_nodes(case: Case) -> None:
    growth = run(case)
    assert len(growth.nodes) == len(growth.legal) == case.nodes
    assert growth.nodes[0].parent == -1 and growth.nodes[0].path == ()
    children: dict[int, list[int]] = {}
    for index, node in enumerate(growth.nodes[1:], 1):
        assert 0 <= node.parent < index
        assert node.path[:-1] == growth.nodes[node.parent].path
        assert len(node.path) <= case.block.tokens.shape[0]
        assert 0 <= node.path[-1] < WORDS
        children.setdefault(node.parent, []).append(node.path[-1])
    for siblings in children.values():
        assert len(siblings) == len(set(siblings)) <= case.children


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_node_is_allowed_or_can_never_be_accepted(case: Case) -> None:
    growth, allowed = run(case), case.grammar.allowed
    kept = real(growth)
    assert kept == list(range(len(kept)))  # padding comes last
    assert case.grammar.entered == [(growth.nodes[i].path, i) for i in kept]  # one mask each
    for index, node in enumerate(growth.nodes[1:], 1):
        before = allowed(node.path[:-1])
        if index in kept:
            assert before is not None and node.path[-1] in before
        elif node.parent in kept:
            # Forbidden, or after the grammar's end, where all is dropped.
            assert before is None or node.path[-1] not in before


def children_of(case: Case, path: Path_, candidate: int) -> list[tuple[float, int, int]]:
    """Slow and plain: (share, token, candidate) of what may follow a path, best first."""
    depth, allowed = len(path), case.grammar.allowed(path)
    if allowed is None or depth == len(case.block.tokens):
        return []
    tokens = case.block.tokens[depth].tolist()
    probs = case.block.probs[depth]
    row = (probs[candidate] if candidate >= 0 else probs.mean(0)).tolist()
    rest = max(1 - sum(row), LEAST) / (WORDS - len(tokens))
    weight = {t: max(row[tokens.index(t)], LEAST**2) if t in tokens else rest for t in allowed}
    few = len(allowed) <= case.children
    found = [
        (weight[t] / sum(weight.values()), t, tokens.index(t) if t in tokens else -1)
        for t in allowed
        if few or t in tokens
    ]
    return sorted(found, key=lambda entry: (-entry[0], entry[2]))[: case.children]


def everything(case: Case, path: Path_ = (), candidate: int = 0) -> list[float]:
    """Log-probability of every path below one, paths after a stop token left out."""
    out = []
    for share, token, place in children_of(case, path, candidate):
        start = math.log(share)
        out.append(start)
        if token not in case.stops:
            out += [start + below for below in everything(case, (*path, token), place)]
    return out


@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_best_survive(case: Case) -> None:
    growth = run(case)
    found = sorted((growth.nodes[i].log_prob for i in real(growth)[1:]), reverse=True)
    before_stops = [log for log in found if log > -5000]
    want = sorted(everything(case), reverse=True)[: case.nodes - 1]
    assert len(before_stops) == len(want)
    np.testing.assert_allclose(before_stops, want, atol=1e-6)
    logs = [growth.nodes[i].log_prob for i in real(growth)]
    assert logs == sorted(logs, reverse=True)


def test_a_token_without_alternative_is_certain() -> None:
    """Also one that the drafter never thought of; what follows it is then judged by the average."""
    forced: dict[Path_, set[int]] = {(): {60}, (60,): {1, 2}, (60, 1): {61}}
    tokens = np.array([[0, 1], [1, 2], [3, 4]])
    probs = np.array([[[0.6, 0.3]] * 2, [[0.2, 0.1], [0.6, 0.3]], [[0.5, 0.5]] * 2])

    def enter(path: Path_, node: int) -> Legal | None:
        return Legal(packed(forced.get(path, {65}), WORDS), WORDS)

    growth = grow(Block(tokens, probs), enter, frozenset(), 4, 2)
    paths = [node.path for node in growth.nodes]
    assert paths == [(), (60,), (60, 1), (60, 1, 61)]
    logs = [node.log_prob for node in growth.nodes]
    np.testing.assert_allclose(np.exp(logs), [1, 1, 2 / 3, 2 / 3], atol=1e-6)
