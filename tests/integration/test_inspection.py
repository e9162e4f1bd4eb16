"""Replay, skip, single messages and looks on a real nsqd: what survives a restart and a kill, what does not disturb."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.integration.daemons import Connection, Daemons, Message, Nsqd, dpub, req, wait_until

from flintmq.testing import ManualClock, MemoryNsqd

SECOND = 1_000_000_000
DAY = 86_400 * SECOND
WHATS = ("next", "in_flight", "deferred")
DELAY_MS = 30 * 86_400 * 1000


def restart(nsqd: Nsqd) -> None:
    nsqd.restart()


def kill(nsqd: Nsqd) -> None:
    nsqd.kill()
    nsqd.start()


DEATHS = pytest.mark.parametrize("die", [restart, kill], ids=["restart", "kill"])


def consumed(nsqd: Nsqd, topic: str, count: int, channel: str = "c", order: bool = False) -> list[Message]:
    """The next ``count`` messages of a channel, finished; and nothing behind them."""
    with nsqd.connect() as consumer:
        consumer.ok(
            b"%s %s %s%s\n"
            % (b"SUB_ORDER" if order else b"SUB", *map(str.encode, (topic, channel)), b" 0" if order else b"")
        )
        consumer.rdy(count + 1)
        messages = []
        for _ in range(count):
            messages.append(consumer.message())
            consumer.finish(messages[-1])
        consumer.settle()
        assert nsqd.unfinished(topic, channel) == 0
    return messages


def with_channel(nsqd: Nsqd, topic: str, *channels: str) -> None:
    nsqd.post(f"/topic/create?topic={topic}")
    for channel in channels:
        nsqd.post(f"/channel/create?topic={topic}&channel={channel}")


def set_offset(nsqd: Nsqd, topic: str, place: str, channel: str = "c") -> None:
    nsqd.post(f"/channel/setoffset?topic={topic}&channel={channel}", place.encode())


@DEATHS
@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_replay_is_durable_before_it_is_answered(daemons: Daemons, die: Callable[[Nsqd], None], durability: str):
    nsqd = daemons.nsqd(f"--durability={durability}")
    with_channel(nsqd, "t", "c")
    nsqd.publish("t", *(b"%d" % number for number in range(100)))
    consumed(nsqd, "t", 100)
    set_offset(nsqd, "t", "msgcount:91")
    die(nsqd)
    assert nsqd.stats("t", "c")["depth"] == 10
    assert [(m.body, m.attempts) for m in consumed(nsqd, "t", 10)] == [(b"%d" % n, 1) for n in range(90, 100)]
    nsqd.restart()
    assert nsqd.unfinished("t", "c") == 0


@DEATHS
def test_a_skip_is_durable_with_all_that_it_takes_away(daemons: Daemons, die: Callable[[Nsqd], None]):
    nsqd = daemons.nsqd()
    with_channel(nsqd, "t", "c", "other")
    nsqd.publish("t", *(b"%d" % number for number in range(100)))
    with nsqd.connect() as consumer:
        consumer.ok(dpub("t", 3_600_000, b"delayed"))
        consumer.subscribe("t", "c", 4)
        first, second, third, _fourth = consumer.messages(4)
        consumer.rdy(0)
        consumer.send(req(first.id, 0) + req(second.id, 20_000) + req(third.id, 600_000))
        consumer.settle()
        set_offset(nsqd, "t", "special:-1")
        assert nsqd.unfinished("t", "c") == 0
        die(nsqd)
    assert nsqd.unfinished("t", "c") == 0
    assert nsqd.unfinished("t", "other") == 101, "only this channel"
    nsqd.publish("t", b"new")
    assert [message.body for message in consumed(nsqd, "t", 1)] == [b"new"]


@DEATHS
def test_a_replay_keeps_older_delayed_messages(daemons: Daemons, die: Callable[[Nsqd], None]):
    nsqd = daemons.nsqd()
    with_channel(nsqd, "t", "c")
    with nsqd.connect() as producer:
        producer.ok(dpub("t", 3_600_000, b"older"))
        nsqd.publish("t", b"a", b"b")
        producer.ok(dpub("t", 3_600_000, b"younger"))
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 5)
        consumer.finish(*consumer.messages(2))
        consumer.settle()
    wait_until(lambda: nsqd.stats("t", "c")["deferred_count"] == 2)
    set_offset(nsqd, "t", "msgcount:2")
    die(nsqd)
    rows = nsqd.get("/channel/peek?topic=t&channel=c&what=deferred")["messages"]
    assert [row["body"] for row in rows] == ["older"]
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 5)
        assert [message.body for message in consumer.messages(2)] == [b"a", b"b"]
    wait_until(lambda: nsqd.stats("t", "c")["deferred_count"] == 2)


@DEATHS
def test_a_replay_in_order(daemons: Daemons, die: Callable[[Nsqd], None]):
    nsqd = daemons.nsqd()
    with_channel(nsqd, "t", "c")
    nsqd.publish("t", *(b"%d" % number for number in range(10)))
    assert len(consumed(nsqd, "t", 10, order=True)) == 10
    set_offset(nsqd, "t", "msgcount:5")
    die(nsqd)
    assert [m.body[12:] for m in consumed(nsqd, "t", 6, order=True)] == [b"%d" % number for number in range(4, 10)]
    die(nsqd)
    assert nsqd.unfinished("t", "c") == 0


@DEATHS
def test_single_messages_stay_finished(daemons: Daemons, die: Callable[[Nsqd], None]):
    nsqd = daemons.nsqd()
    with_channel(nsqd, "t", "c", "d")
    with nsqd.connect() as producer:
        producer.ok(dpub("t", 1500, b"soon") + dpub("t", 3_600_000, b"late"), 2)
    nsqd.publish("t", b"a", b"b", b"c")
    nsqd.post("/message/finish?topic=t&channel=c&msgid=4")
    for number in (1, 2):
        assert sorted(nsqd.post(f"/message/cancel?topic=t&msgid={number}").json["channels"]) == ["c", "d"]
    die(nsqd)
    assert nsqd.stats("t", "c")["deferred_count"] == nsqd.stats("t", "d")["deferred_count"] == 0
    assert [message.body for message in consumed(nsqd, "t", 2, "c")] == [b"a", b"c"]
    assert [message.body for message in consumed(nsqd, "t", 3, "d")] == [b"a", b"b", b"c"]


@DEATHS
def test_a_skipped_channel_stays_skipped(daemons: Daemons, die: Callable[[Nsqd], None]):
    nsqd = daemons.nsqd()
    with_channel(nsqd, "t", "c")
    nsqd.post("/channel/skip?topic=t&channel=c")
    die(nsqd)
    nsqd.publish("t", b"x")
    wait_until(lambda: nsqd.unfinished("t", "c") == 0)
    nsqd.post("/channel/unskip?topic=t&channel=c")
    die(nsqd)
    nsqd.publish("t", b"y")
    assert [message.body for message in consumed(nsqd, "t", 1)] == [b"y"]
    nsqd.post("/channel/skip?topic=t&channel=c")
    nsqd.post("/channel/delete?topic=t&channel=c")
    die(nsqd)
    with_channel(nsqd, "t", "c")
    assert "skipped" not in nsqd.stats("t", "c")


def test_retention_bounds_a_replay(daemons: Daemons):
    """Sealed files that every channel has passed are gone; a replay begins with what is left."""
    nsqd = daemons.nsqd("--max-bytes-per-file=20000", "--durability=os")
    with_channel(nsqd, "t", "c")
    for number in range(20):
        nsqd.publish("t", *(b"%d" % number + bytes(100) for _ in range(50)))
    consumed(nsqd, "t", 1000)
    wait_until(lambda: len(nsqd.segment_paths("t")) == 1)
    set_offset(nsqd, "t", "timestamp:0")
    left = nsqd.stats("t", "c")["depth"]
    assert 0 < left < 250
    answer = nsqd.request("GET", "/message/get?topic=t&search_mode=id&search_pos=1")
    assert answer.error == (404, "MESSAGE_NOT_FOUND")
    first = nsqd.get("/channel/peek?topic=t&channel=c&count=1")["messages"][0]
    assert first["id"] == 1001 - left
    assert nsqd.request("GET", "/message/get?topic=t&search_mode=virtual_offset&search_pos=0").status == 404
    assert len(consumed(nsqd, "t", left)) == left
    wait_until(lambda: nsqd.unfinished("t", "c") == 0)


def test_what_a_replay_needs_is_kept_until_it_is_consumed_again(daemons: Daemons):
    nsqd = daemons.nsqd("--max-bytes-per-file=20000", "--retention-bytes=1000000000", "--durability=os")
    with_channel(nsqd, "t", "c")
    for number in range(20):
        nsqd.publish("t", *(b"%d" % number + bytes(100) for _ in range(50)))
    consumed(nsqd, "t", 1000)
    set_offset(nsqd, "t", "msgcount:0")
    kill(nsqd)
    assert len(consumed(nsqd, "t", 1000)) == 1000


@pytest.mark.parametrize(
    ("place", "deferred_count"),
    [("msgcount:99", 2), ("virtual_queue:99999999", 2), ("timestamp:99999999999", 2), ("special:-1", 0)],
)
def test_a_place_that_is_not_there_yet_is_the_end_however_it_is_named(
    daemons: Daemons, place: str, deferred_count: int
):
    """A channel that has passed all but what is deferred keeps that, unless it is told to go to the end."""
    nsqd = daemons.nsqd()
    with_channel(nsqd, "t", "c")
    nsqd.publish("t", b"a", b"b")
    consumed(nsqd, "t", 2)
    for _ in range(2):
        nsqd.post("/pub?topic=t&defer=600000", b"later")
    wait_until(lambda: nsqd.stats("t", "c")["deferred_count"] == 2)
    nsqd.restart()  # deferred messages have left the window, as they do some time after they were deferred
    set_offset(nsqd, "t", place)
    found = nsqd.stats("t", "c")
    assert (found["depth"], found["deferred_count"]) == (0, deferred_count)


def test_a_cursor_command_and_a_replay_get_along(daemons: Daemons):
    nsqd = daemons.nsqd()
    with_channel(nsqd, "t", "c")
    nsqd.publish("t", *(b"%d" % number for number in range(10)))
    with nsqd.connect() as client:
        client.send(b"CURSOR t c 0 8\n")
        assert client.response() == b'{"sequence":8}'
        set_offset(nsqd, "t", "msgcount:3")
        client.send(b"CURSOR t c 0 5\n")
        assert client.response() == b'{"sequence":5}'
    assert nsqd.stats("t", "c")["depth"] == 6


def test_looks_under_load_disturb_nothing(daemons: Daemons):
    """The same traffic with and without somebody who looks all the time: the same deliveries, the same figures."""
    nsqd = daemons.nsqd("--durability=os")

    def traffic(topic: str) -> tuple[list[tuple[bytes, int]], list[int]]:
        with_channel(nsqd, topic, "c")
        delivered: list[tuple[bytes, int]] = []
        with nsqd.connect() as consumer:
            consumer.subscribe(topic, "c", 50)
            for block in range(40):
                nsqd.publish(topic, *(b"%d" % number for number in range(50 * block, 50 * block + 50)))
                messages = consumer.messages(50)
                delivered += [(message.body, message.attempts) for message in messages]
                again = messages[::10]
                consumer.finish(*(message for message in messages if message not in again))
                consumer.send(b"".join(req(message.id, 0) for message in again))
                messages = consumer.messages(5)
                delivered += [(message.body, message.attempts) for message in messages]
                consumer.finish(*messages)
            consumer.settle()
            row = nsqd.stats(topic, "c")
            names = ("depth", "in_flight_count", "deferred_count", "message_count", "requeue_count", "timeout_count")
            return delivered, [row[name] for name in names]

    undisturbed = traffic("alone")
    done = threading.Event()
    looks: list[int] = []

    def look() -> None:
        while not done.is_set():
            targets = (f"/channel/peek?topic=watched&channel=c&count=100&what={what}" for what in WHATS)
            looks.extend(nsqd.request("GET", target).status for target in targets)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        watched = traffic("watched")
    finally:
        done.set()
        watcher.join()
    assert watched == undisturbed
    assert looks.count(200) > 10


def test_a_message_of_thirty_days_over_restarts():
    """Delays beyond an hour, by every way there is, on a clock that is moved."""
    clock = ManualClock()
    with MemoryNsqd("--max-req-timeout=720h", clock=clock) as nsqd:
        nsqd.create("t", "c")
        nsqd.publish("t", b"requeued")
        with connect(nsqd) as client:
            client.ok(dpub("t", DELAY_MS, b"one"))
            client.ok(b"MDPUB t %d\n\0\0\0\x10\0\0\0\x02\0\0\0\x02aa\0\0\0\x02bb" % DELAY_MS)
            client.subscribe("t", "c", 10)
            client.send(req(client.message().id, DELAY_MS))
            client.settle()
        assert nsqd.counts("t", "c").deferred == 4
        for _ in range(3):
            clock.advance(9 * DAY)
            nsqd.restart()
            assert nsqd.counts("t", "c").deferred == 4
        clock.advance(3 * DAY - SECOND)
        nsqd.restart()
        with connect(nsqd) as client:
            client.subscribe("t", "c", 10)
            client.settle()
            assert nsqd.counts("t", "c").in_flight == 0
            nsqd.advance(2)
            messages = client.messages(4)
        assert sorted((message.body, message.attempts) for message in messages) == [
            (b"aa", 1),
            (b"bb", 1),
            (b"one", 1),
            (b"requeued", 2),
        ]


def connect(nsqd: MemoryNsqd) -> Connection:
    host, _, port = nsqd.tcp_address.rpartition(":")
    return Connection((host, int(port)))
