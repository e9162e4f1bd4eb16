"""Consumption in order through failovers: what was finished before the next message came does not come again.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import Cluster, Connection, Message, Nsqd, running_cluster, wait_until

from flintmq.message import LOCATION


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as cluster:
        yield cluster


def _consumer(node: Nsqd, topic: str) -> Connection:
    connection = node.connect()
    connection.ok(b"SUB_ORDER %s c 0\n" % topic.encode())
    connection.rdy(10)
    return connection


def _number(message: Message) -> int:
    return int(message.body[LOCATION.size :])


def _ordered(cluster: Cluster, topic: str, count: int) -> None:
    target = f"/topic/create?topic={topic}&partition_num=1&replicator=3&orderedmulti=true"
    wait_until(lambda: cluster.nsqlookupd.request("POST", target).status == 200, f"{topic} is created")
    cluster.wait_in_sync(topic, 3)
    bodies = b"\n".join(b"%d" % number for number in range(count))
    cluster.leader(topic).post(f"/mpub?topic={topic}&partition=0", bodies)


def test_nothing_comes_again_behind_what_comes_after_it_whoever_dies(cluster: Cluster) -> None:
    _ordered(cluster, "o", 300)
    expected = 0
    for _ in range(3):
        leader = cluster.leader("o")
        with _consumer(leader, "o") as consumer:
            for _ in range(60):
                message = consumer.message()
                assert _number(message) == expected
                consumer.finish(message)
                expected += 1
            assert _number(consumer.message()) == expected  # so all before it are finished, wherever anybody looks
            leader.kill()
        cluster.leader("o", but=leader)
        cluster.mend()
        cluster.wait_in_sync("o", 3)
    with _consumer(cluster.leader("o"), "o") as consumer:
        assert _number(consumer.message()) == expected


def test_a_replica_that_stands_still_holds_the_consumer_until_it_is_out_of_sync(cluster: Cluster) -> None:
    _ordered(cluster, "s", 20)
    leader = cluster.leader("s")
    follower = next(node for node in cluster.nodes if node is not leader)
    with _consumer(leader, "s") as consumer:
        consumer.finish(consumer.message())
        follower.send_signal(signal.SIGSTOP)
        for expected in range(1, 10):
            message = consumer.message()
            assert _number(message) == expected
            consumer.finish(message)
        assert len(cluster.partition("s")["in_sync"]) == 2
        follower.send_signal(signal.SIGCONT)
    cluster.wait_in_sync("s", 3)


def test_a_channel_that_is_set_back_is_there_everywhere(cluster: Cluster) -> None:
    _ordered(cluster, "b", 20)
    leader = cluster.leader("b")
    with _consumer(leader, "b") as consumer:
        for _ in range(10):
            consumer.finish(consumer.message())
        consumer.message()
    assert leader.stats("b", "c")["depth"] < 20
    leader.post("/channel/setoffset?topic=b&channel=c", b"msgcount:0")
    leader.kill()
    with _consumer(cluster.leader("b", but=leader), "b") as consumer:
        assert _number(consumer.message()) == 0
