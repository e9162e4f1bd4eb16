"""The trace of messages: the switch, events of every step with ids, offsets and addresses, the search, bounds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.conformance.http_helpers import assert_empty, assert_refused
from tests.conformance.redesigned_helpers import create, one, pub_to, several, stored, sub_to, traced
from tests.integration.daemons import (
    Connection,
    Daemons,
    Nsqd,
    dpub,
    fin,
    mpub,
    pub,
    req,
    touch,
    wait_until,
)

pytestmark = pytest.mark.improvement

TRACE = "nsqd_trace"
FIELDS = (
    "timestamp", "action", "topic", "msgid", "traceid", "partition", "channel", "message_id", "offset", "attempts",
    "client", "node", "delay_ms", "count",
)  # fmt: skip


def switch(nsqd: Nsqd, topic: str, what: str = "enable", more: str = "") -> None:
    assert_empty(nsqd.post(f"/message/trace/{what}?topic={topic}{more}"))


def found(nsqd: Nsqd, topic: str, msgid: int = 1, more: str = "") -> list[dict[str, Any]]:
    """The events of a message, oldest first."""
    answer = nsqd.get(f"/message/trace?topic={topic}&msgid={msgid}{more}")
    assert answer["topic"] == topic
    events: list[dict[str, Any]] = answer["events"]
    for event in events:
        assert list(event) == [name for name in FIELDS if name in event], "always in this order"
    times = [event["timestamp"] for event in events]
    assert times == sorted(times)
    return events


def actions(events: list[dict[str, Any]]) -> list[str]:
    return [event["action"] for event in events]


def address(connection: Connection) -> str:
    host, port = connection.socket.getsockname()
    return f"{host}:{port}"


def node(nsqd: Nsqd) -> str:
    return f"127.0.0.1:{nsqd.tcp[1]}"


def with_channel(nsqd: Nsqd, topic: str, channel: str = "c") -> str:
    nsqd.post(f"/topic/create?topic={topic}")
    nsqd.post(f"/channel/create?topic={topic}&channel={channel}")
    return topic


def trace_count(nsqd: Nsqd) -> int:
    return int(metric(nsqd, "flintmq_nsqd_trace_events_total"))


def metric(nsqd: Nsqd, name: str) -> float:
    lines = nsqd.request("GET", "/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


@pytest.fixture
def consumer(nsqd: Nsqd) -> Iterator[Connection]:
    """A connection whose messages time out after a second."""
    with nsqd.connect() as connection:
        connection.identify(msg_timeout=1000)
        yield connection


# -- a life ------------------------------------------------------------------------------------------------------------


def test_the_whole_life_of_a_message_of_a_plain_topic(nsqd: Nsqd, topic: str, consumer: Connection):
    with_channel(nsqd, topic)
    switch(nsqd, topic)
    consumer.subscribe(topic, "c", 1)
    before_ns = time.time_ns()
    with nsqd.connect() as publisher:
        publisher.ok(pub(topic, b"first"))
        publisher.ok(pub(topic, b"second"))
        published_from = address(publisher)
    first = consumer.message()
    consumer.finish(first)
    message = consumer.message()
    consumer.send(touch(message.id))
    consumer.send(req(message.id, 0))
    assert consumer.message().attempts == 2  # and now it is left alone for its timeout
    assert consumer.message().attempts == 3
    consumer.finish(message)
    consumer.settle()
    events = found(nsqd, topic, 2)
    assert actions(events) == ["PUB", "START", "TOUCH", "REQ", "START", "TIMEOUT", "START", "FIN"]
    common = {"topic": topic, "msgid": 2, "traceid": 0, "partition": 0, "message_id": f"{2:016x}", "node": node(nsqd)}
    offset = nsqd.get(f"/message/get?topic={topic}&search_mode=id&search_pos=2")["offset"]
    assert offset == 34 + len(b"first")
    for event in events:
        assert {name: event[name] for name in common} == common
        assert event["offset"] == offset
        assert before_ns < event["timestamp"] < time.time_ns()
    assert (events[0]["client"], "channel" in events[0]) == (published_from, False)
    assert {(event["client"], event["channel"]) for event in events[1:]} == {(address(consumer), "c")}
    assert [event.get("attempts") for event in events] == [None, 1, 1, 1, 2, 2, 3, 3]
    waited_ns = events[5]["timestamp"] - events[4]["timestamp"]
    assert waited_ns >= 900_000_000
    assert actions(found(nsqd, topic, 1)) == ["PUB", "START", "FIN"]


def test_the_whole_life_of_a_traced_message_of_a_partition(nsqd: Nsqd, topic: str, consumer: Connection):
    create(nsqd, topic)
    switch(nsqd, topic, more="&only=traced")
    consumer.ok(sub_to(topic, "c", 1))
    consumer.rdy(1)
    with nsqd.connect() as publisher:
        publisher.ok(pub_to(topic, 1, b"not traced"))
        publisher.send(one("PUB_TRACE", topic, 1, traced(2**64 - 1, b"body")))
        answer = stored(publisher.response())
        published_from = address(publisher)
    consumer.finish(consumer.message())
    message = consumer.message()
    consumer.send(touch(message.id) + req(message.id, 0))
    consumer.message()
    assert consumer.message().attempts == 3
    consumer.finish(message)
    consumer.settle()
    internal = (1 << 50) + 2
    events = found(nsqd, topic, internal)
    assert actions(events) == ["PUB", "START", "TOUCH", "REQ", "START", "TIMEOUT", "START", "FIN"]
    assert answer.offset > 0
    for event in events:
        assert (event["traceid"], event["offset"], event["partition"]) == (answer.trace_id, answer.offset, 1)
        assert event["message_id"] == message.id.hex()
    assert events[0]["client"] == published_from
    assert {event["client"] for event in events[1:]} == {address(consumer)}
    assert found(nsqd, topic, (1 << 50) + 1) == [], "a message without a trace id"
    by_trace_id = nsqd.get(f"/message/trace?topic={topic}&traceid={2**64 - 1}")
    assert (by_trace_id["events"], by_trace_id["complete"]) == (events, True)
    assert nsqd.get(f"/message/trace?topic={topic}&msgid={message.id.hex()}")["events"] == events


def test_mpub_trace_over_several_partitions_and_a_consumer_of_all(nsqd: Nsqd, topic: str):
    create(nsqd, topic)
    switch(nsqd, topic, more="&only=traced")
    with nsqd.connect() as connection:
        for partition in (0, 1):
            bodies = [traced(trace_id, b"x" * 5) for trace_id in (5, 0, 7)]
            connection.send(several("MPUB_TRACE", topic, partition, bodies))
            stored(connection.response())
        connection.subscribe(topic, "c", 10)
        connection.finish(*connection.messages(6))
        connection.settle()
    for trace_id in (5, 7):
        events = nsqd.get(f"/message/trace?topic={topic}&traceid={trace_id}")["events"]
        assert sorted((event["partition"], event["action"]) for event in events) == [
            (partition, action) for partition in (0, 1) for action in ("FIN", "PUB", "START")
        ]


def test_a_consumer_in_order_is_told_of_the_same_offsets(nsqd: Nsqd, topic: str):
    create(nsqd, topic, orderedmulti="true")
    switch(nsqd, topic)
    with nsqd.connect() as connection:
        connection.ok(pub_to(topic, 0, b"one"))
        connection.ok(pub_to(topic, 0, b"two"))
        connection.ok(sub_to(topic, "c", 0, "SUB_ORDER"))
        connection.rdy(1)
        offsets = []
        for _ in range(2):
            message = connection.message()
            offsets.append(int.from_bytes(message.body[:8], "big"))
            connection.finish(message)
        wait_until(lambda: nsqd.unfinished(topic, "c") == 0)
    for number, offset in enumerate(offsets, 1):
        events = found(nsqd, topic, number)
        assert actions(events) == ["PUB", "START", "FIN"]
        assert {event["offset"] for event in events} == {offset}


def test_a_lost_connection_gives_its_messages_back(nsqd: Nsqd, topic: str):
    with_channel(nsqd, topic)
    switch(nsqd, topic)
    with nsqd.connect() as connection:
        connection.subscribe(topic, "c", 2)
        nsqd.publish(topic, b"a", b"b")
        connection.messages(2)
        lost = address(connection)
    wait_until(lambda: nsqd.stats(topic, "c")["in_flight_count"] == 0)
    for msgid in (1, 2):
        events = found(nsqd, topic, msgid)
        assert actions(events) == ["PUB", "START", "DISCONNECT"]
        assert (events[-1]["client"], events[-1]["channel"]) == (lost, "c")


def test_a_delay_short_and_long(nsqd: Nsqd, topic: str):
    with_channel(nsqd, topic)
    switch(nsqd, topic)
    with nsqd.connect() as connection:
        connection.ok(dpub(topic, 100, b"later"))
        connection.subscribe(topic, "c", 2)
        message = connection.message()
        connection.send(req(message.id, 50))
        assert connection.message().attempts == 2
        connection.send(req(message.id, 600_000))
        connection.settle()
    events = found(nsqd, topic)
    assert actions(events) == ["PUB", "START", "REQ_DEFER", "START", "REQ_DEFER"]
    first, *delays = (event.get("delay_ms") for event in events)
    assert first in range(101), "what was left of it when the message was stored"
    assert delays == [None, 50, None, 600_000]


def test_the_last_attempt_of_a_message(nsqd: Nsqd, topic: str):
    with_channel(nsqd, topic)
    switch(nsqd, topic)
    nsqd.post(f"/channel/settings?topic={topic}&channel=c", b'{"max_attempts": 2}')
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        nsqd.publish(topic, b"poison")
        for _ in range(2):
            consumer.send(req(consumer.message().id, 0))
        wait_until(lambda: found(nsqd, topic)[-1]["action"] == "DEAD_LETTER")
        events = found(nsqd, topic)
        last = address(consumer)
    assert actions(events) == ["PUB", "START", "REQ", "START", "REQ", "DEAD_LETTER"]
    assert (events[-1]["client"], events[-1]["attempts"], events[-1]["offset"]) == (last, 2, 0)


def test_messages_that_become_too_old(nsqd: Nsqd, topic: str):
    with_channel(nsqd, topic)
    switch(nsqd, topic)
    nsqd.post(f"/channel/settings?topic={topic}&channel=c", b'{"ttl_ms": 1}')
    with nsqd.connect() as publisher:
        publisher.ok(pub(topic, b"one"))
        publisher.ok(pub(topic, b"two"))
    wait_until(lambda: nsqd.unfinished(topic, "c") == 0)
    for msgid, offset in ((1, 0), (2, 37)):
        events = found(nsqd, topic, msgid)
        assert [(event["action"], event["offset"]) for event in events] == [("PUB", offset), ("EXPIRED", offset)]
        assert (events[1]["channel"], "client" in events[1]) == ("c", False)


@pytest.mark.parametrize("path", ["/pub", "/mpub"])
def test_who_publishes_over_http_is_named(nsqd: Nsqd, topic: str, path: str):
    with_channel(nsqd, topic)
    switch(nsqd, topic)
    nsqd.post(f"{path}?topic={topic}", b"body")
    (event,) = found(nsqd, topic)
    host, _, port = event["client"].rpartition(":")
    assert (host, int(port) > 0, event["action"]) == ("127.0.0.1", True, "PUB")


def test_messages_that_several_publish_at_once_are_each_their_own(nsqd: Nsqd, topic: str):
    with_channel(nsqd, topic)
    switch(nsqd, topic)
    publishers = [nsqd.connect() for _ in range(5)]
    for _ in range(3):
        for number, publisher in enumerate(publishers):
            publisher.send(pub(topic, b"a%d" % number) + mpub(topic, [b"b%d" % number, b"c%d" % number]))
    for publisher in publishers:
        publisher.ok(count=6)
    for msgid in range(1, 46):
        row = nsqd.get(f"/message/get?topic={topic}&search_mode=id&search_pos={msgid}")
        (event,) = found(nsqd, topic, msgid)
        assert (event["client"], event["offset"]) == (address(publishers[int(row["body"][1])]), row["offset"])
    for publisher in publishers:
        publisher.close()


# -- the switch --------------------------------------------------------------------------------------------------------


def test_it_is_switched_while_clients_go_on(nsqd: Nsqd, topic: str):
    with_channel(nsqd, topic)
    with nsqd.connect() as publisher, nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 10)

        def one_more(body: bytes) -> None:
            publisher.ok(pub(topic, body))
            consumer.finish(consumer.message())
            consumer.settle()

        for body in (b"1", b"2"):  # the second takes the way of a publisher that repeats itself
            one_more(body)
        switch(nsqd, topic)
        one_more(b"3")
        one_more(b"4")
        switch(nsqd, topic, "disable")
        one_more(b"5")
        switch(nsqd, topic, more="&channel=c")
        one_more(b"6")
        published_from = address(publisher)
    assert [actions(found(nsqd, topic, msgid)) for msgid in range(1, 7)] == [
        [],
        [],
        ["PUB", "START", "FIN"],
        ["PUB", "START", "FIN"],
        [],
        ["START", "FIN"],
    ]
    assert [found(nsqd, topic, msgid)[0]["client"] for msgid in (3, 4)] == [published_from] * 2


def test_what_is_in_flight_when_it_is_switched_on_is_told_of(nsqd: Nsqd, topic: str):
    with_channel(nsqd, topic)
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 10)
        nsqd.publish(topic, b"one", b"two")
        first, second = consumer.messages(2)
        switch(nsqd, topic)
        consumer.send(touch(second.id) + fin(second.id) + fin(first.id))
        consumer.settle()
    assert actions(found(nsqd, topic, 1)) == ["FIN"]
    events = found(nsqd, topic, 2)
    assert (actions(events), {event["offset"] for event in events}) == (["TOUCH", "FIN"], {34 + len(b"one")})


def test_a_channel_goes_before_its_topic(nsqd: Nsqd, topic: str):
    with_channel(nsqd, topic, "loud")
    with_channel(nsqd, topic, "quiet")
    switch(nsqd, topic)
    switch(nsqd, topic, "disable", "&channel=quiet")
    with nsqd.connect() as loud, nsqd.connect() as quiet:
        loud.subscribe(topic, "loud", 1)
        quiet.subscribe(topic, "quiet", 1)
        nsqd.publish(topic, b"a")
        for consumer in (loud, quiet):
            consumer.finish(consumer.message())
            consumer.settle()
    events = found(nsqd, topic)
    assert [(event["action"], event.get("channel")) for event in events] == [
        ("PUB", None),
        ("START", "loud"),
        ("FIN", "loud"),
    ]
    assert nsqd.get(f"/channel/settings?topic={topic}&channel=quiet")["settings"] == {"trace": ""}
    assert nsqd.get(f"/topic/settings?topic={topic}")["settings"] == {"trace": "all"}


def test_a_channel_that_is_made_later_is_traced_and_one_of_a_deleted_topic_is_not(nsqd: Nsqd, topic: str):
    nsqd.post(f"/topic/create?topic={topic}")
    switch(nsqd, topic)
    nsqd.publish(topic, b"a")
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "new", 1)
        consumer.finish(consumer.message())
        consumer.settle()
    assert actions(found(nsqd, topic)) == ["PUB", "START", "FIN"]
    nsqd.post(f"/topic/delete?topic={topic}")
    with_channel(nsqd, topic)
    nsqd.publish(topic, b"a")
    assert len(found(nsqd, topic)) == 3


@pytest.mark.parametrize("crash", [False, True], ids=["restart", "kill"])
@pytest.mark.parametrize("flag", ["--durability=os", "--durability=fsync"])
def test_it_survives_the_process(daemons: Daemons, crash: bool, flag: str):
    nsqd = daemons.nsqd(flag)
    with_channel(nsqd, "t")
    create(nsqd, "p")
    switch(nsqd, "t")
    switch(nsqd, "p", more="&only=traced")
    nsqd.publish("t", b"before")
    assert actions(found(nsqd, "t")) == ["PUB"]
    if crash:
        nsqd.kill()
        nsqd.start()
    else:
        nsqd.restart()
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 1)
        consumer.finish(consumer.message())
        consumer.settle()
        consumer.send(one("PUB_TRACE", "p", 0, traced(9, b"x")))
        consumer.response()
    assert actions(found(nsqd, "t")) == ["PUB", "START", "FIN"]
    assert actions(nsqd.get("/message/trace?topic=p&traceid=9")["events"]) == ["PUB"]
    switch(nsqd, "t", "disable")
    nsqd.restart()
    nsqd.publish("t", b"after")
    assert found(nsqd, "t", 2) == []


def test_a_clean_stop_writes_the_last_events(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    with_channel(nsqd, "t")
    switch(nsqd, "t")
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 1)
        nsqd.publish("t", b"a")
        consumer.message()
        nsqd.stop()
    nsqd.start()
    assert actions(found(nsqd, "t")) == ["PUB", "START", "DISCONNECT"]


# -- the topic of the trace --------------------------------------------------------------------------------------------


def test_the_trace_can_be_consumed_and_is_not_traced_itself(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os", "--trace-topic=my.trace")
    with_channel(nsqd, "t")
    switch(nsqd, "t")
    nsqd.publish("t", b"a")
    with nsqd.connect() as reader:
        wait_until(lambda: trace_count(nsqd) == 1)
        reader.subscribe("my.trace", "reader", 10)
        event = json.loads(reader.message().body)
        assert (event["action"], event["topic"], event["msgid"], event["node"]) == ("PUB", "t", 1, node(nsqd))
        nsqd.post("/topic/settings?topic=my.trace", b'{"trace": "all"}')
        nsqd.publish("t", b"b")
        message = reader.message()
        assert json.loads(message.body)["msgid"] == 2
        reader.finish(message)
        reader.settle()
    assert trace_count(nsqd) == 2
    assert nsqd.get("/topic/settings?topic=my.trace")["settings"]["max_bytes"] == 1024**3
    assert [topic["topic_name"] for topic in nsqd.get("/stats?format=json")["topics"]] == [
        "my.trace",
        "settle#ephemeral",
        "t",
    ]


def test_a_deleted_trace_topic_is_made_again(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    with_channel(nsqd, "t")
    switch(nsqd, "t")
    nsqd.publish("t", b"a")
    assert len(found(nsqd, "t")) == 1
    nsqd.post(f"/topic/delete?topic={TRACE}")
    assert found(nsqd, "t") == []
    nsqd.publish("t", b"b")
    assert len(found(nsqd, "t", 2)) == 1


def test_a_flood_stays_bounded_and_says_what_it_left_out(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os", "--trace-max-rate=200")
    with_channel(nsqd, "t")
    switch(nsqd, "t")
    began = time.monotonic()
    with nsqd.connect() as publisher, nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 2500)
        for _ in range(20):
            publisher.ok(mpub("t", [b"x"] * 500))
            consumer.finish(*consumer.messages(500))
        consumer.settle()
    elapsed_s = time.monotonic() - began

    with_channel(nsqd, TRACE)
    wait_until(lambda: trace_count(nsqd) + metric(nsqd, "flintmq_nsqd_trace_events_dropped_total") >= 30_001)
    assert trace_count(nsqd) <= 200 * (elapsed_s + 3) + 50 + 5
    dropped = metric(nsqd, "flintmq_nsqd_trace_events_dropped_total")
    told: list[int] = []
    with nsqd.connect() as reader:
        reader.subscribe(TRACE, "c", 100)
        while sum(told) < dropped:
            message = reader.message()
            reader.finish(message)
            event = json.loads(message.body)
            if event["action"] == "DROPPED":
                told.append(event["count"])
    assert sum(told) == dropped and len(told) <= elapsed_s + 3


def rows(nsqd: Nsqd) -> list[dict[str, Any]]:
    """The newest hundred messages of the trace."""
    depth = nsqd.stats(TRACE)["message_count"]
    nsqd.post(f"/channel/setoffset?topic={TRACE}&channel=c", f"msgcount:{max(0, depth - 99)}".encode())
    answer: list[dict[str, Any]] = nsqd.get(f"/channel/peek?topic={TRACE}&channel=c&count=100")["messages"]
    return answer


# -- the search --------------------------------------------------------------------------------------------------------


def test_a_search_answers_the_newest_events_and_says_when_there_are_more(nsqd: Nsqd, topic: str):
    with_channel(nsqd, topic)
    switch(nsqd, topic)
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        nsqd.publish(topic, b"a")
        for _ in range(10):
            message = consumer.message()
            consumer.send(req(message.id, 0))
        consumer.finish(consumer.message())
        consumer.settle()
    assert actions(found(nsqd, topic)) == ["PUB", *["START", "REQ"] * 10, "START", "FIN"]
    target = f"/message/trace?topic={topic}&msgid=1"
    assert nsqd.get(target)["complete"] is True
    cut = nsqd.get(f"{target}&limit=3")
    assert (actions(cut["events"]), cut["complete"]) == (["REQ", "START", "FIN"], False)
    assert nsqd.get(f"{target}&limit=23")["complete"] is True
    nothing = nsqd.get(f"/message/trace?topic={topic}&msgid=999")
    assert (nothing["events"], nothing["complete"]) == ([], True)
    assert nothing["searched_bytes"] > 0
    assert 0 < nothing["oldest"] < time.time_ns()


def test_a_search_finds_what_lies_behind_many_other_events(nsqd: Nsqd, topic: str):
    with_channel(nsqd, topic)
    switch(nsqd, topic)
    nsqd.publish(topic, b"needle")
    found(nsqd, topic)
    for _ in range(3):
        nsqd.publish(TRACE, *[b'{"hay":"%d"}' % number + b"." * 300 for number in range(3000)])
    nsqd.publish(TRACE, b'{"topic":"%s","msgid":1,' % topic.encode(), b'{"timestamp":"no"}')
    answer = nsqd.get(f"/message/trace?topic={topic}&msgid=1")
    assert (actions(answer["events"]), answer["complete"]) == (["PUB"], True)
    assert answer["searched_bytes"] > 3 * 3000 * 300


def test_without_a_trace_nothing_is_found(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    assert nsqd.get("/message/trace?topic=t&msgid=1") == {
        "topic": "t",
        "msgid": 1,
        "events": [],
        "complete": True,
        "searched_bytes": 0,
        "oldest": None,
    }


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/message/trace/enable", "/message/trace/disable"])
def test_what_the_switch_refuses(nsqd: Nsqd, topic: str, path: str):
    with_channel(nsqd, topic)

    def refused(query: str, status: int, text: str) -> None:
        assert_refused(nsqd.request("POST", path + query), status, text)

    refused("", 400, "MISSING_ARG_TOPIC")
    refused("?topic=a%20b", 400, "INVALID_ARG_TOPIC")
    refused("?topic=nobody", 404, "TOPIC_NOT_FOUND")
    refused(f"?topic={topic}&channel=a%20b", 400, "INVALID_ARG_CHANNEL")
    refused(f"?topic={topic}&channel=nobody", 404, "CHANNEL_NOT_FOUND")
    what = f"INVALID_ARG_TOPIC: {TRACE} is where the trace goes, and is not traced itself"
    refused(f"?topic={TRACE}", 400, what)
    assert nsqd.request("GET", f"{path}?topic={topic}").status == 405


def test_only_is_checked(nsqd: Nsqd, topic: str):
    with_channel(nsqd, topic)
    answer = nsqd.request("POST", f"/message/trace/enable?topic={topic}&only=some")
    assert_refused(answer, 400, "INVALID_ARG_ONLY: only=some, it must be traced, or be left out for all")


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("", "MISSING_ARG_TOPIC"),
        ("?topic=a%20b", "INVALID_ARG_TOPIC"),
        ("?topic=t", "MISSING_ARG_MSGID: name a msgid or a traceid"),
        ("?topic=t&msgid=1&traceid=1", "INVALID_ARG_TRACEID: name a msgid or a traceid, not both"),
        ("?topic=t&msgid=x", "INVALID_ARG_MSGID"),
        ("?topic=t&msgid=-1", "INVALID_ARG_MSGID"),
        ("?topic=t&traceid=0", f"INVALID_ARG_TRACEID: it must be a number from 1 to {2**64 - 1}"),
        (f"?topic=t&traceid={2**64}", f"INVALID_ARG_TRACEID: it must be a number from 1 to {2**64 - 1}"),
        ("?topic=t&msgid=1&limit=0", "INVALID_ARG_LIMIT"),
        ("?topic=t&msgid=1&limit=1001", "INVALID_ARG_LIMIT"),
    ],
)
def test_what_a_search_refuses(nsqd: Nsqd, query: str, text: str):
    assert_refused(nsqd.request("GET", f"/message/trace{query}"), 400, text)


@pytest.mark.parametrize(
    ("flag", "text"), [("--trace-topic=a b", "trace-topic"), ("--trace-max-rate=0", "trace-max-rate")]
)
def test_flags_are_checked(daemons: Daemons, flag: str, text: str):
    nsqd = daemons.new_nsqd(flag)
    nsqd.launch()
    assert nsqd.wait() != 0
    assert text in nsqd.log
