"""The command line: its parser, its errors, and a demo against servers that only pretend."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from dflash2_sglang import __version__
from dflash2_sglang.cli import demo, demo_model, demo_report, measure, servers
from dflash2_sglang.cli.main import build_parser, main
from dflash2_sglang.cli.measure import Answer, Round

FAKE = (sys.executable, str(Path(__file__).with_name("cli_fake_server.py")))


@pytest.fixture
def fake_world(tmp_path, monkeypatch):
    """No model to prepare, and servers that are ready at once. Returns the folder of the logs."""
    monkeypatch.setattr(demo_model, "ensure_demo_model", lambda wheel=None: tmp_path)
    monkeypatch.setattr(servers, "SGLANG", FAKE)
    monkeypatch.setattr(demo, "fit_together", lambda count: True)  # whatever else runs here
    monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: str(logs))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked
    logs = tmp_path / "logs"
    logs.mkdir()
    return logs


@pytest.mark.parametrize(("gib", "fits"), [(14, False), (15, True)])
def test_servers_side_by_side_leave_room(monkeypatch, gib, fits):
    import psutil

    memory = SimpleNamespace(available=gib << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(demo.Path, "read_text", lambda path: "max")  # no container's limit
    monkeypatch.setattr(demo, "GPU_FILES", ())
    assert demo.fit_together(3) == fits
    monkeypatch.setattr(demo, "GPU_FILES", ("/",))
    assert not demo.fit_together(3)


# --- the parser ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["--help"], *([name, "--help"] for name in ("demo", "tree", "bench")), ["--version"]],
)
def test_help_imports_nothing_heavy(arguments):
    script = (
        "import sys, atexit\n"
        "heavy = {'torch', 'sglang', 'transformers', 'openai', 'numpy', 'rich', 'psutil'}\n"
        "atexit.register(lambda: print('heavy:', sorted(heavy & set(sys.modules))))\n"
        "from dflash2_sglang.cli.main import main\n"
        f"main({arguments!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("heavy: []\n")


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"dflash2-sglang {__version__}\n"


def test_no_command_prints_the_help(capsys):
    assert main([]) == 2
    assert "demo" in capsys.readouterr().out


def test_demo_defaults():
    args = build_parser().parse_args(["demo"])
    assert (args.max_tokens, args.temperature, args.concurrency) == (96, 0.0, 1)
    assert (args.prompt, args.rounds, args.keep, args.dtype) == (None, 3, False, "bfloat16")
    assert len(set(demo.PROMPTS)) == 8


def test_prompts_add_up():
    args = build_parser().parse_args(["demo", "--prompt", "a", "--prompt", "b"])
    assert args.prompt == ["a", "b"]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--max-tokens", "0"],
        ["--max-tokens", "1.5"],
        ["--concurrency", "-1"],
        ["--rounds", "none"],
        ["--temperature", "-0.1"],
        ["--temperature", "nan"],
        ["--temperature", "hot"],
        ["--prompt", " "],
        ["--dtype", "int8"],
    ],
)
def test_wrong_values_are_named(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["demo", *wrong])
    assert f"argument {wrong[0]}" in capsys.readouterr().err


# --- errors ----------------------------------------------------------------------------------


def test_known_error_is_one_sentence(monkeypatch, capsys):
    def refuse(wheel=None):
        raise demo_model.DemoModelError("there is no wheel")

    monkeypatch.setattr(demo_model, "ensure_demo_model", refuse)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "dflash2-sglang: error: there is no wheel\n"
    with pytest.raises(demo_model.DemoModelError):
        main(["demo", "--debug"])


def test_unknown_error_names_its_kind(monkeypatch, capsys):
    monkeypatch.setattr(demo_model, "ensure_demo_model", lambda wheel=None: {}["oops"])
    assert main(["demo"]) == 1
    assert "KeyError: 'oops' (--debug shows where)" in capsys.readouterr().err


def test_server_that_dies_keeps_its_log(fake_world, monkeypatch, capsys):
    monkeypatch.setattr(servers, "SGLANG", (*FAKE, "--behave=die"))
    assert main(["demo"]) == 1
    error = capsys.readouterr().err
    assert "the plain server died while starting (exit code 3): ValueError: no such" in error
    assert (fake_world / "plain.log").read_text().endswith("the end\n")


def test_server_that_crashes_while_answering(fake_world, monkeypatch, capsys):
    monkeypatch.setattr(servers, "SGLANG", (*FAKE, "--behave=crash"))
    assert main(["demo"]) == 1
    expected = "died while answering (exit code 7): RuntimeError: the scheduler fell over"
    assert expected in capsys.readouterr().err


def test_server_that_refuses(fake_world, capsys):
    assert main(["demo", "--max-tokens", "2000"]) == 1
    error = capsys.readouterr().err
    assert "the DFLASH2 tree server refused" in error and "too many tokens" in error


# --- a whole run -----------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
def test_demo_from_end_to_end(fake_world, monkeypatch, capsys, together):
    monkeypatch.setattr(demo, "fit_together", lambda count: together)
    started = []
    monkeypatch.setattr(demo, "configurations", recording(demo.configurations, started))
    code = main(["demo", "--prompt", "even [red]", "--prompt", "odd", "--concurrency", "2"])
    out = capsys.readouterr().out
    assert code == 0
    assert "> even [red]\nOne fish, two fish." in out
    rows = {line.split("│")[1].strip(): line.split("│") for line in out.splitlines() if "│" in line}
    assert list(rows) == ["plain", "DFLASH chain", "DFLASH2 tree"]
    assert [cell.strip() for cell in rows["plain"][2:4]] == ["-", "1.00"]
    assert [cell.strip() for cell in rows["DFLASH chain"][2:4]] == ["yes, 2 of 2", "2.00"]
    assert [cell.strip() for cell in rows["DFLASH2 tree"][2:4]] == ["1 of 2", "2.00"]
    assert rows["plain"][5].strip() == "1.00x"
    assert demo_report.NEAR_TIES in out
    assert ("taking turns" in out) == together
    assert "--speculative-algorithm DFLASH2 \\\n" in out
    assert "\x1b" not in out  # piped: no colours, no spinner
    assert [server.processes() for server in started] == [[], [], []]
    assert not fake_world.exists()  # the logs of a good run go


def test_keep_leaves_one_server(fake_world, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(demo, "configurations", recording(demo.configurations, started))
    assert main(["demo", "--prompt", "it's", "--keep", "--temperature", "0.7"]) == 0
    plain, chain, tree = started
    try:
        out = capsys.readouterr().out
        assert tree.healthy() and not plain.processes() and not chain.processes()
        assert out.count("sampled") == 3 and demo_report.NEAR_TIES not in out
        assert f"kill {tree.pid}" in out and str(tree.log) in out and tree.log.exists()
        command = out[out.index("  curl") : out.index("and stop it")]
        monkeypatch.delenv("http_proxy")
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert '"content": "One fish' in done.stdout
    finally:
        tree.kept = False
        tree.stop()


def recording(make, into):
    def wrapper(*args):
        into.extend(make(*args))
        return into

    return wrapper


def test_float32_has_no_stock_chain(tmp_path):
    made = demo.configurations(tmp_path, tmp_path, "float32", tmp_path)
    assert [server.name for server in made] == ["plain", "DFLASH2 tree"]


# --- numbers and their table -----------------------------------------------------------------


def round_of(*texts, tokens=10, steps=0, seconds=1.0):
    return Round(tuple(Answer(text, tokens, steps) for text in texts), seconds)


def test_acceptance_leaves_out_the_prefill_token():
    rounds = [round_of("a", "b", tokens=13, steps=6), round_of("a", "b", tokens=7, steps=2)]
    assert measure.acceptance_length(rounds) == 36 / 16
    assert measure.acceptance_length([round_of("a", tokens=1)]) is None


def test_speed_is_the_median_of_rounds():
    rounds = [round_of("a", "b", seconds=seconds) for seconds in (4.0, 1.0, 2.0)]
    assert measure.median_speed(rounds) == 10.0


def test_identity_counts_prompts_that_agree_in_every_round():
    plain = [round_of("a", "b"), round_of("a", "c")]
    assert demo_report.identity(plain, plain) == "1 of 2 (with itself)"
    assert demo_report.identity([round_of("a", "b")] * 2, plain) == "yes, 2 of 2"
    assert demo_report.identity([round_of("a", "b"), round_of("x", "b")], plain) == "1 of 2"
    assert demo_report.identity([round_of("y", "x")], plain) == "no, 0 of 2"


@pytest.mark.parametrize(
    ("dtype", "other", "note"),
    [
        ("bfloat16", "b", demo_report.NEAR_TIES),
        ("float32", "b", demo_report.UNEXPECTED),
        ("bfloat16", "a", ""),
    ],
)
def test_a_difference_is_explained(dtype, other, note):
    console = Console(width=300, record=True)
    args = build_parser().parse_args(["demo", "--dtype", dtype, "--rounds", "1"])
    results = {"plain": [round_of("a")], "tree": [round_of(other, steps=3)]}
    with console.capture() as captured:
        demo_report.print_results(console, results, args, True)
    out = captured.get()
    assert f"temperature 0, concurrency 1, {dtype}; 1 round, the servers taking turns.\n" in out
    assert note in out
    assert (demo_report.NO_CHAIN in out) == (dtype == "float32")
    assert (demo_report.NEAR_TIES in out or demo_report.UNEXPECTED in out) == bool(note)


def test_command_can_be_pasted():
    text = demo_report.pasteable(["python", "-m", "x", "--path", "/a b", "--on", "--port", "1"])
    assert text == "  python -m x \\\n    --path '/a b' \\\n    --on \\\n    --port 1"
