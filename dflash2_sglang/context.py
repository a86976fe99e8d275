"""Draft KV of committed tokens: features of the target, projected and written for every layer."""

from __future__ import annotations

from typing import Any

import torch


class ContextWriter:
    """Writes into the drafter's pool, at the slots where the target keeps the same tokens."""

    def __init__(self, drafter: Any, model_runner: Any) -> None:
        self.drafter, self.runner = drafter, model_runner

    def __call__(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """features [T, taps * H] of T tokens at positions [T] int64, to slots [T] int64."""
        context = self.drafter.project_context(features[: slots.numel()])
        k, v = self.drafter.context_kv(context, positions)  # [layers, T, heads, head_dim]
        pool = self.runner.token_to_kv_pool
        if hasattr(pool, "store_all_layers"):
            pool.store_all_layers(slots, k, v)
            return
        for layer, keys, values in zip(self.drafter.layers, k, v, strict=True):
            attn = layer.self_attn.attn
            pool.set_kv_buffer(attn, slots, keys, values, attn.k_scale, attn.v_scale)
