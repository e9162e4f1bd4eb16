"""nsqadmin beyond NSQ's: messages and their lives, dead letters, places of channels, properties, drains, history."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.integration.daemons import Answer, Daemons, Nsqadmin, Nsqd, req, wait_until

HTML = {"Accept": "text/html"}
FORM = {"Content-Type": "application/x-www-form-urlencoded", **HTML}


class Deployment:
    """A nsqlookupd, an nsqd that gives messages up after two deliveries, and an nsqadmin."""

    def __init__(self, daemons: Daemons) -> None:
        self.daemons = daemons
        self.nsqlookupd = daemons.nsqlookupd()
        self.nsqd: Nsqd = daemons.nsqd(
            "--durability=os", "--max-attempts=2", f"--lookupd-tcp-address=127.0.0.1:{self.nsqlookupd.tcp[1]}"
        )
        self.node = f"127.0.0.1:{self.nsqd.http[1]}"
        wait_until(lambda: self.nsqlookupd.get("/nodes")["producers"], "nsqd is registered")
        self.nsqadmin: Nsqadmin = daemons.nsqadmin(
            "--http-address=127.0.0.1:0", f"--lookupd-http-address=127.0.0.1:{self.nsqlookupd.http[1]}"
        )

    def topic(self, name: str, *bodies: bytes, query: str = "") -> str:
        self.nsqd.post(f"/topic/create?topic={name}{query}")
        self.nsqd.post(f"/channel/create?topic={name}&channel=c")
        if bodies:
            self.nsqd.publish(name, *bodies)
            self.nsqd.wait_given(name)
        return name

    def give_up(self, topic: str, count: int) -> None:
        """Have the channel c give up so many messages."""
        with self.nsqd.connect() as consumer:
            consumer.subscribe(topic, "c", count)
            for _ in range(2):
                for message in consumer.messages(count):
                    consumer.send(req(message.id, 0))

        def is_there() -> bool:
            topics = self.nsqd.get(f"/stats?format=json&topic={topic}.dead")["topics"]
            return bool(topics) and topics[0]["message_count"] == count

        wait_until(is_there, "all are dead letters")

    def is_given_up(self, topic: str) -> bool:
        return self.nsqd.unfinished(topic, "c") == 0

    def act(self, name: str, **form: str) -> Answer:
        page = self.nsqadmin.request("GET", "/create", None, HTML)
        found = re.search(rb'name="csrf"[^>]*value="([0-9a-f]+)"', page.body)
        assert found, page.body
        body = urlencode({"csrf": found[1].decode(), **form}).encode()
        return self.nsqadmin.request("POST", f"/act/{name}", body, FORM)

    def get(self, path: str) -> Any:
        return self.nsqadmin.whole(f"/api/v2{path}")


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    daemons = Daemons(tmp_path_factory.mktemp("messages"))
    try:
        yield Deployment(daemons)
    finally:
        daemons.close()


def test_a_channel_is_looked_into_without_disturbing_it(deployed: Deployment):
    topic = deployed.topic("peeked", b"one", b"\xff\xfe", b"x" * 10_000)
    rows = deployed.get(f"/peek/{topic}/c")["messages"]
    assert [row["body_size"] for row in rows[:3]] == [3, 2, 10_000]
    assert (rows[0]["body"], rows[0]["is_binary"], rows[0]["is_cut"]) == ("one", False, False)
    assert (rows[1]["body"], rows[1]["is_binary"]) == ("ff fe", True)
    assert (len(rows[2]["body"]), rows[2]["is_cut"]) == (4096, True)
    with deployed.nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        consumer.message()
        (held,) = deployed.get(f"/peek/{topic}/c?what=in_flight")["messages"]
        assert held["body"] == "one" and held["timeout_in_ms"] > 0 and held["consumer"].startswith("127.0.0.1:")
    assert deployed.nsqd.left(topic, "c")["depth"] == 3
    assert deployed.nsqadmin.request("GET", f"/api/v2/peek/{topic}/c?what=everything").status == 400


def test_deferred_messages_are_shown_with_when_they_come_due(deployed: Deployment):
    topic = deployed.topic("deferred")
    deployed.nsqd.post(f"/pub?topic={topic}&defer=600000", b"later")
    with deployed.nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)  # has the channel look at what is published
        (later,) = wait_until(lambda: deployed.get(f"/peek/{topic}/c?what=deferred")["messages"], "it is deferred")
    assert later["body"] == "later" and 0 < later["due_in_ms"] <= 600_000


def test_a_message_is_found_by_its_id_with_its_life(deployed: Deployment):
    topic = deployed.topic("traced")
    assert deployed.act("enable_trace", topic=topic).status == 303
    deployed.nsqd.publish(topic, b"followed")
    with deployed.nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        message = consumer.message()
        consumer.finish(message)
        consumer.settle()
    path = f"/messages/{topic}?by=id&value={message.id.decode()}"

    def whole() -> Any:
        found = deployed.get(path)
        return found if {"PUB", "START", "FIN"} <= {event["action"] for event in found["events"]} else None

    found = wait_until(whole, "its life is recorded")
    assert [row["body"] for row in found["found"]] == ["followed"]
    times = [event["timestamp_ns"] for event in found["events"]]
    assert times == sorted(times)
    assert found["is_traced"] and found["is_complete"]
    for value in ("xyz", "", "12'34"):
        assert (
            deployed.nsqadmin.request(
                "GET", f"/api/v2/messages/{topic}?{urlencode({'by': 'id', 'value': value})}"
            ).status
            == 400
        )


def test_messages_are_found_by_their_trace_id(deployed: Deployment):
    topic = deployed.topic("by-trace", query="&partition_num=1")
    deployed.act("enable_trace", topic=topic)
    deployed.nsqd.post(f"/pubtrace?topic={topic}&trace_id=77", b"traced")
    found = wait_until(
        lambda: (answer := deployed.get(f"/messages/{topic}?by=trace&value=77"))["events"] and answer, "it is recorded"
    )
    assert {event["trace_id"] for event in found["events"]} == {77}
    assert deployed.nsqadmin.request("GET", f"/api/v2/messages/{topic}?by=trace&value=x").status == 400


def test_a_message_is_found_by_the_time_when_it_came(deployed: Deployment):
    topic = deployed.topic("by-time", *(b"before %d" % number for number in range(50)))
    rows = deployed.get(f"/peek/{topic}/c?count=50")["messages"]
    after_s = rows[-1]["timestamp_ns"] / 1e9 + 0.01
    wait_until(lambda: time.time() > after_s + 0.01, "the clock has gone on")
    deployed.nsqd.publish(topic, *(b"after %d" % number for number in range(50)))
    found = deployed.get(f"/messages/{topic}?by=time&value={after_s}")
    assert [row["body"] for row in found["found"]] == ["after 0"]
    found = deployed.get(f"/messages/{topic}?by=time&value=2001-01-01T00:00:00Z")
    assert [row["body"] for row in found["found"]] == ["before 0"]
    assert deployed.get(f"/messages/{topic}?by=time&value=2100-01-01")["found"] == []
    assert deployed.nsqadmin.request("GET", f"/api/v2/messages/{topic}?by=time&value=yesterday").status == 400


def test_dead_letters_are_looked_at_requeued_and_dropped(deployed: Deployment):
    topic = deployed.topic("dying", b"one", b"two", b"three")
    deployed.give_up(topic, 3)
    found = deployed.get(f"/dead-letters/{topic}")
    assert (found["dead_topic"], found["exists"], found["channel"], found["waiting"]) == (f"{topic}.dead", True, "", 3)
    assert deployed.act("create_channel", topic=f"{topic}.dead", channel="nsqadmin").status == 303
    found = wait_until(
        lambda: (view := deployed.get(f"/dead-letters/{topic}"))["messages"] and view, "they are in the channel"
    )
    assert [row["body"] for row in found["messages"]] == ["one", "two", "three"]
    assert found["messages"][0]["headers"]["##dead_letter_channel"] == "c"
    assert found["reasons"] == {"max_attempts": 3}

    def listed() -> str:
        body = deployed.nsqadmin.request("GET", "/dead-letters").body.decode()
        return body if f"/dead-letters/{topic}" in body else ""

    page = wait_until(listed, "it is listed")
    assert f'href="/topics/{topic}.dead"' in page, "where they go, though no setting names it"

    first = found["messages"][0]["message_id"]
    assert deployed.act("requeue_dead_letters", topic=topic, message_id=first).status == 303
    assert deployed.nsqd.unfinished(topic, "c") == 1
    assert [row["body"] for row in deployed.get(f"/dead-letters/{topic}")["messages"]] == ["two", "three"]
    assert deployed.act("requeue_dead_letters", topic=topic, message_id=first).status == 404

    second = found["messages"][1]["message_id"]
    assert deployed.act("drop_dead_letters", topic=topic, message_id=second, confirm="something else").status == 400
    assert deployed.act("drop_dead_letters", topic=topic, message_id=second, confirm=topic).status == 303
    assert deployed.nsqd.unfinished(f"{topic}.dead", "nsqadmin") == 1
    assert deployed.act("requeue_dead_letters", topic=topic).status == 303
    assert deployed.nsqd.unfinished(f"{topic}.dead", "nsqadmin") == 0
    assert {row["body"] for row in deployed.get(f"/peek/{topic}/c")["messages"]} == {"one", "three"}


def test_two_who_requeue_all_at_once_publish_each_once(deployed: Deployment):
    count = 20
    topic = deployed.topic("contended", *(b"%d" % number for number in range(count)))
    deployed.give_up(topic, count)
    assert deployed.act("create_channel", topic=f"{topic}.dead", channel="nsqadmin").status == 303
    wait_until(lambda: deployed.get(f"/dead-letters/{topic}")["messages"], "they are in the channel")
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: deployed.act("requeue_dead_letters", topic=topic).status, range(2)))
    assert sorted(answers) == [303, 404], "the second finds none"
    assert deployed.nsqd.unfinished(f"{topic}.dead", "nsqadmin") == 0
    assert deployed.nsqd.stats(topic)["message_count"] == 2 * count


def listed(nsqadmin: Nsqadmin, topic: str) -> str:
    """The list of topics with dead letters, when this one is in it."""

    def look() -> str:
        text = nsqadmin.request("GET", "/dead-letters", None, HTML).text
        return text if f'href="/topics/{topic}"' in text else ""

    return wait_until(look, f"{topic} is listed")


def test_dead_letters_of_a_channel_that_has_its_own_topic_for_them(deployed: Deployment):
    topic = deployed.topic("own-way", b"letter")
    deployed.nsqd.post(
        f"/channel/settings?topic={topic}&channel=c", b'{"max_attempts": 1, "dead_letter_topic": "lost.mail"}'
    )
    deployed.nsqd.post(f"/topic/settings?topic={topic}", b'{"max_attempts": 0}')
    with deployed.nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        consumer.send(req(consumer.message().id, 0))
        wait_until(partial(deployed.is_given_up, topic), "it is given up")
    assert 'href="/dead-letters/lost.mail">the topics that they name' in listed(deployed.nsqadmin, "lost.mail")
    found = deployed.get(f"/dead-letters/{topic}")
    assert (found["dead_topic"], found["exists"], found["others"]) == ("", False, {"lost.mail": 1})
    page = deployed.nsqadmin.request("GET", f"/dead-letters/{topic}", None, HTML).text
    assert 'href="/dead-letters/lost.mail"' in page
    assert f"{topic}.dead" not in page and "nothing was given up" not in page
    found = deployed.get("/dead-letters/lost.mail")
    assert (found["dead_topic"], found["waiting"], found["others"]) == ("lost.mail", 1, {})
    answer = deployed.act("requeue_dead_letters", topic=topic)
    assert answer.status == 404 and f"only channels of {topic} give messages up: to lost.mail" in answer.text
    deployed.nsqd.post("/channel/create?topic=lost.mail&channel=nsqadmin")
    assert deployed.act("requeue_dead_letters", topic="lost.mail").status == 303
    assert deployed.nsqd.unfinished(topic, "c") == 1, "it says where it comes from"


def test_dead_letters_where_the_flags_of_nsqd_say(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os", "--max-attempts=1", "--dead-letter-topic=graveyard")
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    nsqd.publish("t", b"letter")
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 1)
        consumer.send(req(consumer.message().id, 0))
        wait_until(lambda: nsqd.unfinished("t", "c") == 0, "it is given up")
    nsqadmin = daemons.nsqadmin("--http-address=127.0.0.1:0", f"--nsqd-http-address=127.0.0.1:{nsqd.http[1]}")
    assert 'href="/dead-letters/graveyard"' in listed(nsqadmin, "graveyard")
    for topic in ("t", "graveyard"):
        found = nsqadmin.whole(f"/api/v2/dead-letters/{topic}")
        assert (found["dead_topic"], found["waiting"], found["others"]) == ("graveyard", 1, {})


def test_whoever_makes_the_channel_for_dead_letters_sees_them_next(deployed: Deployment):
    topic = deployed.topic("opened", b"letter")
    deployed.give_up(topic, 1)
    page = deployed.nsqadmin.request("GET", f"/dead-letters/{topic}", None, HTML).text
    form = re.search(r'action="/act/open_dead_letters".*?</form>', page, re.DOTALL)
    assert form, page
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form[0]))
    assert (fields.pop("csrf") != "", fields["topic"]) == (True, f"{topic}.dead")
    answer = deployed.act("open_dead_letters", **fields)
    assert (answer.status, answer.headers["Location"].partition("?")[0]) == (303, f"/dead-letters/{topic}")

    def looked_at(name: str) -> Any:
        found = deployed.get(f"/dead-letters/{name}")
        return found if found["messages"] else None

    for name in (topic, f"{topic}.dead"):
        found = wait_until(partial(looked_at, name), f"the letters are on the page of {name}")
        assert (found["dead_topic"], found["channel"], found["waiting"]) == (f"{topic}.dead", "nsqadmin", 1)


def test_a_letter_that_does_not_say_where_it_comes_from_stays_where_it_is(deployed: Deployment):
    deployed.topic("unsaid.dead", b"from a client")
    deployed.nsqd.post("/topic/settings?topic=unsaid.dead", b'{"max_attempts": 0}')
    assert deployed.get("/dead-letters/unsaid.dead")["waiting"] == 1
    answer = deployed.act("requeue_dead_letters", topic="unsaid.dead")
    assert answer.status == 502 and "does not say which topic it is of" in answer.text
    assert deployed.nsqd.stats("unsaid.dead")["message_count"] == 1


def test_a_dead_letter_that_is_refused_keeps_the_others_from_nothing(deployed: Deployment):
    """Two topics share their dead letters, and the topic of the first one is full."""
    full, free = deployed.topic("full"), deployed.topic("free")
    for topic in (full, free):
        settings = {"max_attempts": 1, "dead_letter_topic": "shared.dead"}
        deployed.nsqd.post(f"/topic/settings?topic={topic}", json.dumps(settings).encode())
        deployed.nsqd.publish(topic, b"from " + topic.encode())
        with deployed.nsqd.connect() as consumer:
            consumer.subscribe(topic, "c", 1)
            consumer.send(req(consumer.message().id, 0))
            wait_until(partial(deployed.is_given_up, topic), "it is given up")
    deployed.nsqd.post("/channel/create?topic=shared.dead&channel=nsqadmin")
    deployed.nsqd.post(f"/topic/settings?topic={full}", b'{"max_messages": 1}')
    deployed.nsqd.publish(full, b"fills it")
    assert deployed.get(f"/dead-letters/{full}")["waiting"] == 2
    answer = deployed.act("requeue_dead_letters", topic=full)
    assert answer.status == 303, answer.body
    wait_until(lambda: deployed.nsqd.stats(free, "c")["depth"] == 1, "the second one is there again")
    assert deployed.nsqd.stats("shared.dead", "nsqadmin")["depth"] == 1  # the first stays where it was


def test_a_channel_is_set_back_and_forward(deployed: Deployment):
    topic = deployed.topic("set", b"one", b"two")
    with deployed.nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 2)
        consumer.finish(*consumer.messages(2))
        consumer.settle()
    deployed.nsqd.post(f"/channel/create?topic={topic}&channel=late")
    assert deployed.act("set_channel", topic=topic, channel="c", when="beginning", confirm="c").status == 303
    assert deployed.act("set_channel", topic=topic, channel="late", when="1h", confirm="late").status == 303
    assert deployed.nsqd.stats(topic, "late")["depth"] == deployed.nsqd.stats(topic, "c")["depth"]
    assert deployed.act("set_channel", topic=topic, channel="c", when="end", confirm="c").status == 303
    assert deployed.nsqd.stats(topic, "c")["depth"] == 0
    answer = deployed.act("set_channel", topic=topic, channel="c", when="soon", confirm="c")
    assert answer.status == 400 and b"is no place in a channel" in answer.body


def test_setting_a_channel_says_what_may_be_lost_and_asks_for_the_name(deployed: Deployment):
    topic = deployed.topic("forward", b"one", b"two", b"three")
    for _ in range(3):
        deployed.nsqd.post(f"/pub?topic={topic}&defer=3600000", b"later")
    wait_until(lambda: deployed.nsqd.stats(topic, "c")["deferred_count"] == 3, "all three are deferred")
    page = deployed.nsqadmin.request("GET", f"/confirm/set_channel?topic={topic}&channel=c", None, HTML).text
    held = f"3 messages waiting, 0 in flight, 3 deferred in {topic}/c"
    assert f"Of {held}, those before that place would be lost." in page
    assert 'id="confirm"' in page and "type the name of the channel" in page
    for confirm in ({}, {"confirm": ""}, {"confirm": topic}):
        answer = deployed.act("set_channel", topic=topic, channel="c", when="end", **confirm)
        assert answer.status == 400
        assert "type the name of the channel, c, to confirm it" in answer.text
        assert held in answer.text and 'name="when" value="end"' in answer.text, "the page asks again"
    row = deployed.nsqd.stats(topic, "c")
    assert (row["depth"], row["deferred_count"]) == (3, 3)
    assert deployed.act("set_channel", topic=topic, channel="c", when="end", confirm="c").status == 303
    row = deployed.nsqd.stats(topic, "c")
    assert (row["depth"], row["deferred_count"]) == (0, 0)


def test_a_channel_that_was_made_again_since_the_page_is_not_set(deployed: Deployment):
    topic = deployed.topic("again", b"old")
    page = deployed.nsqadmin.request("GET", f"/confirm/set_channel?topic={topic}&channel=c", None, HTML)
    found = re.search(rb'name="seen" value="([^"]+)"', page.body)
    assert found, page.body
    form = {"topic": topic, "channel": "c", "when": "end", "confirm": "c"}
    deployed.nsqd.post(f"/topic/delete?topic={topic}")
    deployed.topic(topic, b"new")
    answer = deployed.act("set_channel", **form, seen=found[1].decode())
    assert answer.status == 400 and b"it was deleted and made again since then" in answer.body
    assert deployed.nsqd.stats(topic, "c")["depth"] == 1


@pytest.mark.parametrize(("act", "form"), [("delete_topic", {}), ("delete_channel", {"channel": "c"})])
def test_what_somebody_else_has_deleted_since_the_page_is_gone(deployed: Deployment, act: str, form: dict[str, str]):
    topic = deployed.topic(f"twice-{act}", b"one", b"two", b"three")
    query = urlencode({"topic": topic, **form})
    page = deployed.nsqadmin.request("GET", f"/confirm/{act}?{query}", None, HTML)
    found = re.search(rb'name="seen" value="([^"]+)"', page.body)
    assert found and found[1].startswith(b"3."), page.body
    form = {"topic": topic, "confirm": form.get("channel", topic), "seen": found[1].decode(), **form}
    assert deployed.act("delete_topic", topic=topic, confirm=topic).status == 303
    answer = deployed.act(act, **form)
    assert answer.status == 404 and "Nothing was done: somebody else may have changed it" in answer.text
    page = deployed.nsqadmin.request("GET", f"/confirm/{act}?{query}", None, HTML)
    assert page.status == 404 and "is not there any more" in page.text and f'action="/act/{act}"' not in page.text


def test_what_loses_messages_asks_for_the_name(deployed: Deployment):
    topic = deployed.topic("named", b"one")
    for act, form in (
        ("empty_channel", {"channel": "c"}),
        ("set_channel", {"channel": "c", "when": "end"}),
        ("delete_channel", {"channel": "c"}),
        ("delete_topic", {}),
        ("empty_topic", {}),
    ):
        for confirm in ("", "wrong"):
            assert deployed.act(act, topic=topic, confirm=confirm, **form).status == 400, act
    assert deployed.nsqd.stats(topic, "c")["depth"] == 1
    view = deployed.get(f"/topics/{topic}")
    assert "1 message" in view["lost_if_deleted"] and "1 channel (c)" in view["lost_if_deleted"]
    assert deployed.act("empty_channel", topic=topic, channel="c", confirm="c").status == 303
    assert deployed.nsqd.stats(topic, "c")["depth"] == 0
    assert deployed.act("delete_topic", topic=topic, confirm=topic).status == 303
    assert not deployed.nsqd.get(f"/stats?format=json&topic={topic}")["topics"]


def test_a_topic_is_created_with_properties(deployed: Deployment):
    answer = deployed.act("create_topic", topic="made", partitions="2", ordered="on", retention_days="3")
    assert answer.status == 303, answer.body
    view = wait_until(lambda: (found := deployed.get("/topics/made"))["partitions"] and found, "it has partitions")
    assert view["total"]["partition_count"] == 2
    assert [row["leader_node"] for row in view["partitions"]] == [deployed.node] * 2
    expected = {"partition_num": 2, "ordered": True, "retention_days": 3}
    assert view["total"]["settings"].items() >= expected.items()
    assert deployed.nsqd.stats("made").items() >= expected.items()
    assert deployed.act("create_topic", topic="bad name").status == 400
    assert deployed.act("create_topic", topic="made-too", partitions="-1").status == 400
    assert deployed.act("delete_topic", topic="made", confirm="made").status == 303
    assert not deployed.nsqd.get("/stats?format=json&topic=made")["topics"]


def test_how_old_the_oldest_message_is(deployed: Deployment):
    topic = deployed.topic("old", b"one")

    def age_s() -> float | None:
        found: float | None = deployed.get(f"/topics/{topic}/c")["total"]["oldest_age_s"]
        return found

    assert 0 <= (wait_until(lambda: age_s() is not None and age_s(), "it has an age") or 0) < 600


def test_what_stands_out_and_what_is_wrong(deployed: Deployment):
    topic = deployed.topic("lonely", *(b"x" for _ in range(500)))

    def standing_out() -> bool:
        return any(row["topic"] == topic for row in deployed.get("/top")["deepest"])

    wait_until(standing_out, "it is among the deepest")
    texts = {row["subject"]: row["text"] for row in deployed.get("/problems")["findings"]}
    assert texts[f"channel {topic}/c"] == "500 messages wait, and no consumer is connected"


def test_lists_are_exported_as_csv(deployed: Deployment):
    topic = deployed.topic("-exported", b"one")
    wait_until(lambda: any(row["name"] == topic for row in deployed.get("/topics?text=-exported")["topics"]))
    answer = deployed.nsqadmin.request("GET", "/api/v2/topics?format=csv&text=-exported")
    assert answer.headers["Content-Type"] == "text/csv; charset=utf-8"
    head, line = answer.body.decode().splitlines()
    assert head.startswith("name,node,depth,")
    assert line.startswith("'-exported,*,")  # a spreadsheet computes nothing
    assert deployed.nsqadmin.request("GET", "/api/v2/topics?format=xml").status == 400
    assert deployed.nsqadmin.request("GET", "/api/v2/topics?sort=colour").status == 400


def test_the_history_survives_a_restart(
    deployed: Deployment, shared: Daemons, tmp_path_factory: pytest.TempPathFactory
):
    topic = deployed.topic("remembered", b"one", b"two")
    nsqadmin = shared.nsqadmin(
        "--http-address=127.0.0.1:0",
        f"--nsqd-http-address={deployed.node}",
        f"--history-path={tmp_path_factory.mktemp('history') / 'history'}",
    )
    path = f"/api/v2/history?series=topic&name={topic}&span_s=600"

    def recorded() -> Any:
        found = nsqadmin.whole(path)
        return found if 2.0 in found["depth"] else None

    found = wait_until(recorded, "it is recorded")
    assert found["step_s"] == 10 and len(found["times_s"]) == len(found["depth"]) == 60
    nsqadmin.restart()
    assert recorded() is not None
    assert not nsqadmin.whole("/api/v2/history?series=topic&name=none&span_s=600")["is_recorded"]


def test_a_node_drains_and_drains_no_more(deployed: Deployment):
    deployed.topic("drained", b"stays")
    assert deployed.act("drain_node", node=deployed.node, confirm="x").status == 400
    assert deployed.act("drain_node", node=deployed.node, confirm=deployed.node).status == 303
    assert deployed.get(f"/nodes/{deployed.node}")["drain"]["draining"]
    assert deployed.act("stop_drain_node", node=deployed.node).status == 303
    assert not deployed.get(f"/nodes/{deployed.node}")["drain"]["draining"]
    assert deployed.act("drain_node", node="10.0.0.1:4151", confirm="10.0.0.1:4151").status == 404


def test_every_view_is_json(deployed: Deployment):
    deployed.topic("viewed", b"one")
    for path in (
        "/topics", "/topics/viewed", "/topics/viewed/c", "/nodes", f"/nodes/{deployed.node}", "/counter", "/lookup",
        "/cluster", "/top", "/problems", "/audit", "/history",
    ):  # fmt: skip
        view = deployed.get(path)
        assert view["missing"] == [], path
        assert view["at_s"] > 0, path
    assert json.dumps(deployed.get("/lookup")["lookupds"])
    assert not deployed.get("/cluster")["is_cluster"]
