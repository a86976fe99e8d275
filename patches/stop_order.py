"""Where an answer ends, when a round accepted several tokens at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Patch


def update_finish_state(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """Look at the accepted tokens one after the other, as plain decoding does.

    The stock check looks at all of them at once. So it prefers a stop string to an end-of-text
    token before it, the first of the list to an earlier one in the text, and finds regex matches
    that end where no look would have fallen.
    """
    params = req.sampling_params
    stops = params.stop_strs or params.stop_regex_strs
    if new_accepted_len <= 1 or not stops or req.finished() or req.to_finish or not _ours():
        original(req, new_accepted_len)
        return
    ids = req.output_ids
    accepted = ids[-new_accepted_len:]
    del ids[-new_accepted_len:]
    # The grammar has read all of them already: only after the last may it say that it has ended.
    grammar, req.grammar = req.grammar, None
    for seen, token in enumerate(accepted, 1):
        if seen == new_accepted_len:
            req.grammar = grammar
        ids.append(token)
        original(req, 1)
        if req.finished():
            req.grammar = grammar
            if req.finished_len is None:
                req.finished_len = len(ids)
            ids.extend(accepted[seen:])  # their KV is there, and is freed with the request
            return


def concat_token_arrays(
    original: Callable[..., Any], last_req: Any, req: Any, session_params: Any
) -> Any:
    """A session goes on from what its client saw, not from all that the last round accepted."""
    if _ours() and last_req.finished():
        last_req.output_ids = last_req.output_ids_through_stop
    return original(last_req, req, session_params)


def _ours() -> bool:
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm == "DFLASH2"


PATCHES = (
    Patch(
        target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
        hook=update_finish_state,
        kind="around",
        scope="dflash2",
        parameters=("self", "new_accepted_len"),
        reason="it looks for stop strings in all tokens of a round before it looks for stop tokens",
        without="an answer could run past the end-of-text token or past an earlier stop string",
    ),
    Patch(
        target="sglang.srt.session.session_controller.Session._concat_token_arrays",
        hook=concat_token_arrays,
        kind="around",
        scope="dflash2",
        parameters=("last_req", "req", "session_params"),
        reason="it reads a finished request's tokens past the one at which the answer ended",
        without="the next turn of a session would see tokens that its client never got",
    ),
)
