"""The page of ``dflash2-sglang tree --html`` in headless Chromium, from file://."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tree_rounds import EVIL, answer, whole

from dflash2_sglang.cli.tree_page import page

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs chromium and chromium-driver, which are not installed"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
DOCUMENT = whole(
    answer("Why?"), answer(f"A second: {EVIL[11]} <img src=x onerror='window.hacked=2'>")
)
# As the page spells them: spaces, line ends and control characters as signs.
SPELT = {
    10: "Once",
    11: "</script><script>window.hacked␣=␣1</script>",
    12: "<!--<script>",
    13: "↵",
    14: "␣of",
    15: "<|end|>",
    21: "␣&amp;\u2028'\"",
    22: "␣22",
    23: "\\x7",
    24: "␣",
    25: "é",
    60: "␣60",
    61: "␣61",
}


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


def look(browser: Any, width: int, scheme: str) -> None:
    scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme_feature]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def find(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements("css selector", selector)


def one(browser: Any, selector: str) -> Any:
    (found,) = find(browser, selector)
    return found


def press(browser: Any, *keys: str) -> None:
    ActionChains(browser).send_keys(*keys).perform()


def position(browser: Any) -> str:
    return one(browser, "#position").text


def expected_nodes(record: dict[str, Any]) -> list[list[Any]]:
    """[class, what it says first] of each node and of the bonus token."""
    nodes = []
    for node, token in enumerate(record["tokens"]):
        kind = "accepted" if node in record["accepted"] else "rejected"
        nodes.append(["root" if node == 0 else kind, f"token {SPELT[token]}, id {token}"])
    bonus = record["bonus"]
    return [
        *nodes,
        ["bonus", f"token {SPELT[bonus]}, id {bonus}, verdict the target\u2019s own token"],
    ]


def drawn_nodes(browser: Any) -> list[list[Any]]:
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('#tree .node')].map(n =>"
        " [Number(n.dataset.node), n.classList[1], n.getAttribute('aria-label')])"
    )
    assert [node for node, _, _ in drawn] == list(range(len(drawn)))
    return [[kind, label] for _, kind, label in drawn]


def check_tree(browser: Any, record: dict[str, Any]) -> None:
    drawn, expected = drawn_nodes(browser), expected_nodes(record)
    assert len(drawn) == len(expected)
    for (kind, label), (kind_expected, start) in zip(drawn, expected, strict=True):
        assert kind == kind_expected and label.startswith(start), (label, start)
    edges = find(browser, "#tree .edge")
    assert len(edges) == len(expected) - 1  # all but the root, with the bonus token's
    hits = [e.text for e in find(browser, "#chain .hit")]
    assert hits == [SPELT[t] for t in record["chain"][: record["chain_hits"]]]
    title = one(browser, "#tree-title").text
    tokens = f"{record['gain']} token{'s' if record['gain'] > 1 else ''}"
    assert title.endswith(f": tree {tokens}, chain {record['chain_gain']}")


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
    press(shown, Keys.ARROW_LEFT)  # the list's own key, as long as it has the focus
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
