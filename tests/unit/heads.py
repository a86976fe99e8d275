"""SGLang's output heads, and the check of the candidates against the target's own logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dflash2_sglang.candidates import CandidateHead
from dflash2_sglang.head import TargetHead

WORDS, HIDDEN, K = 150, 64, 16  # SGLang pads to 192 rows


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(quant_config: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    return ParallelLMHead(
        WORDS, HIDDEN, params_dtype=dtype, quant_config=quant_config, prefix="lm_head", **options
    )


def target_logits(lm_head: Any, hidden: Tensor, **config: Any) -> Tensor:
    """What the target computes, [R, WORDS]."""
    from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    scale = config.pop("logit_scale", None)
    processor = LogitsProcessor(SimpleNamespace(vocab_size=WORDS, **config), logit_scale=scale)
    return processor._get_logits(hidden, lm_head, LogitsMetadata(ForwardMode.DECODE)).float()


def check(lm_head: Any, dtype: torch.dtype = torch.float32, uses_method: bool = True) -> None:
    hidden = numbers(5, HIDDEN, seed=3).to(dtype)
    head = TargetHead(lm_head)
    assert head.uses_method == uses_method
    head.check(hidden[:1])
    found = CandidateHead(head, K)(hidden, None)
    logits = target_logits(lm_head, hidden)[:, :WORDS]
    assert logits.std() > 0.1  # there is something to rank
    best = logits.topk(K)
    assert torch.equal(found.logits, best.values)
    assert torch.equal(logits.gather(1, found.tokens), best.values)  # bfloat16 has ties
    assert int(found.tokens.max()) < WORDS
    assert torch.allclose(found.log_norm, logits.logsumexp(-1), atol=1e-4)


def filled(lm_head: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Random words; what lies in the padding must never be seen."""
    lm_head.weight.data[:WORDS] = numbers(WORDS, HIDDEN).to(dtype) * 0.3
    lm_head.weight.data[WORDS:] = 100
    return lm_head
