"""What the tests of the page look at and press, and the document it shows."""

from __future__ import annotations

from typing import Any

from selenium.webdriver.common.action_chains import ActionChains
from tree_rounds import EVIL, answer, whole

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
