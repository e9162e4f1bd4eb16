"""Topics of a cluster that clients make, and clients that know one address alone: what plain NSQ users see.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import (
    ERROR,
    MESSAGE,
    PATIENCE_S,
    Cluster,
    Daemons,
    Nsqd,
    message_of,
    running_cluster,
    sized,
    wait_until,
)
from tests.integration.etcd import Etcd
from tests.integration.flavours import address_of

from flintmq import cli

_BARE = {"Accept": "application/vnd.nsq; version=1.0"}
_topics = (f"made{number}" for number in count())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # so that two of three nodes lead nothing of a topic
    with running_cluster(tmp_path_factory.mktemp("cluster"), lookupd_flags=["--default-partitions=1"]) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """All nodes of the cluster are alive, and known."""
    started.mend()
    return started


@pytest.fixture
def topic() -> str:
    """A topic that nobody has made."""
    return next(_topics)


def _pub(topic: str, body: bytes) -> bytes:
    return b"PUB %s\n%s" % (topic.encode(), sized(body))


def _mpub(topic: str, *bodies: bytes) -> bytes:
    messages = len(bodies).to_bytes(4, "big") + b"".join(map(sized, bodies))
    return b"MPUB %s\n%s" % (topic.encode(), sized(messages))


def _record(cluster: Cluster, topic: str) -> dict[str, object]:
    (row,) = cluster.status(topic)["topics"]
    return row


def _others(cluster: Cluster, topic: str) -> list[Nsqd]:
    """The nodes that lead nothing of a topic."""
    leaders = {row["address"].rpartition(":")[2] for row in _record(cluster, topic)["partitions"]}  # type: ignore[attr-defined]
    return [node for node in cluster.nodes if str(node.tcp[1]) not in leaders]


@pytest.mark.parametrize("way", ["PUB", "MPUB", "DPUB", "SUB", "/pub", "/mpub", "/topic/create"])
def test_a_topic_that_a_client_makes_is_one_of_the_cluster(cluster: Cluster, topic: str, way: str) -> None:
    node = cluster.nodes[0]
    with node.connect() as connection:
        match way:
            case "PUB":
                connection.ok(_pub(topic, b"x"))
            case "MPUB":
                connection.ok(_mpub(topic, b"x", b"y"))
            case "DPUB":
                connection.ok(b"DPUB %s 10\n%s" % (topic.encode(), sized(b"x")))
            case "SUB":
                connection.ok(b"SUB %s ch\n" % topic.encode())
            case _:
                assert node.request("POST", f"{way}?topic={topic}", b"x", _BARE).status == 200
    row = _record(cluster, topic)
    assert (row["partition_num"], row["replicator"]) == (1, 3)
    assert row["meta"]["partition_num"] == 0, "ids are NSQ's"  # type: ignore[index]
    cluster.wait_in_sync(topic, 3)


@pytest.mark.parametrize("way", ["PUB_ONCE", "MPUB_ONCE", "/pub"])
def test_a_publish_with_a_sequence_has_its_topic_made_and_is_sent_again(cluster: Cluster, topic: str, way: str) -> None:
    """Which log it is for is known then: nothing of it is stored before."""
    node, name = cluster.nodes[0], topic.encode()
    made = f"topic {topic} has just been made, and its partitions are known now; nothing was stored"
    if way == "/pub":
        answer = node.request("POST", f"/pub?topic={topic}&producer_id=p&sequence=1", b"x", _BARE)
        assert answer.error == (400, "E_FAILED_ON_NOT_LEADER")
    else:
        body = sized(b"x") if way == "PUB_ONCE" else sized(b"\0\0\0\1" + sized(b"x"))
        with node.connect() as connection:
            refused = connection.error(b"%s %s - p 1\n%s" % (way.encode(), name, body))
            assert refused.startswith("E_FAILED_ON_NOT_LEADER ") and made in refused
            connection.settle()  # it goes on
    assert _record(cluster, topic)["partition_num"] == 1
    leader = cluster.leader_of_plain(topic)
    assert leader.stats(topic)["message_count"] == 0
    with leader.connect() as connection:
        for _ in range(2):
            connection.ok(b"PUB_ONCE %s 0 p 1\n%s" % (name, sized(b"x")))
    assert leader.stats(topic)["message_count"] == 1


def test_a_publish_with_a_sequence_and_headers_makes_no_topic(cluster: Cluster, topic: str) -> None:
    """As without a sequence: headers need a topic that was created for them."""
    message = sized(len(b"{}").to_bytes(2, "big") + b"{}" + b"x")
    with cluster.nodes[0].connect() as connection:
        refused = connection.error(b"MPUB_EXT_ONCE %s - p 1\n%s" % (topic.encode(), sized(b"\0\0\0\1" + message)))
    assert refused.startswith("E_TOPIC_NOT_EXIST ")
    assert _record(cluster, topic)["partitions"] == []


def _made(cluster: Cluster, topic: str) -> tuple[Nsqd, list[Nsqd]]:
    """Make a topic by publishing nothing; return who leads it, and who does not."""
    assert cluster.nodes[0].request("POST", f"/topic/create?topic={topic}", None, _BARE).status == 200
    leader = cluster.leader_of_plain(topic)
    return leader, [node for node in cluster.nodes if node is not leader]


def test_what_is_published_at_a_node_that_leads_nothing_is_handed_on(cluster: Cluster, topic: str) -> None:
    leader, (other, third) = _made(cluster, topic)
    name = topic.encode()
    with leader.connect() as consumer:
        consumer.ok(b"SUB %s ch\n" % name)
        with other.connect() as connection:
            connection.send(b"".join(_pub(topic, b"%d" % number) for number in range(5)))  # one read, five answers
            assert [connection.frame() for _ in range(5)] == [(0, b"OK")] * 5
            connection.ok(_mpub(topic, b"5", b"6"))
            connection.ok(b"DPUB %s 10\n%s" % (name, sized(b"7")))
            assert connection.error(b"PUB %s 0\n%s" % (name, sized(b"x"))).startswith("E_FAILED_ON_NOT_LEADER ")
            connection.settle()
        for way, body in (("/pub", b"8"), ("/mpub", b"9\n10"), ("/pub?defer=1", b"11")):
            path, _, query = way.partition("?")
            assert third.request("POST", f"{path}?topic={topic}&{query}", body, _BARE).status == 200
        consumer.rdy(100)
        came = [consumer.message() for _ in range(12)]
        assert {message.body for message in came} == {b"%d" % number for number in range(12)}
        assert all(len(message.id.strip(b"0123456789abcdef")) == 0 for message in came), "ids are NSQ's"
    assert leader.stats(topic)["message_count"] == 12


_CHANGES = ("create", "pause", "unpause", "empty", "emptydelayed", "skip", "unskip", "delete")


def test_http_requests_about_a_topic_that_another_node_leads_are_told_which(cluster: Cluster, topic: str) -> None:
    """As Youzan's nsqd answers them; who asks it for a topic that nobody has is told that."""
    leader, (other, _) = _made(cluster, topic)
    cluster.wait_in_sync(topic, 3)
    where = f"E_FAILED_ON_NOT_LEADER topic {topic} is led elsewhere: partition 0 by 127.0.0.1:{leader.tcp[1]}"
    asked = [("POST", f"/channel/{change}?topic={topic}&channel=ch") for change in _CHANGES]
    asked += [("POST", f"/topic/{change}?topic={topic}") for change in ("pause", "unpause", "empty")]
    asked += [
        ("GET", f"/channel/peek?topic={topic}&channel=ch"),
        ("GET", f"/channel/settings?topic={topic}&channel=ch"),
    ]
    for method, target in asked:
        assert other.request(method, target, None, _BARE).error == (400, where), target
        assert other.request(method, f"{target}&partition=0", None, _BARE).status == 400, target
    assert other.request("POST", "/channel/create?topic=nowhere&channel=ch", None, _BARE).error == (
        404,
        "TOPIC_NOT_FOUND",
    )
    for change in _CHANGES:
        assert leader.request("POST", f"/channel/{change}?topic={topic}&channel=ch", None, _BARE).status == 200, change


def test_no_node_makes_a_topic_of_a_cluster_by_itself(cluster: Cluster, topic: str) -> None:
    """As Youzan's nsqd answers INTERNAL_CREATE_TOPIC in a cluster; the connection goes on."""
    with cluster.nodes[0].connect() as connection:
        said = connection.error(b"INTERNAL_CREATE_TOPIC %s 0 false\n" % topic.encode())
        assert said.startswith(f"E_CREATE_TOPIC_FAILED INTERNAL_CREATE_TOPIC {topic} 0 failed: ")
        assert "/topic/create of nsqlookupd" in said
        connection.settle()


def test_a_topic_is_deleted_as_nsqadmin_does_it(cluster: Cluster, topic: str) -> None:
    """At nsqlookupd, which has the cluster delete it, and then at every nsqd that had it."""
    _made(cluster, topic)
    cluster.wait_in_sync(topic, 3)
    refused = cluster.nodes[0].request("POST", f"/topic/delete?topic={topic}", None, _BARE)
    assert refused.status == 400, "not at a node alone"
    assert cluster.nsqlookupd.request("POST", f"/topic/delete?topic={topic}", None, _BARE).status == 200
    for node in cluster.nodes:
        target = f"/topic/delete?topic={topic}"
        wait_until(lambda: node.request("POST", target, None, _BARE).status == 200, "it is told of it")  # noqa: B023
        assert node.request("POST", "/topic/delete?topic=nowhere", None, _BARE).error == (404, "TOPIC_NOT_FOUND")
    _made(cluster, topic)
    assert cluster.nodes[0].request("POST", f"/topic/delete?topic={topic}", None, _BARE).status == 400, "a new one"


def test_who_publishes_at_a_node_that_stays_publishes_through_a_failover(cluster: Cluster, topic: str) -> None:
    leader, (other, _) = _made(cluster, topic)
    cluster.wait_in_sync(topic, 3)
    acknowledged = []
    with other.connect() as connection:
        connection.ok(_pub(topic, b"before"))
        leader.kill()
        for number in range(20):
            body = b"after-%d" % number
            kind, data = 1, b""
            while kind:  # what is not known is published again, as anybody would
                connection.send(_pub(topic, body))
                kind, data = connection.frame()
                assert not kind or data.startswith((b"E_PUB_FAILED", b"E_FAILED_ON_NOT_WRITABLE")), data
            acknowledged.append(body)
    now = cluster.leader_of_plain(topic, but=leader)
    with now.connect() as consumer:
        consumer.ok(b"SUB %s ch\n" % topic.encode())
        consumer.rdy(100)
        missing = {b"before", *acknowledged}
        while missing:
            message = consumer.message()
            consumer.finish(message)
            missing.discard(message.body)


def test_what_is_handed_on_to_a_leader_that_ends_at_that_moment_is_stored_or_refused(
    cluster: Cluster, topic: str
) -> None:
    """The node between stands still until the leader is gone, so that it writes into a connection that was ended."""
    leader, (other, _) = _made(cluster, topic)
    cluster.wait_in_sync(topic, 3)
    connections = [other.connect() for _ in range(20)]
    try:
        for each in connections:
            each.ok(_pub(topic, b"before"))
        other.send_signal(signal.SIGSTOP)
        for each in connections:
            each.send(_pub(topic, b"meanwhile"))
        leader.stop()
        other.send_signal(signal.SIGCONT)
        for each in connections:
            kind, data = each.frame()
            assert data == b"OK" or data.startswith(b"E_FAILED_ON_NOT_WRITABLE "), (kind, data)
    finally:
        for each in connections:
            each.close()


# -- consumers with one address ----------------------------------------------------------------------------------------


def test_who_consumes_at_a_node_that_leads_nothing_gets_what_the_leader_has(cluster: Cluster, topic: str) -> None:
    leader, (other, _) = _made(cluster, topic)
    name = topic.encode()
    with other.connect() as consumer, leader.connect() as publisher:
        consumer.ok(b"SUB %s ch\n" % name)
        consumer.rdy(2)
        publisher.ok(_mpub(topic, *(b"%d" % number for number in range(5))))
        first, second = consumer.message(), consumer.message()
        assert leader.stats(topic, "ch")["in_flight_count"] == 2, "as RDY says"
        consumer.send(b"TOUCH %s\n" % first.id)
        consumer.finish(first)
        third = consumer.message()
        consumer.send(b"REQ %s 0\n" % second.id)
        consumer.finish(third)
        came = [consumer.message() for _ in range(2)]
        while len(came) < 3:
            consumer.finish(came[len(came) - 2])
            came.append(consumer.message())
        again = next(message for message in came if message.body == second.body)
        assert again.attempts == 2
        for message in came[-2:]:
            consumer.finish(message)
        assert consumer.error(b"FIN %s\n" % first.id).startswith("E_FIN_FAILED")
        wait_until(lambda: leader.stats(topic, "ch")["depth"] == leader.stats(topic, "ch")["in_flight_count"] == 0)
        consumer.send(b"CLS\n")
        assert consumer.response() == b"CLOSE_WAIT"
    wait_until(lambda: leader.stats(topic, "ch")["clients"] in (None, []), "its leader forgets the consumer")


def test_what_a_consumer_held_comes_again_when_it_goes(cluster: Cluster, topic: str) -> None:
    leader, (other, third) = _made(cluster, topic)
    with leader.connect() as publisher:
        publisher.ok(_pub(topic, b"x"))
    with other.connect() as consumer:
        consumer.ok(b"SUB %s ch\n" % topic.encode())
        consumer.rdy(1)
        assert consumer.message().attempts == 1
    with third.connect() as consumer:
        consumer.ok(b"SUB %s ch\n" % topic.encode())
        consumer.rdy(1)
        assert consumer.message().attempts == 2


async def _through_a_failover(address: str, topic: str, fail: Any) -> tuple[set[bytes], list[bytes]]:
    """Publish and consume with pynsq at one address; return what was acknowledged, and what came."""
    import nsq  # it makes a loop of its own when it is imported too early

    came: list[bytes] = []

    def handle(message: Any) -> bool:
        came.append(message.body)
        return True

    reader = nsq.Reader(topic, "ch", message_handler=handle, nsqd_tcp_addresses=[address], max_in_flight=5)
    writer = nsq.Writer([address], reconnect_interval=0.1)
    acknowledged: set[bytes] = set()
    try:
        for number in range(60):
            if number == 20:
                while len(set(came)) < 10:
                    await asyncio.sleep(0.01)
                fail()
            body = b"%d" % number
            while body not in acknowledged:
                if not any(connection.connected() for connection in writer.conns.values()):
                    await asyncio.sleep(0.01)
                    continue
                answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                writer.pub(topic, body, callback=lambda _connection, data, to=answer: to.done() or to.set_result(data))
                if await answer == b"OK":
                    acknowledged.add(body)
        while not acknowledged <= set(came):
            await asyncio.sleep(0.01)
    finally:
        writer.reconnect_interval = 1e6
        for connection in list(writer.conns.values()):
            connection.close()
        reader.close()
    return acknowledged, came


def test_pynsq_with_one_address_publishes_and_consumes_through_a_failover(cluster: Cluster, topic: str) -> None:
    leader, (other, _) = _made(cluster, topic)
    cluster.wait_in_sync(topic, 3)
    address = "{}:{}".format(*other.tcp)
    work = _through_a_failover(address, topic, leader.kill)
    acknowledged, came = asyncio.run(asyncio.wait_for(work, PATIENCE_S))
    assert len(acknowledged) == 60
    print(f"\n{len(came) - len(set(came))} messages came again")


# -- one partition for each node ---------------------------------------------------------------------------------------


def test_consumers_at_two_nodes_get_what_the_third_one_led(tmp_path: Path, daemons: Daemons) -> None:
    """The channel is at every partition before the first SUB is answered, and nobody has to connect again."""
    etcd = Etcd(tmp_path, "one").launch().wait()
    cluster = None
    try:
        cluster = Cluster(daemons, store=etcd.url)
        topic = next(_topics)
        dead, first, second = cluster.nodes
        with first.connect() as one, second.connect() as two:
            one.ok(b"SUB %s ch\n" % topic.encode())
            row = _record(cluster, topic)
            assert (row["partition_num"], row["replicator"]) == (3, 3)
            assert all(node.stats(topic, "ch") for node in cluster.nodes), "before anybody else subscribes"
            two.ok(b"SUB %s ch\n" % topic.encode())
            for consumer in (one, two):
                consumer.rdy(100)
            for node in cluster.nodes:
                with node.connect() as publisher:
                    publisher.ok(_mpub(topic, *(b"%d of %d" % (number, node.tcp[1]) for number in range(5))))
            dead.kill()
            missing = {b"%d of %d" % (number, node.tcp[1]) for node in cluster.nodes for number in range(5)}

            def come() -> bool:
                for consumer in (one, two):
                    with contextlib.suppress(TimeoutError):
                        while (frame := consumer.any_frame(0.01)) is not None:
                            if frame.kind == MESSAGE:
                                message = message_of(frame.data)
                                consumer.finish(message)
                                missing.discard(message.body)
                            else:
                                assert frame.kind != ERROR or frame.data.startswith(b"E_FIN_FAILED"), frame
                return not missing

            wait_until(come, lambda: f"everything: {sorted(missing)}")
    finally:
        if cluster is not None:
            cluster.close()
        etcd.discard()


# -- dead letters ------------------------------------------------------------------------------------------------------


def test_dead_letters_have_as_many_copies_and_are_stored_wherever_their_topic_is_led(daemons: Daemons) -> None:
    cluster = Cluster(daemons, flags=["--max-attempts=1"], lookupd_flags=["--default-partitions=1"])
    try:
        topic = next(_topics)
        dead = f"{topic}.dead"
        leader, _ = _made(cluster, topic)
        with leader.connect() as consumer:
            consumer.ok(_mpub(topic, b"a", b"b"))
            consumer.ok(b"SUB %s ch\n" % topic.encode())
            consumer.rdy(2)
            for message in consumer.messages(2):
                consumer.send(b"REQ %s 0\n" % message.id)
            row = wait_until(lambda: cluster.status(dead)["topics"][0].get("replicator"), "its topic is made")
            assert row == 3
            now = cluster.leader_of_plain(dead)
            assert now is not leader, "they are handed on"
            wait_until(lambda: now.stats(dead)["message_count"] == 2, "both are stored")
            wait_until(lambda: leader.stats(topic, "ch")["depth"] == leader.stats(topic, "ch")["in_flight_count"] == 0)
        cluster.wait_in_sync(dead, 3)
        now.kill()
        successor = cluster.leader_of_plain(dead, but=now)
        with successor.connect() as consumer:
            consumer.identify(extend_support=True)
            consumer.ok(b"SUB %s ch\n" % dead.encode())
            consumer.rdy(2)
            came = consumer.messages(2)
            assert {message.body[-1:] for message in came} == {b"a", b"b"}
            assert all(b'"##dead_letter_topic":"%s"' % topic.encode() in message.body for message in came)
            consumer.send(b"REQ %s 0\n" % came[0].id)
            again = consumer.message()
            assert (again.id, again.attempts) == (came[0].id, 2), "they are not given up a second time"
    finally:
        cluster.close()


# -- directories of single nodes ---------------------------------------------------------------------------------------


def _consumed(node: Nsqd, topic: str, count_max: int, partition: str = "") -> list[bytes]:
    with node.connect() as consumer:
        consumer.ok(b"SUB %s ch %s\n" % (topic.encode(), partition.encode()))
        consumer.rdy(1)
        found = []
        for _ in range(count_max):
            message = consumer.message()
            consumer.send(b"RDY 0\n")
            consumer.finish(message)
            found.append(message.body)
            consumer.rdy(1 if len(found) < count_max else 0)
        consumer.send(b"CLS\n")
        assert consumer.response() == b"CLOSE_WAIT"
    return found


def test_a_topic_that_the_cluster_has_made_otherwise_is_not_published_to_until_that_is_gone(daemons: Daemons) -> None:
    path = daemons.new_directory("alone")
    alone = daemons.nsqd(data_path=path)
    alone.post("/topic/create?topic=ev&partition_num=2")
    alone.stop()
    cluster = Cluster(daemons)
    try:
        cluster.create("ev")
        cluster.leader("ev")
        store, lookupd = (address_of(each) for each in (cluster.nsqlookupd.http, cluster.nsqlookupd.tcp))
        joined = daemons.nsqd(
            f"--cluster-store={store}", "--peer-address=127.0.0.1:0", f"--lookupd-tcp-address={lookupd}", data_path=path
        )
        wait_until(lambda: "topic ev stays this node's alone" in joined.log, lambda: joined.log)
        with joined.connect() as publisher:
            for command in (b"PUB ev\n", b"PUB ev 0\n", b"PUB ev 1\n", b"PUB ev\n"):  # the cluster has no partition 1
                error = publisher.error(command + sized(b"x"))
                assert error.startswith("E_FAILED_ON_NOT_WRITABLE PUB topic ev partition ") and "alone" in error, error
                assert "delete it on this node" in error
        cluster.nsqlookupd.post("/topic/delete?topic=ev")
        wait_until(lambda: "topic ev of this node is the cluster's now" in joined.log, lambda: joined.log)
        wait_until(lambda: re.search(r"ev/1 epoch \d+ is ready", joined.log) is not None, lambda: joined.log)
        with joined.connect() as publisher:
            publisher.ok(b"PUB ev 1\n" + sized(b"y"))
        partitions: Any = _record(cluster, "ev")["partitions"]
        assert [each["partition"] for each in partitions] == [0, 1]
    finally:
        cluster.close()


def test_directories_of_single_nodes_join_as_they_are(daemons: Daemons, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [daemons.new_directory(name) for name in ("one", "two")]
    for path in paths:
        alone = daemons.nsqd(data_path=path)
        alone.post("/topic/create?topic=both&partition_num=1")
        if path is paths[0]:
            alone.post("/topic/create?topic=other")
            alone.post("/topic/create?topic=parts&partition_num=2")
            with alone.connect() as publisher:
                for number in range(4):
                    publisher.ok(_pub("plain", b"%d" % number))
                    for partition in range(2):
                        publisher.ok(b"PUB parts %d\n%s" % (partition, sized(b"%d" % number)))
            assert _consumed(alone, "parts", 2, "1") == [b"0", b"1"]
            assert _consumed(alone, "plain", 1) == [b"0"]
            alone.post("/channel/pause?topic=parts&channel=ch&partition=0")
        alone.stop()
    cluster = Cluster(daemons, data_paths=paths)
    try:
        node, second, _ = cluster.nodes
        # until then it is found as that of any nsqd
        wait_until(lambda: len(set(re.findall(r"parts/(\d) epoch \d+ is ready", node.log))) == 2, "it is led")
        wait_until(lambda: _record(cluster, "both")["partitions"], "it is brought")
        for number in range(2):
            assert cluster.leader("parts", number) is node
        row = _record(cluster, "parts")
        assert (row["partition_num"], row["replicator"]) == (2, 1)
        # two nodes have the same partition: one of them stays alone, and names both
        (winner,) = cluster.partition("both")["replicas"]
        alone_text = "topic both stays this node's alone"
        told = wait_until(lambda: [each for each in (node, second) if alone_text in each.log], "one is refused")
        assert len(told) == 1 and f"node {winner} has brought partition 0 with log " in told[0].log
        # progress, and what is set, is as it was
        assert _consumed(node, "parts", 2, "1") == [b"2", b"3"]
        # a plain topic is this node's alone until somebody says otherwise
        with node.connect() as publisher:
            publisher.ok(_pub("plain", b"4"))
        assert not cluster.status("plain")["topics"][0]["partitions"]
        assert _consumed(node, "plain", 1) == [b"1"]
        lookupd = f"--lookupd-http-address={address_of(cluster.nsqlookupd.http)}"
        for copies in ("1", "3"):
            assert cli.main(["topic", "update", "plain", f"--replicas={copies}", lookupd]) == 1
            assert "alone and not the cluster's, so there is one copy: flintmq topic repl" in capsys.readouterr().err
        assert cli.main(["topic", "replicate", "plain", lookupd]) == 0
        assert node.request("POST", "/topic/replicate?topic=plain", None, _BARE).status == 200  # it is done
        assert _record(cluster, "plain")["meta"]["partition_num"] == 0  # type: ignore[index]
        assert cluster.leader_of_plain("plain") is node
        with second.connect() as publisher:
            publisher.ok(_pub("plain", b"5"))  # handed on
        node.kill()
        cluster.mend()
        wait_until(lambda: re.search(r"plain/0 epoch \d+ is ready", node.log), "it is led again")
        assert cluster.leader_of_plain("plain") is node and cluster.leader("parts", 1) is node
        assert _consumed(second, "plain", 4) == [b"2", b"3", b"4", b"5"]  # relayed
        # more copies, as of any topic of the cluster
        assert cluster.nsqlookupd.request("POST", "/topic/meta/update?topic=plain&replicator=3").status == 200
        cluster.wait_in_sync("plain", 3)
        # who does not wait for them is told that one of them is enough for an OK
        capsys.readouterr()
        assert cli.main(["topic", "replicate", "other", "--replicas=3", lookupd]) == 0
        assert "min_in_sync=1: what a leader alone acknowledges is one copy" in capsys.readouterr().out
        cluster.wait_in_sync("other", 3)
        assert _record(cluster, "other")["min_in_sync"] == 1
        assert cli.main(["topic", "update", "parts", "--replicas=3", "--wait", lookupd]) == 0
        assert "min_in_sync" not in capsys.readouterr().out
        assert _record(cluster, "parts")["min_in_sync"] == 2
    finally:
        cluster.close()


def with_a_wide_topic(daemons: Daemons) -> tuple[Path, int]:
    """A data directory of a node that was alone, with a message in the last partition of as many as there may be."""
    path, count = daemons.new_directory("one"), 255
    alone = daemons.nsqd(data_path=path)
    alone.post(f"/topic/create?topic=wide&partition_num={count}")
    with alone.connect() as publisher:
        publisher.ok(b"PUB wide %d\n%s" % (count - 1, sized(b"before")))
    alone.stop()
    return path, count


@pytest.mark.parametrize("kind", ["own", "etcd"])
def test_a_topic_of_as_many_partitions_as_there_may_be_joins_whole(kind: str, daemons: Daemons, tmp_path: Path) -> None:
    path, count = with_a_wide_topic(daemons)
    etcd = Etcd(tmp_path, "s0").launch().wait() if kind == "etcd" else None
    try:
        cluster = Cluster(daemons, copies_on=1, data_paths=[path], store=etcd.url if etcd is not None else "")
        try:
            (node,) = cluster.nodes
            taken = "topic wide of this node is the cluster's now"
            wait_until(lambda: taken in node.log or "stays this node's alone" in node.log, lambda: node.log)
            assert taken in node.log, node.log
            for number in (0, count - 1):
                assert cluster.leader("wide", number) is node
            rows: Any = _record(cluster, "wide")["partitions"]
            assert [each["partition"] for each in rows if each["leader"]] == list(range(count))
            assert _consumed(node, "wide", 1, str(count - 1)) == [b"before"]
        finally:
            cluster.close()
    finally:
        if etcd is not None:
            etcd.kill()
            etcd.discard()


class _Cutting:
    """Stands between an nsqd and its store, and cuts at a transaction that writes partitions of a topic.

    Args:
        nth: of those transactions, from 0.
        is_carried_out: only its answer is lost; else the store does not get it.
        cut: called then; nothing passes from then on.
    """

    def __init__(self, store: tuple[str, int], topic: str, nth: int, is_carried_out: bool, cut: Any) -> None:
        key = b"/flintmq/default/partition/%s/" % topic.encode()
        self._marks = key, base64.b64encode(key)[: len(key) // 3 * 4]
        self._store = store
        self._left = nth
        self._is_carried_out = is_carried_out
        self._cut = cut
        self._lock = threading.Lock()
        self.is_over = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._store)
                waits = threading.Event()
                for run in (self._asks, self._answers):
                    threading.Thread(target=run, args=(client, server, waits), daemon=True).start()

    def _asks(self, client: socket.socket, server: socket.socket, waits: threading.Event) -> None:
        is_counted = False
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if data.startswith((b"POST ", b"GET ")):
                    is_counted = False
                if not is_counted and any(mark in data for mark in self._marks):
                    is_counted = True
                    with self._lock:
                        self._left -= 1
                        is_it = self._left == -1
                    if is_it and not self._is_carried_out:
                        self._end()
                    elif is_it:
                        waits.set()
                if self.is_over:
                    break
                server.sendall(data)
        client.close()
        server.close()

    def _answers(self, client: socket.socket, server: socket.socket, waits: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if waits.is_set():
                    self._end()
                if self.is_over:
                    break
                client.sendall(data)
        client.close()
        server.close()

    def _end(self) -> None:
        self.is_over = True
        self._cut()

    def close(self) -> None:
        self._listening.close()


@pytest.mark.parametrize("nth", range(3))
@pytest.mark.parametrize("is_carried_out", [True, False])
def test_who_is_killed_between_the_transactions_of_a_wide_topic_goes_on(
    nth: int, is_carried_out: bool, daemons: Daemons
) -> None:
    path, count = with_a_wide_topic(daemons)
    cluster = Cluster(daemons, copies_on=0)
    store, lookupd = cluster.nsqlookupd.http, address_of(cluster.nsqlookupd.tcp)
    killed = threading.Event()
    started: list[Nsqd] = []

    def kill() -> None:
        os.kill(started[0].pid, signal.SIGKILL)
        killed.set()

    cutting = _Cutting(store, "wide", nth, is_carried_out, kill)
    flags = ("--peer-address=127.0.0.1:0", f"--lookupd-tcp-address={lookupd}")
    started.append(daemons.new_nsqd(f"--cluster-store=127.0.0.1:{cutting.port}", *flags, data_path=path))
    try:
        started[0].launch()
        assert killed.wait(PATIENCE_S), started[0].log
        started[0].discard()
        found = cluster.status("wide")["topics"]
        assert sum(bool(each["epoch"]) for each in found[0]["partitions"]) == min(
            count, 126 * (nth + is_carried_out)
        ), "it was killed there"
        node = daemons.nsqd(f"--cluster-store={address_of(store)}", *flags, data_path=path)
        led = re.compile(r"wide/(\d+) epoch \d+ is ready")
        wait_until(lambda: len(set(led.findall(node.log))) == count, lambda: node.log)
        assert _consumed(node, "wide", 1, str(count - 1)) == [b"before"]
        rows: Any = _record(cluster, "wide")["partitions"]
        assert [each["partition"] for each in rows if each["leader"]] == list(range(count))
    finally:
        cutting.close()
        cluster.close()


def test_what_the_cluster_does_not_take_is_seen_and_given_again(
    daemons: Daemons, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [daemons.new_directory(name) for name in ("one", "two")]
    for path in paths:
        alone = daemons.nsqd(data_path=path)
        alone.post("/topic/create?topic=both&partition_num=1")
        alone.stop()
    cluster = Cluster(daemons, copies_on=2, data_paths=paths)
    try:
        lookupd = f"--lookupd-http-address={address_of(cluster.nsqlookupd.http)}"
        found = wait_until(lambda: [each for each in cluster.status()["nodes"] if each["kept_alone_count"]], "refused")
        (left,) = [node for node in cluster.nodes if node.tcp[1] == found[0]["tcp_port"]]
        for command, code in ((["cluster", "status"], 1), (["doctor"], 0)):
            assert cli.main([*command, lookupd]) == code
            out = capsys.readouterr().out
            assert "the cluster has not taken 1 topic of it yet: both (node " in out, out
        cluster.nsqlookupd.post("/topic/delete?topic=both")
        wait_until(lambda: "topic both of this node is the cluster's now" in left.log, lambda: left.log)
        wait_until(lambda: not any(each["kept_alone_count"] for each in cluster.status()["nodes"]), "it is not told")
    finally:
        cluster.close()


def test_topics_of_a_single_node_get_more_partitions(daemons: Daemons) -> None:
    path = daemons.new_directory("one")
    alone = daemons.nsqd(data_path=path)
    alone.post("/topic/create?topic=parts&partition_num=2")
    with alone.connect() as publisher:
        publisher.ok(_pub("plain", b"before"))
        for number in range(2):
            publisher.ok(b"PUB parts %d\n%s" % (number, sized(b"%d" % number)))
    alone.stop()
    cluster = Cluster(daemons, data_paths=[path])
    try:
        first = cluster.nodes[0]
        for number in range(2):
            assert cluster.leader("parts", number) is first
        lookupd = f"--lookupd-http-address={address_of(cluster.nsqlookupd.http)}"
        assert cli.main(["topic", "replicate", "plain", lookupd]) == 0
        within = f"--within={PATIENCE_S:g}s"
        assert cli.main(["topic", "expand", "plain", "3", "--wait", within, lookupd]) == 0
        assert cli.main(["topic", "expand", "parts", "4", "--wait", within, lookupd]) == 0
        assert (_record(cluster, "plain")["partition_num"], _record(cluster, "parts")["partition_num"]) == (3, 4)
        # each of them takes messages, beside what was there
        leaders = [cluster.leader_of_plain("plain", number) for number in range(3)]
        assert leaders[0] is first and set(leaders) == set(cluster.nodes)
        for leader in leaders:
            with leader.connect() as publisher:
                publisher.ok(_pub("plain", b"after"))
        for number in range(4):
            with cluster.leader("parts", number, "w").connect() as publisher:
                publisher.ok(b"PUB parts %d\n%s" % (number, sized(b"after")))
        for leader in leaders:
            bodies = [b"before", b"after"] if leader is first else [b"after"]
            assert _consumed(leader, "plain", len(bodies)) == bodies
        for number in range(4):
            bodies = [b"%d" % number, b"after"] if number < 2 else [b"after"]
            assert _consumed(cluster.leader("parts", number), "parts", len(bodies), str(number)) == bodies
        # also behind a start of the node that had them alone
        first.kill()
        cluster.mend()
        for number in range(4):
            cluster.leader("parts", number)
        assert cli.main(["topic", "update", "parts", "--replicas=3", "--wait", within, lookupd]) == 0
    finally:
        cluster.close()


def test_with_auto_create_local_each_node_has_its_own_share(daemons: Daemons) -> None:
    cluster = Cluster(daemons, copies_on=1, flags=["--auto-create=local"])
    try:
        (node,) = cluster.nodes
        with node.connect() as connection:
            connection.ok(_pub("share", b"x"))
            assert not cluster.status("share")["topics"][0]["partitions"]
            assert node.stats("share")["replicated"] is False
            assert b"share is not replicated" in node.request("GET", "/stats").body
            connection.ok(b"SUB share ch\n")
            connection.rdy(1)
            assert connection.message().body == b"x"
    finally:
        cluster.close()
