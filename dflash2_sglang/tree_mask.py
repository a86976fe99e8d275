"""The tree's mask in the layout that SGLang's GPU backends read, refilled in place every round.

For each request N rows over its prefix and its N nodes, one after the other in one flat buffer. Where a
request begins depends on all prefixes before it, so nothing here may ask the device how long they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FlatMask:
    """One flat buffer, true wherever no tree has written.

    Prefix cells must be true: some kernels read them (flashinfer, deterministic Triton). Filling the
    whole buffer every round would cost its size, some 100 MB at long contexts; instead the cells of the
    last tree are set back, which costs B * N * N.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.buffer.fill_(True)
        self.written: Tensor | None = None  # cells of the last tree

    def write(self, mask: Tensor, prefix: Tensor) -> None:
        """mask [B, N, N] bool; prefix [B] int64, the committed tokens of each request."""
        if self.written is not None:
            self.buffer.index_fill_(0, self.written, True)
        self.written = cells(prefix, mask.shape[1])
        self.buffer.index_copy_(0, self.written, mask.flatten().to(self.buffer.dtype))


def cells(prefix: Tensor, nodes: int) -> Tensor:
    """Where the trees' own cells lie in the flat mask, [B * N * N] int64.

    Request b begins at N * sum over earlier requests of (prefix + N); its rows are prefix[b] + N long.
    """
    node = torch.arange(nodes, device=prefix.device)
    width = prefix.long() + nodes
    first = nodes * (width.cumsum(0) - width) + prefix
    row = first[:, None] + node * width[:, None]  # [B, N], first tree cell of each row
    return (row[:, :, None] + node).flatten()


def mask_reader(backend: Any) -> Any:
    """The attention backend that reads the mask, out of SGLang's wrappers (hybrid models, mixed flags)."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    while True:
        if isinstance(backend, HybridAttnBackend):
            backend = backend._select_backend(ForwardMode.TARGET_VERIFY)
        elif (full := getattr(backend, "full_attn_backend", None)) is not None:
            backend = full
        else:
            return backend


class TreeMask:
    """The buffer of the attention backend where it has one, since captured graphs read that; else ours.

    width  most columns of a request: its longest prefix and the tree
    """

    def __init__(self, nodes: int, width: int, device: Any) -> None:
        self.nodes, self.width, self.device = nodes, width, device
        self.theirs: FlatMask | None = None
        self.ours: FlatMask | None = None

    def __call__(self, mask: Tensor, prefix: Tensor, backend: Any) -> Tensor:
        """The flat mask for ``backend``, which stays valid until the next call.

        mask [B, N, N] bool; prefix [B] int64; backend: SGLang's attention backend of the target.
        """
        flat = self._buffer(mask.shape[0], backend)
        flat.write(mask, prefix)
        return flat.buffer

    def reserve(self, batch: int, backend: Any) -> None:
        """Allocate now what batches of up to ``batch`` requests need."""
        self._buffer(batch, backend)

    def _buffer(self, batch: int, backend: Any) -> FlatMask:
        theirs = backend.verify_mask
        if theirs is not None and theirs.is_read and theirs.fits(batch):
            if self.theirs is None or self.theirs.buffer is not theirs.buffer:
                self.theirs = FlatMask(theirs.buffer)
            return self.theirs
        cells = batch * self.nodes * self.width
        if self.ours is None or self.ours.buffer.numel() < cells:
            self.ours = FlatMask(torch.empty(cells, dtype=torch.bool, device=self.device))
        return self.ours
