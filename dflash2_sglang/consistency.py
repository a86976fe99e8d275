"""What a verify input says of its tree, recomputed on the host from the parents alone."""

from __future__ import annotations

from torch import Tensor

from dflash2_sglang.state import TreeVerifyInput


def longest_paths(parent: list[int], most: int) -> list[list[int]]:
    """Paths from the root to at most ``most`` leaves, the longest first."""
    paths: list[list[int]] = []
    for node, above in enumerate(parent):
        paths.append([*(paths[above] if above >= 0 else []), node])
    leaves = set(range(len(parent))) - set(parent)
    return sorted((paths[leaf] for leaf in leaves), key=len, reverse=True)[:most]


def inconsistency(verify: TreeVerifyInput, prefix: Tensor) -> str | None:
    """What a verify input of one request says of its tree against the parents; None: all as it should be.

    prefix [1] int64, its committed tokens
    """
    tree = verify.tree
    parent = tree.parent[0].tolist()
    depth, child, sibling = _derived(parent)
    paths = [{i} for i in range(len(parent))]
    for node, above in enumerate(parent[1:], 1):
        paths[node] |= paths[above]
    mask = [[j in path for j in range(len(parent))] for path in paths]
    told = {
        "a depth is wrong": (tree.depth[0].tolist(), depth),
        "a mask is wrong": (tree.mask[0].tolist(), mask),
        "a link to a child is wrong": (verify.retrieve_next_token[0].tolist(), child),
        "a link to a sibling is wrong": (verify.retrieve_next_sibling[0].tolist(), sibling),
        "a position is wrong": (verify.positions.tolist(), [int(prefix) + d for d in depth]),
        "a token is at the wrong place": (verify.draft_token.tolist(), tree.tokens[0].tolist()),
    }
    return next((problem for problem, (is_, should) in told.items() if is_ != should), None)


def _derived(parent: list[int]) -> tuple[list[int], list[int], list[int]]:
    """(depth, first child, next sibling) of each node, -1 where none."""
    depth, child, sibling = [0], [-1] * len(parent), [-1] * len(parent)
    last: dict[int, int] = {}
    for node, above in enumerate(parent[1:], 1):
        depth.append(depth[above] + 1)
        if above in last:
            sibling[last[above]] = node
        else:
            child[above] = node
        last[above] = node
    return depth, child, sibling
