"""Grown trees in a batch, and under the grammars of every backend."""

from __future__ import annotations

import functools
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tinypair import EOS, VOCAB, Pairs, encode

from dflash2_sglang.grammar.constrain import Constraint, masked, replace_rows
from dflash2_sglang.grammar.legal import Legal
from dflash2_sglang.grammar.search import Block, grow
from dflash2_sglang.telemetry import GrammarCut
from dflash2_sglang.tree.build import Tree, ancestor_mask, build_tree
from dflash2_sglang.tree.draw import Draws
from dflash2_sglang.tree.lattice import Lattice

torch.set_num_threads(1)
Path_ = tuple[int, ...]


# --- Into the batch's trees ---


def lattice_of(size: int, depth: int, width: int, seed: int) -> Lattice:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(VOCAB, generator=g)[:width] for _ in range(size * depth)])
    logs = torch.randn(size, depth, width, width, generator=g).log_softmax(-1) - 0.1
    logs[:, 0] = logs[:, 0, :1]
    return Lattice(tokens.view(size, depth, width), logs)


def test_other_rows_keep_their_trees() -> None:
    lattice = lattice_of(3, 3, 5, 0)
    tree = build_tree(lattice, torch.tensor([7, 8, 9]), 9, 3)
    block = Block.from_logs(lattice.tokens[1].numpy(), lattice.log_probs[1].numpy())
    free = np.full(3, -1, np.int32)
    growth = grow(block, lambda path, node: Legal(free, VOCAB), frozenset(), 9, 3)
    new = replace_rows(tree, [1], [growth], 3)
    for before, after in zip(tree[:-1], new[:-1], strict=True):
        assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert new.proposal is None
    assert new.tokens[1].tolist() == [8, *(n.path[-1] for n in growth.nodes[1:])]
    assert new.parent[1].tolist() == [n.parent for n in growth.nodes]
    assert torch.equal(new.mask, ancestor_mask(new.parent, 3))
    # Where nothing is forbidden, it is the same tree up to the share of the other tokens.
    assert set(paths_of(new, 1)) == set(paths_of(tree, 1))


def test_grown_rows_have_no_random_child() -> None:
    """A child that was drawn would be accepted by another rule than the tokens in its place."""
    lattice = lattice_of(3, 3, 5, 1)
    draws = Draws(torch.rand(3, 3, 8), torch.zeros(3, dtype=torch.bool))
    tree = build_tree(lattice, torch.tensor([7, 8, 9]), 9, 3, draws)
    assert tree.proposal is not None and tree.proposal.random[1].any()
    others = [part[[0, 2]].clone() for part in tree.proposal]
    block = Block.from_logs(lattice.tokens[1].numpy(), lattice.log_probs[1].numpy())
    free = np.full(3, -1, np.int32)
    growth = grow(block, lambda path, node: Legal(free, VOCAB), frozenset(), 9, 3)
    new = replace_rows(tree, [1], [growth], 3)
    assert not new.proposal.random[1].any() and not new.proposal.probs[1].any()
    for before, after in zip(others, new.proposal, strict=True):
        assert torch.equal(before, after[[0, 2]])


def paths_of(tree: Tree, row: int) -> list[Path_]:
    paths: list[Path_] = [()]
    pairs = zip(tree.tokens[row].tolist(), tree.parent[row].tolist(), strict=True)
    for token, parent in [*pairs][1:]:
        paths.append((*paths[parent], token))
    return paths


# --- The backends' own grammars ---


@functools.cache
def _backend(name: str, target: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    if name == "xgrammar":
        from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

        return XGrammarGrammarBackend(tokenizer, VOCAB, model_eos_token_ids=[EOS])
    if name == "llguidance":
        from sglang.srt.constrained.llguidance_backend import GuidanceBackend

        return GuidanceBackend(tokenizer, n_vocab=VOCAB, eos_token_ids=[EOS])
    from sglang.srt.constrained.outlines_backend import OutlinesGrammarBackend

    return OutlinesGrammarBackend(tokenizer, None)


BACKENDS = ("xgrammar", "llguidance", "outlines")
REGEXES = ("[a-z]{5}", "(ab|ba)+[0-9]{2}x?", "yes|no, [a-z]+", "a*")


def reasoning(grammar: Any) -> Any:
    """The grammar, applied once "!" has been said."""
    from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject

    wrapped = ReasonerGrammarObject(grammar, encode("!"))
    wrapped.maybe_init_reasoning(True)
    return wrapped


def request(grammar: Any) -> SimpleNamespace:
    params = SimpleNamespace(ignore_eos=False, stop_token_ids=None)
    return SimpleNamespace(
        grammar=grammar, sampling_params=params, eos_token_ids={EOS}, tokenizer=None
    )


def batch_of(*grammars: Any) -> SimpleNamespace:
    info = SimpleNamespace(vocab_size=VOCAB, grammar_mask="left over")
    return SimpleNamespace(
        reqs=[request(g) for g in grammars], sampling_info=info, has_grammar=True
    )


def root_mask(grammar: Any) -> list[int]:
    mask = grammar.allocate_vocab_mask(VOCAB, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    return Legal(mask.numpy()[0], VOCAB).list()


@pytest.mark.parametrize("name", BACKENDS)
def test_walks_leave_a_grammar_as_they_found_it(name: str, pairs: Pairs) -> None:
    """Round after round on random lattices, the grammar advanced along one of its own paths."""
    backend, dice = _backend(name, pairs.target()), random.Random(4)
    constraint = Constraint(4)
    for number, regex in enumerate(REGEXES):
        for wrap in (lambda grammar: grammar, reasoning):
            grammar, shadow = (wrap(backend.dispatch_regex(regex)) for _ in range(2))
            for round_number in range(6):
                if grammar.is_terminated():
                    break
                lattice = lattice_of(2, 4, 16, 100 * number + round_number)
                tree = build_tree(lattice, torch.zeros(2, dtype=torch.int64), 12, 4)
                calls: list[int] = []
                batch = batch_of(None, grammar)
                cut = GrammarCut()
                tree, mask = constraint(batch, tree, lattice, lambda c=calls: c.append(1), cut)
                assert cut.trees == 1
                assert cut.empty_nodes == int((tree.log_prob[1] == -math.inf).sum())
                assert calls == [1] and batch.sampling_info.grammar_mask is None
                assert root_mask(grammar) == root_mask(shadow)
                paths = check_rows(tree, mask, shadow)
                for token in dice.choice(paths):
                    grammar.accept_token(token)
                    shadow.accept_token(token)


def check_rows(tree: Tree, mask: Any, shadow: Any) -> list[Path_]:
    """Masks as a fresh walk of ``shadow`` has them; the paths of row 1 that the grammar allows."""
    from dflash2_sglang.grammar.cursor import cursor

    rows = mask.vocab_mask.numpy()
    nodes = tree.tokens.shape[1]
    assert Legal(rows[0], VOCAB).count == VOCAB  # row 0 has no grammar
    legal: dict[Path_, list[int]] = {}  # after every path that the grammar allows
    walk = cursor(shadow)
    for index, path in enumerate(paths_of(tree, 1)):
        if path and path[-1] not in legal.get(path[:-1], ()):
            assert tree.log_prob[1, index] == -math.inf
            continue
        state = walk.at(path)
        legal[path] = [] if state.is_terminated() else root_mask(state)
        if legal[path]:
            assert Legal(rows[nodes + index], VOCAB).list() == legal[path]
    walk.close()
    return [*legal]


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_masks_are_those_of_sglang(name: str, pairs: Pairs) -> None:
    """Its own walk over the same tree, in the backends that it can walk."""
    from sglang.srt.speculative.spec_utils import generate_token_bitmask

    backend = _backend(name, pairs.target())
    for regex in REGEXES:
        lattice = lattice_of(1, 4, 16, 9)
        tree = build_tree(lattice, torch.zeros(1, dtype=torch.int64), 14, 4)
        batch = batch_of(backend.dispatch_regex(regex))
        tree, mask = Constraint(4)(batch, tree, lattice, None, GrammarCut())
        links = (tree.first_child, tree.next_sibling, tree.tokens)
        theirs, _ = generate_token_bitmask(batch.reqs, *links, VOCAB)
        assert mask is not None and torch.equal(mask.vocab_mask, theirs)


def test_ended_and_absent_grammars_need_no_mask(pairs: Pairs) -> None:
    grammar = _backend("xgrammar", pairs.target()).dispatch_regex("a")
    for token in (*encode("a"), EOS):
        grammar.accept_token(token)
    lattice = lattice_of(2, 3, 5, 1)
    tree = build_tree(lattice, torch.zeros(2, dtype=torch.int64), 6, 3)
    same, mask = Constraint(3)(batch_of(grammar, None), tree, lattice, None, cut := GrammarCut())
    assert same is tree and mask is None and cut.trees == 0


def test_sglang_is_told_of_no_grammar_only_while_it_verifies() -> None:
    batch = SimpleNamespace(has_grammar=True)
    with pytest.raises(ZeroDivisionError), masked(batch):
        assert batch.has_grammar is False
        raise ZeroDivisionError
    assert batch.has_grammar is True
