"""Turn a Llama-architecture GGUF file into a Hugging Face folder in bfloat16.

Only what the demo's SmolLM2 file needs is understood, and anything else is refused with a
``ValueError``. Every size comes from the file's own metadata.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# GGUF name -> Hugging Face name, outside and inside a layer ("blk.<i>.<name>.weight").
TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL_TOKEN_TYPE = 3  # "control" in GGUF's token_type

Metadata = dict[str, Any]
OnTensor = Callable[[int, int], None]


def convert_gguf(gguf_file: Path, out: Path, on_tensor: OnTensor | None = None) -> None:
    """Write config, weights and tokenizer of ``gguf_file`` into the existing folder ``out``.

    ``on_tensor(done, total)`` is called after each tensor.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    check_supported(metadata)
    write_weights(reader.tensors, metadata, out / "model.safetensors", on_tensor)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    write_config(metadata, tied, out)
    write_tokenizer(metadata, out)
    # safetensors makes its file readable by the owner alone; a cache may be shared.
    shutil.copymode(out / "config.json", out / "model.safetensors")


def check_supported(metadata: Metadata) -> None:
    """Refuse a file whose weights or tokenizer would be read wrong."""
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for key, value in expected.items():
        if metadata.get(key) != value:
            raise ValueError(f"the GGUF says {key} = {metadata.get(key)!r}, expected {value!r}")


# --- weights ---------------------------------------------------------------------------------


def write_weights(
    tensors: list[Any], metadata: Metadata, file: Path, on_tensor: OnTensor | None = None
) -> None:
    """De-quantise every tensor to bfloat16 and save them under their Hugging Face names."""
    from safetensors.torch import save_file

    weights = {}
    for done, (name, weight) in enumerate(hf_weights(tensors, metadata), start=1):
        weights[name] = weight
        if on_tensor:
            on_tensor(done, len(tensors))
    save_file(weights, file, metadata={"format": "pt"})


def hf_weights(tensors: list[Any], metadata: Metadata) -> Iterator[tuple[str, Any]]:
    """The file's tensors, one at a time, as (Hugging Face name, bfloat16 torch tensor)."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    rope_heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    for tensor in tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in rope_heads:
            weight = unpermute_rope(weight, rope_heads[part])
        # A copy: the reader's arrays are views of a read-only memory map.
        weight = np.array(weight, dtype=np.float32, order="C")
        yield hf_name(tensor.name), torch.from_numpy(weight).to(torch.bfloat16)


def hf_name(gguf_name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    match gguf_name.split("."):
        case [part, "weight"] if part in TOP_NAMES:
            return f"{TOP_NAMES[part]}.weight"
        case ["blk", layer, part, "weight"] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise ValueError(f"the GGUF holds a tensor of unknown meaning: {gguf_name!r}")


def unpermute_rope(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's order of the rows of q and k.

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a head; Hugging Face rotates rows
    (i, i + head_dim/2). Works on numpy arrays; rows are the first axis.
    """
    half = weight.shape[0] // heads // 2
    pairs = weight.reshape(heads, half, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


# --- configuration and tokenizer -------------------------------------------------------------


def write_config(metadata: Metadata, tied: bool, out: Path) -> None:
    """Write ``config.json`` and ``generation_config.json``."""
    from transformers import GenerationConfig, LlamaConfig

    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    token_ids = {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        head_dim=metadata.get("llama.rope.dimension_count", hidden // heads),
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=shortest_float(metadata["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={
            "rope_theta": shortest_float(metadata["llama.rope.freq_base"]),
            "rope_type": "default",
        },
        tie_word_embeddings=tied,
        dtype="bfloat16",
        **token_ids,
    ).save_pretrained(out)
    GenerationConfig(**token_ids).save_pretrained(out)


def shortest_float(value: float) -> float:
    """The shortest decimal with the same float32 value: 9.9999997e-06 is meant as 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def write_tokenizer(metadata: Metadata, out: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and the chat template.

    Built here because transformers' own GGUF route forgets that SmolLM2 splits digits off before
    anything else, which changes the tokens of text such as ``"a  1"``.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = metadata["tokenizer.ggml.tokens"]
    names = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe_tokenizer(metadata),
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{name: tokens[metadata[key]] for name, key in names.items()},
    )
    tokenizer.chat_template = metadata["tokenizer.chat_template"]
    tokenizer.save_pretrained(out)


def bpe_tokenizer(metadata: Metadata) -> Any:
    """The byte-level BPE tokenizer held in the GGUF, as a ``tokenizers.Tokenizer``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == SPECIAL_TOKEN_TYPE
        ]
    )
    return tokenizer
