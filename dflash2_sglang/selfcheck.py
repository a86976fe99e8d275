"""A trial before the first request: trees verified as they will be served, against the same paths as text.

Three things must agree. What the verifier is told of a tree (mask, positions, links) must follow from its
parents. The pass that will serve, from a captured graph if there is one, must give what the eager pass
gives. And each node must be seen as if its path were plain text: the same tokens, run as a causal chain
whose mask and positions are made here and not by the code that is tried.

Two trees are tried, behind prefixes of different lengths, so that a buffer which was filled once and never
again is noticed. Their passes follow one another as in serving: a comparison between them would refresh
what a graph left stale. All of it happens in KV slots that no request owns yet.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from torch import Tensor

from dflash2_sglang.closeness import difference, worst
from dflash2_sglang.consistency import inconsistency, longest_paths
from dflash2_sglang.drafttrial import DraftTrial
from dflash2_sglang.graphs import captured, eagerly
from dflash2_sglang.hybrid import clear_states
from dflash2_sglang.state import TreeVerifyInput
from dflash2_sglang.tree.build import Tree, assemble, build_tree
from dflash2_sglang.tree.lattice import Lattice

logger = logging.getLogger(__name__)

PATHS = 6  # of each tree that are run as text
SHARPNESS = (5.0, 1.5)  # of the two lattices: a deep tree, then a broad one
# Largest relative difference of a node's logits: graph against eager, tree against text. The kernels of
# the first pair are the same. Those of the second sum in other orders, and 16 bits show that.
TOLERANCE = {torch.float32: (1e-4, 1e-3)}
TOLERANCE_16_BIT = (0.05, 0.25)


class SelfCheckError(RuntimeError):
    """What will serve does not compute what it should."""


class Trial(NamedTuple):
    """A tree of one request behind ``length`` committed tokens."""

    length: int
    tree: Tree


class Seen(NamedTuple):
    """What a round computed."""

    block: Tensor  # [D, H], the drafter's hidden states
    scores: Tensor  # [1, N], of the tree it drafted
    logits: Tensor  # [N, V]
    features: Tensor  # [N, taps * H]
    stored: Tensor  # [N, ...], keys and values of the last layer


def _fault(problem: str, where: str) -> str:
    return (
        f"DFLASH2 refuses to serve: {problem} in {where}, which is a fault of dflash2-sglang; "
        "please report it."
    )


class SelfCheck:
    """Of one target and the code that makes its verify inputs."""

    def __init__(self, runner: Any, verify_input: Any, drafting: Any, allocator: Any) -> None:
        """runner: the target's ModelRunner; allocator: SGLang's, of the KV slots."""
        self.runner, self.verify_input, self.allocator = runner, verify_input, allocator
        self.drafting = drafting
        self.depth, self.nodes = verify_input.depth, verify_input.nodes
        self.children, self.device = verify_input.children, runner.device
        self.vocab = int(runner.model_config.vocab_size)
        self.width = min(drafting.head.top_k, self.vocab)
        self.random = torch.Generator().manual_seed(2)
        context = torch.randint(self.vocab, (self.nodes,), generator=self.random)
        self.context = context.to(self.device)
        self.lengths = (1 + self.nodes, 1 + self.nodes - self.nodes // 3)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Raises SelfCheckError, in one sentence that names the way out."""
        started = time.perf_counter()
        tolerance = TOLERANCE.get(self.runner.dtype, TOLERANCE_16_BIT)
        window = max(self.nodes, self.drafting.config.block_size)
        needed = max(self.lengths) + window
        room = min(self.allocator.size, self.runner.req_to_token_pool.req_to_token.shape[1])
        if needed > room:
            logger.warning("DFLASH2 self-check left out: it needs %d slots of %d.", needed, room)
            return
        with self._scratch(needed) as (row, slots):
            self._row, self._slots = row, slots
            self._draft = DraftTrial(self.drafting, row, slots)
            self._write_context()
            trials = [
                Trial(length, self._tree(sharpness))
                for length, sharpness in zip(self.lengths, SHARPNESS, strict=True)
            ]
            served = [self._round(trial) for trial in trials]
            found = [
                self._judge(trial, seen, tolerance)
                for trial, seen in zip(trials, served, strict=True)
            ]
        logger.info(
            "DFLASH2 self-check: trees verified as text in %.2f s, %s; largest relative differences: "
            "to eager %.1e, to text %.1e.",
            time.perf_counter() - started,
            "captured" if captured(self.runner) else "eager",
            max(eager for eager, _ in found),
            max(text for _, text in found),
        )

    def _round(self, trial: Trial) -> Seen:
        """As in serving: the drafter's block, then the tree. Eager too where the caller says so."""
        anchor = trial.tree.tokens[:, 0]
        drafted = self._draft(trial.length, anchor)
        if not torch.equal(drafted.tree.tokens[:, 0], anchor):
            raise SelfCheckError(_fault("a token is at the wrong place", "a drafted tree"))
        prefix, window = self._place(trial)
        self._told(drafted.tree, prefix, window, "a drafted tree")
        verify = self._told(trial.tree, prefix, window, "a trial tree")
        seen = self._run(verify, prefix, window)
        return Seen(drafted.hidden, drafted.scores, *seen, self._stored(window))

    def _told(self, tree: Tree, prefix: Tensor, window: Tensor, name: str) -> TreeVerifyInput:
        """The verifier's input of a tree, by the code that will serve."""
        verify = self.verify_input(tree, prefix, window)
        problem = inconsistency(verify, prefix)
        if problem is not None:
            raise SelfCheckError(_fault(problem, name))
        return verify

    def _place(self, trial: Trial) -> tuple[Tensor, Tensor]:
        """The number of tokens before a tree [1], and the slots of its nodes [1, N]."""
        prefix = torch.tensor([trial.length], device=self.device)
        return prefix, self._slots[None, trial.length : trial.length + self.nodes]

    def _judge(
        self, trial: Trial, served: Seen, tolerance: tuple[float, float]
    ) -> tuple[float, float]:
        self._write_context()  # the other trial wrote over it
        to_eager = 0.0
        if captured(self.runner) or captured(self.drafting.runner):
            with eagerly(self.runner), eagerly(self.drafting.runner):
                eager = self._round(trial)
            to_eager = worst(difference(*pair) for pair in zip(served, eager, strict=True))
        to_text = self._against_text(served.logits, trial)
        if not to_eager <= tolerance[0]:
            raise SelfCheckError(
                "DFLASH2 refuses to serve: a round from the captured CUDA graphs differs from an eager one "
                f"by {to_eager:.1e} of the values where {tolerance[0]:.0e} is allowed; start with "
                "--disable-cuda-graph."
            )
        if not to_text <= tolerance[1]:
            raise SelfCheckError(
                "DFLASH2 refuses to serve: the target sees a tree's paths otherwise than the same text, "
                f"by {to_text:.1e} of the logits where {tolerance[1]:.0e} is allowed; start with "
                "--speculative-eagle-topk 1, or with another --attention-backend."
            )
        return to_eager, to_text

    def _tree(self, sharpness: float) -> Tree:
        """From a random lattice, by the code that will serve."""
        shape = (self.depth, self.width)
        order = torch.rand(self.depth, self.vocab, generator=self.random).argsort(-1)
        tokens = order[:, : self.width].unsqueeze(0)
        scores = sharpness * torch.randn(1, *shape, self.width, generator=self.random)
        anchor = torch.randint(self.vocab, (1,), generator=self.random)
        lattice = Lattice(tokens.to(self.device), scores.log_softmax(-1).to(self.device))
        return build_tree(lattice, anchor.to(self.device), self.nodes, self.children)

    def _stored(self, window: Tensor) -> Tensor:
        """Keys and values that the last layer left in the slots ``window`` [1, N], as [N, ...]."""
        layers = [m for m in self.runner.model.modules() if isinstance(m, RadixAttention)]
        buffers = self.runner.token_to_kv_pool.get_kv_buffer(layers[-1].layer_id)
        return torch.cat([buffer[window[0]].flatten(1).float() for buffer in buffers], -1)

    def _write_context(self) -> None:
        """KV of random text, behind one token whose KV is what lies in its slot (zeros).

        And the drafter's behind the shorter prefix, where the trials' blocks overlap.
        """
        prefix = torch.ones(1, dtype=torch.int64, device=self.device)
        window = self._slots[None, 1 : 1 + self.nodes]
        with eagerly(self.runner), eagerly(self.drafting.runner):
            self._run(self._chain(self.context, 1, window), prefix, window)
            self._draft.block(min(self.lengths), self.context[:1])

    def _against_text(self, served: Tensor, trial: Trial) -> float:
        prefix, window = self._place(trial)
        found = []
        for path in longest_paths(trial.tree.parent[0].tolist(), PATHS):
            nodes = torch.tensor(path, device=self.device)
            tokens = torch.zeros(self.nodes, dtype=torch.int64, device=self.device)
            tokens[: len(path)] = trial.tree.tokens[0, nodes]
            chain = self._chain(tokens, trial.length, window)
            with eagerly(self.runner):
                text, _ = self._run(chain, prefix, window)
            found.append(difference(served[nodes], text[: len(path)]))
        return worst(found)

    def _chain(self, tokens: Tensor, length: int, window: Tensor) -> TreeVerifyInput:
        """N tokens [N] of plain text after ``length`` others, in the form of a tree."""
        place = torch.arange(self.nodes, device=self.device)
        parent = (place - 1).unsqueeze(0)
        tree = assemble(tokens.unsqueeze(0), parent, torch.zeros_like(parent).float(), self.nodes)
        seen = torch.arange(length + self.nodes, device=self.device) <= length + place[:, None]
        return TreeVerifyInput(
            tree=tree,
            draft_token=tokens,
            custom_mask=tree.mask.flatten() if self._reads_tree() else seen.flatten(),
            positions=length + place,
            retrieve_index=place.unsqueeze(0),
            retrieve_next_token=tree.first_child,
            retrieve_next_sibling=tree.next_sibling,
            retrieve_cum_len=None,
            spec_steps=self.depth,
            topk=self.children,
            draft_token_num=self.nodes,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            prepared_out_cache_loc=window.reshape(-1),
        )

    def _reads_tree(self) -> bool:
        from dflash2_sglang.tree_mask import mask_reader

        return getattr(mask_reader(self.runner.attn_backend), "reads_tree_mask", False)

    def _run(
        self, verify: TreeVerifyInput, prefix: Tensor, window: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [N, V] and features [N, taps * H] of the target, by the steps of SGLang's verifier."""
        lengths = prefix.cpu()
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=1,
            input_ids=verify.draft_token,
            req_pool_indices=self._row,
            seq_lens=prefix,
            orig_seq_lens=prefix,
            out_cache_loc=window.reshape(-1),
            seq_lens_sum=int(lengths.sum()),
            seq_lens_cpu=lengths,
            positions=verify.positions,
            spec_algorithm=self.runner.spec_algorithm,
            spec_info=verify,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        if self.runner.model_config.model_is_mrope:
            batch.mrope_positions = verify.positions.expand(3, -1)
        # SGLang's kernels leave the last nodes' inputs in the state, for the commit to replace.
        clear_states(self.runner.req_to_token_pool, self._row)
        graphs = self.runner.decode_cuda_graph_runner
        if graphs and graphs.can_run_graph(batch):
            graphs.load_batch(batch)
            batch.mark_forward_metadata_ready()
        output = self.runner.forward(batch).logits_output
        return output.next_token_logits.float().clone(), output.hidden_states.float().clone()

    @contextlib.contextmanager
    def _scratch(self, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A row of the slot table [1] and its slots [length]: borrowed, not allocated.

        No request has arrived, so all slots are free; page 0 belongs to padding.
        """
        pool = self.runner.req_to_token_pool
        row = pool.free_slots[-1]
        first = int(self.allocator.page_size)
        slots = first + torch.arange(length, device=self.device)
        table = [(pool.req_to_token[row, :length], slots)]
        to_window = getattr(self.allocator, "full_to_swa_index_mapping", None)
        if to_window is not None:
            table.append((to_window[first : first + length], slots))
        before = [cells.clone() for cells, _ in table]
        for cells, values in table:
            cells.copy_(values)
        try:
            yield torch.tensor([row], device=self.device), slots
        finally:
            for (cells, _), values in zip(table, before, strict=True):
                cells.copy_(values)
