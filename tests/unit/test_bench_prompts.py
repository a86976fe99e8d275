"""Workloads: the package's own sets, the user's files, and what a server is sent."""

import itertools
import json
from types import SimpleNamespace

import pytest

from dflash2_sglang.bench import BenchError
from dflash2_sglang.bench.prompts import (
    BUILT_IN,
    as_served,
    built_in,
    read,
    spread,
    texts,
    workload,
)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_sets(name):
    prompts = built_in(name)
    assert len(prompts) == len(set(prompts)) == 40
    assert all(prompt == prompt.strip() and len(prompt) > 20 for prompt in prompts)


def test_sets_share_no_prompt():
    every = list(itertools.chain.from_iterable(map(built_in, BUILT_IN)))
    assert len(set(every)) == 200
    assert sorted(built_in("mixed")) == sorted(every)


@pytest.mark.parametrize("name", BUILT_IN)
def test_prompts_of_a_set_differ(name):
    """Not one sentence with a word exchanged: each pair shares less than three quarters of its words."""
    bags = [set(prompt.lower().split()) for prompt in built_in(name)]
    if name == "json":  # its instruction is the same by design; the texts differ
        bags = [set(prompt.partition("Text:")[2].lower().split()) for prompt in built_in(name)]
    worst = max(len(a & b) / len(a | b) for a, b in itertools.combinations(bags, 2))
    assert worst < 0.75


def test_mixed_takes_of_every_set():
    one = workload("mixed", 5, None, False, rows)
    owners = [next(n for n in BUILT_IN if prompt in built_in(n)) for prompt in one.prompts]
    assert owners == list(BUILT_IN)


def rows(name, count):
    return [f"{name} {i}" for i in range(count)]


def test_a_data_set_of_sglang():
    one = workload("sglang:sharegpt=/some/file.json", 3, None, True, rows)
    assert one.name == "sharegpt"
    assert one.prompts == tuple(f"sharegpt=/some/file.json {i}" for i in range(3))


def test_spread_is_even():
    assert spread(list(range(10)), 5) == [0, 2, 4, 6, 8]
    assert spread([1, 2], 5) == spread([1, 2], None) == [1, 2]


FORMATS = [
    ("plain.jsonl", '"first"\n\n"second"\n'),
    ("prompt.jsonl", '{"prompt": "first"}\n{"prompt": "second"}\n'),
    ("list.json", '["first", {"prompt": "second"}]'),
    ("openai.jsonl", '{"messages": [{"role": "user", "content": "first"}]}\n"second"\n'),
    (
        "sglang.jsonl",
        '{"conversations": [{"from": "human", "value": "first"}, {"from": "gpt", "value": "x"}]}\n'
        '{"conversation": [{"content": "second"}, {"role": "assistant", "content": "x"}]}\n',
    ),
]


@pytest.mark.parametrize(("name", "text"), FORMATS)
def test_formats(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert read(path) == [[{"role": "user", "content": word}] for word in ("first", "second")]
    assert texts(path, 1) == ["first"]


def test_no_file_gives_the_demos_prompts():
    from dflash2_sglang.cli.demo import PROMPTS

    assert texts(None) == list(PROMPTS)


def test_earlier_turns_are_kept(tmp_path):
    chat = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in chat]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    assert read(path) == [messages]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{'prompt': 1}\n", "line 1 is not JSON"),
        ("[1,", "is not JSON"),
        ('{"prompt": 3}\n', "entry 1 holds no prompt"),
        ('"good"\n{"messages": []}\n', "entry 2 holds no prompt"),
        ('{"prompt": "  "}\n', "entry 1 holds no prompt"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, sentence):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=sentence):
        read(path)


def test_unknown_workloads_are_refused(tmp_path):
    with pytest.raises(BenchError, match="neither a built-in set"):
        workload("poetry", 3, None, False, rows)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BenchError, match="holds no prompt"):
        workload(str(tmp_path / "empty.jsonl"), 3, None, False, rows)


class Tokenizer:
    """Characters as tokens; ``adds`` is what it puts before a text."""

    chat_template = "yes"
    bos_token = "^"

    def __init__(self, adds="", before=""):
        self.adds, self.before = adds, before

    def apply_chat_template(self, chat, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        turns = "".join(f"{self.before}{turn['content']}|" for turn in chat)
        return f"{turns}>"

    def __call__(self, text, add_special_tokens=True):
        return SimpleNamespace(input_ids=list((self.adds if add_special_tokens else "") + text))


CHAT = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]


@pytest.mark.parametrize(
    ("tokenizer", "sent"),
    [
        (Tokenizer(), "a|b|>"),
        (Tokenizer(before="^"), "^a|^b|>"),  # the template's own token stays before every turn
        (Tokenizer(adds="^", before="^"), "a|^b|>"),  # the tokenizer adds the first one itself
    ],
)
def test_text_gives_the_templates_tokens(tokenizer, sent):
    text = as_served(tokenizer, CHAT, True)
    assert text == sent
    assert "".join(tokenizer(text).input_ids) == tokenizer.apply_chat_template(CHAT, True, False)


def test_a_tokenizer_that_cannot_be_matched():
    with pytest.raises(BenchError, match="--no-chat-template"):
        as_served(Tokenizer(adds="$"), CHAT, True)


def test_without_template():
    assert as_served(Tokenizer(adds="$"), CHAT, False) == "a\n\nb"
