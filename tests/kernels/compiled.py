"""Compiles every kernel for an NVIDIA GPU, which takes none, and prints what each needs of one.

The launches are those of the kernels' own callers, on inputs of the given sizes; instead of running,
each is compiled as Triton would for these arguments. Run by test_compiled.py.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
import triton
from kernel_cases import Maker, Sizes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from dflash2_sglang.kernels import conv, drawn_tree, lattice, tree, walk
from dflash2_sglang.kernels.dispatch import MOST_CANDIDATES

OPTIONS = ("num_warps", "num_stages")


def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Takes the place of JITFunction.run."""
    options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
    given = dict(zip(self.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(self.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[(place,)] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        whole = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if whole % 16 == 0:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(self, signature, constants, attributes)
    found = triton.compile(source, target=GPUTarget("cuda", TARGET, 32), options=options)
    ptx = found.asm["ptx"]
    local = [int(x) for x in re.findall(r"\.local \.align \d+ \.b8 \S+\[(\d+)\]", ptx)]
    shared, warps = found.metadata.shared, found.metadata.num_warps
    print(
        f"{self.__name__} warps {warps} shared {shared} local {sum(local)} cubin {len(found.asm['cubin'])}"
    )


def launch_widest(dtype: torch.dtype) -> None:
    """The lattice of as many candidates as are given to a kernel: the one that needs most of a GPU."""
    m, s = Maker(0), Sizes(1, 7, MOST_CANDIDATES, 64, 16, 256, 5000, 512, 128, 2, 8)
    books = [m.normal(s.vocab, s.rank, dtype=dtype) for _ in range(2)]
    hidden, anchor = m.normal(s.batch, s.depth, s.rank, dtype=dtype), m.integers(0, 9, s.batch)
    unary, norm = m.normal(s.batch, s.depth, s.width), m.normal(s.batch, s.depth)
    lattice.selector_lattice(m.tokens(s), unary, norm, None, anchor, hidden, *books)


def launch_all(s: Sizes, dtype: torch.dtype) -> None:
    m = Maker(0)
    tokens, unary = m.tokens(s), m.normal(s.batch, s.depth, s.width)
    norm, heat = m.normal(s.batch, s.depth), 1 + m.uniform(s.batch)
    pair = m.normal(s.batch, s.depth, s.width, s.width)
    anchor = m.integers(0, s.vocab, s.batch)
    books = [m.normal(s.vocab, s.rank, dtype=dtype) for _ in range(2)]
    hidden = m.normal(s.batch, s.depth, s.rank, dtype=dtype)
    lattice.selector_lattice(tokens, unary, norm, heat, anchor, hidden, *books)
    lattice.build_lattice(tokens, unary, norm, None, pair)
    lattice.build_lattice(tokens, unary, norm, heat)
    tree.build_tree(m.lattice(s, "random"), anchor, s.nodes, s.children)
    for draws in (m.draws(s), m.draws(s, heat=True, filters=("top_k", "top_p", "min_p"))):
        drawn_tree.build_tree(m.lattice(s, "random"), anchor, s.nodes, s.children, draws)

    t = m.tree(s, "best")
    nodes = (t.tokens, t.parent, t.mask, t.depth)
    walk.greedy_walk(*nodes, t.tokens, s.depth)
    probs = m.target(s, t, False)
    proposal = m.proposal(s, t, probs, False)
    coins = m.uniform(s.batch, 2 * s.depth + 1)
    drawn = (coins[:, : s.depth], coins[:, -1])
    greedy, rest = m.uniform(s.batch) < 0.5, (proposal, coins[:, s.depth : -1])
    for some in (probs, probs.to(dtype)):
        walk.sampling_walk(*nodes, some, *drawn, s.depth)
        walk.sampling_walk(*nodes, some, *drawn, s.depth, *rest)
    walk.mixed_walk(*nodes, t.tokens, probs, *drawn, greedy, s.depth)
    walk.mixed_walk(*nodes, t.tokens, probs, *drawn, greedy, s.depth, *rest)

    rows, groups = s.batch * s.block, s.channels // s.group
    x, base = m.normal(rows, s.channels, dtype=dtype), m.normal(2, s.taps, s.channels)
    delta = m.normal(rows, 2, s.taps, groups, dtype=dtype)
    conv.convolve(x, delta, base, 0, s.block)


if __name__ == "__main__":
    TARGET = int(sys.argv[1])
    JITFunction.run = launch
    launch_all(Sizes(2, 7, 16, 64, 16, 256, 5000, 5120, 128, 2, 8), torch.bfloat16)
    launch_all(Sizes(1, 3, 5, 6, 3, 20, 300, 48, 8, 3, 5), torch.float32)
    launch_widest(torch.float32)
    launch_all(Sizes(3, 15, 32, 128, 32, 64, 300, 64, 16, 1, 16), torch.float32)
    print("all compiled")
