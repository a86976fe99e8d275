"""What the CPU platform fills in, read off SGLang's own argument pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from tinypair import Pairs

SHARE = 0.98
TOKENS = 4096
MARK = "CPU platform defaults:"


@pytest.mark.parametrize(("flags", "share"), [((), SHARE), (("--mem-fraction-static", "0.5"), 0.5)])
def test_a_busy_neighbour_does_not_count(
    pairs: Pairs, flags: tuple[str, ...], share: float
) -> None:
    """SGLang's share refuses to start where others take memory while the weights load."""
    args = resolved(pairs, *flags)
    assert args.mem_fraction_static == share
    assert args.max_total_tokens >= TOKENS


def test_the_log_names_only_what_was_chosen(
    pairs: Pairs, capfd: pytest.CaptureFixture[str]
) -> None:
    resolved(pairs, "--max-total-tokens", "5000")
    (line,) = [text for text in "".join(capfd.readouterr()).splitlines() if MARK in text]
    assert f"mem_fraction_static={SHARE}" in line
    assert "max_total_tokens" not in line and "None" not in line


def resolved(pairs: Pairs, *flags: str) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    args = prepare_server_args(["--model-path", str(pairs.pair().target), *flags])
    args.resolve_once()
    return resolving_view(args)
