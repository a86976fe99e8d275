"""The best tree of N nodes in a lattice, and what the verifier needs to know about it.

Which N-1 paths should the target check? The most probable ones. A path's probability never rises
with its length, so the N-1 best paths always include all of their own prefixes: they are a tree.
B requests, D positions, K candidates, N nodes (the anchor is node 0), C most children of a node.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dflash2_sglang.tree.draw import Draws, Proposal, draw_search, proposal
from dflash2_sglang.tree.lattice import Lattice
from dflash2_sglang.tree.search import Level, search


class Tree(NamedTuple):
    """N nodes in order of falling path probability: parents before children, siblings in rank.

    tokens        [B, N]     int64    node 0 is the anchor
    parent        [B, N]     int64    -1 at the root
    depth         [B, N]     int64    0 at the root
    log_prob      [B, N]     float32  of the path from the root, 0 at the root
    mask          [B, N, N]  bool     mask[b, i, j]: j is i or an ancestor of i
    first_child   [B, N]     int64    -1 where none
    next_sibling  [B, N]     int64    -1 where none
    proposal      how its random children were drawn; None in a tree of fixed children only
    """

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    log_prob: Tensor
    mask: Tensor
    first_child: Tensor
    next_sibling: Tensor
    proposal: Proposal | None = None


def capacity(depth: int, max_children: int) -> int:
    """Most nodes, root included, of a tree of this depth and fan-out."""
    return sum(max_children**level for level in range(depth + 1))


def build_tree(
    lattice: Lattice,
    anchor: Tensor,
    num_nodes: int,
    max_children: int,
    draws: Draws | None = None,
) -> Tree:
    """The anchor and the num_nodes - 1 most probable paths; no other tree has a greater sum.

    lattice  see Lattice; a NaN log-probability counts as probability zero
    anchor   [B] int64 the last committed token of each request
    draws    gives nodes a random child (see `draw`) and the tree a proposal; None: no node has one

    Order: log-probability, highest first; then depth, shallowest first; then the order of the
    parents; then the rank among the parent's children (log-probability, then candidate index).
    It is total, so every rank of a tensor-parallel group builds the same tree. A parent precedes
    its child in it, as sums of numbers <= 0 do not rise in floating point either.

    Exact although each level keeps few nodes: a node dropped from a level has num_nodes - 1 better
    nodes before it, all of which precede its descendants as well.
    """
    check_sizes(lattice, num_nodes, max_children)
    if draws is None:
        levels = search(lattice, num_nodes, max_children)
        return _select(levels, lattice.tokens, anchor, num_nodes)[0]
    found = draw_search(lattice, num_nodes, max_children, draws)
    tree, chosen = _select(found.levels, lattice.tokens, anchor, num_nodes)
    return tree._replace(proposal=proposal(found, lattice.tokens, chosen, tree.parent))


def assemble(tokens: Tensor, parent: Tensor, log_prob: Tensor, max_depth: int) -> Tree:
    """A Tree from its nodes (all [B, N], parents before children, the root first)."""
    mask = ancestor_mask(parent, max_depth)
    return Tree(tokens, parent, mask.sum(-1) - 1, log_prob, mask, *links(parent))


def ancestor_mask(parent: Tensor, max_depth: int) -> Tensor:
    """mask[b, i, j]: j is i or an ancestor of i. parent [B, N] int64 -> [B, N, N] bool."""
    batch, nodes = parent.shape
    jump = parent.clamp(min=0)  # the root jumps to itself
    # line[b, k, i] is the ancestor of i that lies k steps up; each round doubles the reach.
    line = torch.arange(nodes, device=parent.device).expand(batch, 1, nodes)
    while line.shape[1] <= max_depth:
        above = line.gather(2, jump.unsqueeze(1).expand_as(line))
        line = torch.cat((line, above), 1)
        jump = jump.gather(1, jump)
    mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=parent.device)
    return mask.scatter_(2, line.transpose(1, 2), True)


def links(parent: Tensor) -> tuple[Tensor, Tensor]:
    """(first_child, next_sibling) of a tree with one root, both [B, N] int64, -1 where none.

    Children of a node are linked in the order of their indices. Sorting by parent puts siblings
    side by side, which costs less than comparing all pairs.
    """
    batch, nodes = parent.shape
    grouped, order = parent.sort(dim=1, stable=True)
    siblings = grouped[:, 1:] == grouped[:, :-1]
    later = order[:, 1:]  # position 0 holds the root, which is nobody's child
    next_sibling = torch.full_like(parent, -1)
    next_sibling.scatter_(1, order[:, :-1], torch.where(siblings, later, -1))
    # Column `nodes` swallows the children that are not first.
    first_child = parent.new_full((batch, nodes + 1), -1)
    first_child.scatter_(1, torch.where(siblings, nodes, grouped[:, 1:]), later)
    return first_child[:, :nodes], next_sibling


def check_sizes(lattice: Lattice, num_nodes: int, max_children: int) -> None:
    batch, depth, width = lattice.tokens.shape
    if lattice.log_probs.shape != (batch, depth, width, width):
        raise ValueError(
            f"lattice.log_probs has shape {tuple(lattice.log_probs.shape)}, but candidates of "
            f"shape {tuple(lattice.tokens.shape)} need {(batch, depth, width, width)}"
        )
    if not 1 <= max_children <= width:
        raise ValueError(
            f"max_children must lie between 1 and the {width} candidates of a position, "
            f"got {max_children}"
        )
    most = capacity(depth, max_children)
    if not 2 <= num_nodes <= most:
        raise ValueError(
            f"num_nodes must lie between 2 and {most}, the most that a tree of depth {depth} with "
            f"{max_children} children per node can hold, got {num_nodes}"
        )


def _select(
    levels: list[Level], tokens: Tensor, anchor: Tensor, num_nodes: int
) -> tuple[Tree, Tensor]:
    """The best nodes of all levels together, and where they are among all nodes.

    The stable sort breaks ties by depth, then order.
    """
    log_prob, row, parent = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
    ranked, order = log_prob.sort(dim=1, descending=True, stable=True)
    best = order[:, :num_nodes]  # the root, at 0, stays first
    place = torch.empty_like(order)
    place.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    parent = place.gather(1, parent.gather(1, best))
    parent[:, 0] = -1
    # A node's children are one position, hence K rows, further on than the node itself.
    candidate = row.gather(1, best[:, 1:]).sub_(tokens.shape[2])
    chosen = torch.cat((anchor.unsqueeze(1), tokens.take(candidate)), 1)
    return assemble(chosen, parent, ranked[:, :num_nodes], len(levels) - 1), best
