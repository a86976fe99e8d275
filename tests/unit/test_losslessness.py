"""The parity table tells of every parameter that SGLang takes, and of tests that exist."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "losslessness.md").read_text()
INTERNAL = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len"}
INTERNAL |= {"is_normalized", "ebnf_full_assistant"}


def parameters() -> list[str]:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    names = {field.name for field in msgspec.structs.fields(SamplingParams)} - INTERNAL
    return sorted(names | {field.name for field in dataclasses.fields(GenerateReqInput)})


def test_every_parameter_has_a_row() -> None:
    rows = "\n".join(line for line in TABLE.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`(\w+)`", rows))
    assert [name for name in parameters() if name not in named] == []


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`((?:unit|server)/\w+\.py)`", TABLE))))
def test_the_tests_exist(file: str) -> None:
    assert (ROOT / "tests" / file).is_file()


def test_refusals_are_quoted() -> None:
    from types import SimpleNamespace

    from dflash2_sglang.support import refuse_request

    for field in ("multimodal_inputs", "return_sampling_mask"):
        asked = {"multimodal_inputs": None, "return_sampling_mask": False}
        reason = refuse_request(SimpleNamespace(sampling_params=None, **(asked | {field: True})))
        assert reason is not None
        assert reason in TABLE
