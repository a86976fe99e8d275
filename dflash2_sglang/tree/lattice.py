"""The lattice of a block: K candidates for each of its D positions, and what follows what.

The drafter fills a block of D positions in one pass. For every position it names K candidate
tokens with their logits, and the selector scores every pair of candidates of two neighbouring
positions. `build_lattice` turns both into transition log-probabilities; a path through the lattice
is one guess at the next D tokens, and its log-probability is the sum along the path.

B requests, D positions, K candidates, r the rank of the selector.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding


class Lattice(NamedTuple):
    """Candidates of a block and the log-probability of each transition.

    tokens     [B, D, K]     int64    candidate ids; position t of the lattice is depth t+1
    log_probs  [B, D, K, K]  float32  log_probs[b, t, a, c]: candidate c of position t follows
               candidate a of position t-1. At t = 0 the predecessor is the anchor, so all rows a
               are equal and row 0 is the one to read.

    A row sums to at most 1 in probability: what is missing is the mass of the full vocabulary
    outside the K candidates.
    """

    tokens: Tensor
    log_probs: Tensor


def pair_scores(hidden_codes: Tensor, predecessor_codes: Tensor, successor_codes: Tensor) -> Tensor:
    """Selector scores of all neighbouring pairs, sum over r of A[a] * h_t * B[c].

    hidden_codes       [B, D, r]     projection of the block's hidden state at position t
    predecessor_codes  [B, D, K, r]  code A of each candidate of position t-1 (t = 0: the anchor's,
                                     K times)
    successor_codes    [B, D, K, r]  code B of each candidate of position t
    returns            [B, D, K, K]  score of (predecessor a, successor c)
    """
    return (predecessor_codes * hidden_codes.unsqueeze(-2)) @ successor_codes.transpose(-1, -2)


def code_scores(
    tokens: Tensor,
    anchor: Tensor,
    hidden_codes: Tensor,
    predecessors: Tensor,
    successors: Tensor,
) -> Tensor:
    """`pair_scores` of candidates, their codes looked up; [B, D, K, K] float32.

    tokens        [B, D, K]  int64 candidate ids
    anchor        [B]        int64, the predecessor of position 0
    hidden_codes  [B, D, r]  see `pair_scores`
    predecessors, successors  [V, r]  codebooks A and B of the vocabulary
    """
    first = anchor.view(-1, 1, 1).expand(-1, 1, tokens.shape[-1])
    before = torch.cat((first, tokens[:, :-1]), 1)
    return pair_scores(
        hidden_codes.float(),
        embedding(before, predecessors),
        embedding(tokens, successors).float(),
    )


def build_lattice(
    tokens: Tensor,
    unary: Tensor,
    log_norm: Tensor,
    temperature: Tensor | None = None,
    pair: Tensor | None = None,
) -> Lattice:
    """Transition log-probabilities from the drafter's logits and the selector's scores.

    tokens       [B, D, K]     int64 candidate ids, distinct within a position
    unary        [B, D, K]     logits of the candidates
    log_norm     [B, D]        logsumexp over the FULL vocabulary of (logits / temperature)
    temperature  [B]           float32, 1 for greedy requests; None means 1 for all
    pair         [B, D, K, K]  selector scores, or None for a drafter without a selector: then the
                               positions are independent and every row is the marginal itself

    The selector only spreads the mass that the K candidates hold in the full vocabulary; without
    that factor, paths through flat positions are trusted far too much.
    """
    heat = None if temperature is None else temperature.float().view(-1, 1, 1)
    unary = unary.float() if heat is None else unary.float() / heat
    if pair is None:
        scores = unary.unsqueeze(-2)  # the one row that all predecessors share
    else:
        pair = pair.float() if heat is None else pair.float() / heat.unsqueeze(-1)
        scores = pair + unary.unsqueeze(-2)
    # Rounding must not let K candidates hold more than the whole vocabulary, hence the clamp.
    log_mass = (unary.logsumexp(-1) - log_norm.float()).clamp_(max=0)
    log_probs = scores.log_softmax(-1) + log_mass[..., None, None]
    return Lattice(tokens, log_probs.expand(*unary.shape, unary.shape[-1]))


def selector_lattice(
    tokens: Tensor,
    unary: Tensor,
    log_norm: Tensor,
    temperature: Tensor | None,
    anchor: Tensor,
    hidden_codes: Tensor,
    predecessors: Tensor,
    successors: Tensor,
) -> Lattice:
    """`build_lattice` with the scores of `code_scores`; see both for the arguments."""
    pair = code_scores(tokens, anchor, hidden_codes, predecessors, successors)
    return build_lattice(tokens, unary, log_norm, temperature, pair)
