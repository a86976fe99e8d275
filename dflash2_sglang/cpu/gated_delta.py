"""The gated delta rule and its convolution in torch: one token, a prompt, or a tree of nodes.

A head keeps a state S [V, K]. A token with query q, key k (both of length 1), value v, log decay g <= 0
and strength b does

    S <- exp(g) S;    u = b (v - S k);    S <- S + u k^T;    out = S q

(Yang et al., Gated Delta Networks, arXiv 2412.06464). Tokens that are known together need no loop: with
G_i the sum of g on the path to i, u solves a triangular system, for a chain (the chunkwise form of that
paper) and in the same way for a tree, where "before" means "is an ancestor of".

B requests, N tokens or nodes each, Hk key heads shared by the H value heads, T tokens of one request.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens of a prompt solved together; SGLang's prefix cache keeps states on this grid
EPS = 1e-6


def gates(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay and strength of each token, float32; a, b [..., H], a_log, dt_bias [H]."""
    rate = F.softplus(a.float() + dt_bias.float())
    return -a_log.float().exp() * rate, b.float().sigmoid()


def unit(x: Tensor) -> Tensor:
    """Rows of x [..., K] scaled to length 1, float32."""
    x = x.float()
    return x * (torch.linalg.vecdot(x, x) + EPS).rsqrt().unsqueeze(-1)


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each request: out [B, H, V] and the new state [B, H, V, K], float32.

    state [B, H, V, K]; q, k [B, Hk, K] any length; v [B, H, V]; decay (log), strength [B, H]
    """
    q, k = _heads(q, v.shape[1]), _heads(k, v.shape[1])
    state = state.float() * decay.exp()[..., None, None]
    seen = torch.matmul(state, k.unsqueeze(-1)).squeeze(-1)
    update = (v.float() - seen) * strength.unsqueeze(-1)
    state = torch.addcmul(state, update.unsqueeze(-1), k.unsqueeze(-2))
    return torch.matmul(state, q.unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5, state


def prompt(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """T tokens of one request, in chunks.

    state [H, V, K]; q, k [T, Hk, K]; v [T, H, V]; decay, strength [T, H]

    Returns out [T, H, V], the state after the last token [H, V, K], and the state before each chunk
    [ceil(T / CHUNK), H, V, K]; float32.
    """
    state, outs, starts = state.float().unsqueeze(0), [], []
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril_()
    for begin in range(0, q.shape[0], CHUNK):
        part = slice(begin, begin + CHUNK)
        q_, k_, v_, decay_, strength_ = (x[part].unsqueeze(0) for x in (q, k, v, decay, strength))
        size = q_.shape[1]
        starts.append(state)
        out, solved = _together(state, q_, k_, v_, decay_, strength_, seen[:size, :size])
        outs.append(out[0])
        last = solved.between[:, :, -1]  # [1, H, N]
        update = solved.update * last.unsqueeze(-1)
        state = state * solved.reach[:, :, -1, None, None] + update.mT @ solved.key
    return torch.cat(outs), state[0], torch.cat(starts)


def nodes(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    strength: Tensor,
    seen: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """N nodes of each request: out [B, N, H, V] and the state after each node [B, N, H, V, K].

    state [B, H, V, K]; q, k [B, N, Hk, K]; v [B, N, H, V]; decay, strength [B, N, H]
    seen  [B, N, N] bool, node j is i or an ancestor of i, and comes before i; None for a chain
    """
    if seen is None:
        seen = torch.ones(1, q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril_()
    state = state.float()
    out, solved = _together(state, q, k, v, decay, strength, seen.unsqueeze(1))
    steps = solved.update.unsqueeze(-1) * solved.key.unsqueeze(-2)  # [B, H, N, V, K]
    states = (solved.between @ steps.flatten(3)).view(steps.shape)
    states = torch.addcmul(states, solved.reach[..., None, None], state.unsqueeze(2))
    return out, states.transpose(1, 2)


class _Solved:
    """What follows from solving N tokens together; all [B, H, N, ...], float32.

    update [.., V] the u of each token, key [.., K], reach [..] decay since the first state,
    between [.., N] decay from token j to token i, 0 where i does not see j
    """

    def __init__(self, update: Tensor, key: Tensor, reach: Tensor, between: Tensor) -> None:
        self.update, self.key, self.reach, self.between = update, key, reach, between


def _together(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, seen: Tensor
) -> tuple[Tensor, _Solved]:
    heads = v.shape[2]
    q, k = _heads(q, heads).transpose(1, 2), _heads(k, heads).transpose(1, 2)
    v, strength = v.float().transpose(1, 2), strength.transpose(1, 2).unsqueeze(-1)
    total = (seen.to(decay.dtype) @ decay.transpose(1, 2).unsqueeze(-1)).squeeze(-1)  # [B, H, N]
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    between = between.masked_fill(~seen, float("-inf")).exp()
    reach = total.exp()
    wanted = strength * (v - reach.unsqueeze(-1) * (k @ state.mT))
    coupling = strength * (k @ k.mT) * between  # its diagonal is not read: u_i does not see itself
    update = torch.linalg.solve_triangular(coupling, wanted, upper=False, unitriangular=True)
    out = reach.unsqueeze(-1) * (q @ state.mT) + ((q @ k.mT) * between) @ update
    out = (out * q.shape[-1] ** -0.5).transpose(1, 2)
    return out, _Solved(update, k, reach, between)


def _heads(x: Tensor, heads: int) -> Tensor:
    """x [..., Hk, K] at length 1, each key head repeated for its value heads: [..., H, K]."""
    return unit(x).repeat_interleave(heads // x.shape[-2], -2)


def convolve_prompt(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution of T tokens: out [T, C] and the last W - 1 inputs [C, W - 1].

    x [T, C]; weight [C, W]; before [C, W - 1] the inputs before the first token
    """
    inputs = torch.cat((before.to(x.dtype), x.T), 1)
    out = F.conv1d(inputs.unsqueeze(0), weight.unsqueeze(1), bias, groups=x.shape[1])[0]
    return out.T, inputs[:, x.shape[0] :]


def windows(parent: Tensor | None, nodes: int, width: int, device: torch.device) -> Tensor:
    """Columns of each node's window among W - 1 earlier inputs and then the N nodes: [B or 1, N, W].

    The last column of a window is the node itself, the one before it its parent, and so on.
    parent [B, N] int64, -1 at the root; None for a chain
    """
    column = torch.arange(width - 1 + nodes, device=device)
    above = (column - 1).clamp_(min=0).unsqueeze(0)
    if parent is not None:
        own = torch.where(parent < 0, width - 2, parent + width - 1)
        above = torch.cat((above[:, : width - 1].expand(parent.shape[0], -1), own), 1)
    line = [column[width - 1 :].expand(above.shape[0], -1)]
    for _ in range(width - 1):
        line.append(above.gather(1, line[-1]))
    return torch.stack(line[::-1], -1)


def convolve_nodes(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Each node convolved with its own ancestors.

    x [B, N, C]; weight [C, W]; before [B, C, W - 1]; columns [B or 1, N, W], see ``windows``

    Returns out [B, N, C] and the last W - 1 inputs of each node's path [B, N, C, W - 1].
    """
    batch, count, channels = x.shape
    width = weight.shape[1]
    inputs = torch.cat((before.to(x.dtype), x.mT), 2)  # [B, C, W - 1 + N]
    index = columns.flatten(1).unsqueeze(1).expand(batch, channels, -1)
    window = inputs.gather(2, index).view(batch, channels, count, width).transpose(1, 2)
    out = (window.float() * weight.float()).sum(-1)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype), window[..., 1:]
