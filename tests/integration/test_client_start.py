"""Where a channel begins, ``Consumer(start=)``, with both clients: against our nsqd, and against another."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.integration.daemons import Daemons, Nsqd, Nsqlookupd, mpub, wait_until
from tests.integration.flavours import FLAVOURS, Flavour, address_of, connections_of
from tests.integration.test_client_deferred import nsqd_of_others

import flintmq.sync
from flintmq import Consumer, DiscoveryError, Message, NsqdError, OptionError, Start


@pytest.fixture(scope="module")
def nsqlookupd(shared_nsqlookupd: Nsqlookupd) -> Nsqlookupd:
    return shared_nsqlookupd


@pytest.fixture(scope="module")
def nsqd(shared_nsqd: Nsqd) -> Nsqd:
    return shared_nsqd


def consumed(flavour: Flavour, topic: str, count: int, start: Any, **options: Any) -> list[Message]:
    """The first messages that a new consumer of channel c is handed; all of them are finished."""
    seen: list[Message] = []
    with flavour.consumer(topic, "c", seen.append, start=start, **options):
        wait_until(lambda: len(seen) >= count, f"{count} messages")
    assert len(seen) == count
    return seen


def bodies(messages: list[Message]) -> list[bytes]:
    return [message.body for message in messages]


def test_a_plain_topic(nsqd: Nsqd, flavour: Flavour):
    topic = f"plain-{flavour.name}"
    nsqd.publish(topic, b"a", b"b", b"c")
    here: dict[str, Any] = {"nsqd_tcp_addresses": address_of(nsqd)}
    first = consumed(flavour, topic, 3, "beginning", **here)
    assert bodies(first) == [b"a", b"b", b"c"]
    assert [message.partition for message in first] == [None] * 3
    offsets = [message.offset for message in first if message.offset is not None]
    assert len(offsets) == 3 and offsets[0] == 0 and offsets == sorted(offsets)
    assert all(message.raw_size for message in first)
    for start in (timedelta(hours=1), datetime.now(UTC) - timedelta(minutes=5), Start.offset(offsets[1])):
        again = consumed(flavour, topic, 3 if not isinstance(start, Start) else 2, start, **here)
        assert bodies(again) == [b"a", b"b", b"c"][-len(again) :]
        assert {message.attempts for message in again} == {1}
    assert bodies(consumed(flavour, topic, 1, Start.count(3), **here)) == [b"c"]
    nsqd.publish(topic, b"unseen")
    seen: list[Message] = []
    with flavour.consumer(topic, "c", seen.append, start="end", **here):
        nsqd.publish(topic, b"new")
        wait_until(lambda: len(seen) == 1, "the new one")
    assert bodies(seen) == [b"new"]
    assert nsqd.unfinished(topic, "c") == 0


def test_only_the_first_consumer_says_where(nsqd: Nsqd, flavour: Flavour):
    topic = f"second-{flavour.name}"
    nsqd.publish(topic, b"a", b"b")
    with nsqd.connect() as other:
        other.subscribe(topic, "c", 10)
        other.finish(*other.messages(2))
        other.settle()
        other.rdy(0)
        seen: list[Message] = []
        with flavour.consumer(topic, "c", seen.append, start="beginning", nsqd_tcp_addresses=address_of(nsqd)):
            nsqd.publish(topic, b"c")
            wait_until(lambda: len(seen) == 1, "a message")
        assert bodies(seen) == [b"c"]


def test_a_connection_that_breaks_does_not_begin_anew(daemons: Daemons, flavour: Flavour):
    nsqd = daemons.nsqd("--durability=os")
    nsqd.publish("t", b"a", b"b")
    seen: list[Message] = []
    with flavour.consumer("t", "c", seen.append, start="beginning", nsqd_tcp_addresses=address_of(nsqd)) as consumer:
        wait_until(lambda: len(seen) == 2 and nsqd.unfinished("t", "c") == 0, "all of it is finished")
        nsqd.restart()
        wait_until(lambda: connections_of(consumer) == (address_of(nsqd),), "it is connected again")
        nsqd.publish("t", b"c")
        wait_until(lambda: len(seen) > 2, "the new one")
        assert bodies(seen) == [b"a", b"b", b"c"]
        assert seen[2].offset is not None and seen[2].offset > (seen[1].offset or 0)


def test_a_topic_that_is_not_there_yet(nsqd: Nsqd, flavour: Flavour):
    topic = f"later-{flavour.name}"
    seen: list[Message] = []
    with flavour.consumer(topic, "c", seen.append, start="end", nsqd_tcp_addresses=address_of(nsqd)):
        wait_until(lambda: bool(nsqd.get(f"/stats?format=json&topic={topic}")["topics"]), "the topic is made")
        nsqd.publish(topic, b"a")
        wait_until(lambda: len(seen) == 1, "the message")
    assert bodies(seen) == [b"a"]


def test_partitions(nsqd: Nsqd, nsqlookupd: Nsqlookupd, flavour: Flavour):
    topic = f"parts-{flavour.name}"
    nsqlookupd.post(f"/topic/create?topic={topic}&partition_num=2")
    with nsqd.connect() as producer:
        for number, body in enumerate((b"zero", b"one")):
            producer.ok(mpub(f"{topic} {number}", [body, body]))
    there = {"nsqlookupd_http_addresses": f"http://127.0.0.1:{nsqlookupd.http[1]}"}
    found = consumed(flavour, topic, 4, "beginning", **there)
    assert sorted((message.partition, message.body) for message in found) == [
        (0, b"zero"), (0, b"zero"), (1, b"one"), (1, b"one"),
    ]  # fmt: skip
    half = consumed(flavour, topic, 2, Start.count(2), **there)
    second = {message.internal_id: (message.partition, message.offset) for message in found if message.offset}
    assert {message.internal_id: (message.partition, message.offset) for message in half} == second


def test_partitions_of_one_nsqd_need_nsqlookupd(nsqd: Nsqd, nsqlookupd: Nsqlookupd, flavour: Flavour):
    topic = f"direct-{flavour.name}"
    nsqlookupd.post(f"/topic/create?topic={topic}&partition_num=1")
    with nsqd.connect() as producer:
        producer.ok(mpub(f"{topic} 0", [b"a"]))
    seen: list[Message] = []
    options: dict[str, Any] = {"start": "beginning", "nsqd_tcp_addresses": address_of(nsqd)}
    with (
        pytest.raises(DiscoveryError, match="give nsqlookupd_http_addresses"),
        flavour.consumer(topic, "c", seen.append, **options) as consumer,
    ):
        if flavour.name == "asyncio":
            consumer.call(lambda it: it.run())
        wait_until(lambda: not connections_of(consumer), "it ends")
    assert seen == []
    assert nsqd.unfinished(topic, "c") == 1


@pytest.mark.parametrize("kind", [Consumer, flintmq.sync.Consumer], ids=FLAVOURS)
def test_what_cannot_be(kind: Any):
    with pytest.raises(OptionError, match="without ordered=True"):
        kind("t", "c", nsqlookupd_http_addresses="a", ordered=True, start="end")
    for start in ("now", 5, datetime(2026, 1, 1)):
        with pytest.raises(OptionError, match="a datetime with a time zone"):
            kind("t", "c", nsqd_tcp_addresses="a", start=start)


def test_another_nsqd_does_not_know_it(flavour: Flavour):
    text = "E_INVALID invalid command SUB_ADVANCED"
    with (
        nsqd_of_others(lambda command, bodies: "OK", refuse_sub=text) as address,
        pytest.raises(NsqdError, match=f"{text}: only FlintMQ's nsqd and Youzan's know this command"),
        flavour.consumer("t", "c", print, start="end", nsqd_tcp_addresses=address),
    ):
        pass
