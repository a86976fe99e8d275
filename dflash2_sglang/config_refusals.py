"""Checkpoints that are not ours to serve, each refused by name (engine-free)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

SELECTOR_ARCHITECTURES = ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
PLAIN_ARCHITECTURES = ("DFlashDraftModel", "MuseGlimmerAssistantModel")
ARCHITECTURES = SELECTOR_ARCHITECTURES + PLAIN_ARCHITECTURES


class CheckpointError(ValueError):
    """A drafter checkpoint that cannot be served, in one sentence that names the fix."""


# Part of a foreign architecture's name (lower case) -> what it is, and what serves it.
_FOREIGN = (
    ("eagle3", "an EAGLE3 head; serve it with --speculative-algorithm EAGLE3"),
    ("eagle", "an EAGLE head; serve it with --speculative-algorithm EAGLE"),
    ("mtp", "a multi-token-prediction head; serve it with --speculative-algorithm NEXTN"),
    ("nextn", "a multi-token-prediction head; serve it with --speculative-algorithm NEXTN"),
    ("medusa", "a Medusa head, which SGLang does not serve"),
    ("dspark", "a DSpark drafter; serve it with --speculative-algorithm DSPARK"),
    ("lilicorr", "a LiLiCorr drafter; serve it with --speculative-algorithm DFLASH"),
    ("laguna", "a gated Laguna drafter; serve it with --speculative-algorithm DFLASH"),
    ("forcausallm", "an ordinary language model, not a drafter"),
    ("forconditionalgeneration", "an ordinary language model, not a drafter"),
)

_SPECULATORS_KEYS = (
    "speculators_model_type",
    "speculators_config",
    "speculators_version",
    "transformer_layer_config",
)
_ANCHOR_FIRST_KEYS = (
    "anchor_first",
    "sample_from_anchor",
    "query_zero_predicts_next",
    "shift_label",
)


def refuse_speculators_export(raw: Mapping[str, Any]) -> None:
    """A flat speculators config would be read wrong, and drafts would almost never be accepted."""
    keys = [key for key in _SPECULATORS_KEYS if raw.get(key) is not None]
    # EAGLE3 heads have these two as well, and are refused as what they are.
    if not any(_foreign_kind(str(name)) for name in raw.get("architectures") or ()):
        if not raw.get("dflash_config") and raw.get("aux_hidden_state_layer_ids") is not None:
            keys.append("aux_hidden_state_layer_ids")
        if raw.get("draft_vocab_size") not in (None, raw.get("vocab_size")):
            keys.append("draft_vocab_size")
    if keys:
        raise CheckpointError(
            f"This drafter is a speculators export ({keys[0]} in its config.json), whose layout "
            f"differs; use the original checkpoint in z-lab's format, with a dflash_config section."
        )


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The first architecture that this plugin serves."""
    stated = [str(name) for name in raw.get("architectures") or ()]
    for name in stated:
        if name in ARCHITECTURES:
            return name
    if not stated:
        raise CheckpointError(
            f"architectures is missing from the drafter's config.json; set it to one of "
            f"{', '.join(ARCHITECTURES)}."
        )
    hint = _foreign_kind(stated[0])
    raise CheckpointError(
        f"The drafter's architecture {stated[0]} is not served by DFLASH2, which serves "
        f"{', '.join(ARCHITECTURES)}" + (f": it looks like {hint}." if hint else ".")
    )


def _foreign_kind(name: str) -> str | None:
    return next((kind for part, kind in _FOREIGN if part in name.lower()), None)


def refuse_foreign_fields(get: Callable[[str], Any]) -> None:
    """Refuse each variant that shares an architecture name with DFlash but differs inside."""
    other = "this variant is not served by DFLASH2, so use --speculative-algorithm DFLASH for it"
    projector = get("projector_type")
    if projector not in (None, "dflash"):
        raise CheckpointError(f"projector_type={projector!r} (a Domino drafter): {other}.")
    for key in _ANCHOR_FIRST_KEYS:
        if get(key):
            raise CheckpointError(
                f"{key}={get(key)!r} declares an anchor-first layout, where the anchor's own "
                f"position drafts a token; DFLASH2 needs a checkpoint that drafts at masks only."
            )
    if get("lilicorr_enabled") or get("lilicorr_candidate_topk"):
        raise CheckpointError(f"lilicorr_* fields (a LiLiCorr drafter): {other}.")
    for key, what in (
        ("attention_sink_bias", "attention sinks"),
        ("gating", "gated attention"),
        ("has_embed_tokens", "an embedding of its own, as in Nemotron drafters"),
        ("has_lm_head", "a head of its own"),
    ):
        if get(key):
            raise CheckpointError(f"{key}={get(key)!r} ({what}): {other}.")
    if get("attention_value_scale") not in (None, 1, 1.0):
        raise CheckpointError(f"attention_value_scale={get('attention_value_scale')!r}: {other}.")
    if get("quantization_config"):
        raise CheckpointError(
            "quantization_config is set: DFLASH2 serves drafters in bf16, fp16 or fp32 only, so "
            "use the unquantised checkpoint (the target may be quantised)."
        )
