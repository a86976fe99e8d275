"""The page of ``dflash2-sglang tree --html`` in headless Chromium, from file://."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from tree_browser import DOCUMENT, SPELT, check_tree, find, look, one, position, press
from tree_rounds import EVIL, whole

from dflash2_sglang.cli.tree_page import page

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs chromium and chromium-driver, which are not installed"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, Service(DRIVER)) as running:
        yield running


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "tree.html"
    path.write_text(page(DOCUMENT), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def shown(browser: Any, address: str) -> Iterator[Any]:
    """The page, just opened, at a desktop's width in light; it must log nothing."""
    look(browser, 1280, "light")
    browser.get("about:blank")
    browser.get(address)
    browser.get_log("browser")
    yield browser
    assert browser.get_log("browser") == []
    assert browser.execute_script("return window.hacked") is None


def test_keys_step_through_the_rounds(shown: Any) -> None:
    rounds = DOCUMENT["answers"][0]["rounds"]
    for number, record in enumerate(rounds):
        assert position(shown) == f"Round {number + 1} of 3"
        check_tree(shown, record)
        press(shown, Keys.ARROW_RIGHT)
    assert position(shown) == "Round 3 of 3"  # there is no fourth
    press(shown, Keys.ARROW_LEFT)
    assert position(shown) == "Round 2 of 3"
    press(shown, Keys.HOME)
    check_tree(shown, rounds[0])
    press(shown, Keys.ARROW_LEFT)
    assert position(shown) == "Round 1 of 3"
    press(shown, Keys.END)
    check_tree(shown, rounds[2])
    slider = one(shown, "[role=slider]")
    assert slider.get_attribute("aria-valuenow") == "3"
    assert slider.get_attribute("aria-valuetext") == "Round 3 of 3: tree 1 token, chain 1"


def test_mouse_steps_through_the_rounds(shown: Any) -> None:
    rounds = DOCUMENT["answers"][0]["rounds"]
    assert not one(shown, "#back").is_enabled()
    one(shown, "#next").click()
    check_tree(shown, rounds[1])
    one(shown, "#last").click()
    assert not one(shown, "#next").is_enabled() and position(shown) == "Round 3 of 3"
    one(shown, "#first").click()
    check_tree(shown, rounds[0])
    find(shown, ".slot")[1].click()
    check_tree(shown, rounds[1])
    find(shown, "#answer .round")[2].click()
    check_tree(shown, rounds[2])
    assert [e.get_attribute("data-round") for e in find(shown, ".current[data-round]")] == [
        "2",
        "2",
    ]


def test_nodes_tell_of_themselves(shown: Any) -> None:
    """With the keyboard, then with the mouse."""

    def told() -> list[str]:
        return one(shown, "#detail").text.split("\n")

    def has_focus() -> str:
        return shown.execute_script("return document.activeElement.dataset.node")

    press(shown, "t", Keys.ARROW_DOWN)
    assert has_focus() == "1"
    assert told()[:6] == ["token", SPELT[11], "id", "11", "depth", "1"]
    assert told()[6:] == ["path", "60.00%", "step", "60.00%", "verdict", "accepted"]
    press(shown, Keys.ARROW_DOWN)
    assert has_focus() == "3" and "40.00%" in told() and "66.67%" in told()
    press(shown, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert has_focus() == "4" and "not accepted" in told()
    press(shown, Keys.ARROW_RIGHT)  # the next round; the tree keeps the focus
    assert position(shown) == "Round 2 of 3" and has_focus() == "0"
    ActionChains(shown).move_to_element(one(shown, "#tree [data-node='2']")).perform()
    assert told()[:4] == ["token", SPELT[24], "id", "24"] and "drawn at random" in told()
    ActionChains(shown).move_to_element(one(shown, "#tree [data-node='3']")).perform()
    assert "not reached: its parent was not accepted" in told()


@pytest.mark.parametrize("width", [360, 1280])
def test_edges_join_parents_and_children(shown: Any, width: int) -> None:
    """Side by side an edge runs from right to left border; indented it falls from the lower one."""
    look(shown, width, "light")
    shown.refresh()
    for record in DOCUMENT["answers"][0]["rounds"]:
        boxes = shown.execute_script(
            "return [...document.querySelectorAll('#tree .node')].map(n => {"
            " const [x, y] = n.getAttribute('transform').match(/[\\d.]+/g).map(Number);"
            " const box = n.querySelector('.box');"
            " return [x, y, +box.getAttribute('width'), +box.getAttribute('height')]; })"
        )
        ends = shown.execute_script(
            "return [...document.querySelectorAll('#tree .edge')].map(e =>"
            " [0, e.getTotalLength()].map(at => e.getPointAtLength(at)).flatMap(p => [p.x, p.y]))"
        )
        expected = []
        for node, above in enumerate([*record["parent"][1:], record["accepted"][-1]], 1):
            (x, y, wide, high), (u, v, *_) = boxes[above], boxes[node]
            start = (x + 11, y + high) if width == 360 else (x + wide, y + high / 2)
            expected.append((*start, u, v + high / 2))
        for drawn, right in zip(sorted(ends), sorted(expected), strict=True):
            assert drawn == pytest.approx(right, abs=0.01)
        levels = [0, *(box[0] - boxes[0][0] for box in boxes[1:])]
        step = max(levels) / max(*record["depth"], len(record["accepted"]))
        assert levels[:-1] == pytest.approx([depth * step for depth in record["depth"]])
        corners = [tuple(box[:2]) for box in boxes]
        assert len(set(corners)) == len(corners)
        press(shown, Keys.ARROW_RIGHT)


def test_chain_is_marked_as_far_as_the_tree_holds_it(shown: Any) -> None:
    found = []
    for _ in DOCUMENT["answers"][0]["rounds"]:
        marked = find(shown, "#tree .node:has(.on-chain)")
        found.append([node.get_attribute("data-node") for node in marked])
        press(shown, Keys.ARROW_RIGHT)
    assert found == [["1", "3"], [], ["1", "2"]]


def test_probability_is_the_width(shown: Any) -> None:
    widths = shown.execute_script(
        "return [...document.querySelectorAll('#tree .edge.rejected')]"
        ".map(e => Number(e.getAttribute('stroke-width')))"
    )
    assert widths == pytest.approx([1 + 6 * 0.3, 1 + 6 * 0.1 / 0.6], abs=0.006)


def test_answer_is_marked_by_rounds(shown: Any) -> None:
    spans = shown.execute_script(
        "return [...document.querySelectorAll('#answer .token')].map(t =>"
        " [t.classList[1], t.textContent, t.closest('.round')?.dataset.round ?? null])"
    )
    assert [span[0] for span in spans] == [
        "first",
        "accepted",
        "accepted",
        "bonus",
        "bonus",
        "accepted",
    ]
    assert [span[2] for span in spans] == [None, "0", "0", "0", "1", "2"]
    texts = ["Once", SPELT[11], EVIL[12], "↵\n", " of", "<|end|>"]
    assert [span[1] for span in spans] == texts


def test_prompts_can_be_changed(shown: Any) -> None:
    press(shown, Keys.ARROW_RIGHT, "n")
    assert one(shown, "#question").text == DOCUMENT["answers"][1]["prompt"]
    assert position(shown) == "Round 1 of 3"
    press(shown, "n", "p")
    assert one(shown, "#question").text == "Why?"
    one(shown, "#prompt option[value='1']").click()
    assert one(shown, "#question").text == DOCUMENT["answers"][1]["prompt"]
    press(shown, Keys.ARROW_RIGHT)  # the list's own key, as long as it has the focus
    assert position(shown) == "Round 1 of 3"


def test_address_remembers_the_place(shown: Any, address: str) -> None:
    press(shown, "n", Keys.END)
    assert shown.current_url == f"{address}#2.3"
    shown.get("about:blank")
    shown.get(f"{address}#2.2")
    assert position(shown) == "Round 2 of 3" and "second" in one(shown, "#question").text
    shown.get("about:blank")
    shown.get(f"{address}#9.9")
    assert position(shown) == "Round 3 of 3"


def test_help_opens_and_closes(shown: Any) -> None:
    dialog = one(shown, "#help")
    press(shown, "?")
    assert dialog.is_displayed() and "first, last round" in dialog.text
    press(shown, Keys.ARROW_RIGHT)
    assert position(shown) == "Round 1 of 3"
    press(shown, Keys.ESCAPE)
    assert not dialog.is_displayed()
    one(shown, "#help-open").click()
    assert dialog.is_displayed()
    one(shown, "#help form button").click()
    assert not dialog.is_displayed()


def test_charts_show_the_figures(shown: Any) -> None:
    figures = DOCUMENT["statistics"]
    assert len(find(shown, "#calibration .dot")) == len(figures["paths"]) == 5
    label = one(shown, "#calibration svg").get_attribute("aria-label")
    assert "predicted 35.0%, accepted 50.0% of 4" in label
    dots = shown.execute_script(
        "return [...document.querySelectorAll('#calibration .dot')].map(d => Number(d.getAttribute('cy')))"
    )
    bottom, top = dots[0], dots[-1]  # 0 % and 100 % were accepted
    shares = [(bottom - dot) / (bottom - top) for dot in dots]
    assert shares == pytest.approx([b["share"] for b in figures["paths"]])
    one(shown, "#calibration input[value=edges]").click()
    assert len(find(shown, "#calibration .dot")) == len(figures["edges"])
    rows = shown.execute_script(
        "return [...document.querySelectorAll('#recall tbody tr')]"
        ".map(r => [...r.cells].map(c => c.textContent))"
    )
    assert rows[0] == ["1", "6", "66.7%", "66.7%", "100.0%", "66.7%"]
    assert rows[2] == ["3", "2", "0.0%", "0.0%", "0.0%", "0.0%"]
    heights = shown.execute_script(
        "return [...document.querySelectorAll('#recall circle.candidates')].slice(0, 3)"
        ".map(c => Number(c.getAttribute('cy')))"
    )
    assert heights[1] < heights[0] < heights[2]  # 100 %, 67 % and 0 %
    assert "expected 6 of its nodes to be accepted; 6 were" in one(shown, "#verdict").text


@pytest.mark.parametrize("width", [360, 700, 1600])
def test_nothing_sticks_out(shown: Any, width: int) -> None:
    look(shown, width, "light")
    shown.refresh()
    extent = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert shown.execute_script(f"return {extent}") <= 0
    check_tree(shown, DOCUMENT["answers"][0]["rounds"][0])
    tree = one(shown, "#tree svg").size["width"]
    assert width > 360 or tree <= one(shown, "#tree").size["width"]


def test_dark_is_dark(shown: Any) -> None:
    def brightness() -> list[int]:
        colour = one(shown, "body").value_of_css_property("background-color")
        return [int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]

    assert min(brightness()) > 200
    look(shown, 1280, "dark")
    assert max(brightness()) < 60


def test_page_of_an_answer_without_rounds(browser: Any, tmp_path: Path) -> None:
    from dflash2_sglang.cli.tree_trace import Answer

    path = tmp_path / "short.html"
    path.write_text(page(whole(Answer("?", 3, [10], "length", []))), encoding="utf-8")
    look(browser, 1280, "light")
    browser.get(path.as_uri())
    press(browser, Keys.ARROW_RIGHT, Keys.END, "t", "n")
    assert position(browser) == "No rounds" and one(browser, "#answer").text == "Once"
    assert one(browser, "#tree-title").text == "The answer ended before a round."
    assert browser.get_log("browser") == []
