"""Trees with random children: torch against the kernel, where rounding cannot tell them apart.

Both sum in an order of their own, so a coin at the edge between two candidates, or two paths that
differ in their last bits, may fall to either side. Whether a request's tree hangs on that is decided by
torch alone: its tree must not change in float64, nor when coins, weights and limits are moved a little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from kernel_cases import Maker, Sizes
from torch import Tensor

from dflash2_sglang import kernels, tree
from dflash2_sglang.tree import draw
from dflash2_sglang.tree.draw import Draws
from dflash2_sglang.tree.lattice import Lattice

MOVED = 1e-5
FILTERS = ("top_k", "top_p", "min_p")


class DrawnCase(NamedTuple):
    lattice: Lattice
    anchor: Tensor
    nodes: int
    children: int
    draws: Draws

    def ours(self) -> tree.Tree:
        return kernels.build_tree(*self)

    def torch(self) -> tree.Tree:
        return tree.build_tree(*self)


def drawn_case(
    m: Maker, s: Sizes, kind: str, *, heat: bool = False, filters: Sequence[str] = ()
) -> DrawnCase:
    draws = m.draws(s, heat=heat, filters=filters)
    anchor = m.integers(0, 999, s.batch)
    lattice = m.lattice(s, kind)
    if kind == "random":  # the candidates hold a part of the vocabulary's mass
        held = 0.3 + 0.7 * m.uniform(s.batch, s.depth, 1, 1)
        lattice = lattice._replace(log_probs=lattice.log_probs + held.log())
    return DrawnCase(lattice, anchor, s.nodes, s.children, draws)


def stable(case: DrawnCase, exact: bool = False) -> Tensor:
    """[B] bool: the requests whose trees do not hang on rounding. exact: weights are not rounded."""
    want = integers(case.torch())
    steady = torch.ones_like(case.draws.fixed)
    for moved in _other_coins(case) if exact else _all_moved(case):
        for x, y in zip(integers(moved), want, strict=True):
            steady &= (x == y).flatten(1).all(1)
    return steady


def compare(case: DrawnCase, exact: bool = False) -> tuple[int, int]:
    """Fails where they differ; how many requests were compared, and how many set aside."""
    ours, want = case.ours(), case.torch()
    for x, y in zip(parts(ours), parts(want), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
    # A greedy request draws nothing and sums in the same order: always, and to the bit.
    greedy = case.draws.fixed
    rows = greedy | stable(case, exact)
    for x, y in zip(integers(ours), integers(want), strict=True):
        assert torch.equal(x[rows], y[rows])
    assert torch.equal(ours.log_prob[greedy], want.log_prob[greedy])
    torch.testing.assert_close(ours.log_prob[rows], want.log_prob[rows], rtol=2e-5, atol=2e-5)
    laws = (ours.proposal.probs[rows], want.proposal.probs[rows])
    torch.testing.assert_close(*laws, rtol=1e-4, atol=1e-5)
    return int(rows.sum()), int((~rows).sum())


def parts(found: tree.Tree) -> tuple[Tensor, ...]:
    assert found.proposal is not None
    return *found[:-1], *found.proposal


def integers(found: tree.Tree) -> tuple[Tensor, ...]:
    return tuple(x for x in parts(found) if not x.is_floating_point())


def _other_coins(case: DrawnCase) -> Iterator[tree.Tree]:
    for step in (MOVED, -MOVED):
        coins = (case.draws.coins + step).clamp(0, 1 - 2**-24)
        yield case._replace(draws=case.draws._replace(coins=coins)).torch()


def _all_moved(case: DrawnCase) -> Iterator[tree.Tree]:
    log_probs, draws = case.lattice.log_probs, case.draws
    wide = (None if x is None else x.double() for x in draws[2:])
    wide = Draws(draws.coins.double(), draws.fixed, *wide)
    lattice = Lattice(case.lattice.tokens, log_probs.double())
    yield case._replace(lattice=lattice, draws=wide).torch()
    filtered = any(x is not None for x in draws[2:5])
    for sign in (1, -1):
        grow = 1 + sign * MOVED
        moved = draws._replace(
            top_p=None if draws.top_p is None else (draws.top_p * grow).where(draws.top_p < 1, 1),
            min_p=None if draws.min_p is None else draws.min_p * grow,
        )
        # Only filters move the steps to fixed children; without, their ties are exact.
        lattice = Lattice(case.lattice.tokens, log_probs * (1 + sign * 1e-6 * filtered))
        with _weights_times(grow):
            yield from _other_coins(case._replace(lattice=lattice, draws=moved))


@contextmanager
def _weights_times(factor: float) -> Iterator[None]:
    names = ("FIXED_REACH", "RANDOM_WEIGHT", "SPARE_WEIGHT")
    before = [getattr(draw, name) for name in names]
    try:
        for name, value in zip(names, before, strict=True):
            setattr(draw, name, value * factor)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(draw, name, value)
