"""Candidates come from the logits of the target's own ``LogitsProcessor``, whatever its head is made of.

The heads are SGLang's, with SGLang's quant methods. Of those whose kernels need another device the
kernel alone is replaced, by the arithmetic it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash2_sglang.candidates import CandidateHead
from dflash2_sglang.head import TargetHead

pytestmark = pytest.mark.usefixtures("engine")

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


# Quantised heads.


def quantised(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(1, keepdim=True) / most
    return rows / scale, scale


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.float16, torch.bfloat16, "Q8_0", "Q4_0"], ids=str
)
def test_gguf(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head without a ``weight``. Blocks of 32 numbers share a scale; the words are not padded."""
    import gguf
    import hooks
    from sglang.srt.layers.quantization import gguf as layers

    for name in ("ggml_mul_mat_vec_a8", "ggml_mul_mat_a8", "ggml_dequantize"):
        monkeypatch.setattr(layers, name, None, raising=False)
    hooks.gguf_kernels()
    head = make(layers.GGUFConfig())
    assert not hasattr(head, "weight")
    rows = numbers(WORDS, HIDDEN)
    if isinstance(kind, str):
        name = gguf.GGMLQuantizationType[kind]
        data = torch.from_numpy(gguf.quantize(rows.numpy(), name))
    else:
        names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
        name, data = gguf.GGMLQuantizationType[names[kind]], rows.to(kind)
    head.qweight_type.weight_loader(head.qweight_type, torch.tensor(int(name)))
    head.qweight.weight_loader(head.qweight, data)
    head.quant_method.process_weights_after_loading(head)
    check(head, kind if isinstance(kind, torch.dtype) else torch.float32)


def compressed(weights: dict[str, Any], activations: dict[str, Any], kind: str) -> Any:
    """compressed-tensors with a group that names the head, as llm-compressor writes it."""
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    group = {"targets": ["re:.*lm_head"], "weights": weights, "input_activations": activations}
    return CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": kind,
            "config_groups": {"group_0": group},
            "ignore": [],
        }
    )


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ask CUDA which compute capability there is."""
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    monkeypatch.setattr(CompressedTensorsConfig, "_check_scheme_supported", lambda *_, **__: True)


@pytest.mark.usefixtures("any_device")
def test_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weight lies transposed, [H, V]."""
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_int8 as module,
    )

    def per_token(x: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = quantised(x.float(), 127)
        return values.round().to(torch.int8), scale

    def product(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out_dtype: Any, bias: Any) -> Tensor:
        return ((a.float() @ b.float()) * sa * sb.view(1, -1)).to(out_dtype)

    monkeypatch.setattr(module, "per_token_quant_int8", per_token)
    monkeypatch.setattr(module, "int8_scaled_mm", product, raising=False)
    shared = {"num_bits": 8, "type": "int", "symmetric": True}
    head = make(
        compressed(
            {**shared, "strategy": "channel", "dynamic": False},
            {**shared, "strategy": "token", "dynamic": True},
            "int-quantized",
        )
    )
    values, scale = quantised(numbers(WORDS, HIDDEN), 127)
    head.weight.data.fill_(100)[:WORDS] = values.round().to(torch.int8)
    head.weight_scale.data.fill_(1)[:WORDS] = scale
    head.quant_method.process_weights_after_loading(head)
    assert head.weight.shape[0] == HIDDEN
    check(head)


@pytest.mark.usefixtures("any_device")
def test_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_fp8 as module,
    )

    def product(input: Tensor, weight: Tensor, weight_scale: Tensor, **_: Any) -> Tensor:
        return input @ (weight.to(input.dtype) * weight_scale.view(1, -1).to(input.dtype))

    monkeypatch.setattr(module, "apply_fp8_linear", product)
    shared = {"num_bits": 8, "type": "float", "symmetric": True}
    head = make(
        compressed(
            {**shared, "strategy": "channel", "dynamic": False},
            {**shared, "strategy": "token", "dynamic": True},
            "float-quantized",
        )
    )
    values, scale = quantised(numbers(WORDS, HIDDEN), 448)
    head.weight.data.fill_(100)[:WORDS] = values.to(torch.float8_e4m3fn)
    head.weight_scale.data.fill_(1)[:WORDS] = scale
    head.quant_method.process_weights_after_loading(head)
    check(head)


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
