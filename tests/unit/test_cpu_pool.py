"""The CPU's KV pool and its bookkeeping of slots against plain indexing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from rounding import normal
from torch import Tensor

from dflash2_sglang.cpu import kernels
from dflash2_sglang.cpu.kv_pool import CpuKVPool
from dflash2_sglang.patches import cpu_alloc, cpu_verify

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture
def pool() -> CpuKVPool:
    pool = CpuKVPool(40, 1, torch.float32, 2, 8, 3, "cpu", enable_memory_saver=False)
    for number, buffer in enumerate((*pool.k_buffer, *pool.v_buffer)):
        buffer.copy_(normal(*buffer.shape, seed=number))
    return pool


def contents(pool: CpuKVPool) -> Tensor:
    """[2, layers, slots, heads, dim]"""
    return torch.stack([torch.stack(list(pool.k_buffer)), torch.stack(list(pool.v_buffer))]).clone()


def test_store_one_layer(pool: CpuKVPool) -> None:
    expected, loc = contents(pool), torch.tensor([7, 3, 39])
    k, v = normal(3, 2, 8, seed=10), normal(3, 2, 8, seed=11)
    expected[0, 1, loc], expected[1, 1, loc] = k, v
    layer = SimpleNamespace(layer_id=1)
    pool.set_kv_buffer(layer, loc, k, v)
    assert torch.equal(contents(pool), expected)
    assert torch.equal(pool.get_key_buffer(1), expected[0, 1])
    assert torch.equal(pool.get_value_buffer(1), expected[1, 1])


def test_store_all_layers(pool: CpuKVPool) -> None:
    expected, loc = contents(pool), torch.tensor([5, 0, 40, 2])
    k, v = normal(3, 4, 2, 8, seed=10), normal(3, 4, 2, 8, seed=11)
    expected[0][:, loc], expected[1][:, loc] = k, v
    pool.store_all_layers(loc, k, v)
    assert torch.equal(contents(pool), expected)
    # Views of one projection, as the drafter hands them over.
    both = normal(4, 2, 3, 2, 8, seed=12)
    pool.store_all_layers(loc, both[:, 0].transpose(0, 1), both[:, 1].transpose(0, 1))
    expected[0][:, loc], expected[1][:, loc] = (both[:, i].transpose(0, 1) for i in (0, 1))
    assert torch.equal(contents(pool), expected)


def test_move(pool: CpuKVPool) -> None:
    """All sources are read before any target is written: a slot may be both."""
    expected = contents(pool)
    target, source = torch.tensor([10, 11, 12]), torch.tensor([12, 10, 30])
    expected[:, :, target] = expected[:, :, source]
    pool.move_kv_cache(target, source)
    assert torch.equal(contents(pool), expected)


def test_move_where_values_have_another_width() -> None:
    pool = CpuKVPool(20, 1, torch.float32, 2, 8, 2, "cpu", enable_memory_saver=False, v_head_dim=4)
    for number, buffer in enumerate((*pool.k_buffer, *pool.v_buffer)):
        buffer.copy_(normal(*buffer.shape, seed=number))
    before = [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    target, source = torch.tensor([3, 4]), torch.tensor([4, 9])
    pool.move_kv_cache(target, source)
    for old, new in zip(before, (*pool.k_buffer, *pool.v_buffer), strict=True):
        old[target] = old[source]
        assert torch.equal(new, old)


def test_cache_locs() -> None:
    table = torch.arange(60, dtype=torch.int32).view(4, 15) * 3
    found = kernels.cache_locs(
        req_pool_indices=torch.tensor([2, 0]),
        req_to_token=table,
        start_offset=torch.tensor([4, 9]),
        end_offset=torch.tensor([9, 14]),
        batch_size=2,
        draft_token_num=5,
        device="cpu",
    )
    assert found.dtype == torch.int64
    assert found.tolist() == [*table[2, 4:9].tolist(), *table[0, 9:14].tolist()]


def test_new_slots_are_written_to_each_row() -> None:
    table = torch.full((3, 8), -1, dtype=torch.int32)
    cpu_alloc.assign_req_to_token_pool(
        torch.tensor([2, 0, 1]),
        table,
        torch.tensor([1, 3, 5]),
        torch.tensor([4, 3, 7]),
        torch.tensor([50, 51, 52, 60, 61]),
        3,
    )
    assert table.tolist() == [
        [-1] * 8,
        [-1, -1, -1, -1, -1, 60, 61, -1],
        [-1, 50, 51, 52, -1, -1, -1, -1],
    ]


def test_slots_past_a_row_are_an_error() -> None:
    """A Triton kernel would write them into the neighbour's row."""
    table = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        cpu_alloc.assign_req_to_token_pool(
            torch.tensor([0]), table, torch.tensor([2]), torch.tensor([6]), torch.arange(4), 1
        )


def test_last_slots() -> None:
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    found = cpu_alloc.get_last_loc(table, torch.tensor([1, 0, 1]), torch.tensor([4, 0, 10]))
    assert found.tolist() == [13, -1, 19]


def test_accepted_kv_moves_to_the_front(pool: CpuKVPool) -> None:
    """Two requests of five nodes; paths of three and of one."""
    window = torch.tensor([[21, 7, 30, 2, 11], [5, 18, 9, 33, 40]])
    accept = torch.tensor([[0, 2, 4], [5, -1, -1]], dtype=torch.int32)
    expected = contents(pool)
    expected[:, :, [21, 7, 30]] = expected[:, :, [21, 30, 11]]
    batch = SimpleNamespace(out_cache_loc=window.flatten(), seq_lens=torch.tensor([3, 4]))
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    cpu_verify.move_accept_tokens(batch, accept, torch.tensor([2, 0]), allocator)
    assert torch.equal(contents(pool), expected)


def test_bonus_tokens() -> None:
    rows = torch.tensor([[4, 5, 6], [7, 8, 9], [1, 2, 3]], dtype=torch.int32)
    bonus = torch.zeros(3, dtype=torch.int32)
    lens = torch.tensor([3, 1, 2], dtype=torch.int32)
    cpu_verify.fill_bonus_tokens(rows.flatten(), lens, bonus, 3, 3)
    assert bonus.tolist() == [6, 7, 2]
