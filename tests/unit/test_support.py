"""What DFLASH2 refuses, message by message; ``test_refusals.py`` asks through SGLang."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from dflash2_sglang.support import (
    REFUSALS,
    refuse_request,
    refuse_settings,
)


class Arguments:
    """SGLang's own record with its defaults, but for what was changed."""

    def __init__(self, changes: dict[str, Any]) -> None:
        from sglang.srt.server_args import ServerArgs

        self.changes, self.record = changes, ServerArgs(model_path="m")
        for name in changes:
            getattr(self.record, name)  # fails where SGLang has no such argument

    def __getattr__(self, name: str) -> Any:
        return self.changes[name] if name in self.changes else getattr(self.record, name)


def arguments(**changes: Any) -> Arguments:
    return Arguments(changes)


ASKED: dict[str, list[dict[str, Any]]] = {
    "--pp-size above 1": [{"pp_size": 2}],
    "--disaggregation-mode": [{"disaggregation_mode": m} for m in ("prefill", "decode")],
    "LoRA (--enable-lora, --lora-paths)": [{"enable_lora": True}, {"lora_paths": ["a"]}],
    "data-parallel attention (--attn-dp-size, --enable-dp-attention)": [
        {"attn_dp_size": 2},
        {"enable_dp_attention": True},
    ],
    "--rl-on-policy-target": [{"rl_on_policy_target": "fsdp"}],
    "--speculative-draft-model-quantization": [
        {
            "speculative_draft_model_quantization": "fp8",
            "_speculative_draft_quantization_explicitly_set": True,
        }
    ],
    "--speculative-draft-window-size": [{"speculative_draft_window_size": 64}],
    "--speculative-dflash-block-size": [{"speculative_dflash_block_size": 8}],
    "--speculative-accept-threshold-single or -acc below 1": [
        {"speculative_accept_threshold_single": 0.9},
        {"speculative_accept_threshold_acc": 0.9},
    ],
}


def cases() -> list[tuple[str, dict[str, Any]]]:
    """Settings that are named after their flag are switches."""
    found = []
    for refusal in REFUSALS:
        name = refusal.setting.removeprefix("--").replace("-", "_")
        for change in ASKED.get(refusal.setting, [{name: True}]):
            found.append((refusal.setting, change))
    return found


def refusal(args: Arguments) -> str | None:
    """What is said against these settings."""
    try:
        refuse_settings(args)
    except ValueError as error:
        return str(error)
    return None


def test_nothing_special_is_served() -> None:
    assert refusal(arguments()) is None


@pytest.mark.parametrize(("setting", "change"), cases(), ids=lambda value: str(value))
def test_settings(setting: str, change: dict[str, Any]) -> None:
    (refusal,) = (r for r in REFUSALS if r.setting == setting)
    with pytest.raises(ValueError, match=r"^DFLASH2 does not support ") as caught:
        refuse_settings(arguments(**change))
    assert str(caught.value) == refusal.message
    assert setting in refusal.message
    assert refusal.fix in refusal.message


@pytest.mark.parametrize(
    "change",
    [
        {"pp_size": 1},
        {"disaggregation_mode": "null"},
        {"attn_dp_size": 1},
        {"speculative_draft_model_quantization": "fp8"},  # of the target, filled in by SGLang
        {"lora_paths": []},
        {"speculative_accept_threshold_single": 1.0},
        {"tp_size": 4, "dp_size": 2},
        {"enable_custom_logit_processor": True},
        {"enable_deterministic_inference": True},
    ],
    ids=str,
)
def test_what_is_not_refused(change: dict[str, Any]) -> None:
    assert refusal(arguments(**change)) is None


# Requests.


def request(extra: dict[str, Any] | None = None, **parameters: Any) -> SimpleNamespace:
    from sglang.srt.sampling.sampling_params import SamplingParams

    fields = {
        "multimodal_inputs": None,
        "return_sampling_mask": False,
        "custom_logit_processor": None,
        "origin_input_ids": array("q", [0, 99]),
        "vocab_size": 100,
        "logprob": SimpleNamespace(top_logprobs_num=100),
    }
    return SimpleNamespace(
        sampling_params=SamplingParams(**parameters), **{**fields, **(extra or {})}
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_p": 0.8, "top_k": 7, "min_p": 0.1},
        {"max_new_tokens": 5, "stop": ["x"], "stop_token_ids": [3], "ignore_eos": True},
        {"json_schema": "{}"},
        {"regex": "a+"},
        {"logit_bias": {"5": 2.0}},
        {"n": 3},
        {"frequency_penalty": 0.1, "presence_penalty": -0.1, "repetition_penalty": 1.1},
        {"min_new_tokens": 5},
        {"sampling_seed": 7},
    ],
    ids=str,
)
def test_requests_that_are_served(parameters: dict[str, Any]) -> None:
    assert refuse_request(request(**parameters)) is None


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"multimodal_inputs": object()}, "multimodal"),
        ({"return_sampling_mask": True}, "return_sampling_mask"),
        ({"origin_input_ids": array("q")}, "a prompt of no tokens"),
        ({"origin_input_ids": array("q", [5, 100])}, "input_ids"),
        ({"origin_input_ids": array("q", [-1, 5])}, "input_ids"),
        ({"logprob": SimpleNamespace(top_logprobs_num=101)}, "top_logprobs_num is 101"),
    ],
)
def test_other_requests(extra: dict[str, Any], name: str) -> None:
    reason = refuse_request(request(extra))
    assert reason is not None
    assert name in reason
