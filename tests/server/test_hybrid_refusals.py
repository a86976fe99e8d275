"""What cannot be served with recurrent layers is refused at start-up, through SGLang's arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinyhybrid import write_hybrid
from tinypair import Pair, Pairs

from dflash2_sglang.hybrid import CONV_DTYPE

Resolve = Callable[..., Any]


@pytest.fixture(scope="module")
def pair(pairs: Pairs) -> Pair:
    return pairs.pair()


@pytest.fixture
def resolve(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """What ``sglang.launch_server`` does with its arguments before it starts a process."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    monkeypatch.delenv(CONV_DTYPE, raising=False)

    def resolve(*flags: str, target: Path = pair.target) -> Any:
        argv = ["--model-path", str(target), "--speculative-algorithm", "DFLASH2"]
        argv += ["--speculative-draft-model-path", str(pair.drafter)]
        args = prepare_server_args([*argv, *flags])
        args.resolve_once()
        return resolving_view(args)

    return resolve


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid"))


def test_hybrid_targets(resolve: Resolve, hybrid: Path) -> None:
    """Convolution states are kept in the dtype of the inputs that they are."""
    view = resolve(target=hybrid)
    assert CONV_DTYPE not in os.environ  # bfloat16, as SGLang has it
    assert view.mamba_radix_cache_strategy == "extra_buffer"
    assert 0 < view.max_mamba_cache_size <= 5 * 48
    limited = resolve("--max-running-requests", "3", target=hybrid)
    assert limited.max_mamba_cache_size == 15
    resolve("--dtype", "float16", target=hybrid)
    assert os.environ[CONV_DTYPE] == "float16"
    resolve("--dtype", "bfloat16", target=hybrid)  # another engine of this process
    assert CONV_DTYPE not in os.environ
    resolve("--dtype", "float32")
    assert CONV_DTYPE not in os.environ  # nothing to keep in a dense target


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mamba-track-interval 4", r"--mamba-track-interval 4 with \d+ nodes.*at least"),
        (
            "--enable-linear-replayssm --mamba-radix-cache-strategy no_buffer"
            " --disable-overlap-schedule",
            "--enable-linear-replayssm, .*: drop it",
        ),
        (
            "--page-size 48",
            "--page-size 48 with a hybrid target.*: use a page size that divides 64",
        ),
        (
            "--page-size 512",
            "--mamba-track-interval 256 with --page-size 512.*: make the interval a multiple",
        ),
        (
            "--page-size 16 --mamba-track-interval 40",
            "--mamba-track-interval 40 with --page-size 16.*: make the interval a multiple",
        ),
    ],
)
def test_hybrid_settings(resolve: Resolve, hybrid: Path, flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^DFLASH2 does not support {message}"):
        resolve(*flags.split(), target=hybrid)


def test_page_sizes(resolve: Resolve, hybrid: Path) -> None:
    for flags in ("--page-size 16", "--page-size 64", "--page-size 128"):
        assert resolve(*flags.split(), target=hybrid).uses_mamba_radix_cache
    free = resolve("--page-size", "48", "--disable-radix-cache", target=hybrid)
    assert free.page_size == 48


def test_another_dtype_of_convolution_states(
    resolve: Resolve, hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONV_DTYPE, "bfloat16")
    resolve(target=hybrid)
    with pytest.raises(ValueError, match=f"{CONV_DTYPE}=bfloat16 with --dtype float32.*unset it"):
        resolve("--dtype", "float32", target=hybrid)


def test_other_recurrent_targets(resolve: Resolve, pair: Pair, tmp_path: Path) -> None:
    """Their backends would take a tree for a chain."""
    config = json.loads((pair.target / "config.json").read_text())
    config |= {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"}
    config |= {"layer_types": ["conv", "conv", "conv", "full_attention"], "conv_L_cache": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"does not support Lfm2ForCausalLM.*algorithm DFLASH\."):
        resolve(target=tmp_path)
