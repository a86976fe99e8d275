"""What a test changes inside a server before it starts; its processes are forks and inherit it.

``serve(..., env={"DFLASH2_TEST_HOOKS": "hooks:name"})`` runs the function of that name, see ``launcher.py``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def tp_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


# Tensor parallelism: each rank writes down its trees, and one rank can be made to err.


def record_trees() -> None:
    """A line for each round in ``$TREES/<rank>``; ``$TREES/fault`` names what rank 1 does wrong."""
    from dflash2_sglang.candidates import CandidateHead
    from dflash2_sglang.draft import Drafting

    folder = Path(os.environ["TREES"])
    drafting, draws, candidates = Drafting.__call__, Drafting._draws, CandidateHead.__call__

    def wrong(name: str) -> bool:
        file = folder / "fault"
        return tp_rank() == 1 and file.exists() and file.read_text() == name

    def recorded(self: Any, *args: Any) -> Any:
        if wrong("raise"):
            raise RuntimeError("an injected fault")
        tree, lattice = drafting(self, *args)
        with (folder / str(tp_rank())).open("a") as file:
            print(digest(tree), file=file)
        return tree, lattice

    def own_coins(self: Any, *args: Any) -> Any:
        found = draws(self, *args)
        if found is None or not wrong("coins"):
            return found
        return found._replace(coins=torch.rand_like(found.coins))

    def own_candidates(self: Any, *args: Any) -> Any:
        found = candidates(self, *args)
        return found._replace(tokens=found.tokens.roll(1, -1)) if wrong("candidates") else found

    Drafting.__call__ = recorded  # type: ignore[method-assign]
    Drafting._draws = own_coins  # type: ignore[method-assign]
    CandidateHead.__call__ = own_candidates  # type: ignore[method-assign]


def digest(tree: Any) -> str:
    """Of everything that verification and acceptance read."""
    fields = [field for field in (*tree, *(tree.proposal or ())) if isinstance(field, Tensor)]
    whole = b"".join(bytes(field.contiguous().numpy().tobytes()) for field in fields)
    return f"{tuple(tree.tokens.shape)} {hashlib.sha1(whole).hexdigest()}"


# Quantisation: kernels that SGLang has for other devices only, in torch.


def gguf_kernels() -> None:
    """The products of SGLang's GGUF layers, which are CUDA kernels, by the ``gguf`` package."""
    from gguf import GGMLQuantizationType, dequantize
    from sglang.srt.layers.quantization import gguf as layers

    def dense(weight: Tensor, kind: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        values = dequantize(weight.numpy(), GGMLQuantizationType(kind))
        return torch.from_numpy(values).reshape(rows, columns).to(dtype)

    def product(weight: Tensor, x: Tensor, kind: int, rows: int) -> Tensor:
        return x @ dense(weight, kind, rows, x.shape[1], x.dtype).T

    def embedded(weight: Tensor, kind: int, columns: int, rows: int, dtype: torch.dtype) -> Tensor:
        return dense(weight, kind, rows, columns, dtype)

    layers.ggml_mul_mat_vec_a8 = layers.ggml_mul_mat_a8 = product
    layers.ggml_dequantize = embedded


def float8_weights() -> None:
    """``--quantization fp8``: weights of linear layers in float8 with a scale a row, in torch."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    class Method(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: Any) -> None:
            weight = layer.weight.data
            layer.scale = weight.abs().amax(1, keepdim=True) / 448
            layer.weight = torch.nn.Parameter(
                (weight / layer.scale).to(torch.float8_e4m3fn), requires_grad=False
            )

        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return torch.nn.functional.linear(x, layer.weight.to(x.dtype) * layer.scale, bias)

    offer(lambda layer: Method() if isinstance(layer, LinearBase) else None)


def head_without_a_kernel() -> None:
    """``--quantization fp8``: a head whose product does not run here."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedEmbeddingMethod,
        UnquantizedLinearMethod,
    )
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    class FarMethod(UnquantizedEmbeddingMethod):
        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            raise NotImplementedError("this kernel is for another device")

    def method_of(layer: Any) -> Any:
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return FarMethod() if isinstance(layer, ParallelLMHead) else None

    offer(method_of)


def offer(method_of: Callable[[Any], Any]) -> None:
    """Through SGLang's seam for platforms: what ``--quantization fp8`` gives each layer."""
    from sglang.srt.layers.quantization.base_config import QuantizationConfig

    from dflash2_sglang.cpu.platform import CpuPlatform

    class Config(QuantizationConfig):
        def get_name(self) -> str:
            return "fp8"

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.float32, torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Config:
            return cls()

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            return method_of(layer)

        def get_scaled_act_names(self) -> list[str]:
            return []

    CpuPlatform.get_quantization_config = (  # type: ignore[method-assign]
        lambda self, name: Config if name == "fp8" else None
    )
