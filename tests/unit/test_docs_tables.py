"""What the pages say of the code is what the code says: features, flags, messages, metrics."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from doc_messages import CHECKPOINTS, LAUNCHES, message

from dflash2_sglang.features import FEATURES, Feature, tree_backends

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])
# Of other programs than SGLang and ours.
FOREIGN = {"--check", "--strict", "--no-install-recommends"}
FOREIGN |= {"--chain"}  # of launch/compare.py, which is gone: benchmarks.md says of which revision


def test_the_compatibility_page_is_up_to_date() -> None:
    path = DOCS / "site" / "compatibility.py"
    spec = importlib.util.spec_from_file_location("compatibility_page", path)
    assert spec is not None and spec.loader is not None
    writer: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    assert writer.PAGE.read_text() == writer.render(), "run docs/site/compatibility.py"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_what_is_supported_is_shown_by_a_test(feature: Feature) -> None:
    assert bool(feature.tests) == (feature.status == "supported")
    for test in feature.tests:
        file, _, function = test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function.startswith("test_")


def test_no_feature_is_named_twice() -> None:
    names = [feature.name for feature in FEATURES]
    assert len(names) == len(set(names))


def test_tree_backends_are_those_that_are_not_refused() -> None:
    assert {"triton", "dflash2_cpu"} <= set(tree_backends())
    assert "torch_native" not in tree_backends()


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Flags of SGLang's launcher, of our commands, and of the scripts in launch/ and tests/."""
    from sglang.srt.server_args import ServerArgs

    from dflash2_sglang.cli.main import build_parser

    stock = argparse.ArgumentParser()
    ServerArgs.add_cli_args(stock)
    parsers = [stock, build_parser()]
    for action in parsers[1]._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers += action.choices.values()  # the commands
    flags = {flag for parser in parsers for a in parser._actions for flag in a.option_strings}
    for script in (*(ROOT / "launch").rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        flags |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', script.read_text()))
    return flags | FOREIGN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path, known: set[str]) -> None:
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w*-])", text))
    assert sorted(named - known) == []


def test_flags_of_features_exist(known: set[str]) -> None:
    assert sorted({flag for feature in FEATURES for flag in feature.flags} - known) == []


@pytest.mark.parametrize(
    ("page", "mistake"),
    [("checkpoints.md", name) for name in CHECKPOINTS]
    + [("troubleshooting.md", name) for name in LAUNCHES],
)
def test_messages_are_quoted(page: str, mistake: str) -> None:
    said = message({**CHECKPOINTS, **LAUNCHES}[mistake])
    assert f"| {mistake} | {said} |" in (DOCS / page).read_text()


@pytest.mark.parametrize("page", ["tuning.md", "troubleshooting.md"])
def test_metrics_exist(page: str) -> None:
    from dflash2_sglang.metrics import BY_DEPTH, COUNTERS, SECONDS

    counters = {f"{name}_total" for name in (*COUNTERS, BY_DEPTH, SECONDS)}
    named = set(re.findall(r"\b(?:dflash2_)?([a-z_]+_total)\b", (DOCS / page).read_text()))
    assert named
    assert {name.removeprefix("dflash2_") for name in named} <= counters
