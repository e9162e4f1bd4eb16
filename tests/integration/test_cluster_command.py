"""``flintmq cluster|topic|node`` against a real cluster."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator

import pytest
from tests.integration.daemons import Cluster, running_cluster, wait_until
from tests.integration.utilities import flintmq

from flintmq import cli

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("command")) as found:
        yield found


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
    place = f"127.0.0.1:{dead.tcp[1]}"
    wait_until(lambda: f"was {place}" in run("node", "list")[1], "its lease has run out")
    (row,) = [line for line in run("cluster", "status")[1].splitlines() if line.startswith(f"was {place} ")]
    assert row.endswith("  away") and row.split()[5] == "2", row
    code, said = run("cluster", "status")
    assert f"node {row.split()[2]} (was {place}) is away" in said and "-> start the nodes that are away" in said, said
    assert f"{place} (away)" in run("topic", "show", "orders")[1]
    (away,) = json.loads(run("cluster", "status", "--json")[1])["away"]
    assert (away["node"], away["host"], away["tcp_port"], away["holds"]) == (
        row.split()[2],
        "127.0.0.1",
        dead.tcp[1],
        2,
    )
    assert away["http_port"] == dead.http[1]
    dead.start()
    wait_until(lambda: run("cluster", "status", "--json")[0] == 0, "all is whole again")
    rows = [json.loads(line) for line in run("node", "list", "--json")[1].splitlines()]
    assert {row["tcp_port"] for row in rows} == {node.tcp[1] for node in cluster.nodes}
    code, said = run("topic", "delete", "orders")
    assert code == 2 and "loses 2 partitions with all their messages and channels" in said and "--yes" in said
    assert run("topic", "delete", "orders", "--wait", "--yes")[0] == 0
    assert run("topic", "show", "orders") == (
        1,
        "flintmq topic: the cluster has no topic orders; flintmq topic list lists all\n",
    )


@pytest.mark.parametrize("connects", [True, False], ids=["it connects", "it does not connect"])
def test_a_nsqlookupd_that_is_cut_off_holds_nobody_up(
    cluster: Cluster, connects: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for ``--timeout``, which is longer here than a test may take."""
    monkeypatch.setattr("flintmq.tools.cluster._TURN_S", 0.1)
    with contextlib.ExitStack() as stack:
        cut = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(0 if connects else 8):  # its queue is full then, and what comes is dropped
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(cut.getsockname())
        silent = f"127.0.0.1:{cut.getsockname()[1]}"
        here = f"127.0.0.1:{cluster.nsqlookupd.http[1]}"
        flags = (f"--lookupd={silent},{here}", "--timeout=30m")
        for words in ("cluster status", "node list", "topic create cut", "topic show cut", "topic delete cut --yes"):
            code = cli.main([*words.split(), *flags])
            said = capsys.readouterr()
            assert said.out and (code == 0 or words == "topic show cut"), said
            told = f"nsqlookupd http://{silent} does not answer yet; http://{here} is asked as well\n"
            assert said.err.startswith(told), said


def test_an_upgrade_that_was_forgotten_is_seen_by_who_waits(cluster: Cluster, run: Run) -> None:
    assert run("topic", "create", "frozen", "--partitions=3", "--replicas=1", "--wait")[0] == 0
    (row, *_) = cluster.status("frozen")["topics"][0]["partitions"]
    node = row["leader"]
    assert run("cluster", "upgrade", "begin")[0] == 0
    code, said = run("cluster", "status")
    assert code == 0 and "note     cluster default: it is being upgraded" in said, said
    assert "flintmq cluster upgrade done" in said and said.rstrip().endswith("whole")
    code, said = run("node", "drain", node, "--wait", "--within=1ms")
    assert code == 1 and "nothing is moved while the cluster is being upgraded" in said, said
    wait_until(
        lambda: (
            "cluster upgrade done" in cluster.status("frozen")["topics"][0]["partitions"][row["partition"]]["reason"]
        ),
        "the partition says so, too",
    )
    assert run("cluster", "upgrade", "done")[0] == 0
    code, said = run("node", "drain", node, "--wait")
    assert code == 0, said
    assert "upgraded" not in run("cluster", "status")[1]
    assert run("node", "drain", node, "--undo")[0] == 0
    assert run("topic", "delete", "frozen", "--wait", "--yes")[0] == 0


def test_what_is_refused_is_one_line(cluster: Cluster, run: Run) -> None:
    code, said = run("topic", "create", "much", "--partitions=1", "--replicas=5", "--dry-run")
    assert code == 1 and "No node is available" in said and said.count("\n") == 1
    cluster.create("led")
    code, said = run("topic", "elect", "led", "0", f"127.0.0.1:{cluster.nodes[0].tcp[1]}", "--accept-loss")
    assert code == 1 and "is led by node" in said
    for words, why in (
        (("led", "0"), "is led by node"),
        (("led", "1"), "topic led has partitions 0 to 0, and no 1"),
        (("nope", "0"), "the cluster has no topic nope"),
    ):
        code, said = run("topic", "elect", *words, "--dry-run")
        assert code == 1 and why in said and said.count("\n") == 1
    assert run("topic", "delete", "led", "--wait", "--yes")[0] == 0


def test_copies_move_as_it_is_said(cluster: Cluster, run: Run) -> None:
    assert run("topic", "create", "moved", "--partitions=1", "--replicas=1", "--dry-run")[0] == 0
    assert run("topic", "show", "moved")[0] == 1, "a plan makes nothing"
    cluster.create("moved", 1, 1)
    source = cluster.partition("moved")["address"]
    target = next(address for node in cluster.nodes if (address := f"127.0.0.1:{node.tcp[1]}") != source)
    words = ("topic", "move", "moved", "0", f"--from={source}", f"--to={target}")
    code, said = run(*words, "--dry-run")
    assert code == 0 and source in said and target in said, said
    assert cluster.partition("moved")["address"] == source
    code, said = run(*words, "--wait")
    assert code == 0 and said.startswith(f"moved/0 is moved from {source} to {target}\n"), said
    assert cluster.partition("moved")["address"] == target
    assert run("cluster", "moves", "--wait")[0] == 0

    assert run("topic", "update", "moved", "--replicas=2", "--wait")[0] == 0
    assert len(cluster.partition("moved")["in_sync"]) == 2
    assert run("topic", "expand", "moved", "3", "--wait")[0] == 0
    assert len(cluster.status("moved")["topics"][0]["partitions"]) == 3

    code, said = run("node", "drain", target, "--wait")
    assert code == 0, said
    assert "drained" in run("node", "list")[1]
    assert run("node", "drain", target, "--undo")[0] == 0
    assert run("cluster", "upgrade", "begin")[0] == run("cluster", "upgrade", "done")[0] == 0
    assert run("cluster", "balance", "off")[0] == run("cluster", "balance", "on", "--window=02-05")[0] == 0
    code, said = run("cluster", "balance", "top", "--json")
    assert code == 0 and "topn_topics" in json.loads(said)
    code, said = run("topic", "delete", "moved", "--dry-run")
    assert code == 0 and run("topic", "list")[1].count("moved") == 1


def test_a_topic_with_partitions_is_read_and_moved_as_one(cluster: Cluster) -> None:
    """By the log of every leader, whichever node was named; channels on all of them."""

    def well(*words: str) -> list[str]:
        done = flintmq(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    lookupd = "--lookupd={}:{}".format(*cluster.nsqlookupd.http)
    well("topic", "create", "spread", "--partitions=2", "--replicas=2", "--wait", lookupd)
    well("channel", "create", "spread", "c", lookupd)
    bodies = [str(number) for number in range(6)]
    for body in bodies:
        well("pub", "spread", body, "--partition", str(int(body) % 2), lookupd)
    for node in cluster.nodes:
        assert sorted(well("tail", "spread", "--no-follow", "--nsqd={}:{}".format(*node.tcp))) == bodies
    assert sorted(well("sub", "spread", "c", "-n", "6", lookupd)) == bodies
    assert "6 messages will be delivered" in well("replay", "spread", "c", "--from", "beginning", lookupd)[0]
    (row,) = well("channel", "list", "spread", "--json", lookupd)
    assert json.loads(row)["depth"] == 6


def test_a_node_that_died_with_the_only_copy_has_it_still(cluster: Cluster, run: Run) -> None:
    """Whoever wipes its disk behind ``--wait`` must not be told that nothing is there."""
    cluster.create("only", 1, 1)
    holder = cluster.leader("only")
    (node,) = cluster.partition("only")["replicas"]
    holder.kill()
    wait_until(lambda: node not in [row["node"] for row in cluster.status()["nodes"]], "its lease has run out")
    for verb in ("drain", "remove"):
        code, said = run("node", verb, node, "--wait", "--within=1s")
        assert code == 1 and f"node {node}, which is away, has " in said, said
        assert "only/0 (no other copy is in sync)" in said.splitlines()[-1]
    holder.start()
    assert run("node", "remove", node, "--wait")[0] == 0
    row = cluster.partition("only")
    assert row["leader"] and node not in (*row["replicas"], *row["leaving"], *row["in_sync"])
    assert run("node", "drain", node, "--undo")[0] == 0
