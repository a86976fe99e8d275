"""From the target's logits on a tree to the accepted path, as SGLang wants it told."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.utils.async_probe import sanitize_nan_logits

from dflash2_sglang import kernels, seeds
from dflash2_sglang.candidates import first_argmax
from dflash2_sglang.penalties import to_device
from dflash2_sglang.state import TreeVerifyInput
from dflash2_sglang.tree.accept import Walk
from dflash2_sglang.tree.filters import filtered_probs


def accept_tree(
    verify: TreeVerifyInput, batch: Any, logits_output: Any, grammar_mask: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Greedy or sampled acceptance of a verified tree of B requests, N nodes.

    Returns:
        predict       [B * N] int32, at each accepted node the token that follows it
        accept_lens   [B] int32, accepted nodes with the root, which is also the tokens gained
        accept_index  [B, P] int32, their places among the B * N nodes, then -1
    """
    logits, info = logits_output.next_token_logits, batch.sampling_info
    verify.parameters.adjust(logits, verify, batch, grammar_mask)
    sanitize_nan_logits(logits, "verify: target model logits")
    tree, depth = verify.tree, verify.max_tree_depth - 1
    best = first_argmax(logits).view(tree.tokens.shape)
    chosen, is_fixed = _seeded(verify, batch, logits, best)
    if is_fixed is None:
        walk = kernels.greedy_walk(tree.tokens, tree.parent, tree.mask, tree.depth, chosen, depth)
        predict = chosen.flatten().int()
    else:
        walk = _sampled(tree, logits, chosen, info, depth, is_fixed)
        predict = _following(tree.tokens, walk)
    batch_size, nodes = tree.tokens.shape
    first = torch.arange(0, batch_size * nodes, nodes, device=logits.device).unsqueeze(1)
    index = torch.where(walk.path < 0, -1, walk.path + first).int()
    lens = walk.length.int()
    if not info.is_all_greedy:
        _agree(predict, lens, index)
    verify.parameters.commit(batch, predict, lens, index)
    return predict, lens, index


def _seeded(
    verify: TreeVerifyInput, batch: Any, logits: torch.Tensor, best: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The token after each node where no coin decides, [B, N] int64, and of which requests.

    These are the greedy requests and those with a seed, [B] bool, or None for all.
    """
    info = batch.sampling_info
    if info.is_all_greedy:
        return best, None
    is_greedy = info.top_ks.view(-1) == 1
    found = seeds.find(batch.reqs, info.device)
    if found is None:
        return best, is_greedy
    size, nodes = best.shape
    drawn = seeds.at_nodes(
        logits.view(size, nodes, -1), verify.positions.view(size, nodes), found, info
    )
    rows = to_device(found.rows, torch.int64, best.device)
    chosen = best.index_copy(0, rows, drawn)
    return chosen, None if found.fixed else is_greedy.index_fill(0, rows, True)


def _sampled(
    tree: Any,
    logits: torch.Tensor,
    best: torch.Tensor,
    info: Any,
    depth: int,
    is_fixed: torch.Tensor,
) -> Walk:
    batch_size, nodes = tree.tokens.shape
    probs = filtered_probs(
        logits.view(batch_size, nodes, -1),
        temperature=info.temperatures,
        top_k=info.top_ks if info.need_top_k_sampling else None,
        top_p=info.top_ps if info.need_top_p_sampling else None,
        min_p=info.min_ps if info.need_min_p_sampling else None,
        max_top_k=int(info.top_ks.max()) if logits.is_cpu else None,
    )
    coins = torch.rand(batch_size, 2 * depth + 1, device=logits.device)
    return kernels.mixed_walk(
        tree.tokens,
        tree.parent,
        tree.mask,
        tree.depth,
        best,
        probs,
        coins[:, :depth],
        coins[:, -1],
        is_fixed,
        depth,
        tree.proposal,
        coins[:, depth:-1],
    )


def _following(tokens: torch.Tensor, walk: Walk) -> torch.Tensor:
    """The token after each node of the path, 0 elsewhere; [B * N] int32."""
    batch_size, nodes = tokens.shape
    after = tokens.gather(1, walk.path.roll(-1, 1).clamp_min(0))
    after.scatter_(1, (walk.length - 1).unsqueeze(1), walk.next_token.unsqueeze(1))
    # Column N swallows the padding of shorter paths.
    out = tokens.new_zeros(batch_size, nodes + 1)
    out.scatter_(1, torch.where(walk.path < 0, nodes, walk.path), after)
    return out[:, :nodes].reshape(-1).int()


def _agree(*tensors: torch.Tensor) -> None:
    """Ranks draw their own coins: rank 0's decision is everybody's."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    if group.world_size > 1:
        for tensor in tensors:
            group.broadcast(tensor, src=0)
