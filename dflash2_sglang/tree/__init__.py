"""The method itself: lattice, tree, walk. Needs torch only and knows nothing of the engine."""

from dflash2_sglang.tree.accept import Walk, greedy_walk, mixed_walk, sampling_walk
from dflash2_sglang.tree.build import Tree, build_tree, capacity
from dflash2_sglang.tree.convolution import convolve
from dflash2_sglang.tree.lattice import Lattice, build_lattice, pair_scores, selector_lattice

__all__ = [
    "Lattice",
    "Tree",
    "Walk",
    "build_lattice",
    "build_tree",
    "capacity",
    "convolve",
    "greedy_walk",
    "mixed_walk",
    "pair_scores",
    "sampling_walk",
    "selector_lattice",
]
