"""``dflash2-sglang doctor`` on a pair that fits, on pairs that do not, and on an SGLang that does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tinypair import Pair, Pairs

import dflash2_sglang.patches as patches
from dflash2_sglang.cli.main import main


@pytest.fixture(scope="module")
def pair(pairs: Pairs) -> Pair:
    return pairs.pair()


def doctor(capsys: Any, *flags: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["doctor", "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def flags_for(target: Path, drafter: Path) -> list[str]:
    return ["--model-path", str(target), "--speculative-draft-model-path", str(drafter)]


def test_without_a_pair(capsys: Any) -> None:
    code, found = doctor(capsys)
    assert code == 0 and found["can_serve"]
    assert found["versions"]["sglang"].startswith("0.5.")
    assert found["device"]["attention_backends"] == ["dflash2_cpu"]
    assert set(found["patches"]) == {patch.target for patch in patches.discover()}
    assert all(state.startswith("fits") for state in found["patches"].values())
    assert "launch" not in found


def test_a_pair_that_fits(capsys: Any, pair: Pair) -> None:
    flags = [*flags_for(pair.target, pair.drafter), "--speculative-num-draft-tokens", "12"]
    more = ["--at-context", "1000", "--at-batch", "3", "--dtype", "float32"]
    code, found = doctor(capsys, *flags, *more)
    assert code == 0 and found["problems"] == []
    assert found["launch"]["speculative_num_draft_tokens"] == 12
    assert found["launch"]["speculative_num_steps"] == found["drafter"]["block_size"] - 1
    config = json.loads((pair.target / "config.json").read_text())
    kv = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    assert found["memory a rank"]["target_kv_bytes_a_token"] == kv
    assert "all_gib at 3 x 1000 tokens" in found["memory a rank"]


def test_a_drafter_for_another_target(capsys: Any, pairs: Pairs, pair: Pair) -> None:
    code, found = doctor(capsys, *flags_for(pairs.target(vocab=200), pair.drafter))
    assert code == 1 and not found["can_serve"]
    assert "use the drafter that was trained for this target" in found["problems"][0]


def test_flags_that_are_refused(capsys: Any, pair: Pair) -> None:
    flags = flags_for(pair.target, pair.drafter)
    code, found = doctor(capsys, *flags, "--pp-size", "2")
    assert code == 1 and "--pp-size" in found["problems"][0]
    code, found = doctor(capsys, *flags, "--no-such-flag")
    assert code == 1 and "does not know these flags" in found["problems"][0]


def test_a_patch_whose_target_is_gone(capsys: Any, monkeypatch: Any, pair: Pair) -> None:
    import sglang.srt.speculative.eagle_utils as module

    monkeypatch.delattr(module, "eagle_sample")
    code, found = doctor(capsys, *flags_for(pair.target, pair.drafter))
    target = "sglang.srt.speculative.eagle_utils.eagle_sample"
    assert code == 1 and target in found["problems"][0]
    assert "is not in the installed SGLang" in found["patches"][target]
    assert "launch" not in found  # nothing is tried with an SGLang that does not fit


def test_the_report_for_people(capsys: Any, pair: Pair) -> None:
    assert main(["doctor", *flags_for(pair.target, pair.drafter), "--pp-size", "2"]) == 1
    shown = capsys.readouterr().out
    assert "problem: DFLASH2 does not support --pp-size" in shown
    assert shown.rstrip().endswith("DFLASH2 cannot serve this.")
