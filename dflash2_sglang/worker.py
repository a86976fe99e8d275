"""One decode round of DFLASH2, told in the order it happens.

Draft a block, read a tree from it, let the target verify the tree in one pass, keep the longest path it
agrees with, and project what the target thought on that path into the drafter's KV.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_uniform_func
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, compute_position
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from sglang.srt.speculative.eagle_worker_common import run_eagle_verify
from sglang.srt.speculative.spec_utils import get_plan_stream

import dflash2_sglang.patches as patches
from dflash2_sglang import __version__
from dflash2_sglang.backends import refuse_loaded
from dflash2_sglang.config_refusals import ARCHITECTURES
from dflash2_sglang.context import ContextWriter
from dflash2_sglang.draft import Drafting
from dflash2_sglang.grammar.constrain import Constraint, masked
from dflash2_sglang.graphs import largest_capture
from dflash2_sglang.hidden import hand_over, keep_final_states
from dflash2_sglang.model.drafter import DFlash2Drafter
from dflash2_sglang.parameters import RequestParameters
from dflash2_sglang.selfcheck import SelfCheck
from dflash2_sglang.state import DraftState
from dflash2_sglang.telemetry import DRAFT, OTHER, VERIFY, RoundClock, RoundRecord
from dflash2_sglang.trace import recorder
from dflash2_sglang.tree_mask import mask_reader
from dflash2_sglang.verify_input import VerifyInputs

logger = logging.getLogger(__name__)


class DFlash2Worker(BaseSpecWorker):
    """Speculative worker of one rank; the scheduler calls ``forward_batch_generation``."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        patches.verify(["dflash2"])
        self._target_worker = target_worker
        self.device = target_worker.device
        spec = get_spec()
        self.depth = int(spec.speculative_num_steps)
        self.nodes = int(spec.speculative_num_draft_tokens)
        self.children = int(spec.speculative_eagle_topk)
        for name in ARCHITECTURES:
            ModelRegistry.models[name] = DFlash2Drafter
        bundle = build_draft_tp_worker(
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            target_model_config=target_worker.model_runner.model_config,
            algo_label="DFLASH2",
        )
        self._draft_worker = bundle.draft_worker
        self.draft_runner = bundle.draft_model_runner
        self.drafting = Drafting(
            self.draft_runner,
            target_worker.model_runner.model,
            depth=self.depth,
            nodes=self.nodes,
            children=self.children,
        )
        keep_final_states(target_worker.model_runner.model)
        self.constraint = Constraint(self.children)
        self.write_context = ContextWriter(bundle.draft_model, self.draft_runner)
        self.parameters = RequestParameters(self.device)
        self.draft_model_path = server_args.speculative_draft_model_path
        self.draft_backend = bundle.resolved_attention_backend
        self.trace = recorder(depth=self.depth, nodes=self.nodes, children=self.children)
        self.verify_input = VerifyInputs(
            target_worker.model_runner, self.depth, self.nodes, self.children, self.parameters
        )
        self.block = self.drafting.config.block_size
        self.window = max(self.nodes, self.block)
        self.plan_stream, self.plan_stream_ctx = get_plan_stream(self.device)
        self.node_index = torch.arange(self.nodes, device=self.device)
        self._announce()

    def _announce(self) -> None:
        if get_parallel().tp_rank == 0:
            logger.info(
                "DFLASH2 ready: block_size=%d depth=%d nodes=%d branching=%d selector=%s "
                "draft_attention_backend=%s",
                self.block,
                self.depth,
                self.nodes,
                self.children,
                self.drafting.config.has_selector,
                self.draft_backend,
            )

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (self.target_worker.model_runner.attn_backend, self.draft_runner.attn_backend)

    def describe(self) -> dict[str, Any]:
        """The resolved configuration, for ``/server_info``."""
        config = self.drafting.config
        return {
            "version": __version__,
            "draft_model_path": self.draft_model_path,
            "block_size": self.block,
            "depth": self.depth,
            "nodes": self.nodes,
            "branching": self.children,
            "selector": config.has_selector,
            "candidates": self.drafting.head.top_k,
            "target_layer_ids": list(config.target_layer_ids),
            "draft_attention_backend": self.draft_backend,
        }

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        mode = get_spec().speculative_attention_mode
        refuse_loaded(self.target_worker.model_runner, self.children, mode)
        # A block is no tree: without this FlashAttention would ask it for a tree's mask.
        mask_reader(self.draft_runner.attn_backend).topk = 1

    def init_cuda_graphs(self) -> None:
        """The drafter's block pass; the target's verify pass is captured already. Then the trial."""
        largest = largest_capture()
        if largest:
            self.drafting.fold(largest)
        self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=largest > 0)
        runner = self.target_worker.model_runner
        self.verify_input.reserve(runner.max_running_requests)
        SelfCheck(
            runner,
            self.verify_input,
            self.drafting,
            self.token_to_kv_pool_allocator,
        )()

    @torch.inference_mode()
    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Prefill or one decode round of ``batch``.

        ``on_publish`` is told the new sequence lengths as soon as they are known, so that the scheduler
        prepares the next round while this one still commits draft KV.
        """
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        if batch.spec_info is None:
            batch.spec_info = DraftState.empty(self.device)
        if batch.forward_mode.is_idle():
            raise RuntimeError("DFLASH2 does not serve data-parallel attention.")
        return self._round(batch, on_publish, grammar_barrier)

    def _prefill(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        """The target reads the prompt; the drafter gets its KV before the radix cache may keep it."""
        self.parameters.before_prefill(batch)
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        self.parameters.after_prefill(batch, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        prefix = torch.tensor(batch.prefix_lens, dtype=torch.int32).to(
            self.device, non_blocking=True
        )
        extend = torch.tensor(batch.extend_lens, dtype=torch.int32).to(
            self.device, non_blocking=True
        )
        positions, _ = compute_position(
            self.target_worker.model_runner.prefill_attention_backend_str,
            prefix,
            extend,
            sum(batch.extend_lens),
        )
        features = self._features(result)
        self.write_context(features, positions, batch.out_cache_loc)
        hand_over(batch, result)
        result.next_draft_input = DraftState(result.next_token_ids.long())
        return result

    def _round(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        prefix, anchor = batch.seq_lens, batch.spec_info.bonus_tokens
        record = RoundRecord(self.nodes, RoundClock(self.device))
        slots = assign_extend_cache_locs_uniform_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.draft_runner.req_to_token_pool.req_to_token,
            start_offset=prefix,
            batch_size=prefix.shape[0],
            draft_token_num=self.window,
            device=self.device,
        ).view(-1, self.window)  # [B, W]
        record.clock.lap(OTHER)
        tree, lattice = self.drafting(batch, anchor, slots)
        record.clock.lap(DRAFT)
        mask = None
        if batch.has_grammar:
            tree, mask = self.constraint(batch, tree, lattice, grammar_barrier, record.grammar)
        batch.spec_info = self.verify_input(tree, prefix, slots)
        batch.spec_info.grammar_mask = mask
        record.clock.lap(OTHER)
        with masked(batch):
            result = self._verify(batch)
        record.clock.lap(VERIFY)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        self._commit(result, prefix, slots)
        hand_over(batch, result)
        result.next_draft_input = DraftState(result.next_draft_input.bonus_tokens.long())
        record.clock.lap(OTHER)
        record.attach(result)
        if self.trace is not None:
            self.trace(batch, tree, lattice, prefix, result)
        return result

    def _verify(self, batch: Any) -> GenerationBatchResult:
        """Target pass over the tree, acceptance (see ``acceptance.py``), accepted KV to the front."""
        return run_eagle_verify(
            batch,
            target_worker=self.target_worker,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            plan_stream=self.plan_stream,
            plan_stream_ctx=self.plan_stream_ctx,
            topk=self.children,
            num_draft_tokens=self.nodes,
            device=self.device,
            metadata_ready_pre_pad=False,
            finalize_tree_path=True,
        )

    def _commit(
        self, result: GenerationBatchResult, prefix: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Draft KV of the accepted path, which lies at the front of each request's window.

        Rows past the accepted ones are written too: their slots are this request's own and are written
        again before anything reads them, which spares a gather of uneven lengths.
        """
        longest = min(self.depth + 1, self.nodes)
        size = prefix.shape[0]
        features = self._features(result).view(size, self.nodes, -1)[:, :longest]
        positions = prefix.unsqueeze(1) + self.node_index[:longest]
        self.write_context(
            features.flatten(0, 1), positions.flatten(), slots[:, :longest].flatten()
        )

    def _features(self, result: GenerationBatchResult) -> torch.Tensor:
        """The target's hidden states at the taps, [T, taps * H]."""
        features = result.logits_output.hidden_states
        if features is None:
            raise RuntimeError(
                f"{type(self.target_worker.model_runner.model).__name__} captured no hidden states: "
                "DFLASH2 needs a target class with set_dflash_layers_to_capture."
            )
        expected = self.drafting.drafter.fc.input_size
        if features.shape[-1] != expected:
            layers = list(self.drafting.config.target_layer_ids)
            raise RuntimeError(
                f"{type(self.target_worker.model_runner.model).__name__} captured features of "
                f"width {features.shape[-1]} where target_layer_ids={layers} make {expected}: "
                "SGLang's class does not hand out all of these layers (many lack the last one)."
            )
        return features
