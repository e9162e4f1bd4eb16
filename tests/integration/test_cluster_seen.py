"""What is to be seen of a cluster from outside: /stats, /metrics, /coordinator/stats, the logs, ``flintmq doctor``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.daemons import Cluster, Daemon, Daemons, Nsqd, mpub, running_cluster, sized, wait_until
from tests.integration.utilities import flintmq

_BARE = {"Accept": "application/vnd.nsq; version=1.0"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("seen")) as found:
        yield found


def _samples(daemon: Daemon) -> dict[tuple[str, ...], float]:
    text = daemon.request("GET", "/metrics").text
    return {
        (sample.name.partition("_nsq")[2].partition("_")[2], *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "_nsq" in sample.name
    }


def _stats(node: Nsqd, topic: str) -> Any:
    return node.get(f"/stats?format=json&topic={topic}")["cluster"]


def _id(node: Nsqd) -> str:
    return str(_stats(node, "none")["node"])


def test_a_failover_is_seen_everywhere(cluster: Cluster) -> None:
    topic = "seen"
    cluster.create(topic, 1)
    cluster.wait_in_sync(topic, 3)
    leader = cluster.leader(topic)
    ids = {_id(node) for node in cluster.nodes}
    for node in cluster.nodes:
        wait_until(lambda node=node: _stats(node, topic)["replicas"], "its copy is listed")  # type: ignore[misc]
        (row,) = _stats(node, topic)["replicas"]
        assert (row["is_leader"], row["leader"]) == (node is leader, _id(leader))
        assert set(row["in_sync"]) == set(row["replicas"]) == ids
        assert row["epoch"] == 1
    (row,) = _stats(leader, topic)["replicas"]
    assert (row["state"], row["is_ready"], row["is_writable"], row["lag"]) == ("leads", True, True, 0)
    assert {each["node"] for each in row["followers"]} == ids - {_id(leader)}
    assert all(each["in_sync"] and each["connected"] for each in row["followers"])
    text = leader.request("GET", f"/stats?topic={topic}").text
    assert f"node {_id(leader)} has its lease" in text and "[seen-0 " in text and "in sync: 3 of 3" in text

    answer = leader.request("GET", f"/coordinator/stats?topic={topic}&partition=0", None, _BARE).json
    (found,) = answer["topic_coord_stats"]
    assert (found["name"], found["partition"], found["catchup_stats"]) == (topic, 0, [])
    assert {each["node_id"] for each in found["isr_stats"]} == ids
    assert leader.request("GET", "/coordinator/stats", None, _BARE).json["topic_coord_stats"] == []

    samples = _samples(leader)
    assert samples["partition_in_sync", "0", topic] == 3 and samples["partition_leader", "0", topic] == 1
    assert samples["elections_total",] == 1 and samples["under_replicated",] == 0
    assert samples["cluster_lease_held",] == 1
    before = _samples(cluster.nsqlookupd)
    assert before["cluster_master",] == 1 and before["cluster_nodes",] == 3 and before["cluster_partitions",] == 1
    assert before["cluster_partitions_without_leader",] == before["cluster_partitions_under_replicated",] == 0

    leader_id = _id(leader)
    leader.kill()
    successor = cluster.leader(topic, but=leader)
    cluster.wait_in_sync(topic, 2)
    after = _samples(cluster.nsqlookupd)
    assert after["elections_total",] == before["elections_total",] + 1
    wait_until(lambda: _samples(cluster.nsqlookupd)["cluster_nodes",] == 2, "its lease is over")
    assert _samples(cluster.nsqlookupd)["cluster_partitions_under_replicated",] == 1
    assert _samples(successor)["under_replicated",] == 1 and _samples(successor)["elections_total",] == 1
    with successor.connect() as connection:
        connection.ok(mpub(f"{topic} 0", [b"x"] * 100))
    findings = _doctor(cluster)
    assert any(each["level"] == "warning" and "2 of 3" in each["text"] for each in findings), findings

    leader.start()
    cluster.wait_in_sync(topic, 3)
    wait_until(lambda: _samples(successor).get(("catch_ups_total",)) == 1, "it is counted")
    (row,) = _stats(successor, topic)["replicas"]
    assert row["epoch"] == 2 and row["next_sequence"] == 101
    wait_until(lambda: _samples(successor)["in_sync_changes_total", "joined"] == 1, "the store has answered its leader")
    log = successor.log
    assert f"node {leader_id} catches up: it has the log up to 1 of 101" in log, log
    assert f"node {leader_id} has caught up: 100 messages in " in log
    assert f"{leader_id} has caught up" in log.partition("in sync now ")[2]
    lookupd_log = cluster.nsqlookupd.log
    assert f"leads from epoch 2 on: node {leader_id} " in lookupd_log, lookupd_log


def test_why_a_copy_leaves_is_in_the_log(cluster: Cluster) -> None:
    topic = "leaving"
    cluster.create(topic, 1)
    cluster.wait_in_sync(topic, 3)
    leader = cluster.leader(topic)
    follower = next(node for node in cluster.nodes if node is not leader)
    follower_id = _id(follower)
    follower.kill()
    with leader.connect() as connection:
        connection.ok(b"PUB leaving 0\n" + sized(b"x"))
    cluster.wait_in_sync(topic, 2)
    wait_until(lambda: f"{follower_id} is out: it is dead, or was not heard of for 3 s" in leader.log, leader.log)
    wait_until(lambda: _samples(leader)["in_sync_changes_total", "left"] >= 1, "it is counted")
    (row,) = _stats(leader, topic)["replicas"]
    away = next(each for each in row["followers"] if each["node"] == follower_id)
    assert (away["in_sync"], away["connected"], away["lag"]) == (False, False, 1)
    follower.start()
    cluster.wait_in_sync(topic, 3)


def test_a_node_without_a_cluster_says_nothing_of_one(daemons: Daemons) -> None:
    nsqd = daemons.nsqd()
    assert "cluster" not in nsqd.get("/stats?format=json") and "Cluster" not in nsqd.request("GET", "/stats").text
    assert nsqd.request("GET", "/coordinator/stats", None, _BARE).error == (500, "Coordinator is disabled.")
    names = {name[0] for name in _samples(nsqd)}
    assert not {name for name in names if name.startswith(("cluster", "partition_", "elections"))}


def _doctor(cluster: Cluster) -> list[dict[str, str]]:
    address = "{}:{}".format(*cluster.nsqlookupd.http)
    done = flintmq("doctor", f"--lookupd-http-address={address}", "--json")
    return [json.loads(line) for line in done.stdout.splitlines()]
