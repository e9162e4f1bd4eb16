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
        return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", answer.body.decode().partition("<main")[2]))

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
    assert (row["message_count"], row["leader_node"] != "", len(row["replicas"])) == (1, True, of_cluster["replicator"])
    page = deployed.page("/topics/auto")
    assert all(word in page for word in ("Change…", "More partitions…", "Move…", "since its leaders began")), page
    assert "Tombstone…" not in page
    assert "No copy" in deployed.page("/confirm/change_topic?topic=auto&plan=1&retention_days=1")
