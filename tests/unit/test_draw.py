"""Random children of a tree: where they may be, what they depend on, and what they leave alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash2_sglang.tree.build import Tree, build_tree, capacity
from dflash2_sglang.tree.draw import Draws, draw
from dflash2_sglang.tree.filters import filter_ranked, filtered_probs
from dflash2_sglang.tree.lattice import Lattice

torch.set_num_threads(1)

VOCAB = 100
KINDS = ["random", "sharp", "ties", "holes", "hopeless"]


class Case:
    """A batch of lattices, the size of its trees, and coins."""

    def __init__(self, seed: int, sizes: tuple[int, int, int, int, int], kind: str) -> None:
        batch, depth, width, self.nodes, self.children = sizes
        rng = np.random.default_rng(seed)
        ids = [[rng.permutation(VOCAB)[:width] for _ in range(depth)] for _ in range(batch)]
        shape = (batch, depth, width, width)
        values = torch.tensor(rng.normal(size=shape)).float() * (9 if kind == "sharp" else 2)
        if kind in ("ties", "holes"):
            values = torch.zeros(shape)
        if kind == "holes":
            values[torch.tensor(rng.random(shape) < 0.6)] = -torch.inf
        values = values.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        if kind == "hopeless":
            values = torch.full(shape, -torch.inf)
        values[:, 0] = values[:, 0, :1]
        self.lattice = Lattice(torch.tensor(np.array(ids)), values)
        self.coins = torch.tensor(rng.random((batch, depth, self.nodes - 1))).float()
        self.none_fixed = torch.zeros(batch, dtype=torch.bool)

    def tree(
        self, coins: Tensor | None = None, fixed: Tensor | None = None, **filters: Tensor
    ) -> Tree:
        draws = Draws(
            self.coins if coins is None else coins,
            self.none_fixed if fixed is None else fixed,
            **filters,
        )
        anchor = torch.full((len(self.coins),), 777)
        return build_tree(self.lattice, anchor, self.nodes, self.children, draws)

    def fixed_tree(self) -> Tree:
        anchor = torch.full((len(self.coins),), 777)
        return build_tree(self.lattice, anchor, self.nodes, self.children)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    depth, width = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    children = draw(st.integers(1, width))
    nodes = draw(st.integers(2, min(24, capacity(depth, children))))
    sizes = (draw(st.integers(1, 3)), depth, width, nodes, children)
    return Case(draw(st.integers(0, 10**6)), sizes, draw(st.sampled_from(KINDS)))


def same(one: Tree, two: Tree) -> bool:
    pairs = zip((*one[:-1], *one.proposal), (*two[:-1], *two.proposal), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_what_holds_for_every_tree(case: Case) -> None:
    tree = case.tree()
    random, words, probs = tree.proposal
    assert bool((tree.log_prob[:, 1:] <= tree.log_prob.gather(1, tree.parent[:, 1:])).all())
    for b in range(len(random)):
        parent = tree.parent[b].tolist()
        for v in range(case.nodes):
            children = [i for i, p in enumerate(parent) if p == v]
            tokens = [int(tree.tokens[b, i]) for i in children]
            drawn = [int(tree.tokens[b, i]) for i in children if random[b, i]]
            law = dict(zip(words[b, v].tolist(), probs[b, v].tolist(), strict=True))
            assert len(set(tokens)) == len(tokens) <= case.children
            assert len(drawn) <= 1
            assert sum(law.values()) == pytest.approx(len(drawn), abs=1e-5)
            assert all(law[token] > 0 for token in drawn)
            # Fixed children before the random one are not drawn from.
            first = [int(tree.tokens[b, i]) for i in children if drawn and not random[b, i]]
            at = tokens.index(drawn[0]) if drawn else 0
            assert all(law[token] == 0 or tokens.index(token) > at for token in first)


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_a_draw_changes_only_what_comes_after_it(case: Case, data: st.DataObject) -> None:
    """Whether a random child is in the tree, and all nodes before it, do not depend on its coin."""
    tree = case.tree()
    level = data.draw(st.integers(0, case.coins.shape[1] - 1))
    slot = data.draw(st.integers(0, case.coins.shape[2] - 1))
    coins = case.coins.clone()
    coins[:, level, slot] = data.draw(st.floats(0, 1, exclude_max=True, width=32))
    other = case.tree(coins)
    for b in range(len(coins)):
        differs = tree.tokens[b] != other.tokens[b]
        differs |= tree.parent[b] != other.parent[b]
        differs |= tree.proposal.random[b] != other.proposal.random[b]
        if bool(differs.any()):
            first = int(differs.int().argmax())
            assert tree.proposal.random[b, first] and other.proposal.random[b, first]
            assert tree.parent[b, first] == other.parent[b, first]
            v = int(tree.parent[b, first])
            assert torch.equal(tree.proposal.probs[b, v], other.proposal.probs[b, v])


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 7))
def test_greedy_requests_get_the_fixed_tree(case: Case, pattern: int) -> None:
    """Beside sampled ones, to the last bit; filters do not reach them."""
    fixed = torch.tensor([bool(pattern >> b & 1) for b in range(len(case.coins))])
    size = len(fixed)
    filters = {"top_k": torch.where(fixed, 1, 3), "top_p": torch.full((size,), 0.8)}
    tree, want = case.tree(fixed=fixed, **filters), case.fixed_tree()
    for x, y in zip(tree[:-1], want[:-1], strict=True):
        assert torch.equal(x[fixed], y[fixed])
    assert not bool(tree.proposal.random[fixed].any())
    assert not bool(tree.proposal.probs[fixed].any())


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_request_does_not_depend_on_its_neighbours(case: Case) -> None:
    tree = case.tree()
    assert same(tree, case.tree())
    whole = case.lattice, case.coins, case.none_fixed
    for b in range(len(case.coins)):
        case.lattice = Lattice(*(x[b : b + 1] for x in whole[0]))
        case.coins, case.none_fixed = whole[1][b : b + 1], whole[2][b : b + 1]
        one = case.tree()
        proposal = type(tree.proposal)(*(x[b : b + 1] for x in tree.proposal))
        assert same(Tree(*(x[b : b + 1] for x in tree[:-1]), proposal), one)
        case.lattice, case.coins, case.none_fixed = whole


def test_one_child_per_node_is_a_sampled_chain() -> None:
    case = Case(4, (3, 5, 6, 6, 1), "random")
    tree = case.tree()
    assert tree.parent.tolist() == [list(range(-1, 5))] * 3
    assert bool(tree.proposal.random[:, 1:].all())
    for b in range(3):
        row = 0
        for t in range(5):
            law = case.lattice.log_probs[b, t, row].softmax(-1)
            got = dict(zip(*(x[b, t].tolist() for x in tree.proposal[1:]), strict=True))
            for token, p in zip(case.lattice.tokens[b, t].tolist(), law.tolist(), strict=True):
                assert got[token] == pytest.approx(p, abs=1e-6)
            row = case.lattice.tokens[b, t].tolist().index(int(tree.tokens[b, t + 1]))


def test_cold_requests_get_the_fixed_tree() -> None:
    """Where one candidate holds everything, the random child is last, or that candidate."""
    case = Case(5, (2, 4, 6, 5, 3), "random")
    cold = (case.lattice.log_probs * 300).log_softmax(-1)
    case.lattice = Lattice(case.lattice.tokens, cold)
    assert torch.equal(case.tree().tokens, case.fixed_tree().tokens)


def test_draw_is_the_inverse_of_the_cumulative() -> None:
    law = torch.tensor([0.0, 0.25, 0.5, 0.0, 0.25, 0.0])
    coins = torch.tensor([0.0, 0.25 - 2**-26, 0.25, 0.75 - 2**-24, 0.75, 1 - 2**-24, 1.0])
    assert draw(law.expand(7, 6), coins).tolist() == [1, 1, 2, 2, 4, 4, 4]


def test_filtered_rows_are_the_filters_of_the_target() -> None:
    """With all the vocabulary as candidates, the drafter's filters are the sampler's."""
    logits = torch.randn(3, 5, 9, generator=torch.Generator().manual_seed(0)) * 2
    ranked = logits.log_softmax(-1).sort(-1, descending=True).values
    limits = (torch.tensor([3, 99, 4]), torch.tensor([1.0, 0.6, 0.8]), torch.tensor([0, 0, 0.2]))
    found = filter_ranked(ranked, *limits).exp()
    top_k, top_p, min_p = limits
    want = filtered_probs(ranked, temperature=torch.ones(3), top_k=top_k, top_p=top_p, min_p=min_p)
    assert torch.allclose(found, want, atol=1e-6)


def test_a_partly_seen_row_keeps_its_share_of_top_p() -> None:
    row = torch.tensor([[[0.4, 0.2]]]).log()
    assert torch.allclose(
        filter_ranked(row, None, torch.tensor([0.8]), None).exp(), torch.tensor([0.5, 0.25])
    )
    assert torch.allclose(
        filter_ranked(row, None, torch.tensor([0.3]), None).exp(), torch.tensor([1.0, 0.0])
    )


@settings(max_examples=200, deadline=None)
@given(cases(), st.booleans())
def test_filters_that_keep_everything_change_no_bit(case: Case, together: bool) -> None:
    """As SGLang has them for requests that set none, beside a request that set some or alone."""
    rows = case.lattice.log_probs.flatten(1, 2).sort(-1, descending=True).values
    rows = (rows + 1e-7).clamp(max=0)  # sums above 1
    rows[:, 1::2, -1] -= 200  # nothing is left of it in float32
    size = len(rows)
    top_k, top_p, min_p = torch.full((size,), 1 << 30), torch.ones(size), torch.zeros(size)
    if together:
        top_k[0], top_p[0], min_p[0] = 2, 0.5, 0.1
    sharp = torch.full((size,), 3.0)
    for power in (None, sharp, sharp * 50):
        for limits in ((top_k, top_p, min_p), (top_k, None, None), (None, top_p, None)):
            found = filter_ranked(rows, *limits, power)
            assert torch.equal(found[together:], rows[together:])
            assert not bool(found.isnan().any())


def test_cold_rows_keep_their_best_candidate() -> None:
    """At temperature 0.01 all powers of a flat row vanish in float32."""
    row, power = torch.tensor([[[0.3, 0.29, 0.1]]]).log(), torch.tensor([100.0])
    best = [[[0.0, -torch.inf, -torch.inf]]]
    assert filter_ranked(row, None, None, torch.tensor([0.9]), power).tolist() == best
    sure = torch.tensor([[[0.6, 0.29, 0.1]]]).log()
    assert filter_ranked(sure, None, torch.tensor([0.9]), None, power).tolist() == best


def test_filters_keep_impossible_candidates_out() -> None:
    case = Case(6, (2, 4, 6, 9, 3), "random")
    tree = case.tree(top_k=torch.tensor([2, 2]))
    assert bool((tree.log_prob > -torch.inf).all())
    for b in range(2):
        assert int((tree.parent[b] == 0).sum()) <= 2
