"""nsqadmin on a cluster: what nobody leads stays in sight, topics that it made by itself, drains and refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.integration.daemons import Answer, Cluster, Daemons, Nsqadmin, Nsqd, running_cluster, wait_until

HTML = {"Accept": "text/html"}
FORM = {"Content-Type": "application/x-www-form-urlencoded", **HTML}


class Deployment:
    """A cluster of three nsqd, and an nsqadmin."""

    def __init__(self, cluster: Cluster, nsqadmin: Nsqadmin) -> None:
        self.cluster, self.nsqadmin = cluster, nsqadmin

    def get(self, path: str) -> Any:
        return self.nsqadmin.get(f"/api/v2{path}")

    def page(self, path: str, status: int = 200) -> str:
        answer = self.nsqadmin.request("GET", path, None, HTML)
        assert answer.status == status, answer.body
        return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", answer.body.decode().partition("<body")[2]))

    def field(self, path: str, name: str) -> str:
        """The value of a hidden field of a page's form."""
        found = re.search(rf'name="{name}"[^>]*value="([^"]*)"', self.nsqadmin.request("GET", path, None, HTML).text)
        assert found, path
        return found[1]

    def act(self, name: str, **form: str) -> Answer:
        body = urlencode({"csrf": self.field("/create", "csrf"), **form}).encode()
        return self.nsqadmin.request("POST", f"/act/{name}", body, FORM)

    def told(self, answer: Answer) -> str:
        """The page that a change leads to."""
        assert answer.status == 303, answer.body
        return self.page(answer.headers["location"].removeprefix(self.nsqadmin.url))

    def delete(self, topic: str) -> None:
        self.cluster.nsqlookupd.post(f"/topic/delete?topic={topic}&partition=**")
        wait_until(lambda: not self.cluster.status(topic)["topics"][0]["partitions"], f"{topic} is gone")

    def address(self, node: Nsqd) -> str:
        return f"127.0.0.1:{node.http[1]}"


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        daemons = Daemons(tmp_path_factory.mktemp("nsqadmin"))
        try:
            lookupd = f"--lookupd-http-address=127.0.0.1:{cluster.nsqlookupd.http[1]}"
            yield Deployment(cluster, daemons.nsqadmin(lookupd))
        finally:
            daemons.close()


@pytest.fixture(autouse=True)
def whole(deployed: Deployment) -> None:
    deployed.cluster.mend()


def made_alone(deployed: Deployment, topic: str, count: int) -> Nsqd:
    """A topic with one copy, with so many messages in a channel; return the node that has it."""
    deployed.cluster.create(topic, 1, 1)
    leader = deployed.cluster.leader(topic)
    leader.post(f"/channel/create?topic={topic}&channel=c")
    for number in range(count):
        leader.post(f"/pub?topic={topic}&partition=0", b"%d" % number)
    assert deployed.get(f"/topics/{topic}")["total"]["waiting"] == count
    return leader


def test_a_topic_whose_only_copy_is_away_is_not_abandoned(deployed: Deployment):
    leader = made_alone(deployed, "lone", 3)
    away = {"daemon": "nsqd", "address": deployed.address(leader), "why": "down"}
    leader.stop()
    wait_until(lambda: not deployed.cluster.partition("lone")["leader"], "nobody leads it")

    def names_away(view: Any) -> bool:
        return any(each.items() >= away.items() and "nobody leads" in each["text"] for each in view["missing"])

    wait_until(lambda: names_away(deployed.get("/topics")), "nobody but the cluster knows its node any more")
    view = deployed.get("/topics/lone")
    assert names_away(view) and view["is_of_cluster"] and not view["total"]["is_inactive"], view
    assert (view["total"]["partition_count"], view["total"]["unled_count"], view["replicas"]) == (1, 1, 1)
    (row,) = view["partitions"]
    assert row["leader"] == "" and row["reason"], row
    assert "1 partition has that nobody leads is not known, and would be lost as well" in view["lost_if_deleted"]
    listed = deployed.get("/topics?text=lone")
    assert names_away(listed) and listed["topics"][0]["unled_count"] == 1 and not listed["topics"][0]["is_inactive"]
    assert not deployed.get("/topics?text=lone&state=inactive")["topics"]
    assert "lone" not in deployed.get("/lookup")["inactive"]
    assert names_away(deployed.get("/topics/lone/c"))
    assert "nobody leads" in deployed.page("/topics/lone") and "nobody leads" in deployed.page("/topics?text=lone")
    confirm = deployed.page("/confirm/delete_topic?topic=lone")
    assert "The figures below are not complete" in confirm and "would be lost as well" in confirm
    emptied = deployed.act("empty_channel", topic="lone", channel="c", confirm="c")
    assert emptied.status == 502 and deployed.address(leader) in emptied.text, "it is not said to be done"
    assert any(each["subject"] == "topic lone" for each in deployed.get("/problems")["findings"])
    deployed.cluster.mend()
    deployed.cluster.leader("lone")
    wait_until(lambda: deployed.get("/topics/lone")["total"]["waiting"] == 3, "it is there as before")
    wait_until(lambda: not deployed.get("/topics?text=lone")["missing"], "and nobody is missing")


def test_a_topic_that_the_cluster_made_has_its_partitions(deployed: Deployment):
    cluster = deployed.cluster
    wait_until(lambda: cluster.nsqlookupd.request("POST", "/topic/create?topic=auto").status == 200, "it is made")
    leader = cluster.leader_of_plain("auto")
    leader.post("/channel/create?topic=auto&channel=c")
    wait_until(lambda: deployed.get("/topics/auto")["nodes"], "it is there")
    (of_cluster,) = cluster.status("auto")["topics"]
    view = deployed.get("/topics/auto")
    assert (view["replicas"], view["min_in_sync"]) == (of_cluster["replicator"], of_cluster["min_in_sync"])
    assert view["total"]["partition_count"] == of_cluster["partition_num"] == len(view["partitions"])
    leader.post("/pub?topic=auto", b"one")
    row = wait_until(lambda: next((p for p in deployed.get("/topics/auto")["partitions"] if p["depth"]), None), "told")
    assert row is not None
    assert (row["message_count"], row["leader_node"] != "", len(row["replicas"])) == (1, True, of_cluster["replicator"])
    for node in cluster.nodes:
        node.post("/pub?topic=auto", b"more")
    counts = [row["message_count"] for row in deployed.get("/topics/auto")["partitions"]]
    first_of_each = deployed.get("/messages/auto?by=time&value=2001-01-01T00:00:00Z")["found"]
    assert len(first_of_each) == sum(count > 0 for count in counts) > 1
    page = deployed.page("/topics/auto")
    assert all(word in page for word in ("Change…", "More partitions…", "Move…", "since its leaders began")), page
    assert "Tombstone…" not in page
    assert "No copy" in deployed.page("/confirm/change_topic?topic=auto&plan=1&retention_days=1")
    deployed.delete("auto")


def test_a_topic_of_the_cluster_is_not_taken_from_one_node(deployed: Deployment):
    leader = made_alone(deployed, "kept", 1)
    form = {"topic": "kept", "node": deployed.address(leader)}
    assert "is not deleted at one node" in deployed.page(f"/confirm/tombstone?{urlencode(form)}", 400)
    answer = deployed.act("tombstone", confirm="kept", **form)
    assert answer.status == 400 and "is not deleted at one node" in answer.text
    assert not any(any(row["tombstones"]) for row in deployed.cluster.nsqlookupd.get("/nodes")["producers"])
    assert deployed.cluster.found_leader("kept", access="w") is leader, "publishers are told of it as before"


def test_a_node_is_drained_on_its_own_page_as_its_cluster_does_it(deployed: Deployment):
    made_alone(deployed, "moved", 1)
    leader = deployed.cluster.leader("moved")
    node = deployed.address(leader)
    confirm = deployed.page(f"/confirm/drain_node?node={node}")
    assert "gives its copies to others" in confirm and "moved 0" in confirm, "what it comes to"
    assert "consumers empty it" not in confirm
    assert "gives what it has to others" in deployed.told(deployed.act("drain_node", node=node, confirm=node))
    view = deployed.get(f"/nodes/{node}")
    assert view["drain"]["draining"] is view["member"]["is_draining"] is True
    page = deployed.page(f"/nodes/{node}")
    assert "Stop draining" in page and "Drain…" not in page and " drains " in page
    again = deployed.told(deployed.act("drain_node", node=node, confirm=node))
    assert "nothing was to be done, it was so already" in again
    assert "may have partitions again" in deployed.told(deployed.act("stop_drain_node", node=node))
    assert deployed.get(f"/nodes/{node}")["member"]["is_draining"] is False
    deployed.cluster.create("everywhere", 1, 3)
    refused = deployed.page(f"/confirm/drain_node?node={node}", 400)
    assert "that can go nowhere: replicator=3" in refused, "as the order would be"
    assert deployed.act("drain_node", node=node, confirm=node).status == 400
    deployed.delete("everywhere")


def test_a_leader_is_elected_only_with_the_loss_that_the_page_showed(deployed: Deployment):
    cluster = deployed.cluster
    cluster.create("torn", 1, 2)
    cluster.wait_in_sync("torn", 2)
    first = cluster.leader("torn")
    copies = set(cluster.partition("torn")["replicas"])
    by_id = {row["node"]: row["tcp_port"] for row in cluster.status()["nodes"]}
    (second,) = [
        node for node in cluster.nodes if node.tcp[1] in {by_id[each] for each in copies} and node is not first
    ]
    second.kill()
    wait_until(lambda: len(cluster.partition("torn")["in_sync"]) == 1, "the leader goes on alone")
    first.post("/pub?topic=torn&partition=0", b"only there")
    first.kill()
    wait_until(lambda: not cluster.partition("torn")["leader"], "nobody leads")
    second.discard()
    second.launch()
    second.wait_listening()
    order = "/confirm/elect?topic=torn&partition=0"

    def offered() -> bool:
        return 'name="seen"' in deployed.nsqadmin.request("GET", order, None, HTML).text

    wait_until(offered, lambda: deployed.nsqadmin.request("GET", order, None, HTML).text)
    seen = deployed.field(order, "seen")
    form = {"topic": "torn", "partition": "0", "confirm": "torn"}
    answer = deployed.act("elect", seen="0" * len(seen), **form)
    assert answer.status == 400 and "it would come to something else now than your page showed" in answer.text
    assert not cluster.partition("torn")["leader"]
    assert deployed.act("elect", seen=seen, **form).status == 303
    assert cluster.leader("torn") is second
