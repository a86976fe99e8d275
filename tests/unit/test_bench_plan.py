"""What a benchmark measures in which order, which servers it compares, and how it goes on."""

import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash2_sglang.bench import BenchError
from dflash2_sglang.bench.configs import configurations, dtype_of, fit_together, reject
from dflash2_sglang.bench.journal import Journal
from dflash2_sglang.bench.plan import ANSWERS, LOAD, ROUNDS, Config, Plan, Workload
from dflash2_sglang.cli import bench
from dflash2_sglang.cli.main import build_parser


def plan_of(configs=3, workloads=2, concurrencies=(1, 4), repeats=3, together=True, rounds=True):
    return Plan(
        tuple(Config(f"c{i}", ("--flag", str(i))) for i in range(configs)),
        tuple(Workload(f"w{i}", ("a", "b", "c", "d")) for i in range(workloads)),
        concurrencies,
        repeats,
        together,
        rounds,
        {"temperature": 0, "max tokens": 8},
    )


plans = st.builds(
    plan_of,
    configs=st.integers(1, 5),
    workloads=st.integers(1, 3),
    concurrencies=st.sampled_from([(1,), (1, 4), (2, 4, 8)]),
    repeats=st.integers(1, 5),
    together=st.booleans(),
    rounds=st.booleans(),
)


@given(plans)
def test_every_cell_once(plan):
    keys = [cell.key for cell in plan.cells()]
    assert len(set(keys)) == len(keys)
    places = len(plan.configs) * len(plan.workloads) * len(plan.concurrencies)
    kinds = [cell.kind for cell in plan.cells()]
    assert kinds.count(LOAD) == places * plan.repeats
    assert kinds.count(ANSWERS) == places
    sampled = len(plan.configs) * len(plan.concurrencies)
    assert kinds.count(ROUNDS) == (sampled if plan.rounds else 0)


@given(plans)
def test_repeats_are_outermost(plan):
    """So that an interrupted run has whole tables."""
    repeats = [cell.repeat for cell in plan.cells() if cell.kind == LOAD]
    assert repeats == sorted(repeats)


@given(plans)
def test_drift_favours_none(plan):
    """Over two repeats, each configuration's turns add up to the same distance from the middle."""
    load = [cell for cell in plan.cells() if cell.kind == LOAD and cell.repeat < 2]
    if plan.repeats < 2:
        return
    for workload in plan.workloads:
        for concurrency in plan.concurrencies:
            place = (workload.name, concurrency)
            order = [
                [c.config for c in load if (c.workload, c.concurrency) == place and c.repeat == r]
                for r in (0, 1)
            ]
            assert order[0] == order[1][::-1] == [config.name for config in plan.configs]


@given(plans)
def test_servers_are_warm_before_they_are_timed(plan):
    cells = plan.cells()
    for cell in cells:
        if cell.kind == LOAD and cell.repeat == 0:
            key = cell.key.replace(LOAD, ANSWERS)
            assert [c.key for c in cells].index(key) < cells.index(cell)


@given(plans)
def test_turns_of_servers(plan):
    cells = plan.cells()
    turns = plan.turns(cells)
    assert [cell for turn in turns for cell in turn] == cells
    if plan.together:
        assert len(turns) == 1
    else:
        assert all(len({cell.config for cell in turn}) == 1 for turn in turns)
        # The last server of a repeat keeps running for the next one.
        assert len(turns) == (len(plan.configs) - 1) * plan.repeats + 1


def test_digest_tells_prompts_apart():
    assert Workload("w", ("ab", "c")).digest != Workload("w", ("a", "bc")).digest
    assert Workload("w", ("a",)).digest == Workload("v", ("a",)).digest


# --- configurations --------------------------------------------------------------------------


def arguments(*words):
    args, rest = build_parser().parse_known_args(["bench", *words])
    args.server_flags = rest
    for name, value in bench.DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def named(*words):
    return {c.name: list(c.arguments) for c in configurations(arguments(*words), "T", "D")}


def test_default_configurations():
    found = named()
    assert list(found) == ["plain", "DFLASH", "DFLASH2 8", "DFLASH2 16"]
    assert found["plain"] == ["--model-path", "T"]
    assert found["DFLASH"][2:] == [
        *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "D")
    ]
    assert found["DFLASH2 16"][-2:] == ["--speculative-num-draft-tokens", "16"]


def test_flags_go_where_they_belong():
    found = named("--tp-size", "2", "--speculative-eagle-topk=4", "--mem-fraction-static=0.5")
    assert found["plain"][2:] == ["--tp-size", "2", "--mem-fraction-static", "0.5"]
    assert "--speculative-eagle-topk" not in found["DFLASH"]
    assert found["DFLASH2 8"][-4:] == [
        *("--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8")
    ]


def test_own_configurations():
    found = named(
        *("--widths", "--no-chain"),
        *("--config", "chain=--speculative-algorithm=DFLASH2 --speculative-eagle-topk 1"),
        *("--config", "fp8=--quantization fp8"),
    )
    assert list(found) == ["plain", "chain", "fp8"]
    assert found["chain"][-2:] == ["--speculative-draft-model-path", "D"]
    assert found["fp8"] == ["--model-path", "T", "--quantization", "fp8"]


def test_only_chooses_and_orders():
    assert list(named("--only", "DFLASH2 8", "plain")) == ["DFLASH2 8", "plain"]


def test_no_width_is_the_packages_own():
    found = named("--widths")
    assert list(found) == ["plain", "DFLASH", "DFLASH2"]
    assert "--speculative-num-draft-tokens" not in found["DFLASH2"]


@pytest.mark.parametrize(("flag", "dtype"), [(["--dtype", "float32"], "float32"), ([], "auto")])
def test_float32_has_no_stock_chain(flag, dtype):
    assert dtype_of(arguments(*flag)) == dtype
    assert ("DFLASH" in named(*flag)) == (dtype == "auto")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model-path", "T"], "go together: give both, or neither"),
        (["--speculative-draft-model-path", "D"], "go together: give both, or neither"),
        (["--port", "1"], "--port is set by the benchmark itself"),
        (["--speculative-algorithm=EAGLE"], "--speculative-algorithm is set by the benchmark"),
        (["--speculative-num-draft-tokens", "8"], "is what --widths sets"),
        (["loose"], "'loose' belongs to no option"),
    ],
)
def test_contradictions_are_refused(words, sentence):
    with pytest.raises(BenchError, match=sentence):
        reject(arguments(*words))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--only", "eagle"], "--only 'eagle' is none of 'plain', 'DFLASH', "),
        (["--config", "no flags"], "'no flags' is not NAME=FLAGS"),
        (["--config", "a|b=--x"], "is not NAME=FLAGS"),
        (["--config", "plain=--x"], "Two configurations are called 'plain'"),
        (["--config", "a=--x 'open"], "--config a: No closing quotation"),
    ],
)
def test_wrong_configurations_are_refused(words, sentence):
    with pytest.raises(BenchError, match=sentence):
        named(*words)


def test_memory_decides(monkeypatch):
    import psutil

    from dflash2_sglang.bench import configs as module

    def free(gib):
        monkeypatch.setattr(
            psutil, "virtual_memory", lambda: argparse.Namespace(available=gib << 30)
        )

    asked = []
    monkeypatch.setattr("dflash2_sglang.cli.demo.fit_together", lambda n: asked.append(n) or True)
    monkeypatch.setattr(module, "_has_gpu", lambda: False)
    three = plan_of(3).configs
    free(12)
    assert fit_together(three, [], []) and asked == [3]
    free(11)
    assert not fit_together(three, [], [])
    free(500)
    monkeypatch.setattr(module, "_has_gpu", lambda: True)
    assert fit_together(three, [], ["--mem-fraction-static", "0.3"])
    assert not fit_together(three, [], ["--mem-fraction-static", "0.4"])


# --- the journal -----------------------------------------------------------------------------


def test_journal_goes_on(tmp_path):
    first = Journal(tmp_path, {"tokens": 8, "levels": (1, 2)})
    first.add("load/a", {"x": (1, 2)})
    second = Journal(tmp_path, {"tokens": 8, "levels": [1, 2]})
    assert second.results == first.results == {"load/a": {"x": [1, 2]}}
    assert second.begun == first.begun


def test_half_a_line_is_dropped(tmp_path):
    journal = Journal(tmp_path, {})
    journal.add("a", 1)
    with journal.path.open("a") as file:
        file.write('{"key": "b", "resu')
    again = Journal(tmp_path, {})
    assert again.results == {"a": 1}
    again.add("c", 3)
    assert Journal(tmp_path, {}).results == {"a": 1, "c": 3}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"tokens": 16, "configurations": {"plain": []}}, "tokens was 8 and is 16"),
        ({"tokens": 8, "configurations": {"plain": ["--x"]}}, "configurations: 'plain' differs"),
        ({"tokens": 8, "configurations": {"plain": []}, "new": 1}, "new was None and is 1"),
    ],
)
def test_another_configuration_is_refused(tmp_path, now, said):
    Journal(tmp_path, {"tokens": 8, "configurations": {"plain": []}})
    with pytest.raises(BenchError, match=said) as caught:
        Journal(tmp_path, now)
    assert "another --out" in str(caught.value)


@pytest.mark.parametrize("text", ["not JSON\n", json.dumps({"key": "load", "result": 1}) + "\n"])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "journal.jsonl").write_text(text)
    with pytest.raises(BenchError, match="use another --out"):
        Journal(tmp_path, {})
