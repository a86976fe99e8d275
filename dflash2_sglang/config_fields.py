"""Reading single fields of a drafter's config.json (engine-free); see ``config.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dflash2_sglang.config_refusals import PLAIN_ARCHITECTURES, CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"
# What a drafter's rope section states besides the parameters of its scaling.
_NOT_SCALING = {"rope_theta", "rope_dim", "partial_rotary_factor", "rope_type", "type"}
# Not "dynamic": transformers and SGLang disagree about it.
_ROPE_KINDS = ("default", "linear", "yarn", "llama3")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding; ``scaling`` is None for the plain kind, else it holds ``rope_type``."""

    theta: float
    dim: int
    neox: bool
    max_position: int
    scaling: Mapping[str, Any] | None = field(default=None, hash=False)


class Fields:
    """Looks a name up in ``dflash_config``, then in the (text) config; null counts as absent."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.body = {**raw, **(raw.get("text_config") or {})}
        self.section = self.body.get("dflash_config") or {}
        if not isinstance(self.section, Mapping):
            raise CheckpointError("dflash_config must be a JSON object in config.json.")

    def get(self, name: str, default: Any = None) -> Any:
        for place in (self.section, self.body):
            if place.get(name) is not None:
                return place[name]
        return default

    def integer(self, name: str, *, default: int | None = None, least: int = 1) -> int:
        value = self.get(name, default)
        if value is None:
            raise CheckpointError(
                f"{name} is missing from the drafter's config.json; "
                f"copy it from the original checkpoint."
            )
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{name} must be an integer in config.json, not {value!r}.")
        if value < least:
            raise CheckpointError(f"{name} must be at least {least} in config.json, not {value}.")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"{name} must be a number in config.json, not {value!r}.")
        return float(value)


def block_size(f: Fields) -> int:
    if f.get("block_size") is None:
        raise CheckpointError(
            "block_size is missing from the drafter's config.json: add the size it was trained "
            "with (8 for the Qwen checkpoints, 16 for Muse), for no default would be safe."
        )
    size = f.integer("block_size")
    if size < 2:
        raise CheckpointError(
            f"block_size={size} leaves nothing to draft; it counts the anchor, so it is 2 or more."
        )
    return size


def mask_token(f: Fields, vocab: int) -> int:
    if f.get("mask_token_id") is None:
        raise CheckpointError(
            "mask_token_id is missing from the drafter's config.json: add the token id it was "
            "trained with to dflash_config."
        )
    mask = f.integer("mask_token_id", least=0)
    if vocab and mask >= vocab:
        raise CheckpointError(
            f"mask_token_id={mask} is outside the vocabulary (vocab_size={vocab}); "
            f"it must be a row of the target's embedding."
        )
    return mask


def taps(f: Fields) -> tuple[int, ...]:
    layers = f.get("target_layer_ids")
    if not layers:
        raise CheckpointError(
            "target_layer_ids is missing from the drafter's config.json: add the target layers it "
            "was trained on to dflash_config."
        )
    if not isinstance(layers, (list, tuple)) or not all(type(t) is int and t >= 0 for t in layers):
        raise CheckpointError(
            f"target_layer_ids must be a list of layer numbers counted from 0, not {layers!r}."
        )
    if any(a >= b for a, b in pairwise(layers)):
        raise CheckpointError(
            f"target_layer_ids={list(layers)} must be strictly increasing, each layer once, "
            f"because features reach the drafter in layer order."
        )
    return tuple(layers)


def selector(f: Fields, vocab: int) -> tuple[int, int]:
    """Rank and top-k, both required."""
    for name in ("selector_rank", "selector_top_k"):
        if f.get(name) is None:
            raise CheckpointError(
                f"{name} is missing from the drafter's config.json: add it to dflash_config, or "
                f"declare the architecture {PLAIN_ARCHITECTURES[0]} if there is no selector."
            )
    top_k = f.integer("selector_top_k")
    if top_k > vocab:
        raise CheckpointError(f"selector_top_k={top_k} exceeds vocab_size={vocab}; lower it.")
    return f.integer("selector_rank"), top_k


def layer_types(f: Fields, layers: int) -> tuple[tuple[str, ...], int | None]:
    """The type of each layer, and the window (None without one).

    As in transformers, a Qwen config without ``use_sliding_window`` has no window.
    """
    # SGLang reads a window of the query alone as no window at all.
    window = f.integer("sliding_window", least=2) if f.get("sliding_window") is not None else None
    if str(f.get("model_type", "")).startswith("qwen") and not f.get("use_sliding_window"):
        window = None
    types = f.get("layer_types")
    if types is None:
        slides = window is not None and f.get("use_sliding_window")
        first = f.integer("max_window_layers", default=28, least=0) if slides else layers
        types = [SLIDING if i >= first else FULL for i in range(layers)]
    if isinstance(types, str) or len(types) != layers:
        raise CheckpointError(
            f"layer_types must list num_hidden_layers={layers} attention types, not {types!r}."
        )
    for i, kind in enumerate(types):
        if kind not in (FULL, SLIDING):
            raise CheckpointError(f"layer_types[{i}]={kind!r} must be {FULL!r} or {SLIDING!r}.")
    if SLIDING in types and window is None:
        raise CheckpointError(
            "layer_types has sliding layers but no window is set: add sliding_window (and, in a "
            "Qwen config, use_sliding_window=true) to config.json."
        )
    return tuple(types), window


def causality(f: Fields, architecture: str, types: tuple[str, ...]) -> tuple[bool, ...]:
    """``is_causal`` decides for all layers; without it only sliding layers are causal."""
    default = False if architecture == "MuseGlimmerAssistantModel" else None
    stated = f.get("is_causal", default)
    return tuple(kind == SLIDING if stated is None else bool(stated) for kind in types)


def rope(f: Fields, head_dim: int) -> Rope:
    params = f.get("rope_parameters") or f.get("rope_scaling") or {}
    if not isinstance(params, Mapping) or any(isinstance(v, Mapping) for v in params.values()):
        raise CheckpointError(
            "rope_parameters must be one flat JSON object; one rope per layer type is unsupported."
        )
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise CheckpointError(
            f"rope_type={kind!r} is not supported; a drafter uses one of {', '.join(_ROPE_KINDS)}."
        )
    scaling: dict[str, Any] = {"rope_type": kind}
    for name, value in params.items():
        # Drafters see one position per token, so the target's multimodal sections mean nothing.
        if name not in _NOT_SCALING and not name.startswith("mrope"):
            scaling[name] = value
    if kind == "yarn" and scaling.get("attention_factor") is not None:
        # SGLang multiplies its own default by attn_factor; transformers states the product.
        scaling["attn_factor"] = scaling.pop("attention_factor") / _yarn_default(scaling)
        scaling.pop("mscale", None)
    return Rope(
        theta=float(params.get("rope_theta") or f.number("rope_theta", 10000.0)),
        # rope_dim is the width it was trained with, whatever the target's partial factor was.
        dim=int(params.get("rope_dim") or head_dim * f.number("partial_rotary_factor", 1.0)),
        neox=bool(f.get("rope_is_neox_style", f.get("is_neox_style", True))),
        max_position=f.integer("max_position_embeddings", default=32768),
        scaling=None if kind == "default" else scaling,
    )


def _yarn_default(scaling: Mapping[str, Any]) -> float:
    return 0.1 * math.log(max(float(scaling.get("factor", 1.0)), 1.0)) + 1.0
