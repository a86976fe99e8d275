"""SGLang's features as DFLASH2 meets them: what a test shows, what nobody tried; ``support.py`` has refusals.

``docs/compatibility.md`` is written from this table by ``docs/site/compatibility.py``. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["supported", "switched off", "not tested"]


@dataclass(frozen=True)
class Feature:
    """``tests``: ``file::function`` under tests/ that show it, at least one where it is supported.

    ``flags``: SGLang's own, as its parser spells them. ``note`` says where the claim ends, on the CPU or in
    general; in Markdown.
    """

    group: str
    name: str
    status: Status
    flags: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    note: str = ""


_SETUPS = "server/test_configurations.py::test_equals_plain_decoding"


def _supported(
    group: str, name: str, *tests: str, flags: tuple[str, ...] = (), note: str = ""
) -> Feature:
    return Feature(group, name, "supported", flags, tests, note)


def _untested(group: str, name: str, *flags: str, note: str = "") -> Feature:
    return Feature(group, name, "not tested", flags, (), note)


DEVICES = "Devices and precision"
MODELS = "Targets and drafters"
SCHEDULING = "Scheduling and memory"
PARALLEL = "Several devices and servers"
INTERFACES = "Interfaces"
OPERATION = "Operation"

FEATURES = (
    _supported(DEVICES, "CPU without an accelerator (x86-64)", _SETUPS),
    _untested(DEVICES, "NVIDIA GPU", note="written against SGLang's source, not run"),
    _untested(DEVICES, "AMD, Intel, Ascend and other accelerators"),
    _supported(
        DEVICES,
        "bfloat16",
        "server/test_demo.py::test_demo_in_bfloat16",
        flags=("--dtype",),
        note="texts may differ where two tokens are as good as equal, see [losslessness](losslessness.md)",
    ),
    _supported(
        DEVICES, "float32", "server/test_demo.py::test_demo_in_float32", _SETUPS, flags=("--dtype",)
    ),
    _untested(DEVICES, "float16", "--dtype"),
    _untested(
        DEVICES,
        "8-bit and 4-bit KV cache",
        "--kv-cache-dtype",
        note="refused at start-up but for float8 with flashinfer and fa3, see [GPUs](gpu.md)",
    ),
    _untested(DEVICES, "float32 head", "--enable-fp32-lm-head"),
    _untested(
        DEVICES,
        "Deterministic inference",
        "--enable-deterministic-inference",
        note="SGLang's source refuses it on this CPU backend",
    ),
    Feature(
        DEVICES,
        "CUDA graphs of decode rounds",
        "switched off",
        ("--disable-cuda-graph",),
        (),
        "`DFLASH2_CUDA_GRAPHS=1` turns them on; captured passes are held to plain decoding with a stand-in "
        "for graphs (`server/test_triton_backend.py`), and wait for a GPU",
    ),
    _supported(
        MODELS,
        "Llama targets (SmolLM2)",
        _SETUPS,
        "server/test_parity.py::test_equals_plain_decoding",
    ),
    _supported(MODELS, "Qwen3 dense targets", _SETUPS),
    _untested(
        MODELS,
        "Other dense targets",
        note="SGLang's class must have `set_dflash_layers_to_capture`; without, the start fails and says so",
    ),
    _supported(
        MODELS,
        "Hybrid targets with gated delta nets (Qwen3.5 text)",
        "server/test_hybrid.py::test_answers_are_those_of_plain_decoding",
        "server/test_hybrid_triton.py::test_equals_plain_decoding",
        note="other recurrent layers are refused, see [hybrid targets](hybrid.md)",
    ),
    _untested(MODELS, "Mixture-of-experts targets"),
    _untested(MODELS, "Targets with sliding windows"),
    _untested(
        MODELS,
        "Targets with attention sinks, logit caps or MLA",
        note="refused by the CPU platform, at its first forward",
    ),
    _supported(
        MODELS,
        "Quantised targets, GGUF and float8",
        "server/test_quantised.py::test_equals_plain_decoding",
        flags=("--quantization",),
        note="SGLang's layers with their kernels replaced by torch; others are not tested, and a head "
        "without logits of its own is refused",
    ),
    _supported(MODELS, "DFlash 2 drafters, block 8 and 16", _SETUPS),
    _supported(MODELS, "DFlash 2 drafters with sliding windows", _SETUPS),
    _supported(
        MODELS, "Plain DFlash drafters, without selector", _SETUPS, note="positions are independent"
    ),
    _untested(
        MODELS, "Muse drafters (`MuseGlimmerAssistantModel`)", note="parsed and checked; not served"
    ),
    _supported(
        SCHEDULING, "Overlap schedule, on and off", _SETUPS, flags=("--disable-overlap-schedule",)
    ),
    _supported(
        SCHEDULING,
        "Radix cache, on and off",
        _SETUPS,
        "server/test_parity.py::test_cached_prefixes_are_drafted_as_well",
        flags=("--disable-radix-cache",),
    ),
    _supported(SCHEDULING, "Chunked prefill", _SETUPS, flags=("--chunked-prefill-size",)),
    _supported(
        SCHEDULING, "Page size", _SETUPS, flags=("--page-size",), note="1 and 16; others not tested"
    ),
    _supported(
        SCHEDULING,
        "Retraction, too little KV for all requests",
        "server/test_configurations.py::test_retraction",
        "server/test_configurations.py::test_little_memory",
    ),
    _supported(
        SCHEDULING,
        "Requests that come, go and are aborted",
        "server/test_features.py::test_requests_join_and_leave",
        "server/test_features.py::test_aborts",
    ),
    _untested(SCHEDULING, "Priority scheduling", "--enable-priority-scheduling"),
    _untested(SCHEDULING, "Single-batch overlap", "--enable-single-batch-overlap"),
    _supported(
        PARALLEL,
        "Tensor parallelism",
        "server/test_tensor_parallel.py::test_equals_plain_decoding",
        "server/test_tensor_parallel.py::test_ranks_agree_on_sampled_paths",
        flags=("--tp-size",),
        note="2 ranks on a CPU; penalties, seeds and processors included",
    ),
    _untested(PARALLEL, "Replicas in one server", "--dp-size", note="not refused"),
    _untested(PARALLEL, "Several servers behind SGLang's router"),
    _untested(PARALLEL, "Expert parallelism", "--ep-size"),
    _untested(PARALLEL, "Context parallelism", "--attn-cp-size", "--dcp-size"),
    _supported(
        INTERFACES,
        "`/generate`, streaming included",
        "server/test_features.py::test_streaming",
        "server/test_endings.py::test_several_stops_at_once",
    ),
    _supported(
        INTERFACES,
        "OpenAI completions and chat completions",
        "server/test_openai.py::test_completions",
        "server/test_openai.py::test_chat",
    ),
    _supported(
        INTERFACES,
        "Tool calls and `response_format`",
        "server/test_constrained.py::test_tool_calls",
        "server/test_constrained.py::test_response_format",
        flags=("--tool-call-parser",),
    ),
    _supported(
        INTERFACES,
        "Grammars: xgrammar, llguidance, outlines",
        "server/test_constrained.py::test_equals_plain_decoding",
        "server/test_constrained.py::test_other_backends",
        flags=("--grammar-backend",),
    ),
    _untested(INTERFACES, "Grammars after reasoning", "--reasoning-parser", note="unit tests only"),
    _supported(
        INTERFACES, "SGLang frontend programs", "server/test_apis.py::test_frontend_programs"
    ),
    _supported(INTERFACES, "Offline engine", "server/test_apis.py::test_the_offline_engine"),
    _supported(
        INTERFACES,
        "Ids instead of text",
        "server/test_apis.py::test_ids_without_a_tokenizer",
        flags=("--skip-tokenizer-init",),
    ),
    _supported(
        INTERFACES,
        "Sessions",
        "server/test_endings.py::test_sessions_go_on_from_the_end_of_the_answer",
    ),
    _supported(
        INTERFACES,
        "Hidden states in responses",
        "server/test_apis.py::test_hidden_states",
        flags=("--enable-return-hidden-states",),
    ),
    _supported(
        INTERFACES,
        "Custom logit processors",
        "server/test_parameters.py::test_equals_plain_decoding",
        flags=("--enable-custom-logit-processor",),
    ),
    _supported(INTERFACES, "Scoring of prompts", "server/test_openai.py::test_scores"),
    _supported(
        OPERATION,
        "Prometheus metrics and decode log",
        "server/test_metrics.py::test_counters_are_the_sums_over_the_responses",
        "server/test_metrics.py::test_the_log_tells_it_at_the_interval",
        flags=("--enable-metrics", "--decode-log-interval"),
    ),
    _supported(
        OPERATION,
        "`/server_info`",
        "server/test_metrics.py::test_server_info_tells_the_resolved_configuration",
    ),
    _untested(OPERATION, "Updating weights of a running server"),
    _untested(OPERATION, "Releasing and resuming memory", "--enable-memory-saver"),
    _untested(OPERATION, "torch.compile", "--enable-torch-compile"),
)


def tree_backends() -> tuple[str, ...]:
    """Attention backends that can mask a tree, from the one table that refuses the others."""
    from dflash2_sglang import backends

    return backends.NAMES
