"""A tiny target as a GGUF file, quantised by the ``gguf`` package."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(target: Path, file: Path, kind: str = "Q8_0") -> Path:
    """Every matrix of the checkpoint in ``kind``, embedding and head included; norms in float32."""
    import gguf

    config = json.loads((target / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(config["eos_token_id"])
    for name, tensor in load_file(target / "model.safetensors").items():
        values = tensor.float().numpy()
        if tensor.dim() == 1:
            writer.add_tensor(gguf_name(name), values)
            continue
        quantisation = gguf.GGMLQuantizationType[kind]
        data = gguf.quantize(values, quantisation)
        writer.add_tensor(gguf_name(name), data, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if not name.startswith("model.layers."):
        return f"{NAMES[name]}.weight"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"
