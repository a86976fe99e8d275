"""Configs that are read, and those that are refused in one sentence that names the fix."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from configs import qwen

import dflash2_sglang
from dflash2_sglang import checkpoint, config
from dflash2_sglang.config import CheckpointError

ASSET = Path(dflash2_sglang.__file__).parent / "assets" / "smollm2-135m-dflash2"


def test_the_published_qwen_checkpoint() -> None:
    c = config.parse(qwen())
    assert (c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim) == (5120, 32, 8, 128)
    assert (c.block_size, c.depth, c.mask_token_id) == (8, 7, 248070)
    assert (c.target_layer_ids, c.num_target_layers) == ((5, 19, 33, 47, 61), 64)
    assert (c.selector_rank, c.selector_top_k, c.has_selector) == (256, 16, True)
    assert (c.conv_kernel_size, c.conv_group_size, c.has_conv) == (2, 16, True)
    assert (c.sliding_window, c.window_left, c.layer_window(4)) == (2048, 2047, 2047)
    assert c.is_causal == (True,) * 5
    assert c.rope == config.Rope(theta=1e7, dim=128, neox=True, max_position=262144)
    assert (c.output_multiplier, c.final_logit_softcapping, c.input_embedding_scale) == (1, None, 1)


def test_the_published_muse_checkpoint() -> None:
    c = config.parse(qwen(block_size=16, is_causal=False))
    assert (c.block_size, c.depth, c.is_causal) == (16, 15, (False,) * 5)


def test_the_demo_checkpoint() -> None:
    c = config.load(ASSET)
    assert c == config.load(ASSET / "config.json")
    assert c.rope == config.Rope(theta=1e5, dim=64, neox=True, max_position=8192)
    assert (c.window_left, c.layer_window(0), c.is_causal) == (None, -1, (False,) * 3)
    assert checkpoint.check_weights(ASSET, c) == []


@pytest.mark.parametrize("name", ["DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"])
def test_other_names_of_the_same_model(name: str) -> None:
    assert config.parse(qwen(architectures=[name])).has_selector


def test_plain_drafters() -> None:
    fields = {"selector_rank": None, "selector_top_k": None, "conv_kernel_size": None}
    c = config.parse(qwen(architectures=["DFlashDraftModel"], **fields))
    assert (c.has_selector, c.has_conv) == (False, False)
    muse = qwen(architectures=["MuseGlimmerAssistantModel"], vocab_size=None, **fields)
    muse["model_type"] = "muse_glimmer_assistant"
    c = config.parse(muse)
    assert (c.vocab_size, c.is_causal) == (0, (False,) * 5)


def test_fields_may_stand_at_the_top_level_and_the_section_wins() -> None:
    raw = qwen()
    flat = raw | raw.pop("dflash_config")
    assert config.parse(flat) == config.parse(qwen())
    flat["dflash_config"] = {"block_size": 4, "mask_token_id": None}
    assert config.parse(flat).block_size == 4
    assert config.parse(flat).mask_token_id == 248070


def test_a_nested_text_config() -> None:
    raw = qwen()
    body = {k: v for k, v in raw.items() if k != "architectures"}
    nested = {"architectures": raw["architectures"], "text_config": body}
    assert config.parse(nested) == config.parse(raw)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e6},
        {"rope_theta": 5e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e6}},
    ],
)
def test_transformers_reads_the_same_config(rope: dict[str, Any]) -> None:
    from transformers import Qwen3Config

    for changes in ({}, {"use_sliding_window": None, "layer_types": ["full_attention"] * 5}):
        raw = qwen(rope_parameters=None, **changes) | rope
        c = config.parse(raw)
        again = config.parse(Qwen3Config(**json.loads(json.dumps(raw))).to_dict())
        assert (c.rope.theta, c.is_causal, c.window_left) == (
            again.rope.theta,
            again.is_causal,
            again.window_left,
        )
        kinds = [x.rope.scaling and x.rope.scaling["rope_type"] for x in (c, again)]
        assert kinds[0] == kinds[1]


def test_absent_layer_types_follow_transformers() -> None:
    c = config.parse(qwen(layer_types=None))
    assert c.layer_types == ("full_attention",) * 5
    c = config.parse(qwen(layer_types=None, max_window_layers=2))
    assert c.layer_types == ("full_attention",) * 2 + ("sliding_attention",) * 3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "looks like an EAGLE3 head"),
    ({"architectures": ["LlamaForCausalLMEagle"]}, "looks like an EAGLE head"),
    ({"architectures": ["Qwen3_5ForCausalLMMTP"]}, "looks like a multi-token-prediction head"),
    ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "a multi-token-prediction head"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "looks like an ordinary language model"),
    ({"architectures": ["Qwen3DSparkModel"]}, "looks like a DSpark drafter"),
    ({"architectures": ["SomethingElse"]}, "SomethingElse is not served by DFLASH2, which serves"),
    ({"architectures": None}, "architectures is missing"),
    ({"block_size": None}, "block_size is missing.* no default would be safe"),
    ({"block_size": 1}, "block_size=1 leaves nothing to draft"),
    ({"block_size": "8"}, "block_size must be an integer in config.json, not '8'"),
    ({"mask_token_id": None}, "mask_token_id is missing"),
    ({"mask_token_id": 248320}, r"mask_token_id=248320 is outside the vocabulary"),
    ({"mask_token_id": -1}, "mask_token_id must be at least 0"),
    ({"target_layer_ids": None}, "target_layer_ids is missing"),
    ({"target_layer_ids": []}, "target_layer_ids is missing"),
    ({"target_layer_ids": [5, 3]}, r"target_layer_ids=\[5, 3\] must be strictly increasing"),
    ({"target_layer_ids": [5, 5]}, "must be strictly increasing, each layer once"),
    ({"target_layer_ids": ["5"]}, "target_layer_ids must be a list of layer numbers"),
    ({"target_layer_ids": [5, 64]}, "names layer 64 but num_target_layers is 64"),
    ({"layer_types": ["full_attention"] * 4}, "layer_types must list num_hidden_layers=5"),
    ({"layer_types": ["linear_attention"] * 5}, r"layer_types\[0\]='linear_attention' must be"),
    ({"sliding_window": None}, "sliding layers but no window is set: add sliding_window"),
    ({"use_sliding_window": False}, "add sliding_window .*use_sliding_window=true"),
    ({"sliding_window": 1}, "sliding_window must be at least 2"),
    ({"conv_group_size": 48}, "conv_group_size=48 must divide hidden_size=5120"),
    ({"conv_group_size": None}, "conv_group_size is missing"),
    ({"selector_rank": None}, "selector_rank is missing.* DFlashDraftModel"),
    ({"selector_top_k": None}, "selector_top_k is missing"),
    ({"selector_top_k": 0}, "selector_top_k must be at least 1"),
    ({"selector_top_k": 300000}, "selector_top_k=300000 exceeds vocab_size=248320"),
    ({"num_key_value_heads": 5}, "num_key_value_heads=5 must divide num_attention_heads=32"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ({"output_multiplier": 0}, "output_multiplier=0.0 must be positive"),
    ({"sliding_window": 7, "is_causal": False}, "sliding_window=7 must be at least block_size=8"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope' is not supported"),
    ({"rope_parameters": {"full_attention": {}}}, "rope_parameters must be one flat JSON object"),
    ({"speculators_model_type": "dflash"}, "speculators export .speculators_model_type in"),
    ({"speculators_config": {"algorithm": "dflash"}}, "speculators export .speculators_config"),
    ({"transformer_layer_config": {}}, "speculators export .transformer_layer_config"),
    ({"draft_vocab_size": 32000}, "speculators export .draft_vocab_size"),
    ({"anchor_first": True}, "anchor_first=True declares an anchor-first layout"),
    ({"sample_from_anchor": True}, "sample_from_anchor=True declares an anchor-first layout"),
    ({"query_zero_predicts_next": True}, "declares an anchor-first layout"),
    ({"shift_label": True}, "shift_label=True declares an anchor-first layout"),
    ({"projector_type": "domino"}, "projector_type='domino' .a Domino drafter"),
    ({"lilicorr_enabled": True}, "a LiLiCorr drafter"),
    ({"attention_sink_bias": True}, "attention_sink_bias=True .attention sinks"),
    ({"attention_value_scale": 0.5}, "attention_value_scale=0.5"),
    ({"gating": "per-head"}, "gating='per-head' .gated attention"),
    ({"has_embed_tokens": True}, "has_embed_tokens=True .* Nemotron"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        config.parse(qwen(**changes))
    text = str(caught.value)
    assert text.endswith(".")
    assert ". " not in text  # one sentence


def test_a_flat_speculators_config() -> None:
    raw = {k: v for k, v in qwen().items() if k != "dflash_config"}
    raw["aux_hidden_state_layer_ids"] = [6, 20]
    with pytest.raises(CheckpointError, match=r"speculators export .aux_hidden_state_layer_ids"):
        config.parse(raw)


def test_harmless_values_of_refused_fields() -> None:
    harmless = config.parse(
        qwen(
            sample_from_anchor=False,
            projector_type="dflash",
            draft_vocab_size=248320,
            attention_value_scale=1.0,
            gating=False,
            quantization_config={},
        )
    )
    assert harmless == config.parse(qwen())


def test_load_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; point"):
        config.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        config.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        config.load(tmp_path)


TARGET = {"hidden_size": 5120, "vocab_size": 248320, "num_hidden_layers": 64}


def test_a_matching_target() -> None:
    config.check_target(config.parse(qwen()), TARGET)
    config.check_target(config.parse(qwen()), {"model_type": "qwen3_5", "text_config": TARGET})


@pytest.mark.parametrize(
    ("changes", "target", "message"),
    [
        ({}, {"hidden_size": 4096}, "hidden_size is 5120 but the target's is 4096"),
        ({}, {"vocab_size": 151936}, "vocab_size is 248320 but the target's is 151936"),
        ({}, {"num_hidden_layers": 48}, "names layer 61 but the target has 48 layers"),
        ({}, {"num_hidden_layers": 80}, "num_target_layers is 64 but the target has 80 layers"),
        ({"plain": True}, {"vocab_size": 1000}, "mask_token_id=248070 is outside the target's"),
    ],
)
def test_another_target(changes: dict[str, Any], target: dict[str, int], message: str) -> None:
    raw = qwen()
    if changes:
        raw = qwen(architectures=["DFlashDraftModel"], vocab_size=None)
    draft = config.parse(raw)
    for body in (TARGET | target, {"text_config": TARGET | target}):
        with pytest.raises(CheckpointError, match=message):
            config.check_target(draft, body)


def test_no_engine_is_imported() -> None:
    code = (
        "import sys; from dflash2_sglang import checkpoint; "
        "bad = {'torch', 'sglang', 'transformers', 'safetensors'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
