"""Requests that DFLASH2 cannot serve exactly are refused when they arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Patch


def validate_request(
    original: Callable[..., str | None], req: Any, enable_overlap: bool
) -> str | None:
    from sglang.srt.runtime_context import get_spec

    if get_spec().speculative_algorithm != "DFLASH2":
        return original(req, enable_overlap)
    from dflash2_sglang.support import refuse_request

    reason = refuse_request(req)
    if reason is not None:
        # The scheduler still runs it through one prefill. On a GPU a first repetition penalty would be
        # compiled there for seconds, in which no other request gets a token.
        req.sampling_params.repetition_penalty = 1.0
        req.return_sampling_mask = False
        req.logprob.top_logprobs_num = 0
    return reason


PATCHES = (
    Patch(
        target="sglang.srt.speculative.dflash_utils.validate_dflash_request",
        hook=validate_request,
        kind="around",
        scope="dflash2",
        parameters=("req", "enable_overlap"),
        reason="the stock check knows only the limits of the stock chain",
        without="requests whose parameters the tree cannot follow would be answered wrongly",
    ),
)
