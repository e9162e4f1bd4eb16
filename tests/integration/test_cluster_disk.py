"""A disk that hangs, fails or is full under one copy of a partition: others lead, and it comes back when it works.

The fault is put in front of the real disk, inside the process: while a file of that name is in the data directory, what
writes or syncs a log there hangs, fails, or finds no room. What takes how long is printed, never asserted.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

import pytest
from tests.integration.daemons import ERROR, SOURCES, Cluster, Nsqd, running_cluster, sized, wait_until
from tests.integration.test_cluster import Publisher, _consumer, _received

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


def test_a_leader_without_room_says_so_and_goes_on_when_there_is_some(cluster: Cluster, topic: str) -> None:
    leader = cluster.leader(topic)
    _strike(leader, "FULL")
    with leader.connect() as connection:
        connection.send(b"PUB %s 0\n%s" % (topic.encode(), sized(b"too much")))
        kind, data = connection.frame()
        assert kind == ERROR and data.startswith(b"E_PUB_FAILED") and b"space" in data, data
        _heal(leader)
    publisher = Publisher(cluster, topic)
    publisher.publish(b"after")
    publisher.close()
    cluster.wait_in_sync(topic, 3)
