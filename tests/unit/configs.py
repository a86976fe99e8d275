"""Configs that several tests read."""

from __future__ import annotations

from typing import Any


def qwen(**changes: Any) -> dict[str, Any]:
    """Qwen3.8-27B-DFlash2 as published; a change of None removes the field, wherever it stands."""
    raw: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "rope_dim": 128},
        "hidden_act": "silu",
        "attention_bias": False,
        "num_target_layers": 64,
        "use_sliding_window": True,
        "sliding_window": 2048,
        "layer_types": ["sliding_attention"] * 5,
        "dflash_config": {
            "target_layer_ids": [5, 19, 33, 47, 61],
            "mask_token_id": 248070,
            "block_size": 8,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
        },
    }
    for name, value in changes.items():
        place = raw["dflash_config"] if name in raw["dflash_config"] else raw
        place[name] = value
        if value is None:
            del place[name]
    return raw


# Changes to the tiny drafter of reference.py.

SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 11,
    "layer_types": ["sliding_attention"] * 2,
}
MIXED = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}
BLOCK_16 = {"dflash_config": {"block_size": 16}}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "block 16": BLOCK_16,
    "sliding": SLIDING,
    "sliding, block 16": SLIDING | BLOCK_16 | {"sliding_window": 19},
    "mixed": MIXED,
    "causal": {"is_causal": True},
    "causal mixed": MIXED | {"is_causal": True},
    "not causal, sliding": SLIDING | {"is_causal": False},
    "three taps": {"dflash_config": {"conv_kernel_size": 3, "conv_group_size": 4}},
    "nine taps of a block of 8": {"dflash_config": {"conv_kernel_size": 9}},
    "one head group": {"num_key_value_heads": 1},
    "no head groups": {"num_key_value_heads": 4},
    "bias": {"attention_bias": True},
    "plain": {"architecture": "DFlashDraftModel"},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}
# Variants that SGLang's model knows and the authors' does not.
STOCK_ONLY: dict[str, dict[str, Any]] = {
    "plain with convolution": {
        "architecture": "DFlashDraftModel",
        "dflash_config": {"conv_kernel_size": 2, "conv_group_size": 8},
    },
    "gemma norm": {"use_gemma_norm": True},
    "swigluoai": {"hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 1.5},
    "partial rope": {"partial_rotary_factor": 0.5},
    "interleaved rope": {"rope_is_neox_style": False},
    "partial interleaved rope": {"partial_rotary_factor": 0.25, "rope_is_neox_style": False},
    "rope_dim": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "rope_dim": 8,
            "mrope_section": [1, 2, 1],
        }
    },
}
