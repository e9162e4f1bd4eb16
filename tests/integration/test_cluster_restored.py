"""What was put back or is gone for good: a store that is older than the data, and the disk of the only copy.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import Cluster, running_cluster, wait_until
from tests.integration.test_cluster import _BARE, Publisher, _consumer, _received
from tests.integration.utilities import flintmq

OLDER = "the coordination store is older than the data"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    directory = tmp_path / "cluster"
    directory.mkdir()
    with running_cluster(directory) as cluster:
        yield cluster


@pytest.fixture
def run(cluster: Cluster) -> Run:
    """``flintmq``, which is told where nsqlookupd is; its exit code and all that it said."""

    def run(*words: str) -> tuple[int, str]:
        ended = flintmq(*words, "--lookupd-http-address={}:{}".format(*cluster.nsqlookupd.http))
        return ended.returncode, ended.stdout + ended.stderr

    return run


def test_nothing_is_lost_by_a_store_that_is_older_than_the_data(cluster: Cluster, run: Run) -> None:
    (store,) = (Path(flag.partition("=")[2]) for flag in cluster.nsqlookupd.flags if flag.startswith("--store-path="))
    saved = store.with_name("saved")
    cluster.create("t")
    cluster.wait_in_sync("t", 3)
    publisher = Publisher(cluster, "t")
    publisher.publish(b"before the backup")
    cluster.nsqlookupd.stop()
    shutil.copytree(store, saved)
    cluster.nsqlookupd.start()
    for number in range(2):  # epochs that the backup has not
        leader = cluster.leader("t")
        leader.kill()
        assert cluster.leader("t", but=leader) is not leader
        publisher.publish(b"after it, %d" % number)
        cluster.mend()
        cluster.wait_in_sync("t", 3)
    publisher.close()
    epoch = cluster.partition("t")["epoch"]

    for node in cluster.nodes:
        node.stop()
    cluster.nsqlookupd.stop()
    shutil.rmtree(store)
    shutil.copytree(saved, store)
    cluster.nsqlookupd.flags.append("--accept-older-store")
    cluster.nsqlookupd.start()
    first, *others = cluster.nodes
    first.start()
    wait_until(lambda: OLDER in cluster.partition("t")["reason"], lambda: f"{cluster.status('t')}\n{first.log}")
    for words in (("cluster", "status"), ("doctor",)):
        code, said = run(*words)
        assert code and OLDER in said, said
    assert first.log.count(OLDER) == 1 and "does not follow" not in first.log
    for node in others:
        node.start()

    leader = cluster.leader("t")
    cluster.wait_in_sync("t", 3)
    row = cluster.partition("t")
    assert row["epoch"] > epoch and row["may_have_lost"]
    publisher = Publisher(cluster, "t")
    publisher.publish(b"behind it")
    publisher.close()
    with _consumer(leader, "t") as connection:
        bodies = {b"before the backup", b"after it, 0", b"after it, 1", b"behind it"}
        assert sorted(_received(connection, bodies)) == sorted(bodies)
    assert not [node for node in cluster.nodes if list(node.data_path.glob("set-aside/*"))]
    assert run("topic", "acknowledge-loss", "t")[0] == 0
    wait_until(lambda: run("cluster", "status")[0] == 0, lambda: run("cluster", "status")[1])


def test_a_partition_whose_only_copy_is_lost_begins_anew_where_an_operator_says_so(cluster: Cluster, run: Run) -> None:
    cluster.create("only", 1, 1)
    holder = cluster.leader("only")
    holder.publish("only", b"lost")
    (lost,) = cluster.partition("only")["replicas"]
    log_id = _log_id(cluster, "only")
    holder.kill()
    shutil.rmtree(holder.data_path)
    holder.data_path.mkdir()
    cluster.mend()  # with a new id
    wait_until(lambda: lost not in [row["node"] for row in cluster.status()["nodes"]], "its lease has run out")
    wait_until(lambda: cluster.partition("only")["leader"] == "", "nobody leads")

    order = "flintmq topic elect only"
    assert f"{order} PARTITION NODE --accept-loss" in run("cluster", "status")[1]
    code, said = run("topic", "elect", "only", "0", "--dry-run")
    assert code and f"{order} 0 NODE --accept-loss" in said, said
    node = "{}:{}".format(*holder.tcp)
    code, said = run("topic", "move", "only", "0", f"--from={lost}", f"--to={node}")
    assert code and "nothing to move" in said and f"{order} 0 NODE --accept-loss" in said, said
    assert run("node", "remove", lost)[0] == 0
    assert lost in run("node", "list")[1]

    code, said = run("topic", "elect", "only", "0", node, "--dry-run", "--json")
    assert code == 0 and "everything that was stored is lost" in json.loads(said)["notes"][0], said
    assert run("topic", "elect", "only", "0", node, "--accept-loss")[0] == 0
    assert cluster.leader("only") is holder
    wait_until(lambda: lost not in run("node", "list")[1], "it is removed, as nothing names it any more")
    row = cluster.partition("only")
    assert row["may_have_lost"] and row["replicas"] == row["in_sync"] == [row["leader"]] != [lost]
    assert _log_id(cluster, "only") != log_id, "offsets of before are of another log"
    with _consumer(holder, "only") as connection:
        holder.publish("only", b"new")
        assert connection.message().body == b"new"


def _log_id(cluster: Cluster, topic: str) -> str:
    """The id of the log of partition 0, as those who read logs are told it."""
    answer = cluster.nsqlookupd.request("GET", f"/lookup?topic={topic}&metainfo=true&logs=true", None, _BARE)
    return str(answer.json["partitions"]["0"]["log_id"])
