"""Targets with recurrent layers (the gated delta nets of Qwen3-Next, Qwen3.5, Qwen3.8).

A verify pass keeps the states after every node of every tree, so that the accepted node's can be kept:
most of the memory that such a target needs beyond its weights.
"""

from __future__ import annotations

import logging
import os
from typing import Any

CONV_DTYPE = "SGLANG_MAMBA_CONV_DTYPE"
SLOTS_PER_REQUEST = 5  # what SGLang keeps for a running request: its own, two snapshots, two cached
PROMPT_GRID = 64  # tokens of a prompt between two states that SGLang's prefix cache may keep

_ours: str | None = None  # what was set here, for an earlier engine of this process

logger = logging.getLogger(__name__)


def delta_net(model_config: Any) -> Any:
    """The text config of a target with gated delta net layers, else None."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    return hybrid_gdn_config(model_config)


def is_recurrent(model_config: Any) -> bool:
    """Whether any layer of the target keeps a state other than keys and values."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config) is not None


def compute_dtype(args: Any, model_config: Any) -> str:
    """Name of the dtype the target computes in: float32, float16 or bfloat16."""
    names = {"half": "float16", "float": "float32"}
    if args.dtype != "auto":
        return names.get(args.dtype, args.dtype)
    return str(model_config.dtype).removeprefix("torch.")


def keep_conv_inputs_exact(dtype: str) -> str:
    """Have SGLang keep convolution states in ``dtype``, unless the user chose; returns their dtype.

    They are inputs of tokens, as computed. SGLang's default is bfloat16 whatever the model computes in.
    Then what a token is convolved with would depend on whether a round began in between.
    """
    global _ours
    chosen = os.environ.get(CONV_DTYPE)
    if chosen is not None and chosen != _ours:
        return chosen
    if dtype == "bfloat16":
        os.environ.pop(CONV_DTYPE, None)
    elif chosen != dtype:
        os.environ[CONV_DTYPE] = _ours = dtype
        logger.info("Convolution states are kept in %s (%s).", dtype, CONV_DTYPE)
    return dtype


def state_bytes(config: Any, dtype: str) -> int:
    """Bytes of the states of one request, in all gated delta net layers; recurrent ones in float32."""
    key = config.linear_num_key_heads * config.linear_key_head_dim
    value = config.linear_num_value_heads * config.linear_value_head_dim
    conv = (2 * key + value) * (config.linear_conv_kernel_dim - 1)
    recurrent = value * config.linear_key_head_dim
    layer = conv * (4 if dtype == "float32" else 2) + recurrent * 4
    return layer * len(config.linear_layer_ids)


def clear_states(pool: Any, rows: Any) -> None:
    """Zero the recurrent states that requests at ``rows`` [B] of a slot table read, if there are any.

    pool  SGLang's ReqToTokenPool; a row that no request owns reads the states that belong to padding
    """
    states = getattr(pool, "mamba_pool", None)
    if states is None:
        return
    slots = pool.get_mamba_indices(rows).long()
    for state in (*states.mamba_cache.conv, states.mamba_cache.temporal):
        state[:, slots] = 0
