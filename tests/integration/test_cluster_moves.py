"""Copies that go from node to node, nodes that are drained and removed, and topics that grow, while both clients
publish and consume: real nsqds and nsqlookupds. Nothing is lost and no publish fails.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from tests.integration.daemons import Cluster, Daemons, Nsqd, Nsqlookupd, running_cluster, sized, wait_until
from tests.integration.flavours import Flavour, PublishLoad, Seen, opened

from flintmq import cli

_topics = (f"moved{number}" for number in count())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    lookupd_flags = ["--balance-interval=200ms", "--balance-window=0-0"]
    with running_cluster(tmp_path_factory.mktemp("moves"), copies_on=4, lookupd_flags=lookupd_flags) as cluster:
        _ordered(cluster.nsqlookupd, "/cluster/balance?enabled=false")
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """All nodes are alive, and none of them is drained."""
    started.mend()
    yield started
    for row in started.status()["drains"]:
        started.nsqlookupd.post(f"/cluster/node/drain?node={row['node']}&undo=true")
    wait_until(lambda: not started.status()["drains"], "nothing is drained")


def _ids(cluster: Cluster) -> dict[Nsqd, str]:
    by_port = {row["tcp_port"]: row["node"] for row in cluster.status()["nodes"]}
    return {node: by_port[node.tcp[1]] for node in cluster.nodes}


def _ordered(lookup: Nsqlookupd, target: str) -> Any:
    answer = lookup.request("POST", target)
    assert answer.status == 200, answer.body
    return answer.json


def _refused(cluster: Cluster, target: str) -> str:
    answer = cluster.nsqlookupd.request("POST", target)
    assert answer.status in (400, 404), answer.body
    return str(answer.json["message"])


def _holders(cluster: Cluster, topic: str, number: int = 0) -> set[str]:
    row = cluster.partition(topic, number)
    return {*row["replicas"], *row["leaving"], *row["in_sync"]}


def _until_at_rest(cluster: Cluster, lookup: Nsqlookupd | None = None) -> None:
    asked = lookup or cluster.nsqlookupd
    wait_until(lambda: not asked.get("/cluster/moves")["moves"], lambda: str(asked.get("/cluster/moves")))


@contextlib.contextmanager
def _loaded(cluster: Cluster, topic: str, flavour: Flavour) -> Iterator[PublishLoad]:
    """Publish and consume meanwhile; at the end everything that was acknowledged has come, and no publish failed."""
    address = "http://{}:{}".format(*cluster.nsqlookupd.http)
    seen = Seen()
    with (
        flavour.consumer(topic, "ch", seen, nsqlookupd_http_addresses=address, lookup_interval=0.2),
        flavour.producer(nsqlookupd_http_addresses=address) as producer,
    ):
        load = PublishLoad(producer, topic)
        with load:
            load.wait_for(20)
            yield load
            load.wait_for(20)
        assert not load.refused and not load.unknown
        wait_until(lambda: seen.counts.keys() >= set(load.acked), lambda: f"{set(load.acked) - seen.counts.keys()}")
        assert not seen.damaged
        print(f"\n{flavour.name}: {len(load.acked)} published, the longest took {load.longest_s:.3f} s")


def test_a_partition_is_moved_under_load(cluster: Cluster, flavour: Flavour) -> None:
    topic = next(_topics)
    cluster.create(topic, copies=2)
    cluster.wait_in_sync(topic, 2)
    ids = _ids(cluster)
    leader = cluster.leader(topic)
    source = ids[leader]
    target = next(name for name in ids.values() if name not in _holders(cluster, topic))
    order = f"/topic/partition/move?topic={topic}&partition=0&move_source={source}&move_target={target}"
    with _loaded(cluster, topic, flavour) as load:
        plan = _ordered(cluster.nsqlookupd, f"{order}&dry_run=true")
        assert plan["dry_run"] and plan["copies"] == [{"topic": topic, "partition": 0, "from": source, "to": target}]
        assert source in cluster.partition(topic)["replicas"] and not cluster.partition(topic)["target"]
        assert _ordered(cluster.nsqlookupd, order)["changes"]
        wait_until(lambda: source not in _holders(cluster, topic), lambda: str(cluster.status(topic)))
        load.wait_for(20)
    _until_at_rest(cluster)
    row = cluster.partition(topic)
    assert target in row["replicas"] and sorted(row["in_sync"]) == sorted(row["replicas"]) and len(row["replicas"]) == 2
    wait_until(lambda: not leader.partition_paths(topic), "the files of the copy are gone")
    assert not list(leader.data_path.glob("set-aside/*")), "and not merely put aside"


def test_moves_that_cannot_be(cluster: Cluster) -> None:
    topic = next(_topics)
    cluster.create(topic, copies=2)
    with_one = sorted(_holders(cluster, topic))
    without = [name for name in _ids(cluster).values() if name not in with_one]
    move = f"/topic/partition/move?topic={topic}&partition=0"
    for parameters, words in (
        (f"move_source={without[0]}&move_target={without[1]}", "has no replica"),
        (f"move_source={with_one[0]}&move_target={with_one[1]}", "has a copy"),
        (f"move_source={with_one[0]}&move_target=127.0.0.1:1", "there is no node"),
        (f"move_source={with_one[0]}", "MISSING_ARG_MOVE_TARGET"),
        (f"move_from={with_one[0]}&move_to={without[0]}&dry_run=perhaps", "INVALID_ARG_DRY_RUN"),
    ):
        assert words in _refused(cluster, f"{move}&{parameters}")
    assert "there is no topic" in _refused(
        cluster, f"/topic/partition/move?topic=nothing&partition=0&move_from={with_one[0]}&move_to={without[0]}"
    )
    for change in ("/topic/meta/update?replicator=2&", "/topic/delete?partition=**&", "/topic/delete?"):
        said = _refused(cluster, f"{change}topic=nothing&dry_run=true")
        assert "there is no topic nothing" in said, said
    cluster.nsqlookupd.post("/topic/create?topic=plain%23ephemeral")
    said = _refused(cluster, "/topic/delete?topic=plain%23ephemeral&dry_run=true")
    assert "INVALID_ARG_DRY_RUN" in said, "there is one, which is not the cluster's"
    _ordered(cluster.nsqlookupd, "/cluster/upgrade/begin")
    assert "/cluster/upgrade/done" in _refused(cluster, f"{move}&move_from={with_one[0]}&move_to={without[0]}")
    _ordered(cluster.nsqlookupd, "/cluster/upgrade/done")


def test_another_number_of_copies(cluster: Cluster) -> None:
    topic = next(_topics)
    cluster.create(topic, copies=1)
    update = f"/topic/meta/update?topic={topic}"
    assert "GET /cluster/moves" in _refused(cluster, f"{update}&replicator=3&min_in_sync=2")
    assert _ordered(cluster.nsqlookupd, f"{update}&replicator=3&dry_run=true")["copy_count"] == 2
    assert len(cluster.partition(topic)["replicas"]) == 1
    _ordered(cluster.nsqlookupd, f"{update}&replicator=3")
    cluster.wait_in_sync(topic, 3)
    _ordered(cluster.nsqlookupd, f"{update}&min_in_sync=2")
    assert "give min_in_sync=1 as well" in _refused(cluster, f"{update}&replicator=1")
    _ordered(cluster.nsqlookupd, f"{update}&replicator=1&min_in_sync=1")
    wait_until(lambda: len(_holders(cluster, topic)) == 1, lambda: str(cluster.status(topic)))
    assert "replicator=5, and there are 4 nsqds" in _refused(cluster, f"{update}&replicator=5")


def test_copies_are_needed_for_an_ok_once_they_are_made_and_no_publish_waits_for_that(cluster: Cluster) -> None:
    topic = next(_topics)
    cluster.create(topic, copies=1)
    here = "--lookupd={}:{}".format(*cluster.nsqlookupd.http)
    with opened("asyncio") as flavour, _loaded(cluster, topic, flavour):
        assert cli.main(["topic", "update", topic, "--replicas=3", "--wait", here]) == 0
        assert cluster.status(topic)["topics"][0]["min_in_sync"] == 2
    leader = cluster.leader(topic)
    followers = [
        node for node, name in _ids(cluster).items() if name in _holders(cluster, topic) and node is not leader
    ]
    for node in followers:
        node.kill()
    wait_until(lambda: len(cluster.partition(topic)["in_sync"]) == 1, lambda: str(cluster.status(topic)))
    with leader.connect() as connection:
        refusal = connection.error(b"PUB %s 0\n%s" % (topic.encode(), sized(b"on one copy")))
        assert refusal.startswith("E_FAILED_ON_NOT_WRITABLE")
    cluster.mend()


def test_a_node_is_drained_and_removed_under_load(cluster: Cluster) -> None:
    topic = next(_topics)
    cluster.create(topic, partition_num=4, copies=2)
    ids = _ids(cluster)
    leader = cluster.leader(topic)
    node = ids[leader]
    with opened("asyncio") as flavour, _loaded(cluster, topic, flavour):
        plan = _ordered(cluster.nsqlookupd, f"/cluster/node/drain?node={leader.tcp[0]}:{leader.tcp[1]}&dry_run=true")
        assert plan["copies"] and not cluster.status()["drains"]
        _ordered(cluster.nsqlookupd, f"/cluster/node/drain?node={node}")

        def has_nothing() -> bool:
            return bool(cluster.status()["drains"]) and cluster.status()["drains"][0]["state"] == "drained"

        wait_until(has_nothing, lambda: f"{cluster.status()} {cluster.nsqlookupd.get('/cluster/moves')}")
        wait_until(lambda: not leader.partition_paths(topic), "the files of the copies are gone")
    for number in range(4):
        row = cluster.partition(topic, number)
        assert len(row["in_sync"]) == 2 and node not in row["replicas"]
    _ordered(cluster.nsqlookupd, f"/cluster/node/drain?node={node}&undo=true")
    _ordered(cluster.nsqlookupd, f"/cluster/node/remove?remove_node={node}")
    assert cluster.status()["drains"][0]["is_removal"]
    leader.kill()
    wait_until(lambda: not cluster.status()["drains"], "it is forgotten")
    cluster.mend()


def test_a_node_that_comes_back_leads_its_part_again(cluster: Cluster) -> None:
    topic = next(_topics)
    cluster.create(topic, partition_num=8, copies=4)
    killed = cluster.leader(topic)
    killed.kill()
    for number in range(8):
        cluster.leader(topic, number, but=killed)
    cluster.mend()
    for number in range(8):
        cluster.wait_in_sync(topic, 4, number)
    with opened("asyncio") as flavour, _loaded(cluster, topic, flavour):
        assert "MISSING_ARG_ENABLED" in _refused(cluster, "/cluster/balance")
        _ordered(cluster.nsqlookupd, "/cluster/balance?enabled=true")

        def is_even() -> bool:
            counts = [row["leads"] for row in cluster.status()["nodes"]]
            return max(counts) - min(counts) <= 1

        wait_until(is_even, lambda: str(cluster.status()["nodes"]))
    _ordered(cluster.nsqlookupd, "/cluster/balance?enabled=false")


def test_a_topic_grows_under_load(cluster: Cluster, flavour: Flavour) -> None:
    topic = next(_topics)
    cluster.create(topic, partition_num=1, copies=2)
    expand = f"/topic/partition/expand?topic={topic}"
    with _loaded(cluster, topic, flavour):
        assert _ordered(cluster.nsqlookupd, f"{expand}&partition_num=3&dry_run=true")["copy_count"] == 4
        _ordered(cluster.nsqlookupd, f"{expand}&partition_num=3")
        for number in range(3):
            leader = cluster.leader(topic, number)

            def is_written(leader: Nsqd = leader, number: int = number) -> bool:
                return any(
                    path.stat().st_size for path in leader.data_path.glob(f"topics/*{topic}/p-{number:04d}/*.log")
                )

            wait_until(is_written, f"somebody publishes to partition {number}")
    assert "partitions cannot be taken away" in _refused(cluster, f"{expand}&partition_num=2")
    assert "MISSING_ARG_TOPIC_PARTITION_NUM" in _refused(cluster, expand)


def test_the_next_master_goes_on_with_a_move(tmp_path_factory: pytest.TempPathFactory) -> None:
    daemons = Daemons(tmp_path_factory.mktemp("master"))
    keeper = daemons.nsqlookupd(f"--store-path={daemons.new_directory('store')}")
    store = f"http://127.0.0.1:{keeper.http[1]}"
    cluster = Cluster(daemons, store=store)
    try:
        master = cluster.nsqlookupd
        flags = "--broadcast-address=127.0.0.1", "--allow-same-host", f"--cluster-store={store}"
        other = daemons.nsqlookupd(*flags)
        wait_until(lambda: len(other.get("/cluster/status")["lookupds"]) == 2, "both are listed")
        assert len(other.request("GET", "/listlookup").json["data"]["lookupdnodes"]) == 2
        topic = next(_topics)
        cluster.create(topic, copies=2)
        cluster.wait_in_sync(topic, 2)
        ids = _ids(cluster)
        source = ids[cluster.leader(topic)]
        target = next(node for node, name in ids.items() if name not in _holders(cluster, topic))
        target.send_signal(signal.SIGSTOP)
        try:
            order = f"/topic/partition/move?topic={topic}&partition=0&move_source={source}&move_target={ids[target]}"
            _ordered(other, order)  # it hands it on
            wait_until(lambda: source in cluster.partition(topic)["leaving"], lambda: str(cluster.status(topic)))
            master.kill()
        finally:
            target.send_signal(signal.SIGCONT)

        def has_moved() -> bool:
            (found,) = other.get(f"/cluster/status?topic={topic}")["topics"]
            row = found["partitions"][0]
            return source not in {*row["replicas"], *row["leaving"], *row["in_sync"]} and len(row["in_sync"]) == 2

        wait_until(has_moved, lambda: str(other.get(f"/cluster/status?topic={topic}")))
        _until_at_rest(cluster, other)
    finally:
        cluster.close()
        daemons.close()


def test_what_youzans_tools_ask(cluster: Cluster) -> None:
    lookup, topic = cluster.nsqlookupd, next(_topics)
    cluster.create(topic, copies=2)
    assert lookup.get("/info")["ha_support"] is True
    stats = lookup.get("/cluster/stats?topn=3")
    assert {row["tcp_port"] for row in stats["node_stat_list"]} == {node.tcp[1] for node in cluster.nodes}
    assert topic in {row["topic"] for row in lookup.get("/cluster/balance/topn?topn=1000")["topn_topics"]}
    _ordered(lookup, "/disable/write?type=all")
    accept = {"Accept": "application/vnd.nsq; version=1.0"}
    wanted = f"/lookup?topic={topic}&access=w&metainfo=true"
    assert lookup.request("GET", wanted, None, accept).json["partitions"] is None
    _ordered(lookup, "/disable/write?type=ordered")
    assert lookup.request("GET", wanted, None, accept).json["partitions"]
    _ordered(lookup, "/disable/write?type=none")
    assert "lookup node id not found" in _refused(cluster, "/cluster/lookupd/tombstone?node=nobody")
    me = lookup.request("GET", "/listlookup").json["data"]["lookupdnodes"][0]["ID"]
    _ordered(lookup, f"/cluster/lookupd/tombstone?node={me}")
    assert lookup.request("GET", "/listlookup").json["data"]["lookupdnodes"], "somebody has to be named"
    _ordered(lookup, f"/cluster/lookupd/tombstone?node={me}&restore=true")
    _ordered(lookup, "/cluster/balance?enabled=false&window=22-4")
    assert cluster.status()["settings"]["balance_window"] == [22, 4]
    assert "INVALID_ARG_WINDOW" in _refused(cluster, "/cluster/balance?window=25-26")
    _ordered(lookup, "/cluster/balance?window=0-0")
