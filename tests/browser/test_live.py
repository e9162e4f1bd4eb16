"""Pages that stay open: they follow what happens, and say so when they cannot; keys, themes, daemons that are gone."""

from __future__ import annotations

import signal
from pathlib import Path

from playwright.sync_api import Browser, expect
from tests.browser.deployment import Deployment, report_query
from tests.browser.visitor import Visitor
from tests.integration.daemons import Daemons, running_cluster, wait_until


def test_a_page_follows_what_happens(visitor: Visitor, deployment: Deployment):
    nsqd = deployment.nsqds[0]
    nsqd.publish("growing", b"one")
    wait_until(lambda: deployment.nsqlookupd.producers("growing"), "nsqlookupd knows it")
    page = visitor.open("/topics?text=growing&sort=-waiting")
    row = page.locator("tbody tr", has_text="growing")
    expect(row.locator("td").nth(1)).to_have_text("1")
    nsqd.publish("growing", b"two", b"three")
    expect(row.locator("td").nth(1)).to_have_text("3")
    assert "text=growing" in page.url and "sort=-waiting" in page.url


def test_a_spark_query_is_a_consumer_with_its_lag(visitor: Visitor, deployment: Deployment):
    nsqd = deployment.nsqds[0]
    nsqd.publish("read.by.spark", b"one", b"two")
    wait_until(lambda: deployment.nsqlookupd.producers("read.by.spark"), "nsqlookupd knows it")
    report_query(deployment.nsqadmin, nsqd, "read.by.spark", "to the lake", read=3, state="stopped")
    page = visitor.open("/topics/read.by.spark")
    row = page.locator("#queries tbody tr")
    for text in ("to the lake", "stopped", "0: 3 of 3", "7 "):
        expect(row).to_contain_text(text)
    expect(row.locator("td").nth(2)).to_have_text("0")
    nsqd.publish("read.by.spark", b"three", b"four")  # it is stopped, and nobody reports this
    expect(row.locator("td").nth(2)).to_have_text("2")
    expect(row).to_contain_text("0: 3 of 5")
    page = visitor.open("/")
    expect(page.locator("#behind tr", has_text="to the lake")).to_contain_text("read.by.spark")
    report_query(deployment.nsqadmin, nsqd, "read.by.spark", "to the lake", read=3, state="failed")
    page = visitor.open("/problems")
    expect(page.get_by_text("it has failed: no space left on device")).to_have_count(1)
    page = visitor.open("/topics/read.by.spark")
    page.get_by_role("button", name="Forget").click()
    expect(page.locator("#told-notes .alert-success")).to_contain_text("forgot Spark query")
    expect(page.locator("#queries")).to_have_count(0)


def test_a_paused_page_stays_as_it_is(visitor: Visitor, deployment: Deployment):
    page = visitor.open("/topics")
    live = page.locator("#live")
    expect(live).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("l")
    expect(live).to_have_attribute("aria-pressed", "false")
    expect(live).to_have_text("Paused")
    page.reload()
    expect(live).to_have_attribute("aria-pressed", "false")  # kept
    page.evaluate("window.asked = 0; document.addEventListener('htmx:before:request', () => window.asked++)")
    page.keyboard.press("r")
    page.wait_for_function("window.asked === 1")  # asked for by hand


def test_what_is_being_typed_is_kept(visitor: Visitor):
    page = visitor.open("/topics/orders")
    field = page.get_by_label("Name of a new channel")
    field.fill("half a na")
    page.evaluate(
        """() => new Promise(done => {
            document.addEventListener("refreshed", () => done(), {once: true});
            document.getElementById("main").dispatchEvent(new CustomEvent("refresh"));
        })"""
    )
    expect(field).to_have_value("half a na")
    expect(field).to_be_focused()


def test_the_theme_is_chosen_and_kept(visitor: Visitor):
    visitor.look("light")
    page = visitor.open("/topics")

    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = background()
    visitor.look("dark")
    dark = background()
    assert light != dark  # as the system has it
    page.keyboard.press("d")
    expect(page.locator("#theme")).to_have_text("Theme: Light")
    assert background() == light
    page.reload()
    assert background() == light
    page.keyboard.press("d")
    expect(page.locator("#theme")).to_have_text("Theme: Dark")
    visitor.look("light")
    assert background() == dark


def test_everything_by_keyboard(visitor: Visitor):
    page = visitor.open("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("g")
    page.keyboard.press("t")
    expect(page.locator("h1")).to_have_text("Topics")
    page.keyboard.press("f")
    page.keyboard.type("orders")
    page.keyboard.press("Enter")
    expect(page.locator("table.rows tbody tr")).to_have_count(1)
    page.keyboard.press("j")
    expect(page.get_by_role("link", name="orders", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("orders")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.get_by_role("link", name="mail", exact=True)).to_be_focused()
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("archive")
    page.keyboard.press("/")
    page.keyboard.type("orders/mail")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("mail")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    assert visitor.violations() == []
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()


def test_the_finder_takes_ids(visitor: Visitor, deployment: Deployment):
    page = visitor.open("/")
    page.keyboard.press("/")
    page.keyboard.type(deployment.traced_id)
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Find a message")
    assert page.input_value("#value") == deployment.traced_id
    page.fill("#topic", "invoices")
    page.get_by_role("button", name="Find", exact=True).click()
    expect(page.locator("article")).to_have_count(1)
    expect(page.locator(".life li").first).to_be_visible()
    assert page.locator(".life li").count() >= 3  # published, delivered, finished


def test_a_node_that_hangs_is_named_and_the_rest_stays(browser: Browser, tmp_path: Path):
    daemons = Daemons(tmp_path)
    try:
        nsqds = [daemons.nsqd("--durability=os") for _ in range(2)]
        for nsqd in nsqds:
            nsqd.publish("orders", b"body")
            nsqd.post("/channel/create?topic=orders&channel=c")
        addresses = [f"127.0.0.1:{nsqd.http[1]}" for nsqd in nsqds]
        nsqadmin = daemons.nsqadmin(*(f"--nsqd-http-address={address}" for address in addresses))
        visitor = Visitor(browser, nsqadmin.url)
        page = visitor.open("/topics")
        expect(page.locator("#missing")).to_have_count(0)  # also where one of them was late
        nsqds[1].send_signal(signal.SIGSTOP)
        expect(page.locator("#missing")).to_contain_text(addresses[1])  # the open page says so by itself
        for path in ("/topics", "/topics/orders", "/nodes", "/counter"):
            page = visitor.open(path)
            expect(page.locator("#missing")).to_contain_text(addresses[1])
            assert page.get_by_text(addresses[0]).count() or page.get_by_text("orders").count()
        page = visitor.open(f"/nodes/{addresses[1]}")
        expect(page.get_by_text("This node does not answer")).to_have_count(1)
        page = visitor.open("/topics")
        nsqds[1].send_signal(signal.SIGCONT)
        expect(page.locator("#missing")).to_have_count(0)
        nsqadmin.stop()
        page.keyboard.press("r")
        expect(page.locator("#live")).to_have_text("No answer")
        expect(page.get_by_role("link", name="orders", exact=True)).to_have_count(1)  # what was there stays
        away = ("ERR_CONNECTION_REFUSED", "Failed to fetch")
        visitor.complaints = [each for each in visitor.complaints if not any(word in each for word in away)]
        visitor.leave()
    finally:
        daemons.close()


def test_a_failover_is_watched(browser: Browser, tmp_path: Path):
    (tmp_path / "cluster").mkdir()
    with running_cluster(tmp_path / "cluster") as cluster:
        cluster.create("orders", 1, 3)
        cluster.wait_in_sync("orders", 3)
        admin = Daemons(tmp_path)
        try:
            nsqadmin = admin.nsqadmin(f"--lookupd-http-address=127.0.0.1:{cluster.nsqlookupd.http[1]}")
            visitor = Visitor(browser, nsqadmin.url)
            page = visitor.open("/cluster")
            expect(page.get_by_text("lives", exact=True)).to_have_count(3)
            page = visitor.open("/topics/orders")
            leader = cluster.leader("orders")
            (row,) = visitor.table("Partitions")
            assert row["Leader"].endswith(f":{leader.tcp[1]}") and row["Leader"] in row["In sync"]
            assert row["In sync"].startswith("3 of 3")
            leader.kill()
            successor = cluster.leader("orders", but=leader)
            cell = page.get_by_role("region", name="Partitions").locator("tbody td").nth(1)
            expect(cell).to_contain_text(f":{successor.tcp[1]}")  # nobody touched the page
            assert str(cell.locator("a").get_attribute("href")).endswith(f"{successor.http[1]}"), "to its page"
            assert int(visitor.table("Partitions")[0]["Epoch"]) > int(row["Epoch"])
            page = visitor.open("/cluster")
            expect(page.get_by_text("lives", exact=True)).to_have_count(2)
            expect(page.get_by_role("region", name="Partitions in trouble")).to_contain_text("2 of 3")
            assert visitor.violations() == []
            visitor.leave()
        finally:
            admin.close()


def test_charts_are_drawn(visitor: Visitor, deployment: Deployment):
    name = "channel&name=orders/mail&span_s=900"

    def is_recorded() -> bool:
        depth = deployment.nsqadmin.get(f"/api/v2/history?series={name}")["depth"]
        return any(value is not None for value in depth)

    wait_until(is_recorded, "there is some history")
    page = visitor.open("/topics/orders/mail")
    expect(page.locator(".chart canvas")).to_have_count(page.locator(".chart").count())
    assert page.locator(".chart canvas").count() >= 1 and page.locator(".chart svg").count() == 0
    expect(page.get_by_text("None yet: nothing was finished")).to_have_count(1)
    page.get_by_role("link", name="hour", exact=True).click()
    assert "span=3600" in page.url
    expect(page.locator(".chart canvas").first).to_be_visible()
    assert visitor.violations() == []
