"""The documentation builds without a warning, its figures are those of the code, README and index agree."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FIGURES = ("acceptance", "lattice", "round", "tree")

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None,
    reason="mkdocs is not installed (pip install -e '.[docs]'); .ci/run always builds the site",
)


def build(docs: Path) -> subprocess.CompletedProcess[str]:
    """``mkdocs build --strict`` of a copy of the documentation."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    command += ["-f", str(docs / "site" / "mkdocs.yml"), "-d", str(docs.parent / "built")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DOCS, tmp_path / "docs"))


@needs_mkdocs
def test_the_site_builds_and_fetches_nothing(copy: Path) -> None:
    done = build(copy)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = list((copy.parent / "built").glob("*.html"))
    assert {page.stem for page in pages} >= {page.stem for page in DOCS.glob("*.md")}
    fetched = (
        r'<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+rel="stylesheet"[^>]+href="https?:'
    )
    assert [page.name for page in pages if re.search(fetched, page.read_text())] == []


@needs_mkdocs
@pytest.mark.parametrize(
    ("page", "text", "complaint"),
    [
        ("faq.md", "[x](nowhere.md)", "nowhere.md"),
        ("faq.md", "[x](tuning.md#no-such-heading)", "no-such-heading"),
        ("faq.md", "[x](#no-such-heading)", "no-such-heading"),
        ("faq.md", "![x](images/nothing.svg)", "images/nothing.svg"),
        ("unlisted.md", "# Not in the nav", "unlisted.md"),
    ],
)
def test_what_is_broken_fails_the_build(copy: Path, page: str, text: str, complaint: str) -> None:
    with (copy / page).open("a") as file:
        file.write(f"\n{text}\n")
    done = build(copy)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_figures_are_drawn_by_the_code(tmp_path: Path) -> None:
    command = [sys.executable, str(DOCS / "figures" / "draw.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    assert tuple(sorted(file.stem for file in tmp_path.iterdir())) == FIGURES
    for name in FIGURES:
        drawn = (tmp_path / f"{name}.svg").read_bytes()
        assert drawn == (DOCS / "images" / f"{name}.svg").read_bytes(), "run docs/figures/draw.py"


def test_index_and_readme_give_the_same_commands() -> None:
    blocks = [
        re.findall(r"^    python3 -m venv .*$", file.read_text(), re.MULTILINE)
        for file in (ROOT / "README.md", DOCS / "index.md")
    ]
    assert len(blocks[0]) == 2
    assert blocks[0] == blocks[1]


def test_readme_leads_to_what_exists() -> None:
    """Paths of this repository, in code type or as the target of a link."""
    text = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    folders = "dflash2_sglang|docs|launch|patches|tests"
    named = re.findall(rf"[`(]((?:{folders})/[\w./-]*)[`)]", text)
    assert len(named) >= 10
    assert [path for path in named if not (ROOT / path).exists()] == []
