"""The flat mask that GPU backends read: its layout, and that refilling leaves nothing of earlier rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2_sglang.tree.build import ancestor_mask
from dflash2_sglang.tree_mask import TreeMask, mask_reader

NODES, WIDTH = 6, 40


def masks(batch: int, seed: int) -> torch.Tensor:
    """Of random trees."""
    generator = torch.Generator().manual_seed(seed)
    parent = torch.rand(batch, NODES, generator=generator) * torch.arange(NODES)
    parent = parent.long()
    parent[:, 0] = -1
    return ancestor_mask(parent, NODES)


def expected(mask: torch.Tensor, prefix: list[int]) -> torch.Tensor:
    """Request after request: N rows that see all of the prefix and their ancestors."""
    rows = [
        torch.cat((torch.ones(NODES, length, dtype=torch.bool), part), 1).flatten()
        for part, length in zip(mask, prefix, strict=True)
    ]
    return torch.cat(rows)


def backend(**theirs: Any) -> Any:
    return SimpleNamespace(verify_mask=SimpleNamespace(**theirs) if theirs else None)


@settings(max_examples=60, deadline=None)
@given(
    rounds=st.lists(
        st.lists(st.integers(0, WIDTH - NODES), min_size=1, max_size=5), min_size=1, max_size=5
    ),
    dtype=st.sampled_from([torch.bool, torch.uint8]),
    owned=st.booleans(),
)
def test_every_round_reads_its_own_trees(
    rounds: list[list[int]], dtype: torch.dtype, owned: bool
) -> None:
    made = TreeMask(NODES, WIDTH, "cpu")
    buffer = torch.zeros(5 * NODES * WIDTH, dtype=dtype)
    reader = backend(buffer=buffer, is_read=True, fits=lambda batch: not owned)
    for number, prefix in enumerate(rounds):
        mask = masks(len(prefix), number)
        flat = made(mask, torch.tensor(prefix), reader)
        assert (flat.data_ptr() == buffer.data_ptr()) is not owned
        want = expected(mask, prefix)
        assert torch.equal(flat[: want.numel()].bool(), want)
        assert bool(flat[want.numel() :].all())  # what padded requests of a graph read


def test_a_buffer_that_is_not_read_is_left_alone() -> None:
    """Of a chain on FlashAttention, say: it is too small for a mask over the prefix."""
    made = TreeMask(NODES, WIDTH, "cpu")
    small = torch.zeros(NODES * NODES, dtype=torch.bool)
    reader = backend(buffer=small, is_read=False, fits=lambda batch: True)
    made(masks(1, 0), torch.tensor([30]), reader)
    assert not small.any()


def test_the_buffer_stays_where_it_is() -> None:
    made = TreeMask(NODES, WIDTH, "cpu")
    made.reserve(4, backend())
    places = {
        made(masks(batch, batch), torch.arange(batch), backend()).data_ptr() for batch in (1, 4, 3)
    }
    assert len(places) == 1


@pytest.mark.parametrize("wraps", [0, 1, 2])
def test_the_reader_is_found_behind_wrappers(wraps: int) -> None:
    inner = found = backend()
    for _ in range(wraps):
        found = SimpleNamespace(full_attn_backend=found)
    assert mask_reader(found) is inner
