"""Candidates come from the logits of the target's own ``LogitsProcessor``, whatever its head is made of.

Dense heads here, and the heads that are refused; ``test_quantised_heads.py`` has the others.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heads import HIDDEN, WORDS, K, check, filled, make, numbers, target_logits
from torch import Tensor

from dflash2_sglang.candidates import CandidateHead
from dflash2_sglang.head import TargetHead

pytestmark = pytest.mark.usefixtures("engine")

# Dense heads.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dense(dtype: torch.dtype) -> None:
    check(filled(make(dtype=dtype), dtype), dtype, uses_method=False)


def test_a_float32_head_of_a_bfloat16_target() -> None:
    check(filled(make()), torch.bfloat16, uses_method=False)


def test_tied_to_the_embedding() -> None:
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    check(filled(VocabParallelEmbedding(WORDS, HIDDEN)), uses_method=False)
    head = make()
    embedding = filled(VocabParallelEmbedding(WORDS, HIDDEN))
    check(head.tie_weights(embedding), uses_method=False)


def test_added_words_are_no_candidates() -> None:
    """They lie behind the padding of the vocabulary, where no token id points."""
    head = make(org_num_embeddings=WORDS - 20)
    head.weight.data[:] = 100
    head.weight.data[: WORDS - 20] = numbers(WORDS - 20, HIDDEN)
    hidden = numbers(4, HIDDEN, seed=1)
    found = CandidateHead(TargetHead(head), K)(hidden, None)
    logits = hidden @ head.weight[: WORDS - 20].T
    assert torch.equal(found.tokens, logits.topk(K).indices)
    assert torch.allclose(found.log_norm, logits.logsumexp(-1))


def test_no_more_words_than_the_drafter_knows() -> None:
    """Some targets call their padding words; the selector has no row for them."""
    hidden, head = numbers(4, HIDDEN, seed=1), filled(make())
    found = CandidateHead(TargetHead(head, vocab=100), K)(hidden, None)
    assert torch.equal(found.tokens, (hidden @ head.weight[:100].T).topk(K).indices)


def test_packed_for_the_cpu() -> None:
    """The CPU platform's own product, which multiplies in another order than the padded weight."""
    from dflash2_sglang.cpu import weights

    if not weights.supported():
        pytest.skip("oneDNN has no bfloat16 products here")
    head = filled(make(dtype=torch.bfloat16), torch.bfloat16)
    head.quant_method = weights.PackedHeadMethod(head.weight)
    check(head, torch.bfloat16)


# Scale, cap and precision of the target's logits are the target's own.


def test_scale_and_cap_of_the_target_are_not_the_drafters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drafter's config.json says what its logits were trained with (``transform_unary``)."""
    from sglang.srt.layers import logits_processor

    from dflash2_sglang.patches.cpu_softcap import softcap

    monkeypatch.setattr(
        logits_processor, "fused_softcap", lambda *args: softcap(pytest.fail, *args)
    )
    head, hidden = filled(make()), numbers(3, HIDDEN, seed=5)
    theirs = target_logits(head, hidden, logit_scale=0.5, final_logit_softcapping=4.0)
    pure = target_logits(head, hidden)
    assert torch.allclose(theirs, 4 * torch.tanh(pure / 2 / 4))
    found = CandidateHead(TargetHead(head), K)(hidden, None)
    assert torch.equal(found.logits, pure.topk(K).values)
    trained = lambda logits: 4 * torch.tanh(logits / 2 / 4)  # noqa: E731
    found = CandidateHead(TargetHead(head), K, trained)(hidden, None)
    assert torch.allclose(found.logits, theirs.topk(K).values)
    assert torch.allclose(found.log_norm, theirs.logsumexp(-1))


def test_a_float32_product_changes_digits_only() -> None:
    """``--enable-fp32-lm-head`` and the like: candidates keep the precision of the weight."""
    head = filled(make(dtype=torch.bfloat16), torch.bfloat16)
    hidden = numbers(6, HIDDEN, seed=5).bfloat16()
    exact = target_logits(head, hidden, enable_lm_head_fp32=True)
    assert not torch.equal(exact, target_logits(head, hidden))
    found = CandidateHead(TargetHead(head), K)(hidden, None)
    assert torch.allclose(exact.gather(1, found.tokens), found.logits, rtol=2**-8)


# What cannot work.


class Method:
    def __init__(self, apply: Callable[..., Any]) -> None:
        self.apply = apply


def odd(**changes: Any) -> Any:
    fields = {"org_vocab_size": WORDS, "weight": torch.zeros(WORDS, HIDDEN), **changes}
    return SimpleNamespace(**{k: v for k, v in fields.items() if v is not None})


def broken(*_: Any) -> Tensor:
    raise NotImplementedError("no kernel here.")


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (odd(org_vocab_size=None), "does not say which words its rows are"),
        (odd(weight=None), "has neither a weight nor a product"),
        (odd(weight=None, quant_method=object()), "has neither a weight nor a product"),
        (odd(weight=torch.zeros(2, 2, dtype=torch.int8)), "has a weight of torch.int8"),
        (odd(quant_method=Method(broken)), r"fails \(NotImplementedError: no kernel here\)"),
        (
            odd(quant_method=Method(lambda _, x, b: x)),
            rf"gives \[1, {HIDDEN}\] instead of \[1, {WORDS}\]",
        ),
        (odd(quant_method=Method(lambda _, x, b: torch.zeros(WORDS))), "gives"),
    ],
)
def test_heads_that_are_refused(head: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        TargetHead(head).check(torch.ones(1, HIDDEN))
    text = str(caught.value)
    assert text.startswith("DFLASH2 does not support the target's output head (SimpleNamespace")
    assert "serve a checkpoint whose lm_head is left unquantised" in text
    assert text.endswith(".") and ". " not in text  # one sentence


def test_targets_without_a_head() -> None:
    head = filled(make())
    for target in (
        SimpleNamespace(lm_head=head),
        SimpleNamespace(language_model=SimpleNamespace(lm_head=head)),
    ):
        assert TargetHead.of(target).lm_head is head
    with pytest.raises(ValueError, match="the target class SimpleNamespace, which has no lm_head"):
        TargetHead.of(SimpleNamespace())
