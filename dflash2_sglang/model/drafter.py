"""The DFlash 2 drafter on SGLang's layers.

B blocks of G tokens are drafted at once. They come flattened, T = B * G rows in order, so each
block is a run of G rows. The same model serves plain DFlash checkpoints, which have no selector.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import Tensor, nn

from dflash2_sglang.checkpoint import canonical, check_shape, check_tensors, expected_tensors
from dflash2_sglang.config import CheckpointError, parse
from dflash2_sglang.model.attention import (
    BlockAttention,
    RopeTable,
    Rotary,
    make_norm,
    norm_rope,
    norm_scale,
)
from dflash2_sglang.model.layer import DrafterLayer
from dflash2_sglang.model.selector import CandidateSelector

logger = logging.getLogger(__name__)

# Part of a checkpoint's tensor name -> (fused layer, shard of it).
_FUSED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class DFlash2Drafter(nn.Module):
    """Fills blocks; owns the projection of target features into draft KV, and the selector.

    It has neither an embedding nor a head: the worker lends it the target's.
    """

    draft_parallel_spec = DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)
    context_k_scale: Tensor  # [L, 1, head_dim] float32

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.drafter_config = c = parse(config.to_dict())
        if quant_config is not None:
            # SGLang hands a drafter the target's --quantization unless told otherwise.
            logger.info("The drafter is served unquantised, in the precision of its checkpoint.")
        prefix = f"{prefix}.layers" if prefix else "layers"
        self.rotary = Rotary(c)
        self.layers = nn.ModuleList(
            DrafterLayer(c, i, self.rotary, f"{prefix}.{i}") for i in range(c.num_layers)
        )
        self.norm, self.hidden_norm = make_norm(c, c.hidden_size), make_norm(c, c.hidden_size)
        self.fc = ReplicatedLinear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size, False)
        self.candidate_selector = CandidateSelector(c) if c.has_selector else None
        # K rows of all layers, then V rows: a copy of this rank's part of each qkv_proj.
        kv_size = self._attention(0).kv_size
        self.context_proj = ReplicatedLinear(
            c.hidden_size, 2 * c.num_layers * kv_size, bias=c.attention_bias
        )
        scale = torch.ones(c.num_layers, 1, c.head_dim, dtype=torch.float32)
        self.register_buffer("context_k_scale", scale, persistent=False)
        self._loaded = False
        self._embed: Callable[[Tensor], Tensor] | None = None

    def borrow_embedding(self, embed: Callable[[Tensor], Tensor]) -> None:
        """Use the target's embedding, ids [T] int64 -> rows [T, H], in ``forward``."""
        # A plain function, so that the target's module does not become part of this one.
        self._embed = lambda ids: embed(ids)

    def _attention(self, layer: int) -> BlockAttention:
        return self.layers[layer].self_attn  # type: ignore[return-value]

    # What SGLang asks of a draft model.

    def get_attention_sliding_window_size(self) -> int | None:
        return self.drafter_config.window_left

    def get_input_embeddings(self) -> None:
        return None

    # One round.

    @property
    def block_size(self) -> int:
        return self.drafter_config.block_size

    @property
    def embed_scale(self) -> float:
        """``forward`` multiplies its embeddings by this, so it is given the target's raw rows."""
        return self.drafter_config.input_embedding_scale

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        forward_batch: Any,
        embeds: Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors: Any = None,
    ) -> LogitsProcessorOutput:
        """Hidden states [T, H] after the final norm, for T = B * G embedded tokens.

        positions  [T] int64
        embeds     [T, H] rows of the target's embedding, not scaled by ``embed_scale``; without them,
                   those of input_ids [T] in the borrowed embedding. Not called ``input_embeds``:
                   under that name SGLang rounds them to bfloat16, and captured graphs of this family
                   read them from a buffer that nothing here fills.
        """
        if embeds is None:
            if self._embed is None or input_ids is None:
                raise ValueError("The drafter has no embedding: lend it the target's.")
            embeds = self._embed(input_ids)
        x = embeds.to(self.dtype)
        if x.shape[0] % self.block_size:
            raise ValueError(
                f"embeds has {x.shape[0]} rows, not a multiple of block_size={self.block_size}."
            )
        if x.shape[0]:
            x = self._run(
                x if self.embed_scale == 1.0 else x * self.embed_scale, positions, forward_batch
            )
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=x)

    def _run(self, x: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
        fused = x.is_cuda and x.dtype == torch.bfloat16 and self._attention(0).can_fuse
        table = None if fused else self.rotary.table(positions)

        def attend(attention: BlockAttention, y: Tensor) -> Tensor:
            return attention(y, positions, table, forward_batch)

        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, attend)
        return self.norm(x, residual)[0]

    @torch.no_grad()
    def project_context(self, features: Tensor) -> Tensor:
        """Target features [T, taps * H], in layer order, -> context [T, H]."""
        return self.hidden_norm(self.fc(features.to(self.dtype))[0])

    @torch.no_grad()
    def context_kv(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Draft keys (after norm and rope) and values of all layers, each [L, T, kv_heads, hd].

        context [T, H] from ``project_context``; positions [T] int64. Views: a row is contiguous.
        """
        c = self.drafter_config
        projected, _ = self.context_proj(context)
        # [T, K or V, L, kv_heads, head_dim]
        kv = projected.unflatten(-1, (2, c.num_layers, -1, c.head_dim))
        table = RopeTable(*(part.unsqueeze(1) for part in self.rotary.table(positions)))
        k = norm_rope(kv[:, 0], self.context_k_scale, c.rms_norm_eps, self.rotary, table)
        return k.transpose(0, 1), kv[:, 1].transpose(0, 1)

    def transform_unary(self, logits: Tensor) -> Tensor:
        """The checkpoint's own scaling of the head's logits, any shape, in float32."""
        c = self.drafter_config
        logits = logits.float()
        if c.output_multiplier != 1.0:
            logits = logits * c.output_multiplier
        if c.final_logit_softcapping is None:
            return logits
        return torch.tanh(logits / c.final_logit_softcapping) * c.final_logit_softcapping

    # Weights.

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a checkpoint; the first time it must be complete, later it may be an update."""
        expected = expected_tensors(self.drafter_config)
        parameters = dict(self.named_parameters())
        shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in weights:
            shapes[name] = tuple(tensor.shape)
            key = canonical(name)
            if key in expected:
                check_shape(name, shapes[name], expected[key])
                require_finite(name, tensor)
                _assign(parameters, key, tensor)
        unexpected = check_tensors(self.drafter_config, shapes, complete=not self._loaded)
        if unexpected:
            logger.warning("Tensors of the drafter that nothing uses: %s", ", ".join(unexpected))
        self._loaded = True
        self.post_load_weights()

    @torch.no_grad()
    def post_load_weights(self) -> None:
        """Derived weights; SGLang's loaders that bypass ``load_weights`` call it by this name."""
        attentions = [self._attention(i) for i in range(len(self.layers))]
        for attention in attentions:
            attention.set_scale()
        scales = [norm_scale(attention.k_norm) for attention in attentions]
        self.context_k_scale.copy_(torch.stack(scales).unsqueeze(1))
        for name in ("weight", "bias") if self.drafter_config.attention_bias else ("weight",):
            rows = [getattr(a.qkv_proj, name).data[a.kv_rows] for a in attentions]
            # [K or V, layer, ...] from [layer, K or V, ...]
            stacked = torch.stack([part for r in rows for part in r.chunk(2)])
            stacked = stacked.unflatten(0, (-1, 2)).transpose(0, 1)
            target = getattr(self.context_proj, name).data
            target.copy_(stacked.reshape(target.shape))


def require_finite(name: str, tensor: Tensor) -> None:
    # One reduction and no copy; NaN propagates through it.
    if not tensor.is_floating_point() or not tensor.numel():
        return
    low, high = torch.aminmax(tensor)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise CheckpointError(
            f"NaN or infinite values in tensor {name} of the draft checkpoint; download it again."
        )


def _assign(parameters: dict[str, nn.Parameter], key: str, tensor: Tensor) -> None:
    parts = key.split(".")
    if len(parts) > 1 and parts[-2] in _FUSED:
        parts[-2], shard = _FUSED[parts[-2]]
        parameter = parameters[".".join(parts)]
        parameter.weight_loader(parameter, tensor, shard)  # type: ignore[attr-defined]
        return
    parameter = parameters[key]
    getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
