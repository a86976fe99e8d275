"""A tiny target and a drafter that agrees with it by construction, written as real checkpoints.

The target is close to a bigram model: what follows a token depends on the token and, through small
attention and MLP outputs, on the context. The drafter's selector holds exactly the bigram part
(predecessor code = normed embedding, successor code = head row), and its layers disturb that by
what they read in the draft KV. So drafts are often right, and how often depends on every part of a
round: a lost or misplaced KV entry changes tokens (target) or acceptance (drafter).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 4, 4, 2, 16, 128
CONTEXT = 512
EOS, MASK, PAD = 0, 1, 2
SPECIAL = ("<eos>", "<mask>", "<pad>")
CHAT = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}a: "
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 {}[]\":,.-_\n!?()+*/=<>;'"
VOCAB = len(SPECIAL) + len(CHARACTERS)
TAPS = (0, 1, 2)


@dataclass(frozen=True)
class Pair:
    target: Path
    drafter: Path


def write_target(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    vocab: int = VOCAB,
    context: int = CONTEXT,
    contextual: float = 0.35,
    cap: float | None = None,
    seed: int = 0,
) -> Path:
    """``contextual`` scales what attention and MLP add to the bigram model; 0 leaves it pure.

    ``cap`` is the target's ``final_logit_softcapping``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "qwen3" if architecture == "Qwen3ForCausalLM" else "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": PAD,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    }
    if cap is not None:
        config["final_logit_softcapping"] = cap
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_target_weights(architecture, vocab, contextual, seed), folder / "model.safetensors")
    if vocab <= VOCAB:
        _write_tokenizer(folder, vocab)
    return folder


def _target_weights(
    architecture: str, vocab: int, contextual: float, seed: int
) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=g) * (scale * columns**-0.5)

    embedding = torch.randn(vocab, HIDDEN, generator=g)
    head = normal(vocab, HIDDEN, 2.5)
    # One long cycle through the vocabulary, lest greedy decoding repeats a single token.
    cycle = torch.randperm(vocab, generator=g)
    head[cycle.roll(-1)] += 0.12 * embedding[cycle]
    head[[MASK, PAD]] = 0  # never the most likely token
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    for i in range(LAYERS):
        layer = {
            "input_layernorm": torch.ones(HIDDEN),
            "post_attention_layernorm": torch.ones(HIDDEN),
            "self_attn.q_proj": normal(HEADS * HEAD_DIM, HIDDEN, 1.5),
            "self_attn.k_proj": normal(KV_HEADS * HEAD_DIM, HIDDEN, 1.5),
            "self_attn.v_proj": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": normal(HIDDEN, HEADS * HEAD_DIM, contextual),
            "mlp.gate_proj": normal(FFN, HIDDEN),
            "mlp.up_proj": normal(FFN, HIDDEN),
            "mlp.down_proj": normal(HIDDEN, FFN, contextual),
        }
        if architecture == "Qwen3ForCausalLM":
            layer["self_attn.q_norm"] = layer["self_attn.k_norm"] = torch.ones(HEAD_DIM)
        weights |= {f"model.layers.{i}.{name}.weight": w.clone() for name, w in layer.items()}
    return weights


def write_drafter(
    folder: Path,
    target: Path,
    architecture: str = "DFlash2DraftModel",
    *,
    block: int = 8,
    window: int | None = None,
    changes: Mapping[str, Any] | None = None,
    restless: bool = False,
    seed: int = 1,
) -> Path:
    """Two layers: both full, or the first sliding when there is a ``window``.

    With ``restless`` what the layers read in the draft KV weighs so much that it decides which
    drafts are made, good or bad.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    section: dict[str, Any] = {
        "target_layer_ids": list(TAPS),
        "mask_token_id": MASK,
        "block_size": block,
    }
    if architecture == "DFlash2DraftModel":
        section |= {"conv_kernel_size": 2, "conv_group_size": 8}
        section |= {"selector_rank": HIDDEN, "selector_top_k": min(64, vocab)}
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_target_layers": LAYERS,
        "layer_types": ["sliding_attention" if window else "full_attention", "full_attention"],
        "dtype": "float32",
        "dflash_config": section,
    }
    if window:
        config |= {"use_sliding_window": True, "sliding_window": window, "is_causal": False}
    config |= changes or {}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_drafter_weights(config, target, restless, seed), folder / "model.safetensors")
    return folder


def _drafter_weights(
    config: dict[str, Any], target: Path, restless: bool, seed: int
) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    from dflash2_sglang.checkpoint import expected_tensors
    from dflash2_sglang.config import parse

    g = torch.Generator().manual_seed(seed)
    theirs = load_file(target / "model.safetensors")
    embedding, head = theirs["model.embed_tokens.weight"], theirs["lm_head.weight"]
    weights: dict[str, Tensor] = {}
    for name, shape in expected_tensors(parse(config)).items():
        noise = torch.randn(shape, generator=g)
        if "norm" in name:
            weights[name] = torch.ones(shape)
        elif "base_kernel" in name:
            weights[name] = torch.zeros(shape)
            weights[name][:, 0] = 1  # the first tap copies
        elif name.endswith(("o_proj.weight", "down_proj.weight", "kernel_projection.weight")):
            weights[name] = noise * ((0.8 if restless else 0.4) * shape[-1] ** -0.5)
        else:
            weights[name] = noise * shape[-1] ** -0.5
    if "candidate_selector.hidden_projection.weight" not in weights:
        return weights
    # Small hidden states keep the head's own opinion out of the way; the projection undoes it.
    weights["norm.weight"] *= 0.05
    mask = _rms(embedding[MASK]) * 0.05
    ones = torch.ones(HIDDEN, 1) * (mask / mask.square().sum())
    noise = torch.randn(HIDDEN, HIDDEN, generator=g) * ((0.3 if restless else 0.15) / mask.norm())
    weights["candidate_selector.hidden_projection.weight"] = ones + noise
    # Sharper than the target: longer paths, and more at stake in each choice.
    sharp = 1.7 if restless else 1.0
    weights["candidate_selector.predecessor_codebook"] = _rms(embedding) * sharp
    weights["candidate_selector.successor_codebook"] = head.clone()
    return weights


def _rms(x: Tensor) -> Tensor:
    return x * x.square().mean(-1, keepdim=True).rsqrt()


def _write_tokenizer(folder: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Spelt in bytes, as llguidance wants it: these two are not printable.
    names = [*SPECIAL, *({" ": "Ġ", "\n": "Ċ"}.get(c, c) for c in CHARACTERS)][:vocab]
    tokenizer = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", mask_token="<mask>", pad_token="<pad>"
    )
    whole.chat_template = CHAT
    whole.save_pretrained(folder)


def encode(text: str) -> list[int]:
    return [len(SPECIAL) + CHARACTERS.index(c) for c in text]


def decode(ids: list[int]) -> str:
    return "".join(CHARACTERS[i - len(SPECIAL)] for i in ids if i >= len(SPECIAL))


class Pairs:
    """Writes each checkpoint that is asked for once a session."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[str, Path] = {}

    def target(self, architecture: str = "LlamaForCausalLM", **options: Any) -> Path:
        return self._make(write_target, architecture, options)

    def drafter(
        self, target: Path | None = None, architecture: str = "DFlash2DraftModel", **options: Any
    ) -> Path:
        return self._make(write_drafter, target or self.target(), architecture, options)

    def pair(self, **drafter: Any) -> Pair:
        """The usual target, and a drafter of its own kind."""
        return Pair(self.target(), self.drafter(**drafter))

    def _make(self, write: Any, *arguments: Any) -> Path:
        *positional, options = arguments
        key = repr((write.__name__, positional, sorted(options.items())))
        if key not in self._made:
            folder = self.root / f"{write.__name__}-{len(self._made)}"
            self._made[key] = write(folder, *positional, **options)
        return self._made[key]
