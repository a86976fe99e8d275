"""Where an answer ends does not depend on how many tokens a round accepted.

Plain decoding is SGLang's own check, fed one token at a time.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinypair
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from dflash2_sglang.patches import stop_order

# Few letters, so that stops are met, and met in groups.
LETTERS = tinypair.encode("abc.")


def stock(req: Req, length: int = 1) -> None:
    """SGLang's check; looked up here because a patch, once applied, replaces what modules hold."""
    inspect.unwrap(Req.update_finish_state)(req, length)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tinypair.write_target(folder)
    return get_tokenizer(str(folder))


@pytest.fixture(scope="module", autouse=True)
def serving() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop_order, "_ours", lambda: True)
        yield


def request(tokenizer: Any, **parameters: Any) -> Req:
    """As much of a request as the check reads."""
    req = Req.__new__(Req)
    req.sampling_params = SamplingParams(**parameters)
    req.sampling_params.normalize(tokenizer)
    req.tokenizer, req.vocab_size, req.rid = tokenizer, tinypair.VOCAB, "r"
    req.output_ids, req.decoded_text = array("q"), ""
    req.finished_reason = req.finished_len = req.to_finish = req.grammar = None
    req.eos_token_ids = {tinypair.EOS}
    return req


Ending = tuple[Any, int]


def ending(req: Req) -> Ending | None:
    if req.finished_reason is None:
        return None
    length = len(req.output_ids) if req.finished_len is None else req.finished_len
    return req.finished_reason.to_json(), length


def plainly(req: Req, tokens: list[int]) -> Ending | None:
    for token in tokens:
        req.output_ids.append(token)
        stock(req)
        if req.finished():
            break
    return ending(req)


def in_rounds(req: Req, tokens: list[int], lengths: list[int], check: Any) -> Ending | None:
    """Rounds of these lengths, then one of what is left."""
    rest = list(tokens)
    for length in [*lengths, len(tokens)]:
        accepted, rest = rest[:length], rest[length:]
        if accepted and not req.finished():
            req.output_ids.extend(accepted)
            check(req, len(accepted))
            seen = len(tokens) - len(rest)
            assert list(req.output_ids) == tokens[:seen]  # KV is counted by them
    return ending(req)


def ours(req: Req, length: int) -> None:
    stop_order.update_finish_state(stock, req, length)


words = st.text("abc.", min_size=1, max_size=3)
patterns = st.sampled_from(["a+b", "b$", "^ab", "[ab]c", "a.c$", "(ab|ca){2}", "^b", "c{2,}"])
parameters = st.fixed_dictionaries(
    {
        "stop": st.lists(words, max_size=3),
        "stop_regex": st.lists(patterns, max_size=2),
        "stop_token_ids": st.sets(st.sampled_from(LETTERS), max_size=1),
        "ignore_eos": st.booleans(),
        "max_new_tokens": st.integers(1, 24),
    }
)
tokens = st.lists(st.sampled_from([*LETTERS * 3, tinypair.EOS]), min_size=1, max_size=24)
rounds = st.lists(st.integers(1, 8), max_size=12)


@given(parameters, tokens, rounds)
def test_rounds_end_where_single_tokens_do(
    tokenizer: Any, parameters: dict[str, Any], tokens: list[int], rounds: list[int]
) -> None:
    expected = plainly(request(tokenizer, **parameters), tokens)
    assert in_rounds(request(tokenizer, **parameters), tokens, rounds, ours) == expected


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a stop string after the end of the text": ("ab|cab", {"stop": ["ca"]}),
    "the second stop string comes first": ("abcab.", {"stop": ["b.", "bc"]}),
    "a regex after a stop token": (
        "ab.cab",
        {"stop_regex": ["ca"], "stop_token_ids": {LETTERS[3]}},
    ),
    "a regex before a stop string": ("abc.ca", {"stop": [".c"], "stop_regex": ["ab"]}),
    "a pattern that looks for a beginning": ("bcabc.", {"stop_regex": ["^cab"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_stock_check_gets_wrong(tokenizer: Any, name: str) -> None:
    text, parameters = CASES[name]
    tokens = [tinypair.EOS if c == "|" else tinypair.encode(c)[0] for c in text]
    expected = plainly(request(tokenizer, **parameters), tokens)
    assert expected is not None
    whole = [len(tokens)]
    assert in_rounds(request(tokenizer, **parameters), tokens, whole, ours) == expected
    assert in_rounds(request(tokenizer, **parameters), tokens, whole, stock) != expected


def test_a_grammar_ends_after_the_last_token(tokenizer: Any) -> None:
    """It has read all accepted tokens before the check; a stop string before that still counts."""

    class Ended:
        def is_terminated(self) -> bool:
            return True

    for stop, length, reason in (("bc", 3, "bc"), ("xx", 4, LETTERS[3])):
        req = request(tokenizer, stop=[stop])
        req.grammar = grammar = Ended()
        req.output_ids.extend(tinypair.encode("abc."))
        ours(req, 4)
        assert ending(req) == ({"type": "stop", "matched": reason}, length)
        assert req.grammar is grammar


def test_other_requests_and_algorithms_are_left_alone(tokenizer: Any) -> None:
    calls: list[int] = []

    def original(req: Req, length: int) -> None:
        calls.append(length)

    free, stopped = request(tokenizer), request(tokenizer, stop=["ab"])
    for req in (free, stopped):
        req.output_ids.extend(LETTERS)
    stop_order.update_finish_state(original, free, 4)
    stop_order.update_finish_state(original, stopped, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop_order, "_ours", lambda: False)
        stop_order.update_finish_state(original, stopped, 3)
    assert calls == [4, 1, 3]


def test_a_session_goes_on_from_the_end_of_the_answer(tokenizer: Any) -> None:
    def original(last: Req, *_: Any) -> list[int]:
        return list(last.output_ids)

    req = request(tokenizer, stop=["b"])
    req.output_ids.extend(LETTERS)
    assert stop_order.concat_token_arrays(original, req, None, None) == LETTERS
    ours(req, 4)
    assert stop_order.concat_token_arrays(original, req, None, None) == LETTERS[:2]
