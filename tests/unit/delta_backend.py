"""SGLang's backend of gated delta net layers, as the package's forwards see it: pools around one layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dflash2_sglang.cpu import delta_net, scratch
from dflash2_sglang.tree.build import ancestor_mask

KEY_HEADS, HEADS, KEY, VALUE, WIDTH = 2, 4, 8, 12, 4
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE


class Backend:
    """Just what the forwards read of ``GDNAttnBackend``; slot 0 is for padding."""

    def __init__(self, slots: int, nodes: int, *, shared_windows: bool = False) -> None:
        g = torch.Generator().manual_seed(7)
        window = (CHANNELS, WIDTH - 1)
        if shared_windows:  # the layout that SGLang picks for chains
            flat = torch.zeros(1, slots, CHANNELS, nodes + WIDTH - 2)
            strides = (*flat.stride()[:2], 1, *flat.stride()[2:])
            windows = flat.as_strided((1, slots, nodes, *window), strides)
        else:
            windows = torch.zeros(1, slots, nodes, *window)
        self.caches = SimpleNamespace(
            conv=[torch.randn(1, slots, *window, generator=g)],
            temporal=torch.randn(1, slots, HEADS, VALUE, KEY, generator=g),
            intermediate_conv_window=[windows],
            intermediate_ssm=torch.zeros(1, slots, nodes, HEADS, VALUE, KEY),
        )
        self.mis_metadata = None
        self.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=self._of_layer)
        self.layer = SimpleNamespace(
            layer_id=0,
            conv_weights=torch.randn(CHANNELS, WIDTH, generator=g),
            bias=None,
            activation="silu",
            A_log=torch.linspace(-1, 1, HEADS),
            dt_bias=torch.linspace(-3, 0, HEADS),
            q_dim=KEY_HEADS * KEY,
            k_dim=KEY_HEADS * KEY,
            v_dim=HEADS * VALUE,
            num_q_heads=KEY_HEADS,
            num_k_heads=KEY_HEADS,
            num_v_heads=HEADS,
            head_q_dim=KEY,
            head_k_dim=KEY,
            head_v_dim=VALUE,
        )
        self.forward_metadata: Any = None

    def _of_layer(self, _: int) -> Any:
        c = self.caches
        return SimpleNamespace(
            conv=[c.conv[0][0]],
            temporal=c.temporal[0],
            intermediate_conv_window=[c.intermediate_conv_window[0][0]],
            intermediate_ssm=c.intermediate_ssm[0],
        )

    def decode(self, slots: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        scratch.new_forward()
        self.forward_metadata = SimpleNamespace(mamba_cache_indices=slots)
        batch = SimpleNamespace(mamba_track_mask=None)
        return delta_net.forward_decode(self, self.layer, batch, x, a, b)[0]

    def verify(self, slots: Tensor, tree: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """x [B, N, C], a, b [B, N, H] -> [B, N, H, V]."""
        scratch.new_forward()
        self.forward_metadata = SimpleNamespace(mamba_cache_indices=slots)
        spec = SimpleNamespace(draft_token_num=x.shape[1], tree=tree)
        mode = SimpleNamespace(is_target_verify=lambda: True)
        batch = SimpleNamespace(forward_mode=mode, spec_info=spec)
        flat = (part.flatten(0, 1) for part in (x, a, b))
        out = delta_net.forward_extend(self, self.layer, batch, *flat)[0]
        return out.unflatten(0, x.shape[:2])

    def commit(self, slots: Tensor, steps: Tensor, *tracked: Tensor) -> None:
        kept, after = tracked or (None, None)
        delta_net.commit(self.caches, slots, steps, kept, after)

    def states(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.caches.conv[0][0, slot], self.caches.temporal[0, slot]


def tree_of(parent: list[list[int]] | None) -> Any:
    if parent is None:
        return None
    tensor = torch.tensor(parent)
    return SimpleNamespace(parent=tensor, mask=ancestor_mask(tensor, tensor.shape[1]))
