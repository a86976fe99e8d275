"""Every kernel against torch on a GPU. Skipped where there is none; see docs/kernels.md."""

from __future__ import annotations

import itertools

import pytest
import torch
from drawn_cases import FILTERS, compare, drawn_case, parts
from kernel_cases import (
    KINDS,
    Maker,
    Sizes,
    conv_pair,
    greedy_pair,
    lattice_pair,
    require_close,
    require_equal,
    sampled_pair,
    tree_pair,
)

from dflash2_sglang import kernels

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"
)

BATCHES, NODES = [1, 8, 32, 64], [2, 8, 16, 64, 128, 200]
DTYPES = [torch.float32, torch.bfloat16]


def _sizes(batch: int, nodes: int = 16, width: int = 16, depth: int = 7) -> Sizes:
    return Sizes(batch, depth, width, nodes, width, 256, 5000, 5120, 128, 2, 8)


def _repeats(pair) -> None:  # type: ignore[no-untyped-def]
    one, two = pair.ours(), pair.ours()
    parts = [(one, two)] if isinstance(one, torch.Tensor) else zip(one, two, strict=True)
    assert all(x is None or torch.equal(x, y) for x, y in parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", ["codes", "pair", "none"])
@pytest.mark.parametrize("batch", BATCHES)
def test_lattice(batch: int, source: str, dtype: torch.dtype) -> None:
    for width, depth in ((4, 3), (16, 7), (32, 31)):
        s = _sizes(batch, width=width, depth=depth)
        pair = lattice_pair(Maker(batch, "cuda"), s, dtype, True, source)
        require_close(pair, 1e-4)
        _repeats(pair)


@pytest.mark.parametrize("kind", KINDS)
def test_tree(kind: str) -> None:
    shapes = itertools.product(BATCHES, NODES, ((6, 3), (16, 7), (32, 31)))
    for batch, nodes, (width, depth) in shapes:
        s = _sizes(batch, nodes, width, depth)
        require_equal(tree_pair(Maker(nodes, "cuda"), s, kind))


@pytest.mark.parametrize("filters", [(), FILTERS])
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_tree(kind: str, filters: tuple[str, ...]) -> None:
    """Trees that hang on rounding are few, and the same every time all the same."""
    found = []
    shapes = itertools.product(BATCHES, NODES, ((6, 3), (16, 7), (32, 31)))
    for batch, nodes, (width, depth) in shapes:
        s = _sizes(batch, nodes, width, depth)
        case = drawn_case(Maker(nodes, "cuda"), s, kind, heat=True, filters=filters)
        found.append(compare(case))
        one, two = parts(case.ours()), parts(case.ours())
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
    compared, aside = (sum(x) for x in zip(*found, strict=True))
    assert aside <= 0.2 * compared  # on a CPU: 1 in 10 where many paths tie, else hardly any


@pytest.mark.parametrize("kind", ["random", "chain", "best"])
def test_greedy_walk(kind: str) -> None:
    for batch, nodes in itertools.product(BATCHES, NODES):
        require_equal(greedy_pair(Maker(nodes, "cuda"), _sizes(batch, nodes), kind))


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["random", "best"])
def test_sampled_walk(kind: str, exact: bool, mixed: bool, random: bool) -> None:
    for batch, nodes in itertools.product(BATCHES, NODES):
        m, s = Maker(nodes, "cuda"), _sizes(batch, nodes)
        pair = sampled_pair(m, s, kind, mixed=mixed, random=random, exact=exact)
        require_equal(pair)
        _repeats(pair)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block", "taps"), [(1, 2), (5, 3), (8, 2), (16, 2), (17, 4), (32, 1)])
def test_convolution(block: int, taps: int, dtype: torch.dtype) -> None:
    # The two may round a float32 sum to neighbouring bfloat16.
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
    for batch in BATCHES:
        s = _sizes(batch)._replace(block=block, taps=taps)
        pair = conv_pair(Maker(batch, "cuda"), s, dtype, 1)
        require_close(pair, tolerance)
        _repeats(pair)


def test_a_gpu_uses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH2_KERNELS", raising=False)
    assert kernels.uses_triton(torch.zeros(1, device="cuda"))


def test_a_call_in_a_cuda_graph_reads_its_inputs_anew() -> None:
    m, s = Maker(0, "cuda"), _sizes(4)
    lattice, other = m.lattice(s, "random"), m.lattice(s, "ties")
    anchor = m.integers(0, 9, 4)
    kernels.build_tree(lattice, anchor, 16, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.build_tree(lattice, anchor, 16, 16)
    lattice.tokens.copy_(other.tokens)
    lattice.log_probs.copy_(other.log_probs)
    graph.replay()
    want = kernels.build_tree(other, anchor, 16, 16)
    assert all(torch.equal(x, y) for x, y in zip(found[:-1], want[:-1], strict=True))


def test_random_children_in_a_cuda_graph_are_drawn_anew() -> None:
    s = _sizes(4)
    case, other = (
        drawn_case(Maker(seed, "cuda"), s, "random", heat=True, filters=FILTERS) for seed in (1, 2)
    )
    case.ours()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.ours()
    for x, y in zip((*case.lattice, *case.draws), (*other.lattice, *other.draws), strict=True):
        x.copy_(y)
    case.anchor.copy_(other.anchor)
    graph.replay()
    pairs = zip(parts(found), parts(other.ours()), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("padding", [0, 64])
def test_radix_top_k(padding: int) -> None:
    """Also of a head whose padding is cut off, whose rows do not follow one another."""
    pytest.importorskip("sglang")
    from dflash2_sglang.candidates import radix_top_k

    logits = torch.randn(56, 248320 + padding, device="cuda")[:, :248320]
    values, index = radix_top_k(logits, 16)
    want, where = logits.topk(16)
    assert index.dtype == torch.int64
    assert torch.equal(values, want) and torch.equal(index, where)
