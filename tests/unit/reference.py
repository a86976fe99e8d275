"""Three implementations of one drafter, side by side on the CPU: ours, SGLang's and the authors'.

SGLang's layers need a process group and a published configuration even for one rank, and an
attention backend; ``engine`` sets up the first two and ``BlockAttentionBackend`` is the third.
"""

from __future__ import annotations

import contextlib
import copy
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # the stock model compiles parts of itself

import torch
from torch import Tensor
from transformers import Qwen3Config

VOCAB, HIDDEN, TAPS = 97, 48, (1, 3, 4)


def hf_config(architecture: str = "DFlash2DraftModel", **changes: Any) -> Qwen3Config:
    """A tiny drafter; names that are not Qwen3 fields are kept, as from a config.json."""
    section = {"target_layer_ids": list(TAPS), "mask_token_id": 5, "block_size": 8}
    if architecture != "DFlashDraftModel":
        section |= {"conv_kernel_size": 2, "conv_group_size": 8}
        section |= {"selector_rank": 12, "selector_top_k": 6}
    section |= changes.pop("dflash_config", {})
    fields: dict[str, Any] = {
        "architectures": [architecture],
        "hidden_size": HIDDEN,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_target_layers": 6,
        "block_size": section["block_size"],
        "layer_types": ["full_attention"] * 2,
        "dflash_config": section,
    }
    return Qwen3Config(**(fields | changes))


def make_config(changes: dict[str, Any]) -> Qwen3Config:
    """``hf_config`` of a shared case, which transformers may then alter."""
    return hf_config(**copy.deepcopy(changes))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def engine(rank: int = 0, world: int = 1, port: int | None = None) -> Iterator[None]:
    """One rank of SGLang, without a server."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    arguments = ServerArgs(model_path="dummy", tp_size=world)
    publish(arguments, role="test", ranks=SpawnRanks(world_rank=rank))
    parallel_state.init_distributed_environment(
        world_size=world,
        rank=rank,
        local_rank=rank,
        backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{port or free_port()}",
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        reset_context()
        torch.set_num_threads(threads)


class BlockAttentionBackend:
    """Plain attention of each block over its request's context KV and the block itself.

    context[b] is (k, v), each [L, P_b, kv_heads, head_dim]: the block of request b starts at
    position P_b. Both the window and the causality are the layer's.
    """

    def __init__(self, context: list[tuple[Tensor, Tensor]], block: int) -> None:
        self.context, self.block = context, block

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save: bool = True
    ) -> Tensor:
        from sglang.srt.layers.radix_attention import AttentionType

        rows = []
        for b, (past_k, past_v) in enumerate(self.context):
            part = slice(b * self.block, (b + 1) * self.block)
            keys = torch.cat((past_k[layer.layer_id], k[part]))
            values = torch.cat((past_v[layer.layer_id], v[part]))
            position = torch.arange(len(keys))
            gap = position[-self.block :, None] - position
            visible = torch.ones_like(gap, dtype=torch.bool)
            if layer.attn_type == AttentionType.DECODER:
                visible &= gap >= 0
            if layer.sliding_window_size >= 0:
                visible &= gap <= layer.sliding_window_size
            queries = q[part].reshape(self.block, -1, layer.head_dim)
            # [1, heads, tokens, head_dim]
            qh, kh, vh = (t.transpose(0, 1)[None] for t in (queries, keys, values))
            out = torch.nn.functional.scaled_dot_product_attention(
                qh, kh, vh, attn_mask=visible, scale=layer.scaling, enable_gqa=True
            )
            rows.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(rows)


def random_weights(config: Qwen3Config, seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint in the published names, float32, of a scale that keeps activations sensible."""
    from dflash2_sglang.checkpoint import expected_tensors
    from dflash2_sglang.config import parse

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_tensors(parse(config.to_dict())).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            noise = 0.2 * noise + (0 if getattr(config, "use_gemma_norm", False) else 1)
        elif "codebook" not in name and "base_kernel" not in name:
            noise = noise * (1.5 * shape[-1] ** -0.5)
        weights[name] = noise
    return weights


def build_ours(config: Qwen3Config, weights: dict[str, Tensor]) -> Any:
    from dflash2_sglang.model.drafter import DFlash2Drafter

    model = DFlash2Drafter(config)
    model.load_weights(weights.items())
    return model.eval()


def build_stock(config: Qwen3Config, weights: dict[str, Tensor]) -> Any:
    from sglang.srt.models import dflash

    model = getattr(dflash, config.architectures[0])(config)
    model.load_weights(weights.items())
    return model.eval()


def build_authors(config: Qwen3Config, weights: dict[str, Tensor]) -> Any:
    from dflash import model as authors

    model = getattr(authors, config.architectures[0])(config)
    names = {n: f"{n}.weight" if "codebook" in n else n for n in weights}
    model.load_state_dict({names[n]: w for n, w in weights.items()})
    return model.eval()


def run_block(model: Any, embeds: Tensor, context: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Hidden states [B, G, H] of a model on SGLang's layers; embeds [B, G, H]."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    block = embeds.shape[1]
    positions = torch.cat([k.shape[1] + torch.arange(block) for k, _ in context])
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, moe_num_token_non_padded=None)
    backend: Any = BlockAttentionBackend(context, block)
    with forward_context(ForwardContext(attn_backend=backend)), torch.no_grad():
        out = model.forward(None, positions, batch, embeds.flatten(0, 1).clone())
    return out.hidden_states.view(embeds.shape)


def context_ours(model: Any, features: Tensor) -> tuple[Tensor, Tensor]:
    """features [P, taps * H] -> k and v, each [L, P, kv_heads, head_dim]."""
    return model.context_kv(model.project_context(features), torch.arange(len(features)))


@torch.no_grad()
def context_stock(model: Any, features: Tensor) -> tuple[Tensor, Tensor]:
    context, positions = model.project_target_hidden(features), torch.arange(len(features))
    keys, values = [], []
    for layer in model.layers:
        attention = layer.self_attn
        k, v = attention.kv_proj_only(context)
        k = attention.apply_k_rope(positions, attention.apply_k_norm(k))
        keys.append(k.view(len(features), -1, attention.head_dim))
        values.append(v.view(len(features), -1, attention.head_dim))
    return torch.stack(keys), torch.stack(values)


@torch.no_grad()
def run_authors(model: Any, embeds: Tensor, features: list[Tensor]) -> Tensor:
    """Hidden states [B, G, H] of the authors' model, one request after the other."""
    rows = [
        model(
            position_ids=torch.arange(len(f) + embeds.shape[1])[None],
            noise_embedding=embeds[b : b + 1],
            target_hidden=f[None],
        )
        for b, f in enumerate(features)
    ]
    return torch.cat(rows)


def run_rank(rank: int, port: int, folder: str) -> None:
    """One of two tensor-parallel ranks; leaves what it computed for ``TP_CASES`` in a file."""
    with engine(rank, world=2, port=port):
        torch.save([run_case(hf_config(**case)) for case in TP_CASES], f"{folder}/{rank}.pt")


TP_CASES: list[dict[str, Any]] = [{"attention_bias": True}, {"num_key_value_heads": 1}]


def run_case(config: Qwen3Config) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [B, G, H] and the first request's context k and v on this rank."""
    ours = build_ours(config, random_weights(config))
    g = torch.Generator().manual_seed(7)
    features = [torch.randn(n, len(TAPS) * HIDDEN, generator=g) for n in (21, 4)]
    embeds = torch.randn(2, 8, HIDDEN, generator=g)
    context = [context_ours(ours, f) for f in features]
    return run_block(ours, embeds, context), *context[0]
