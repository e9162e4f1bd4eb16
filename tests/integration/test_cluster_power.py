"""All nodes lose their power at once, and none of them syncs: who has most leads, when all are back.

A power loss is made of kill -9, another boot id, and logs that end earlier: the end is what the kernel had not written.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import SOURCES, Cluster, Nsqd, running_cluster, wait_until
from tests.integration.test_cluster import Publisher, _consumer, _received
from tests.integration.utilities import flintmq

BOOTS = """
import builtins, os

_open = builtins.open

def _redirected(path, *args, **kwargs):
    return _open(os.environ["BOOT_FILE"] if path == "/proc/sys/kernel/random/boot_id" else path, *args, **kwargs)

builtins.open = _redirected
"""
COUNT = 60


class Room:
    """A cluster, and the power of all its machines."""

    def __init__(self, cluster: Cluster, boot: Path) -> None:
        self.cluster = cluster
        self.boot = boot

    def publish(self, topic: str) -> list[bytes]:
        self.cluster.create(topic)
        self.cluster.wait_in_sync(topic, 3)
        publisher = Publisher(self.cluster, topic)
        bodies = [b"%d" % number for number in range(COUNT)]
        for body in bodies:  # each a batch of its own
            publisher.publish(body)
        publisher.close()
        return bodies

    def lose_power(self, topic: str, left: Sequence[float]) -> None:
        """Of all; so much is left of the log of each."""
        self.cluster.nsqlookupd.send_signal(
            signal.SIGSTOP
        )  # so that nobody leaves the set because another one did first
        for node in self.cluster.nodes:
            node.kill()
        self.cluster.nsqlookupd.send_signal(signal.SIGCONT)
        self.boot.write_text(self.boot.read_text() + "again")
        for node, part in zip(self.cluster.nodes, left, strict=True):
            (path,) = node.segment_paths(topic)
            with path.open("r+b") as file:
                file.truncate(64 + int((path.stat().st_size - 64) * part))

    def start(self, *nodes: Nsqd) -> None:
        for node in nodes:
            node.discard()
            node.launch()
        for node in nodes:
            node.wait_listening()

    def reason(self, topic: str) -> str:
        return str(self.cluster.partition(topic)["reason"])

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """``flintmq``, which is told where nsqlookupd is."""
        host, port = self.cluster.nsqlookupd.http
        return flintmq(*words, f"--lookupd-http-address={host}:{port}")

    def elect(self, topic: str, *words: str) -> Any:
        ended = self.run("topic", "elect", topic, "0", *words, "--json")
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    def told(self) -> list[bool]:
        """Whether something may be lost, as the figures, the status and doctor tell it."""
        metrics = self.cluster.nsqlookupd.request("GET", "/metrics").text
        said = [self.run(*words).stdout for words in (("cluster", "status"), ("doctor",))]
        is_counted = "flintmq_nsqlookupd_cluster_partitions_may_have_lost 1\n" in metrics
        return [is_counted, *("may be lost" in each for each in said)]


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    boot, faults, directory = tmp_path / "boot", tmp_path / "faults", tmp_path / "cluster"
    boot.write_text("once")
    faults.mkdir()
    directory.mkdir()
    (faults / "sitecustomize.py").write_text(BOOTS)
    limits = ("env", f"PYTHONPATH={faults}:{SOURCES}", f"BOOT_FILE={boot}")
    with running_cluster(directory, flags=("--durability=os",), limits=limits) as cluster:
        yield Room(cluster, boot)


def test_who_has_most_leads_when_all_are_back(room: Room) -> None:
    cluster = room.cluster
    bodies = room.publish("t")
    first, second, last = cluster.nodes
    room.lose_power("t", (0.4, 0.7, 0.9))
    room.start(first, second)
    wait_until(lambda: "most of it has" in room.reason("t"), lambda: str(cluster.status("t")))
    assert "waits for" in room.reason("t") and cluster.found_leader("t") is None
    plan = room.elect("t", "--dry-run")
    assert plan["changes"] and any("does not answer" in note for note in plan["notes"]), plan
    assert cluster.found_leader("t") is None, "that changed nothing"
    room.start(last)
    assert cluster.leader("t") is last
    cluster.wait_in_sync("t", 3)
    row = cluster.partition("t")
    assert row["may_have_lost"]
    assert "may be lost" in last.log and room.told() == [True] * 3
    stored = [body for body in bodies if body in _bodies(last)]
    assert stored == bodies[: len(stored)] and COUNT * 0.8 < len(stored) < COUNT
    with _consumer(last, "t") as connection:
        assert sorted(_received(connection, set(stored)), key=int) == stored
    (replica,) = (
        each
        for each in last.get("/stats?format=json&include_mem=false")["cluster"]["replicas"]
        if each["topic_name"] == "t"
    )
    assert replica["may_have_lost"]
    assert "\nflintmq_nsqd_may_have_lost 1\n" in last.request("GET", "/metrics").text

    last.stop()  # another one leads; that says nothing of what was lost before
    assert cluster.leader("t") is not last
    room.start(last)
    cluster.wait_in_sync("t", 3)
    assert room.told() == [True] * 3
    planned = room.run("topic", "acknowledge-loss", "t", "--dry-run")
    assert planned.returncode == 0 and "messages may have been lost in epoch " in planned.stdout, planned
    assert cluster.partition("t")["may_have_lost"], "that changed nothing"
    known = room.run("topic", "acknowledge-loss", "t")
    assert known.returncode == 0 and "t/0: it is not said any more" in known.stdout, known
    wait_until(lambda: room.told() == [False] * 3, lambda: str(cluster.status("t")))
    again = room.run("topic", "acknowledge-loss", "t", "0")
    assert again.returncode == 0 and "nothing is said to be lost" in again.stdout, again


def _bodies(node: Nsqd) -> set[bytes]:
    data = b"".join(path.read_bytes() for path in node.segment_paths("t"))
    return {body for body in (b"%d" % number for number in range(COUNT)) if _ends(data, body)}


def _ends(data: bytes, body: bytes) -> bool:
    return data.endswith(body) or body + b"FM" in data  # a body is followed by the next batch


def test_an_operator_elects_by_hand_and_is_told_what_that_costs(room: Room) -> None:
    cluster = room.cluster
    room.publish("t")
    first, second, last = cluster.nodes
    room.lose_power("t", (0.4, 0.7, 0.9))
    room.start(first, second)
    wait_until(lambda: len(cluster.partition("t")["ends"]) == 2, lambda: str(cluster.status("t")))
    ends = {each["node"]: each["end"] for each in cluster.partition("t")["ends"]}
    ids = {row["tcp_port"]: row["node"] for row in cluster.status()["nodes"]}
    worse = room.elect("t", ids[first.tcp[1]], "--dry-run")
    lost = ends[ids[second.tcp[1]]] - ends[ids[first.tcp[1]]]
    assert any(f"{lost} messages" in note for note in worse["notes"]), worse
    room.elect("t", "--accept-loss")
    assert cluster.leader("t") is second
    cluster.wait_in_sync("t", 2)
    room.start(last)
    cluster.wait_in_sync("t", 3)
    assert cluster.leader("t") is second
