"""The scheduler relays hidden states for every algorithm whose name it does not know."""

from __future__ import annotations

from collections.abc import Callable

from .base import Patch


def spec_need_hidden_states(original: Callable[[], bool]) -> bool:
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm != "DFLASH2" and original()


PATCHES = (
    Patch(
        target="sglang.srt.speculative.spec_utils.spec_need_hidden_states",
        hook=spec_need_hidden_states,
        kind="around",
        scope="dflash2",
        parameters=(),
        reason="it lists the algorithms without a relay by name",
        without="a hidden state a request would be copied each round for nothing",
    ),
)
