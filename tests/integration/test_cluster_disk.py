"""A disk that hangs, fails or is full under one copy of a partition: others lead, and it comes back when it works.

The fault is put in front of the real disk, inside the process: while a file of that name is in the data directory, what
writes or syncs a log there hangs, fails, or finds no room. What takes how long is printed, never asserted.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from tests.integration.daemons import ERROR, SOURCES, Cluster, Nsqd, running_cluster, sized, wait_until
from tests.integration.mounts import Mount, mounted_tmpfs, needs_root
from tests.integration.test_cluster import Publisher, _consumer, _received

from flintmq.cluster.link import RETRY_NS_MAX

FAULTS = """
import errno, os, time

def _fault(descriptor, name):
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    root, found, _ = path.partition("/topics/")
    return bool(found) and os.path.exists(f"{root}/{name}")

def _before(name):
    work = getattr(os, name)
    def faulty(descriptor, *args):
        while _fault(descriptor, "HANG" if "sync" in name else "HANG_WRITES"):
            time.sleep(0.02)
        if _fault(descriptor, "FAIL" if "sync" in name else "FAIL_WRITES"):
            raise OSError(errno.EIO, "Input/output error")
        if "write" in name and _fault(descriptor, "FULL"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return work(descriptor, *args)
    setattr(os, name, faulty)

for _name in ("fsync", "fdatasync", "pwrite", "pwritev"):
    _before(_name)
"""
DISK_BYTES = 256 * 1024 * 1024
LITTLE_BYTES = 72 * 1024 * 1024
_topics = (f"disk{number}" for number in count())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    faults = tmp_path_factory.mktemp("faults")
    (faults / "sitecustomize.py").write_text(FAULTS)
    limits = ("env", f"PYTHONPATH={faults}:{SOURCES}")
    with running_cluster(tmp_path_factory.mktemp("cluster"), flags=("--durability=fsync",), limits=limits) as cluster:
        try:
            yield cluster
        finally:
            for node in cluster.nodes:
                _heal(node)


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """All nodes are alive, and their disks work."""
    for node in started.nodes:
        _heal(node)
    started.mend()
    yield started
    for node in started.nodes:
        _heal(node)


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic with one partition on three nodes."""
    name = next(_topics)
    cluster.create(name)
    cluster.wait_in_sync(name, 3)
    return name


def _strike(node: Nsqd, fault: str) -> None:
    (node.data_path / fault).touch()


def _heal(node: Nsqd) -> None:
    for fault in ("HANG", "HANG_WRITES", "FAIL", "FAIL_WRITES", "FULL"):
        (node.data_path / fault).unlink(missing_ok=True)


def _in_sync(cluster: Cluster, topic: str, node: Nsqd) -> bool:
    rows = {row["node"]: row["tcp_port"] for row in cluster.status()["nodes"]}
    return node.tcp[1] in [rows.get(each) for each in cluster.partition(topic)["in_sync"]]


@pytest.mark.parametrize("fault", ["HANG", "HANG_WRITES", "FAIL", "FAIL_WRITES"])
def test_a_leader_whose_disk_dies_hands_over(cluster: Cluster, topic: str, fault: str) -> None:
    publisher = Publisher(cluster, topic)
    publisher.publish(b"before")
    leader = cluster.leader(topic)
    _strike(leader, fault)
    with leader.connect() as late:
        late.send(b"PUB %s 0\n%s" % (topic.encode(), sized(b"late")))
        began = time.monotonic()
        cluster.leader(topic, access="w", but=leader)
        publisher.close()
        publisher.publish(b"after")
    print(f"\n{fault}: publishing goes on after {time.monotonic() - began:.3f} s")
    wait_until(lambda: not _in_sync(cluster, topic, leader), lambda: str(cluster.status(topic)))
    with _consumer(cluster.leader(topic, but=leader), topic) as connection:
        _received(connection, {b"before", b"after"})
    _heal(leader)
    cluster.wait_in_sync(topic, 3)
    publisher.publish(b"with all three")
    publisher.close()
    assert b"with all three" in b"".join(path.read_bytes() for path in leader.segment_paths(topic))


@pytest.mark.parametrize("fault", ["HANG", "FAIL", "FAIL_WRITES", "FULL"])
def test_a_follower_whose_disk_dies_is_left_out_until_it_works(cluster: Cluster, topic: str, fault: str) -> None:
    leader = cluster.leader(topic)
    follower = next(node for node in cluster.nodes if node is not leader)
    _strike(follower, fault)
    publisher = Publisher(cluster, topic)
    publisher.publish(b"first")
    wait_until(lambda: not _in_sync(cluster, topic, follower), lambda: str(cluster.status(topic)))
    publisher.publish(*(b"%d" % number for number in range(5)))
    print(f"\n{fault}: the longest wait of a publisher is {publisher.longest_s:.3f} s")
    assert cluster.leader(topic) is leader
    _heal(follower)
    cluster.wait_in_sync(topic, 3)
    publisher.publish(b"with all three")
    publisher.close()
    assert b"with all three" in b"".join(path.read_bytes() for path in follower.segment_paths(topic))


def test_a_disk_that_hangs_has_the_store_written_once(cluster: Cluster, topic: str) -> None:
    """A copy to which nothing is published has everything all the time, and is out of sync all the same."""
    leader = cluster.leader(topic)
    follower = next(node for node in cluster.nodes if node is not leader)
    busy = next(_topics)
    cluster.create(busy)
    cluster.wait_in_sync(busy, 3)
    told = f"{topic}/0: this node is in sync no longer: the disk does not answer"
    assert told not in follower.log
    _strike(follower, "HANG")
    publisher = Publisher(cluster, busy)
    publisher.publish(b"it has something to sync")
    wait_until(lambda: not _in_sync(cluster, topic, follower), lambda: str(cluster.status(topic)))
    ends = time.monotonic() + 3 * RETRY_NS_MAX / 1e9  # each leader has asked it again a few times by then
    while time.monotonic() < ends:
        publisher.publish(b"others go on")
    assert follower.log.count(told) == 1 and not _in_sync(cluster, topic, follower)
    _heal(follower)
    cluster.wait_in_sync(topic, 3)
    cluster.wait_in_sync(busy, 3)
    publisher.close()


def test_a_leader_that_finds_no_room_hands_over(cluster: Cluster, topic: str) -> None:
    leader = cluster.leader(topic)
    _strike(leader, "FULL")
    with leader.connect() as connection:
        connection.send(b"PUB %s 0\n%s" % (topic.encode(), sized(b"too much")))
        kind, data = connection.frame()
        assert kind == ERROR and data.startswith(b"E_PUB_FAILED") and b"space" in data, data
    cluster.leader(topic, access="w", but=leader)
    publisher = Publisher(cluster, topic)
    publisher.publish(b"after")
    assert cluster.leader(topic) is not leader
    _heal(leader)
    cluster.wait_in_sync(topic, 3)
    publisher.publish(b"with all three")
    publisher.close()
    assert b"with all three" in b"".join(path.read_bytes() for path in leader.segment_paths(topic))


def test_what_a_full_disk_left_of_a_copy_is_no_topic_of_the_node_alone(cluster: Cluster, topic: str) -> None:
    """A directory without a row, as a copy leaves it that could not be made: the node leads the topic as it is."""
    publisher = Publisher(cluster, topic)
    publisher.publish(*(b"%d" % number for number in range(20)))
    publisher.close()
    leader = cluster.leader(topic)
    node = next(each for each in cluster.nodes if each is not leader)
    node.kill()
    (node.data_path / "topics" / f"t-{topic}" / "p-0001").mkdir()
    node.start()
    cluster.wait_in_sync(topic, 3)
    wait_until(lambda: cluster.expand(topic, 2), "a second partition")
    cluster.wait_in_sync(topic, 3, 1)
    for other in cluster.nodes:
        if other is not node:
            other.kill()
    assert cluster.leader(topic) is node
    with _consumer(node, topic) as connection:
        _received(connection, {b"%d" % number for number in range(20)})
        wait_until(lambda: node.unfinished(topic, "ch") == 0, "what was finished is finished")


def test_a_drain_says_where_the_node_that_takes_a_copy_finds_no_room(cluster: Cluster) -> None:
    cluster.create(topic := next(_topics), 1, 1)
    leader = cluster.leader(topic)
    taker, spare = (each for each in cluster.nodes if each is not leader)
    ids = {row["tcp_port"]: row["node"] for row in cluster.status()["nodes"]}

    def drain(node: Nsqd, more: str = "") -> None:
        path = f"/cluster/node/drain?node={ids[node.tcp[1]]}{more}"
        assert cluster.nsqlookupd.request("POST", path).status == 200

    def reason() -> str:
        (row,) = (each for each in cluster.status()["drains"] if each["node"] == ids[leader.tcp[1]])
        return str(row["reason"])

    others = [row["topic"] for row in cluster.status()["topics"] if row["topic"] != topic]
    for name in others:  # which are on all nodes, and would have the spare one wait
        assert cluster.nsqlookupd.request("POST", f"/topic/delete?topic={name}").status == 200
    wait_until(lambda: [row["topic"] for row in cluster.status()["topics"]] == [topic])
    publisher = Publisher(cluster, topic)
    publisher.publish(*(b"%d" % number for number in range(20)))
    publisher.close()
    _strike(taker, "FULL")
    drain(spare)
    try:
        drain(leader)
        why = f"node {ids[taker.tcp[1]]} is to have a copy and has no room on its disk"
        wait_until(lambda: reason().startswith(why), lambda: f"{cluster.status()} {taker.log}")
        drain(spare, "&undo=true")
        also = f"/cluster/node/drain?node={ids[taker.tcp[1]]}"
        wait_until(lambda: cluster.nsqlookupd.request("POST", also).status == 200, "the master knows of the undo")
        assert cluster.leader(topic, but=leader) is spare
        wait_until(lambda: cluster.partition(topic)["replicas"] == [ids[spare.tcp[1]]], lambda: str(cluster.status()))
        with _consumer(spare, topic) as connection:
            _received(connection, {b"%d" % number for number in range(20)})
    finally:
        for row in cluster.status()["drains"]:
            cluster.nsqlookupd.request("POST", f"/cluster/node/drain?node={row['node']}&undo=true")


def _pub(node: Nsqd, topic: str, body: bytes) -> bytes:
    with node.connect() as connection:
        connection.send(b"PUB %s 0\n%s" % (topic.encode(), sized(body)))
        return bytes(connection.frame().data)


@needs_root
def test_a_leader_whose_disk_fills_hands_over_unless_all_are_full(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        disks = [stack.enter_context(mounted_tmpfs(tmp_path / f"disk{n}", DISK_BYTES)) for n in range(3)]
        (tmp_path / "cluster").mkdir()
        paths = [disk.path / "data" for disk in disks]
        cluster = stack.enter_context(running_cluster(tmp_path / "cluster", data_paths=paths))
        cluster.create("t")
        cluster.wait_in_sync("t", 3)
        disk_of = dict(zip(cluster.nodes, disks, strict=True))
        seen: list[Nsqd] = []
        while len(seen) < 2:  # one after the other, each before anything is refused
            leader = cluster.leader("t", access="w")
            assert leader not in seen
            seen.append(leader)
            _fill(disk_of[leader])
            cluster.leader("t", access="w", but=leader)
            assert _full(cluster) == {node.tcp[1] for node in seen}
        last = cluster.leader("t", access="w")
        _fill(disk_of[last])
        wait_until(lambda: len(_full(cluster)) == 3)
        epoch = cluster.partition("t")["epoch"]
        disk_of[last].fill()
        wait_until(lambda: _pub(last, "t", b"no").startswith(b"E_"))
        answer = _pub(last, "t", b"no")
        assert answer.startswith((b"E_PUB_FAILED", b"E_FAILED_ON_NOT_WRITABLE")), answer
        assert cluster.partition("t")["epoch"] == epoch, "nobody is elected for nothing"
        for disk in disks:
            disk.empty()
        publisher = Publisher(cluster, "t")
        publisher.publish(b"there is room")
        publisher.close()
        cluster.wait_in_sync("t", 3)
        wait_until(lambda: not _full(cluster))


def _fill(disk: Mount) -> None:
    """Leave less than the cluster wants, and more than nsqd needs."""
    with (disk.path / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.free_bytes() - LITTLE_BYTES)


def _full(cluster: Cluster) -> set[int]:
    return {row["tcp_port"] for row in cluster.status()["nodes"] if row["is_full"]}
