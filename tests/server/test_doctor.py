"""``dflash2-sglang doctor`` on a pair that fits, on pairs that do not, and on an SGLang that does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
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
    memory = found["memory of a rank"]
    assert memory["target_kv_bytes_per_token"] == kv
    assert (memory["requests"], memory["tokens_each"]) == (3, 1000)
    assert memory["available_gib"] > memory["total_gib"] >= memory["kv_gib"]


def test_the_demo_pair(
    capsys: Any, monkeypatch: Any, demo_target: Path, demo_drafter: Path
) -> None:
    """SmolLM2-135M: 30 layers with 3 heads of 64. No device is opened, and no weights are read."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("a device was opened"))
    monkeypatch.setattr(safetensors, "safe_open", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setattr(safetensors.torch, "load_file", lambda *_: pytest.fail("weights were read"))
    flags = [*flags_for(demo_target, demo_drafter), "--at-batch", "2", "--at-context", "2048"]
    code, found = doctor(capsys, *flags)
    assert (code, found["problems"], found["notes"]) == (0, [], [])
    assert found["launch"]["speculative_algorithm"] == "DFLASH2"
    assert found["drafter"]["architecture"] == "DFlash2DraftModel"
    memory = found["memory of a rank"]
    assert memory["target_kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2  # bfloat16
    weights = sum(file.stat().st_size for file in demo_target.glob("*.safetensors"))
    assert abs(memory["target_weights_gib"] - weights / 2**30) < 0.001
    parts = ("target_weights_gib", "draft_weights_gib", "kv_gib", "logits_gib")
    assert abs(sum(memory[part] for part in parts) - memory["total_gib"]) < 0.003


def test_memory_that_is_not_there(capsys: Any, monkeypatch: Any, pair: Pair) -> None:
    from dflash2_sglang.cli import checkup

    flags = flags_for(pair.target, pair.drafter)
    monkeypatch.setattr(checkup, "rank_memory", lambda ranks: 2**20)
    monkeypatch.setattr(checkup, "weight_bytes", lambda path: 2**19 + 1)
    code, found = doctor(capsys, *flags)
    assert code == 1 and "raise --tp-size" in found["problems"][0]
    monkeypatch.setattr(checkup, "weight_bytes", lambda path: 2**10)
    code, found = doctor(capsys, *flags)
    assert code == 0 and "8 requests of 4096 tokens need more memory" in found["notes"][0]
    monkeypatch.setattr(checkup, "weight_bytes", lambda path: None)
    code, found = doctor(capsys, *flags)
    assert "not on this machine yet" in found["notes"][0]


def test_what_checkpoints_weigh(pair: Pair, tmp_path: Path) -> None:
    from dflash2_sglang.cli.checkup import weight_bytes

    assert weight_bytes(str(pair.target)) == (pair.target / "model.safetensors").stat().st_size
    (tmp_path / "target.gguf").write_bytes(b"GGUF" + bytes(96))
    assert weight_bytes(str(tmp_path / "target.gguf")) == 100
    assert weight_bytes("no-such/name-on-the-hub") is None


def test_a_cap_that_the_drafter_does_not_know(capsys: Any, pairs: Pairs) -> None:
    target = pairs.target(cap=6.0)
    code, found = doctor(capsys, *flags_for(target, pairs.drafter(target)))
    assert code == 0 and "final_logit_softcapping=6.0" in found["notes"][0]
    told = pairs.drafter(target, changes={"final_logit_softcapping": 6.0})
    assert doctor(capsys, *flags_for(target, told))[1]["notes"] == []


def test_a_drafter_for_another_target(capsys: Any, pairs: Pairs, pair: Pair) -> None:
    code, found = doctor(capsys, *flags_for(pairs.target(vocab=200), pair.drafter))
    assert code == 1 and not found["can_serve"]
    assert "use the drafter that was trained for this target" in found["problems"][0]


def test_flags_that_are_refused(capsys: Any, pair: Pair) -> None:
    flags = flags_for(pair.target, pair.drafter)
    code, found = doctor(capsys, *flags, "--pp-size", "2")
    assert code == 1 and "--pp-size" in found["problems"][0]
    code, found = doctor(capsys, *flags, "--no-such-flag")
    assert code == 1
    assert found["problems"] == [
        "SGLang does not take these flags: unrecognized arguments: --no-such-flag."
    ]
    code, found = doctor(capsys, *flags[2:])
    assert code == 1 and "--model-path" in found["problems"][0]
    code, found = doctor(capsys, *flags[:2])
    assert code == 1 and "set --speculative-draft-model-path" in found["problems"][0]


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


def test_the_report_for_people_says_all_that_json_says(capsys: Any, pair: Pair) -> None:
    flags = flags_for(pair.target, pair.drafter)
    code, found = doctor(capsys, *flags)
    assert main(["doctor", *flags]) == code == 0
    lines = capsys.readouterr().out.splitlines()
    assert found.pop("can_serve") and lines[-1] == "DFLASH2 can serve."
    assert not found.pop("notes") + found.pop("problems")
    for title, record in found.items():
        place = lines.index(title)
        for line, (name, value) in zip(lines[place + 1 :], record.items(), strict=False):
            assert line.split()[0] == name
            if isinstance(value, str):
                assert line.endswith(value)  # nothing is cut or wrapped
