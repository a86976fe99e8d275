"""The convolution kernel against torch. Run by test_interpreted.py."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import Maker, Sizes, conv_pair, require_close
from quick_interpreter import install

from dflash2_sglang import kernels

torch.set_num_threads(1)
install()

# The interpreter cuts where a GPU rounds, so bfloat16 results may be one step apart.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    group, groups = draw(st.integers(1, 40)), draw(st.integers(1, 9))
    block, taps = draw(st.integers(1, 32)), draw(st.integers(1, 4))
    batch = draw(st.integers(1, max(1, 64 // block)))
    return Sizes(batch, 3, 4, 2, 1, channels=group * groups, group=group, taps=taps, block=block)


@settings(max_examples=150, deadline=None)
@given(sizes(), st.integers(0, 999), st.sampled_from([*TOLERANCE]), st.integers(0, 1))
@example(Sizes(64, 3, 4, 2, 1), 0, torch.float32, 1)
@example(Sizes(2, 3, 4, 2, 1, channels=5120, group=128), 1, torch.bfloat16, 0)
def test_convolution(s: Sizes, seed: int, dtype: torch.dtype, side: int) -> None:
    require_close(conv_pair(Maker(seed), s, dtype, side), TOLERANCE[dtype])


def test_no_tap_reaches_into_the_block_before() -> None:
    m = Maker(0)
    parts = (m.normal(12, 2, 3, 1), m.normal(2, 3, 8), 0, 4)
    x = m.normal(12, 8)
    want = kernels.convolve(x, *parts)
    x[:4], x[8:] = torch.nan, torch.nan
    assert torch.equal(kernels.convolve(x, *parts)[4:8], want[4:8])


def test_no_requests() -> None:
    require_close(conv_pair(Maker(0), Sizes(0, 3, 4, 2, 1), torch.float32, 0), 0)
