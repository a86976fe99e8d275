"""The drafter's config.json, parsed and validated once into one frozen dataclass.

Engine-free: standard library only, so ``doctor`` can check a checkpoint without loading SGLang.
A field of the method may stand in the ``dflash_config`` section or at the top level; the section
wins. Every problem is a ``CheckpointError`` of one sentence that names the fix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_sglang import config_fields as read
from dflash2_sglang.config_fields import FULL, SLIDING, Rope
from dflash2_sglang.config_refusals import (
    SELECTOR_ARCHITECTURES,
    CheckpointError,
    architecture_of,
    refuse_foreign_fields,
    refuse_speculators_export,
)

__all__ = ["CheckpointError", "DrafterConfig", "Rope", "check_target", "load", "parse"]


@dataclass(frozen=True)
class DrafterConfig:
    """What a DFlash or DFlash 2 drafter is."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # 0: a plain drafter that does not state it
    rms_norm_eps: float
    gemma_norm: bool  # RMSNorm multiplies by 1 + weight
    hidden_act: str  # "silu" or "swigluoai"
    swiglu_alpha: float
    swiglu_limit: float
    attention_bias: bool
    rope: Rope
    block_size: int  # G: the anchor and G - 1 masks
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # the taps: hidden states AFTER these layers, from 0
    num_target_layers: int | None
    layer_types: tuple[str, ...]
    is_causal: tuple[bool, ...]  # of each layer, inside the block
    sliding_window: int | None  # keys a query sees, itself included, as in transformers
    conv_kernel_size: int  # 0: no convolution
    conv_group_size: int
    selector_rank: int  # 0: no selector
    selector_top_k: int
    output_multiplier: float
    final_logit_softcapping: float | None
    input_embedding_scale: float

    @property
    def has_selector(self) -> bool:
        return self.selector_rank > 0

    @property
    def has_conv(self) -> bool:
        return self.conv_kernel_size > 0

    @property
    def depth(self) -> int:
        """Tokens drafted per block."""
        return self.block_size - 1

    @property
    def window_left(self) -> int | None:
        """SGLang's window: keys BEFORE the query. None when every layer sees all the context."""
        if self.sliding_window is None or SLIDING not in self.layer_types:
            return None
        return self.sliding_window - 1

    def layer_window(self, layer: int) -> int:
        """``window_left`` of one layer, -1 for a full layer."""
        window = self.window_left
        return -1 if window is None or self.layer_types[layer] == FULL else window


def load(path: str | Path) -> DrafterConfig:
    """Parse ``config.json`` of a checkpoint folder (or the file itself)."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist; point --speculative-draft-model-path at a DFlash 2 checkpoint."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); download it again.") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} must hold a JSON object; download it again.")
    return parse(raw)


def parse(raw: Mapping[str, Any]) -> DrafterConfig:
    """Validate config.json as a dict, or a ``PretrainedConfig.to_dict()`` of it."""
    refuse_speculators_export(raw)
    architecture = architecture_of(raw)
    f = read.Fields(raw)
    refuse_foreign_fields(f.get)
    has_selector = architecture in SELECTOR_ARCHITECTURES
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    layers, head_dim = (
        f.integer("num_hidden_layers"),
        f.integer("head_dim", default=hidden // heads),
    )
    vocab = f.integer("vocab_size", default=None if has_selector else 0, least=int(has_selector))
    rank, top_k = read.selector(f, vocab) if has_selector else (0, 0)
    types, window = read.layer_types(f, layers)
    conv = f.integer("conv_kernel_size", default=0, least=0)
    config = DrafterConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=f.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=f.integer("num_key_value_heads", default=heads),
        head_dim=head_dim,
        vocab_size=vocab,
        rms_norm_eps=f.number("rms_norm_eps", 1e-6),
        gemma_norm=bool(f.get("use_gemma_norm", False)),
        hidden_act=f.get("hidden_act", "silu"),
        swiglu_alpha=f.number("swiglu_alpha", 1.702),
        swiglu_limit=f.number("swiglu_limit", 7.0),
        attention_bias=bool(f.get("attention_bias", False)),
        rope=read.rope(f, head_dim),
        block_size=read.block_size(f),
        mask_token_id=read.mask_token(f, vocab),
        target_layer_ids=read.taps(f),
        num_target_layers=f.integer("num_target_layers", default=0, least=0) or None,
        layer_types=types,
        is_causal=read.causality(f, architecture, types),
        sliding_window=window,
        conv_kernel_size=conv,
        conv_group_size=f.integer("conv_group_size") if conv else 0,
        selector_rank=rank,
        selector_top_k=top_k,
        output_multiplier=f.number("output_multiplier", 1.0),
        final_logit_softcapping=max(f.number("final_logit_softcapping", 0.0), 0.0) or None,
        input_embedding_scale=f.number("input_embedding_scale", 1.0),
    )
    _check_consistency(config)
    return config


def _check_consistency(c: DrafterConfig) -> None:
    if c.num_heads % c.num_kv_heads:
        raise CheckpointError(
            f"num_key_value_heads={c.num_kv_heads} must divide num_attention_heads={c.num_heads}."
        )
    if c.has_conv and c.hidden_size % c.conv_group_size:
        raise CheckpointError(
            f"conv_group_size={c.conv_group_size} must divide hidden_size={c.hidden_size}."
        )
    if c.hidden_act not in ("silu", "swigluoai"):
        raise CheckpointError(
            f"hidden_act={c.hidden_act!r} is not supported; a drafter uses 'silu' or 'swigluoai'."
        )
    if c.output_multiplier <= 0:
        raise CheckpointError(f"output_multiplier={c.output_multiplier} must be positive.")
    if c.window_left is not None and c.window_left < c.depth and not all(c.is_causal):
        raise CheckpointError(
            f"sliding_window={c.sliding_window} must be at least block_size={c.block_size} unless "
            f"is_causal is set, or the block could not see all of itself."
        )
    last = c.target_layer_ids[-1]
    if c.num_target_layers is not None and last >= c.num_target_layers:
        raise CheckpointError(
            f"target_layer_ids names layer {last} but num_target_layers is {c.num_target_layers}, "
            f"so its largest entry can be {c.num_target_layers - 1}."
        )


def check_target(draft: DrafterConfig, target: Mapping[str, Any]) -> None:
    """Refuse a drafter made for another target; ``target`` is the target's config as a dict."""
    body = {**target, **(target.get("text_config") or {})}
    vocab, layers = body.get("vocab_size"), body.get("num_hidden_layers")
    last = draft.target_layer_ids[-1]
    advice = "use the drafter that was trained for this target."
    for name, ours in (
        ("hidden_size", draft.hidden_size),
        ("vocab_size", draft.vocab_size or None),
    ):
        theirs = body.get(name)
        if theirs is not None and ours is not None and theirs != ours:
            raise CheckpointError(
                f"The drafter's {name} is {ours} but the target's is {theirs}; {advice}"
            )
    if vocab is not None and draft.mask_token_id >= vocab:
        raise CheckpointError(
            f"mask_token_id={draft.mask_token_id} is outside the target's vocabulary "
            f"(vocab_size={vocab}); {advice}"
        )
    if layers is not None and last >= layers:
        raise CheckpointError(
            f"target_layer_ids names layer {last} but the target has {layers} layers; {advice}"
        )
    if layers is not None and draft.num_target_layers not in (None, layers):
        raise CheckpointError(
            f"num_target_layers is {draft.num_target_layers} but the target has {layers} layers; "
            f"{advice}"
        )
