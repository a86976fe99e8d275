"""The parts of the self-check that compare; tests/server/test_self_check.py runs it whole."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2_sglang.closeness import difference, worst
from dflash2_sglang.consistency import inconsistency, longest_paths
from dflash2_sglang.tree.build import assemble

parents = st.integers(2, 12).flatmap(
    lambda nodes: st.tuples(*(st.integers(0, i - 1) for i in range(1, nodes)))
)


def verify_of(parent: tuple[int, ...], prefix: int) -> Any:
    rows = torch.tensor([[-1, *parent]])
    tokens = torch.arange(100, 100 + rows.shape[1]).unsqueeze(0)
    tree = assemble(tokens, rows, torch.zeros(rows.shape), rows.shape[1])
    return SimpleNamespace(
        tree=tree,
        positions=prefix + tree.depth[0],
        retrieve_next_token=tree.first_child,
        retrieve_next_sibling=tree.next_sibling,
        draft_token=tokens.flatten(),
    )


@settings(max_examples=80, deadline=None)
@given(parents, st.integers(0, 40), st.data())
def test_what_follows_from_the_parents(parent: Any, prefix: int, data: Any) -> None:
    """An honest input is consistent; one changed number is not."""
    verify, length = verify_of(parent, prefix), torch.tensor([prefix])
    assert inconsistency(verify, length) is None
    node = data.draw(st.integers(0, len(parent)))
    name = data.draw(st.sampled_from(["positions", "links", "sibling", "token", "mask", "depth"]))
    if name == "positions":
        verify.positions[node] += 1
    elif name == "links":
        verify.retrieve_next_token[0, node] += 1
    elif name == "sibling":
        verify.retrieve_next_sibling[0, node] -= 1
    elif name == "token":
        verify.draft_token = verify.draft_token.clone()
        verify.draft_token[node] += 1
    elif name == "mask":
        other = data.draw(st.integers(0, len(parent)))
        verify.tree.mask[0, node, other] ^= True
    else:
        verify.tree.depth[0, node] += 1
    assert inconsistency(verify, length) is not None


@given(parents, st.integers(1, 5))
def test_paths(parent: tuple[int, ...], most: int) -> None:
    whole = [-1, *parent]
    found = longest_paths(whole, most)
    leaves = set(range(len(whole))) - set(parent)
    assert len(found) == min(most, len(leaves))
    for path in found:
        assert path[0] == 0
        assert path[-1] in leaves
        assert all(whole[child] == above for above, child in pairwise(path))
    assert [len(p) for p in found] == sorted((len(p) for p in found), reverse=True)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_differences_do_not_depend_on_the_scale(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = torch.randn(4, 50, generator=generator) * scale + 7
    ours = theirs.clone()
    ours[2] += 0.1 * scale * torch.randn(50, generator=generator)
    found = difference(ours, theirs)
    assert found[[0, 1, 3]].tolist() == [0, 0, 0]
    assert 0.05 < float(found[2]) < 0.2
    ours[1, 3] = torch.nan
    assert bool(difference(ours, theirs)[1].isnan())


@pytest.mark.parametrize("place", [0, 1])
def test_not_a_number_is_the_worst(place: int) -> None:
    found = [torch.tensor([0.1, 0.3]), torch.tensor([0.2])]
    assert worst(found) == pytest.approx(0.3)
    found[place][0] = torch.nan
    assert worst(found) != worst(found)
