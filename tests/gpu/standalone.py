"""Every kernel against torch, and its time against its floor. Needs torch, triton and this checkout.

    python tests/gpu/standalone.py                        # on a GPU: checks, then a table
    python tests/gpu/standalone.py --check-only --interpret   # on a CPU, small sizes

Shapes are those of the Qwen3.8 drafter: K 16, rank 256, D 7, 248,320 words, 5,120 channels. A floor is
the larger of bytes over bandwidth and operations over rate (`kernels/floors.py`), with the time of an
empty launch for every launch. Inputs may lie in the L2 cache, as they do in a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]


class Options(NamedTuple):
    batches: list[int]
    nodes: list[int]
    check_only: bool
    interpret: bool
    bandwidth: float | None
    rate: float
    repeats: int


class Row(NamedTuple):
    name: str
    batch: int
    nodes: int | None
    pair: Any
    tolerance: float | None  # None: equal
    floor: Any


def options(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--check-only", action="store_true", help="no timings")
    parser.add_argument("--interpret", action="store_true", help="on a CPU, with small sizes")
    parser.add_argument("--bandwidth", type=float, help="of memory, in GB/s; default: the device's")
    parser.add_argument("--rate", type=float, default=20.0, help="float32 operations, in T/s")
    parser.add_argument("--repeats", type=int, default=50, help="calls in a CUDA graph")
    found = Options(**vars(parser.parse_args(arguments)))
    if found.interpret and not found.check_only:
        parser.error("--interpret takes --check-only: the interpreter's times say nothing")
    return found


def rows(o: Options) -> Iterator[Row]:
    """Each with inputs of its own, which are freed when the next one is made."""
    import torch
    from drawn_cases import FILTERS, drawn_case
    from kernel_cases import (
        Maker,
        Sizes,
        conv_pair,
        greedy_pair,
        lattice_pair,
        sampled_pair,
        tree_pair,
    )

    from dflash2_sglang.kernels import floors

    device = "cpu" if o.interpret else "cuda"
    large = (32, 300, 128, 16) if o.interpret else (256, 248320, 5120, 128)
    rank, vocab, channels, group = large
    half = torch.bfloat16
    for b in o.batches:
        s = Sizes(b, 7, 16, 2, 16, rank, vocab, channels, group, 2, 8)
        m = Maker(b, device)
        yield Row(
            "lattice", b, None, lattice_pair(m, s, half, True), 1e-4, floors.lattice(b, 7, 16, rank)
        )
        plain = lattice_pair(m, s, torch.float32, True, "none")
        yield Row("lattice, no selector", b, None, plain, 1e-4, floors.plain_lattice(b, 7, 16))
        floor = floors.convolve(b, 8, channels, 2, channels // group)
        # Cut instead of rounded by the interpreter: one step of bfloat16.
        yield Row("convolution", b, None, conv_pair(m, s, half, 0), 2.0**-7, floor)
        for n in o.nodes:
            s, p = s._replace(nodes=n), 8
            yield Row("tree", b, n, tree_pair(m, s, "random"), None, floors.tree(b, 16, n))
            floor = floors.drawn_tree(b, 7, 16, n)
            for name, filters in (("drawn tree", ()), ("drawn tree, filtered", FILTERS)):
                case = drawn_case(m, s, "random", heat=True, filters=filters)
                yield Row(name, b, n, case, None, floor)
            greedy = floors.greedy_walk(b, n, p)
            yield Row("greedy walk", b, n, greedy_pair(m, s, "best"), None, greedy)
            for name, random in (("sampled walk", False), ("random children", True)):
                pair = sampled_pair(m, s, "best", mixed=False, random=random)
                floor = floors.sampling_walk(b, n, p, vocab, 16 * random)
                yield Row(name, b, n, pair, None, floor)


def check(row: Row) -> None:
    from drawn_cases import DrawnCase, compare
    from kernel_cases import require_close, require_equal

    if isinstance(row.pair, DrawnCase):
        compare(row.pair)
    elif row.tolerance is None:
        require_equal(row.pair)
    else:
        require_close(row.pair, row.tolerance)


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Of one call: `repeats` of them in a CUDA graph, the median of nine replays."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    graph.replay()
    times = []
    for _ in range(9):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / repeats)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes/s of the device's memory: what it says of itself, else of a large copy."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    clock = getattr(properties, "memory_clock_rate", 0)  # kHz
    width = getattr(properties, "memory_bus_width", 0)  # bits
    if clock and width:
        return 2 * clock * 1e3 * width / 8
    x = torch.empty(2**28, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / seconds(lambda: y.copy_(x), 5)


def empty_launch(repeats: int) -> float:
    import torch
    import triton

    one = torch.zeros(1, device="cuda")

    def nothing(x_ptr):
        pass

    kernel = triton.jit(nothing)
    return seconds(lambda: kernel[(1,)](one), repeats)


def main(o: Options) -> int:
    # Both are read when triton and the package are first used.
    os.environ["DFLASH2_KERNELS"] = "triton"
    if o.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import triton

    if not o.interpret and not torch.cuda.is_available():
        print("No CUDA device. On a CPU: --check-only --interpret.")
        return 2
    speed, launch = 0.0, 0.0
    name = "CPU, interpreted" if o.interpret else torch.cuda.get_device_name(0)
    print(f"{name}; torch {torch.__version__}, triton {triton.__version__}")
    if not o.check_only:
        speed = o.bandwidth * 1e9 if o.bandwidth else bandwidth()
        launch = empty_launch(o.repeats)
        print(
            f"memory {speed / 1e9:.0f} GB/s, {o.rate:g} T operations/s, "
            f"an empty launch {launch * 1e6:.1f} us\n"
        )
        print("| kernel | B | N | correct | time, us | floor, us | ratio | torch, us |")
        print("|---|---|---|---|---|---|---|---|")
    else:
        print("| kernel | B | N | correct |\n|---|---|---|---|")
    failures = 0
    for row in rows(o):
        try:
            check(row)
            verdict = "yes"
        except AssertionError as error:
            failures += 1
            verdict = f"NO: {' '.join(str(error).split())[:120]}"
        line = f"| {row.name} | {row.batch} | {row.nodes or ''} | {verdict} |"
        if not o.check_only:
            time = seconds(row.pair.ours, o.repeats) * 1e6
            least = row.floor.seconds(speed, o.rate * 1e12, launch) * 1e6
            line += f" {time:.1f} | {least:.1f} | {time / least:.1f} |"
            line += f" {seconds(row.pair.torch, 5) * 1e6:.1f} |"
        print(line, flush=True)
    print(f"\n{failures} wrong" if failures else "\nall correct")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(options()))
