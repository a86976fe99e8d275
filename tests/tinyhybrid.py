"""A tiny hybrid target in the manner of ``tinypair``: gated delta net layers and attention.

Close to a bigram model as well; the context comes in through the convolution and recurrent states.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tinypair
import torch
from safetensors.torch import save_file
from tinypair import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB
from torch import Tensor

ARCHITECTURE = "Qwen3_5ForCausalLM"
VALUE_HEADS, STATE, WIDTH = 4, 16, 4


def write_hybrid(
    folder: Path,
    *,
    context: int = tinypair.CONTEXT,
    contextual: float = 0.35,
    interval: int = LAYERS,
    heads: int = VALUE_HEADS,
    seed: int = 0,
) -> Path:
    """``contextual`` scales what the layers add to the bigram model.

    Every ``interval``-th layer is attention; ``heads`` are the others' value heads, two to a key head.
    """
    tinypair.write_target(folder, context=context, seed=seed)  # its tokenizer, embedding and head
    (folder / "config.json").write_text(json.dumps(_config(context, interval, heads), indent=1))
    plain = tinypair._target_weights("LlamaForCausalLM", VOCAB, contextual, seed)
    weights = _weights(plain, contextual, interval, heads, seed)
    save_file(weights, folder / "model.safetensors")
    return folder


def _config(context: int, interval: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3_5_text",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "full_attention_interval": interval,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "linear_num_key_heads": heads // 2,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": STATE,
        "linear_value_head_dim": STATE,
        "linear_conv_kernel_dim": WIDTH,
        "vocab_size": VOCAB,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": tinypair.PAD,
        "eos_token_id": tinypair.EOS,
        "pad_token_id": tinypair.PAD,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "partial_rotary_factor": 0.5,
        "dtype": "float32",
    }


def _weights(
    plain: dict[str, Tensor], contextual: float, interval: int, heads: int, seed: int
) -> dict[str, Tensor]:
    key, value = heads // 2 * STATE, heads * STATE
    g = torch.Generator().manual_seed(seed + 1000)

    def normal(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=g) * (scale * columns**-0.5)

    kept = ("embed_tokens", "lm_head", ".mlp.")
    weights = {name: w for name, w in plain.items() if any(part in name for part in kept)}
    weights["model.norm.weight"] = torch.zeros(HIDDEN)  # this family's norms scale by 1 + weight
    for i in range(LAYERS):
        layer: dict[str, Tensor] = {
            "input_layernorm.weight": torch.zeros(HIDDEN),
            "post_attention_layernorm.weight": torch.zeros(HIDDEN),
        }
        if (i + 1) % interval == 0:
            layer |= {
                "self_attn.q_proj.weight": normal(2 * HEADS * HEAD_DIM, HIDDEN, 1.5),
                "self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN, 1.5),
                "self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM, 2 * contextual),
                "self_attn.q_norm.weight": torch.zeros(HEAD_DIM),
                "self_attn.k_norm.weight": torch.zeros(HEAD_DIM),
            }
        else:
            layer |= {
                "linear_attn.in_proj_qkv.weight": normal(2 * key + value, HIDDEN, 1.5),
                "linear_attn.in_proj_z.weight": normal(value, HIDDEN),
                "linear_attn.in_proj_b.weight": normal(heads, HIDDEN),
                "linear_attn.in_proj_a.weight": normal(heads, HIDDEN),
                "linear_attn.conv1d.weight": normal(2 * key + value, WIDTH).unsqueeze(1) * 1.5,
                # Decays from almost none to a few tokens.
                "linear_attn.dt_bias": torch.linspace(-5, -0.5, heads),
                "linear_attn.A_log": torch.linspace(-0.5, 0.5, heads),
                "linear_attn.norm.weight": torch.ones(STATE),
                "linear_attn.out_proj.weight": normal(HIDDEN, value, contextual),
            }
        weights |= {f"model.layers.{i}.{name}": w for name, w in layer.items()}
    return weights
