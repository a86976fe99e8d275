"""What SGLang captures of the verify pass: a tree with a mask, where it would capture this family's chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Patch


def get_spec_info(original: Callable[..., Any], runner: Any, num_tokens: int) -> Any:
    """The input with which a pass over ``num_tokens`` is captured."""
    model = runner.model_runner
    if model.is_draft_worker or not _ours():
        return original(runner, num_tokens)
    return _tree_input(runner.buffers.custom_mask)


def create_dummy_verify_input(
    original: Callable[..., Any],
    spec_algorithm: Any,
    custom_mask: Any,
    num_tokens_per_req: int,
    is_draft_worker: bool,
) -> Any:
    """The input with which kernels are tuned before capture."""
    if not _ours():
        return original(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)
    if not is_draft_worker:
        return _tree_input(custom_mask)
    from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info

    return make_draft_block_spec_info(draft_token_num=num_tokens_per_req, device=custom_mask.device)


def _tree_input(mask: Any) -> Any:
    """Only its shape and the presence of a mask are captured; the rest is refilled at each replay."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    spec = get_spec()
    return EagleVerifyInput(
        draft_token=None,
        custom_mask=mask,
        positions=None,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=spec.speculative_num_steps,
        topk=spec.speculative_eagle_topk,
        draft_token_num=spec.speculative_num_draft_tokens,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def _ours() -> bool:
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm == "DFLASH2"


PATCHES = (
    Patch(
        target="sglang.srt.model_executor.runner.decode_cuda_graph_runner."
        "DecodeCudaGraphRunner.get_spec_info",
        hook=get_spec_info,
        kind="around",
        scope="dflash2",
        parameters=("self", "num_tokens"),
        reason="for this family it captures a verify pass without a mask, that is a causal chain",
        without="a captured graph would verify every tree as a chain",
    ),
    Patch(
        target="sglang.srt.speculative.spec_info.create_dummy_verify_input",
        hook=create_dummy_verify_input,
        kind="around",
        scope="dflash2",
        parameters=("spec_algorithm", "custom_mask", "num_tokens_per_req", "is_draft_worker"),
        reason="it tunes kernels with a chain and with the tree's width for the drafter's block",
        without="start-up fails where a backend asks the dummy for its tree mask",
    ),
)
