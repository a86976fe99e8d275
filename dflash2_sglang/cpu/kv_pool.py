"""The KV pool of the CPU platform: torch indexing where the stock pool launches Triton."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuKVPool(MHATokenToKVPool):
    """K and V of all layers in one tensor, so that a move of slots is one gather and one scatter.

    ``storage`` is [2, layers, slots, heads * head_dim]; ``k_buffer[l]`` and ``v_buffer[l]`` are views
    [slots, heads, head_dim] of it. Slot 0 takes the writes of padding.
    """

    def _create_buffers_normal(self) -> None:
        if self.head_dim != self.v_head_dim:
            super()._create_buffers_normal()
            self.storage = None
            return
        slots = self.size + self.page_size
        shape = (2, self.layer_num, slots, self.head_num * self.head_dim)
        self.storage = torch.zeros(shape, dtype=self.store_dtype, device=self.device)
        heads = self.storage.unflatten(-1, (self.head_num, self.head_dim))
        self.k_buffer, self.v_buffer = list(heads[0]), list(heads[1])

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _store_kv_layer(
        self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        self.k_buffer[layer_idx].index_copy_(0, loc, cache_k)
        self.v_buffer[layer_idx].index_copy_(0, loc, cache_v)

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        if self.storage is None:
            for buffer in (*self.k_buffer, *self.v_buffer):
                buffer.index_copy_(0, tgt_loc, buffer.index_select(0, src_loc))
            return
        self.storage.index_copy_(2, tgt_loc, self.storage.index_select(2, src_loc))

    def store_all_layers(self, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v [layers, T, heads, head_dim] of every layer at slots ``loc`` [T] int64."""
        for buffers, new in ((self.k_buffer, k), (self.v_buffer, v)):
            for buffer, layer in zip(buffers, new, strict=True):
                buffer.index_copy_(0, loc, layer)
