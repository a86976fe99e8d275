"""The captured tail gives what the eager draft gives, batch after batch, through tensors that stay put."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash2_sglang import kernels
from dflash2_sglang.folded import FoldedDraft
from dflash2_sglang.tree.lattice import Lattice

BLOCK, DEPTH, WIDTH, NODES, CHILDREN, MOST, HIDDEN, VOCAB = 6, 4, 5, 9, 3, 4, 8, 40


def to_lattice(hidden: Tensor, anchor: Tensor, heat: Tensor | None) -> Lattice:
    """Depends on everything it is given."""
    logits = hidden @ WEIGHT + 0.01 * anchor.view(-1, 1, 1)
    if heat is not None:
        logits = logits / heat.view(-1, 1, 1)
    values, tokens = logits.topk(WIDTH, -1)
    pair = torch.sin(values.unsqueeze(-1) + anchor.view(-1, 1, 1, 1))
    return kernels.build_lattice(tokens, values, logits.logsumexp(-1), None, pair)


WEIGHT = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(1))


def folded() -> FoldedDraft:
    return FoldedDraft(
        to_lattice,
        most=MOST,
        block=BLOCK,
        depth=DEPTH,
        width=WIDTH,
        nodes=NODES,
        children=CHILDREN,
        device="cpu",
    )


@pytest.mark.parametrize("heats", [(False, False), (True, False), (True, True), (False, True)])
def test_equals_the_eager_draft(heats: tuple[bool, bool]) -> None:
    """Two rounds, the second smaller and padded: nothing of the first one is left in it."""
    generator = torch.Generator().manual_seed(3)
    fold = folded()
    at = [tensor.data_ptr() for tensor in fold._kept()]
    for size, heated in zip((4, 2), heats, strict=True):
        hidden = torch.randn(MOST * BLOCK, HIDDEN, generator=generator)
        ids = torch.randint(VOCAB, (MOST * BLOCK,), generator=generator)
        heat = torch.rand(size, generator=generator) + 1 if heated else None
        fold.stage(heat, size)
        fold(hidden, ids)  # all four rows, as a padded replay computes them
        tree, lattice = fold.read(size)
        anchor = ids.view(MOST, BLOCK)[:, 0]
        used = hidden.view(MOST, BLOCK, -1)[:, 1 : DEPTH + 1]
        every = None if heat is None else torch.cat((heat, torch.ones(MOST - size)))
        expected = to_lattice(used, anchor, every)
        for found, should in zip(lattice, expected, strict=True):
            assert torch.equal(found, should[:size])
        whole = kernels.build_tree(expected, anchor, NODES, CHILDREN)
        assert tree.proposal is None
        for part, should in zip(tree[:-1], whole[:-1], strict=True):
            assert torch.equal(part, should[:size])
    assert at == [tensor.data_ptr() for tensor in fold._kept()]


def test_a_small_capture_leaves_the_other_rows() -> None:
    fold = folded()
    before = [tensor.clone() for tensor in fold._kept()]
    fold(torch.randn(BLOCK, HIDDEN), torch.arange(BLOCK))
    for old, new in zip(before, fold._kept(), strict=True):
        assert torch.equal(old[1:], new[1:])
    assert not torch.equal(before[0][0], fold.lattice.tokens[0])
