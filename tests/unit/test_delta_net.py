"""Gated delta net layers: every node of a tree is as if its path had been decoded alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from delta_backend import CHANNELS, HEADS, KEY, KEY_HEADS, VALUE, Backend, tree_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from dflash2_sglang.cpu import delta_net, gated_delta
from dflash2_sglang.tree.build import ancestor_mask

CLOSE = {"rtol": 2e-4, "atol": 2e-5}

trees = st.integers(1, 40).flatmap(
    lambda n: st.tuples(*(st.integers(-1 if i == 0 else 0, max(i - 1, -1)) for i in range(n)))
)


def paths(parent: list[int]) -> list[list[int]]:
    """Of each node, the nodes from the root to it."""
    found: list[list[int]] = []
    for node, above in enumerate(parent):
        found.append([*(found[above] if above >= 0 else []), node])
    return found


def inputs(seed: int, *shape: int) -> tuple[Tensor, ...]:
    """q, k, v, log decay and strength; decays from none to almost everything."""
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(*shape, KEY_HEADS, KEY, generator=g) for _ in range(2))
    v = torch.randn(*shape, HEADS, VALUE, generator=g)
    decay = -torch.rand(*shape, HEADS, generator=g).pow(4) * 6
    return q, k, v, decay, torch.rand(*shape, HEADS, generator=g)


def reference(state: Tensor, *tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens one after the other, as transformers has it; states there are [K, V]."""
    q, k, v, decay, strength = (x.unsqueeze(0) for x in tokens)
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (q, k))
    out, after = torch_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=decay,
        beta=strength,
        initial_state=state.mT.unsqueeze(0),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], after[0].mT


@given(parent=trees, seed=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_each_node_is_its_path_alone(parent: tuple[int, ...], seed: int) -> None:
    state = torch.randn(1, HEADS, VALUE, KEY, generator=torch.Generator().manual_seed(seed))
    tokens = inputs(seed, 1, len(parent))
    seen = ancestor_mask(torch.tensor([parent]), len(parent))
    out, states = gated_delta.nodes(state, *tokens, seen)
    for node, path in enumerate(paths(list(parent))):
        expected, after = reference(state[0], *(x[0, path] for x in tokens))
        torch.testing.assert_close(out[0, node], expected[-1], **CLOSE)
        torch.testing.assert_close(states[0, node], after, **CLOSE)


@given(parent=trees, seed=st.integers(0, 1 << 30), width=st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_each_node_is_convolved_with_its_ancestors(
    parent: tuple[int, ...], seed: int, width: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, len(parent), 6, generator=g)
    weight, bias = torch.randn(6, width, generator=g), torch.randn(6, generator=g)
    before = torch.randn(1, 6, width - 1, generator=g)
    columns = gated_delta.windows(torch.tensor([parent]), len(parent), width, x.device)
    out, windows = gated_delta.convolve_nodes(x, weight, bias, before, columns)
    for node, path in enumerate(paths(list(parent))):
        expected, after = gated_delta.convolve_prompt(x[0, path], weight, bias, before[0])
        torch.testing.assert_close(out[0, node], expected[-1])
        assert windows[0, node].equal(after)


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130, 200])
def test_prompts(length: int) -> None:
    """In chunks, as token by token; and the state before each chunk."""
    state = torch.randn(HEADS, VALUE, KEY, generator=torch.Generator().manual_seed(1))
    tokens = inputs(length, length)
    out, after, starts = gated_delta.prompt(state, *tokens)
    expected, last = reference(state, *tokens)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(after, last, **CLOSE)
    assert len(starts) == -(-length // gated_delta.CHUNK)
    for number, start in enumerate(starts):
        _, there = reference(state, *(x[: number * gated_delta.CHUNK] for x in tokens))
        torch.testing.assert_close(start, there, **CLOSE)


@given(batch=st.integers(1, 4), seed=st.integers(0, 1 << 30))
@settings(max_examples=20, deadline=None)
def test_one_token(batch: int, seed: int) -> None:
    state = torch.randn(batch, HEADS, VALUE, KEY, generator=torch.Generator().manual_seed(seed))
    tokens = inputs(seed, batch)
    out, after = gated_delta.step(state, *tokens)
    for row in range(batch):
        expected, there = reference(state[row], *(x[row : row + 1] for x in tokens))
        torch.testing.assert_close(out[row], expected[0], **CLOSE)
        torch.testing.assert_close(after[row], there, **CLOSE)


# In SGLang's backend.

BRANCHING = [[-1, 0, 0, 1, 2, 2, 4, 3], [-1, 0, 1, 2, 0, 4, 4, 0]]
CHAIN = [list(range(-1, 7))] * 2


def two_rounds(
    parent: list[list[int]],
    *,
    verified: list[list[int]] | None,
    shared: bool = False,
    shift: int = 0,
) -> None:
    """Verify a tree, keep a path, verify another; each step against decoding the path.

    ``verified`` is the tree that the layers are told of, ``shift`` a fault in the commit.
    """
    g = torch.Generator().manual_seed(3)
    slots, kept = torch.tensor([3, 1]), torch.tensor([4, -1])
    ours, plain = (Backend(6, 8, shared_windows=shared and n == 0) for n in range(2))
    for _ in range(2):
        x = torch.randn(2, 8, CHANNELS, generator=g)
        a, b = (torch.randn(2, 8, HEADS, generator=g) for _ in range(2))
        out = ours.verify(slots, tree_of(verified), x, a, b)
        chosen = [paths(parent[0])[6], paths(parent[1])[3]]
        before = [tuple(part.clone() for part in ours.states(int(slot))) for slot in slots]
        for row, path in enumerate(chosen):
            slot = slots[row : row + 1]
            for node in path:
                now = (part[row : row + 1, node] for part in (x, a, b))
                torch.testing.assert_close(out[row, node], plain.decode(slot, *now)[0], **CLOSE)
            assert all(map(torch.equal, before[row], ours.states(int(slot))))  # as they were
        ends = torch.tensor([path[-1] for path in chosen])
        ours.commit(slots, ends + shift, kept, torch.tensor([chosen[0][1], chosen[1][1]]))
        for slot in slots.tolist():
            for mine, theirs in zip(ours.states(slot), plain.states(slot), strict=True):
                torch.testing.assert_close(mine, theirs, **CLOSE)
    # The snapshot is of the second node of the first request's path, and nobody else's was taken.
    conv, _ = ours.states(4)
    assert conv[:, -1].equal(x[0, chosen[0][1]])
    assert ours.states(5)[0].equal(plain.states(5)[0])


def test_rounds_through_trees() -> None:
    two_rounds(BRANCHING, verified=BRANCHING)


@pytest.mark.parametrize("shared", [False, True], ids=["own windows", "shared windows"])
def test_rounds_through_chains(shared: bool) -> None:
    """The stock chain tells no tree, and SGLang may keep overlapping windows for it."""
    two_rounds(CHAIN, verified=None, shared=shared)
    two_rounds(CHAIN, verified=CHAIN, shared=shared)


def test_a_state_of_the_previous_node_is_noticed() -> None:
    with pytest.raises(AssertionError, match="not close"):
        two_rounds(BRANCHING, verified=CHAIN)


def test_a_convolution_over_the_previous_nodes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gated_delta.windows
    monkeypatch.setattr(gated_delta, "windows", lambda _, *sizes: right(None, *sizes))
    with pytest.raises(AssertionError, match="not close"):
        two_rounds(BRANCHING, verified=BRANCHING)


def test_a_commit_of_another_node_is_noticed() -> None:
    with pytest.raises(AssertionError, match="not close"):
        two_rounds(BRANCHING, verified=BRANCHING, shift=1)


def test_prefill_reads_and_writes_the_requests_own_slots() -> None:
    """Two requests, one of which continues; against token by token decoding."""
    g = torch.Generator().manual_seed(5)
    lengths, slots = [70, 5], torch.tensor([2, 4])
    ours, plain = Backend(6, 1), Backend(6, 1)
    for backend in (ours, plain):
        backend.caches.temporal[0, 2] = 0  # a fresh request; SGLang clears its slot
    plain.caches.conv[0][0, 2] = 0
    x = torch.randn(75, CHANNELS, generator=g)
    a, b = (torch.randn(75, HEADS, generator=g) for _ in range(2))
    ours.forward_metadata = SimpleNamespace(mamba_cache_indices=slots, has_mamba_track_mask=False)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: False),
        extend_prefix_lens_cpu=[0, 9],
        extend_seq_lens_cpu=lengths,
    )
    out = delta_net.forward_extend(ours, ours.layer, batch, x, a, b)[0]
    expected, begin = [], 0
    for slot, length in zip(slots, lengths, strict=True):
        for token in range(begin, begin + length):
            now = (part[token : token + 1] for part in (x, a, b))
            expected.append(plain.decode(slot.view(1), *now))
        begin += length
    torch.testing.assert_close(out, torch.cat(expected), **CLOSE)
    for slot in slots.tolist():
        for mine, theirs in zip(ours.states(slot), plain.states(slot), strict=True):
            torch.testing.assert_close(mine, theirs, **CLOSE)


def test_the_convolution_is_no_matrix_to_pack() -> None:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    from dflash2_sglang.cpu import weights

    for shape, method in (((8, 4), weights.PackedLinearMethod), ((8, 1, 4), None)):
        weight = torch.zeros(shape, dtype=torch.bfloat16)
        layer = SimpleNamespace(weight=weight, quant_method=UnquantizedLinearMethod())
        assert weights._method(torch.nn.Module(), layer) is method


def test_sglangs_kernels_agree() -> None:
    """The Triton kernels that a GPU would run, under the interpreter: parents from our links, too."""
    script = Path(__file__).with_name("interpreted_delta_net.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    for found in json.loads(line.removeprefix("FOUND ")):
        assert found.pop("parents") == 0
        assert max(found.values()) < 1e-3, found
