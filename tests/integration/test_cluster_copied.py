"""A data directory that was copied and runs twice: one process is the node, the other one takes part no longer.

Source: docs/decisions/0016, 0017.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator

import pytest
from tests.integration.daemons import Cluster, Daemons, Nsqd, wait_until
from tests.integration.test_cluster import Publisher, _consumer, _received, _stored
from tests.ports import reserved_port

TAKES_NO_PART = "takes part no longer"
LINES_MAX = 20
"""That three nodes may log about their connections with a node that has begun anew: some of each, and none again and
again."""


@pytest.fixture
def cluster(daemons: Daemons) -> Iterator[Cluster]:
    cluster = Cluster(daemons)
    try:
        yield cluster
    finally:
        cluster.close()


def _twin(daemons: Daemons, node: Nsqd, peer_port: int) -> Nsqd:
    """A node with a copy of the data directory of another, which runs."""
    copy = node.data_path.with_name("copied")
    shutil.copytree(node.data_path, copy)
    flags = [flag for flag in node.flags if not flag.startswith(("--peer-address=", "--data-path="))]
    return daemons.new_nsqd(*flags, f"--peer-address=127.0.0.1:{peer_port}", data_path=copy)


def _incarnation(node: Nsqd) -> str:
    (found,) = re.findall(r"this is node \w+, incarnation (\w+)\n", node.log)
    return str(found)


def test_of_two_processes_with_one_data_directory_the_later_one_is_the_node(cluster: Cluster, daemons: Daemons) -> None:
    cluster.create("t")
    cluster.wait_in_sync("t", 3)
    publisher = Publisher(cluster, "t")
    publisher.publish(*(b"before the copy, %d" % number for number in range(20)))
    leader = cluster.leader("t")
    replaced = next(node for node in cluster.nodes if node is not leader)
    rest = [node for node in cluster.nodes if node is not replaced]
    with reserved_port() as reserved:
        twin = _twin(daemons, replaced, reserved.getsockname()[1])
        publisher.publish(*(b"only the first has it, %d" % number for number in range(20)))
        seen = {node: len(node.log) for node in rest}
        twin.start()
        wait_until(lambda: TAKES_NO_PART in replaced.log, lambda: replaced.log)
        for number in range(200):
            publisher.publish(b"behind it, %d" % number)
        cluster.wait_in_sync("t", 3)
        publisher.publish(b"the last")
        publisher.close()

        answer = replaced.request("GET", "/ping")
        assert answer.status == 500 and TAKES_NO_PART in answer.text, answer
        stats = json.loads(replaced.request("GET", "/stats?format=json").body)
        assert TAKES_NO_PART in stats["cluster"]["problem"] and not stats["cluster"]["has_lease"]
        assert TAKES_NO_PART in stats["health"]
        assert [row["state"] for row in stats["cluster"]["replicas"]] == ["not connected to its leader"]
        with replaced.connect() as connection:
            assert "taken this node's place" in connection.error(b"PUB t\n" + b"\0\0\0\1x")
        with replaced.connect() as connection:
            assert "taken this node's place" in connection.error(b"SUB t ch\n")
        assert b"the last" in _stored(twin, "t") and b"the last" not in _stored(replaced, "t")

        incarnation = _incarnation(twin)
        told = "".join(node.log[seen[node] :] for node in rest) + replaced.log[replaced.log.index(TAKES_NO_PART) :]
        lines = [line for line in told.splitlines() if "PEER(" in line]
        assert len(lines) <= LINES_MAX, "\n".join(lines)
        assert incarnation in {row["incarnation"] for row in cluster.status()["nodes"]}
        said = [line for line in replaced.log.splitlines() if TAKES_NO_PART in line and "PEER(" not in line]
        assert len(said) == 1, said

        leader.kill()
        others = [each for each in (*rest, twin) if each is not leader]
        elected = wait_until(lambda: _leader(cluster, others), lambda: str(cluster.status("t")))
        assert elected is not None
        with _consumer(elected, "t") as consumer:
            _received(consumer, set(publisher.acknowledged))
        replaced.stop()


def _leader(cluster: Cluster, nodes: list[Nsqd]) -> Nsqd | None:
    """That one of the nodes which leads, and can be consumed from."""
    row = cluster.partition("t")
    port = row["address"].rpartition(":")[2]
    return next((node for node in nodes if row["is_ready"] and str(node.tcp[1]) == port), None)
