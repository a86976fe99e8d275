"""What each round drafted and what became of it, written to a file for those who ask to see it.

Off unless the environment names a file; then every round waits for the device, so it is no way to
measure speed. ``dflash2-sglang tree`` reads the file.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor

from dflash2_sglang.tree.build import Tree
from dflash2_sglang.tree.lattice import Lattice

VARIABLE = "DFLASH2_SGLANG_TRACE"


class Recorder:
    """Appends a line of JSON for each request of each round; the first line is the configuration.

    rid         the request
    start       position of the anchor, which is the number of tokens before it
    tokens      [N] of the tree's nodes, the anchor first
    parent      [N] their parents, -1 at the root
    prob        [N] path probabilities as the drafter sees them
    random      the nodes that are random children
    candidates  [D][K] token ids of each position
    chain       [D] token ids of the drafter's greedy path, and ``chain_prob`` its path probabilities
    accepted    the accepted nodes, the root included, from the top down
    bonus       the target's own token after them
    """

    def __init__(self, path: str, config: dict[str, Any]) -> None:
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the server)
        except OSError as error:
            raise ValueError(f"{VARIABLE}={path} cannot be written ({error}).") from error
        self._write({"config": config})

    def __call__(
        self, batch: Any, tree: Tree, lattice: Lattice, start: Tensor, result: Any
    ) -> None:
        """start [B] int64; ``result`` as the verify pass returned it, bonus tokens included."""
        size, nodes = tree.tokens.shape
        first = torch.arange(0, size * nodes, nodes, device=tree.tokens.device).unsqueeze(1)
        chain, chain_log = greedy_chain(lattice)
        random = None if tree.proposal is None else tree.proposal.random.tolist()
        columns = {
            "start": start.tolist(),
            "tokens": tree.tokens.tolist(),
            "parent": tree.parent.tolist(),
            "prob": _rounded(tree.log_prob.exp()),
            "candidates": lattice.tokens.tolist(),
            "chain": chain.tolist(),
            "chain_prob": _rounded(chain_log.exp()),
            "accepted": (result.accept_index.long() - first).tolist(),
            "bonus": result.next_draft_input.bonus_tokens.tolist(),
        }
        lengths = result.accept_lens.tolist()
        for row, request in enumerate(batch.reqs):
            record = {"rid": request.rid, **{name: of[row] for name, of in columns.items()}}
            record["accepted"] = record["accepted"][: lengths[row]]
            is_random = random[row] if random is not None else []
            record["random"] = [node for node, flag in enumerate(is_random) if flag]
            self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")


def recorder(**config: Any) -> Recorder | None:
    """One for the rank that writes, if the environment asks for it."""
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    from sglang.srt.runtime_context import get_parallel

    return Recorder(path, config) if get_parallel().tp_rank == 0 else None


def greedy_chain(lattice: Lattice) -> tuple[Tensor, Tensor]:
    """The path that takes the best candidate at every step, as the stock DFLASH chain does.

    Returns tokens [B, D] int64 and the log-probabilities of the path up to each [B, D].
    """
    row = torch.zeros_like(lattice.tokens[:, 0, 0])
    steps, total = [], []
    for tokens, log_probs in zip(
        lattice.tokens.unbind(1),
        lattice.log_probs.nan_to_num(nan=-torch.inf).unbind(1),
        strict=True,
    ):
        after = log_probs[torch.arange(row.shape[0], device=row.device), row]  # [B, K]
        row = after.argmax(-1)
        steps.append(tokens.gather(1, row.unsqueeze(1)).squeeze(1))
        total.append(after.gather(1, row.unsqueeze(1)).squeeze(1))
    return torch.stack(steps, 1), torch.stack(total, 1).cumsum(1)


def _rounded(probs: Tensor) -> list[Any]:
    """Six significant digits: a quarter of the bytes."""
    return [[float(f"{p:.6g}") for p in row] for row in probs.tolist()]
