"""Dispatch by tag over TCP: desired_tag and ##client_dispatch_tag (Youzan's TCP protocol)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence

import pytest
from tests.conformance.conftest import is_ours, quick_flags
from tests.conformance.protocol_helpers import consumer
from tests.conformance.redesigned_helpers import create, extended, headed, one, pub_to, several
from tests.integration.daemons import MESSAGE, Connection, Daemons, Nsqd, dpub, message_of, pub, touch

pytestmark = pytest.mark.skipif(not is_ours("nsqd"), reason="NSQ has no tags")

KEY = "##client_dispatch_tag"


@pytest.fixture
def tagged(nsqd: Nsqd, topic: str) -> str:
    """An extended topic with partitions 0 and 1."""
    return create(nsqd, topic, 2, extend="true")


def item(tag: str, body: bytes) -> bytes:
    """A message behind its headers, which have a tag unless it is empty."""
    return headed({KEY: tag, "k": "v"} if tag else {"k": "v"}, body)


def publish(nsqd: Nsqd, topic: str, *tags: str, partition: int = 0) -> None:
    """Publish a message for each tag, with its number and its tag as the body, in one command."""
    items = [item(tag, f"{number}{tag}".encode()) for number, tag in enumerate(tags, 1)]
    with nsqd.connect() as connection:
        connection.ok(several("MPUB_EXT", topic, partition, items))


@contextlib.contextmanager
def desiring(
    nsqd: Nsqd, topic: str, tag: str = "", rdy_count: int = 100, command: str = "SUB %s c"
) -> Iterator[Connection]:
    """A consumer that knows headers and desires a tag, unless it is empty."""
    with nsqd.connect() as connection:
        connection.identify(extend_support=True, desired_tag=tag)
        connection.ok((command % topic).encode() + b"\n")
        if rdy_count:
            connection.rdy(rdy_count)
        yield connection


def finished(connection: Connection, count: int) -> list[bytes]:
    """Finish so many messages and return their bodies; after that there are no more."""
    messages = connection.messages(count)
    for message in messages:
        connection.finish(message)
    connection.nothing_comes()
    return [extended(message.body).body for message in messages]


def depth(nsqd: Nsqd, topic: str) -> int:
    depth: int = nsqd.stats(topic)["channels"][0]["depth"]
    return depth


def test_each_gets_what_is_its_own(nsqd: Nsqd, tagged: str):
    with (
        desiring(nsqd, tagged, "a") as a,
        desiring(nsqd, tagged, "b") as b,
        desiring(nsqd, tagged) as untagged,
    ):
        publish(nsqd, tagged, "a", "", "b", "x", "a")
        assert finished(a, 2) == [b"1a", b"5a"]
        assert finished(b, 1) == [b"3b"]
        assert finished(untagged, 2) == [b"2", b"4x"]


def test_a_message_comes_with_its_tag(nsqd: Nsqd, tagged: str):
    publish(nsqd, tagged, "a")
    with desiring(nsqd, tagged, "a") as connection:
        found = extended(connection.message().body)
    assert (found.version, json.loads(found.headers), found.body) == (4, {KEY: "a", "k": "v"}, b"1a")


def test_without_a_consumer_of_its_tag_it_goes_to_the_untagged(nsqd: Nsqd, tagged: str):
    publish(nsqd, tagged, "a", "b", "")
    with desiring(nsqd, tagged) as untagged:
        assert finished(untagged, 3) == [b"1a", b"2b", b"3"]


def test_a_tagged_consumer_alone_gets_nothing_else(nsqd: Nsqd, tagged: str):
    publish(nsqd, tagged, "", "b", "a")
    with desiring(nsqd, tagged, "a") as a:
        assert finished(a, 1) == [b"3a"]
        assert depth(nsqd, tagged) == 2
        with desiring(nsqd, tagged) as untagged:
            assert finished(untagged, 2) == [b"1", b"2b"]
    assert depth(nsqd, tagged) == 0


def test_messages_without_headers_go_to_the_untagged(nsqd: Nsqd, tagged: str):
    with desiring(nsqd, tagged, "a") as a, desiring(nsqd, tagged) as untagged:
        with nsqd.connect() as connection:
            connection.ok(pub_to(tagged, 0, b"plain") + one("PUB_EXT", tagged, 0, headed(b"", b"none")), count=2)
        assert finished(untagged, 2) == [b"plain", b"none"]
        a.nothing_comes()


def test_nobody_waits_for_a_consumer_that_is_not_ready(nsqd: Nsqd, tagged: str):
    publish(nsqd, tagged, *["a", ""] * 100)
    with desiring(nsqd, tagged, "a", rdy_count=1) as slow, desiring(nsqd, tagged) as untagged:
        held = slow.message()
        assert len(finished(untagged, 100)) == 100
        slow.finish(held)
        slow.rdy(200)
        assert len(finished(slow, 99)) == 99


def test_what_waited_for_a_tag_falls_to_the_untagged_when_its_consumer_leaves(nsqd: Nsqd, tagged: str):
    with desiring(nsqd, tagged, "a", rdy_count=1) as a, desiring(nsqd, tagged) as untagged:
        publish(nsqd, tagged, "a", "a", "a")
        assert extended(a.message().body).body == b"1a"
        untagged.nothing_comes()
        a.close()
        assert sorted(finished(untagged, 3)) == [b"1a", b"2a", b"3a"]


def test_what_waited_for_the_untagged_goes_to_a_consumer_of_its_tag(nsqd: Nsqd, tagged: str):
    with desiring(nsqd, tagged, "b"), desiring(nsqd, tagged, rdy_count=0) as untagged:
        publish(nsqd, tagged, "a", "", "a")
        with desiring(nsqd, tagged, "a") as a:
            assert finished(a, 2) == [b"1a", b"3a"]
        untagged.rdy(10)
        assert finished(untagged, 1) == [b"2"]


def test_requeued_timed_out_and_delayed_ones_stay_with_their_tag(nsqd: Nsqd, tagged: str):
    with nsqd.connect() as a, desiring(nsqd, tagged) as untagged:
        a.identify(extend_support=True, desired_tag="a", msg_timeout=1000)
        a.ok(f"SUB {tagged} c 0\n".encode())
        a.rdy(10)
        publish(nsqd, tagged, "a")
        message = a.message()
        for attempts, delay_ms in ((2, 0), (3, 20)):
            a.send(b"REQ %s %d\n" % (message.id, delay_ms))
            assert a.message().attempts == attempts
        assert a.message().attempts == 4, "timed out"
        a.send(touch(message.id))
        a.finish(message)
        untagged.nothing_comes()
    assert depth(nsqd, tagged) == 0


def test_a_consumer_of_one_partition(nsqd: Nsqd, tagged: str):
    with (
        desiring(nsqd, tagged, "a", command="SUB %s c 1") as a,
        desiring(nsqd, tagged) as untagged,
    ):
        for partition in (0, 1):
            publish(nsqd, tagged, "a", "", partition=partition)
        assert finished(a, 1) == [b"1a"]
        assert sorted(finished(untagged, 3)) == [b"1a", b"2", b"2"], "in partition 0 nobody desires it"


def test_rdy_bounds_all_partitions_of_a_tag_together(nsqd: Nsqd, tagged: str):
    for partition in (0, 1):
        publish(nsqd, tagged, "a", "a", "a", partition=partition)
    with desiring(nsqd, tagged, "a", rdy_count=4) as a:
        messages = a.messages(4)
        a.nothing_comes()
        a.finish(*messages)
        assert len(finished(a, 2)) == 2


def test_in_order(nsqd: Nsqd, topic: str):
    create(nsqd, topic, 1, extend="true", orderedmulti="true")
    publish(nsqd, topic, "", "a", "")
    command = "SUB_ORDER %s c 0"
    with (
        desiring(nsqd, topic, "a", 0, command) as a,
        desiring(nsqd, topic, "", 1, command) as untagged,
    ):
        untagged.finish(untagged.message())
        untagged.nothing_comes()
        a.rdy(1)
        second = a.message()
        untagged.nothing_comes()
        a.finish(second)
        assert untagged.message().body[-1:] == b"3"


def test_a_plain_topic_with_headers(nsqd: Nsqd, topic: str):
    nsqd.post(f"/topic/create?topic={topic}&extend=true")
    with nsqd.connect() as publisher:
        for tag in ("a", ""):
            publisher.ok(one("PUB_EXT", topic, None, item(tag, tag.encode() or b"none")))
        publisher.ok(pub(topic, b"plain") + dpub(topic, 20, b"later"), count=2)
    with desiring(nsqd, topic, "a") as a, consumer(nsqd, topic, rdy_count=10) as nsq:
        assert finished(a, 1) == [b"a"]
        assert [message.body for message in nsq.messages(3)] == [b"none", b"plain", b"later"]


def test_a_topic_without_headers_has_no_tags(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, rdy_count=10, feature_negotiation=True, desired_tag="a") as connection:
        nsqd.publish(topic, b"x")
        assert connection.message().body == b"x"


@pytest.mark.parametrize("tag", ["a b", "ä", "a" * 101, "##"])
def test_what_cannot_be_a_tag(nsqd: Nsqd, tag: str):
    with nsqd.connect() as connection:
        body = json.dumps({"desired_tag": tag, "extend_support": True}).encode()
        assert connection.error(b"IDENTIFY\n" + len(body).to_bytes(4, "big") + body).startswith("E_BAD_BODY ")


def test_a_tag_is_echoed_only_when_there_is_one(nsqd: Nsqd):
    for tag, fields in (("a" * 100, {"desired_tag": "a" * 100}), ("", {})):
        with nsqd.connect() as connection:
            answer = connection.identify(feature_negotiation=True, extend_support=True, desired_tag=tag)
            assert {name: answer[name] for name in answer if name == "desired_tag"} == fields


def test_what_waits_survives_a_kill(shared_daemons: Daemons, topic: str):
    nsqd = shared_daemons.nsqd(*quick_flags())
    create(nsqd, topic, 1, extend="true")
    with desiring(nsqd, topic, "a", 1) as a, desiring(nsqd, topic) as untagged:
        publish(nsqd, topic, *["a", ""] * 50)
        a.message()
        assert len(finished(untagged, 50)) == 50
        publish(nsqd, topic, "")
        assert len(finished(untagged, 1)) == 1
        nsqd.kill()
    nsqd.start()
    with desiring(nsqd, topic) as untagged, desiring(nsqd, topic, "a") as a:
        first = _bodies(untagged, a)
    assert {body for body in first if body.endswith(b"a")} == {f"{number}a".encode() for number in range(1, 101, 2)}


def _bodies(*connections: Connection) -> Sequence[bytes]:
    """What comes until nothing does."""
    found = []
    for connection in connections:
        with contextlib.suppress(TimeoutError):
            while (frame := connection.any_frame(0.5)) is not None:
                if frame.kind == MESSAGE:
                    found.append(extended(message_of(frame.data).body).body)
    return found
