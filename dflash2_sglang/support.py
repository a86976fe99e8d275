"""Which SGLang settings DFLASH2 refuses, and what to do instead; attention backends: ``backends.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash2_sglang import hybrid


@dataclass(frozen=True)
class Refusal:
    """``wants(args)`` tells that the user asked for it; ``fix`` completes the sentence."""

    setting: str
    wants: Callable[[Any], bool]
    fix: str

    @property
    def message(self) -> str:
        return f"DFLASH2 does not support {self.setting}: {self.fix}."


def _above(name: str, limit: int) -> Callable[[Any], bool]:
    return lambda args: int(getattr(args, name) or 0) > limit


def _set(*names: str) -> Callable[[Any], bool]:
    return lambda args: any(bool(getattr(args, name)) for name in names)


REFUSALS = (
    Refusal("--pp-size above 1", _above("pp_size", 1), "use --tp-size instead"),
    Refusal(
        "--disaggregation-mode",
        lambda args: args.disaggregation_mode not in (None, "null"),
        "serve prefill and decode in one server (leave it at 'null')",
    ),
    Refusal("LoRA (--enable-lora, --lora-paths)", _set("enable_lora", "lora_paths"), "drop it"),
    Refusal(
        "data-parallel attention (--attn-dp-size, --enable-dp-attention)",
        # SGLang turns the older flag into the size before it asks us.
        lambda args: bool(args.enable_dp_attention) or int(args.attn_dp_size or 1) > 1,
        "run several servers behind SGLang's router for data parallelism",
    ),
    Refusal("--enable-unified-memory", _set("enable_unified_memory"), "drop it"),
    Refusal("--enable-two-batch-overlap", _set("enable_two_batch_overlap"), "drop it"),
    Refusal("--enable-linear-replayssm-spec", _set("enable_linear_replayssm_spec"), "drop it"),
    Refusal("--enable-hierarchical-cache", _set("enable_hierarchical_cache"), "drop it"),
    Refusal("--enable-mixed-chunk", _set("enable_mixed_chunk"), "drop it"),
    Refusal("--enable-watermark", _set("enable_watermark"), "drop it"),
    Refusal(
        "--rl-on-policy-target",
        _set("rl_on_policy_target"),
        "use --enable-deterministic-inference instead",
    ),
    Refusal("--speculative-adaptive", _set("speculative_adaptive"), "drop it"),
    Refusal(
        "--speculative-use-rejection-sampling",
        _set("speculative_use_rejection_sampling"),
        "drop it; the tree's own acceptance rule already follows the target's distribution",
    ),
    Refusal(
        "--speculative-draft-model-quantization",
        # SGLang fills it in with the target's --quantization where the user says nothing.
        lambda args: bool(
            getattr(args, "_speculative_draft_quantization_explicitly_set", True)
            and args.speculative_draft_model_quantization
        ),
        "drop it; the drafter is served in the precision of its checkpoint",
    ),
    Refusal(
        "--speculative-draft-window-size",
        _set("speculative_draft_window_size"),
        "drop it; the checkpoint's sliding_window applies",
    ),
    Refusal(
        "--speculative-dflash-block-size",
        _set("speculative_dflash_block_size"),
        "drop it; the checkpoint's block_size applies, and --speculative-num-steps cuts the depth",
    ),
    Refusal(
        "--speculative-accept-threshold-single or -acc below 1",
        lambda args: (
            min(args.speculative_accept_threshold_single, args.speculative_accept_threshold_acc) < 1
        ),
        "leave them at 1; relaxed acceptance would change the output",
    ),
)


def refuse_settings(args: Any) -> None:
    """Raise ValueError for the first setting of ``args`` that is not supported."""
    for refusal in REFUSALS:
        if refusal.wants(args):
            raise ValueError(refusal.message)


def refuse_recurrent(args: Any, model_config: Any, nodes: int) -> None:
    """Raise ValueError where a tree of ``nodes`` cannot be verified through recurrent layers."""
    if not hybrid.is_recurrent(model_config):
        return
    architecture = model_config.hf_config.architectures[0]
    if hybrid.delta_net(model_config) is None or architecture.startswith("Qwen4"):
        raise ValueError(
            f"DFLASH2 does not support {architecture}, whose recurrent layers are not gated delta nets "
            "alone: use --speculative-algorithm DFLASH."
        )
    if not args.disable_radix_cache and args.mamba_track_interval < nodes:
        raise ValueError(
            f"DFLASH2 does not support --mamba-track-interval {args.mamba_track_interval} with {nodes} "
            "nodes, as one round may pass two of the states the cache keeps: raise it to at least "
            "--speculative-num-draft-tokens."
        )
    if args.enable_linear_replayssm:
        raise ValueError(
            "DFLASH2 does not support --enable-linear-replayssm, which verify passes would bypass: "
            "drop it."
        )


def refuse_state_pages(page: int, interval: int) -> None:
    """Raise ValueError where recurrent states cannot be cached with pages of ``page`` tokens.

    interval  ``--mamba-track-interval``, the tokens of an answer between two cached states
    """
    grid = hybrid.PROMPT_GRID
    if max(page, grid) % min(page, grid):
        raise ValueError(
            f"DFLASH2 does not support --page-size {page} with a hybrid target, whose states are cached "
            f"every {grid} tokens of a prompt: use a page size that divides {grid}, or "
            "--disable-radix-cache."
        )
    if interval % page:
        raise ValueError(
            f"DFLASH2 does not support --mamba-track-interval {interval} with --page-size {page}, as states "
            "are cached at the ends of pages: make the interval a multiple of the page size."
        )


def refuse_conv_dtype(kept: str, computed: str) -> None:
    """Raise ValueError where convolution states are kept in another dtype than they were computed in."""
    if kept != computed:
        raise ValueError(
            f"DFLASH2 does not support {hybrid.CONV_DTYPE}={kept} with --dtype {computed}, as rounds would "
            "round differently from plain decoding: unset it."
        )


def refuse_request(req: Any) -> str | None:
    """Why a request cannot be served exactly, or None.

    Where SGLang itself does not ask, a request that no forward can compute would end the whole server.
    """
    if req.multimodal_inputs is not None:
        return "DFLASH2 does not support multimodal inputs yet: send text only."
    if getattr(req, "return_sampling_mask", False):
        return "DFLASH2 does not support return_sampling_mask yet: leave it out."
    tokens, vocab = req.origin_input_ids, req.vocab_size
    if not len(tokens):
        return "DFLASH2 cannot continue a prompt of no tokens: send one at least."
    if min(tokens) < 0 or max(tokens) >= vocab:
        return f"The prompt has a token id outside the vocabulary of {vocab}: check input_ids."
    if req.logprob.top_logprobs_num > vocab:
        return f"top_logprobs_num is {req.logprob.top_logprobs_num}: ask for at most {vocab}."
    return None
