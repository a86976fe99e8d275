"""SGLang's own Triton kernels of a gated delta net on a tree, under Triton's interpreter.

Run with TRITON_INTERPRET=1: prints the greatest difference to the torch functions, kernel by kernel.
"""

from __future__ import annotations

import json

import torch
from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update,
)
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

from dflash2_sglang.cpu import gated_delta
from dflash2_sglang.tree.build import ancestor_mask, links

BATCH, KEY_HEADS, HEADS, SIZE, WIDTH, SLOTS = 3, 2, 4, 16, 4, 5
CHANNELS = 2 * KEY_HEADS * SIZE + HEADS * SIZE


def compare(nodes: int, seed: int) -> dict[str, float]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    parent = torch.stack([random_tree(nodes, g) for _ in range(BATCH)])
    first_child, next_sibling = links(parent)
    slots = torch.tensor([4, 2, 1], dtype=torch.int32)
    rows = torch.arange(BATCH, dtype=torch.int32)
    found: dict[str, float] = {}

    x, weight, conv = (
        normal(BATCH, nodes, CHANNELS),
        normal(CHANNELS, WIDTH),
        normal(SLOTS, CHANNELS, 3),
    )
    columns = gated_delta.windows(parent, nodes, WIDTH, x.device)
    out, windows = gated_delta.convolve_nodes(x, weight, None, conv[slots.long()], columns)
    kept = torch.zeros(BATCH + 1, nodes, CHANNELS, WIDTH - 1)
    parents = torch.empty_like(first_child)
    theirs = causal_conv1d_update(
        x.mT.contiguous(),
        conv,
        weight,
        None,
        "silu",
        conv_state_indices=slots,
        intermediate_conv_window=kept,
        intermediate_state_indices=rows,
        retrieve_next_token=first_child,
        retrieve_next_sibling=next_sibling,
        retrieve_parent_token=parents,
    )
    found["convolution"] = distance(theirs.mT, torch.nn.functional.silu(out))
    found["windows"] = distance(kept[:BATCH], windows)
    found["parents"] = distance(parents[:, 1:].float(), parent[:, 1:].float())

    q, k = normal(BATCH, nodes, KEY_HEADS, SIZE), normal(BATCH, nodes, KEY_HEADS, SIZE)
    v, a, b = (
        normal(BATCH, nodes, HEADS, SIZE),
        normal(BATCH, nodes, HEADS),
        normal(BATCH, nodes, HEADS),
    )
    a_log, dt_bias = normal(HEADS), normal(HEADS)
    state = normal(SLOTS, HEADS, SIZE, SIZE)
    gate = gated_delta.gates(a_log, a, b, dt_bias)
    seen = ancestor_mask(parent, nodes)
    out, states = gated_delta.nodes(state[slots.long()], q, k, v, *gate, seen)
    after = torch.zeros(BATCH + 1, nodes, HEADS, SIZE, SIZE)
    theirs = fused_sigmoid_gating_delta_rule_update(
        A_log=a_log,
        a=a.flatten(0, 1),
        dt_bias=dt_bias,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=q.view(1, -1, KEY_HEADS, SIZE),
        k=k.view(1, -1, KEY_HEADS, SIZE),
        v=v.view(1, -1, HEADS, SIZE),
        b=b.flatten(0, 1),
        initial_state_source=state,
        initial_state_indices=slots,
        cu_seqlens=torch.arange(0, BATCH * nodes + 1, nodes, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
        disable_state_update=True,
        intermediate_states_buffer=after,
        intermediate_state_indices=rows,
        cache_steps=nodes,
        retrieve_parent_token=parents,
    )
    found["out"] = distance(theirs.view_as(out), out)
    found["states"] = distance(after[:BATCH], states)
    return found


def random_tree(nodes: int, g: torch.Generator) -> torch.Tensor:
    """Every node but the root below an earlier one."""
    drawn = [int(torch.randint(0, max(i, 1), (), generator=g)) for i in range(nodes)]
    return torch.tensor([-1, *drawn[1:]])


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return (ours - theirs).abs().max().item()


if __name__ == "__main__":
    print("FOUND", json.dumps([compare(nodes, seed) for seed, nodes in enumerate((2, 5, 16))]))
