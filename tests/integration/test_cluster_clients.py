"""This project's clients while the leaders of a cluster die, end and are started again: real nsqds.

What is asked of them: no call fails, nothing is missing, order is kept, and what is published once is stored once. For
how long nothing goes on is printed, never asserted.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from tests.integration.daemons import PATIENCE_S, Cluster, Nsqd, running_cluster, wait_until
from tests.integration.flavours import Flavour, address_of, connections_of

from flintmq import DiscoveryError, Start
from flintmq.errors import FlintError


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """All nodes of the cluster are alive, and known."""
    started.mend()
    return started


def _created(cluster: Cluster, topic: str, partition_num: int = 1) -> str:
    cluster.create(topic, partition_num)
    for number in range(partition_num):
        cluster.wait_in_sync(topic, 3, number)
    return topic


def _address(cluster: Cluster) -> str:
    return "http://{}:{}".format(*cluster.nsqlookupd.http)


class Writing:
    """Publishes ``<name>-<number>``, one after the other, until it is ended.

    Args:
        how: where to, for ``pub``.
    """

    def __init__(self, producer: Any, topic: str, name: str, **how: Any) -> None:
        self._producer, self._topic, self._name, self._how = producer, topic, name, how
        self.count = 0
        self.longest_s = 0.0
        self.errors: list[Exception] = []
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_ending.is_set() and not self.errors:
            began, body = time.monotonic(), self.body(self.count)
            try:
                self._producer.call(lambda one, body=body: one.pub(self._topic, body, timeout=PATIENCE_S, **self._how))
            except (FlintError, TimeoutError) as error:
                self.errors.append(error)
                return
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.count += 1
            time.sleep(0.001)

    @property
    def name(self) -> bytes:
        return self._name.encode()

    def body(self, number: int) -> bytes:
        return f"{self._name}-{number}".encode()

    @property
    def bodies(self) -> list[bytes]:
        """Everything that was acknowledged, in order."""
        return [self.body(number) for number in range(self.count)]

    def more(self, count: int) -> None:
        """Wait until so many more are acknowledged."""
        wanted = self.count + count
        wait_until(lambda: self.count >= wanted or self.errors, lambda: f"{self._name} goes on at {self.count}")
        assert self.errors == []

    def end(self) -> list[bytes]:
        self._is_ending.set()
        self._thread.join(3 * PATIENCE_S)
        assert self.errors == []
        return self.bodies


def _stored(cluster: Cluster, topic: str, number: int, count: int) -> list[bytes]:
    """The messages of a partition, as its leader delivers them to somebody new."""
    found: list[bytes] = []
    with cluster.leader(topic, number).connect() as connection:
        connection.ok(b"SUB %s reader %d\n" % (topic.encode(), number))
        connection.rdy(200)
        while len(found) < count:
            message = connection.message()
            connection.finish(message)
            found.append(message.body)
        connection.nothing_comes()
    return found


def _publish(topic: str, body: bytes, producer: Any) -> Any:
    return producer.pub(topic, body, timeout=PATIENCE_S)


def _has(seen: list[Any], count: int) -> bool:
    return len(seen) >= count


def test_a_channel_begins_in_each_log_of_a_topic_without_partitions(cluster: Cluster, flavour: Flavour) -> None:
    """It is consumed on where another node leads one of them from then on."""
    topic = f"begun-{flavour.name}"
    there: dict[str, Any] = {"nsqlookupd_http_addresses": _address(cluster)}
    old = [b"old-%d" % number for number in range(30)]
    with flavour.producer([address_of(node) for node in cluster.nodes]) as producer:
        for body in old:
            producer.call(partial(_publish, topic, body))
    leaders = [cluster.leader_of_plain(topic, number) for number in range(3)]
    assert len(set(leaders)) > 1, "one nsqd has not got all of it"
    for number in range(3):
        cluster.wait_in_sync(topic, 3, number)
    for start in ("beginning", timedelta(hours=1), Start.offset(0)):
        seen: list[Any] = []
        with flavour.consumer(topic, "c", seen.append, start=start, **there) as consumer:
            wait_until(partial(_has, seen, 30), "all of it")
            assert set(consumer.call(lambda one: one.partitions)) == {0, 1, 2}
        assert sorted(message.body for message in seen) == sorted(old)
        assert {message.partition for message in seen} == {0, 1, 2}
        assert all(message.internal_id >> 50 == message.partition for message in seen)
        assert {message.trace_id for message in seen} == {None}
    seen = []
    with flavour.consumer(topic, "c", seen.append, start="beginning", **there) as consumer:
        wait_until(lambda: len(seen) == 30, "all of it")
        leaders[0].stop()
        others = [address_of(node) for node in cluster.nodes if node is not leaders[0]]
        wait_until(
            lambda: len(led := consumer.call(lambda one: one.partitions)) == 3 and set(led.values()) <= set(others),
            "it has followed the leaders",
        )
        with flavour.producer(others) as producer:
            producer.call(partial(_publish, topic, b"new"))
        wait_until(lambda: b"new" in [message.body for message in seen], "what is new")


def test_a_channel_does_not_begin_in_one_log_of_several(cluster: Cluster, flavour: Flavour) -> None:
    """A consumer that has addresses of nsqds does not know of the others, and says so; nothing is moved, or made."""
    topic = f"direct-{flavour.name}"
    with flavour.producer(address_of(cluster.nodes[0])) as producer:
        producer.call(partial(_publish, topic, b"a"))
    leader = cluster.leader_of_plain(topic)
    for addresses in ([address_of(leader)], [address_of(node) for node in cluster.nodes]):
        with (
            pytest.raises(DiscoveryError, match="give nsqlookupd_http_addresses"),
            flavour.consumer(topic, "c", print, start="beginning", nsqd_tcp_addresses=addresses) as consumer,
        ):
            if flavour.name == "asyncio":
                consumer.call(lambda one: one.run())
            wait_until(lambda: not connections_of(consumer), "it ends")
    assert "c" not in cluster.nsqlookupd.get(f"/channels?topic={topic}")["channels"]


def test_what_is_published_once_is_stored_once_and_in_order(cluster: Cluster, flavour: Flavour) -> None:
    """Through the death of a leader, and through a hand-over."""
    topic = _created(cluster, f"once-{flavour.name}")
    cluster.leader(topic).post(f"/channel/create?topic={topic}&channel=reader&partition=0")
    with flavour.producer(nsqlookupd_http_addresses=_address(cluster), idempotent=True) as producer:
        ordered = [Writing(producer, topic, f"ordered{number}", partition=0) for number in range(2)]
        free = [Writing(producer, topic, f"free{number}") for number in range(3)]
        writings = [*ordered, *free, Writing(producer, topic, "traced", trace_id=5)]
        for end in (Nsqd.kill, Nsqd.stop):
            for each in writings:
                each.more(20)
            end(cluster.leader(topic))
            for each in writings:
                each.more(20)
            cluster.mend()
            cluster.wait_in_sync(topic, 3)
        acknowledged = [each.end() for each in writings]
    found = _stored(cluster, topic, 0, sum(map(len, acknowledged)))
    for bodies in acknowledged:  # who waits for each answer has an order, however it publishes
        name = bodies[0].split(b"-")[0] + b"-"
        assert [body for body in found if body.startswith(name)] == bodies
    print(f"\n{flavour.name}: {len(found)} messages, each once; ", end="")
    print(f"longest wait of a publisher {max(each.longest_s for each in writings):.3f} s")


def test_publishing_once_to_a_topic_that_is_not_there_makes_it(cluster: Cluster, flavour: Flavour) -> None:
    """Many begin at the same moment: each message is stored once, wherever its log is led."""
    topic = f"new-once-{flavour.name}"
    with flavour.producer(nsqlookupd_http_addresses=_address(cluster), idempotent=True) as producer:
        writings = [Writing(producer, topic, f"new{number}") for number in range(3)]
        for each in writings:
            each.more(5)
        acknowledged = [body for each in writings for body in each.end()]
    (row,) = cluster.status(topic)["topics"]
    leaders = dict.fromkeys(cluster.leader_of_plain(topic, number) for number in range(row["partition_num"]))
    assert sum(node.stats(topic)["message_count"] for node in leaders) == len(acknowledged)


def test_what_is_published_once_to_a_topic_without_partitions_is_known_through_a_failover(
    cluster: Cluster, flavour: Flavour
) -> None:
    """It has logs all the same, as many as the cluster makes of a topic that a plain client makes."""
    topic = f"plain-once-{flavour.name}"
    cluster.nsqlookupd.post(f"/topic/create?topic={topic}")
    (row,) = cluster.status(topic)["topics"]
    assert row["meta"]["partition_num"] == 0
    numbers = range(row["partition_num"])
    for number in numbers:
        cluster.wait_in_sync(topic, 3, number)
        cluster.leader_of_plain(topic, number).post(f"/channel/create?topic={topic}&channel=reader")
    bare = {"Accept": "application/vnd.nsq; version=1.0"}
    found_by = {
        words: cluster.nsqlookupd.request("GET", f"/lookup?topic={topic}&access=w{words}", None, bare).json
        for words in ("", "&logs=true")
    }
    assert not found_by[""].get("partitions"), "it has none for anybody else"
    assert sorted(found_by["&logs=true"]["partitions"]) == [str(number) for number in numbers]
    assert all(peer["log_id"] for peer in found_by["&logs=true"]["partitions"].values())
    with flavour.producer(nsqlookupd_http_addresses=_address(cluster), idempotent=True) as producer:
        writings = [Writing(producer, topic, f"plain{number}") for number in range(3)]
        for each in writings:
            each.more(20)
        cluster.leader_of_plain(topic).kill()
        for each in writings:
            each.more(20)
        cluster.mend()
        acknowledged = [each.end() for each in writings]
    for number in numbers:
        cluster.wait_in_sync(topic, 3, number)
    found: list[bytes] = []
    for node in dict.fromkeys(cluster.leader_of_plain(topic, number) for number in numbers):
        depth = node.left(topic, "reader")["depth"]
        with node.connect() as connection:
            connection.ok(b"SUB %s reader\n" % topic.encode())
            connection.rdy(200)
            for _ in range(depth):
                message = connection.message()
                connection.finish(message)
                found.append(message.body)
    assert sorted(found) == sorted(body for bodies in acknowledged for body in bodies)


class Order:
    """A handler that notes what came, and what came before something that it should have come after.

    Attributes:
        last: the number that came last of each writer; what comes again is no news.
    """

    def __init__(self) -> None:
        self.last: dict[bytes, int] = {}
        self.gaps: list[tuple[bytes, int, int]] = []
        self.repeated = 0

    def __call__(self, message: Any) -> None:
        name, _, number = message.body.rpartition(b"-")
        before = self.last.get(name, -1)
        if int(number) > before + 1:
            self.gaps.append((name, before, int(number)))
        if int(number) <= before:
            self.repeated += 1
        else:
            self.last[name] = int(number)

    def has(self, writings: list[Writing]) -> bool:
        """Whether everything that was acknowledged has come."""
        return all(self.last.get(each.name, -1) == each.count - 1 for each in writings)


def test_every_node_is_restarted_under_load(cluster: Cluster, flavour: Flavour) -> None:
    """No call of a publisher fails, with keys or without; who consumes in order sees no gap, nobody misses anything."""
    topic = _created(cluster, f"rolling-{flavour.name}", 2)
    address = _address(cluster)
    order, every = Order(), Order()
    with (
        flavour.consumer(topic, "ordered", order, ordered=True, nsqlookupd_http_addresses=address),
        flavour.consumer(topic, "every", every, nsqlookupd_http_addresses=address),
        flavour.producer(nsqlookupd_http_addresses=address, idempotent=True) as producer,
    ):
        writings = [Writing(producer, topic, f"key{number}", sharding_id=f"key{number}") for number in range(3)]
        for node in cluster.nodes:
            for each in writings:
                each.more(10)
            node.stop()
            for each in writings:
                each.more(10)
            node.start()
            for number in range(2):
                cluster.wait_in_sync(topic, 3, number)
        for each in writings:
            each.end()
        wait_until(lambda: order.has(writings), lambda: f"everything in order: {order.last}, {order.gaps}")
        wait_until(lambda: every.has(writings), lambda: f"everything: {every.last}")
    assert order.gaps == []
    print(f"\n{flavour.name}: {sum(each.count for each in writings)} messages, {order.repeated} again; ", end="")
    print(f"longest wait of a publisher {max(each.longest_s for each in writings):.3f} s")


def test_partitions_that_are_added_are_used_and_read(cluster: Cluster, flavour: Flavour) -> None:
    """By consumers that were there before; what names a partition stays where it is, in order."""
    topic = _created(cluster, f"grown-{flavour.name}")
    address = _address(cluster)
    order = Order()
    with (
        flavour.consumer(topic, "ch", order, ordered=True, nsqlookupd_http_addresses=address, lookup_interval=0.5),
        flavour.producer(nsqlookupd_http_addresses=address) as producer,
        flavour.producer(nsqlookupd_http_addresses=address) as later,
    ):
        fixed = Writing(producer, topic, "fixed", partition=0)
        fixed.more(10)
        wait_until(lambda: cluster.expand(topic, 3), f"{topic} has more partitions")
        added = [Writing(later, topic, f"added{number}", partition=number) for number in (1, 2)]
        writings = [fixed, *added]
        for each in writings:
            each.more(10)
            each.end()
        wait_until(lambda: order.has(writings), lambda: f"everything: {order.last}")
    assert order.gaps == []
