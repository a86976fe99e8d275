"""Inputs for every kernel, and its comparison with the torch function. Torch and the package only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash2_sglang import kernels, tree
from dflash2_sglang.tree.build import assemble
from dflash2_sglang.tree.draw import Draws, Proposal
from dflash2_sglang.tree.lattice import Lattice

KINDS = ["random", "ties", "holes", "constant", "hopeless", "broken"]


class Sizes(NamedTuple):
    """B, D, K, N; most children; rank, words, channels, group, taps, block."""

    batch: int
    depth: int
    width: int
    nodes: int
    children: int
    rank: int = 24
    vocab: int = 300
    channels: int = 48
    group: int = 8
    taps: int = 2
    block: int = 8


class Pair(NamedTuple):
    """The same call of the package, which may launch a kernel, and of torch."""

    ours: Callable[[], Any]
    torch: Callable[[], Any]


class Maker:
    """Draws inputs on the CPU, so that they are the same for every device, and moves them."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def tokens(self, s: Sizes) -> Tensor:
        """[B, D, K], distinct within a position."""
        if s.vocab > 4096:  # evenly spread, from a random start
            start = self.integers(0, s.vocab, s.batch, s.depth, 1)
            spread = torch.arange(s.width, device=self.device) * (s.vocab // s.width)
            return (start + spread) % s.vocab
        chance = torch.rand(s.batch, s.depth, s.vocab, generator=self.generator)
        return chance.topk(s.width).indices.to(self.device)

    def lattice(self, s: Sizes, kind: str) -> Lattice:
        shape = (s.batch, s.depth, s.width, s.width)
        if kind == "random":
            values = (self.normal(*shape) * 3).log_softmax(-1)
        elif kind == "constant":
            values = torch.full(shape, -0.5, device=self.device)
        elif kind == "hopeless":
            values = torch.full(shape, -torch.inf, device=self.device)
        else:  # sums of quarters are exact, so equal paths are exactly equal
            values = self.integers(0, 4, *shape) * -0.25
        if kind == "holes":
            values = values.masked_fill(self.uniform(*shape) < 0.5, -torch.inf)
        if kind == "broken":
            values = values.masked_fill(self.uniform(*shape) < 0.3, torch.nan)
            values = values.masked_fill(self.uniform(*shape) < 0.1, torch.inf)
            values = values.masked_fill(self.uniform(*shape) < 0.2, 1e-7)  # a rounded softmax
        values[:, 0] = values[:, 0, :1].clone()
        return Lattice(self.tokens(s), values)

    def draws(self, s: Sizes, *, heat: bool = False, filters: Sequence[str] = ()) -> Draws:
        """A third of the requests greedy, and of each filter that is set a third neutral."""
        b = s.batch

        def some(values: Tensor, neutral: float) -> Tensor:
            return torch.where(self.uniform(b) < 1 / 3, neutral, values)

        made = {
            "top_k": some(self.integers(1, s.width + 2, b), 1 << 30).int(),
            "top_p": some(0.05 + 0.95 * self.uniform(b), 1.0),
            "min_p": some(0.4 * self.uniform(b), 0.0),
        }
        return Draws(
            self.uniform(b, s.depth, s.nodes - 1),
            self.uniform(b) < 1 / 3,
            *(made[name] if name in filters else None for name in ("top_k", "top_p", "min_p")),
            some(0.1 + 1.5 * self.uniform(b), 1.0) if heat else None,
        )

    def tree(self, s: Sizes, kind: str = "random") -> tree.Tree:
        """Any tree at all, its siblings' tokens distinct."""
        if kind == "best":
            return tree.build_tree(
                self.lattice(s, "random"), self.integers(0, 9, s.batch), s.nodes, s.children
            )
        low = torch.arange(-1, s.nodes - 1).clamp(min=0) * (kind == "chain")
        span = torch.arange(s.nodes).clamp(min=1) - low
        chance = torch.rand(s.batch, s.nodes, generator=self.generator)
        parent = (low + (chance * span).long().clamp(max=span - 1)).to(self.device)
        parent[:, 0] = -1
        # Distinct among siblings, often the same in two families.
        older = (parent.unsqueeze(2) == parent.unsqueeze(1)).tril(-1).sum(2)
        tokens = (older + 3 * parent.clamp(min=0)) % s.vocab
        log_prob = torch.zeros(s.batch, s.nodes, device=self.device)
        return assemble(tokens, parent, log_prob, s.nodes - 1)

    def target(self, s: Sizes, t: tree.Tree, exact: bool) -> Tensor:
        """[B, N, V]: much of it on the children. If exact, sums round nowhere."""
        shape = (s.batch, s.nodes, s.vocab)
        if exact:  # not normalised, some words impossible
            return self.integers(0, 4, *shape) * 2.0**-4
        logits = torch.randn(shape, generator=self.generator).to(self.device)
        above = t.parent.clamp(min=0)
        rows = torch.arange(s.batch, device=self.device).unsqueeze(1)
        logits[rows, above, t.tokens] += 3 + 3 * self.normal(s.batch, s.nodes)
        return logits.softmax(-1)

    def proposal(self, s: Sizes, t: tree.Tree, target: Tensor, exact: bool) -> Proposal:
        """Most nodes that have children have a random one."""
        has = (t.first_child >= 0) & (self.uniform(s.batch, s.nodes) < 0.8)
        flat = torch.zeros(s.batch, s.nodes + 1, dtype=torch.bool, device=self.device)
        random = flat.scatter_(1, torch.where(has, t.first_child, s.nodes), True)[:, : s.nodes]
        words = target.topk(s.width).indices
        child = t.tokens.gather(1, t.first_child.clamp(min=0)).unsqueeze(2)
        known = (words == child).any(2, keepdim=True)
        words = torch.where(known | (torch.arange(s.width, device=self.device) > 0), words, child)
        law = self.integers(0, 4, s.batch, s.nodes, s.width) * 2.0**-4 + 2.0**-7
        if not exact:
            law = law / law.sum(-1, keepdim=True)
        return Proposal(random.contiguous(), words, law * has.unsqueeze(2))


def lattice_pair(
    m: Maker, s: Sizes, dtype: torch.dtype, heated: bool, source: str = "codes"
) -> Pair:
    """source: codes (the selector's), pair (scores given), none."""
    shape = (s.batch, s.depth, s.width)
    unary = m.normal(*shape) * 4
    norm = unary.logsumexp(-1) + m.normal(*shape[:2]).abs() * 0.3
    heat = 0.3 + m.uniform(s.batch) if heated else None
    parts = (m.tokens(s), unary, norm, heat)
    if source != "codes":
        pair = None if source == "none" else m.normal(*shape, s.width, dtype=dtype)
        return Pair(
            lambda: kernels.build_lattice(*parts, pair), lambda: tree.build_lattice(*parts, pair)
        )
    scale = s.rank**-0.5
    codes = (
        m.integers(0, s.vocab, s.batch),
        m.normal(s.batch, s.depth, s.rank, dtype=dtype) * scale,
        m.normal(s.vocab, s.rank, dtype=dtype),
        m.normal(s.vocab, s.rank, dtype=dtype),
    )
    return Pair(
        lambda: kernels.selector_lattice(*parts, *codes),
        lambda: tree.selector_lattice(*parts, *codes),
    )


def tree_pair(m: Maker, s: Sizes, kind: str) -> Pair:
    parts = (m.lattice(s, kind), m.integers(0, 999, s.batch), s.nodes, s.children)
    return Pair(lambda: kernels.build_tree(*parts), lambda: tree.build_tree(*parts))


def greedy_pair(m: Maker, s: Sizes, kind: str) -> Pair:
    t = m.tree(s, kind)
    follows = t.tokens.gather(1, t.first_child.clamp(min=0))
    follows = torch.where(m.uniform(s.batch, s.nodes) < 0.8, follows, m.integers(0, 9, 1))
    depth = s.depth if kind == "best" else s.nodes - 1
    parts = (t.tokens, t.parent, t.mask, t.depth, follows, depth)
    return Pair(lambda: kernels.greedy_walk(*parts), lambda: tree.greedy_walk(*parts))


def sampled_pair(
    m: Maker,
    s: Sizes,
    kind: str,
    *,
    mixed: bool = True,
    random: bool = False,
    exact: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Pair:
    """mixed: some requests are greedy. random: some children are."""
    t = m.tree(s, kind)
    depth = s.depth if kind == "best" else s.nodes - 1
    probs = m.target(s, t, exact)
    proposal = m.proposal(s, t, probs, exact) if random else None
    probs = probs.to(dtype)
    wide = probs.float() if dtype == torch.bfloat16 else probs
    coins = m.uniform(s.batch, 2 * depth + 1)
    if exact:
        coins = (coins * 16).floor() / 16  # often on the edge of a child
    drawn = (coins[:, :depth], coins[:, -1])
    rest = (proposal, coins[:, depth:-1]) if random else (None, None)
    nodes = (t.tokens, t.parent, t.mask, t.depth)
    if not mixed:
        return Pair(
            lambda: kernels.sampling_walk(*nodes, probs, *drawn, depth, *rest),
            lambda: tree.sampling_walk(*nodes, wide, *drawn, depth, *rest),
        )
    likely = wide.argmax(-1)
    greedy = m.uniform(s.batch) < 0.4
    tail = (*drawn, greedy, depth, *rest)
    return Pair(
        lambda: kernels.mixed_walk(*nodes, likely, probs, *tail),
        lambda: tree.mixed_walk(*nodes, likely, wide, *tail),
    )


def conv_pair(m: Maker, s: Sizes, dtype: torch.dtype, side: int) -> Pair:
    rows, groups = s.batch * s.block, s.channels // s.group
    parts = (
        m.normal(rows, s.channels, dtype=dtype),
        m.normal(rows, 2, s.taps, groups, dtype=dtype),
        m.normal(2, s.taps, s.channels),
        side,
        s.block,
    )
    return Pair(lambda: kernels.convolve(*parts), lambda: tree.convolve(*parts))


def require_equal(pair: Pair) -> None:
    """Shapes, dtypes and every value, except None."""
    for ours, want in zip(pair.ours(), pair.torch(), strict=True):
        if want is None:
            assert ours is None
            continue
        assert ours.dtype == want.dtype and ours.shape == want.shape
        assert torch.equal(ours, want)


def require_close(pair: Pair, tolerance: float) -> None:
    """Shapes and dtypes; floats to the tolerance, relative above 1; all else exactly."""
    ours, want = pair.ours(), pair.torch()
    for one, two in zip(_parts(ours), _parts(want), strict=True):
        assert one.dtype == two.dtype and one.shape == two.shape
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


def _parts(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)
