"""The CPU's attention backend against naive attention in float64, one query at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from dflash2_sglang.cpu.attention import CpuAttnBackend, contiguous_run
from dflash2_sglang.cpu.kv_pool import CpuKVPool
from dflash2_sglang.tree.build import ancestor_mask

pytestmark = pytest.mark.usefixtures("engine")

HEAD_DIM, SLOTS = 16, 400
Sees = Callable[[int, int], bool]  # (query, key), both counted among the queries' own tokens


class World:
    """A KV pool, the slots of B requests with ``prefix`` tokens each, and the backend over them."""

    def __init__(
        self,
        prefix: list[int],
        queries: list[int],
        heads: tuple[int, int] = (4, 2),
        scattered: bool = True,
        seed: int = 0,
    ) -> None:
        self.prefix, self.queries, self.heads = prefix, queries, heads
        self.g = torch.Generator().manual_seed(seed)
        self.pool = CpuKVPool(
            SLOTS, 1, torch.float32, heads[1], HEAD_DIM, 2, "cpu", enable_memory_saver=False
        )
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.copy_(self.normal(*buffer.shape))
        lengths = [p + n for p, n in zip(prefix, queries, strict=True)]
        free = torch.randperm(SLOTS, generator=self.g) + 1 if scattered else torch.arange(1, SLOTS)
        # Rows are in another order than the batch; beyond its end a row holds slots of others.
        self.rows = torch.randperm(len(prefix) + 2, generator=self.g)[: len(prefix)]
        self.table = torch.randint(
            1, SLOTS, (len(prefix) + 2, 100), generator=self.g, dtype=torch.int32
        )
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            self.table[row, :length], free = free[:length].int(), free[length:]
        runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table), token_to_kv_pool=self.pool
        )
        self.backend = CpuAttnBackend(runner)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.g)

    def slots(self, b: int) -> Tensor:
        return self.table[self.rows[b], : self.prefix[b] + self.queries[b]].long()

    def batch(self, mode: ForwardMode, **extra: Any) -> Any:
        own = [self.slots(b)[p:] for b, p in enumerate(self.prefix)]
        decodes = mode == ForwardMode.DECODE
        lengths = [p + n if decodes else p for p, n in zip(self.prefix, self.queries, strict=True)]
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(self.prefix),
            req_pool_indices=self.rows,
            seq_lens=torch.tensor(lengths),
            out_cache_loc=torch.cat(own),
            positions=None,
            spec_info=None,
            **extra,
        )

    def layer(self, window: int = -1, bidirectional: bool = False, number: int = 0) -> Any:
        return SimpleNamespace(
            layer_id=number,
            tp_q_head_num=self.heads[0],
            tp_k_head_num=self.heads[1],
            tp_v_head_num=self.heads[1],
            qk_head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM,
            head_dim=HEAD_DIM,
            scaling=0.3,
            sliding_window_size=window,
            attn_type=AttentionType.ENCODER_ONLY if bidirectional else AttentionType.DECODER,
            logit_cap=0.0,
            is_cross_attention=False,
            k_scale=None,
            v_scale=None,
        )

    def check(
        self,
        batch: Any,
        layer: Any,
        sees: Sees | list[Sees],
        depth: list[list[int]] | None = None,
    ) -> None:
        """One layer; ``sees`` rules among the new tokens, which all see the prefix.

        depth[b][i] is the distance of query i from the prefix's end (default: i).
        """
        q_heads, kv_heads = self.heads
        tokens = sum(self.queries)
        q = self.normal(tokens, q_heads * HEAD_DIM)
        k = self.normal(tokens, kv_heads, HEAD_DIM)
        v = self.normal(tokens, kv_heads, HEAD_DIM)
        self.backend.init_forward_metadata(batch)
        out = self.backend.forward(q, k, v, layer, batch)
        expected = torch.zeros_like(out, dtype=torch.float64)
        start = 0
        for b, (prefix, count) in enumerate(zip(self.prefix, self.queries, strict=True)):
            rule = sees[b] if isinstance(sees, list) else sees
            far = depth[b] if depth else list(range(count))
            place = [*range(prefix), *(prefix + d for d in far)]
            keys, values = (
                buffer[layer.layer_id][self.slots(b)].double()
                for buffer in (self.pool.k_buffer, self.pool.v_buffer)
            )
            assert torch.equal(keys[prefix:].float(), k[start : start + count])
            for i in range(count):
                visible = [
                    j
                    for j in range(prefix + count)
                    if (j < prefix or rule(i, j - prefix))
                    and (
                        layer.sliding_window_size < 0
                        or place[j] >= place[prefix + i] - layer.sliding_window_size
                    )
                ]
                for h in range(q_heads):
                    query = q[start + i].view(q_heads, HEAD_DIM)[h].double()
                    group = h * kv_heads // q_heads
                    scores = [float(keys[j, group] @ query) * layer.scaling for j in visible]
                    weights = [math.exp(s - max(scores)) for s in scores]
                    mixed = sum(
                        w * values[j, group] for w, j in zip(weights, visible, strict=True)
                    ) / math.fsum(weights)
                    expected[start + i, h * HEAD_DIM : (h + 1) * HEAD_DIM] = mixed
            start += count
        assert torch.allclose(out.double(), expected, atol=1e-5)


def causal(i: int, j: int) -> bool:
    return j <= i


def everything(i: int, j: int) -> bool:
    return True


HEADS = [(4, 2), (4, 4), (6, 1)]
RAGGED = [17, 3, 0, 31]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [-1, 4, 16, 50])
@pytest.mark.parametrize("prefix", [[21], RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("scattered", [True, False])
def test_decode(heads: tuple[int, int], window: int, prefix: list[int], scattered: bool) -> None:
    world = World(prefix, [1] * len(prefix), heads, scattered)
    world.check(world.batch(ForwardMode.DECODE), world.layer(window), causal)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [-1, 4, 16])
@pytest.mark.parametrize(
    ("prefix", "queries"),
    [([0], [9]), ([13], [1]), ([5, 0, 22, 1], [4, 11, 1, 6])],
    ids=["whole", "last token", "ragged"],
)
def test_prefill(
    heads: tuple[int, int], window: int, prefix: list[int], queries: list[int]
) -> None:
    world = World(prefix, queries, heads)
    batch = world.batch(
        ForwardMode.EXTEND, extend_prefix_lens_cpu=prefix, extend_seq_lens_cpu=queries
    )
    world.check(batch, world.layer(window), causal)


def test_bidirectional_prefill() -> None:
    world = World([6, 0], [5, 7])
    batch = world.batch(
        ForwardMode.EXTEND, extend_prefix_lens_cpu=[6, 0], extend_seq_lens_cpu=[5, 7]
    )
    world.check(batch, world.layer(bidirectional=True), everything)


@pytest.mark.parametrize("window", [-1, 9, 20])
@pytest.mark.parametrize("prefix", [[21], RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("scattered", [True, False])
def test_chain_verify(window: int, prefix: list[int], scattered: bool) -> None:
    world = World(prefix, [8] * len(prefix), scattered=scattered)
    batch = world.batch(ForwardMode.TARGET_VERIFY)
    batch.spec_info = SimpleNamespace(draft_token_num=8)
    world.check(batch, world.layer(window), causal)


@pytest.mark.parametrize("window", [-1, 7, 12, 40])
@pytest.mark.parametrize("prefix", [[21], [0], RAGGED], ids=["one", "empty", "ragged"])
@pytest.mark.parametrize("scattered", [True, False])
def test_block_of_the_drafter(window: int, prefix: list[int], scattered: bool) -> None:
    """All of the block see all of it, and of the context what the window leaves."""
    world = World(prefix, [8] * len(prefix), scattered=scattered)
    batch = world.batch(ForwardMode.TARGET_VERIFY)
    batch.spec_info = SimpleNamespace(draft_token_num=8)
    world.check(batch, world.layer(window, bidirectional=True), everything)


def random_tree(nodes: int, seed: int) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return [-1, *(int(torch.randint(0, i, (1,), generator=g)) for i in range(1, nodes))]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [-1, 3, 10, 40])
@pytest.mark.parametrize("prefix", [[21], RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("scattered", [True, False])
def test_tree_verify(
    heads: tuple[int, int], window: int, prefix: list[int], scattered: bool
) -> None:
    """A node sees the prefix and its ancestors; with a window, depth counts and not the index."""
    nodes = 12
    parents = torch.tensor([random_tree(nodes, seed) for seed in range(len(prefix))])
    mask = ancestor_mask(parents, nodes)
    depth = mask.sum(-1) - 1
    world = World(prefix, [nodes] * len(prefix), heads, scattered)
    batch = world.batch(ForwardMode.TARGET_VERIFY)
    batch.spec_info = SimpleNamespace(draft_token_num=nodes, tree_mask=mask)
    batch.positions = (torch.tensor(prefix).unsqueeze(1) + depth).flatten()
    rules = [lambda i, j, b=b: bool(mask[b, i, j]) for b in range(len(prefix))]
    world.check(batch, world.layer(window), rules, depth.tolist())


def test_layers_of_one_forward() -> None:
    """Full and sliding layers share the forward's metadata, each with its own mask and KV."""
    world = World(RAGGED, [8] * 4)
    batch = world.batch(ForwardMode.TARGET_VERIFY)
    batch.spec_info = SimpleNamespace(draft_token_num=8)
    world.check(batch, world.layer(number=0), causal)
    for window, number, bidirectional in ((5, 1, False), (-1, 0, True), (5, 0, True)):
        layer = world.layer(window, bidirectional, number)
        # The same metadata object serves the next layers of a forward.
        rows = world.backend.rows
        world.backend.init_forward_metadata = lambda _: None  # type: ignore[method-assign]
        world.check(batch, layer, everything if bidirectional else causal)
        assert world.backend.rows is rows


def test_what_is_not_served() -> None:
    world = World([3], [1])
    batch = world.batch(ForwardMode.DECODE)
    world.backend.init_forward_metadata(batch)
    q = torch.zeros(1, 4 * HEAD_DIM)
    k = torch.zeros(1, 2, HEAD_DIM)
    capped, crossed = world.layer(), world.layer()
    capped.logit_cap, crossed.is_cross_attention = 30.0, True
    for layer in (capped, crossed):
        with pytest.raises(NotImplementedError, match="need an accelerator"):
            world.backend.forward(q, k, k, layer, batch)
    with pytest.raises(NotImplementedError, match="attention sinks"):
        world.backend.forward(q, k, k, world.layer(), batch, sinks=torch.zeros(4))


def test_contiguous_run() -> None:
    assert contiguous_run(torch.tensor([4, 5, 6])) == slice(4, 7)
    assert contiguous_run(torch.tensor([9])) == slice(9, 10)
    assert contiguous_run(torch.tensor([4, 6, 5, 7])) is None
    assert contiguous_run(torch.tensor([6, 5, 4])) is None
    assert contiguous_run(torch.tensor([4, 4, 6])) is None
