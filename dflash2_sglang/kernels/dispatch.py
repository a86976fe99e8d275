"""Which implementation runs: the Triton kernel for tensors on a GPU, torch for all others.

The environment variable DFLASH2_KERNELS, read at every call, overrides it: ``torch`` never launches
a kernel, ``triton`` always does, which on a CPU needs TRITON_INTERPRET=1 (for tests; slow).
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from dflash2_sglang.tree import accept, build, convolution, lattice
from dflash2_sglang.tree.accept import Walk
from dflash2_sglang.tree.build import Tree
from dflash2_sglang.tree.draw import Draws, Proposal
from dflash2_sglang.tree.lattice import Lattice

SWITCH = "DFLASH2_KERNELS"
# A program holds a whole tree in registers, and a position's pairs of candidates in shared memory: 82 kB
# for 64, where a GPU has 99 kB at the least.
MOST_NODES, MOST_CANDIDATES = 256, 64


def uses_triton(tensor: Tensor) -> bool:
    """Whether a kernel is launched for a tensor on this device."""
    choice = os.environ.get(SWITCH, "auto")
    if choice not in ("auto", "torch", "triton"):
        raise ValueError(f"{SWITCH} must be auto, torch or triton, got {choice!r}.")
    if choice != "triton":
        return choice == "auto" and tensor.is_cuda and _has_triton()
    if tensor.is_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"{SWITCH}=triton needs TRITON_INTERPRET=1 for tensors on a CPU.")
    return True


@cache
def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None


def build_lattice(
    tokens: Tensor,
    unary: Tensor,
    log_norm: Tensor,
    temperature: Tensor | None = None,
    pair: Tensor | None = None,
) -> Lattice:
    """See `tree.lattice.build_lattice`."""
    if not (uses_triton(tokens) and tokens.shape[-1] <= MOST_CANDIDATES):
        return lattice.build_lattice(tokens, unary, log_norm, temperature, pair)
    from dflash2_sglang.kernels import lattice as triton

    return triton.build_lattice(tokens, unary, log_norm, temperature, pair)


def selector_lattice(
    tokens: Tensor,
    unary: Tensor,
    log_norm: Tensor,
    temperature: Tensor | None,
    anchor: Tensor,
    hidden_codes: Tensor,
    predecessors: Tensor,
    successors: Tensor,
) -> Lattice:
    """See `tree.lattice.selector_lattice`."""
    parts = (tokens, unary, log_norm, temperature, anchor, hidden_codes, predecessors, successors)
    if not (uses_triton(tokens) and tokens.shape[-1] <= MOST_CANDIDATES):
        return lattice.selector_lattice(*parts)
    from dflash2_sglang.kernels import lattice as triton

    return triton.selector_lattice(*parts)


def build_tree(
    lattice: Lattice,
    anchor: Tensor,
    num_nodes: int,
    max_children: int,
    draws: Draws | None = None,
) -> Tree:
    """See `tree.build.build_tree`."""
    small = num_nodes <= MOST_NODES and lattice.tokens.shape[-1] <= MOST_CANDIDATES
    exact = lattice.log_probs.dtype == torch.float32
    if not (small and exact and uses_triton(anchor)):
        return build.build_tree(lattice, anchor, num_nodes, max_children, draws)
    if draws is None:
        from dflash2_sglang.kernels import tree as triton

        return triton.build_tree(lattice, anchor, num_nodes, max_children)
    from dflash2_sglang.kernels import drawn_tree

    return drawn_tree.build_tree(lattice, anchor, num_nodes, max_children, draws)


def greedy_walk(
    tokens: Tensor,
    parent: Tensor,
    mask: Tensor,
    depth: Tensor,
    target_next: Tensor,
    max_depth: int,
) -> Walk:
    """See `tree.accept.greedy_walk`."""
    if not (uses_triton(tokens) and tokens.shape[1] <= MOST_NODES):
        return accept.greedy_walk(tokens, parent, mask, depth, target_next, max_depth)
    from dflash2_sglang.kernels import walk as triton

    return triton.greedy_walk(tokens, parent, mask, depth, target_next, max_depth)


def sampling_walk(
    tokens: Tensor,
    parent: Tensor,
    mask: Tensor,
    depth: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    max_depth: int,
    proposal: Proposal | None = None,
    random_coins: Tensor | None = None,
) -> Walk:
    """See `tree.accept.sampling_walk`."""
    parts = (tokens, parent, mask, depth, target_probs, coins, final_coins, max_depth)
    if not (uses_triton(tokens) and tokens.shape[1] <= MOST_NODES):
        return accept.sampling_walk(*parts, proposal, random_coins)
    from dflash2_sglang.kernels import walk as triton

    return triton.sampling_walk(*parts, proposal, random_coins)


def mixed_walk(
    tokens: Tensor,
    parent: Tensor,
    mask: Tensor,
    depth: Tensor,
    target_next: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    is_greedy: Tensor,
    max_depth: int,
    proposal: Proposal | None = None,
    random_coins: Tensor | None = None,
) -> Walk:
    """See `tree.accept.mixed_walk`."""
    parts = (tokens, parent, mask, depth, target_next, target_probs, coins, final_coins, is_greedy)
    if not (uses_triton(tokens) and tokens.shape[1] <= MOST_NODES):
        return accept.mixed_walk(*parts, max_depth, proposal, random_coins)
    from dflash2_sglang.kernels import walk as triton

    return triton.mixed_walk(*parts, max_depth, proposal, random_coins)


def convolve(x: Tensor, delta: Tensor, base: Tensor, side: int, block_size: int) -> Tensor:
    """See `tree.convolution.convolve`."""
    if not uses_triton(x):
        return convolution.convolve(x, delta, base, side, block_size)
    from dflash2_sglang.kernels import conv as triton

    return triton.convolve(x, delta, base, side, block_size)
