"""The candidate selector: how well one candidate follows another, given the drafter's state."""

from __future__ import annotations

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from torch import Tensor, nn

from dflash2_sglang import kernels
from dflash2_sglang.config import DrafterConfig
from dflash2_sglang.tree.lattice import Lattice, code_scores


class CandidateSelector(nn.Module):
    """Two codebooks over the vocabulary, coupled by a projection of the hidden state.

    Replicated on every rank, because candidates are global token ids.
    """

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.top_k = c.selector_top_k

        def codebook() -> nn.Parameter:
            return nn.Parameter(torch.zeros(c.vocab_size, c.selector_rank), requires_grad=False)

        self.predecessor_codebook, self.successor_codebook = codebook(), codebook()
        self.hidden_projection = ReplicatedLinear(c.hidden_size, c.selector_rank, bias=False)

    def project(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., r]."""
        return self.hidden_projection(hidden)[0]

    def pair_scores(self, hidden: Tensor, anchor: Tensor, tokens: Tensor) -> Tensor:
        """Scores of all transitions between neighbouring positions, [B, D, K, K] float32.

        hidden  [B, D, H]  drafter's hidden states of the mask positions
        anchor  [B]        the committed token before position 0: predecessor of all rows there
        tokens  [B, D, K]  candidates of each position
        """
        codes = self.project(hidden), self.predecessor_codebook, self.successor_codebook
        return code_scores(tokens, anchor, *codes)

    def lattice(
        self,
        hidden: Tensor,
        anchor: Tensor,
        tokens: Tensor,
        unary: Tensor,
        log_norm: Tensor,
        temperature: Tensor | None,
    ) -> Lattice:
        """The lattice of these scores: see `pair_scores` and `tree.lattice.build_lattice`."""
        codes = self.project(hidden), self.predecessor_codebook, self.successor_codebook
        return kernels.selector_lattice(tokens, unary, log_norm, temperature, anchor, *codes)
