"""``flintmq cluster|topic|node`` against a real cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from tests.integration.daemons import Cluster, Daemons, wait_until

from flintmq import cli

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    daemons = Daemons(tmp_path_factory.mktemp("command"))
    found = Cluster(daemons)
    try:
        yield found
    finally:
        found.close()
        daemons.close()


@pytest.fixture
def run(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str) -> tuple[int, str]:
        here = "--lookupd-http-address={}:{}".format(*cluster.nsqlookupd.http)
        code = cli.main([*words, "--lookupd-http-address=127.0.0.1:1", here])  # the first one does not answer
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_a_topic_from_its_creation_to_its_end(cluster: Cluster, run: Run) -> None:
    assert run("cluster", "status")[0] == 0
    assert run("topic", "create", "orders", "--partitions=2", "--replicas=3", "--wait") == (
        0,
        "topic orders is created\n",
    )
    code, said = run("cluster", "status")
    assert code == 0 and "6 of 6" in said and said.rstrip().endswith("whole"), said
    assert all(f"127.0.0.1:{node.tcp[1]}" in said for node in cluster.nodes)
    assert "orders" in run("topic", "list")[1]
    code, said = run("topic", "show", "orders")
    assert code == 0 and "2 partitions of 3 copies, 2 in sync for an OK" in said
    dead = cluster.nodes[0]
    dead.kill()
    wait_until(lambda: run("topic", "show", "orders")[0] == 1, "a copy lacks")
    wait_until(lambda: "2 of 3 copies are in sync" in run("cluster", "status")[1], "that is said")
    dead.start()
    wait_until(lambda: run("cluster", "status", "--json")[0] == 0, "all is whole again")
    rows = json.loads(run("node", "list", "--json")[1])
    assert {row["tcp_port"] for row in rows} == {node.tcp[1] for node in cluster.nodes}
    assert run("topic", "delete", "orders", "--wait")[0] == 0
    assert run("topic", "show", "orders") == (
        1,
        "flintmq topic: the cluster has no topic orders; flintmq topic list lists all\n",
    )


def test_what_is_refused_is_one_line(cluster: Cluster, run: Run) -> None:
    code, said = run("topic", "create", "much", "--partitions=1", "--replicas=5")
    assert code == 1 and "No node is available" in said and said.count("\n") == 1
    cluster.create("led")
    code, said = run("topic", "elect", "led", "0", f"127.0.0.1:{cluster.nodes[0].tcp[1]}", "--accept-loss")
    assert code == 1 and "is led by node" in said
