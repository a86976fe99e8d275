"""A batch's trees under its requests' grammars, and the mask that the target's logits will get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from torch import Tensor

from dflash2_sglang.grammar.cursor import cursor
from dflash2_sglang.grammar.legal import Array, Legal
from dflash2_sglang.grammar.search import Block, Growth, grow
from dflash2_sglang.telemetry import GrammarCut
from dflash2_sglang.tree.build import Tree, assemble
from dflash2_sglang.tree.lattice import Lattice


class Constraint:
    """Replaces the trees of requests with a grammar; C most children of a node."""

    def __init__(self, children: int) -> None:
        self.children = children

    def __call__(
        self,
        batch: Any,
        tree: Tree,
        lattice: Lattice,
        barrier: Callable[[], None] | None,
        cut: GrammarCut,
    ) -> tuple[Tree, GrammarMask | None]:
        """The trees to verify, and the mask of all their nodes (None where it forbids nothing).

        tree     of B requests, N nodes; rows without a grammar are kept
        barrier  advances the grammars over what the round before accepted; must precede the walk
        cut      is told what was cut

        SGLang would walk the trees once more for the mask, hence ``masked`` around the verify pass.
        """
        if barrier is not None:
            barrier()
        info, (size, nodes) = batch.sampling_info, tree.tokens.shape
        info.grammar_mask = None  # a leftover of prefill
        rows = [i for i, req in enumerate(batch.reqs) if _active(req)]
        if not rows:
            return tree, None
        grammar = batch.reqs[rows[0]].grammar
        mask = grammar.allocate_vocab_mask(info.vocab_size, size * nodes, "cpu")
        view = mask.numpy()
        grown = []
        for row, block in zip(rows, _blocks(lattice, rows), strict=True):
            walk = _Walk(batch.reqs[row].grammar, mask, view, row * nodes, info.vocab_size)
            grown.append(walk.grow(block, _stops(batch.reqs[row]), nodes, self.children))
        cut.trees += len(grown)
        cut.empty_nodes += sum(growth.empty for growth in grown)
        device = tree.tokens.device
        tree = replace_rows(tree, rows, grown, lattice.tokens.shape[1])
        return tree, GrammarMask(grammar, mask.to(device, non_blocking=True))


class _Walk:
    """One request's grammar, its mask rows from ``first`` on."""

    def __init__(self, grammar: Any, mask: Tensor, view: Array, first: int, vocab: int) -> None:
        self.cursor, self.mask, self.view = cursor(grammar), mask, view
        self.first, self.vocab = first, vocab

    def grow(self, block: Block, stops: frozenset[int], nodes: int, children: int) -> Growth:
        try:
            return grow(block, self._enter, stops, nodes, children)
        finally:
            self.cursor.close()

    def _enter(self, path: tuple[int, ...], node: int) -> Legal | None:
        grammar = self.cursor.at(path)
        if grammar.is_terminated():
            return None
        grammar.fill_vocab_mask(self.mask, self.first + node)
        return Legal(self.view[self.first + node], self.vocab)


def replace_rows(tree: Tree, rows: Sequence[int], grown: Sequence[Growth], depth: int) -> Tree:
    """``tree`` with the rows of ``rows`` grown instead; their anchors stay. depth is D."""
    device = tree.tokens.device
    index = torch.tensor(rows, device=device)
    tokens, parent, log_prob = tree.tokens.clone(), tree.parent.clone(), tree.log_prob.clone()
    below = [[node.path[-1] for node in growth.nodes[1:]] for growth in grown]
    tokens[index, 1:] = torch.tensor(below, device=device)
    parent[index] = torch.tensor([[n.parent for n in g.nodes] for g in grown], device=device)
    logs = [[n.log_prob for n in g.nodes] for g in grown]
    log_prob[index] = torch.tensor(logs, device=device, dtype=log_prob.dtype)
    new = assemble(tokens, parent, log_prob, depth)
    return _without_random(tree, index)._replace(
        tokens=new.tokens,
        parent=new.parent,
        depth=new.depth,
        log_prob=new.log_prob,
        mask=new.mask,
        first_child=new.first_child,
        next_sibling=new.next_sibling,
    )


def _without_random(tree: Tree, index: Tensor) -> Tree:
    """Where trees have random children: none in these rows, which are chosen by probability alone."""
    proposal: Any = getattr(tree, "proposal", None)
    if proposal is None:
        return tree
    random = proposal.random.index_fill(0, index, False)
    probs = proposal.probs.index_fill(0, index, 0)
    changes: dict[str, Any] = {"proposal": proposal._replace(random=random, probs=probs)}
    return tree._replace(**changes)


@contextmanager
def masked(batch: Any) -> Iterator[None]:
    """Inside, SGLang's verify pass builds no mask of its own for ``batch``."""
    had, batch.has_grammar = batch.has_grammar, False
    try:
        yield
    finally:
        batch.has_grammar = had


def _active(req: Any) -> bool:
    return req.grammar is not None and not req.grammar.is_terminated()


def _blocks(lattice: Lattice, rows: Sequence[int]) -> Iterator[Block]:
    """The lattice of these requests, on the host."""
    tokens, log_probs = lattice.tokens, lattice.log_probs
    if len(rows) < tokens.shape[0]:
        index = torch.tensor(rows, device=tokens.device)
        tokens, log_probs = tokens[index], log_probs[index]
    pairs = zip(tokens.cpu().numpy(), log_probs.cpu().numpy(), strict=True)
    return (Block.from_logs(ids, logs) for ids, logs in pairs)


def _stops(req: Any) -> frozenset[int]:
    """Tokens that end the request wherever they stand."""
    if req.sampling_params.ignore_eos:
        return frozenset()
    stops = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if req.tokenizer is not None:
        stops |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
    return frozenset(stops)
