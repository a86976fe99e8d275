"""The shape of the tree from checkpoint and flags, and what the algorithm tells SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from configs import qwen
from hypothesis import given
from hypothesis import strategies as st

from dflash2_sglang import algorithm
from dflash2_sglang.algorithm import DFlash2Algorithm, check_ranks, tree_shape
from dflash2_sglang.config import DrafterConfig, parse
from dflash2_sglang.tree.build import capacity


def config(block: int = 8, top_k: int | None = 16) -> DrafterConfig:
    if top_k is None:
        plain = qwen(block_size=block, selector_rank=None, selector_top_k=None)
        return parse({**plain, "architectures": ["DFlashDraftModel"]})
    return parse(qwen(block_size=block, selector_top_k=top_k))


@pytest.mark.parametrize(
    ("drafter", "asked", "shape"),
    [
        (config(), (None, None, None), (7, 8, 16)),
        (config(16), (None, None, None), (15, 8, 16)),
        (config(2), (None, None, None), (1, 8, 9)),
        (config(8, 2), (None, None, None), (7, 2, 16)),
        (config(8, 1), (None, None, None), (7, 1, 8)),
        (config(8, None), (None, None, None), (7, 8, 16)),
        (config(), (None, 1, None), (7, 1, 8)),
        (config(), (3, None, None), (3, 8, 16)),
        (config(), (1, 2, None), (1, 2, 3)),
        (config(), (None, 16, 64), (7, 16, 64)),
        (config(), (7, 4, 2), (7, 4, 2)),
        (config(8, None), (None, 16, 17), (7, 16, 17)),
    ],
)
def test_shapes(
    drafter: DrafterConfig, asked: tuple[int | None, ...], shape: tuple[int, int, int]
) -> None:
    assert tree_shape(drafter, *asked) == shape


@pytest.mark.parametrize(
    ("device", "amx", "nodes"), [("cuda", False, 16), ("cpu", True, 16), ("cpu", False, 8)]
)
def test_usual_nodes(monkeypatch: Any, device: str, amx: bool, nodes: int) -> None:
    monkeypatch.setattr(algorithm, "has_amx", lambda: amx)
    assert algorithm.usual_nodes(device) == nodes
    assert tree_shape(config(), None, None, None, nodes) == (7, 8, nodes)
    assert tree_shape(config(), 2, 1, None, nodes) == (2, 1, 3)
    assert tree_shape(config(), None, None, 24, nodes) == (7, 8, 24)


@pytest.mark.parametrize(
    ("drafter", "asked", "message"),
    [
        (config(), (0, None, None), "--speculative-num-steps 0 must lie between 1 and 7"),
        (config(), (8, None, None), "--speculative-num-steps 8 must lie between 1 and 7"),
        (config(16), (16, None, None), "between 1 and 15"),
        (config(), (None, 0, None), "--speculative-eagle-topk 0 must lie between 1 and 16"),
        (config(), (None, 17, None), "--speculative-eagle-topk 17 must lie between 1 and 16"),
        (config(8, 6), (None, 7, None), "between 1 and 6"),
        (config(8, None), (None, 17, None), "between 1 and 16"),
        (config(), (None, None, 1), "--speculative-num-draft-tokens 1 must lie between 2 and"),
        (config(), (None, 1, 9), "between 2 and 8"),
        (config(), (2, 3, 14), "between 2 and 13"),
    ],
)
def test_impossible_shapes(
    drafter: DrafterConfig, asked: tuple[int | None, ...], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        tree_shape(drafter, *asked)
    assert message in str(caught.value)


@given(
    st.integers(2, 16),
    st.integers(1, 8),
    st.integers(1, 15) | st.none(),
    st.integers(1, 8) | st.none(),
)
def test_defaults_always_fit(
    block: int, top_k: int, depth: int | None, children: int | None
) -> None:
    """Whatever of depth and branching is set, the default of the rest is a tree that exists."""
    drafter = config(block, top_k)
    if (depth or 1) > drafter.depth or (children or 1) > top_k:
        return
    found = tree_shape(drafter, depth, children, None)
    assert depth in (None, found[0])
    assert children in (None, found[1])
    assert 2 <= found[2] <= min(16, capacity(found[0], found[1]))


# Tensor parallelism: the published drafter has 32 heads, 8 KV heads and 17408 columns.


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_that_divide(ranks: int, on_cpu: bool) -> None:
    check_ranks(config(), ranks, on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("ranks", "on_cpu", "changes", "name"),
    [
        (3, False, {}, "num_attention_heads=32"),
        (3, True, {}, "num_attention_heads=32"),
        (16, True, {}, "num_key_value_heads=8"),
        (2, False, {"num_key_value_heads": 1, "intermediate_size": 99}, "intermediate_size=99"),
        (4, False, {"num_key_value_heads": 2, "num_attention_heads": 6}, "num_attention_heads=6"),
        (2, True, {"intermediate_size": 96}, "intermediate_size=96 into multiples of 32"),
    ],
)
def test_ranks_that_do_not(ranks: int, on_cpu: bool, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"--tp-size {ranks} cannot split .*{name}"):
        check_ranks(parse(qwen(**changes)), ranks, on_cpu=on_cpu)


def test_kv_heads_are_copied_where_there_are_more_ranks() -> None:
    check_ranks(config(), 16, on_cpu=False)
    check_ranks(parse(qwen(num_key_value_heads=1)), 4, on_cpu=False)


# What SGLang asks.


@pytest.fixture(scope="module")
def registered() -> Any:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    return SpeculativeAlgorithm.from_string("DFLASH2")


def test_registered(registered: Any) -> None:
    assert isinstance(registered, DFlash2Algorithm)
    assert registered.name == "DFLASH2"
    assert not registered.is_none()


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("is_dflash", True),
        ("is_dflash_family", True),
        ("is_eagle", False),
        ("is_eagle3", False),
        ("is_standalone", False),
        ("is_ngram", False),
        ("supports_target_verify_for_draft", True),
        ("supports_grammar_overlap", True),
        ("supports_prefill_shared_read_done", False),
        ("has_draft_kv", False),
        ("need_topk", False),
        ("carries_draft_hidden_states", False),
    ],
)
def test_answers(registered: Any, question: str, answer: bool) -> None:
    assert getattr(registered, question)() is answer


def test_worker(registered: Any) -> None:
    from dflash2_sglang.worker import DFlash2Worker

    assert registered.create_worker(SimpleNamespace(disable_overlap_schedule=False)) is (
        DFlash2Worker
    )


# The drafter's attention backend.


@pytest.mark.parametrize(
    ("prefill", "both", "expected"),
    [
        (None, "triton", "triton"),
        ("fa3", "triton", "fa3"),
        ("trtllm_mha", "triton", "flashinfer"),
        (None, None, "flashinfer"),
    ],
)
def test_draft_backend_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, prefill: str | None, both: str | None, expected: str
) -> None:
    from sglang.srt import platforms

    gpu = SimpleNamespace(is_out_of_tree=lambda: False)
    monkeypatch.setattr(platforms, "current_platform", gpu)
    args = SimpleNamespace(prefill_attention_backend=prefill, attention_backend=both)
    assert algorithm._draft_backend(args) == expected


def test_draft_backend_on_the_cpu() -> None:
    args = SimpleNamespace(prefill_attention_backend=None, attention_backend="triton")
    assert algorithm._draft_backend(args) == "dflash2_cpu"


class Graphs:
    """As much of SGLang's settings as is read."""

    def __init__(self, device: str) -> None:
        from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig

        self.device, self.cuda_graph_config = device, CudaGraphConfig()
        assert self.cuda_graph_config.decode.backend != Backend.DISABLED


@pytest.mark.parametrize(
    ("device", "asked", "captured"),
    [("cuda", None, False), ("cuda", "1", True), ("cuda", "0", False), ("cpu", "1", False)],
)
def test_decode_graphs_are_captured_only_where_asked_for(
    monkeypatch: Any, caplog: Any, device: str, asked: str | None, captured: bool
) -> None:
    from sglang.srt.model_executor.cuda_graph_config import Backend

    monkeypatch.delenv(algorithm.GRAPHS, raising=False)
    if asked is not None:
        monkeypatch.setenv(algorithm.GRAPHS, asked)
    args = Graphs(device)
    algorithm._resolve_decode_graph(args)
    assert (args.cuda_graph_config.decode.backend != Backend.DISABLED) is captured
    assert (algorithm.GRAPHS in caplog.text) is (device == "cuda" and not captured)
