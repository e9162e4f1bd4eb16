"""Topics with copies on several nodes: real nsqds and a nsqlookupd with their coordination store.

Every test finds all nodes alive, and leaves them as it likes. What takes how long is printed, never asserted.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import (
    ERROR,
    PATIENCE_S,
    Closed,
    Cluster,
    Connection,
    Daemons,
    Frame,
    Nsqd,
    running_cluster,
    sized,
    wait_until,
)
from tests.integration.etcd import Etcd
from tests.integration.flavours import Flavour

_BARE = {"Accept": "application/vnd.nsq; version=1.0"}
_topics = (f"topic{number}" for number in count())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """All nodes of the cluster are alive, and known."""
    started.mend()
    yield started
    for node in started.nodes:
        if node.is_running:
            node.send_signal(signal.SIGCONT)


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic with one partition on three nodes."""
    name = next(_topics)
    cluster.create(name)
    cluster.wait_in_sync(name, 3)
    return name


def _pub(topic: str, body: bytes, number: int = 0) -> bytes:
    return b"PUB %s %d\n%s" % (topic.encode(), number, sized(body))


FETCH = b"FETCH %s 0\n" + (1).to_bytes(8, "big") + (2).to_bytes(8, "big") + bytes((0, 1, 0, 0)) + bytes(4)


def _answer(connection: Connection, topic: str, body: bytes) -> Frame:
    connection.send(_pub(topic, body))
    return connection.frame()


class Publisher:
    """Publishes to whoever leads, until each message is acknowledged."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.acknowledged: list[bytes] = []
        self.longest_s = 0.0
        self._cluster = cluster
        self._topic = topic
        self._connection: Connection | None = None

    def publish(self, *bodies: bytes) -> None:
        for body in bodies:
            began = time.monotonic()
            wait_until(lambda body=body: self._try(body), f"{body!r} is acknowledged")  # type: ignore[misc]
            self.acknowledged.append(body)
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    def _try(self, body: bytes) -> bool:
        try:
            if self._connection is None:
                leader = self._cluster.found_leader(self._topic, access="w")
                if leader is None or not leader.is_running:
                    return False
                self._connection = leader.connect()
            kind, data = _answer(self._connection, self._topic, body)
        except (OSError, Closed, AssertionError):
            self.close()
            return False
        if kind != ERROR:
            assert data == b"OK"
            return True
        assert data.startswith((b"E_FAILED_ON_NOT_LEADER", b"E_FAILED_ON_NOT_WRITABLE", b"E_PUB_FAILED")), data
        self.close()
        return False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Seen:
    """A handler that finishes everything."""

    def __init__(self) -> None:
        self.bodies: set[bytes] = set()

    def __call__(self, message: Any) -> None:
        self.bodies.add(message.body)


def _consumer(node: Nsqd, topic: str, rdy_count: int = 100) -> Connection:
    connection = node.connect()
    connection.ok(b"SUB %s ch 0\n" % topic.encode())
    connection.rdy(rdy_count)
    return connection


def _received(connection: Connection, bodies: set[bytes]) -> list[bytes]:
    """Consume until all of ``bodies`` have come; return everything that came."""
    missing, came = set(bodies), []
    while missing:
        message = connection.message()
        connection.finish(message)
        came.append(message.body)
        missing.discard(message.body)
    return came


def _stored(node: Nsqd, topic: str) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(node.data_path.glob(f"topics/*{topic}/p-0000/*.log")))


def test_what_is_acknowledged_is_on_every_node_byte_for_byte(cluster: Cluster, topic: str) -> None:
    bodies = [b"body-%d" % number for number in range(50)]
    leader = cluster.leader(topic)
    with leader.connect() as connection:
        for body in bodies:
            connection.ok(_pub(topic, body))
    stored = [_stored(node, topic) for node in cluster.nodes]
    assert all(body in each for body in bodies for each in stored)
    batches = {each[each.index(b"FMQB") if b"FMQB" in each else 64 :] for each in stored}
    assert len(batches) == 1


def test_a_node_that_does_not_lead_says_so(cluster: Cluster, topic: str) -> None:
    leader = cluster.leader(topic)
    other = next(node for node in cluster.nodes if node is not leader)
    with other.connect() as connection:
        assert connection.error(_pub(topic, b"x")).startswith("E_FAILED_ON_NOT_LEADER ")  # and goes on
        assert connection.error(FETCH % topic.encode()).startswith("E_FAILED_ON_NOT_LEADER ")
        connection.settle()
    with other.connect() as connection:
        assert connection.error(b"SUB %s ch 0\n" % topic.encode()).startswith("E_FAILED_ON_NOT_LEADER ")
        connection.wait_closed()
    answer = other.request("POST", f"/pub?topic={topic}&partition=0", b"x", _BARE)
    assert answer.error == (400, "E_FAILED_ON_NOT_LEADER")
    assert other.request("POST", f"/topic/create?topic={topic}").status == 200, "it is there"
    assert other.request("POST", f"/topic/create?topic={topic}-2&partition_num=2").status == 400
    with leader.connect() as connection:
        connection.ok(_pub(topic, b"x"))


def test_every_node_says_where_a_log_is(cluster: Cluster, topic: str) -> None:
    """Readers by offset need one address, and the log's id is the same wherever it is led."""
    leader = cluster.leader(topic)
    with leader.connect() as connection:
        connection.ok(_pub(topic, b"x"))

    def offsets(node: Nsqd) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        with node.connect() as connection:
            connection.send(b"OFFSETS %s\n" % topic.encode())
            answer = json.loads(connection.response())
        return answer["partitions"], answer["elsewhere"]

    partition = cluster.partition(topic)
    (row,), elsewhere = offsets(leader)
    assert (row["partition"], row["start"], row["end"], elsewhere) == (0, 1, 2, [])
    assert row["epoch"] == partition["epoch"] > 0
    told = {"partition": 0, "log_id": row["log_id"], "epoch": row["epoch"], "nsqd": f"127.0.0.1:{leader.tcp[1]}"}
    for node in cluster.nodes:
        if node is not leader:
            wait_until(lambda node=node: offsets(node) == ([], [told]), lambda: f"{told} is told")  # type: ignore[misc]
    leader.kill()
    successor = cluster.leader(topic, but=leader)
    (later,), _ = offsets(successor)
    assert (later["log_id"], later["start"], later["end"]) == (row["log_id"], 1, 2)
    assert later["epoch"] > row["epoch"]
    with successor.connect() as connection:
        stale = FETCH[:-4] + row["epoch"].to_bytes(4, "big")
        assert connection.error(stale % topic.encode()).startswith("E_STALE_EPOCH ")


def test_nothing_acknowledged_is_lost_when_the_leader_is_killed(cluster: Cluster, topic: str) -> None:
    publisher = Publisher(cluster, topic)
    publisher.publish(*(b"before-%d" % number for number in range(30)))
    leader = cluster.leader(topic)
    with _consumer(leader, topic) as connection:
        seen = _received(connection, {b"before-%d" % number for number in range(10)})
        wait_until(lambda: leader.stats(topic, "ch")["depth"] == 0)
        time.sleep(0.3)  # what is finished travels every 0.1 s; more may come again and be no loss
    began = time.monotonic()
    leader.kill()
    publisher.publish(b"after-0")
    published_s = time.monotonic() - began
    publisher.publish(*(b"after-%d" % number for number in range(1, 10)))
    successor = cluster.leader(topic, but=leader)
    with _consumer(successor, topic) as connection:
        came = _received(connection, set(publisher.acknowledged) - set(seen))
        delivered_s = time.monotonic() - began
    publisher.close()
    again = set(came) & set(seen)
    print(f"\nkill -9: publishing goes on after {published_s:.3f} s, delivering after {delivered_s:.3f} s")
    print(f"{len(again)} of {len(seen)} finished messages came again")
    assert len(came) - len(set(came)) == 0

    began = time.monotonic()
    leader.start()
    cluster.wait_in_sync(topic, 3)
    print(f"restarted and in sync after {time.monotonic() - began:.3f} s")
    with successor.connect() as connection:
        connection.ok(_pub(topic, b"with all three"))
    assert b"after-9" in _stored(leader, topic) and b"with all three" in _stored(leader, topic)


def test_each_node_may_die_once_and_the_next_one_goes_on(cluster: Cluster, topic: str) -> None:
    publisher = Publisher(cluster, topic)
    for round_number in range(3):
        publisher.publish(*(b"%d-%d" % (round_number, number) for number in range(20)))
        leader = cluster.leader(topic, access="w")
        leader.kill()
        publisher.publish(b"%d-last" % round_number)
        leader.start()
        cluster.wait_in_sync(topic, 3)
    print(f"\nthe longest wait of a publisher: {publisher.longest_s:.3f} s")
    publisher.close()
    with _consumer(cluster.leader(topic), topic) as connection:
        _received(connection, set(publisher.acknowledged))


def test_a_node_that_ends_hands_over_at_once(cluster: Cluster, topic: str) -> None:
    publisher = Publisher(cluster, topic)
    publisher.publish(b"before")
    leader = cluster.leader(topic)
    publisher.longest_s = 0.0
    leader.send_signal(signal.SIGTERM)
    numbers = count()
    while leader.is_running:
        publisher.publish(b"during-%d" % next(numbers))
    publisher.publish(b"after")
    print(f"\nSIGTERM of the leader: the longest wait of a publisher is {publisher.longest_s:.3f} s")
    publisher.close()
    assert leader.wait() == 0, leader.log
    with _consumer(cluster.leader(topic, but=leader), topic) as connection:
        _received(connection, set(publisher.acknowledged))


def test_a_node_that_ends_takes_nothing_more_while_others_take_over(cluster: Cluster, topic: str) -> None:
    """Also of who published a moment ago; else there would be publishes without an answer when it is gone."""
    leader = cluster.leader(topic)
    with leader.connect() as connection:
        connection.ok(_pub(topic, b"before"))
        connection.ok(_pub(topic, b"again"))
        cluster.nsqlookupd.send_signal(signal.SIGSTOP)  # nobody is elected, so it waits for a while
        try:
            leader.send_signal(signal.SIGTERM)
            wait_until(lambda: "this node ends: others take over" in leader.log, lambda: leader.log)
            with contextlib.suppress(Closed, BrokenPipeError):  # on a machine that is slow it is gone
                kind, data = _answer(connection, topic, b"after")
                assert data.startswith(b"E_FAILED_ON_NOT_WRITABLE "), (kind, data)
            assert leader.wait() == 0, leader.log
        finally:
            cluster.nsqlookupd.send_signal(signal.SIGCONT)


def test_a_node_that_drains_leads_nothing_more(cluster: Cluster, topic: str) -> None:
    publisher = Publisher(cluster, topic)
    publisher.publish(b"before")
    leader = cluster.leader(topic)
    with _consumer(leader, topic, 0) as waiting:
        leader.post("/drain?timeout=0")
        publisher.publish(b"after")
        assert waiting.wait_closed()[-1].data.startswith(b"E_FAILED_ON_NOT_LEADER")
    publisher.close()
    assert leader.wait() == 0, leader.log
    with _consumer(cluster.leader(topic, but=leader), topic) as connection:
        _received(connection, {b"before", b"after"})


def test_all_nodes_die_at_once_and_come_back(cluster: Cluster, topic: str) -> None:
    publisher = Publisher(cluster, topic)
    publisher.publish(*(b"%d" % number for number in range(20)))
    publisher.close()
    for node in cluster.nodes:
        node.kill()
    began = time.monotonic()
    cluster.mend()
    leader = cluster.leader(topic)
    print(f"\nall killed: led again after {time.monotonic() - began:.3f} s")
    with _consumer(leader, topic) as connection:
        _received(connection, set(publisher.acknowledged))
    cluster.wait_in_sync(topic, 3)


def test_partitions_that_one_node_led_are_led_by_the_others(cluster: Cluster) -> None:
    topic, partition_num = next(_topics), 6
    cluster.create(topic, partition_num)
    leaders = [cluster.leader(topic, number) for number in range(partition_num)]
    assert len(set(leaders)) == len(cluster.nodes)
    for number, leader in enumerate(leaders):
        with leader.connect() as connection:
            connection.ok(_pub(topic, b"%d" % number, number))
    dead = leaders[0]
    dead.kill()
    for number, leader in enumerate(leaders):
        now = cluster.leader(topic, number, but=dead)
        assert leader is dead or now is leader
        with now.connect() as connection:
            connection.ok(b"SUB %s ch %d\n" % (topic.encode(), number))
            connection.rdy(1)
            message = connection.message()
            assert message.body == b"%d" % number
            connection.finish(message)


def test_the_client_goes_on_when_a_leader_dies(cluster: Cluster, topic: str, flavour: Flavour) -> None:
    address = "http://{}:{}".format(*cluster.nsqlookupd.http)
    bodies = [b"%d" % number for number in range(40)]
    handler = Seen()
    with (
        flavour.consumer(topic, "ch", handler, nsqlookupd_http_addresses=address, lookup_interval=0.2),
        flavour.producer(nsqlookupd_http_addresses=address) as producer,
    ):
        for body in bodies[:20]:
            producer.submit(topic, body, PATIENCE_S).result()
        leader = cluster.leader(topic)
        leader.kill()
        began = time.monotonic()
        for body in bodies[20:]:
            producer.submit(topic, body, PATIENCE_S).result()
        published_s = time.monotonic() - began
        wait_until(lambda: handler.bodies.issuperset(bodies), lambda: f"everything: {sorted(handler.bodies)}")
        print(f"\n{flavour.name}: after kill -9 20 messages are published in {published_s:.3f} s, ", end="")
        print(f"and consumed in {time.monotonic() - began:.3f} s")


def test_a_channel_is_kept_as_it_was_answered(cluster: Cluster, topic: str) -> None:
    leader = cluster.leader(topic)
    with leader.connect() as connection:
        connection.ok(b"SUB %s first 0\n" % topic.encode())
    leader.post(f"/channel/create?topic={topic}&channel=second&partition=0")
    leader.post(f"/channel/pause?topic={topic}&channel=second&partition=0")
    leader.kill()
    successor = cluster.leader(topic, but=leader)
    assert successor.stats(topic, "first")["paused"] is False
    assert successor.stats(topic, "second")["paused"] is True


def test_a_follower_that_stands_still_holds_publishers_for_a_while(cluster: Cluster, topic: str) -> None:
    leader = cluster.leader(topic)
    follower = next(node for node in cluster.nodes if node is not leader)
    with leader.connect() as connection:
        connection.ok(_pub(topic, b"before"))
        follower.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        connection.ok(_pub(topic, b"during"))
        print(f"\nSIGSTOP of a follower: a publisher waits {time.monotonic() - began:.3f} s")
        connection.ok(_pub(topic, b"without it"))
        cluster.wait_in_sync(topic, 2)
        began = time.monotonic()
        follower.send_signal(signal.SIGCONT)
        cluster.wait_in_sync(topic, 3)
        print(f"in sync {time.monotonic() - began:.3f} s after SIGCONT")
        assert b"without it" in _stored(follower, topic)


def test_a_leader_that_stood_still_acknowledges_and_delivers_nothing_more(cluster: Cluster, topic: str) -> None:
    leader = cluster.leader(topic)
    publisher = Publisher(cluster, topic)
    publisher.publish(b"before")
    with leader.connect() as late, _consumer(leader, topic, 1) as consumer:
        assert consumer.message().body == b"before"
        leader.send_signal(signal.SIGSTOP)
        late.send(_pub(topic, b"too late"))
        publisher.close()
        began = time.monotonic()
        successor = cluster.leader(topic, access="w", but=leader)
        publisher.publish(b"after")
        print(f"\nSIGSTOP of the leader: publishing goes on after {time.monotonic() - began:.3f} s")
        leader.send_signal(signal.SIGCONT)
        kind, data = late.frame()
        if data == b"OK":  # it knew of its successor before it read on, and handed it on
            assert b"too late" in _stored(successor, topic)
        else:
            assert kind == ERROR and data.startswith((b"E_FAILED_ON_NOT", b"E_PUB_FAILED")), data
        rest = consumer.wait_closed()
        assert rest and rest[-1].data.startswith(b"E_FAILED_ON_NOT_LEADER"), rest
    publisher.close()
    cluster.wait_in_sync(topic, 3)
    assert cluster.leader(topic, but=leader) is successor
    with _consumer(successor, topic) as connection:
        _received(connection, {b"before", b"after"})


def test_with_too_few_copies_nothing_is_acknowledged(cluster: Cluster, topic: str) -> None:
    leader = cluster.leader(topic)
    others = [node for node in cluster.nodes if node is not leader]
    for node in others:
        node.kill()
    with leader.connect() as connection:
        kind, data = _answer(connection, topic, b"alone")
        while kind != ERROR or not data.startswith(b"E_FAILED_ON_NOT_WRITABLE"):
            assert (kind, data) != (0, b"OK")
            kind, data = _answer(connection, topic, b"alone")
        answer = leader.request("POST", f"/pub?topic={topic}&partition=0", b"x", _BARE)
        assert answer.error == (400, "E_FAILED_ON_NOT_WRITABLE")
        others[0].start()

        def is_taken() -> bool:
            return _answer(connection, topic, b"two") == (0, b"OK")

        wait_until(is_taken, "two of three copies are enough")


def test_who_published_before_there_were_too_few_copies_is_refused_as_everybody(cluster: Cluster, topic: str) -> None:
    """What is refused is not stored; otherwise each message that is tried again is one more copy of it in the log."""
    leader = cluster.leader(topic)
    with leader.connect() as connection:
        for _ in range(3):
            connection.ok(_pub(topic, b"before"))
        for node in cluster.nodes:
            if node is not leader:
                node.send_signal(signal.SIGSTOP)
        kind, data = _answer(connection, topic, b"unknown")
        assert kind == ERROR and data.startswith(b"E_PUB_FAILED"), data
        for _ in range(3):
            kind, data = _answer(connection, topic, b"refused")
            assert kind == ERROR and data.startswith(b"E_FAILED_ON_NOT_WRITABLE"), data
        assert b"refused" not in _stored(leader, topic)


def test_publishing_and_delivering_go_on_without_the_store(cluster: Cluster, topic: str) -> None:
    leader = cluster.leader(topic)
    cluster.nsqlookupd.kill()
    try:
        with leader.connect() as connection, _consumer(leader, topic) as consumer:
            deadline = time.monotonic() + 6.0  # two leases
            sent = 0
            while time.monotonic() < deadline:
                connection.ok(_pub(topic, b"%d" % sent))
                message = consumer.message()
                assert message.body == b"%d" % sent
                consumer.finish(message)
                sent += 1
                time.sleep(0.05)
    finally:
        cluster.nsqlookupd.start()
    assert PATIENCE_S > 6.0 and sent
    assert cluster.leader(topic) is leader


def test_more_than_a_frame_of_delayed_messages_comes_to_a_node_that_was_away(cluster: Cluster, topic: str) -> None:
    """70 MB that are set aside for a channel are no single frame, list or buffer of anybody."""
    body, count = b"x" * 100_000, 700
    leader = cluster.leader(topic)
    away, other = (node for node in cluster.nodes if node is not leader)
    _consumer(leader, topic, 0).close()
    away.kill()
    with leader.connect() as connection:
        for _ in range(0, count, 10):
            connection.send(b"".join(b"DPUB %s 3000000 0\n%s" % (topic.encode(), sized(body)) for _ in range(10)))
            connection.ok(count=10)
        away.start()
        cluster.wait_in_sync(topic, 3)
        connection.ok(_pub(topic, b"now"))
    for node in (leader, other):
        node.kill()
    successor = cluster.leader(topic, access="w", but=leader)
    if successor is not away:  # it was elected in the moment before it was killed
        successor = cluster.leader(topic, access="w", but=other)
    assert successor is away
    wait_until(lambda: _deferred_counts(away, topic) == [count], lambda: f"{_deferred_counts(away, topic)} are there")


def _deferred_counts(node: Nsqd, topic: str) -> list[int]:
    """How many messages each channel that the node leads has set aside; none before it leads."""
    topics = node.get(f"/stats?format=json&include_mem=false&topic={topic}")["topics"] or ()
    return [channel["deferred_count"] for each in topics for channel in each["channels"] or ()]


FLOOD_COUNT = 100_000
FLOOD_TRIES = 5


def test_a_flood_is_no_reason_for_an_election(cluster: Cluster, topic: str) -> None:
    """Whoever sends small commands as fast as they are taken does not keep a leader from hearing its followers.

    A machine that stands still for seconds does; so one flood of several has to leave everything as it was.
    """
    leader = cluster.leader(topic)
    commands = (
        _pub(topic, b"x") * FLOOD_COUNT,
        b"".join(b"FIN %016x\n" % number for number in range(1 << 40, (1 << 40) + FLOOD_COUNT)),
    )
    for _ in range(FLOOD_TRIES):
        before = cluster.partition(topic)
        floods = [leader.connect(), leader.connect(), leader.connect().subscribe(topic, "ch", 1)]
        selector = selectors.DefaultSelector()
        for flood, data in zip(floods, (commands[0], commands[0], commands[1]), strict=True):
            flood.socket.setblocking(False)
            selector.register(flood.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, [memoryview(data), 0])
        with selector:
            while selector.get_map():
                for key, mask in selector.select(PATIENCE_S):
                    _flood(selector, key, mask)
        for flood in floods:
            flood.close()
        now = cluster.partition(topic)
        if (now["epoch"], set(now["in_sync"])) == (before["epoch"], set(before["in_sync"])):
            return
        cluster.wait_in_sync(topic, 3)
        leader = cluster.leader(topic)
    raise AssertionError(f"each of {FLOOD_TRIES} floods changed who leads or who is in sync: {cluster.status(topic)}")


def _flood(selector: selectors.BaseSelector, key: selectors.SelectorKey, mask: int) -> None:
    """Send what is taken, and read answers away, until there is one for each command."""
    connection, (left, answered) = key.fileobj, key.data
    assert isinstance(connection, socket.socket)
    if mask & selectors.EVENT_READ:
        data = connection.recv(1 << 20)
        assert data, "closed"
        key.data[1] = answered + len(data)
    if mask & selectors.EVENT_WRITE:
        key.data[0] = left = left[connection.send(left) :]
        if not left:
            selector.modify(connection, selectors.EVENT_READ, key.data)
    if not left and key.data[1] >= FLOOD_COUNT * len(b"....    OK"):
        selector.unregister(connection)


def test_a_deleted_topic_is_gone_from_every_node(cluster: Cluster, topic: str) -> None:
    publisher = Publisher(cluster, topic)
    publisher.publish(b"x")
    publisher.close()
    away = next(node for node in cluster.nodes if node is not cluster.leader(topic))
    for change in ("delete?", "meta/update?retention=5&", "meta/update?version=7&retention=5&"):
        answer = cluster.leader(topic).request("POST", f"/topic/{change}topic={topic}")
        assert answer.status == 400 and "OF_THE_CLUSTER: " in answer.text and "nsqlookupd" in answer.text, answer
    cluster.nsqlookupd.post(f"/topic/delete?topic={topic}&partition=**")
    for node in cluster.nodes:
        wait_until(lambda node=node: not node.partition_paths(topic), f"{topic} is gone")  # type: ignore[misc]
    assert away.is_running


def test_etcd_may_keep_what_the_nodes_agree_on(tmp_path: Path, daemons: Daemons) -> None:
    etcd = Etcd(tmp_path, "one").launch().wait()
    cluster = None
    try:
        cluster = Cluster(daemons, store=etcd.url)
        topic = next(_topics)
        cluster.create(topic)
        cluster.wait_in_sync(topic, 3)
        publisher = Publisher(cluster, topic)
        publisher.publish(*(b"before-%d" % number for number in range(20)))
        leader = cluster.leader(topic)
        began = time.monotonic()
        leader.kill()
        publisher.publish(b"after")
        print(f"\netcd, kill -9: publishing goes on after {time.monotonic() - began:.3f} s")
        publisher.close()
        with _consumer(cluster.leader(topic, but=leader), topic) as connection:
            _received(connection, set(publisher.acknowledged))
        leader.start()
        cluster.wait_in_sync(topic, 3)
    finally:
        if cluster is not None:
            cluster.close()
        etcd.discard()
