"""SGLang's own penalizers and processors, run token by token along each path: slow and simple.

One request at a time and one node at a time, in the classes that plain decoding uses.
"""

from __future__ import annotations

import weakref
from array import array
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash2_sglang.tree.build import Tree, assemble

STOPS = {0}


class Tokenizer:
    additional_stop_token_ids = None
    eos_token_id = 0


@dataclass(eq=False)
class Request:
    """A request as SGLang's penalizers and processors read it."""

    rid: str
    parameters: dict[str, Any]
    origin_input_ids: Any
    answer: list[int] = field(default_factory=list)
    custom_logit_processor: str | None = None

    def __post_init__(self) -> None:
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.origin_input_ids = array("q", self.origin_input_ids)
        self.output_ids = array("q", self.answer)
        self.sampling_params = SamplingParams(**self.parameters)
        if self.sampling_params.custom_params is not None:
            me = {"__req__": weakref.proxy(self)}
            self.sampling_params.custom_params = {**self.sampling_params.custom_params, **me}
        self.tokenizer, self.eos_token_ids = Tokenizer(), STOPS


@dataclass(eq=False)
class Batch:
    reqs: list[Request]
    device: str = "cpu"


def orchestrator(batch: Batch, vocab: int) -> Any:
    import sglang.srt.sampling.penaltylib as lib

    kinds = {
        lib.BatchedFrequencyPenalizer,
        lib.BatchedMinNewTokensPenalizer,
        lib.BatchedPresencePenalizer,
        lib.BatchedRepetitionPenalizer,
    }
    return lib.BatchedPenalizerOrchestrator(vocab, batch, kinds)  # type: ignore[arg-type]


def accumulated(found: Any, batch: Batch, vocab: int) -> tuple[Tensor | None, Tensor | None]:
    """(acc_additive_penalties, acc_scaling_penalties) as ``SamplingBatchInfo`` has them."""
    if not found.is_required:
        return None, None
    additive = torch.zeros(len(batch.reqs), vocab)
    found.accumulate_additive_penalties(additive)
    return additive, found.accumulate_scaling_penalties()


def penalised(req: Request, tokens: list[int], logits: Tensor) -> Tensor:
    """logits [V] after an answer of these tokens."""
    batch = Batch([req])
    found = orchestrator(batch, len(logits))
    for token in tokens:
        found.cumulate_output_tokens(torch.tensor([token]))
    additive, scaling = accumulated(found, batch, len(logits))
    row = logits.clone().unsqueeze(0)
    if additive is not None:
        row.add_(additive)
    if scaling is not None:
        row = torch.where(row < 0, row * scaling, row / scaling)
    return row[0]


def make_tree(tokens: list[list[int]], parents: list[list[int]], depth: int) -> Tree:
    shape = torch.tensor(tokens)
    return assemble(shape, torch.tensor(parents), torch.zeros(shape.shape), depth)


def path(tree: Tree, row: int, node: int) -> list[int]:
    """Tokens from below the root to the node."""
    found = []
    while node > 0:
        found.append(int(tree.tokens[row, node]))
        node = int(tree.parent[row, node])
    return found[::-1]
