"""Our drafter equals SGLang's and the authors', weight for weight (float32 on the CPU)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import reference as ref
import torch
from configs import CASES, STOCK_ONLY
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

import dflash2_sglang

pytestmark = pytest.mark.usefixtures("engine")

ASSET = Path(dflash2_sglang.__file__).parent / "assets" / "smollm2-135m-dflash2"
CLOSE = 2e-5  # float32, hidden states of size 5 and scores of size 100


def make_batch(config: Qwen3Config, lengths: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    """Target features of each request's context, and the blocks' embeddings."""
    g = torch.Generator().manual_seed(7)
    taps = len(config.dflash_config["target_layer_ids"])
    features = [torch.randn(n, taps * config.hidden_size, generator=g) for n in lengths]
    block = config.dflash_config["block_size"]
    return features, torch.randn(len(lengths), block, config.hidden_size, generator=g)


def max_gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def check(config: Qwen3Config, authors: bool) -> None:
    weights = ref.random_weights(config)
    ours, stock = ref.build_ours(config, weights), ref.build_stock(config, weights)
    features, embeds = make_batch(config, (37, 1, 50))
    context = [ref.context_ours(ours, f) for f in features]
    stock_context = [ref.context_stock(stock, f) for f in features]
    for mine, theirs in zip(context, stock_context, strict=True):
        assert max_gap(mine[0], theirs[0]) < CLOSE
        assert max_gap(mine[1], theirs[1]) < CLOSE
    hidden = ref.run_block(ours, embeds, context)
    assert hidden.abs().max() > 2  # the comparison is not about zeros
    assert max_gap(hidden, ref.run_block(stock, embeds, stock_context)) < CLOSE
    if authors:
        model = ref.build_authors(config, weights)
        assert max_gap(hidden, ref.run_authors(model, embeds, features)) < CLOSE


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_context_equal_both(name: str) -> None:
    check(ref.make_config(CASES[name]), authors=True)


@pytest.mark.parametrize("name", STOCK_ONLY)
def test_variants_of_sglang(name: str) -> None:
    check(ref.make_config(STOCK_ONLY[name]), authors=False)


@pytest.mark.parametrize("name", ["sliding", "causal", "full"])
def test_the_comparison_sees_masks(name: str) -> None:
    """The cases above would not pass with another window or causality."""
    config = ref.make_config(CASES[name])
    weights = ref.random_weights(config)
    features, embeds = make_batch(config, (37,))
    authors = ref.run_authors(ref.build_authors(config, weights), embeds, features)
    ours = ref.build_ours(config, weights)
    context = [ref.context_ours(ours, f) for f in features]
    from sglang.srt.layers.radix_attention import AttentionType

    for layer in ours.layers:
        attn = layer.self_attn.attn
        if name == "sliding":
            attn.sliding_window_size += 1
        else:
            causal = attn.attn_type == AttentionType.DECODER
            attn.attn_type = AttentionType.ENCODER_ONLY if causal else AttentionType.DECODER
    assert max_gap(ref.run_block(ours, embeds, context), authors) > 100 * CLOSE


def candidates(hidden: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unary logits [B, D, K], tokens [B, D, K] and all logits under a random head."""
    g = torch.Generator().manual_seed(3)
    head = torch.randn(ref.VOCAB, ref.HIDDEN, generator=g) * 0.2
    logits = hidden @ head.T
    unary, tokens = logits.topk(k, -1)
    return unary, tokens, logits


@pytest.mark.parametrize("block", [8, 16])
def test_selector_scores_and_greedy_path(block: int) -> None:
    config = ref.make_config({"dflash_config": {"block_size": block}})
    weights = ref.random_weights(config)
    ours, stock = ref.build_ours(config, weights), ref.build_stock(config, weights)
    features, embeds = make_batch(config, (20, 31))
    hidden = ref.run_block(ours, embeds, [ref.context_ours(ours, f) for f in features])[:, 1:]
    unary, tokens, logits = candidates(hidden, 6)
    anchor = torch.tensor([11, 42])
    with torch.no_grad():
        pair = ours.candidate_selector.pair_scores(hidden, anchor, tokens)
        theirs = stock.candidate_selector.build_lattice(
            candidate_ids=tokens,
            unary_logits=unary,
            hidden_states=hidden,
            anchor_token_ids=anchor,
        )
        authors = ref.build_authors(config, weights).candidate_selector
        path, _, _ = authors.select(hidden, logits, anchor, 0.0)
    assert pair.dtype == torch.float32
    assert pair.abs().max() > 10
    assert max_gap(pair + unary.unsqueeze(2), theirs) < CLOSE * 10
    scores, row, mine = pair + unary.unsqueeze(2), torch.zeros(2, dtype=torch.long), []
    for t in range(block - 1):
        row = scores[torch.arange(2), t, row].argmax(-1)
        mine.append(tokens[torch.arange(2), t, row])
    assert torch.equal(torch.stack(mine, 1), path)


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("multiplier", [1.0, 0.5])
def test_unary_transform(multiplier: float, softcap: float | None) -> None:
    section = {"output_multiplier": multiplier, "final_logit_softcapping": softcap}
    config = ref.make_config({"dflash_config": section})
    weights = ref.random_weights(config)
    logits = torch.randn(4, ref.VOCAB) * 20
    ours = ref.build_ours(config, weights).transform_unary(logits)
    authors = ref.build_authors(config, weights).compute_logits(logits, lambda x: x)
    assert max_gap(ours, authors) < 1e-5
    stock = ref.build_stock(config, weights)._transform_unary_logits(logits.clone())
    assert max_gap(ours, stock) < 1e-5


def test_embedding_scale_as_the_authors() -> None:
    """SGLang 0.5.23 ignores input_embedding_scale; the authors scale the raw embedding by it."""
    config = ref.make_config({"dflash_config": {"input_embedding_scale": 3.5}})
    weights = ref.random_weights(config)
    features, embeds = make_batch(config, (9,))
    ours = ref.build_ours(config, weights)
    hidden = ref.run_block(ours, embeds, [ref.context_ours(ours, f) for f in features])
    authors = ref.run_authors(ref.build_authors(config, weights), embeds * 3.5, features)
    assert max_gap(hidden, authors) < CLOSE


def test_yarn_attention_factor_as_the_authors() -> None:
    """SGLang 0.5.23 ignores attention_factor; transformers, so also the authors, obey it."""
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
    }
    config = ref.make_config({"rope_scaling": rope})
    weights = ref.random_weights(config)
    features, embeds = make_batch(config, (30,))
    ours = ref.build_ours(config, weights)
    hidden = ref.run_block(ours, embeds, [ref.context_ours(ours, f) for f in features])
    authors = ref.run_authors(ref.build_authors(config, weights), embeds, features)
    assert max_gap(hidden, authors) < CLOSE


def test_blocks_are_independent() -> None:
    config = ref.make_config({})
    ours = ref.build_ours(config, ref.random_weights(config))
    features, embeds = make_batch(config, (12, 30))
    context = [ref.context_ours(ours, f) for f in features]
    both = ref.run_block(ours, embeds, context)
    for b in range(2):
        alone = ref.run_block(ours, embeds[b : b + 1], context[b : b + 1])
        assert max_gap(both[b : b + 1], alone) < CLOSE


def test_empty_and_ragged_batches() -> None:
    config = ref.make_config({})
    ours = ref.build_ours(config, ref.random_weights(config))
    positions = torch.zeros(0, dtype=torch.long)
    out = ours(None, positions, None, embeds=torch.zeros(0, ref.HIDDEN))
    assert out.hidden_states.shape == (0, ref.HIDDEN)
    k, v = ours.context_kv(torch.zeros(0, ref.HIDDEN), positions)
    assert k.shape == v.shape == (2, 0, 2, 16)
    with pytest.raises(ValueError, match="not a multiple of block_size=8"):
        ours(None, torch.arange(9), None, embeds=torch.zeros(9, ref.HIDDEN))


def test_tensor_parallel_ranks_agree_with_one(tmp_path: Path) -> None:
    arguments = (ref.free_port(), str(tmp_path))
    torch.multiprocessing.spawn(ref.run_rank, args=arguments, nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for case, *outputs in zip(ref.TP_CASES, *ranks, strict=True):
        hidden, k, v = ref.run_case(ref.hf_config(**case))
        for rank, (their_hidden, their_k, their_v) in enumerate(outputs):
            assert max_gap(their_hidden, hidden) < CLOSE
            # One KV head each: the rank's own, or the only one, which both ranks hold.
            head = slice(rank, rank + 1) if k.shape[2] == 2 else slice(0, 1)
            assert max_gap(their_k, k[:, :, head]) < CLOSE
            assert max_gap(their_v, v[:, :, head]) < CLOSE


# The demo drafter.


def load_asset(dtype: torch.dtype) -> tuple[Any, Any]:
    """Ours and the authors', from the packaged checkpoint."""
    config = Qwen3Config(**json.loads((ASSET / "config.json").read_text()))
    weights = load_file(ASSET / "model.safetensors")
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        authors = ref.build_authors(config, {n: w.to(dtype) for n, w in weights.items()})
        return ref.build_ours(config, weights), authors
    finally:
        torch.set_default_dtype(default)


def test_demo_drafter_in_float32() -> None:
    ours, authors = load_asset(torch.float32)
    features, embeds = make_batch(ours.config, (40, 3))
    features, embeds = [3 * f for f in features], 0.13 * embeds
    hidden = ref.run_block(ours, embeds, [ref.context_ours(ours, f) for f in features])
    theirs = ref.run_authors(authors, embeds, features)
    assert max_gap(hidden, theirs) < 1e-4 < theirs.abs().max()


def test_demo_drafter_in_bfloat16() -> None:
    """No further from the float32 result than the authors' model is in bfloat16."""
    exact_model, _ = load_asset(torch.float32)
    ours, authors = load_asset(torch.bfloat16)
    features, embeds = make_batch(ours.config, (40, 3))
    features = [(3 * f).bfloat16() for f in features]
    embeds = (0.13 * embeds).bfloat16()
    wide = [f.float() for f in features]
    exact = ref.run_block(
        exact_model, embeds.float(), [ref.context_ours(exact_model, f) for f in wide]
    )
    mine = ref.run_block(ours, embeds, [ref.context_ours(ours, f) for f in features])
    theirs = ref.run_authors(authors, embeds, features)
    assert mine.dtype == torch.bfloat16
    error, reference = ((x.float() - exact).norm() / exact.norm() for x in (mine, theirs))
    print(f"relative error: ours {error:.4f}, authors {reference:.4f}")
    assert error < max(1.1 * reference, 0.005)
    assert error < 0.03
