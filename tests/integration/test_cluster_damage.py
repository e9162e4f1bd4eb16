"""A copy of a partition that loses something which it had: another one has it, and nothing is missing.

What takes how long is printed, never asserted.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from tests.integration.daemons import Cluster, Connection, Nsqd, running_cluster, sized, wait_until

MESSAGES = 300
_topics = (f"damaged{number}" for number in count())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), flags=("--durability=fsync",)) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """All nodes are alive."""
    started.mend()
    return started


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic with 300 messages, one to a batch, on three nodes."""
    name = next(_topics)
    cluster.create(name)
    cluster.wait_in_sync(name, 3)
    with cluster.leader(name).connect() as connection:
        for body in _bodies():
            connection.ok(b"PUB %s 0\n%s" % (name.encode(), sized(body)))
    return name


def _bodies(more: int = 0) -> list[bytes]:
    return [b"body-%d" % number for number in range(MESSAGES + more)]


def _consumer(node: Nsqd, topic: str) -> Connection:
    connection = node.connect()
    connection.ok(b"SUB %s ch 0\n" % topic.encode())
    connection.rdy(100)
    return connection


def _came(connection: Connection, more: int = 0) -> set[bytes]:
    """Consume until everything has come, and so many messages more."""
    missing = set(_bodies(more))
    came: set[bytes] = set()
    while missing - came:
        message = connection.message()
        connection.finish(message)
        came.add(message.body)
    return came


def _segment(node: Nsqd, topic: str) -> Path:
    (path,) = node.segment_paths(topic)
    return path


def _flip(path: Path) -> None:
    """Turn one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[data.index(b"body-%d" % (MESSAGES // 2))] ^= 1
    path.write_bytes(data)


def _noted_as_written(node: Nsqd, topic: str) -> int:
    """Everything below this sequence survives the end of the process, as the node's database has it."""
    with closing(sqlite3.connect(f"file:{node.data_path}/channels.db?mode=ro", uri=True)) as database:
        found = database.execute("SELECT written FROM log WHERE topic = ?", (topic,)).fetchone()
    return int(found[0]) if found else 0


def _has_all(node: Nsqd, topic: str) -> bool:
    data = b"".join(path.read_bytes() for path in node.segment_paths(topic))
    return all(body in data for body in _bodies())


def _followers(cluster: Cluster, leader: Nsqd) -> list[Nsqd]:
    return [node for node in cluster.nodes if node is not leader]


def _lead_alone(cluster: Cluster, node: Nsqd, topic: str) -> None:
    """Let a node be the only one that lives, and lead."""
    for other in cluster.nodes:
        if other is not node:
            other.kill()
    wait_until(lambda: cluster.found_leader(topic) is node, lambda: f"it leads: {cluster.status(topic)}\n{node.log}")


@pytest.mark.parametrize("damage", ["a bit", "the end", "all of it"])
def test_a_follower_fetches_what_it_lost_before_it_is_in_sync(cluster: Cluster, topic: str, damage: str) -> None:
    follower = _followers(cluster, cluster.leader(topic))[0]
    follower.kill()
    path = _segment(follower, topic)
    if damage == "a bit":
        _flip(path)
    elif damage == "the end":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.unlink()
    cluster.mend()
    wait_until(lambda: _has_all(follower, topic), lambda: f"it has everything again: {follower.log}")
    cluster.wait_in_sync(topic, 3)
    _lead_alone(cluster, follower, topic)
    with _consumer(follower, topic) as connection:
        assert _came(connection) == set(_bodies())
    assert follower.get("/stats?format=json")["health"].startswith("NOK - damage"), "it is told as other damage is"
    told = follower.get("/damage")
    assert told["lost"] == 0 and sum(each.get("elsewhere", 0) for each in told["reports"]), told
    assert b"flintmq_nsqd_damage_lost_messages 0\n" in follower.request("GET", "/metrics").body
    follower.post("/damage/acknowledge")


def test_what_no_other_copy_has_is_told_of_as_lost(cluster: Cluster) -> None:
    topic = next(_topics)
    cluster.create(topic, copies=1)
    leader = cluster.leader(topic)
    with leader.connect() as connection:
        for body in _bodies():
            connection.ok(b"PUB %s 0\n%s" % (topic.encode(), sized(body)))
    wait_until(lambda: _noted_as_written(leader, topic) > MESSAGES, "damage behind that is taken for a cut write")
    leader.kill()
    _flip(_segment(leader, topic))
    cluster.mend()
    wait_until(lambda: leader.get("/damage")["lost"], lambda: f"{leader.get('/damage')}\n{leader.log}")
    reports = [each for each in leader.get("/damage")["reports"] if topic in each["path"]]
    assert all(each["lost"] and "elsewhere" not in each for each in reports), reports
    leader.post("/damage/acknowledge")


def test_the_leader_steps_over_nothing_that_another_one_has(cluster: Cluster, topic: str) -> None:
    for node in cluster.nodes:
        node.kill()
    cluster.mend()  # so that nothing of it is in memory
    leader = cluster.leader(topic)
    _flip(_segment(leader, topic))
    with leader.connect() as connection:
        connection.ok(b"SUB %s ch 0\n" % topic.encode())
        connection.rdy(2 * MESSAGES)
        successor = cluster.leader(topic, but=leader)
    with _consumer(successor, topic) as connection:
        _came(connection)
    wait_until(lambda: _has_all(leader, topic), lambda: f"it has everything again: {leader.log}")
    cluster.wait_in_sync(topic, 3)


def test_a_node_that_lost_its_data_directory_is_not_elected_before_it_has_everything(
    cluster: Cluster, topic: str
) -> None:
    follower = _followers(cluster, cluster.leader(topic))[0]
    follower.kill()
    for path in follower.data_path.iterdir():
        if path.name != "node.id":
            path.rename(follower.data_path.with_name(f"lost-{path.name}"))
    cluster.mend()
    wait_until(lambda: follower.segment_paths(topic) and _has_all(follower, topic), lambda: follower.log)
    cluster.wait_in_sync(topic, 3)
    _lead_alone(cluster, follower, topic)
    with _consumer(follower, topic) as connection:
        assert _came(connection) == set(_bodies())


def test_an_older_copy_of_a_data_directory_is_not_elected_when_all_nodes_come_back(
    cluster: Cluster, topic: str
) -> None:
    older = _followers(cluster, cluster.leader(topic))[0]
    others = {row["node"] for row in cluster.status()["nodes"] if row["is_older"] and row["tcp_port"] != older.tcp[1]}
    older.kill()
    copy = older.data_path.with_name(f"copy-of-{older.data_path.name}")
    shutil.copytree(older.data_path, copy)
    cluster.mend()
    cluster.wait_in_sync(topic, 3)
    leader = cluster.leader(topic)
    leader.publish(topic, *_bodies(MESSAGES)[MESSAGES:])
    cluster.nsqlookupd.send_signal(signal.SIGSTOP)  # so that nobody is elected between two kills
    leader.kill()  # first, as it would take those that are gone out of the in-sync set
    for node in _followers(cluster, leader):
        node.kill()
    cluster.nsqlookupd.send_signal(signal.SIGCONT)
    shutil.rmtree(older.data_path)
    copy.rename(older.data_path)
    older.discard()
    older.launch()
    older.wait_listening()
    wait_until(
        lambda: f"{topic}/0: nobody is known to have everything" in older.log,
        lambda: f"the first to be back is not trusted: {cluster.status(topic)}\n{older.log}",
    )
    assert "the data directory is older" in older.log
    # a node that had lost its data directory in a test before is there until its lease is over
    (row,) = [row for row in cluster.status()["nodes"] if row["is_older"] and row["node"] not in others]
    assert row["tcp_port"] == older.tcp[1]
    assert cluster.partition(topic)["unconfirmed"] == [row["node"]], "it is in sync by name only"
    cluster.mend()
    assert cluster.leader(topic) is not older
    cluster.wait_in_sync(topic, 3)
    _lead_alone(cluster, older, topic)
    with _consumer(older, topic) as connection:
        assert _came(connection, MESSAGES) == set(_bodies(MESSAGES))


def test_a_copy_whose_files_were_removed_is_made_anew(cluster: Cluster, topic: str) -> None:
    leader = cluster.leader(topic)
    follower = _followers(cluster, leader)[0]
    _remove_and_see_it_fetched(cluster, follower, topic)
    _remove_and_see_it_fetched(cluster, leader, topic)


def _remove_and_see_it_fetched(cluster: Cluster, node: Nsqd, topic: str) -> None:
    shutil.rmtree(_segment(node, topic).parent)
    wait_until(lambda: node.segment_paths(topic) and _has_all(node, topic), lambda: node.log)
    cluster.wait_in_sync(topic, 3)


def test_a_leader_whose_data_directory_was_removed_leads_no_more(cluster: Cluster, topic: str) -> None:
    leader = cluster.leader(topic)
    node_id = (leader.data_path / "node.id").read_bytes()
    shutil.rmtree(leader.data_path, ignore_errors=True)  # which writes there meanwhile
    successor = cluster.leader(topic, but=leader)
    wait_until(lambda: len(cluster.partition(topic)["in_sync"]) == 2, lambda: f"{cluster.status(topic)}\n{leader.log}")
    assert "the content of the data directory was removed" in leader.log
    successor.publish(topic, *_bodies(MESSAGES)[MESSAGES:])
    with _consumer(successor, topic) as connection:
        assert _came(connection) == set(_bodies())
    leader.discard()
    leader.data_path.mkdir()
    (leader.data_path / "node.id").write_bytes(node_id)
    cluster.mend()
    cluster.wait_in_sync(topic, 3)
