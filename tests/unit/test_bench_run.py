"""``dflash2-sglang bench`` from end to end: SGLang's own load generator against servers that pretend."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tinypair
from rich.console import Console

from dflash2_sglang.bench import load, runner, session
from dflash2_sglang.cli import servers
from dflash2_sglang.cli.main import main

FAKE = (sys.executable, str(Path(__file__).with_name("bench_fake_server.py")))
PROMPTS = ["even one", "odd two", "even three"]


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A tokenizer in place of a model, a file of prompts, and servers that are ready at once."""
    monkeypatch.setattr(servers, "SGLANG", FAKE)
    monkeypatch.setattr(session, "fit_together", lambda *args: True)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked
    monkeypatch.setenv("no_proxy", "127.0.0.1")  # for SGLang's generator, which does ask
    model = tmp_path / "model"
    model.mkdir()
    tinypair._write_tokenizer(model, tinypair.VOCAB)
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    return tmp_path


@pytest.fixture
def started(monkeypatch):
    """Every server that a run starts."""
    made = []

    class Recorded(runner.Server):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(runner, "Server", Recorded)
    return made


def words(world, *more, out="out"):
    found = ["bench", "--out", str(world / out), "--model-path", str(world / "model")]
    found += ["--speculative-draft-model-path", "D", "--workload", str(world / "mine.jsonl")]
    found += ["--widths", "8", "--concurrency", "1", "--repeats", "2", "--max-tokens", "8"]
    return [*found, "--no-rounds", "--no-plots", *more]


def bench(world, *more):
    return main(words(world, *more))


def record(world, out="out"):
    return json.loads((world / out / "bench.json").read_text())


def keys(world, out="out"):
    lines = (world / out / "journal.jsonl").read_text().splitlines()
    found = [json.loads(line)["key"] for line in lines]
    return [key for key in found if key.startswith(("answers/", "load/"))]


def test_a_whole_run(world, started, capsys):
    assert bench(world) == 0
    out = capsys.readouterr().out
    assert [server.name for server in started] == ["plain", "DFLASH", "DFLASH2 8"]
    assert all(server.processes() == [] for server in started)
    assert keys(world)[3:] == [
        *(f"load/mine/1/{name}/0" for name in ("plain", "DFLASH", "DFLASH2 8")),
        *(f"load/mine/1/{name}/1" for name in ("DFLASH2 8", "DFLASH", "plain")),
    ]
    whole = record(world)
    texts = [(place["configuration"], place["same_text"]) for place in whole["figures"]]
    assert texts == [("plain", 3), ("DFLASH", 3), ("DFLASH2 8", 2)]
    (difference,) = whole["figures"][2]["differences"]
    assert difference == {
        "prompt": 1,
        "position": 3,
        "expected": 14,
        "found": 99,
        "gap": 0.3,
        "at_least": False,
    }
    # Six tokens an answer, the first of them from the prefill, in two passes.
    lengths = [place.get("acceptance_length") for place in whole["figures"]]
    assert lengths[0] is None and lengths[1]["values"] == lengths[2]["values"] == [2.5, 2.5]
    assert whole["figures"][1]["acceptance_by_depth"] == [1.0, 1.0, 0.5]
    assert "Texts that differ: 1; largest gap 0.30; not near ties" in out
    assert "9/9 mine, concurrency 1, plain, repeat 2:" in out
    assert "\x1b" not in out  # piped: no colours, no bars
    raw = whole["raw"]["load/mine/1/DFLASH/0"]
    assert raw["passes"] == [2, 2, 2] and raw["completed"] == 3 and len(raw["itls"]) == 3
    assert raw["command"][:3] == ["python", "-m", "sglang.benchmark.serving"]
    assert not (world / "out" / "plots").exists()


def test_what_was_sent_is_what_was_asked(world):
    """The load generator's file holds the templated prompts, in SGLang's own format."""
    assert bench(world, "--only", "plain", "--repeats", "1") == 0
    lines = (world / "out" / "prompts" / "mine.jsonl").read_text().splitlines()
    sent = [json.loads(line)["conversations"][0]["content"] for line in lines]
    assert sent == [f"u: {prompt}\na: " for prompt in PROMPTS]
    assert record(world)["prompts"]["mine"]["texts"] == sent


def test_one_server_at_a_time(world, started, capsys):
    assert bench(world, "--one-at-a-time", "--no-chain") == 0
    assert [server.name for server in started] == ["plain", "DFLASH2 8", "plain"]
    assert "2 servers one at a time" in capsys.readouterr().out
    assert record(world)["figures"][1]["ratio"]["values"]


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    world, started, monkeypatch, capsys
):
    run = load.LoadGenerator.run
    calls = []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(self, *args)

    monkeypatch.setattr(load.LoadGenerator, "run", interrupted)
    assert bench(world, "--no-chain") == 130
    assert all(server.processes() == [] for server in started)
    assert "Unfinished: 4 of 6 cells" in (world / "out" / "bench.md").read_text()
    before = keys(world)
    assert bench(world, "--no-chain") == 0
    assert "6 cells, 2 of them to measure" in capsys.readouterr().out
    assert keys(world)[:4] == before and len(set(keys(world))) == len(keys(world)) == 6
    assert "Unfinished" not in (world / "out" / "bench.md").read_text()
    # Finished: nothing is started, and a repeat more is added to it.
    count = len(started)
    assert bench(world, "--no-chain") == 0
    assert len(started) == count
    assert bench(world, "--no-chain", "--repeats", "3") == 0
    assert len(record(world)["figures"][1]["ratio"]["values"]) == 3


def test_signals_end_it_in_the_middle_of_a_load(world):
    """Real ones, while SGLang's event loop runs: what is done is kept, and no server is left."""
    script = (
        "import sys; from dflash2_sglang.bench import session; from dflash2_sglang.cli import main,"
        f" servers; servers.SGLANG = {FAKE!r}; session.fit_together = lambda *args: True;"
        "sys.exit(main.main(sys.argv[1:]))"
    )
    ends = {"int": signal.SIGINT, "term": signal.SIGTERM}
    for name in ends:  # one after the other: a second one might be through before its signal
        process = subprocess.Popen(
            [sys.executable, "-uc", script, *words(world, "--delay", "0.4", out=name)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        seen = ""
        while "repeat 1:" not in seen:  # the next load has begun
            line = process.stdout.readline()
            assert line, process.stderr.read()
            seen += line
        leader = psutil.Process(process.pid)
        children = leader.children(recursive=True)
        assert len(children) == 3
        time.sleep(1.8)  # past the second that the generator waits
        process.send_signal(ends[name])
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + ends[name], errors
        assert "Traceback" not in errors
        assert "Unfinished" in out and "Unfinished" in (world / name / "bench.md").read_text()
        assert not any(child.is_running() for child in children)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--max-tokens", "9"], "max tokens was 8 and is 9"),
        (["--no-chain"], "configurations: 'DFLASH' differs"),
        (["--seed", "2"], "seed was 1 and is 2"),
    ],
)
def test_another_configuration_is_refused(world, started, capsys, change, said):
    """Before a server is started; what is there stays."""
    prepared = world / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.Runner, "run", lambda self: None)
        assert bench(world) == 0
    journal = (prepared / "journal.jsonl").read_bytes()
    assert bench(world, *change) == 1
    error = capsys.readouterr().err
    assert said in error and "another --out" in error and "Traceback" not in error
    assert started == [] and (prepared / "journal.jsonl").read_bytes() == journal


def test_a_server_that_dies_is_named_and_the_rest_is_kept(world, started, capsys):
    """Three prompts of texts, three of the first load; the warm-up asked one."""
    assert bench(world, "--only", "plain", "--fail-after", "9") == 1
    captured = capsys.readouterr()
    expected = "the plain server died while answering (exit code 7): RuntimeError: the scheduler"
    assert expected in captured.err
    assert keys(world) == ["answers/mine/1/plain/0", "load/mine/1/plain/0"]
    assert "Unfinished: 2 of 3 cells" in captured.out
    assert all(server.processes() == [] for server in started)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--concurrency", "4"],
            "--concurrency 4 needs as many prompts at least, and workload mine",
        ),
        (["--workload", "sglang:nonsense"], "knows no data set 'nonsense'"),
        (["--workload", "sglang:custom=/nowhere"], "could not load its data set custom"),
        (["--workload", "mixed", "code", "code.jsonl"], "code.jsonl is neither a built-in set"),
        (["--only", "x"], "--only 'x' is none of"),
    ],
)
def test_refusals(world, started, capsys, more, said):
    assert bench(world, *more) == 1
    assert said in capsys.readouterr().err
    assert started == []


def test_a_data_set_of_sglang(world, capsys):
    """By name, with the file at hand: SGLang's own format, its answers left out."""
    path = world / "their.jsonl"
    lines = [{"conversations": [{"content": p}, {"content": "abcd"}]} for p in PROMPTS]
    path.write_text("\n".join(map(json.dumps, lines)))
    more = ["--workload", f"sglang:custom={path}", "--only", "plain", "--repeats", "1"]
    assert bench(world, *more) == 0
    assert sorted(record(world)["prompts"]["custom"]["texts"]) == sorted(PROMPTS)


def test_a_terminal_gets_bars():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with runner.progress(console, 4) as bar:
        bar.doing("starting plain")
        bar.begin("maths, concurrency 1, plain, texts", 8)
        bar.tick()
        bar.bars.refresh()
        bar.end("maths, concurrency 1, plain, texts", "done")
        bar.bars.refresh()
    shown = out.getvalue()
    assert "\x1b[" in shown and "1/8" in shown and "1/4" in shown
    assert "1/4 maths, concurrency 1, plain, texts: done" in re.sub(
        r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown
    )
