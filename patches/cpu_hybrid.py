"""Gated delta net layers (Qwen3.5 and its kin), which stock SGLang runs in Triton."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dflash2_sglang.cpu import delta_net

from .base import Patch


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> Tensor:
    """RMS norm of x [T, V], times the activation of its gate z [T, V]."""
    if group_size is not None or not norm_before_gate or not is_rms_norm or bias is not None:
        raise NotImplementedError("On the CPU this norm is an RMS norm that a gate follows.")
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    if z is not None:
        gate = z.float()
        normed = normed * (gate.sigmoid() if activation == "sigmoid" else F.silu(gate))
    return normed.to(x.dtype)


def fused_sigmoid_mul(
    attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False
) -> Tensor:
    """attn_output [T, H * D] times sigmoid(gate [T, H, D] or [T, H * D])."""
    if quant:
        raise NotImplementedError("Quantising attention outputs needs an accelerator.")
    factor = gate.reshape(attn_output.shape).sigmoid()
    return attn_output.mul_(factor) if inplace else attn_output * factor


def split_projections(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[q | k | v | z] and [b | a] -> qkv [T, C], z [T, H, V], b, a [T, H]."""
    gate = num_heads_v * head_v
    qkv, z = mixed_qkvz.split([mixed_qkvz.shape[-1] - gate, gate], -1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], -1)
    return qkv, z.unflatten(-1, (num_heads_v, head_v)), b, a


def forward_extend(original: Callable[..., Tensor], self: Any, *args: Any, **kw: Any) -> Tensor:
    forward_batch = args[1] if len(args) > 1 else kw["forward_batch"]
    if INTERPRETED and forward_batch.forward_mode.is_target_verify():
        return original(self, *args, **kw)  # to see SGLang's own kernels verify a tree
    return delta_net.forward_extend(self, *args, **kw)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GDN = "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend"
FORWARD = ("self", "layer", "forward_batch", "mixed_qkv", "a", "b", "kwargs")

PATCHES = (
    Patch(
        target=f"{GDN}.forward_decode",
        hook=delta_net.forward_decode,
        kind="replace",
        scope="cpu",
        parameters=FORWARD,
        reason="launches Triton kernels",
        without="no hybrid model can be served on the CPU",
    ),
    Patch(
        target=f"{GDN}.forward_extend",
        hook=forward_extend,
        kind="around",
        scope="cpu",
        parameters=FORWARD,
        reason="launches Triton kernels",
        without="no hybrid model can be served on the CPU",
    ),
    Patch(
        target="sglang.kernels.ops.mamba.mamba_state_scatter_triton"
        ".scatter_mamba_states_after_mtp_verify",
        hook=delta_net.commit,
        kind="replace",
        scope="cpu",
        parameters=(
            "mamba_caches",
            "state_indices_tensor",
            "last_correct_step_indices",
            "mamba_track_indices",
            "mamba_steps_to_track",
            "src_indices_raw",
        ),
        reason="launches a Triton kernel",
        without="no path through a hybrid target can be committed on the CPU",
    ),
    Patch(
        target="sglang.kernels.ops.attention.fla.layernorm_gated.layernorm_fn",
        hook=layernorm_fn,
        kind="replace",
        scope="cpu",
        parameters=(
            "x",
            "weight",
            "bias",
            "z",
            "eps",
            "group_size",
            "norm_before_gate",
            "is_rms_norm",
            "activation",
        ),
        reason="launches a Triton kernel",
        without="no hybrid model can be served on the CPU",
    ),
    Patch(
        target="sglang.kernels.ops.elementwise.elementwise.fused_sigmoid_mul",
        hook=fused_sigmoid_mul,
        kind="replace",
        scope="cpu",
        parameters=("attn_output", "gate", "inplace", "quant"),
        reason="launches a Triton kernel",
        without="no hybrid model can be served on the CPU",
    ),
    Patch(
        target="sglang.kernels.ops.attention.triton_gdn_fused_proj"
        ".fused_qkvzba_split_reshape_cat_contiguous",
        hook=split_projections,
        kind="replace",
        scope="cpu",
        parameters=(
            "mixed_qkvz",
            "mixed_ba",
            "num_heads_qk",
            "num_heads_v",
            "head_qk",
            "head_v",
        ),
        reason="launches a Triton kernel",
        without="no hybrid model can be served on the CPU",
    ),
)
