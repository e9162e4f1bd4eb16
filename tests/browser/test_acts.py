"""Every change that the pages offer, as somebody clicks it; what loses something asks for the name first."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from tests.browser.deployment import Deployment
from tests.browser.visitor import Visitor
from tests.integration.daemons import wait_until


@pytest.fixture
def topic(deployment: Deployment, request: pytest.FixtureRequest) -> str:
    """A topic on both nodes with a channel and four messages, which a test may spoil."""
    name = "spoilt." + request.node.name.removeprefix("test_")[:50]
    for nsqd in deployment.nsqds:
        nsqd.post(f"/topic/create?topic={name}")
        nsqd.post(f"/channel/create?topic={name}&channel=c")
        nsqd.publish(name, b"one", b"two")
    wait_until(lambda: nodes_of(deployment, name) == 2, "nsqadmin knows both nodes that have it")
    return name


def nodes_of(deployment: Deployment, topic: str) -> int:
    """On how many nodes nsqadmin shows a topic."""
    answer = deployment.nsqadmin.request("GET", f"/api/v2/topics/{topic}")
    return len(answer.json["nodes"]) if answer.status == 200 else 0


def told(visitor: Visitor) -> str:
    """What the page says was done."""
    expect(visitor.page.locator("#told-notes .alert-success")).to_have_count(1)
    return visitor.page.locator("#told-notes .alert-success").inner_text()


def test_a_topic_with_properties_is_made(visitor: Visitor, deployment: Deployment):
    page = visitor.open("/topics")
    page.get_by_role("link", name="New topic").click()
    page.get_by_label("Name", exact=True).fill("made.here")
    page.get_by_label("First channel").fill("first")
    page.get_by_label("Partitions").fill("2")
    page.get_by_label("Messages may carry headers").check()
    page.get_by_role("button", name="Create topic").click()
    assert "made.here" in told(visitor) and page.url.startswith(f"{visitor.url}/topics/made.here")
    page.reload()
    expect(page.locator("#told-notes .alert-success")).to_have_count(0)  # told once
    topics = [nsqd.get("/stats?format=json&topic=made.here")["topics"] for nsqd in deployment.nsqds]
    rows = [row for found in topics for row in found]
    assert rows and all([channel["channel_name"] for channel in row["channels"]] == ["first"] for row in rows)
    accept = {"Accept": "application/vnd.nsq; version=1.0"}
    answer = deployment.nsqlookupd.request("GET", "/lookup?topic=made.here&metainfo=true", None, accept)
    assert answer.json["partitions"].keys() == {"0", "1"}


def test_a_wrong_name_is_told_and_the_form_is_kept(visitor: Visitor, deployment: Deployment):
    page = visitor.open("/create")
    page.locator("#topic").evaluate("element => element.removeAttribute('pattern')")  # as a browser without patterns
    page.fill("#topic", "no/slash")
    page.fill("#partitions", "3")
    page.get_by_role("button", name="Create topic").click()
    expect(page.get_by_role("alert")).to_contain_text("That is no name of a topic: 1 to 64")
    assert page.input_value("#topic") == "no/slash" and page.input_value("#partitions") == "3"
    visitor.complaints = [each for each in visitor.complaints if "status of 400" not in each]


def test_pausing_and_unpausing(visitor: Visitor, deployment: Deployment, topic: str):
    for path, what in ((f"/topics/{topic}", "topic"), (f"/topics/{topic}/c", "channel")):
        page = visitor.open(path)
        for word, is_paused in (("Pause", True), ("Unpause", False)):
            page.get_by_role("button", name=word, exact=True).click()
            assert "paused" in told(visitor)
            rows = [nsqd.stats(topic, "c" if what == "channel" else "") for nsqd in deployment.nsqds]
            assert [row["paused"] for row in rows] == [is_paused, is_paused], what


def test_a_channel_is_made(visitor: Visitor, deployment: Deployment, topic: str):
    page = visitor.open(f"/topics/{topic}")
    page.get_by_label("Name of a new channel").fill("second")
    page.get_by_role("button", name="Create channel").click()
    assert "second" in told(visitor)
    page.evaluate(
        """() => new Promise(done => {
            document.addEventListener("refreshed", () => done(), {once: true});
            document.getElementById("main").dispatchEvent(new CustomEvent("refresh"));
        })"""
    )
    assert "second" in told(visitor)  # it stays to be read
    assert visitor.violations() == []
    assert all(nsqd.stats(topic, "second") for nsqd in deployment.nsqds)


def confirmed(visitor: Visitor, opener: str, wrong: str, right: str) -> str:
    """Click a dangerous act, confirm it with a wrong name in vain, and with the right one; returns what is at stake."""
    page = visitor.page
    page.get_by_role("link", name=opener, exact=True).first.click()
    page.locator("#confirm").wait_for()
    stake = page.locator("#stake").inner_text() if page.locator("#stake").count() else ""
    button = page.locator("button.btn-danger")
    page.fill("#confirm", wrong)
    expect(button).to_have_class("btn btn-danger is-waiting")
    button.click()
    expect(page.get_by_role("alert")).to_have_count(1)
    visitor.complaints = [each for each in visitor.complaints if "status of 400" not in each]
    page.fill("#confirm", right)
    expect(button).to_have_class("btn btn-danger")
    button.click()
    return stake


def test_emptying_a_channel_names_what_is_lost(visitor: Visitor, deployment: Deployment, topic: str):
    visitor.open(f"/topics/{topic}/c")
    stake = confirmed(visitor, "Empty…", topic, "c")
    assert "4 messages" in stake
    assert "c" in told(visitor)
    assert [nsqd.stats(topic, "c")["depth"] for nsqd in deployment.nsqds] == [0, 0]


def test_deleting_a_channel_and_a_topic(visitor: Visitor, deployment: Deployment, topic: str):
    visitor.open(f"/topics/{topic}/c")
    assert "4 messages" in confirmed(visitor, "Delete…", "C", "c")
    told(visitor)
    assert visitor.page.url.startswith(f"{visitor.url}/topics/{topic}?")
    assert [nsqd.stats(topic)["channels"] or [] for nsqd in deployment.nsqds] == [[], []]
    assert "message" in confirmed(visitor, "Delete…", topic[:-1], topic)
    told(visitor)
    assert visitor.page.url.startswith(f"{visitor.url}/topics?")
    for nsqd in deployment.nsqds:
        assert not nsqd.get(f"/stats?format=json&topic={topic}")["topics"]


def test_emptying_a_topic(visitor: Visitor, deployment: Deployment):
    nsqd = deployment.nsqds[0]
    nsqd.publish("spoilt.alone", b"one", b"two", b"three")
    wait_until(lambda: nodes_of(deployment, "spoilt.alone") == 1, "nsqadmin knows the node that has it")
    visitor.open("/topics/spoilt.alone")
    assert "3 messages" in confirmed(visitor, "Empty…", "spoilt", "spoilt.alone")
    told(visitor)
    assert nsqd.stats("spoilt.alone")["depth"] == 0


def test_a_channel_is_set_back(visitor: Visitor, deployment: Deployment, topic: str):
    nsqd = deployment.nsqds[0]
    with nsqd.connect() as connection:
        connection.subscribe(topic, "c", 2)
        connection.finish(*connection.messages(2))
        wait_until(lambda: nsqd.unfinished(topic, "c") == 0, "both are finished")
    page = visitor.open(f"/topics/{topic}/c")
    page.get_by_role("link", name="Set to a time…").click()
    assert "2 messages waiting" in page.locator("#stake").inner_text()
    page.fill("#when", "beginning")
    page.fill("#confirm", "c")
    page.get_by_role("button", name="Set the channel").click()
    told(visitor)
    assert nsqd.stats(topic, "c")["depth"] == 2


def test_a_node_is_tombstoned_and_drained(visitor: Visitor, deployment: Deployment, topic: str):
    address = f"127.0.0.1:{deployment.nsqds[1].http[1]}"
    page = visitor.open(f"/topics/{topic}")
    page.locator("#nodes tr", has_text=address).get_by_role("link", name="Tombstone…").click()
    assert "2 messages" in page.locator("#stake").inner_text().replace("\xa0", " ")
    page.fill("#confirm", topic)
    page.get_by_role("button", name="Tombstone, and delete there").click()
    told(visitor)
    assert deployment.nsqlookupd.producers(topic) == [deployment.nsqds[0].tcp[1]]
    page = visitor.open(f"/nodes/{address}")
    confirmed(visitor, "Drain…", "127.0.0.1", address)
    told(visitor)
    assert deployment.nsqds[1].get("/drain")["draining"] is True
    page.get_by_role("button", name="Stop draining").click()
    told(visitor)
    assert deployment.nsqds[1].get("/drain")["draining"] is False


def test_tracing_is_begun(visitor: Visitor, deployment: Deployment, topic: str):
    page = visitor.open(f"/messages?topic={topic}&by=id&value=0000000000000001")
    page.get_by_role("button", name="Trace this topic from now on").click()
    told(visitor)
    settings = deployment.nsqds[0].get(f"/topic/settings?topic={topic}")
    assert settings["settings"]["trace"] == "all"


def test_every_change_is_in_the_audit(visitor: Visitor, deployment: Deployment, topic: str):
    page = visitor.open(f"/topics/{topic}")
    page.get_by_role("button", name="Pause", exact=True).click()
    told(visitor)
    visitor.open(f"/audit?text={topic}")
    (row,) = visitor.table("Changes")
    assert row["Change"] == "pause topic" and row["Of"] == topic and row["Outcome"] == "done"


def test_without_the_right_token_nothing_is_changed(visitor: Visitor, deployment: Deployment, topic: str):
    page = visitor.open(f"/topics/{topic}")
    page.locator("input[name=csrf]").evaluate_all("all => all.forEach(one => one.value = 'guessed')")
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator("h1")).to_have_text("Not allowed")
    visitor.complaints = [each for each in visitor.complaints if "status of 403" not in each]
    assert deployment.nsqds[0].stats(topic)["paused"] is False


def test_dead_letters_are_requeued_and_dropped(visitor: Visitor, deployment: Deployment):
    nsqd = deployment.nsqds[0]
    nsqd.post("/topic/create?topic=parcels")
    nsqd.post("/channel/create?topic=parcels&channel=van")
    nsqd.post("/topic/settings?topic=parcels", b'{"max_attempts": 1}')
    nsqd.publish("parcels", b"first", b"second", b"third")
    with nsqd.connect() as connection:
        connection.subscribe("parcels", "van", 3)
        for message in connection.messages(3):
            connection.send(b"REQ %s 0\n" % message.id)
        wait_until(lambda: nsqd.stats("parcels.dead")["message_count"] == 3, "all three are dead letters")
    wait_until(lambda: nodes_of(deployment, "parcels.dead") == 1, "nsqadmin knows the node that has them")
    page = visitor.open("/dead-letters/parcels")
    page.get_by_role("button", name="Make the channel nsqadmin there").click()
    told(visitor)
    expect(page.locator("h1")).to_have_text("Dead letters of parcels")
    page = visitor.open("/dead-letters/parcels")
    expect(page.locator("article")).to_have_count(3)
    page.locator("article", has_text="second").get_by_role("button", name="Requeue").click()
    told(visitor)
    expect(page.locator("article")).to_have_count(2)
    wait_until(lambda: nsqd.stats("parcels", "van")["depth"] == 1, "one waits again")
    page.locator("article", has_text="first").get_by_role("link", name="Drop…").click()
    page.fill("#confirm", "parcels")
    page.get_by_role("button", name="Drop them").click()
    told(visitor)
    expect(page.locator("article")).to_have_count(1)
    page.get_by_role("button", name="Requeue all 1").click()
    told(visitor)
    expect(page.get_by_text("None waits")).to_have_count(1)
    wait_until(lambda: nsqd.stats("parcels", "van")["depth"] == 2, "two wait again")
