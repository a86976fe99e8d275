"""The functions of `tree`, each with a Triton kernel where the tensors are on a GPU.

Same signatures, same results. Needs torch and `tree` only; triton is imported by the first call that
launches a kernel.
"""

from dflash2_sglang.kernels.dispatch import (
    build_lattice,
    build_tree,
    convolve,
    greedy_walk,
    mixed_walk,
    sampling_walk,
    selector_lattice,
    uses_triton,
)

__all__ = [
    "build_lattice",
    "build_tree",
    "convolve",
    "greedy_walk",
    "mixed_walk",
    "sampling_walk",
    "selector_lattice",
    "uses_triton",
]
