"""Attention on the CPU: torch's SDPA over SGLang's paged KV.

Everything that depends on the batch alone (slots to read, masks) is worked out once a forward and shared
by the layers. Three shapes are served: one row of equal query lengths (decode, chain verify, tree verify,
the drafter's block), and prefill request by request.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from dflash2_sglang.cpu import scratch


@dataclass
class Rows:
    """B requests with the same number of queries, their keys padded to the longest.

    Keys of request b: ``prefix[b]`` committed tokens, then the Q tokens of this forward.
    ``tree`` [B, Q, Q] bool says which of the Q tokens see each other; None is a causal chain.
    """

    slots: torch.Tensor | slice  # [B * S] int64, or one contiguous run when B is 1
    batch: int
    queries: int
    keys: int
    prefix: torch.Tensor  # [B] int64
    positions: torch.Tensor | None = None  # [B, Q] int64, of the queries; None: consecutive
    tree: torch.Tensor | None = None
    masks: dict[tuple[int, bool, int, torch.dtype], torch.Tensor | None] = field(
        default_factory=dict
    )

    def mask(
        self, window: int, bidirectional: bool, group: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Additive mask [B, 1, Q * group, S] (group rows a query), or None where all keys are seen."""
        key = (window, bidirectional, group, dtype)
        if key not in self.masks:
            self.masks[key] = self._build_mask(*key)
        return self.masks[key]

    def _build_mask(
        self, window: int, bidirectional: bool, group: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        # With one request nothing is padded, and the window may be longer than all there is.
        windowed = window >= 0 and self.keys - 1 > window
        if self.batch == 1 and not windowed and (bidirectional or self.queries == 1):
            return None
        prefix = self.prefix[:, None, None]  # [B, 1, 1]
        slot = torch.arange(self.keys)[None, None]  # [1, 1, S]
        own = slot - prefix  # index of a key among the queries' own tokens
        if bidirectional:
            seen = own < self.queries
        elif self.tree is None:
            seen = own <= torch.arange(self.queries)[None, :, None]
        else:
            index = own.clamp(0, self.queries - 1).expand(self.batch, self.queries, self.keys)
            seen = (own < 0) | ((own < self.queries) & self.tree.gather(2, index))
        if windowed:
            position = self._query_positions()
            key_position = torch.where(
                own < 0, slot, position.gather(1, own[:, 0].clamp(0, self.queries - 1))[:, None]
            )
            seen = seen & (key_position >= position[:, :, None] - window)
        seen = seen.expand(self.batch, self.queries, self.keys)
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
        return mask.repeat_interleave(group, 1)[:, None]

    def _query_positions(self) -> torch.Tensor:
        if self.positions is not None:
            return self.positions
        return self.prefix[:, None] + torch.arange(self.queries)


@dataclass
class Prompt:
    """One request of a prefill: its rows of the flat batch, its keys, and its masks by window."""

    rows: slice
    slots: torch.Tensor
    prefix: int
    masks: dict[tuple[int, int, bool, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @property
    def queries(self) -> int:
        return self.rows.stop - self.rows.start

    def mask(
        self, window: int, bidirectional: bool, group: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        if self.prefix == 0 and bidirectional and window < 0:
            return None
        key = (window, group, bidirectional, dtype)
        if key not in self.masks:
            keys = self.prefix + self.queries
            query = torch.arange(self.prefix, keys)[:, None]
            slot = torch.arange(keys)[None]
            seen = slot < keys if bidirectional else slot <= query
            if window >= 0:
                seen = seen & (slot >= query - window)
            mask = torch.zeros(self.queries, keys, dtype=dtype)
            mask.masked_fill_(~seen, float("-inf"))
            self.masks[key] = mask.repeat_interleave(group, 0)[None, None]
        return self.masks[key]


class CpuAttnBackend(AttentionBackend):
    """SGLang attention backend ``dflash2_cpu``; target and drafter each own one."""

    reads_tree_mask = True  # of the verify input, instead of a flat mask over the prefix

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.pool = self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.rows: Rows | None = None
        self.prompts: list[Prompt] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        scratch.new_forward()
        self.rows, self.prompts = None, []
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if mode.is_target_verify():
            self.rows = self._verify_rows(forward_batch)
        elif mode.is_decode():
            self.rows = self._read_rows(forward_batch, forward_batch.seq_lens - 1, 1)
        else:
            self.prompts = self._prompts(forward_batch)

    def _verify_rows(self, batch: ForwardBatch) -> Rows:
        spec = batch.spec_info
        queries = spec.draft_token_num
        rows = self._read_rows(batch, batch.seq_lens, queries)
        rows.tree = getattr(spec, "tree_mask", None)
        if rows.tree is not None:
            rows.positions = batch.positions.view(rows.batch, queries)
        return rows

    def _read_rows(self, batch: ForwardBatch, prefix: torch.Tensor, queries: int) -> Rows:
        size = batch.batch_size
        keys = int(prefix.max()) + queries
        table = self.req_to_token[batch.req_pool_indices, :keys]
        if size > 1:
            # Past a short request's end its row may name slots of others; slot 0 holds zeros. Masked
            # scores would hide their values, but not a NaN.
            table = table.where(torch.arange(keys) < (prefix + queries).unsqueeze(1), 0)
        scattered = table.reshape(-1).long()
        slots = (contiguous_run(scattered) if size == 1 else None) or scattered
        return Rows(slots, size, queries, keys, prefix)

    def _prompts(self, batch: ForwardBatch) -> list[Prompt]:
        prompts, start = [], 0
        lengths = zip(
            batch.req_pool_indices.tolist(),
            batch.extend_prefix_lens_cpu,
            batch.extend_seq_lens_cpu,
            strict=True,
        )
        for row, prefix, length in lengths:
            slots = self.req_to_token[row, : prefix + length].long()
            prompts.append(Prompt(slice(start, start + length), slots, prefix))
            start += length
        return prompts

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """q [T, heads * dim] of the forward's tokens -> [T, heads * dim]; k, v go to the pool first."""
        if kwargs or layer.logit_cap or layer.is_cross_attention:
            raise NotImplementedError(
                "The CPU attention backend serves plain self-attention; attention sinks, logit caps and "
                "cross attention need an accelerator."
            )
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        heads = functools.partial(_sdpa, layer=layer)
        bidirectional = layer.attn_type == AttentionType.ENCODER_ONLY
        if self.rows is not None:
            rows = self.rows
            return heads(q, keys, values, rows.slots, rows.batch, rows, bidirectional)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        for prompt in self.prompts:
            out[prompt.rows] = heads(
                q[prompt.rows], keys, values, prompt.slots, 1, prompt, bidirectional
            )
        return out

    # A hybrid model's wrapper chooses by mode, where others call ``forward``.
    forward_decode = forward_extend = forward


def contiguous_run(slots: torch.Tensor) -> slice | None:
    """The slice that reads ``slots`` [S] in order, or None where they are scattered."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first != slots.numel() - 1:
        return None
    return slice(first, last + 1) if bool((slots.diff() == 1).all()) else None


def _sdpa(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor | slice,
    batch: int,
    masks: Rows | Prompt,
    bidirectional: bool,
    *,
    layer: RadixAttention,
) -> torch.Tensor:
    """Grouped-query attention with the group folded into the query rows, so K and V are never repeated."""
    kv_heads, group = layer.tp_k_head_num, layer.tp_q_head_num // layer.tp_k_head_num
    q = q.view(batch, -1, kv_heads, group, layer.qk_head_dim)
    queries = q.shape[1]
    q = q.transpose(1, 2).reshape(batch, kv_heads, queries * group, layer.qk_head_dim)
    k = _read(keys, slots, batch, kv_heads)
    v = _read(values, slots, batch, kv_heads)
    mask = masks.mask(layer.sliding_window_size, bidirectional, group, q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scaling)
    out = out.view(batch, kv_heads, queries, group, layer.v_head_dim).transpose(1, 2)
    return out.reshape(batch * queries, -1)


def _read(
    buffer: torch.Tensor, slots: torch.Tensor | slice, batch: int, heads: int
) -> torch.Tensor:
    """[slots, heads, dim] -> [B, heads, S, dim]; a contiguous run is read in place."""
    rows = buffer[slots] if isinstance(slots, slice) else buffer.index_select(0, slots)
    return rows.view(batch, -1, heads, buffer.shape[-1]).transpose(1, 2)
