"""A topic of a cluster gets more partitions: its channels are there before anything is published to them, as they are
elsewhere. Real nsqds and nsqlookupd.

Source: docs/guarantees.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import count

import pytest
from tests.integration.daemons import MESSAGE, Cluster, Nsqd, message_of, running_cluster, sized, wait_until
from tests.integration.flavours import Flavour, Seen
from tests.integration.load import body_of

COUNT = 5
_topics = (f"grown{number}" for number in count())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), lookupd_flags=["--default-partitions=1"]) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """All nodes of the cluster are alive, and known."""
    started.mend()
    return started


@pytest.fixture
def topic() -> str:
    return next(_topics)


def _leaders(cluster: Cluster, topic: str, number: int) -> dict[int, Nsqd]:
    """Who leads each of so many partitions, once all of them can be read."""
    return {each: cluster.leader_of_plain(topic, each) for each in range(number)}


def _expanded(cluster: Cluster, topic: str, number: int) -> dict[int, Nsqd]:
    wait_until(lambda: cluster.expand(topic, number), "it gets more partitions")
    return _leaders(cluster, topic, number)


def _at_each(leaders: dict[int, Nsqd], target: str, body: bytes = b"") -> None:
    for node in dict.fromkeys(leaders.values()):
        node.post(target, body)


def _fill(topic: str, leaders: dict[int, Nsqd], is_plain: bool = False) -> set[bytes]:
    """Publish some messages to each partition, at its leader; return their bodies."""
    bodies = set()
    for number, node in leaders.items():
        with node.connect() as publisher:
            for each in range(COUNT):
                bodies.add(body := b"%d-%d-%d" % (node.tcp[1], number, each))
                where = topic.encode() if is_plain else b"%s %d" % (topic.encode(), number)
                publisher.ok(b"PUB %s\n%s" % (where, sized(body)))
    return bodies


def _consume(topic: str, channel: str, leaders: dict[int, Nsqd], wanted: set[bytes]) -> None:
    """Have a channel's consumers at all leaders, until everything has come."""
    came: set[bytes] = set()
    with contextlib.ExitStack() as stack:
        nodes = dict.fromkeys(leaders.values())
        consumers = [stack.enter_context(node.connect()) for node in nodes]
        for consumer in consumers:
            consumer.ok(b"SUB %s %s\n" % (topic.encode(), channel.encode()))
            consumer.rdy(100)

        def all_came() -> bool:
            for consumer in consumers:
                with contextlib.suppress(TimeoutError):
                    while (frame := consumer.any_frame(0.01)) is not None:
                        if frame.kind == MESSAGE:
                            message = message_of(frame.data)
                            consumer.finish(message)
                            came.add(message.body)
            return came >= wanted

        wait_until(all_came, lambda: f"{channel} gets everything: {sorted(wanted - came)} of {len(wanted)} are missing")


def _unfinished(topic: str, channel: str, leaders: dict[int, Nsqd]) -> int:
    return sum(node.unfinished(topic, channel) for node in dict.fromkeys(leaders.values()))


@pytest.mark.parametrize("is_plain", [False, True])
def test_channels_whose_consumers_are_away_get_what_is_published_to_new_partitions(
    cluster: Cluster, topic: str, is_plain: bool
) -> None:
    if is_plain:
        cluster.nodes[0].post(f"/topic/create?topic={topic}")
        first = _leaders(cluster, topic, 1)
    else:
        cluster.create(topic, 2, copies=2)
        first = _leaders(cluster, topic, 2)
    for channel in ("a", "b"):
        _at_each(first, f"/channel/create?topic={topic}&channel={channel}")
    _at_each(first, f"/channel/create?topic={topic}&channel=gone%23ephemeral")
    wanted = _fill(topic, first, is_plain)
    leaders = _expanded(cluster, topic, 6)
    assert set(leaders.values()) == set(cluster.nodes)
    for node in cluster.nodes:
        assert {"a", "b"} <= {row["channel_name"] for row in node.stats(topic)["channels"]}
    before = wanted
    wanted = before | _fill(topic, {number: leaders[number] for number in range(len(first), 6)}, is_plain)
    # one that is new comes first, and takes nothing that is theirs
    new = {number: node for number, node in leaders.items() if number not in first}
    with contextlib.ExitStack() as stack:
        for node in dict.fromkeys(new.values()):
            stack.enter_context(node.connect()).ok(b"SUB %s new\n" % topic.encode())
    for channel in ("a", "b"):
        assert _unfinished(topic, channel, leaders) == len(wanted)
        _consume(topic, channel, leaders, wanted)


def test_channels_that_are_paused_are_so_in_new_partitions(cluster: Cluster, topic: str) -> None:
    cluster.create(topic, 3, copies=2)
    first = _leaders(cluster, topic, 3)
    for channel in ("held", "other"):
        _at_each(first, f"/channel/create?topic={topic}&channel={channel}")
    _at_each(first, f"/channel/pause?topic={topic}&channel=held")
    leaders = _expanded(cluster, topic, 6)
    wanted = _fill(topic, leaders)
    for node in cluster.nodes:
        assert node.stats(topic, "held")["paused"] and not node.stats(topic, "other")["paused"]
    assert _unfinished(topic, "held", leaders) == len(wanted)
    _consume(topic, "other", leaders, wanted)
    with contextlib.ExitStack() as stack:
        for node in cluster.nodes:
            consumer = stack.enter_context(node.connect())
            consumer.ok(b"SUB %s held\n" % topic.encode())
            consumer.rdy(100)
        assert all(node.stats(topic, "held")["in_flight_count"] == 0 for node in cluster.nodes)
    _at_each(leaders, f"/channel/unpause?topic={topic}&channel=held")
    _consume(topic, "held", leaders, wanted)


def test_a_topic_that_is_paused_and_what_is_set_for_it_come_to_a_node_that_had_nothing_of_it(
    cluster: Cluster, topic: str
) -> None:
    cluster.create(topic, 2, copies=1)
    first = _leaders(cluster, topic, 2)
    (other,) = set(cluster.nodes) - set(first.values())
    limits = {"max_attempts": 2, "dead_letter_topic": f"{topic}.gone"}
    _at_each(first, f"/channel/create?topic={topic}&channel=ch")
    _at_each(first, f"/topic/settings?topic={topic}", b'{"max_attempts": 2}')
    _at_each(first, f"/channel/settings?topic={topic}&channel=ch", b'{"dead_letter_topic": "%s.gone"}' % topic.encode())
    _at_each(first, f"/topic/pause?topic={topic}")
    leaders = _expanded(cluster, topic, 6)
    assert other in leaders.values()
    assert other.get(f"/topic/settings?topic={topic}")["settings"] == {"max_attempts": 2}
    assert other.get(f"/channel/settings?topic={topic}&channel=ch")["effective"].items() >= limits.items()
    (row,) = other.get(f"/stats?format=json&topic={topic}")["topics"]
    assert row["paused"]
    wanted = _fill(topic, leaders)
    _at_each(leaders, f"/topic/unpause?topic={topic}")
    _consume(topic, "ch", leaders, wanted)


def test_channels_whose_consumers_are_there_get_what_is_published_meanwhile(
    cluster: Cluster, topic: str, flavour: Flavour
) -> None:
    cluster.create(topic, 2, copies=2)
    address = "http://{}:{}".format(*cluster.nsqlookupd.http)
    seen = {channel: Seen() for channel in "abc"}
    with contextlib.ExitStack() as stack:
        for channel, handler in seen.items():
            stack.enter_context(
                flavour.consumer(topic, channel, handler, nsqlookupd_http_addresses=address, lookup_interval=1.0)
            )
        wait_until(lambda: _subscribed(cluster, topic) == {"a", "b", "c"}, "they have subscribed")
        numbers = count()
        acked: set[int] = set()
        for partition_num in (4, 6, 8):
            wait_until(lambda number=partition_num: cluster.expand(topic, number), "it gets more partitions")  # type: ignore[misc]
            for number in range(partition_num):
                with cluster.leader(topic, number, "w").connect() as publisher:
                    for each in (next(numbers) for _ in range(COUNT)):
                        publisher.ok(b"PUB %s %d\n%s" % (topic.encode(), number, sized(body_of(each, 100))))
                        acked.add(each)
        for channel, handler in seen.items():
            wait_until(lambda of=handler: of.counts.keys() >= acked, lambda name=channel: f"{name} gets all")  # type: ignore[misc]


def _subscribed(cluster: Cluster, topic: str) -> set[str]:
    rows = [row for node in cluster.nodes for row in node.get(f"/stats?format=json&topic={topic}")["topics"] or []]
    return {each["channel_name"] for row in rows for each in row["channels"] if each["clients"]}
