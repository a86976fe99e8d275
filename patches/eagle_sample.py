"""Acceptance of a tree: SGLang's verifier asks ours when the tree is ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Patch


def eagle_sample(original: Callable[..., Any], verify_input: Any, *args: Any, **kw: Any) -> Any:
    from dflash2_sglang.state import TreeVerifyInput

    if not isinstance(verify_input, TreeVerifyInput):
        return original(verify_input, *args, **kw)
    from dflash2_sglang.acceptance import accept_tree

    batch, logits_output, *_ = args
    # SGLang was told of no grammar: the mask came with the tree, see grammar/constrain.py.
    return accept_tree(verify_input, batch, logits_output, verify_input.grammar_mask)


PATCHES = (
    Patch(
        target="sglang.srt.speculative.eagle_utils.eagle_sample",
        hook=eagle_sample,
        kind="around",
        scope="dflash2",
        parameters=(
            "verify_input",
            "batch",
            "logits_output",
            "grammar_mask",
            "uno_target_max_top_k",
            "watermark_state",
            "watermark_full_mask",
        ),
        reason="the stock tree sampler ignores min-p and launches kernels that need a GPU",
        without="sampled requests would not follow the target's distribution",
    ),
)
