"""What a round hands to the scheduler: the state between rounds and the input of a tree verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_decode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from dflash2_sglang.tree.build import Tree


@dataclass
class DraftState(SpecInput):
    """Carried from round to round: each request's next anchor. All else lives in the KV pools.

    bonus_tokens    [B] int64, the anchors; under overlap the scheduler relays them by request slot
    future_indices  [B] int64, those slots, set by the scheduler
    """

    bonus_tokens: torch.Tensor
    future_indices: torch.Tensor | None = None

    # The scheduler's relay asks every draft input for these; this algorithm has none of them.
    topk_p = topk_index = hidden_states = draft_probs = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_DRAFT)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    @classmethod
    def empty(cls, device: Any) -> DraftState:
        return cls(torch.empty(0, dtype=torch.int64, device=device))

    def prepare_for_decode(self, batch: Any) -> None:
        """Reserve KV slots for this round's tree and for the round already in flight."""
        eagle_prepare_for_decode(batch)

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: Any = None) -> None:
        """Keep the requests at ``new_indices`` [B'] int64."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, spec_info: DraftState) -> None:
        """Append the requests of ``spec_info``."""
        if self.future_indices is not None:
            assert spec_info.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, spec_info.future_indices])
        else:
            self.bonus_tokens = torch.cat([self.bonus_tokens, spec_info.bonus_tokens])


@dataclass
class TreeVerifyInput(EagleVerifyInput):
    """A tree as SGLang's verifier takes it, plus the tree itself for mask and acceptance.

    grammar_mask  SGLang's GrammarMask of all B * N nodes, or None
    parameters    what the requests ask beyond the filters, see ``RequestParameters``
    """

    tree: Tree = None  # type: ignore[assignment]
    grammar_mask: Any = None
    parameters: Any = None

    @property
    def tree_mask(self) -> torch.Tensor:
        """[B, N, N] bool: node i sees node j."""
        return self.tree.mask

    @property
    def max_tree_depth(self) -> int:
        """Nodes on the longest path, the root included."""
        return min(self.spec_steps + 1, self.draft_token_num)
