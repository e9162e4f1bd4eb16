"""An upgrade from the version before of what nodes say to each other: nodes of both are one cluster meanwhile.

A node of the version before is this one with what it did not know taken away: it says so of itself, sends nothing of
that, and ends a connection on which it is sent any of it.

Source: docs/decisions/0017, docs/decisions/0029.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import SOURCES, Cluster, Nsqd, running_cluster, wait_until
from tests.integration.test_cluster_order import _consumer, _number, _ordered

from flintmq.cluster.state import PEER_VERSION

BEFORE = """
from functools import partial

from flintmq.cluster import link
from flintmq.nsqd.cluster import join
from flintmq.wire import peer

join.NodeRecord = partial(join.NodeRecord, version=1)
link.FLOORS_VERSION = 1 << 20
_next_frame = peer.PeerReader.next_frame


def next_frame(reader):
    found = _next_frame(reader)
    if found is not None and isinstance(found[0], peer.Floors | peer.FloorAcks):
        raise reader._fail("a frame that version 1 does not know")
    return found


peer.PeerReader.next_frame = next_frame
"""
COUNT = 20


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes of the version before."""
    assert PEER_VERSION == 2, "say what a node of the version before does not know"
    before, directory = tmp_path / "before", tmp_path / "cluster"
    before.mkdir()
    directory.mkdir()
    (before / "sitecustomize.py").write_text(BEFORE)
    limits = ("env", f"PYTHONPATH={before}:{SOURCES}")
    with running_cluster(directory, limits=limits) as cluster:
        yield cluster


def _versions(cluster: Cluster) -> dict[int, int]:
    return {row["tcp_port"]: row["version"] for row in cluster.status()["nodes"]}


def _upgrade(cluster: Cluster, node: Nsqd) -> None:
    node.stop()
    node._limits.clear()
    node.start()
    cluster.wait_in_sync("o", 3)
    assert _versions(cluster)[node.tcp[1]] == PEER_VERSION


def test_a_cluster_is_upgraded_from_the_version_before_while_it_is_consumed_in_order(cluster: Cluster) -> None:
    assert set(_versions(cluster).values()) == {1}
    _ordered(cluster, "o", 5 * COUNT)
    ports = {row["node"]: row["tcp_port"] for row in cluster.status()["nodes"]}
    by_port = {node.tcp[1]: node for node in cluster.nodes}
    first, second, third = (by_port[ports[node]] for node in cluster.partition("o")["replicas"])
    expected = 0

    def consume(leader: Nsqd) -> None:
        """Nothing is left out; what was finished in the last moment of another leader may come again."""
        nonlocal expected
        wait_until(lambda: cluster.found_leader("o") is leader, lambda: str(cluster.status("o")))
        until = expected + COUNT
        with _consumer(leader, "o") as consumer:
            while expected < until:
                message = consumer.message()
                assert _number(message) <= expected, "something was left out"
                expected = max(expected, _number(message) + 1)
                consumer.finish(message)

    consume(first)
    _upgrade(cluster, second)
    consume(first)  # it has a copy at a node of the next version
    first.restart()
    cluster.wait_in_sync("o", 3)
    consume(second)  # all copies are at nodes of the version before
    _upgrade(cluster, first)
    consume(second)  # one is
    _upgrade(cluster, third)
    second.stop()
    consume(first)
