"""Quantised and capped targets: the answers of plain decoding with the same target.

SGLang's kernels for these are for other devices; ``hooks.py`` puts torch in their place, and everything
around them is SGLang's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from quantise import write_gguf
from serving import Server, ServerError, acceptance, ids
from tinypair import Pairs
from workload import assert_same, prompts, run

PROMPTS = prompts()[2:12]
BARE = ("--skip-tokenizer-init",)
# The hook, and the flags besides.
SETUPS = {
    "GGUF Q8_0: body, embedding and a head without a weight": ("gguf_kernels", BARE),
    "float8 body, dense head, capped logits": ("float8_weights", ("--quantization", "fp8")),
}


@pytest.fixture(scope="module", params=SETUPS)
def both(
    request: pytest.FixtureRequest, serve: Any, pairs: Pairs, tmp_path_factory: Any
) -> Iterator[tuple[Server, Server]]:
    """DFLASH2 and plain decoding."""
    hook, flags = SETUPS[request.param]
    cap = None if hook == "gguf_kernels" else 6.0  # SGLang's GGUF loader knows no caps
    target = pairs.target(cap=cap)
    drafter = pairs.drafter(target, changes={"final_logit_softcapping": cap or 0})
    if hook == "gguf_kernels":
        target = write_gguf(target, tmp_path_factory.mktemp("gguf") / "target.gguf")
    env = {"DFLASH2_TEST_HOOKS": f"hooks:{hook}"}
    with (
        serve(target, drafter, *flags, env=env) as tree,
        serve(target, None, *flags, env=env) as plain,
    ):
        yield tree, plain
        assert tree.errors() == plain.errors() == []


def test_equals_plain_decoding(both: tuple[Server, Server]) -> None:
    tree, plain = both
    answers, expected = run(tree, PROMPTS), run(plain, PROMPTS)
    assert_same(answers, expected)
    assert acceptance(answers) > 1.5  # the drafter was made for the target before it was quantised
    drawn = tree.ask_all(PROMPTS, temperature=1.2, max_new_tokens=24, ignore_eos=True)
    assert len({tuple(tokens) for tokens in ids(drawn)}) == len(PROMPTS)
    assert acceptance(drawn) > 1.1


def test_the_target_is_quantised(both: tuple[Server, Server], plain_server: Server) -> None:
    """Its answers are not those of the checkpoint it was made from."""
    assert ids(run(both[1], PROMPTS)) != ids(run(plain_server, PROMPTS))


def test_a_head_that_cannot_be_served_is_refused(serve: Any, pairs: Pairs) -> None:
    """At start-up, by name and with the fix."""
    env = {"DFLASH2_TEST_HOOKS": "hooks:head_without_a_kernel"}
    server = serve(pairs.target(), pairs.drafter(), "--quantization", "fp8", env=env)
    with pytest.raises(ServerError) as caught, server:
        pass
    assert (
        "DFLASH2 does not support the target's output head (ParallelLMHead with FarMethod), which fails "
        "(NotImplementedError: this kernel is for another device): serve a checkpoint whose lm_head is "
        "left unquantised"
    ) in str(caught.value)
