"""The cluster from its pages: elections with their reasons, and every order that an operator can give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from tests.browser.test_acts import told
from tests.browser.visitor import Visitor
from tests.integration.daemons import Cluster, Daemons, Nsqadmin, running_cluster, wait_until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes, one of which has no copy of orders."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.create("orders", 1, 2)
        cluster.wait_in_sync("orders", 2)
        yield cluster


@pytest.fixture(scope="module")
def nsqadmin(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqadmin]:
    """An nsqadmin that looks at it."""
    daemons = Daemons(tmp_path_factory.mktemp("nsqadmin"))
    try:
        history = tmp_path_factory.mktemp("history") / "history.db"
        lookupd = f"--lookupd-http-address=127.0.0.1:{cluster.nsqlookupd.http[1]}"
        yield daemons.nsqadmin(lookupd, f"--history-path={history}", f"--audit-log={history.with_name('audit.log')}")
    finally:
        daemons.close()


@pytest.fixture
def visitor(browser: Browser, nsqadmin: Nsqadmin) -> Iterator[Visitor]:
    """Somebody at its pages."""
    visitor = Visitor(browser, nsqadmin.url)
    yield visitor
    visitor.leave()


def partition_of(cluster: Cluster) -> dict[str, Any]:
    """The partition of orders, with nodes by ``host:tcp_port``."""
    status = cluster.nsqlookupd.get("/cluster/status?topic=orders")
    names = {node["node"]: f"{node['host']}:{node['tcp_port']}" for node in status["nodes"]}
    (row,) = status["topics"][0]["partitions"]
    words = ("replicas", "in_sync", "leaving")
    return {**row, **{word: sorted(names[node] for node in row[word] if node in names) for word in words}}


def comes_to(visitor: Visitor) -> str:
    """Ask what an order comes to; return it."""
    visitor.page.get_by_role("button", name="See what it comes to").click()
    visitor.page.wait_for_load_state()
    stake = visitor.page.locator("#stake")
    return stake.inner_text().replace("\xa0", " ") if stake.count() else ""


def addresses(cluster: Cluster) -> list[str]:
    return sorted(f"127.0.0.1:{node.tcp[1]}" for node in cluster.nodes)


def test_copies_are_moved_made_and_taken_away(visitor: Visitor, cluster: Cluster):
    before = partition_of(cluster)["replicas"]
    (free,) = set(addresses(cluster)) - set(before)
    page = visitor.open("/topics/orders")
    page.locator("#partitions").get_by_role("link", name="Move…").click()
    assert visitor.violations() == []
    leader = cluster.leader("orders")
    shown = page.locator(".headers").inner_text().replace("\xa0", " ")
    assert "2 copies now" in shown and f"127.0.0.1:{leader.tcp[1]} leads" in shown, shown
    assert sorted(page.locator("#source option").all_inner_texts()[1:]) == before
    assert page.locator("#target option").all_inner_texts()[1:] == [free], "none that has a copy already"
    move = f"{page.url.removeprefix(visitor.url)}&plan=1&source={before[0]}&target="
    page = visitor.open(f"{move}{before[1]}", 400)
    expect(page.get_by_role("alert")).to_contain_text("has a copy of partition orders/0 already")
    assert page.input_value("#source") == before[0]
    page.select_option("#target", free)
    stake = comes_to(visitor)
    assert f"Partition orders/0 is to go from node {before[0]} to node {free}" in stake
    assert "1 copy in all" in stake and "B to copy" in stake
    (copy,) = visitor.table("Copies")
    assert (copy["Partition"], copy["From"], copy["To"]) == ("orders 0", before[0], free)
    assert visitor.violations() == []
    other = Visitor(visitor.browser, visitor.url)  # with the same in mind, and the page from before
    other.open(page.url.removeprefix(visitor.url))
    page.get_by_role("button", name="Move the copy").click()
    assert f"from {before[0]} to {free}" in told(visitor)
    other.page.get_by_role("button", name="Move the copy").click()
    expect(other.page.get_by_role("alert")).to_contain_text("nothing was done: ")
    other.complaints = [each for each in other.complaints if "status of 400" not in each]
    other.leave()
    wanted = sorted({free, before[1]})
    wait_until(lambda: partition_of(cluster)["in_sync"] == wanted and not partition_of(cluster)["leaving"], "moved")

    page = visitor.open("/topics/orders")
    expect(page.locator("#partitions")).to_contain_text("2 copies of each, 1 has to confirm")
    page.get_by_role("link", name="Change…").click()
    page.fill("#replicas", "3")
    page.fill("#min_in_sync", "2")
    page.fill("#retention_days", "5")
    stake = comes_to(visitor)
    assert "Topic orders is changed to version" in stake
    assert "an OK needs 2 of 3 copies in sync, instead of 1" in stake
    assert [(copy["To"], copy["Partition"]) for copy in visitor.table("Copies")] == [(before[0], "orders 0")]
    page.get_by_role("link", name="Other figures").click()
    assert page.input_value("#retention_days") == "5"
    comes_to(visitor)
    page.fill("#confirm", "orders")
    page.get_by_role("button", name="Change the topic").click()
    assert "3 copies, 2 copies that confirm, 5 days; an OK needs 2 of 3 copies in sync" in told(visitor)
    expect(page.locator("#partitions")).to_contain_text("3 copies of each, 2 have to confirm")
    wait_until(lambda: partition_of(cluster)["in_sync"] == addresses(cluster), "the third copy is made")
    (topic,) = cluster.nsqlookupd.get("/cluster/status?topic=orders")["topics"]
    assert (topic["replicator"], topic["min_in_sync"]) == (3, 2)
    rows = cluster.leader("orders").get("/stats?format=json&topic=orders")["topics"]
    assert rows[0]["retention_days"] == 5


def test_partitions_are_added_once(visitor: Visitor, cluster: Cluster):
    cluster.create("narrow", 1, 1)
    page = visitor.open("/topics/narrow")
    page.get_by_role("link", name="More partitions…").click()
    page.fill("#partitions", "3")
    stake = comes_to(visitor)
    assert "Topic narrow is given 3 partitions" in stake and "2 copies in all, 0 B to copy" in stake
    assert [row["From"] for row in visitor.table("Copies")] == ["new", "new"]
    cluster.expand("narrow", 3)  # somebody else was quicker
    page.fill("#confirm", "narrow")
    page.get_by_role("button", name="Make more partitions").click()
    assert "nothing was to be done, it was so already" in told(visitor)
    page = visitor.open("/confirm/expand_topic?topic=narrow&partitions=3&plan=1")
    expect(page.locator("#stake")).to_contain_text("It is so already: nothing would be done.")
    page = visitor.open("/confirm/expand_topic?topic=narrow&partitions=2&plan=1", 400)
    expect(page.get_by_role("alert")).to_contain_text("partitions cannot be taken away")
    visitor.complaints = [each for each in visitor.complaints if "status of 400" not in each]
    cluster.nsqlookupd.post("/topic/delete?topic=narrow&partition=**")
    wait_until(lambda: len(cluster.nsqlookupd.get("/cluster/status")["topics"]) == 1, "only orders is left")


def test_balancing_is_switched(visitor: Visitor, cluster: Cluster):
    page = visitor.open("/cluster")
    for button, state, text in (
        ("Stop balancing", False, "nothing is spread"),
        ("Balance", True, "leaders and copies"),
    ):
        page.get_by_role("button", name=button, exact=True).click()
        told(visitor)
        expect(page.locator("#nodes .card-header")).to_contain_text(text)
        assert cluster.nsqlookupd.get("/cluster/status")["settings"].get("balances", True) is state


def test_a_node_is_drained_and_an_election_says_why(visitor: Visitor, cluster: Cluster, nsqadmin: Nsqadmin):
    leader = cluster.leader("orders")
    name = f"127.0.0.1:{leader.tcp[1]}"
    page = visitor.open("/cluster")
    row = page.locator("#nodes tbody tr", has_text=name)
    row.get_by_role("link", name="Drain…").click()
    expect(page.get_by_role("alert")).to_contain_text("that can go nowhere: replicator=3")  # as the dry run says
    visitor.complaints = [each for each in visitor.complaints if "status of 400" not in each]
    cluster.nsqlookupd.post("/topic/meta/update?topic=orders&replicator=2&min_in_sync=1")
    wait_until(lambda: len(partition_of(cluster)["replicas"]) == 2, "two copies are wanted")
    wait_until(lambda: not cluster.nsqlookupd.get("/cluster/moves")["moves"], "and there are no more")
    leader = cluster.leader("orders")
    name = f"127.0.0.1:{leader.tcp[1]}"
    page = visitor.open("/cluster")
    row = page.locator("#nodes tbody tr", has_text=name)
    row.get_by_role("link", name="Drain…").click()
    assert "1 copy in all" in page.locator("#stake").inner_text().replace("\xa0", " ")
    assert visitor.table("Copies")[0]["From"] == name
    page.fill("#confirm", "127.0.0.1")
    page.get_by_role("button", name="Drain the node").click()
    expect(page.get_by_role("alert")).to_contain_text("type the name of the node")
    visitor.complaints = [each for each in visitor.complaints if "status of 400" not in each]
    page.fill("#confirm", name)
    page.get_by_role("button", name="Drain the node").click()
    told(visitor)
    expect(row).to_contain_text("drains")
    row.get_by_role("button", name="Stop draining").click()
    told(visitor)
    expect(row).to_contain_text("lives")
    wait_until(lambda: not cluster.nsqlookupd.get("/cluster/moves")["moves"], "what had begun is done")
    leader = cluster.leader("orders")
    name = f"127.0.0.1:{leader.tcp[1]}"
    leader.kill()
    successor = cluster.leader("orders", but=leader)
    lost = re.compile("does not listen|is gone")
    line = page.locator("#elections tbody tr", has_text=lost).filter(has_text=f"127.0.0.1:{successor.tcp[1]}")
    expect(line.filter(has_text=name).first).to_be_visible()  # the open page says so by itself
    found = next(row for row in visitor.table("Elections") if row["From"] == name and lost.search(row["Why"]))
    assert found["Partition"] == "orders 0" and int(found["Epoch"]) > 1
    assert visitor.violations() == [] and visitor.overflow() <= 0
    page.goto("about:blank")
    nsqadmin.stop()
    cluster.nsqlookupd.restart()  # it forgets them
    nsqadmin.start()
    wait_until(lambda: cluster.nsqlookupd.get("/cluster/status")["master"], "there is a master again")
    remembered = {str(each["epoch"]) for each in cluster.nsqlookupd.get("/cluster/elections")["elections"]}
    assert found["Epoch"] not in remembered
    visitor.open("/cluster")
    assert found in visitor.table("Elections")
    away = page.locator("#nodes tbody tr", has_text="is away")
    node = away.locator("td").first.inner_text().split()[0]
    away.get_by_role("link", name="Remove…").click()
    assert name in page.locator("#stake").inner_text()  # as it was called
    page.fill("#confirm", node)
    page.get_by_role("button", name="Remove the node").click()
    told(visitor)
    visitor.open("/audit")
    changes = [row["Change"] for row in visitor.table("Changes")]
    assert {"drain member", "stop drain member", "remove member", "move partition", "set balance"} <= set(changes)
