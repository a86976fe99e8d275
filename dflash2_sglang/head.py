"""The target's output head, borrowed: dense, packed or quantised, whole or one rank's part of it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.runtime_context import get_parallel

DENSE = (torch.float32, torch.bfloat16, torch.float16)
FIX = (
    "serve a checkpoint whose lm_head is left unquantised (the body may be quantised), or drop "
    "--speculative-algorithm"
)


class TargetHead:
    """Logits of this rank's words, from the product that the target itself uses.

    ranks         over how many ranks the vocabulary is split; 1 where each rank holds the whole head
    first, width  this rank's words are first .. first + width - 1; padding and words that were added
                  behind the vocabulary are not among them

    Scale and cap of the TARGET's logits are left out: the drafter was trained on the head's own
    output, with what its config.json says (``output_multiplier``, ``final_logit_softcapping``). So
    is ``--enable-fp32-lm-head``: a draft needs a ranking, not the last digits.
    """

    def __init__(self, lm_head: Any, vocab: int = 0) -> None:
        """``vocab`` words at most; 0 for all that the head has.

        Raises:
            ValueError: no full logits can be had from this head; one sentence with the fix.
        """
        self.lm_head = lm_head
        if not hasattr(lm_head, "org_vocab_size"):
            raise ValueError(_refusal(lm_head, "does not say which words its rows are"))
        ranks = get_parallel().tp_size
        self.ranks = min(ranks, int(getattr(lm_head, "tp_size", ranks)))
        end = int(lm_head.org_vocab_size)
        self.first = 0
        if self.ranks > 1:
            shard = lm_head.shard_indices
            self.first = int(shard.org_vocab_start_index)
            end = self.first + int(shard.num_org_elements)
        self.width = max(0, (min(end, vocab) if vocab else end) - self.first)
        self.uses_method = self._uses_method()

    def _uses_method(self) -> bool:
        """Whether the head's quant method makes the product, by the rule of the target's own logits."""
        method, weight = (getattr(self.lm_head, name, None) for name in ("quant_method", "weight"))
        if should_apply_lm_head_quant_method(self.lm_head, method):
            return True
        if weight is None:  # AWQ, GPTQ and GGUF have no tensor of this name
            if callable(getattr(method, "apply", None)):
                return True
            raise ValueError(_refusal(self.lm_head, "has neither a weight nor a product"))
        if weight.dtype not in DENSE:
            raise ValueError(_refusal(self.lm_head, f"has a weight of {weight.dtype}"))
        return False

    @classmethod
    def of(cls, target_model: Any, vocab: int = 0) -> TargetHead:
        """That of a target class of SGLang; classes that wrap a language model have it one level down."""
        head = getattr(target_model, "lm_head", None)
        if head is None:
            head = getattr(getattr(target_model, "language_model", None), "lm_head", None)
        if head is None:
            raise ValueError(
                f"DFLASH2 does not support the target class {type(target_model).__name__}, which has no "
                "lm_head: serve another target, or drop --speculative-algorithm."
            )
        return cls(head, vocab)

    def check(self, hidden: torch.Tensor) -> None:
        """Try the product once on hidden [R, H].

        Raises:
            ValueError: it fails, or is not [R, >= width]; one sentence with the fix.
        """
        if not self.uses_method:
            return
        try:
            shape = tuple(self.lm_head.quant_method.apply(self.lm_head, hidden, None).shape)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".rstrip(".")
            raise ValueError(_refusal(self.lm_head, f"fails ({reason})")) from error
        if len(shape) != 2 or shape[0] != hidden.shape[0] or shape[1] < self.width:
            wanted = f"[{hidden.shape[0]}, {self.width}]"
            raise ValueError(_refusal(self.lm_head, f"gives {list(shape)} instead of {wanted}"))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, width], in the product's own dtype."""
        if self.uses_method:
            logits = self.lm_head.quant_method.apply(self.lm_head, hidden, None)
        else:
            weight = self.lm_head.weight
            logits = hidden.to(weight.dtype) @ weight.T
        return logits[:, : self.width]


def _refusal(lm_head: Any, reason: str) -> str:
    method = getattr(lm_head, "quant_method", None)
    kind = type(lm_head).__name__ + (f" with {type(method).__name__}" if method else "")
    return f"DFLASH2 does not support the target's output head ({kind}), which {reason}: {FIX}."
