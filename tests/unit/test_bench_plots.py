"""The plots of a benchmark are drawn for what was measured, and can be told apart."""

import re

import pytest

from dflash2_sglang.bench import BenchError, plots, style
from dflash2_sglang.bench.figures import Figure, Place
from dflash2_sglang.bench.plan import Config, Plan, Workload

pytest.importorskip("matplotlib", reason="matplotlib (extra `bench`) is not installed")

ALGORITHM = "--speculative-algorithm"
CONFIGS = (
    Config("plain", ()),
    Config("DFLASH", (ALGORITHM, "DFLASH")),
    Config("DFLASH2 8", (ALGORITHM, "DFLASH2")),
    Config("DFLASH2 16", (ALGORITHM, "DFLASH2")),
)


def plan_of(workloads, concurrencies):
    loads = tuple(Workload(name, ("a",)) for name in workloads)
    return Plan(CONFIGS, loads, concurrencies, 3, True, True, {"temperature": 0})


def places(plan, split=True):
    found = []
    for workload in plan.workloads:
        for concurrency in plan.concurrencies:
            for i, config in enumerate(plan.configs):
                place = Place(workload.name, concurrency, config.name)
                names = ("tokens_per_second", "ratio", "first_token_ms", "between_tokens_ms")
                figure = Figure((9.0 + i, 10.0 + i, 11.0 + i), 0.05, 6)
                place.figures = dict.fromkeys((*names, "round_ms"), figure)
                if i:
                    place.figures["acceptance_length"] = figure
                    place.reach = [1.0, 0.7, 0.4]
                if split:
                    place.parts = {"target forward": 0.8, "scheduler": 0.2}
                found.append(place)
    return found


def words(path):
    """The texts of an SVG, where they are kept as text."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())


def test_every_plot_in_both_formats(tmp_path):
    plan = plan_of(("maths", "code", "chat", "json"), (1, 4))
    written = plots.draw(plan, places(plan), tmp_path / "plots")
    assert sorted(path.name for path in written) == sorted(
        f"{name}{end}" for name in plots.PLOTS for end in (".png", ".svg")
    )
    for path in written:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    speed = words(tmp_path / "plots" / "speed.svg")
    assert {"maths", "code", "chat", "json", "plain", "DFLASH", "DFLASH2 16", "1", "4"} <= set(
        speed
    )
    assert "plain" not in words(tmp_path / "plots" / "ratio.svg")  # it is the line at 1
    assert "scheduler" in words(tmp_path / "plots" / "round.svg")


def test_a_round_that_was_not_split(tmp_path):
    plan = plan_of(("maths",), (1,))
    plots.draw(plan, places(plan, split=False), tmp_path)
    found = words(tmp_path / "round.svg")
    assert "scheduler" not in found and {"plain", "DFLASH2 8", "10", "12"} <= set(found)


def test_what_was_not_measured_is_not_drawn(tmp_path):
    plan = plan_of(("maths",), (1,))
    bare = Place("maths", 1, "plain", {"tokens_per_second": Figure((10.0,))})
    written = plots.draw(plan, [bare], tmp_path)
    assert [path.name for path in written] == ["speed.png", "speed.svg"]
    assert plots.draw(plan, [], tmp_path) == []


def test_the_same_figures_give_the_same_file(tmp_path, monkeypatch):
    few = {name: plots.PLOTS[name] for name in ("speed", "round")}
    monkeypatch.setattr(plots, "PLOTS", few)
    plan = plan_of(("maths",), (1, 4))
    for name in ("a", "b"):
        plots.draw(plan, places(plan), tmp_path / name)
    for file in ("speed.svg", "round.svg"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_configurations_look_different():
    many = tuple(Config(f"DFLASH2 {n}", (ALGORITHM, "DFLASH2")) for n in (4, 8, 12, 16, 24, 32))
    plan = Plan((*CONFIGS[:2], *many), (), (1,), 1, True, False, {})
    looks = [style.look(plan, config.name) for config in plan.configs]
    assert len(set(looks)) == len({colour for colour, _ in looks}) == 8
    assert {marker for _, marker in looks} == set(style.MARKERS)
    # The others keep theirs where the chain is left out.
    fewer = Plan((CONFIGS[0], *many), (), (1,), 1, True, False, {})
    assert [style.look(fewer, config.name) for config in fewer.configs] == [looks[0], *looks[2:]]


def test_missing_matplotlib_is_said_before_measuring(monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"pip install 'dflash2-sglang\[bench\]'"):
        plots.check()
