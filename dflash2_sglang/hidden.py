"""``return_hidden_states``: the target's last hidden states, beside those the drafter reads."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_batch_info import get_server_return_hidden_states_mode


def keep_final_states(model: Any) -> None:
    """Have ``model`` hand out what its head reads, if the server may be asked for it.

    SGLang can do that itself, but turns it on only where hidden states are captured without a
    drafter.
    """
    if get_server_return_hidden_states_mode().need_capture():
        for module in model.modules():
            if isinstance(module, LogitsProcessor):
                module.keep_last_hidden_states = True


def hand_over(batch: Any, result: Any) -> None:
    """Give the scheduler the final states in place of those at the taps, if a request wants them."""
    output = result.logits_output
    states, output.last_hidden_states = output.last_hidden_states, None
    if not batch.return_hidden_states:
        output.hidden_states = None
    elif result.accept_index is None:
        output.hidden_states = _of_prompts(states, batch.extend_lens)
    else:
        output.hidden_states = _of_paths(states, result.accept_index)


def _of_prompts(states: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[T, H], of all prompt tokens; [B, H] where the server is set to give the last ones only."""
    if get_server_return_hidden_states_mode().is_last():
        return states[torch.tensor(lengths, device=states.device).cumsum(0) - 1]
    return states


def _of_paths(states: torch.Tensor, accept_index: torch.Tensor) -> torch.Tensor:
    """[B * N, H], the accepted path of each request in front, as the scheduler reads its tokens.

    accept_index  [B, P] int32, places of the path among the B * N nodes, then -1
    """
    size, longest = accept_index.shape
    out = states.clone()
    path = states[accept_index.long().clamp_min(0)]
    out.view(size, -1, states.shape[-1])[:, :longest] = path
    return out
