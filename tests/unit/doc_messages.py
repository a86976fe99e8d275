"""Messages that docs/checkpoints.md and docs/troubleshooting.md quote, provoked by the mistakes they name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash2_sglang.checkpoint import check_tensors, expected_tensors
from dflash2_sglang.config import check_target, parse

CONFIG = json.loads(
    (
        Path(__file__).parents[2] / "dflash2_sglang/assets/smollm2-135m-dflash2/config.json"
    ).read_text()
)
TARGET = {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30}


def _config(**changes: Any) -> dict[str, Any]:
    """The demo drafter's with these fields changed, None removes one; the section keeps its own."""
    config = {**CONFIG, "dflash_config": dict(CONFIG["dflash_config"])}
    for name, value in changes.items():
        for place in (config, config["dflash_config"]):
            if name in place or (place is config and name not in config["dflash_config"]):
                place[name] = value
    return config


def _parsed(**changes: Any) -> Callable[[], Any]:
    return lambda: parse(_config(**changes))


def _for_target(**changes: Any) -> Callable[[], Any]:
    return lambda: check_target(parse(CONFIG), {**TARGET, **changes})


def _without(part: str) -> Callable[[], Any]:
    config = parse(CONFIG)
    shapes = {name: s for name, s in expected_tensors(config).items() if part not in name}
    return lambda: check_tensors(config, shapes)


# Mistake -> what provokes its message.
CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "the target given as its own drafter": _parsed(architectures=["LlamaForCausalLM"]),
    "an EAGLE3 head": _parsed(architectures=["LlamaForCausalLMEagle3"]),
    "an export of speculators": _parsed(speculators_model_type="dflash"),
    "no `block_size`": _parsed(block_size=None),
    "no `mask_token_id`": _parsed(mask_token_id=None),
    "a mask token of another tokeniser": _parsed(mask_token_id=151669),
    "no taps": _parsed(target_layer_ids=None),
    "taps out of order": _parsed(target_layer_ids=[8, 1, 15, 22, 28]),
    "an anchor-first layout": _parsed(anchor_first=True),
    "a DFlash 2 architecture without selector": _parsed(selector_rank=None),
    "a quantised drafter": _parsed(quantization_config={"quant_method": "fp8"}),
    "another target, other width": _for_target(hidden_size=960),
    "another target, other vocabulary": _for_target(vocab_size=151936),
    "another target, other depth": _for_target(num_hidden_layers=32),
    "an incomplete download": _without("layers.2.mlp"),
}


def _shape(**asked: Any) -> Callable[[], Any]:
    def shape() -> None:
        from dflash2_sglang.algorithm import tree_shape

        given = {"depth": None, "children": None, "nodes": None, **asked}
        tree_shape(parse(CONFIG), **given)

    return shape


def _ranks() -> None:
    from dflash2_sglang.algorithm import check_ranks

    check_ranks(parse(CONFIG), 2, on_cpu=True)


# For docs/troubleshooting.md.
LAUNCHES: dict[str, Callable[[], Any]] = {
    "more nodes than a chain has": _shape(children=1, nodes=16),
    "deeper than the drafter's block": _shape(depth=8),
    "wider than the drafter's candidates": _shape(children=17),
    "ranks that cannot share the drafter": _ranks,
}


def message(provoke: Callable[[], Any]) -> str:
    """What ``provoke`` says when it fails; it must."""
    try:
        provoke()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")
