"""Consumers with one fixed address, at a node that leads a part of their topic: they get the other parts as well.

Source: docs/decisions/0018.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from tests.integration.daemons import Cluster, Connection, Nsqd, running_cluster, sized, wait_until

COUNT = 6
_topics = (f"spread{number}" for number in count())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), flags=["--msg-timeout=60s"]) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """All nodes of the cluster are alive, and known."""
    started.mend()
    return started


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic of which each of three nodes leads a partition."""
    name = next(_topics)
    cluster.create(name, 3)
    assert len({id(node) for node in _leaders(cluster, name)}) == 3
    return name


def _leaders(cluster: Cluster, topic: str) -> list[Nsqd]:
    return [cluster.leader(topic, number) for number in range(3)]


def _fill(cluster: Cluster, topic: str, partitions: range = range(3), at: int = 0) -> set[bytes]:
    """Publish some messages to each partition, at its leader; return their bodies."""
    bodies = set()
    for number in partitions:
        with cluster.leader(topic, number).connect() as publisher:
            for each in range(at, at + COUNT):
                bodies.add(body := b"%d-%d" % (number, each))
                publisher.ok(b"PUB %s %d\n%s" % (topic.encode(), number, sized(body)))
    return bodies


def _subscribed(node: Nsqd, topic: str, rdy_count: int) -> Connection:
    consumer = node.connect()
    consumer.ok(b"SUB %s ch\n" % topic.encode())
    consumer.rdy(rdy_count)
    return consumer


def _asked_again(cluster: Cluster, node: Nsqd) -> None:
    """Return when a node has asked the others twice, about all that is consumed at it."""
    fence = next(_topics)
    cluster.create(fence, 3)
    others = [number for number, leader in enumerate(_leaders(cluster, fence)) if leader is not node]
    for number in others:
        _fill(cluster, fence, range(number, number + 1))
    with _subscribed(node, fence, 50) as consumer:
        consumer.messages(len(others) * COUNT)


def _unfinished(cluster: Cluster, topic: str) -> int:
    return sum(node.unfinished(topic, "ch") for node in _leaders(cluster, topic))


@pytest.mark.parametrize("rdy_count", [1, 50])
def test_what_nobody_consumes_elsewhere_comes_too_and_no_more_than_rdy(
    cluster: Cluster, topic: str, rdy_count: int
) -> None:
    node = cluster.leader(topic, 1)
    bodies = _fill(cluster, topic)
    with _subscribed(node, topic, rdy_count) as consumer:
        came: list[bytes] = []
        held = []
        while len(came) < len(bodies):
            held.append(consumer.message())
            came.append(held[-1].body)
            assert len(held) <= rdy_count
            if len(held) == min(rdy_count, len(bodies) - len(came) + len(held)):
                consumer.finish(*held)
                held.clear()
        assert sorted(came) == sorted(bodies), "each once"
        assert f" {topic}:ch of node" in node.log
        wait_until(lambda: _unfinished(cluster, topic) == 0, "what was finished is")
        # and what is published at nodes that have brought all they had
        bodies = _fill(cluster, topic, at=COUNT)
        more: set[bytes] = set()
        while more != bodies:
            message = consumer.message()
            assert message.attempts == 1
            more.add(message.body)
            consumer.finish(message)


def test_what_is_said_of_messages_reaches_who_has_sent_them(cluster: Cluster, topic: str) -> None:
    node, other = cluster.leader(topic, 0), cluster.leader(topic, 2)
    _fill(cluster, topic, range(2, 3))
    with _subscribed(node, topic, 1) as consumer:
        first = consumer.message()
        consumer.send(b"TOUCH %s\n" % first.id)
        consumer.send(b"REQ %s 0\n" % first.id)
        again = [consumer.message()]
        while again[-1].body != first.body:
            consumer.finish(again[-1])
            again.append(consumer.message())
        assert again[-1].attempts == 2
        assert consumer.error(b"FIN %s\n" % (b"f" * 16)).startswith("E_FIN_FAILED")
    # it is gone, and what it held is queued again where it is
    wait_until(lambda: other.stats(topic, "ch")["in_flight_count"] == 0, "the leader has it again")
    left = COUNT - len(again) + 1
    assert other.unfinished(topic, "ch") == left
    with _subscribed(other, topic, 50) as consumer:
        assert first.body in {message.body for message in consumer.messages(left)}


def test_who_does_not_read_or_asks_for_nothing_gets_nothing(cluster: Cluster, topic: str) -> None:
    node = cluster.leader(topic, 0)
    _fill(cluster, topic)
    with _subscribed(node, topic, 0) as idle, _subscribed(node, topic, 2) as consumer:
        held = consumer.messages(2)
        _asked_again(cluster, node)
        consumer.nothing_comes()  # its RDY is used up, whoever has what
        consumer.finish(*held)
        came = {message.body for message in held}
        while len(came) < 3 * COUNT:
            message = consumer.message()
            consumer.finish(message)
            came.add(message.body)
        idle.nothing_comes()


def test_where_consumers_are_everywhere_nothing_is_brought(cluster: Cluster, topic: str) -> None:
    leaders = _leaders(cluster, topic)
    consumers = [_subscribed(node, topic, 1) for node in leaders]
    try:
        bodies = _fill(cluster, topic)
        held = [consumer.message() for consumer in consumers]  # nobody finishes: messages wait everywhere
        assert {message.body for message in held} <= bodies
        for node in leaders:
            _asked_again(cluster, node)
        assert all(f" {topic}:ch of node" not in node.log for node in leaders)
        assert _unfinished(cluster, topic) == 3 * COUNT
    finally:
        for consumer in consumers:
            consumer.close()


def test_a_leader_that_dies_is_followed_by_another(cluster: Cluster, topic: str) -> None:
    for number in range(3):
        cluster.wait_in_sync(topic, 3, number)
    node, other = cluster.leader(topic, 0), cluster.leader(topic, 1)
    bodies = _fill(cluster, topic)
    came = set()
    with _subscribed(node, topic, 1) as consumer:
        for _ in range(COUNT):
            message = consumer.message()
            came.add(message.body)
            consumer.finish(message)
        other.kill()
        while came != bodies:
            message = consumer.message()
            came.add(message.body)
            consumer.send(b"FIN %s\n" % message.id)
