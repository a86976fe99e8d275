"""Each place where SGLang bends is as expected, and what does not fit is told before serving."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sglang

from dflash2_sglang import patches
from dflash2_sglang.patches import alloc_window, eagle_sample, hidden_relay, request_check
from dflash2_sglang.patches.base import TESTED_VERSIONS, Patch, PatchError

ALL = patches.discover()
SAMPLE = next(p for p in ALL if p.name == "eagle_sample")


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: patch.name)
def test_fits_the_installed_sglang(patch: Patch) -> None:
    assert patch.problem() is None
    assert patch.reason
    assert patch.without
    assert patch.scope in ("cpu", "dflash2")


def test_no_two_patches_have_one_target() -> None:
    assert len({patch.target for patch in ALL}) == len(ALL) > 8


def test_installed_version_is_a_tested_one() -> None:
    assert sglang.__version__ in TESTED_VERSIONS


# Parameters of hooks follow those of what they replace.


@pytest.mark.parametrize(
    "patch", [p for p in ALL if p.kind == "replace"], ids=lambda patch: patch.name
)
def test_replacements_take_the_same_parameters(patch: Patch) -> None:
    import inspect

    assert tuple(inspect.signature(patch.hook).parameters) == patch.parameters


# An SGLang that does not fit.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": ("verify_input", "renamed")}, "is expected"),
        ({"parameters": SAMPLE.parameters[:-1]}, "is expected"),
        ({"target": "sglang.srt.speculative.eagle_utils.gone"}, "is not in the installed SGLang"),
        ({"target": "sglang.srt.no_such_module.f"}, "is not in the installed SGLang"),
    ],
    ids=["renamed", "new parameter", "function gone", "module gone"],
)
def test_a_changed_sglang_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    """By name, with the fix, and before anything is patched."""
    registered: list[str] = []
    monkeypatch.setattr(Patch, "register", lambda self: registered.append(self.target))
    wrong = replace(SAMPLE, **changes)
    others = [patch for patch in ALL if patch is not SAMPLE]
    monkeypatch.setattr(patches, "discover", lambda: [*others, wrong])
    with pytest.raises(PatchError, match=message) as caught:
        patches.register(["dflash2"])
    assert wrong.target in str(caught.value)
    assert f"Install sglang=={TESTED_VERSIONS[-1]}" in str(caught.value)
    assert registered == []


def test_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Patch] = []
    monkeypatch.setattr(Patch, "register", lambda self: registered.append(self))
    patches.register(["dflash2"])
    assert {patch.scope for patch in registered} == {"dflash2"}
    patches.register(["dflash2", "cpu"])
    assert {patch.target for patch in registered} == {patch.target for patch in ALL}


def test_verify_notices_a_patch_that_was_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", {patch.target for patch in ALL})
    patches.verify(["dflash2", "cpu"])
    HookRegistry._patched.discard(SAMPLE.target)
    with pytest.raises(PatchError) as caught:
        patches.verify(["dflash2"])
    assert f"{SAMPLE.target} was not patched" in str(caught.value)
    assert SAMPLE.without in str(caught.value)
    patches.verify(["cpu"])  # another scope's patches are whole


LOADED = """
import sys
import sglang.srt.managers.scheduler, sglang.srt.speculative.eagle_worker_common
from sglang.srt.plugins import load_plugins
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
load_plugins()
from dflash2_sglang import patches
patches.verify(["dflash2", "cpu"])
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import allocation, allocation_sizing
from sglang.srt.speculative import eagle_utils, eagle_worker_common
from dflash2_sglang.patches import alloc_window
# Modules that had imported a function by name got the patched one as well.
assert eagle_worker_common.eagle_sample is eagle_utils.eagle_sample
assert eagle_utils.eagle_sample.__module__ == eagle_utils.__name__
assert eagle_utils.eagle_sample.__wrapped__ is not None
assert SpeculativeAlgorithm.from_string("DFLASH2").is_dflash_family()
print("whole")
"""


def test_sglang_applies_them_all() -> None:
    """In a process of its own, in the order of a scheduler's: SGLang first, then its plugins."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert done.stdout.strip().endswith("whole"), done.stderr[-3000:]


# What the hooks of other algorithms' functions do.


def spec(algorithm: str | None, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(speculative_algorithm=algorithm, **fields)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what SGLang says it serves."""
    from sglang.srt import runtime_context

    def serving(algorithm: str | None, **fields: Any) -> None:
        monkeypatch.setattr(runtime_context, "get_spec", lambda: spec(algorithm, **fields))

    return serving


def test_no_hidden_states_are_relayed(serving: Callable[..., None]) -> None:
    serving("DFLASH2")
    assert hidden_relay.spec_need_hidden_states(lambda: True) is False
    serving("EAGLE")
    assert hidden_relay.spec_need_hidden_states(lambda: True) is True
    assert hidden_relay.spec_need_hidden_states(lambda: False) is False


def test_other_algorithms_sample_as_before() -> None:
    calls: list[Any] = []
    found = eagle_sample.eagle_sample(
        lambda *args, **kw: calls.append((args, kw)) or "stock", "theirs", 1, grammar_mask=2
    )
    assert found == "stock"
    assert calls == [(("theirs", 1), {"grammar_mask": 2})]


@pytest.mark.parametrize(
    ("nodes", "block", "length"), [(16, 8, 16), (4, 16, 16), (64, 8, 64), (8, 8, 8)]
)
def test_slots_of_a_round(
    serving: Callable[..., None], nodes: int, block: int, length: int
) -> None:
    serving("DFLASH2", speculative_num_draft_tokens=nodes, speculative_dflash_block_size=block)
    assert alloc_window.alloc_len_per_decode(lambda: 1000) == length
    serving("EAGLE")
    assert alloc_window.alloc_len_per_decode(lambda: 1000) == 1000


@pytest.mark.parametrize("page", [1, 16])
def test_rows_hold_what_a_last_round_reserves(
    serving: Callable[..., None], monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    from sglang.srt.mem_cache import allocation_sizing

    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: 32)
    monkeypatch.setattr(allocation_sizing, "get_alloc_page_size", lambda: page)
    serving("DFLASH2")
    assert alloc_window.extra_context_len(lambda: 20) == 32 + page - 1
    assert alloc_window.extra_context_len(lambda: 100) == 100
    serving("EAGLE")
    assert alloc_window.extra_context_len(lambda: 20) == 20


def request(**parameters: Any) -> SimpleNamespace:
    from sglang.srt.sampling.sampling_params import SamplingParams

    return SimpleNamespace(
        sampling_params=SamplingParams(**parameters),
        multimodal_inputs=None,
        return_sampling_mask=False,
        custom_logit_processor=None,
        origin_input_ids=[5],
        vocab_size=9,
        logprob=SimpleNamespace(top_logprobs_num=4),
    )


def test_requests_are_checked_by_us(serving: Callable[..., None]) -> None:
    serving("DFLASH2")
    assert request_check.validate_request(lambda *_: "stock", request(), True) is None
    refused = request(repetition_penalty=1.3)
    refused.return_sampling_mask = True
    reason = request_check.validate_request(lambda *_: "stock", refused, True)
    assert reason is not None
    assert "return_sampling_mask" in reason
    # It still goes through one prefill, which must not compile a penalty, nor list log-probabilities.
    assert refused.sampling_params.repetition_penalty == 1.0
    assert refused.logprob.top_logprobs_num == 0
    serving("DFLASH")
    theirs = request(repetition_penalty=1.3)
    assert request_check.validate_request(lambda *_: "stock", theirs, True) == "stock"
    assert theirs.sampling_params.repetition_penalty == 1.3
