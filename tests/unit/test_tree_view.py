"""``dflash2-sglang tree`` without a server: its arguments, document, report and page."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tree_rounds import EVIL, OUTPUT, PROMPT_LENGTH, TEXTS, Tokenizer, answer, records, whole

from dflash2_sglang.cli import demo, demo_model, servers, tree, tree_report
from dflash2_sglang.cli.main import build_parser, main
from dflash2_sglang.cli.tree_document import Spelling
from dflash2_sglang.cli.tree_page import embedded, page
from dflash2_sglang.cli.tree_trace import join

# --- arguments -------------------------------------------------------------------------------


def parsed(*words: str):
    args, rest = build_parser().parse_known_args(["tree", *words])
    args.server_flags = rest
    return args


def test_other_flags_go_to_the_server(tmp_path):
    args = parsed("--model-path", "t", "--speculative-draft-model-path=d", "--tp-size", "2")
    server = tree._server(args, tmp_path)
    command = " ".join(server.command)
    assert f"env DFLASH2_SGLANG_TRACE={tmp_path}/trace.jsonl" in command
    assert "--model-path t --speculative-draft-model-path d" in command
    assert "--speculative-algorithm DFLASH2 --tp-size 2" in command


def test_the_demo_pair_is_the_default(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_model, "ensure_demo_model", lambda wheel=None: tmp_path)
    assert tree.pair(parsed()) == (str(tmp_path), str(demo_model.demo_drafter()))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model-path", "t"], "give --speculative-draft-model-path too"),
        (["--speculative-draft-model-path", "d"], "give --model-path too"),
        (["--speculative-algorithm=DFLASH"], "leave --speculative-algorithm out"),
        (["--prompts", "/no/such"], "--prompts /no/such cannot be read"),
        (["--html", "/no/such/page.html"], "--html /no/such/page.html cannot be written"),
    ],
)
def test_wrong_arguments_are_one_sentence(words, said, monkeypatch, capsys):
    monkeypatch.setattr(servers, "SGLANG", ("false",))
    assert main(["tree", *words]) == 1
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_prompts(tmp_path):
    assert tree.prompts(parsed()) == list(demo.PROMPTS)
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\n  two [bold]\n")
    assert tree.prompts(parsed("--prompts", str(lines))) == ["one", "  two [bold]"]
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('"a\\nb"\n{"prompt": "c", "id": 3}\n')
    assert tree.prompts(parsed("--prompt", "first", "--prompts", str(rows))) == [
        "first",
        "a\nb",
        "c",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('"a"\n{oops\n', "line 2 is not JSON"),
        ('{"text": "a"}', "line 1 holds no text"),
        ('"a"\n" "', "line 2 holds no text"),
        ("\n", "holds no prompt"),
    ],
)
def test_a_wrong_prompt_file_names_the_line(tmp_path, content, said, monkeypatch, capsys):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(content)
    assert main(["tree", "--prompts", str(rows)]) == 1
    assert said in capsys.readouterr().err


# --- the document ----------------------------------------------------------------------------


def test_spelling_keeps_spaces_and_names_parts_of_characters():
    spell = Spelling(Tokenizer())
    assert [spell.token(t) for t in (10, 14, 24, 0xC3 + 200)] == ["Once", " of", " ", "<0xC3>"]


def test_pieces_make_up_the_text():
    """é in two tokens: its text comes with the second; a byte that stays alone is shown at the end."""
    row = [10, 200 + 0xC3, 200 + 0xA9, 14, 200 + 0xC3]
    assert Spelling(Tokenizer()).row(row) == ["Once", "", "é", " of", "\ufffd"]


@given(st.text(max_size=40))
def test_any_text_is_spelt_in_full(text):
    row = [200 + byte for byte in text.encode()]
    pieces = Spelling(Tokenizer()).row(row)
    assert len(pieces) == len(row) and "".join(pieces) == text


def test_document_says_what_happened():
    found = whole()
    assert found["answers"][0]["pieces"] == [TEXTS[token] for token in OUTPUT]
    first = found["answers"][0]["rounds"][0]
    expected = records()[0]
    for name in ("tokens", "parent", "prob", "accepted", "bonus", "chain"):
        assert first[name] == expected[name]
    assert (first["place"], first["gain"], first["chain_gain"]) == (0, 3, 3)
    for one in found["answers"][0]["rounds"]:
        for token in (*one["tokens"], *one["chain"], one["bonus"]):
            assert str(token) in found["texts"]
    assert json.loads(json.dumps(found)) == found


# --- the page --------------------------------------------------------------------------------


@given(st.dictionaries(st.text(), st.text() | st.sampled_from(list(EVIL.values()))))
def test_data_cannot_end_its_element(texts):
    written = embedded({"texts": texts})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written) == {"texts": texts}


def test_page_asks_for_nothing():
    html = page(whole())
    assert set(re.findall(r"https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"\b(?:src|href)=\"([^\"]*)\"", html)) == {"data:,"}
    assert "@import" not in html and "url(" not in html
    assert "default-src 'none'" in html
    assert html.count("</script>") == 2 and "/*" not in html.split("application/json")[1][:200]
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert json.loads(data[1]) == whole()


def test_assets_are_packaged():
    import configparser

    config = configparser.ConfigParser()
    config.read(Path(tree.__file__).parents[2] / "setup.cfg")
    assert "assets/*/*" in config["options.package_data"]["dflash2_sglang"].split()


# --- the terminal ----------------------------------------------------------------------------


def printed(found, limit=9):
    console = Console(width=120, highlight=False, record=True, file=io.StringIO())
    tree_report.print_all(console, found, limit)
    return console.export_text()


def test_report_draws_the_tree():
    out = printed(whole(answer("Is [red] a colour?")))
    assert "> Is [red] a colour?" in out
    block = out[out.index("round 2:") : out.index("round 3:")].splitlines()
    assert block[:7] == [
        "round 2: tree 1 token, chain 2",
        "↵",
        "├── \\x07  50.0%",
        "│   └── é  10.0% (20.0%)",
        "├── ~ ␣  20.0%",
        "└── + ␣of",
        "chain: ␣of · <|end|> · ␣50",
    ]
    first = out[out.index("round 1:") : out.index("round 2:")]
    assert "✓ </script><script>window.hacked␣=␣1</script>  60.0%" in first
    assert "✓ <!--<script>  40.0% (66.7%)" in first


def test_report_prints_the_figures():
    out = printed(whole())
    assert "3 rounds of 5 nodes, at most 3 deep, at temperature 0." in out
    assert "Acceptance length 1.67, of the chain 2.00." in out
    assert "Nodes predicted to be accepted: 3; accepted: 3." in " ".join(out.split())
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert ["30% - 50%", "2", "35.0%", "50.0%", "9.5% - 90.5%"] in rows
    assert ["1", "3", "66.7%", "66.7%", "100.0%", "66.7%", "83.3%"] in rows
    assert ["3", "1", "0.0%", "0.0%", "0.0%", "0.0%", "0.0%"] in rows
    assert tree_report.SAMPLED[:40] not in out


def test_report_of_sampled_and_cut_answers():
    assert tree_report.SAMPLED[:40] in printed(whole(temperature=0.7))
    out = printed(whole(), limit=1)
    assert "round 2" not in out and "... and 2 more rounds: --show 3, or --html FILE" in out
    silent = printed(whole(), limit=0)
    assert "round 1" not in silent and "Acceptance length 1.67" in silent


def test_report_of_an_answer_without_rounds():
    response = {"output_ids": [10], "meta_info": {"finish_reason": {"type": "length"}}}
    out = printed(whole(join("?", PROMPT_LENGTH, response, [])))
    assert "No answer was long enough for a round." in out


# --- a whole run -----------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch, tmp_path):
    """Instead of a server, its answer."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(demo_model, "ensure_demo_model", lambda wheel=None: tmp_path)
    settings = whole()["settings"]
    monkeypatch.setattr(tree, "_serve", lambda *_: ([answer()], settings, Tokenizer()))


def test_json_is_all_of_standard_output(served, capsys):
    assert main(["tree", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == whole()


def test_html_is_written(served, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["tree", "--html", str(path), "--show", "1"]) == 0
    assert path.read_text() == page(whole())
    assert f"The page is {path}" in capsys.readouterr().out
