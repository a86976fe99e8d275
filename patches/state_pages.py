"""Page sizes at which the states of recurrent layers cannot be cached: SGLang asserts them without a word."""

from __future__ import annotations

from typing import Any

from .base import Patch


def refuse_page_size(view: Any, hf_config: Any, *, mamba_cache_chunk_size_of: Any) -> None:
    """Raise ValueError before SGLang's assertion; ``view`` is SGLang's resolved arguments."""
    if view.speculative_algorithm == "DFLASH2" and view.page_size is not None:
        from dflash2_sglang.support import refuse_state_pages

        refuse_state_pages(int(view.page_size), int(view.mamba_track_interval))


PATCHES = (
    Patch(
        target="sglang.srt.arg_groups.mamba_hook.validate_mamba_extra_buffer",
        hook=refuse_page_size,
        kind="before",
        scope="dflash2",
        parameters=("view", "hf_config", "mamba_cache_chunk_size_of"),
        reason="it asserts that states can be cached at ends of pages, and does not say so",
        without="a hybrid target with an unfit --page-size ends in an assertion without a message",
    ),
)
