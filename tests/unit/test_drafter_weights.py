"""What the drafter does with the weights it is given."""

from __future__ import annotations

import pytest
import reference as ref
import torch

from dflash2_sglang.config import CheckpointError

pytestmark = pytest.mark.usefixtures("engine")


def test_published_spellings_of_names_load() -> None:
    config = ref.make_config({})
    weights = ref.random_weights(config)
    plain = ref.build_ours(config, weights).state_dict()
    other = {
        f"model.{n}.weight" if "codebook" in n else f"model.{n}": w for n, w in weights.items()
    }
    again = ref.build_ours(config, other).state_dict()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_unexpected_tensors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = ref.make_config({})
    weights = ref.random_weights(config) | {"embed_tokens.weight": torch.zeros(2)}
    ref.build_ours(config, weights)
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("dflash2_sglang")]
    assert messages == ["Tensors of the drafter that nothing uses: embed_tokens.weight"]


def test_bad_weights_are_named() -> None:
    config = ref.make_config({})
    weights = ref.random_weights(config)
    name = "layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"lack {name};"):
        ref.build_ours(config, {n: w for n, w in weights.items() if n != name})
    for bad in (float("nan"), float("inf"), -float("inf")):
        broken = weights[name].clone()
        broken[3, 4] = bad
        with pytest.raises(CheckpointError, match=f"NaN or infinite values in tensor {name} of"):
            ref.build_ours(config, weights | {name: broken})
    with pytest.raises(CheckpointError, match=r"has shape \[2, 2\] but config.json asks for"):
        ref.build_ours(config, weights | {name: torch.zeros(2, 2)})


def test_a_later_update_may_be_partial() -> None:
    config = ref.make_config({})
    weights = ref.random_weights(config)
    ours = ref.build_ours(config, weights)
    changed = {n: w for n, w in ref.random_weights(config, seed=1).items() if "layers.1" in n}
    ours.load_weights(changed.items())
    expected = ref.build_ours(config, weights | changed).state_dict()
    assert all(torch.equal(w, expected[name]) for name, w in ours.state_dict().items())
    assert torch.equal(
        ours.context_k_scale, ref.build_ours(config, weights | changed).context_k_scale
    )
