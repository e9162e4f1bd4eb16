"""Every page: nothing in the console, nothing from elsewhere, nothing that axe finds, nothing wider than the window."""

from __future__ import annotations

import csv
import html
import io
import re

import pytest
from playwright.sync_api import Browser
from tests.browser.deployment import HOSTILE, LONG, Deployment
from tests.browser.visitor import Visitor

NAMES = (
    "overview", "problems", "topics", "topic", "topic-partitions", "topic-long", "topic-none", "channel",
    "channel-idle", "nodes", "node", "counter", "lookup", "cluster", "peek", "peek-in-flight", "peek-deferred", "find",
    "message", "dead-letters", "dead-letters-topic", "create", "confirm", "confirm-time", "audit", "login",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_sound(visitor: Visitor, deployment: Deployment, name: str):
    path = deployment.paths()[name]
    page = visitor.open(path, 404 if name == "topic-none" else 200)
    assert page.locator("h1").count() == 1
    for theme, is_narrow in (("light", False), ("dark", True)):
        visitor.look(theme, is_narrow)  # type: ignore[arg-type]
        assert visitor.overflow() <= 0, f"{theme}: wider than the window by {visitor.overflow()} pixels"
        assert visitor.spills() == []
        assert visitor.violations() == []
    assert page.locator("img[src=x]").count() == 0


def test_all_pages_are_tried(deployment: Deployment):
    assert set(NAMES) == set(deployment.paths())


def test_every_table_is_exported(deployment: Deployment):
    links = set()
    for name, path in deployment.paths().items():
        page = deployment.nsqadmin.request("GET", path, None, {"Accept": "text/html"}).body.decode()
        found = {html.unescape(link) for link in re.findall(r'href="(/api/v2/[^"]*)"', page)}
        tables = page.count("<table") - 1  # that of the keys
        assert name in ("login", "dead-letters") or tables <= len([link for link in found if "format=csv" in link])
        links |= found
    for link in links:
        answer = deployment.nsqadmin.request("GET", link)
        if "nobody-has-it" in link:
            assert answer.status == 404
            continue
        assert answer.status == 200, (link, answer.body)
        if "format=csv" in link:
            rows = list(csv.reader(io.StringIO(answer.body.decode())))
            assert len({len(row) for row in rows}) <= 1, link
            assert not any(
                cell.startswith(("=", "+", "-", "@")) and not cell[1:2].isdigit() for row in rows for cell in row
            )


def test_words_of_strangers_are_words(visitor: Visitor):
    page = visitor.open("/topics/orders/mail")
    assert HOSTILE in page.inner_text("main")
    page = visitor.open("/peek?topic=orders&channel=archive")
    assert HOSTILE.replace('"', '\\"') in page.locator("pre.body").first.inner_text()
    page = visitor.open(f"/topics?text={LONG[:40]}")
    assert [row["Topic▲"] for row in visitor.table("Topics")] == [LONG]
    for path in ("/topics?text=%22%3E%3Cimg+src%3Dx%3E", "/search?q=%22%3E%3Cimg+src%3Dx%3E"):
        page = visitor.open(path)
        assert page.locator("img[src=x]").count() == 0
        assert page.locator("#filter").input_value() == '"><img src=x>'


def test_reading_needs_no_javascript(browser: Browser, deployment: Deployment):
    visitor = Visitor(browser, deployment.url, has_javascript=False)
    try:
        for name in ("overview", "topics", "topic", "channel", "nodes", "node", "peek", "message", "cluster"):
            page = visitor.open(deployment.paths()[name])
            assert page.locator("h1").inner_text()
        visitor.open("/topics")
        visitor.page.fill("#filter", "orde")
        visitor.page.get_by_role("button", name="Filter").click()
        assert [row["Topic▲"] for row in visitor.table("Topics")] == ["orders"]
        visitor.page.get_by_role("link", name="Waiting").click()
        assert "sort=-waiting" in visitor.page.url and "text=orde" in visitor.page.url
        visitor.page.get_by_role("link", name="orders", exact=True).click()
        assert visitor.table("Channels")[0]["Channel"] == "archive"
    finally:
        visitor.leave()
