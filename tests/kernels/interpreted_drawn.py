"""The kernel of trees with random children against torch. Run by test_interpreted.py."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from drawn_cases import FILTERS, DrawnCase, compare, drawn_case, parts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import KINDS, Maker, Sizes
from quick_interpreter import install

from dflash2_sglang import kernels, tree
from dflash2_sglang.tree.build import capacity
from dflash2_sglang.tree.draw import Draws
from dflash2_sglang.tree.lattice import Lattice

torch.set_num_threads(1)
install()

ALL = 1 << 30  # SGLang's top-k of a request that set none


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    width, depth = draw(st.integers(4, 32)), draw(st.integers(3, 31))
    children = draw(st.integers(1, width))
    batch = draw(st.sampled_from([1, 2, 3, 5]))
    nodes = draw(st.integers(2, min(40 // batch, capacity(depth, children))))
    return Sizes(batch, depth, width, nodes, children)


def test_trees() -> None:
    """Those that hang on rounding are few."""
    count = Counter[str]()

    @settings(max_examples=45, deadline=None)
    @given(
        sizes(),
        st.integers(0, 999),
        st.sampled_from(KINDS),
        st.booleans(),
        st.sets(st.sampled_from(FILTERS)),
    )
    @example(Sizes(64, 3, 4, 2, 1), 0, "random", True, {"top_p"})
    @example(Sizes(6, 7, 16, 8, 4), 1, "ties", False, set())
    @example(Sizes(2, 7, 16, 32, 16), 2, "random", True, set(FILTERS))
    @example(Sizes(1, 31, 32, 128, 32), 3, "random", True, set())
    @example(Sizes(1, 31, 8, 32, 1), 4, "random", False, set())  # a chain
    @example(Sizes(1, 5, 16, 66, 16), 5, "holes", False, set())  # more nodes than bits in a word
    @example(Sizes(1, 3, 4, 85, 4), 6, "constant", False, set())  # every path there is
    @example(Sizes(2, 3, 4, 60, 4), 9, "holes", False, set())  # impossible paths as well
    @example(Sizes(2, 2, 1, 3, 1), 7, "random", True, {"min_p"})
    @example(Sizes(3, 4, 40, 9, 40), 8, "random", True, {"top_p"})  # candidates of several warps
    def check(s: Sizes, seed: int, kind: str, heat: bool, filters: set[str]) -> None:
        case = drawn_case(Maker(seed), s, kind, heat=heat, filters=sorted(filters))
        exact = kind != "random" and not filters
        compared, aside = compare(case, exact)
        count["compared"] += compared
        count["aside"] += aside

    check()
    print(dict(count))
    assert count["compared"] > 100
    assert count["aside"] <= 0.05 * count["compared"]


def neutral(case: DrawnCase) -> DrawnCase:
    """What SGLang has of requests that set no filter, as tensors."""
    b = len(case.anchor)
    limits = (torch.full((b,), ALL).int(), torch.ones(b), torch.zeros(b), torch.ones(b))
    return case._replace(draws=Draws(*case.draws[:2], *limits))


@pytest.mark.parametrize("kind", ["random", "holes"])
def test_filters_that_keep_everything_change_no_bit(kind: str) -> None:
    m, s = Maker(11), Sizes(3, 4, 9, 14, 5)
    case = drawn_case(m, s, kind)
    # Sums above 1, and candidates too unlikely for float32.
    log_probs = case.lattice.log_probs + 1e-7
    log_probs[..., 3:5] -= 120
    case = case._replace(lattice=Lattice(case.lattice.tokens, log_probs))
    set_none = [parts(f(case)) for f in (DrawnCase.ours, DrawnCase.torch)]
    set_all = [parts(f(neutral(case))) for f in (DrawnCase.ours, DrawnCase.torch)]
    for one, two in zip(set_none, set_all, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


@pytest.mark.parametrize(("kind", "filters"), [("random", FILTERS), ("broken", ()), ("ties", ())])
def test_a_batch_of_greedy_requests_gets_the_fixed_trees(
    kind: str, filters: tuple[str, ...]
) -> None:
    case = drawn_case(Maker(12), Sizes(2, 5, 7, 12, 4), kind, heat=True, filters=filters)
    case = case._replace(draws=case.draws._replace(fixed=torch.ones(2, dtype=torch.bool)))
    ours, want = case.ours(), tree.build_tree(*case[:-1])
    assert all(torch.equal(x, y) for x, y in zip(ours[:-1], want[:-1], strict=True))
    assert ours.proposal is not None and case.torch().proposal is not None
    assert torch.equal(ours.proposal.tokens, case.torch().proposal.tokens)
    assert not ours.proposal.random.any() and not ours.proposal.probs.any()


def test_views_and_other_precisions() -> None:
    """A lattice without a selector has a stride of 0; coins may be a slice; limits have any type."""
    case = drawn_case(Maker(13), Sizes(3, 4, 6, 12, 4), "random", heat=True, filters=FILTERS)
    want = parts(case.ours())
    coins = torch.rand(4, 3, 22).transpose(0, 1)
    coins[:, :, ::2] = case.draws.coins
    limits = (case.draws.top_k.long(), *(x.double() for x in case.draws[3:]))
    draws = Draws(coins[:, :, ::2], case.draws.fixed, *limits)
    ours = parts(case._replace(draws=draws).ours())
    assert all(torch.equal(x, y) for x, y in zip(ours, want, strict=True))

    rows = case.lattice.log_probs[:, :, :1]
    dense = Lattice(case.lattice.tokens, rows.repeat(1, 1, 6, 1))
    view = Lattice(case.lattice.tokens, rows.expand(3, 4, 6, 6))
    one, two = (parts(case._replace(lattice=x).ours()) for x in (dense, view))
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
    assert compare(case._replace(lattice=view))[0] >= 2


@pytest.mark.parametrize("coin", [0.0, 1 - 2**-24, 1.0])
def test_coins_at_the_ends(coin: float) -> None:
    """Candidates of probability 0 are never drawn: fixed ones before, impossible ones after."""
    case = drawn_case(Maker(14), Sizes(4, 3, 6, 14, 3), "holes", filters=["top_k"])
    draws = case.draws._replace(coins=torch.full_like(case.draws.coins, coin))
    case = case._replace(draws=draws)
    ours, want = parts(case.ours()), parts(case.torch())
    for x, y in zip(ours, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_a_cold_request_keeps_its_best_candidate() -> None:
    """At temperature 0.01 all powers of a flat row vanish in float32."""
    flat = Lattice(torch.arange(6).view(1, 2, 3), torch.full((1, 2, 3, 3), 0.3).log())
    draws = Draws(torch.full((1, 2, 3), 0.5), torch.zeros(1, dtype=torch.bool))
    cold = draws._replace(top_p=torch.tensor([0.5]), heat=torch.tensor([0.01]))
    case = DrawnCase(flat, torch.zeros(1, dtype=torch.int64), 4, 3, cold)
    assert compare(case) == (1, 0)
    assert bool((case.ours().log_prob > -torch.inf).all())


def test_no_requests() -> None:
    case = drawn_case(Maker(0), Sizes(0, 3, 4, 5, 2), "random", heat=True, filters=FILTERS)
    for x, y in zip(parts(case.ours()), parts(case.torch()), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and not x.numel()


def test_bad_sizes_are_refused_as_by_torch() -> None:
    case = drawn_case(Maker(0), Sizes(1, 3, 4, 9, 2), "random")
    for nodes, children in ((1, 2), (16, 2), (4, 5)):
        with pytest.raises(ValueError, match=r"num_nodes|max_children"):
            kernels.build_tree(*case[:2], nodes, children, case.draws)


def test_it_is_the_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash2_sglang.kernels import drawn_tree

    case = drawn_case(Maker(0), Sizes(1, 3, 4, 5, 2), "random")
    monkeypatch.setattr(drawn_tree, "_drawn_tree", None)
    with pytest.raises(TypeError):
        case.ours()
