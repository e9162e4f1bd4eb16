"""Two people at the same thing: what the second is told when it has changed since their page was drawn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect
from tests.browser.deployment import Deployment
from tests.browser.test_acts import nodes_of, told
from tests.browser.visitor import Visitor
from tests.integration.daemons import wait_until


@pytest.fixture
def second(visitor: Visitor) -> Iterator[Visitor]:
    """Somebody else, with a browser of their own."""
    second = Visitor(visitor.browser, visitor.url)
    yield second
    second.complaints = [each for each in second.complaints if "status of 40" not in each]
    second.leave()


def make(deployment: Deployment, topic: str, *bodies: bytes) -> str:
    """A topic on both nodes with the channel c, and these messages on the first."""
    for nsqd in deployment.nsqds:
        nsqd.post(f"/topic/create?topic={topic}")
        nsqd.post(f"/channel/create?topic={topic}&channel=c")
    if bodies:
        deployment.nsqds[0].publish(topic, *bodies)
    wait_until(lambda: nodes_of(deployment, topic) == 2, "nsqadmin knows both nodes that have it")
    return topic


def stay(visitor: Visitor, topic: str) -> None:
    """Open a topic's page; it and all that this visitor opens later stay as they were drawn."""
    visitor.open(f"/topics/{topic}")
    visitor.page.keyboard.press("l")
    expect(visitor.page.locator("#live-text")).to_have_text("Paused")


def confirm(visitor: Visitor, name: str) -> None:
    visitor.page.fill("#confirm", name)
    visitor.page.locator("button.btn-danger").click()


def test_what_was_paused_or_made_already(visitor: Visitor, second: Visitor, deployment: Deployment):
    topic = make(deployment, "both.pause")
    stay(second, topic)
    for path, name in ((f"/topics/{topic}", topic), (f"/topics/{topic}/c", f"{topic}/c")):
        for word, state in (("Pause", "was paused already"), ("Unpause", "was not paused")):
            for each in (visitor, second):
                each.open(path)
            visitor.page.get_by_role("button", name=word, exact=True).click()
            assert f"{word.lower()}d" in told(visitor)
            second.page.get_by_role("button", name=word, exact=True).click()
            assert f"nothing has changed: {name} {state}" in told(second)
    for each in (visitor, second):
        each.open("/create")
        each.page.fill("#topic", "both.make")
    visitor.page.get_by_role("button", name="Create topic").click()
    assert "created both.make" in told(visitor)
    second.page.get_by_role("button", name="Create topic").click()
    assert "there was a topic both.make already" in told(second)


def test_what_was_deleted_meanwhile(visitor: Visitor, second: Visitor, deployment: Deployment):
    topic = make(deployment, "both.delete")
    second.open(f"/topics/{topic}/c")
    visitor.open(f"/confirm/delete_channel?topic={topic}&channel=c")
    confirm(visitor, "c")
    told(visitor)
    expect(second.page.locator("main")).to_contain_text("No node has this channel")  # the open page says so by itself
    assert second.page.locator("#live-text").inner_text() == "Live"
    second.open(f"/confirm/delete_topic?topic={topic}")
    third = Visitor(second.browser, second.url)
    stay(third, topic)
    visitor.open(f"/confirm/delete_topic?topic={topic}")
    confirm(visitor, topic)
    told(visitor)
    confirm(second, topic)
    expect(second.page.locator("h1")).to_have_text("Not found")
    expect(second.page.locator("main")).to_contain_text("No node has such a topic. Nothing was done: somebody else")
    full = make(deployment, "both.delete.full", b"one", b"two")
    for each in (second, visitor):
        each.open(f"/confirm/delete_topic?topic={full}")
    confirm(visitor, full)
    told(visitor)
    confirm(second, full)
    expect(second.page.locator("main")).to_contain_text("No node has such a topic. Nothing was done: somebody else")
    third.page.get_by_role("button", name="Pause", exact=True).click()
    expect(third.page.locator("main")).to_contain_text("No node has such a topic. Nothing was done: somebody else")
    third.complaints = []
    third.leave()


def test_a_name_that_another_topic_has_by_now(visitor: Visitor, second: Visitor, deployment: Deployment):
    topic = make(deployment, "both.reuse", b"old")
    second.open(f"/confirm/delete_topic?topic={topic}")
    assert "1 message" in second.page.locator("#stake").inner_text().replace("\xa0", " ")
    visitor.open(f"/confirm/delete_topic?topic={topic}")
    confirm(visitor, topic)
    told(visitor)
    make(deployment, topic, b"new", b"newer", b"newest")
    confirm(second, topic)
    expect(second.page.get_by_role("alert")).to_contain_text("it was deleted and made again since then")
    assert "3 messages" in second.page.locator("#stake").inner_text().replace("\xa0", " ")
    assert deployment.nsqds[0].stats(topic, "c")["depth"] == 3
    assert second.violations() == []
    confirm(second, topic)  # now they know
    told(second)
    assert not deployment.nsqds[0].get(f"/stats?format=json&topic={topic}")["topics"]


def test_a_node_that_is_drained_and_a_letter_that_is_requeued_by_both(
    visitor: Visitor, second: Visitor, deployment: Deployment
):
    nsqd = deployment.nsqds[1]
    address = f"127.0.0.1:{nsqd.http[1]}"
    for each in (visitor, second):
        each.open(f"/confirm/drain_node?node={address}")
    confirm(visitor, address)
    assert f"node {address} drains" in told(visitor)
    confirm(second, address)
    assert f"nothing has changed: node {address} was being drained already" in told(second)
    visitor.page.get_by_role("button", name="Stop draining").click()
    told(visitor)
    topic = make(deployment, "both.requeue")
    nsqd.post(f"/topic/settings?topic={topic}", b'{"max_attempts": 1}')
    nsqd.post(f"/topic/create?topic={topic}.dead")
    nsqd.post(f"/channel/create?topic={topic}.dead&channel=nsqadmin")
    nsqd.publish(topic, b"letter")
    with nsqd.connect() as connection:
        connection.subscribe(topic, "c", 1)
        connection.send(b"REQ %s 0\n" % connection.message().id)
        wait_until(lambda: nsqd.stats(f"{topic}.dead")["message_count"] == 1, "it is a dead letter")
    wait_until(lambda: nodes_of(deployment, f"{topic}.dead") == 1, "nsqadmin knows the node that has it")
    stay(second, topic)
    for each in (visitor, second):
        each.open(f"/dead-letters/{topic}")
        each.page.get_by_role("button", name="Requeue", exact=True).wait_for()
    visitor.page.get_by_role("button", name="Requeue", exact=True).click()
    told(visitor)
    second.page.get_by_role("button", name="Requeue", exact=True).click()
    expect(second.page.locator("main")).to_contain_text("there is no such dead letter")
    assert nsqd.stats(topic)["message_count"] == 2  # once, not twice
