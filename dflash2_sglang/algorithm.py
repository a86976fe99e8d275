"""The speculative algorithm ``DFLASH2``: what it tells SGLang, and how its arguments are resolved."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from dflash2_sglang import backends, hybrid, support
from dflash2_sglang.checkpoint import check_weights
from dflash2_sglang.config import DrafterConfig, check_target, parse
from dflash2_sglang.tree.build import capacity

NAME = "DFLASH2"
DEFAULT_NODES = 16
DEFAULT_NODES_WITHOUT_MATRIX_UNIT = 8
DEFAULT_CHILDREN = 8
DEFAULT_MAX_REQUESTS = 48
PLAIN_TOP_K = 16
GRAPHS = "DFLASH2_CUDA_GRAPHS"

logger = logging.getLogger(__name__)


class DFlash2Algorithm(CustomSpecAlgo):
    """A member of SGLang's DFlash family whose verify input is a tree."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return False

    def supports_grammar_overlap(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        # The draft phase writes one block, not a KV chain per branch: no page rounding per branch.
        return False

    def get_num_tokens_per_req_for_target_verify(
        self, num_draft_tokens: int, is_draft_worker: bool
    ) -> int:
        """Width of a captured pass: the tree's nodes, but the block where the drafter runs."""
        from sglang.srt.runtime_context import get_spec

        if not is_draft_worker:
            return num_draft_tokens
        return int(get_spec().speculative_dflash_block_size)

    # The scheduler asks these two of every algorithm; the base class lacks them.

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(
        self, device: Any, req_to_token_pool: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, *args, **kwargs)

    def handle_server_args(self, server_args: Any) -> None:
        resolve(server_args)


def resolve(args: Any) -> None:
    """Refuse what cannot be served, then fill in depth, branching and nodes.

    ``args`` is SGLang's server-argument record while it is being resolved; nothing is loaded yet.

    Raises:
        ValueError: one sentence naming the flag or the checkpoint field, and the fix.
    """
    support.refuse_settings(args)
    config = _check_checkpoint(args)
    check_ranks(config, args.tp_size, on_cpu=args.device == "cpu")
    depth, children, nodes = tree_shape(
        config,
        args.speculative_num_steps,
        args.speculative_eagle_topk,
        args.speculative_num_draft_tokens,
        usual_nodes=usual_nodes(args.device),
    )
    _check_recurrent(args, nodes)
    _resolve_backends(args, children)
    args.speculative_num_steps = depth
    args.speculative_eagle_topk = children
    args.speculative_num_draft_tokens = nodes
    args.speculative_dflash_block_size = config.block_size  # for patches/alloc_window.py
    if args.max_running_requests is None:
        args.max_running_requests = DEFAULT_MAX_REQUESTS
    _load_drafter_as_it_is(args)
    _resolve_decode_graph(args)
    logger.info(
        "DFLASH2: depth %d, branching %d, %d nodes a request "
        "(--speculative-num-steps, --speculative-eagle-topk, --speculative-num-draft-tokens).",
        depth,
        children,
        nodes,
    )


def _check_recurrent(args: Any, nodes: int) -> None:
    from sglang.srt.arg_groups.overrides import model_config_of

    target = model_config_of(args)
    support.refuse_recurrent(args, target, nodes)
    if hybrid.is_recurrent(target):
        dtype = hybrid.compute_dtype(args, target)
        support.refuse_conv_dtype(hybrid.keep_conv_inputs_exact(dtype), dtype)


def usual_nodes(device: str) -> int:
    """Nodes where the user says nothing.

    A CPU without AMX has little arithmetic to spare next to reading the weights, so each further node
    costs about what it gains from 8 on (``docs/benchmarks.md``).
    """
    if device == "cpu" and not has_amx():
        return DEFAULT_NODES_WITHOUT_MATRIX_UNIT
    return DEFAULT_NODES


def has_amx() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in a unit of its own."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def tree_shape(
    config: DrafterConfig,
    depth: int | None,
    children: int | None,
    nodes: int | None,
    usual_nodes: int = DEFAULT_NODES,
) -> tuple[int, int, int]:
    """(depth, branching, nodes), defaults taken from the checkpoint; ValueError where they clash."""
    most_depth = config.depth
    most_children = config.selector_top_k if config.has_selector else PLAIN_TOP_K
    depth = most_depth if depth is None else int(depth)
    if not 1 <= depth <= most_depth:
        raise ValueError(
            f"--speculative-num-steps {depth} must lie between 1 and {most_depth}, the drafter's "
            "block_size - 1."
        )
    children = min(DEFAULT_CHILDREN, most_children) if children is None else int(children)
    if not 1 <= children <= most_children:
        raise ValueError(
            f"--speculative-eagle-topk {children} must lie between 1 and {most_children}, the "
            "candidates the drafter keeps at each position."
        )
    most = capacity(depth, children)
    nodes = min(usual_nodes, most) if nodes is None else int(nodes)
    if not 2 <= nodes <= most:
        raise ValueError(
            f"--speculative-num-draft-tokens {nodes} must lie between 2 and {most}, the most nodes of "
            f"a tree with depth {depth} and branching {children} (the anchor counts)."
        )
    return depth, children, nodes


def check_ranks(config: DrafterConfig, ranks: int, *, on_cpu: bool) -> None:
    """ValueError where the drafter cannot be split over ``ranks`` ranks.

    On a CPU SGLang would pad heads, and MLPs to 32 columns a rank, which no checkpoint fits then.
    """
    sizes = {
        "num_attention_heads": (config.num_heads, 1),
        "num_key_value_heads": (config.num_kv_heads, 1),
        "intermediate_size": (config.intermediate_size, 32 if on_cpu else 1),
    }
    if not on_cpu and ranks % config.num_kv_heads == 0:
        del sizes["num_key_value_heads"]  # copied to several ranks
    for name, (size, unit) in sizes.items():
        if ranks > 1 and size % (ranks * unit):
            raise ValueError(
                f"--tp-size {ranks} cannot split the drafter's {name}={size}"
                f"{f' into multiples of {unit}' if unit > 1 else ''}: use another --tp-size."
            )


def _check_checkpoint(args: Any) -> DrafterConfig:
    path = args.speculative_draft_model_path
    if path is None:
        raise ValueError(
            "DFLASH2 needs a drafter: set --speculative-draft-model-path to a DFlash 2 checkpoint."
        )
    config = parse(draft_config(args, path))
    from sglang.srt.arg_groups.overrides import model_config_of

    target = model_config_of(args)
    check_target(config, target.hf_text_config.to_dict())
    if Path(path).is_dir():
        unexpected = check_weights(path, config)
        if unexpected:
            logger.warning("Tensors of the drafter that nothing uses: %s", ", ".join(unexpected))
    return config


def draft_config(args: Any, path: str) -> dict[str, Any]:
    """config.json of the checkpoint, local or on the hub, with the user's overrides."""
    file = Path(path) / "config.json"
    if Path(path).is_dir():
        if not file.is_file():
            raise ValueError(
                f"--speculative-draft-model-path {path} holds no config.json: point it at a DFlash 2 "
                "checkpoint folder."
            )
        return json.loads(file.read_text())
    from sglang.srt.utils.hf_transformers_utils import get_config

    found = get_config(
        path,
        trust_remote_code=args.trust_remote_code,
        revision=args.speculative_draft_model_revision,
    )
    return found.to_dict()


def _resolve_backends(args: Any, children: int) -> None:
    from sglang.srt.arg_groups.overrides import model_config_of

    case = backends.case_of(args, model_config_of(args), children)
    backends.resolve(args, case, on_cpu=args.device == "cpu")
    if args.speculative_draft_attention_backend is None:
        args.speculative_draft_attention_backend = _draft_backend(args)


def _draft_backend(args: Any) -> str:
    from sglang.srt.platforms import current_platform

    if current_platform.is_out_of_tree():
        return current_platform.get_default_speculative_draft_attention_backend(NAME)
    backend = args.prefill_attention_backend or args.attention_backend
    return backend if backend in backends.NAMES else "flashinfer"


def _load_drafter_as_it_is(args: Any) -> None:
    """SGLang would hand the drafter the target's ``--quantization`` and load format."""
    from sglang.srt.utils.hf_transformers_utils import check_gguf_file

    args.speculative_draft_model_quantization = None
    if args.speculative_draft_load_format is None and check_gguf_file(args.model_path):
        args.speculative_draft_load_format = "auto"


def leave_graphs_on(args: Any) -> bool:
    """Whether decode graphs are captured: where the user asks, as no GPU has captured one (docs/gpu.md)."""
    return args.device != "cpu" and os.environ.get(GRAPHS) == "1"


def _resolve_decode_graph(args: Any) -> None:
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    graphs = args.cuda_graph_config
    if graphs is None or graphs.decode.backend == Backend.DISABLED or leave_graphs_on(args):
        return
    args.cuda_graph_config = with_phase(graphs, Phase.DECODE, backend=Backend.DISABLED)
    if args.device != "cpu":
        logger.warning(
            "DFLASH2: decode graphs are off, as they are not tried on a GPU yet; %s=1 in the environment "
            "turns them on, and the self-check at start-up compares them with eager passes.",
            GRAPHS,
        )


def register() -> None:
    """Make ``--speculative-algorithm DFLASH2`` known."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=DFlash2Algorithm)
    def create_worker(server_args: Any) -> type:
        from dflash2_sglang.worker import DFlash2Worker

        return DFlash2Worker
