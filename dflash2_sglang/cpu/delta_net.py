"""Gated delta net layers on the CPU: the forwards of SGLang's backend, in torch.

SGLang keeps a convolution state and a recurrent state a request and layer. A verify pass leaves both as
they are and writes the states after each node beside them; once a path is accepted, the states of its last
node become the request's own (``commit``). In a tree a node starts from the states of its parent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash2_sglang.cpu import gated_delta, scratch


def forward_decode(
    self: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    **kwargs: Any,
) -> Tensor:
    """One token of B requests: mixed_qkv [B, C], a, b [B, H] -> [1, B, H, V]."""
    cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    conv, temporal = cache.conv[0], cache.temporal
    slots = self.forward_metadata.mamba_cache_indices.long()
    before = conv.index_select(0, slots)
    columns = _columns(None, None, 1, layer)
    mixed, windows = gated_delta.convolve_nodes(
        mixed_qkv.unsqueeze(1), layer.conv_weights, layer.bias, before, columns
    )
    conv.index_copy_(0, slots, windows[:, 0])
    q, k, v = _split(layer, _activated(layer, mixed[:, 0]))
    gate = gated_delta.gates(layer.A_log, a, b, layer.dt_bias)
    out, state = gated_delta.step(temporal.index_select(0, slots), q, k, v, *gate)
    temporal.index_copy_(0, slots, state.to(temporal.dtype))
    if forward_batch.mamba_track_mask is not None:
        rows = forward_batch.mamba_track_mask.nonzero().squeeze(1)
        kept = self.forward_metadata.mamba_track_indices[rows]
        _copy_slots((conv.unsqueeze(0), temporal.unsqueeze(0)), slots[rows], kept)
    return out.to(mixed_qkv.dtype).unsqueeze(0)


def forward_extend(
    self: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    **kwargs: Any,
) -> Tensor:
    """A prefill or a verify pass of T tokens: mixed_qkv [T, C], a, b [T, H] -> [1, T, H, V]."""
    if self.mis_metadata is not None:
        raise NotImplementedError("Multi-item scoring of hybrid models needs an accelerator.")
    cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    gate = gated_delta.gates(layer.A_log, a, b, layer.dt_bias)
    if forward_batch.forward_mode.is_target_verify():
        out = _verify(self, layer, forward_batch.spec_info, cache, mixed_qkv, *gate)
    else:
        out = _prefill(self, layer, forward_batch, cache, mixed_qkv, *gate)
    return out.to(mixed_qkv.dtype).unsqueeze(0)


def _verify(
    self: Any, layer: Any, spec: Any, cache: Any, mixed_qkv: Tensor, decay: Tensor, strength: Tensor
) -> Tensor:
    count = spec.draft_token_num
    batch = mixed_qkv.shape[0] // count
    tree = getattr(spec, "tree", None)  # none in the stock DFLASH chain
    parent, seen = (None, None) if tree is None else (tree.parent, tree.mask)
    slots = self.forward_metadata.mamba_cache_indices[:batch].long()
    before = cache.conv[0].index_select(0, slots)
    columns = _columns(spec, parent, count, layer)
    rows = mixed_qkv.unflatten(0, (batch, count))
    mixed, windows = gated_delta.convolve_nodes(
        rows, layer.conv_weights, layer.bias, before, columns
    )
    cache.intermediate_conv_window[0][:batch, :count] = windows
    q, k, v = _split(layer, _activated(layer, mixed))
    state = cache.temporal.index_select(0, slots)
    gate = (decay.unflatten(0, (batch, count)), strength.unflatten(0, (batch, count)))
    out, states = gated_delta.nodes(state, q, k, v, *gate, seen)
    cache.intermediate_ssm[:batch, :count] = states
    return out.flatten(0, 1)


def _prefill(
    self: Any,
    layer: Any,
    forward_batch: Any,
    cache: Any,
    mixed_qkv: Tensor,
    decay: Tensor,
    strength: Tensor,
) -> Tensor:
    metadata = self.forward_metadata
    conv, temporal = cache.conv[0], cache.temporal
    if metadata.has_mamba_track_mask:
        inputs = mixed_qkv[metadata.track_conv_indices].transpose(1, 2)
        conv[metadata.conv_states_mask_indices] = inputs.to(conv.dtype)
    outs, starts, begin = [], [], 0
    requests = zip(
        metadata.mamba_cache_indices.tolist(),
        forward_batch.extend_prefix_lens_cpu,
        forward_batch.extend_seq_lens_cpu,
        strict=True,
    )
    for slot, prefix, length in requests:
        part = slice(begin, begin + length)
        begin += length
        before = conv[slot] if prefix > 0 else torch.zeros_like(conv[slot])
        mixed, after = gated_delta.convolve_prompt(
            mixed_qkv[part], layer.conv_weights, layer.bias, before
        )
        q, k, v = _split(layer, _activated(layer, mixed))
        out, state, chunks = gated_delta.prompt(
            temporal[slot], q, k, v, decay[part], strength[part]
        )
        conv[slot], temporal[slot] = after, state
        outs.append(out)
        starts.append(chunks)
    if metadata.has_mamba_track_mask:
        states = torch.cat(starts).unsqueeze(0)
        self._track_mamba_state_extend(forward_batch, states, temporal, metadata)
    if begin < mixed_qkv.shape[0]:
        outs.append(mixed_qkv.new_zeros(mixed_qkv.shape[0] - begin, *outs[0].shape[1:]))
    return torch.cat(outs)


def commit(
    mamba_caches: Any,
    state_indices_tensor: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Make the states after each request's last accepted node its own.

    state_indices_tensor       [B] slots of the requests
    last_correct_step_indices  [B] the node, -1: leave the slot alone
    mamba_track_indices        [B] slots the prefix cache may keep, or None
    mamba_steps_to_track       [B] the node whose states go there, -1: none
    """
    pairs = [(mamba_caches.temporal, mamba_caches.intermediate_ssm)]
    pairs += zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True)
    orders = [(state_indices_tensor, last_correct_step_indices)]
    if mamba_track_indices is not None:
        assert mamba_steps_to_track is not None
        orders.append((mamba_track_indices, mamba_steps_to_track))
    for slots, steps in orders:
        rows = ((steps >= 0) & (slots >= 0)).nonzero().squeeze(1)
        source = rows if src_indices_raw is None else src_indices_raw[rows].long()
        for state, after_nodes in pairs:
            state[:, slots[rows].long()] = after_nodes[:, source, steps[rows].long()]


def _columns(spec: Any, parent: Tensor | None, count: int, layer: Any) -> Tensor:
    """The convolution windows, worked out once a forward."""
    width = layer.conv_weights.shape[1]
    key = ("delta_net", count, width)
    found = scratch.get(key)
    if found is None or found[0] is not spec:
        device = layer.conv_weights.device
        found = scratch.put(key, (spec, gated_delta.windows(parent, count, width, device)))
    return found[1]


def _activated(layer: Any, x: Tensor) -> Tensor:
    return F.silu(x) if layer.activation in ("silu", "swish") else x


def _split(layer: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """mixed [..., C] -> q, k [..., Hk, K], v [..., H, V]."""
    q, k, v = mixed.split([layer.q_dim, layer.k_dim, layer.v_dim], -1)
    return (
        q.unflatten(-1, (layer.num_q_heads, layer.head_q_dim)),
        k.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
        v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
    )


def _copy_slots(pools: tuple[Tensor, ...], source: Tensor, target: Tensor) -> None:
    """Copy slots of pools [layers, slots, ...]."""
    for pool in pools:
        pool[:, target.long()] = pool[:, source.long()]
