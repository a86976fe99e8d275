"""The CPU's own operators, packed weights, KV pool and slot bookkeeping against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import reference as ref
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash2_sglang.cpu import kernels, ops, scratch, weights
from dflash2_sglang.cpu.kv_pool import CpuKVPool
from dflash2_sglang.patches import cpu_alloc, cpu_verify

# One rounding to the dtype, relative to the largest value.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
DTYPES = list(ROUNDING)


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with ref.engine():
        yield


@pytest.fixture(autouse=True)
def fresh_scratch() -> None:
    scratch.new_forward()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, exact: Tensor, roundings: float = 2) -> None:
    """``exact`` in float64; ``found`` may be a few roundings of its dtype away."""
    assert found.shape == exact.shape
    bound = roundings * ROUNDING[found.dtype] * exact.abs().max()
    assert (found.double() - exact).abs().max() <= bound


# Operators.


def make_norm(size: int, dtype: torch.dtype, **options: Any) -> Any:
    from sglang.srt.layers.layernorm import RMSNorm

    norm = RMSNorm(size, eps=1e-5, **options)
    norm.weight.data = 1 + 0.3 * normal(size, seed=9)
    return norm.to(dtype)


def exact_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (3, 5, 32)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    norm, x = make_norm(shape[-1], dtype), normal(*shape, dtype=dtype)
    before = x.clone()
    found = ops.rms_norm(norm, x)
    assert found.dtype == dtype
    assert torch.equal(x, before)
    assert_close(found, exact_norm(x, norm.weight))
    assert_close(found, norm.forward_native(x).double(), 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_residual(dtype: torch.dtype) -> None:
    norm = make_norm(96, dtype)
    x, residual = normal(5, 96, dtype=dtype), normal(5, 96, seed=1, dtype=dtype)
    found, total = ops.rms_norm(norm, x, residual)
    assert total.dtype == found.dtype == dtype
    assert torch.equal(total, x + residual)
    assert_close(found, exact_norm(total, norm.weight))
    native, native_total = norm.forward_native(x.clone(), residual.clone())
    assert_close(total, native_total.double(), 1)
    assert_close(found, native.double(), 4)


@pytest.mark.parametrize(
    "option",
    [{"fp32_residual": True}, {"cast_x_before_out_mul": True}, {"var_hidden_size": 32}],
    ids=str,
)
def test_other_kinds_of_norm_are_left_to_sglang(option: dict[str, Any]) -> None:
    norm = make_norm(64, torch.bfloat16, **option)
    x = normal(4, 64, dtype=torch.bfloat16)
    assert torch.equal(ops.rms_norm(norm, x), norm.forward_native(x.clone()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = normal(6, 128, dtype=dtype)
    before = x.clone()
    found = ops.silu_and_mul(None, x)
    gate, up = x.double().chunk(2, -1)
    assert_close(found, F.silu(gate) * up)
    assert torch.equal(x, before)


def make_rope(head: int = 32, rotary: int | None = None, neox: bool = True) -> Any:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    return RotaryEmbedding(head, rotary or head, 512, 10000, neox, torch.float32)


def exact_rope(x: Tensor, positions: Tensor, head: int) -> Tensor:
    """Neighbours at half a head's distance, turned by position * base ** (-2 i / head)."""
    heads = x.double().view(len(x), -1, head)
    speed = 10000.0 ** (-torch.arange(0, head, 2).float() / head)
    angle = (positions.float().unsqueeze(1) * speed).double().unsqueeze(1)
    a, b = heads.chunk(2, -1)
    turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.cat(turned, -1).view(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (8, 1)])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("fused", [True, False])
def test_rope(dtype: torch.dtype, heads: tuple[int, int], tokens: int, fused: bool) -> None:
    """On neighbouring columns of one projection, as models call it, and on tensors of their own."""
    rope, head = make_rope(), 32
    positions = torch.randint(0, 64, (tokens,), generator=torch.Generator().manual_seed(tokens))
    q_size, k_size = heads[0] * head, heads[1] * head
    qkv = normal(tokens, q_size + 2 * k_size, dtype=dtype)
    query, key, _ = qkv.split([q_size, k_size, k_size], -1)
    if not fused:
        query, key = query.clone(), key.clone()
    before = qkv.clone()
    found_q, found_k = ops.rope(rope, positions, query, key)
    assert torch.equal(qkv, before)
    assert_close(found_q, exact_rope(query, positions, head), 10)
    assert_close(found_k, exact_rope(key, positions, head), 10)
    native_q, native_k = rope.forward_native(positions, query.clone(), key.clone())
    assert_close(found_q, native_q.double(), 4)
    assert_close(found_k, native_k.double(), 4)


def test_rope_table_is_shared_within_a_forward_only() -> None:
    rope = make_rope()
    query, key = normal(3, 64), normal(3, 32, seed=1)
    for first in (0, 100):
        scratch.new_forward()
        positions = torch.arange(3) + first
        for _ in range(2):  # two layers
            found, _ = ops.rope(rope, positions, query, key)
            assert_close(found, exact_rope(query, positions, 32), 10)
    # Other positions without a new forward, as a drafter and its target share the module's class.
    other = torch.arange(3) + 7
    assert_close(ops.rope(rope, other, query, key)[0], exact_rope(query, other, 32), 10)


def test_rope_reads_a_refilled_buffer_anew_in_each_forward() -> None:
    """A pass run again on static buffers, as a graph is; nobody calls ``new_forward`` there."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    rope, positions = make_rope(), torch.zeros(3, dtype=torch.int64)
    query, key = normal(3, 64), normal(3, 32, seed=1)
    tables = []
    for first in (0, 100, 7):
        positions.copy_(torch.arange(3) + first)
        with forward_context(ForwardContext(attn_backend=None)):  # type: ignore[arg-type]
            for _ in range(2):  # two layers
                found, _ = ops.rope(rope, positions, query, key)
                assert_close(found, exact_rope(query, positions, 32), 10)
                tables.append(scratch.get(rope)[1])
    assert [a is b for a, b in pairwise(tables)] == [True, False, True, False, True]


@pytest.mark.parametrize("options", [{"rotary": 16}, {"neox": False}], ids=str)
def test_other_kinds_of_rope_are_left_to_sglang(options: dict[str, Any]) -> None:
    rope, positions = make_rope(**options), torch.arange(4)
    query, key = normal(4, 64), normal(4, 32, seed=1)
    found = ops.rope(rope, positions, query.clone(), key.clone())
    expected = rope.forward_native(positions, query.clone(), key.clone())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_operators_are_those_that_layers_call() -> None:
    """After ``register`` a layer that is made anew dispatches to ours."""
    from sglang.srt.platforms import current_platform

    assert current_platform.get_dispatch_key_name() == ops.DISPATCH_KEY
    ops.register()
    norm = make_norm(64, torch.float32)
    assert norm._resolve_forward_method().__func__ is ops.rms_norm


# Packed weights.


class Method:
    """What a layer of SGLang looks like to ``prepare``."""


def linear(rows: int, columns: int, bias: bool = False, seed: int = 0) -> nn.Module:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    layer = nn.Linear(columns, rows, bias=bias).bfloat16()
    layer.weight.data = normal(rows, columns, seed=seed, dtype=torch.bfloat16)
    layer.quant_method = UnquantizedLinearMethod()  # type: ignore[assignment]
    return layer


@pytest.fixture
def packs() -> None:
    """A machine without bfloat16 products has nothing to pack, which is another test."""
    if not weights.supported():
        pytest.skip("this CPU has no bfloat16 products")


@pytest.mark.parametrize("rows", [1, 3, 16, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear(packs: None, rows: int, bias: bool) -> None:
    layer = linear(96, 64, bias)
    before = layer.weight.clone()
    weights.prepare(nn.ModuleDict({"proj": layer}))
    assert isinstance(layer.quant_method, weights.PackedLinearMethod)
    x = normal(rows, 64, seed=3, dtype=torch.bfloat16)
    found = layer.quant_method.apply(layer, x, layer.bias)
    exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    assert_close(found, exact, 1)
    assert torch.equal(layer.weight, before)


class LlamaMLP(nn.Module):
    """The name counts: ``prepare`` fuses blocks of the classes it knows."""

    def __init__(self) -> None:
        from sglang.srt.layers.activation import SiluAndMul

        super().__init__()
        self.gate_up_proj = linear(2 * 128, 64, seed=1)
        self.down_proj = _Tuple(linear(64, 128, seed=2))
        self.act_fn = SiluAndMul()


class _Tuple(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.inner.quant_method.apply(self.inner, x, None), None


@pytest.mark.parametrize("rows", [1, 16])
def test_packed_swiglu(packs: None, rows: int) -> None:
    mlp = LlamaMLP()
    weights.prepare(nn.ModuleDict({"mlp": mlp}))
    x = normal(rows, 64, seed=4, dtype=torch.bfloat16)
    gate, up = (x.double() @ mlp.gate_up_proj.weight.double().T).chunk(2, -1)
    hidden = F.silu(gate) * up
    assert isinstance(mlp.gate_up_proj.quant_method, weights.PackedGateUp)
    fused = mlp.gate_up_proj.quant_method.activated(x)
    assert_close(fused, hidden, 2)
    assert_close(mlp(x), hidden @ mlp.down_proj.inner.weight.double().T, 3)
    plain = mlp.gate_up_proj.quant_method.apply(mlp.gate_up_proj, x, None)
    assert_close(plain, torch.cat((gate, up), -1), 1)


def test_an_online_weight_update_is_packed_anew(packs: None) -> None:
    """SGLang ends every update with this call on all layers."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    layer, mlp = linear(96, 64), LlamaMLP()
    model = nn.ModuleDict({"proj": layer, "mlp": mlp})
    weights.prepare(model)
    for changed, seed in ((layer, 7), (mlp.gate_up_proj, 8)):
        new = normal(*changed.weight.shape, seed=seed, dtype=torch.bfloat16)
        changed.weight.data.copy_(new)
    DefaultModelLoader.postprocess_weights(model, torch.device("cpu"))
    x = normal(16, 64, seed=5, dtype=torch.bfloat16)
    assert_close(layer.quant_method.apply(layer, x), x.double() @ layer.weight.double().T, 1)
    gate, up = (x.double() @ mlp.gate_up_proj.weight.double().T).chunk(2, -1)
    assert_close(mlp.gate_up_proj.quant_method.activated(x), F.silu(gate) * up, 2)


def test_what_is_not_packed(packs: None) -> None:
    wide, other = linear(32, 64).float(), linear(32, 64)
    other.quant_method = Method()  # type: ignore[assignment]  # a quantised layer
    weights.prepare(nn.ModuleDict({"wide": wide, "other": other}))
    assert type(wide.quant_method).__name__ == "UnquantizedLinearMethod"
    assert type(other.quant_method) is Method


def test_nothing_is_packed_without_the_memory(packs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = linear(96, 64)
    monkeypatch.setattr(
        weights.psutil, "virtual_memory", lambda: SimpleNamespace(available=4 * 96 * 64)
    )
    weights.prepare(nn.ModuleDict({"proj": layer}))
    assert type(layer.quant_method).__name__ == "UnquantizedLinearMethod"


def test_machines_without_bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "supported", lambda: False)
    layer = linear(96, 64)
    attention = nn.Module()
    attention.use_table_qk_norm_rope = True  # the stock drafter's fused kernel
    weights.prepare(nn.ModuleDict({"proj": layer, "attention": attention}))
    assert type(layer.quant_method).__name__ == "UnquantizedLinearMethod"
    assert attention.use_table_qk_norm_rope is False


# KV pool.


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


# Slots.


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
