"""The endpoints by which the redesigned NSQ's tools look at a cluster and change it, on three real nodes: each does
what its name says.

The rows are done in their order: one finds what those before it have made. What they refuse is in
``test_cluster_moves.py``.

Source: Youzan's nsqlookupd, Youzan's TCP protocol (error table).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import Cluster, Nsqd, running_cluster, sized, wait_until

from flintmq.wire.codes import CODES

TOPIC = "t"
_BARE = {"Accept": "application/vnd.nsq; version=1.0"}


class Tools:
    """What somebody asks a cluster, and what is seen of it then."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.lookup = cluster.nsqlookupd
        self.gone: Nsqd | None = None

    def get(self, target: str) -> Any:
        answer = self.lookup.request("GET", target, None, _BARE)
        assert answer.status == 200, (target, answer.body)
        return answer.json

    def post(self, target: str) -> None:
        answer = self.lookup.request("POST", target, None, _BARE)
        assert answer.status == 200, (target, answer.body)

    @property
    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.status()["settings"]
        return found

    def row(self, number: int = 0) -> dict[str, Any]:
        return self.cluster.partition(TOPIC, number)

    def nodes(self) -> dict[str, Nsqd]:
        ports = {node.tcp[1]: node for node in self.cluster.nodes}
        return {row["node"]: ports[row["tcp_port"]] for row in self.cluster.status()["nodes"]}

    def writers(self) -> dict[str, Any]:
        """The partitions that a publisher is told of."""
        return self.get(f"/lookup?topic={TOPIC}&access=w&metainfo=true")["partitions"] or {}


def _create(tools: Tools) -> None:
    tools.post(f"/topic/create?topic={TOPIC}&partition_num=1&replicator=2")
    assert len(tools.row()["replicas"]) == 2 and set(tools.writers()) == {"0"}
    tools.cluster.wait_in_sync(TOPIC, 2)


def _move(tools: Tools) -> None:
    row = tools.row()
    source = next(node for node in row["replicas"] if node != row["leader"])
    (target,) = (node for node in tools.nodes() if node not in row["replicas"])
    tools.post(f"/topic/partition/move?topic={TOPIC}&partition=0&move_source={source}&move_target={target}")
    wanted = {row["leader"], target}
    wait_until(lambda: {*tools.row()["in_sync"], *tools.row()["leaving"]} == wanted, lambda: str(tools.row()))


def _update(tools: Tools) -> None:
    tools.post(f"/topic/meta/update?topic={TOPIC}&replicator=3")
    tools.cluster.wait_in_sync(TOPIC, 3)


def _expand(tools: Tools) -> None:
    tools.post(f"/topic/partition/expand?topic={TOPIC}&partition_num=2")
    wait_until(lambda: set(tools.writers()) == {"0", "1"}, lambda: str(tools.row(1)))
    tools.cluster.wait_in_sync(TOPIC, 3, 1)


def _tombstone(tools: Tools) -> None:
    leader = tools.cluster.leader(TOPIC)
    node = "{}:{}".format(*leader.http)
    tools.post(f"/topic/tombstone?topic={TOPIC}&node={node}")
    assert "0" not in tools.writers(), "nobody publishes there"
    tools.post(f"/topic/tombstone?topic={TOPIC}&node={node}&restore=true")
    assert "0" in tools.writers()


def _disable_write(tools: Tools) -> None:
    tools.post("/disable/write?type=all")
    assert not tools.writers()
    assert tools.get(f"/lookup?topic={TOPIC}&access=r&metainfo=true")["partitions"], "they are consumed all the same"
    tools.post("/disable/write?type=none")
    assert set(tools.writers()) == {"0", "1"}


def _stats(tools: Tools) -> None:
    wait_until(lambda: tools.get("/cluster/stats")["stable"] is True, lambda: str(tools.get("/cluster/stats")))
    rows = tools.get("/cluster/stats")["node_stat_list"]
    assert {row["tcp_port"] for row in rows} == {node.tcp[1] for node in tools.cluster.nodes}


def _topn(tools: Tools) -> None:
    assert TOPIC in {row["topic"] for row in tools.get("/cluster/balance/topn?topn=10")["topn_topics"]}
    tools.post("/cluster/balance/topn?enable=false")
    assert tools.get("/cluster/balance/topn")["enabled"] is False and tools.settings["balances_load"] is False


def _begin_upgrade(tools: Tools) -> None:
    tools.post("/cluster/upgrade/begin")
    assert tools.settings["is_upgrading"] is True


def _end_upgrade(tools: Tools) -> None:
    tools.post("/cluster/upgrade/done")
    assert not tools.settings.get("is_upgrading")


def _hide_lookupd(tools: Tools) -> None:
    (me,) = (each["ID"] for each in tools.get("/listlookup")["lookupdnodes"])
    tools.post(f"/cluster/lookupd/tombstone?node={me}")
    assert tools.settings["hidden_lookupds"] == [me]
    tools.post(f"/cluster/lookupd/tombstone?node={me}&restore=true")
    assert not tools.settings.get("hidden_lookupds")


def _coordinator_stats(tools: Tools) -> None:
    leader = tools.cluster.leader(TOPIC)
    answer = leader.request("GET", f"/coordinator/stats?topic={TOPIC}&partition=0", None, _BARE).json
    (found,) = answer["topic_coord_stats"]
    assert {each["node_id"] for each in found["isr_stats"]} == set(tools.nodes())


def _info(tools: Tools) -> None:
    assert tools.get("/info")["ha_support"] is True


def _list_lookup(tools: Tools) -> None:
    found = tools.get("/listlookup")
    (row,) = found["lookupdnodes"]
    assert row["HttpPort"] == str(tools.lookup.http[1]) and found["lookupdleader"]["ID"] == row["ID"]


def _internal_create_topic(tools: Tools) -> None:
    with tools.cluster.nodes[0].connect() as connection:
        said = connection.error(b"INTERNAL_CREATE_TOPIC %s 0 false\n" % TOPIC.encode())
        assert said.startswith("E_CREATE_TOPIC_FAILED ") and "/topic/create" in said
        connection.settle()


def _errors(tools: Tools) -> None:
    """Words that the redesigned NSQ's clients know, and act on."""
    leader = tools.cluster.leader(TOPIC)
    other = next(node for node in tools.cluster.nodes if node is not leader)
    with other.connect() as connection:
        assert connection.error(b"PUB %s 0\n%s" % (TOPIC.encode(), sized(b"x"))).startswith("E_FAILED_ON_NOT_LEADER")
        assert connection.error(b"PUB %s 7\n%s" % (TOPIC.encode(), sized(b"x"))).startswith("E_TOPIC_NOT_EXIST")
    with other.connect() as connection:
        assert connection.error(b"SUB %s ch 0\n" % TOPIC.encode()).startswith("E_FAILED_ON_NOT_LEADER")
    for code in ("E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE", "E_TOPIC_NOT_EXIST", "E_CREATE_TOPIC_FAILED"):
        assert CODES[code].origin in ("youzan", "nsq")


def _remove(tools: Tools) -> None:
    """Last: with one node less there are two copies, and the removed one has nothing."""
    tools.post(f"/topic/meta/update?topic={TOPIC}&replicator=2")
    for number in range(2):
        wait_until(lambda number=number: len(tools.row(number)["replicas"]) == 2, "two copies")  # type: ignore[misc]
    node = tools.row()["leader"]
    tools.post(f"/cluster/node/remove?remove_node={node}")

    def has_nothing() -> bool:
        rows = [tools.row(number) for number in range(2)]
        return not any(node in (row["leader"], *row["replicas"], *row["leaving"]) for row in rows)

    wait_until(has_nothing, lambda: str(tools.cluster.status(TOPIC)))
    assert set(tools.writers()) == {"0", "1"}


ROWS: dict[str, Callable[[Tools], None]] = {
    "/topic/create": _create,
    "/topic/partition/move": _move,
    "/topic/meta/update": _update,
    "/topic/partition/expand": _expand,
    "/topic/tombstone": _tombstone,
    "/disable/write": _disable_write,
    "/cluster/stats": _stats,
    "/cluster/balance/topn": _topn,
    "/cluster/upgrade/begin": _begin_upgrade,
    "/cluster/upgrade/done": _end_upgrade,
    "/cluster/lookupd/tombstone": _hide_lookupd,
    "/coordinator/stats": _coordinator_stats,
    "/info": _info,
    "/listlookup": _list_lookup,
    "INTERNAL_CREATE_TOPIC": _internal_create_topic,
    "errors": _errors,
    "/cluster/node/remove": _remove,
}


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[Tools]:
    with running_cluster(tmp_path) as cluster:
        yield Tools(cluster)


def test_each_does_what_it_says(tools: Tools) -> None:
    for name, row in ROWS.items():
        print(name, flush=True)
        row(tools)
