"""The pages by the keyboard alone: everything is reached with Tab and seen to be, and nothing is a trap."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect
from tests.browser.deployment import Deployment
from tests.browser.test_acts import nodes_of, told
from tests.browser.visitor import Visitor
from tests.integration.daemons import wait_until

TABS_MAX = 200
HERE = """() => {
    const at = document.activeElement, style = getComputedStyle(at), place = at.getBoundingClientRect();
    const word = at.getAttribute('aria-label') ?? at.labels?.[0]?.textContent ?? at.textContent;
    return {
        tag: at.tagName, id: at.id, word: word.replaceAll(/\\s+/g, ' ').trim(),
        isSeen: at.tagName === 'BODY' || (place.width > 0 && place.height > 0 && place.bottom > 0
            && place.top < innerHeight && (style.outlineStyle !== 'none' || style.boxShadow !== 'none'))
    };
}"""
REFRESH = """() => new Promise(done => {
    document.addEventListener("refreshed", () => done(), {once: true});
    document.getElementById("main").dispatchEvent(new CustomEvent("refresh"));
})"""


def tab_to(page: Page, word: str, key: str = "Tab") -> None:
    """Press Tab until what is called so has the focus; it is seen at every step."""
    for _ in range(TABS_MAX):
        page.keyboard.press(key)
        here = page.evaluate(HERE)
        assert here["isSeen"], f"nobody sees that {here} has the focus"
        if here["word"] == word:
            return
    raise AssertionError(f"{TABS_MAX} steps on {page.url} do not lead to {word!r}")


def press(page: Page, word: str) -> None:
    """Go to a button or a link, and press it."""
    tab_to(page, word)
    with page.expect_navigation():
        page.keyboard.press("Enter")


def confirm(page: Page, name: str, button: str) -> None:
    """Type the name that a page asks for, and go on."""
    for _ in range(TABS_MAX):
        if page.evaluate("document.activeElement.id") == "confirm":
            break
        page.keyboard.press("Tab")
    page.keyboard.type(name)
    press(page, button)


@pytest.mark.slow
def test_every_change(visitor: Visitor, deployment: Deployment):
    page = visitor.open("/topics")
    press(page, "New topic")
    tab_to(page, "Name")
    page.keyboard.type("by.keyboard")
    tab_to(page, "First channel")
    page.keyboard.type("c")
    tab_to(page, "Partitions")
    page.keyboard.press("ArrowUp")
    tab_to(page, "Messages may carry headers (for good)")
    page.keyboard.press("Space")
    press(page, "Create topic")
    assert "created by.keyboard/c" in told(visitor)
    topic = "by.keyboard"
    wait_until(lambda: nodes_of(deployment, topic) >= 1, "nsqadmin knows a node that has it")
    for word in ("Pause", "Unpause"):
        press(page, word)
        assert f"{word.lower()}d topic {topic}" in told(visitor)
    visitor.open(f"/topics/{topic}/c")
    press(page, "Peek")
    expect(page.locator("h1")).to_have_text("Peek into c")
    press(page, "Deferred")
    expect(page.get_by_role("link", name="Deferred", exact=True)).to_have_attribute("aria-current", "true")
    visitor.open(f"/topics/{topic}/c")
    press(page, "Set to a time…")
    tab_to(page, "Go on at")
    page.keyboard.type("end")
    confirm(page, "c", "Set the channel")
    assert f"set channel {topic}/c to end" in told(visitor)
    press(page, "Empty…")
    confirm(page, "c", "Empty the channel")
    assert "emptied channel" in told(visitor)
    press(page, "Delete…")
    press(page, "Cancel")
    expect(page.locator("h1")).to_have_text("c")
    press(page, "Delete…")
    confirm(page, "c", "Delete the channel")
    assert "deleted channel" in told(visitor)
    press(page, "Delete…")
    confirm(page, topic, "Delete the topic")
    assert f"deleted topic {topic}" in told(visitor)
    address = f"127.0.0.1:{deployment.nsqds[1].http[1]}"
    visitor.open(f"/nodes/{address}")
    press(page, "Drain…")
    confirm(page, address, "Drain the node")
    told(visitor)
    press(page, "Stop draining")
    assert "drains no more" in told(visitor)
    visitor.open("/dead-letters/payments")
    expect(page.locator("article")).to_have_count(2)
    press(page, "Requeue")
    assert "requeued" in told(visitor)
    expect(page.locator("article")).to_have_count(1)


@pytest.mark.slow
def test_lists_dialogs_and_refreshing(visitor: Visitor, deployment: Deployment):
    for number in range(60):
        deployment.nsqlookupd.post(f"/topic/create?topic=many.{number:02d}")
    page = visitor.open("/topics")
    tab_to(page, "Waiting")
    page.keyboard.press("Enter")
    page.wait_for_url("**sort=-waiting*")
    visitor.open("/topics?text=many&state=all")
    expect(page.get_by_text("Page 1 of 2")).to_have_count(1)
    press(page, "Next")
    expect(page.get_by_text("Page 2 of 2")).to_have_count(1)
    press(page, "Previous")
    expect(page.get_by_text("Page 1 of 2")).to_have_count(1)
    for number in range(60):
        deployment.nsqlookupd.post(f"/topic/delete?topic=many.{number:02d}")
    # no trap: the last element leads out of the page, forwards and backwards
    visitor.open("/topics/orders")
    steps = 0
    page.keyboard.press("Tab")
    while page.evaluate("document.activeElement.tagName") != "BODY" and steps < TABS_MAX:
        assert page.evaluate(HERE)["isSeen"], page.evaluate(HERE)
        page.keyboard.press("Tab")
        steps += 1
    assert 20 < steps < TABS_MAX
    # what had the focus has it after a dialog, and after the page was put anew
    tab_to(page, "archive")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    for _ in range(4):
        page.keyboard.press("Tab")
        inside = "document.activeElement === document.body || document.activeElement.closest('dialog') !== null"
        assert page.evaluate(inside)
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()
    assert page.evaluate(HERE)["word"] == "archive"
    page.evaluate(REFRESH)
    assert page.evaluate(HERE)["word"] == "archive" and page.evaluate(HERE)["isSeen"]
    page.keyboard.press("?")
    tab_to(page, "Close")
    page.keyboard.press("Enter")
    assert page.evaluate(HERE)["word"] == "archive"
    visitor.look("dark")
    tab_to(page, "Dead letters", "Shift+Tab")  # seen in the dark, too
    tab_to(page, "Theme: System", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#theme")).to_have_text("Theme: Light")
    tab_to(page, "Find a topic, a channel or a message", "Shift+Tab")
    page.keyboard.type("orders/mail")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("mail")
