"""The nodes of each depth that can be among the best N of a lattice, level by level.

B requests, D positions, K candidates, N nodes, C most children of a node.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from dflash2_sglang.tree.lattice import Lattice


class Level(NamedTuple):
    """The F best nodes of one depth, best first (F differs between levels).

    log_prob  [B, F]  of the path
    row       [B, F]  where the children are: row of the [B*D*K] rows of transitions
    parent    [B, F]  where its parent is in the concatenation of all levels
    """

    log_prob: Tensor
    row: Tensor
    parent: Tensor


def search(lattice: Lattice, num_nodes: int, max_children: int) -> list[Level]:
    """The levels from the root down, children of a node in the order of their probability."""
    depth = lattice.tokens.shape[1]
    log_probs, rows = ranked_rows(lattice)
    log_probs, rows = log_probs[:, :max_children], rows[:, :max_children]
    levels = [root_level(lattice)]
    start = 0  # of the parents' level
    for above in range(min(depth, num_nodes - 1)):
        parents = levels[-1]
        paths = embedding(parents.row, log_probs).add_(parents.log_prob.unsqueeze(-1)).flatten(1)
        ranked, index = best(paths, num_nodes, above)
        children = embedding(parents.row, rows).flatten(1).gather(1, index)
        parent = index.div(max_children, rounding_mode="floor").add_(start)
        start += parents.row.shape[1]
        levels.append(Level(ranked, children, parent))
    return levels


def root_level(lattice: Lattice) -> Level:
    batch, depth, width = lattice.tokens.shape
    stop = batch * depth * width
    root = torch.arange(0, stop, depth * width, device=lattice.tokens.device).view(-1, 1)
    return Level(lattice.log_probs.new_zeros(batch, 1), root, torch.zeros_like(root))


def best(paths: Tensor, num_nodes: int, above: int) -> tuple[Tensor, Tensor]:
    """The paths [B, M] of depth above + 1 that can be among the best nodes: (log_prob, index).

    The root and `above` more ancestors come before any of them.
    """
    keep = min(num_nodes - 1 - above, paths.shape[1])
    ranked, index = paths.sort(dim=1, descending=True, stable=True)
    return ranked[:, :keep], index[:, :keep]


def ranked_rows(lattice: Lattice) -> tuple[Tensor, Tensor]:
    """The candidates of every row of transitions, best first: (log_probs, rows), [B*D*K, K] each.

    Row (b*D + t)*K + a holds the candidates of position t after candidate a; `rows` says in which
    row each of them finds its own successors.
    """
    batch, depth, width = lattice.tokens.shape
    log_probs = lattice.log_probs.nan_to_num(nan=-torch.inf, posinf=0.0, neginf=-torch.inf)
    ranked, candidate = log_probs.clamp_(max=0).sort(dim=-1, descending=True, stable=True)
    stop = (batch * depth + 1) * width
    below = torch.arange(width, stop, width, device=candidate.device)
    rows = candidate.add_(below.view(batch, depth, 1, 1))
    return ranked.flatten(0, 2), rows.flatten(0, 2)
