"""Constrained output against plain decoding, for each kind of constraint and each grammar backend."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from example_files import load
from serving import Server, acceptance, verify_count
from test_sampling import PROMPT, TOO_UNLIKELY, Exact, surprise
from tinypair import EOS, Pairs, decode, encode
from workload import Answers, assert_same

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,5}$"},
        "age": {"type": "string", "pattern": "^[0-9]{1,2}$"},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CALL = {"type": "object", "properties": {"x": {"enum": [1, 23]}}, "required": ["x"]}
TAG = {"begin": "<f=a>", "schema": CALL, "end": "</f>"}
TEXTS = ("the answer is ", "q:", "x", "{}", "abcabc 123 ", "zz <", "1, 2, 3", "why?")
REGEXES = ("[a-z]{5}", "(ab|ba)+[0-9]{2}x?", "[a-c]+(, [a-c]+){0,3}[.]", "a{1,9}")
KINDS: dict[str, dict[str, Any]] = {
    "json": {"json_schema": json.dumps(SCHEMA)},
    **{regex: {"regex": regex} for regex in REGEXES},
    "ebnf": {"ebnf": 'root ::= "yes" | "no" ", " [a-z]+ "."'},
    "tag after a trigger": {
        "structural_tag": json.dumps(
            {"type": "structural_tag", "structures": [TAG], "triggers": ["<"]}
        )
    },
    "tag at once": {
        "structural_tag": json.dumps(
            {
                "type": "structural_tag",
                "format": {
                    "type": "tag",
                    "begin": "<f=a>",
                    "content": {"type": "json_schema", "json_schema": CALL},
                    "end": "</f>",
                },
            }
        )
    },
    "free": {},
}


def ask(server: Server, kinds: list[str], **options: Any) -> dict[str, Answers]:
    """Every kind after every text, all mixed, eight in flight; the answers by kind."""
    orders = [(text, kind) for text in TEXTS for kind in kinds]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(
            lambda order: server.ask(
                order[0], **{"max_new_tokens": 120, **options, **KINDS[order[1]]}
            ),
            orders,
        )
    answers: dict[str, Answers] = {kind: [] for kind in kinds}
    for (_, kind), answer in zip(orders, found, strict=True):
        answers[kind].append(answer)
    return answers


def complete(answers: Answers) -> list[str]:
    """Texts of the answers whose grammar came to its end."""
    return [a["text"] for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]


def assert_valid(answers: dict[str, Answers]) -> None:
    ended = {kind: complete(found) for kind, found in answers.items()}
    for kind in set(REGEXES) & set(ended):
        assert all(re.fullmatch(kind, text) for text in ended[kind])
    for text in ended.get("json", ()):
        jsonschema.validate(json.loads(text), SCHEMA)
    for text in ended.get("ebnf", ()):
        assert re.fullmatch(r"yes|no, [a-z]+\.", text)
    for text in ended.get("tag at once", ()):
        inside = re.fullmatch(r"<f=a>(.*)</f>", text, re.DOTALL)
        assert inside is not None
        jsonschema.validate(json.loads(inside[1]), CALL)
    for answer in answers.get("tag after a trigger", ()):
        assert re.search("<(?!f=a>|/f>).{5}", answer["text"], re.DOTALL) is None
    assert all(ended[kind] for kind in ("json", *REGEXES))


# --- The usual backend, xgrammar ---


@pytest.fixture(scope="module")
def plain(plain_server: Server) -> dict[str, Answers]:
    return ask(plain_server, list(KINDS))


@pytest.fixture(scope="module")
def tree(tree_server: Server) -> dict[str, Answers]:
    return ask(tree_server, list(KINDS))


@pytest.mark.parametrize("kind", KINDS)
def test_equals_plain_decoding(
    kind: str, plain: dict[str, Answers], tree: dict[str, Answers]
) -> None:
    """With requests of all kinds, unconstrained ones too, in the same batches."""
    assert_same(tree[kind], plain[kind])
    assert [a["text"] for a in tree[kind]] == [a["text"] for a in plain[kind]]


def test_answers_are_valid_and_drafts_are_of_use(tree: dict[str, Answers]) -> None:
    assert_valid(tree)
    assert acceptance(tree["free"]) > 1.5
    assert acceptance(tree["tag at once"]) > 1.7


def test_a_grammar_that_ends_inside_an_accepted_path(
    plain_server: Server, tree_server: Server
) -> None:
    """Of n letters the last may be any of a path's; nothing after the end is delivered."""
    for most in range(1, 13):
        options = {"regex": f"[a-z]{{{most}}}", "max_new_tokens": 40}
        ours, theirs = (
            server.ask_all(TEXTS[:4], **options) for server in (tree_server, plain_server)
        )
        assert_same(ours, theirs)
        for answer in ours:
            assert len(answer["output_ids"]) == most + 1 and answer["output_ids"][-1] == EOS
            assert re.fullmatch(options["regex"], answer["text"])
    assert verify_count(ours) < 4 * most  # there were paths


def test_forced_tokens_are_accepted_at_once(tree_server: Server) -> None:
    """Text that no drafter would think of, without alternative: full depth in every round."""
    text = "zq0;" * 9
    answer = tree_server.ask("x", regex=re.escape(text), max_new_tokens=60)
    assert answer["text"] == text
    depth = tree_server.info()["speculative_num_steps"]
    assert answer["meta_info"]["spec_verify_ct"] == -(-len(text) // (depth + 1))


def test_sampled_answers_are_valid(tree_server: Server) -> None:
    for options in ({"temperature": 1.3}, {"temperature": 0.7, "top_p": 0.8, "min_p": 0.02}):
        answers = ask(tree_server, list(KINDS), **options)
        assert_valid(answers)
        assert len({a["text"] for a in answers["json"]}) > 4
        assert acceptance(answers["tag at once"]) > 1.5


# What the grammars allow: position by position, in the order of the alphabet.
LAWS: dict[str, list[str]] = {
    "[ab][cde][fg]": ["".join(letters) for letters in product("ab", "cde", "fg")],
    "a|b[cd]?|e[fgh]i": ["a", "b", "bc", "bd", "efi", "egi", "ehi"],
}


@pytest.mark.parametrize("regex", LAWS)
def test_samples_follow_the_target_under_the_grammar(
    regex: str, tree_server: Server, pairs: Pairs
) -> None:
    """Each token from the target's distribution over what the grammar allows after the others."""
    heat = 1.5
    words = [(*encode(word), EOS) for word in LAWS[regex]]
    starts = sorted({word[:n] for word in words for n in range(len(word))})
    target = Exact(pairs.target())
    exact = {start: target.after([start], heat)[0] for start in starts}
    law: dict[Any, float] = {}
    for word in words:
        law[word] = 1.0
        for n in range(len(word)):
            allowed = {other[n] for other in words if other[:n] == word[:n]}
            row = exact[word[:n]]
            law[word] *= row[word[n]] / sum(row[token] for token in allowed)
    assert abs(sum(law.values()) - 1) < 1e-9

    def draw(number: int) -> Answers:
        return tree_server.ask(PROMPT, n=number, max_new_tokens=8, regex=regex, temperature=heat)

    with ThreadPoolExecutor(4) as pool:
        answers = [a for some in pool.map(draw, [50] * 40) for a in some]
    counts = Counter(tuple(a["output_ids"]) for a in answers)
    assert surprise(counts, law) > TOO_UNLIKELY, {decode(list(w)): n for w, n in counts.items()}
    assert acceptance(answers) > 1.5


# --- The other backends ---


@pytest.fixture(scope="module", params=["llguidance", "outlines"])
def backend(request: pytest.FixtureRequest, serve: Any, pairs: Pairs) -> Iterator[Server]:
    pair = pairs.pair()
    with serve(pair.target, pair.drafter, "--grammar-backend", request.param) as server:
        yield server
        assert server.errors() == []


def test_other_backends(backend: Server, plain: dict[str, Answers]) -> None:
    """A regular expression allows the same in every backend; JSON may be spaced differently."""
    kinds = ["json", *REGEXES, "free"]
    answers = ask(backend, kinds)
    for kind in kinds[1:]:
        assert_same(answers[kind], plain[kind])
    assert_valid(answers)
    assert_valid(ask(backend, kinds, temperature=1.2))


# --- Tool calls, over the OpenAI interface ---

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %} "
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": CALL, "strict": True},
    }
    for name in ("get_it", "put")
]


@pytest.fixture(scope="module")
def talking(serve: Any, pairs: Pairs, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(plain, DFLASH2) with a chat template and a tool call parser."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    pair = pairs.pair()
    flags = ["--chat-template", str(template), "--tool-call-parser", "qwen25"]

    def start(drafter: Path | None) -> Server:
        return serve(pair.target, drafter, *flags)

    with start(None) as plain, start(pair.drafter) as tree:
        yield plain, tree
        assert plain.errors() == tree.errors() == []


def chat(server: Server, text: str, **options: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 120}
    response = server.post("/v1/chat/completions", {**body, "temperature": 0, **options})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "put"}}, "auto"]
)
def test_tool_calls(talking: tuple[Server, Server], choice: Any) -> None:
    called = 0
    for text in TEXTS:
        plain, tree = (chat(s, text, tools=TOOLS, tool_choice=choice) for s in talking)
        calls = [
            [c["function"] for c in a["message"].get("tool_calls") or ()] for a in (plain, tree)
        ]
        assert calls[0] == calls[1]
        assert plain["message"].get("content") == tree["message"].get("content")
        assert plain["finish_reason"] == tree["finish_reason"]
        for call in calls[1]:
            assert call["name"] in ("get_it", "put")
            jsonschema.validate(json.loads(call["arguments"]), CALL)
            called += 1
    assert called >= (choice != "auto")


def test_response_format(talking: tuple[Server, Server]) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
    for text in TEXTS[:4]:
        plain, tree = (chat(s, text, response_format=shape) for s in talking)
        assert plain["message"].get("content") == tree["message"].get("content")


def test_the_example_of_a_tool_call(talking: tuple[Server, Server]) -> None:
    """Sampled, as the tiny model's likeliest answers get lost in white space."""
    example = load("openai_client").Examples(talking[1].url)
    calls = [call for seed, text in enumerate(TEXTS) for call in example.tools(text, 1.0, seed)]
    assert {name for name, _ in calls} == {"get_weather"}
    assert all(arguments["city"] in {"berlin", "oslo", "paris"} for _, arguments in calls)
