"""Custom logit processors at each node of a tree.

A processor may look at the request, ``custom_param_list[i]["__req__"]``. At a node it must find there the
answer up to that node: what the scheduler has processed, what it has not processed yet (under overlap it
is a round behind), and the path of the node. All of it comes to the host only when a processor asks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

# One round may be unprocessed; prefills of other requests may lie between two rounds of one.
REMEMBERED = 4


class _Forward:
    """Tokens that one forward committed, fetched from the device when they are asked for.

    starts [B]  how many tokens each answer had before, given ``offsets`` [B] less
    tokens [B, P] and lengths [B], of each row the first so many
    """

    def __init__(
        self, reqs: Sequence[Any], starts: Any, offsets: list[int], tokens: Any, lengths: Any
    ) -> None:
        self.row = {req.rid: row for row, req in enumerate(reqs)}
        self._starts, self._offsets = starts, offsets
        self._device: tuple[Any, Any] | None = (tokens, lengths)
        self._host: list[tuple[int, list[int]]] = []

    def committed(self, rid: str) -> tuple[int, list[int]]:
        """(where in the answer they begin, tokens)."""
        if self._device is not None:
            tokens, lengths = (tensor.tolist() for tensor in self._device)
            starts = self._starts.tolist()
            self._host = [
                (start - offset, row[:length])
                for start, offset, row, length in zip(
                    starts, self._offsets, tokens, lengths, strict=True
                )
            ]
            self._device = None
        return self._host[self.row[rid]]


class Answers:
    """The committed tokens of answers, also those that the scheduler has not processed yet."""

    def __init__(self) -> None:
        self._recent: deque[_Forward] = deque(maxlen=REMEMBERED)

    def after_prefill(self, batch: Any, tokens: torch.Tensor) -> None:
        """tokens [B], the first ones after the prompt (or after what a retracted request had)."""
        offsets = [len(req.origin_input_ids) for req in batch.reqs]
        lengths = torch.ones_like(tokens)
        starts = batch.seq_lens
        self._recent.append(_Forward(batch.reqs, starts, offsets, tokens.unsqueeze(1), lengths))

    def after_round(self, batch: Any, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """tokens [B, P], of each row the first lengths [B], were added to the answers."""
        # The anchor is a token of the answer already, and not yet one of the sequence.
        offsets = [len(req.origin_input_ids) - 1 for req in batch.reqs]
        self._recent.append(_Forward(batch.reqs, batch.seq_lens, offsets, tokens, lengths))

    def of(self, req: Any) -> array[int]:
        """The whole committed answer of a request."""
        answer, processed = array("q", req.output_ids), len(req.output_ids)
        for forward in self._recent:
            if req.rid in forward.row:
                start, tokens = forward.committed(req.rid)
                # A later forward knows better: the token after a part of a prompt is not kept.
                del answer[max(start, processed) :]
                answer.extend(tokens[max(processed - start, 0) :])
        return answer


class _Tree:
    """A tree's tokens on the host, fetched when they are asked for."""

    def __init__(self, tree: Any, answers: Answers) -> None:
        self._tree, self._answers = tree, answers
        self._tokens: list[list[int]] = []
        self._parent: list[list[int]] = []
        self._committed: dict[str, array[int]] = {}

    def answer(self, req: Any, row: int, node: int) -> array[int]:
        if not self._tokens:
            self._tokens, self._parent = self._tree.tokens.tolist(), self._tree.parent.tolist()
        if req.rid not in self._committed:
            self._committed[req.rid] = self._answers.of(req)
        path = []
        while node > 0:
            path.append(self._tokens[row][node])
            node = self._parent[row][node]
        return self._committed[req.rid] + array("q", reversed(path))


class NodeRequest:
    """The request as a processor sees it at one node: its own, but for ``output_ids``."""

    def __init__(self, req: Any, tree: _Tree, row: int, node: int) -> None:
        self._req, self._tree, self._row, self._node = req, tree, row, node
        self._answer: array[int] | None = None

    @property
    def output_ids(self) -> array[int]:
        if self._answer is None:
            self._answer = self._tree.answer(self._req, self._row, self._node)
        return self._answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


class _Nodes:
    """What SGLang reads of a batch to run its processors, with one row for each node."""

    def __init__(self, info: Any, nodes: int, params: list[Any]) -> None:
        self.custom_params, self.device = params, info.device
        place = torch.arange(nodes, device=info.device)
        self.custom_logit_processor = {
            key: type(entry)(
                processor=entry.processor,
                rows=[row * nodes + node for row in entry.rows for node in range(nodes)],
                indices=(entry.indices.unsqueeze(1) * nodes + place).flatten(),
            )
            for key, entry in info.custom_logit_processor.items()
        }

    def __len__(self) -> int:
        return len(self.custom_params)


def apply(logits: torch.Tensor, tree: Any, info: Any, answers: Answers) -> None:
    """Run the batch's processors on logits [B * N, V] of a tree, in place."""
    from sglang.srt.layers.sampler import apply_custom_logit_processor

    nodes, on_host = tree.tokens.shape[1], _Tree(tree, answers)
    params = [
        _at_node(params, on_host, row, node)
        for row, params in enumerate(info.custom_params)
        for node in range(nodes)
    ]
    apply_custom_logit_processor(logits, _Nodes(info, nodes, params))


def _at_node(params: Any, tree: _Tree, row: int, node: int) -> Any:
    if not isinstance(params, dict) or "__req__" not in params:
        return params
    return {**params, "__req__": NodeRequest(params["__req__"], tree, row, node)}
