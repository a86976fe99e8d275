"""Teacher forcing: what the demo drafter proposes at every place of answers that the target sampled.

No server: the target runs in transformers, the drafter is the package's own on SGLang's layers, with an
attention that serves all anchors of one answer at once.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# The demo drafter's training prompts are others; see the "heldout" prompts of its model card.
PROMPTS = [
    f"{task} {topic}."
    for topic in ("penicillin", "the violin", "sailing", "recursion", "bamboo", "glaciers", "chess")
    for task in (
        "Tell me three interesting facts about",
        "Give a short overview of",
        "Write a short story about",
        "Explain to a child what is special about",
        "Write a polite e-mail to a colleague about",
        "List five questions one could ask about",
        "Write a Python function related to",
        "Describe a typical day of somebody who knows all about",
    )
]


class Places(NamedTuple):
    """Every anchor of all answers after which a whole block of D tokens follows; A of them.

    answer     [A]        int64    which answer, ascending
    anchor     [A]        int64    token
    truth      [A, D]     int64    the tokens that follow
    tokens     [A, D, K]  int64    the drafter's candidates
    unary      [A, D, K]  float32  their logits
    pair       [A, D, K, K]        selector scores
    log_norm   [A, D, H]           logsumexp of the drafter's logits / temperature, for H of these
    target     [A, D, K]           the target's log-probability of each candidate after the true prefix
    target_of  [A, D]              and of the true token
    """

    answer: Tensor
    anchor: Tensor
    truth: Tensor
    tokens: Tensor
    unary: Tensor
    pair: Tensor
    log_norm: Tensor
    target: Tensor
    target_of: Tensor


class AnchorAttention:
    """Blocks of one answer side by side: each sees the draft KV before its anchor, and itself."""

    def __init__(self, keys: Tensor, values: Tensor, anchors: Tensor, block: int) -> None:
        self.keys, self.values, self.block = keys, values, block
        seen = torch.arange(keys.shape[1]) < anchors[:, None]
        inside = torch.ones(len(anchors), block, dtype=torch.bool)
        self.mask = torch.cat((seen, inside), 1)[:, None, None]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *_: Any, **__: Any) -> Tensor:
        blocks = self.mask.shape[0]

        def split(rows: Tensor) -> Tensor:  # [A, heads, G, head_dim]
            return rows.reshape(blocks, self.block, -1, layer.head_dim).transpose(1, 2)

        def extend(context: Tensor, own: Tensor) -> Tensor:
            past = context[layer.layer_id].transpose(0, 1).expand(blocks, -1, -1, -1)
            return torch.cat((past, split(own)), 2)

        out = F.scaled_dot_product_attention(
            split(q),
            extend(self.keys, k),
            extend(self.values, v),
            attn_mask=self.mask,
            scale=layer.scaling,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(blocks * self.block, -1)


class Teacher:
    """The demo pair; ``places`` samples answers and scores every place of them."""

    def __init__(self, target: Path, drafter: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        start_one_rank()
        self.tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.drafter = load_drafter(drafter)
        self.drafter.borrow_embedding(lambda ids: F.embedding(ids, self.embedding))
        from dflash2_sglang.candidates import CandidateHead

        config = self.drafter.drafter_config
        head = SimpleNamespace(weight=self.embedding, org_vocab_size=len(self.embedding))
        self.head = CandidateHead(head, config.selector_top_k)

    @torch.inference_mode()
    def sample(self, prompts: list[str], temperature: float, length: int) -> list[tuple[Any, int]]:
        """(ids of prompt and answer, length of the prompt) of each prompt."""
        pad = self.tokenizer.pad_token_id
        chats = [[{"role": "user", "content": text}] for text in prompts]
        texts = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=False
        )
        batch = self.tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        out = self.model.generate(
            **batch,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length,
            pad_token_id=pad,
        )
        width, ends = batch["input_ids"].shape[1], {self.tokenizer.eos_token_id}
        found = []
        for row, mask in zip(out.tolist(), batch["attention_mask"], strict=True):
            answer = row[width:]
            stop = next((i + 1 for i, token in enumerate(answer) if token in ends), len(answer))
            prompt = row[width - int(mask.sum()) : width]
            found.append((torch.tensor(prompt + answer[:stop]), len(prompt)))
        return found

    @torch.inference_mode()
    def places(
        self, prompts: list[str], temperature: float, length: int, drafting: Sequence[float]
    ) -> Places:
        """Answers sampled at one temperature; `log_norm` is for the temperatures `drafting`."""
        torch.manual_seed(11)
        depth = self.drafter.drafter_config.depth
        parts = []
        for i, (ids, start) in enumerate(self.sample(prompts, temperature, length)):
            anchors = torch.arange(start, len(ids) - depth)
            if len(anchors):
                parts.append(self._score(i, ids, anchors, temperature, drafting))
        return Places(*(torch.cat(field) for field in zip(*parts, strict=True)))

    def _score(
        self,
        answer: int,
        ids: Tensor,
        anchors: Tensor,
        temperature: float,
        drafting: Sequence[float],
    ) -> Places:
        config = self.drafter.drafter_config
        depth, count = config.depth, len(anchors)
        out = self.model(ids[None], output_hidden_states=True)
        taps = torch.cat([out.hidden_states[i + 1][0] for i in config.target_layer_ids], -1)
        hidden = self._blocks(taps, ids, anchors)
        rows = hidden.reshape(count * depth, -1)
        heats = [torch.full((count * depth, 1), heat) for heat in drafting]
        each = [self.head(rows, heat) for heat in heats]
        found = each[0]
        tokens = found.tokens.view(count, depth, -1)
        log_probs = (out.logits[0].float() / temperature).log_softmax(-1)
        where = anchors[:, None] + torch.arange(depth)  # the row that predicts each true token
        truth = ids[where + 1]
        return Places(
            torch.full((count,), answer),
            ids[anchors],
            truth,
            tokens,
            found.logits.view(count, depth, -1),
            self.drafter.candidate_selector.pair_scores(hidden, ids[anchors], tokens),
            torch.stack([f.log_norm for f in each], -1).view(count, depth, -1),
            log_probs[where[..., None], tokens],
            log_probs[where, truth],
        )

    def _blocks(self, taps: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
        """The drafter's hidden states of the mask positions after every anchor, [A, D, H]."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        config = self.drafter.drafter_config
        block = config.block_size
        keys, values = self.drafter.context_kv(
            self.drafter.project_context(taps), torch.arange(len(ids))
        )
        inputs = torch.full((len(anchors), block), config.mask_token_id)
        inputs[:, 0] = ids[anchors]
        positions = (anchors[:, None] + torch.arange(block)).flatten()
        batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY, batch_size=1, moe_num_token_non_padded=None
        )
        backend: Any = AnchorAttention(keys, values, anchors, block)
        with forward_context(ForwardContext(attn_backend=backend)):
            out = self.drafter(inputs.flatten(), positions, batch).hidden_states
        return out.view(len(anchors), block, -1)[:, 1:]


def start_one_rank() -> None:
    """SGLang's layers want a process group, even for one rank."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    publish(ServerArgs(model_path="dummy"), role="test", ranks=SpawnRanks(world_rank=0))
    parallel_state.init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )
    parallel_state.initialize_model_parallel(backend="gloo")


def load_drafter(folder: Path) -> Any:
    from safetensors.torch import load_file
    from transformers import Qwen3Config

    from dflash2_sglang.model.drafter import DFlash2Drafter

    config = Qwen3Config(**json.loads((folder / "config.json").read_text()))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        drafter = DFlash2Drafter(config)
    finally:
        torch.set_default_dtype(before)
    drafter.load_weights(load_file(folder / "model.safetensors").items())
    return drafter.eval()
