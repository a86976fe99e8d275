"""The CPU's own operators against plain torch and SGLang's own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rounding import ROUNDING, assert_close, normal
from torch import Tensor

from dflash2_sglang.cpu import ops, scratch

pytestmark = pytest.mark.usefixtures("engine")

DTYPES = list(ROUNDING)


@pytest.fixture(autouse=True)
def fresh_scratch() -> None:
    scratch.new_forward()


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
