"""How many KV slots a round reserves: one window, not one KV chain for each branch."""

from __future__ import annotations

from collections.abc import Callable

from .base import Patch


def alloc_len_per_decode(original: Callable[[], int]) -> int:
    """The tree's nodes and the drafter's block share their slots, so the longer of them counts."""
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    if spec.speculative_algorithm != "DFLASH2":
        return original()
    return max(spec.speculative_num_draft_tokens, spec.speculative_dflash_block_size)


def extra_context_len(original: Callable[[], int]) -> int:
    """Columns of a request's slot table beyond the context: the reserve near the context limit."""
    from sglang.srt.mem_cache import allocation_sizing as sizing
    from sglang.srt.runtime_context import get_spec

    if get_spec().speculative_algorithm != "DFLASH2":
        return original()
    reserve = sizing.get_alloc_reserve_per_decode() + sizing.get_alloc_page_size() - 1
    return max(original(), reserve)


PATCHES = (
    Patch(
        target="sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode",
        hook=alloc_len_per_decode,
        kind="around",
        scope="dflash2",
        parameters=(),
        reason="it reserves depth times branching slots, and does not know the drafter's block",
        without="requests reserve several times the KV they need, or too little for the block",
    ),
    Patch(
        target="sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        hook=extra_context_len,
        kind="around",
        scope="dflash2",
        parameters=(),
        reason="at page size 1 a request's row is shorter than what a round near its end reserves",
        without="a request near the context limit writes past its row, into its neighbour's",
    ),
)
