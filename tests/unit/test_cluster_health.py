"""What is said to be wrong with a cluster."""

from __future__ import annotations

import msgspec
import pytest

from flintmq.client.admin.health import NOTE, PROBLEM, WARNING, away_nodes, is_whole, troubles, why_unready
from flintmq.client.admin.results import (
    ClusterLookupd,
    ClusterNode,
    ClusterPartition,
    ClusterStatus,
    ClusterTopic,
    Drain,
    SeveralNodes,
)
from flintmq.topic_meta import NO_COPY, NOT_CREATED, TO_COME, TO_DECIDE

MASTER = ClusterLookupd("m", "i", "host", 4160, 4161)
OTHER = ClusterLookupd("n", "i", "host2", 4160, 4161)
NODES = [ClusterNode(node=name, host=name, tcp_port=4150, http_port=4151, host_id=name, version=1) for name in "abc"]
PARTITION = ClusterPartition(0, 3, "a", "a:4150", True, ["a", "b", "c"], ["a", "b", "c"])
TOPIC = ClusterTopic("t", [PARTITION], "1", 1, 3, 2)
WHOLE = ClusterStatus("default", "id", "", 5, True, MASTER, [MASTER, OTHER], NODES, [TOPIC])


def changed(**fields: object) -> ClusterStatus:
    return msgspec.structs.replace(WHOLE, **fields)


AWAY = changed(master=None, store_away_since_s=1_795_967_800.5)
FULL: dict[str, object] = {"store_read_only_since_s": 1_795_967_800.5, "store_read_only_reason": "it is full"}


def with_partition(**fields: object) -> ClusterStatus:
    partition = msgspec.structs.replace(PARTITION, **fields)
    return changed(topics=[msgspec.structs.replace(TOPIC, partitions=[partition])])


def with_node(**fields: object) -> ClusterStatus:
    return changed(nodes=[msgspec.structs.replace(NODES[0], **fields), *NODES[1:]])


def test_a_whole_cluster() -> None:
    assert troubles(WHOLE) == [] and is_whole(WHOLE)


@pytest.mark.parametrize(
    ("status", "level", "text"),
    [
        (changed(master=None), PROBLEM, "no nsqlookupd is the master"),
        (AWAY, PROBLEM, "without the coordination store since 2026-11-29 15:56:40 UTC: what it says of nodes"),
        (changed(**FULL), PROBLEM, "takes no writes since 2026-11-29 15:56:40 UTC: it is full; nobody is elected"),
        (changed(settings={"is_upgrading": True}), NOTE, "it is being upgraded: no copy is moved"),
        (changed(problem="the store was emptied"), PROBLEM, "takes no part: the store was emptied"),
        (changed(nodes=[], topics=[]), PROBLEM, "no nsqd is in the cluster"),
        (changed(unreadable=[{"key": "k", "reason": "r"}]), PROBLEM, "key k of the store cannot be read: r"),
        (changed(lookupds=[MASTER]), NOTE, "one nsqlookupd coordinates alone"),
        (with_node(suspected=True), WARNING, "it does not listen"),
        (with_node(is_draining=True), NOTE, "it drains"),
        (with_node(is_older=True), NOTE, "its data directory was an older copy when it started"),
        (with_node(holds=90, copies_max=100), NOTE, "its limit of open files is enough for 100"),
        (with_node(kept_alone=[("u", "why")], kept_alone_count=2), WARNING, "2 topics of it yet: u (why); 1 more"),
        (with_node(version=2), WARNING, "1: b:4150, c:4150; 2: a:4150"),
        (with_node(host_id="b"), NOTE, "partition 0: has several copies on one machine"),
        (with_partition(leader="", reason="nobody"), PROBLEM, "partition 0: nobody leads: nobody"),
        (with_partition(leader="", reason=TO_COME), PROBLEM, "it comes with the node that has it"),
        (with_partition(in_sync=["a", "b"]), WARNING, "2 of 3 copies are in sync"),
        (with_partition(unconfirmed=["c"]), WARNING, "2 of 3 copies are in sync; node c:4150 lives and is not in sync"),
        (with_partition(in_sync=["a", "b"], replicas=["a", "b"]), WARNING, "in sync, and 1 waits for its turn"),
        (with_partition(in_sync=["a"], replicas=["a"]), PROBLEM, "an OK needs 2, and 2 wait for their turn"),
        (with_partition(in_sync=["a"]), PROBLEM, "nothing is acknowledged: 1 of 3 copies are in sync, and an"),
        (with_partition(is_ready=False), WARNING, "cannot be consumed yet"),
        (with_partition(is_ready=False, unready_s=9.9), WARNING, "consumed yet: its leader was elected a moment ago"),
        (with_partition(is_ready=False, unready_s=10.0), PROBLEM, "consumed: node a:4150 leads it and has not said"),
        (changed(topics=[msgspec.structs.replace(TOPIC, is_deleting=True)]), NOTE, "it is being deleted"),
    ],
)  # fmt: skip
def test_what_is_wrong(status: ClusterStatus, level: str, text: str) -> None:
    (found,) = [each for each in troubles(status) if text in each.text]
    assert found.level == level
    assert is_whole(status) is (level == NOTE)


def _two_copies(*nodes: ClusterNode, reason: str = "", is_master: bool = True) -> tuple[str, str]:
    """Two of three copies are in sync, and nobody is to have a third one yet; return what is said of that."""
    status = with_partition(in_sync=["a", "b"], replicas=["a", "b"], reason=reason)
    (found,) = [
        each
        for each in troubles(msgspec.structs.replace(status, nodes=list(nodes), is_master=is_master))
        if each.subject == "topic t" and each.level == WARNING
    ]
    return found.text, found.advice


def test_copies_that_wait_for_their_turn_are_told_from_those_without_a_place() -> None:
    full, crowded, dead = (
        msgspec.structs.replace(NODES[2], **fields)
        for fields in ({"is_full": True}, {"copies_max": 5, "holds": 5}, {"suspected": True})
    )
    text, advice = _two_copies(*NODES)
    assert "1 waits for its turn" in text and "flintmq cluster moves" in advice
    for third in (full, crowded, dead):
        text, advice = _two_copies(*NODES[:2], third)
        assert "and 1 has no place" in text and "start more nodes" in advice
    assert "and 1 has no place" in _two_copies(*NODES[:2])[0]
    # the master knows better
    text, advice = _two_copies(*NODES, reason="on 2 machines")
    assert "and 1 has no place (on 2 machines)" in text and "start more nodes" in advice
    upgrading = with_partition(in_sync=["a", "b"], replicas=["a", "b"], reason="it is being upgraded")
    found = troubles(msgspec.structs.replace(upgrading, settings={"is_upgrading": True}))[-1]
    assert "1 waits for the end of the upgrade" in found.text and "cluster upgrade done" in found.advice
    same = msgspec.structs.replace(NODES[2], host_id="a")
    assert "1 waits for its turn" in _two_copies(*NODES[:2], same)[0], "it allows that, or it would have said so"
    assert "and 1 has no place" in _two_copies(*NODES[:2], same, is_master=False)[0]
    assert "1 waits for its turn" in _two_copies(*NODES, is_master=False)[0]


def test_what_a_leader_has_not_said_for_long_is_one_finding() -> None:
    rows = [
        msgspec.structs.replace(PARTITION, partition=number, leader=leader, is_ready=False, unready_s=seconds)
        for number, (leader, seconds) in enumerate([("a", 312.4), ("x", 60.0), ("a", 400.0), ("a", 2.0)])
    ]
    found = troubles(changed(topics=[msgspec.structs.replace(TOPIC, partitions=rows)]))
    assert [(each.level, each.text) for each in found] == [
        (WARNING, "partition 3: cannot be consumed yet: its leader was elected a moment ago"),
        (
            PROBLEM,
            "partitions 0, 2: cannot be consumed: node a:4150 leads it and has not said here for 400 s that it is "
            "ready",
        ),
        (PROBLEM, "partition 1: cannot be consumed: node x leads it and has not said here for 60 s that it is ready"),
    ]
    assert all("--lookupd-tcp-address" in each.advice and "its log" in each.advice for each in found[1:])
    nodes = {node.node: node for node in NODES}
    assert [why_unready(each, nodes).split(" for ")[0] for each in (*rows[:2], rows[3], PARTITION)] == [
        "node a:4150 leads it and has not said here",
        "node x leads it and has not said here",
        "its leader was elected a moment ago",
        "",
    ]


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (TO_COME, "start the nsqd that had it"),
        (NOT_CREATED, "the master nsqlookupd creates it"),
        ("x", "topic elect"),
        ("x", "flintmq topic elect t PARTITION --dry-run"),
        (f"x; {NO_COPY}", "flintmq topic elect t PARTITION NODE --accept-loss"),
        (f"x; {TO_DECIDE}", "flintmq topic elect t PARTITION --dry-run says who has most of it"),
    ],
)
def test_who_can_lead_a_partition_without_a_leader(reason: str, advice: str) -> None:
    (found,) = [each for each in troubles(with_partition(leader="", reason=reason)) if each.level == PROBLEM]
    assert advice in found.advice and ("elect" in advice) is ("elect" in found.advice)
    assert (TO_DECIDE in reason) is found.advice.endswith("flintmq topic delete t")


def test_nobody_is_to_be_elected_by_hand_while_the_store_takes_no_writes() -> None:
    unled = with_partition(leader="", reason="one of b, c can lead, but nobody is elected")
    told = troubles(msgspec.structs.replace(unled, master=None, **FULL))
    assert ["takes no writes" in each.text for each in told] == [True, False, False]
    assert not any("topic elect" in each.advice or "is the coordination store there" in each.advice for each in told)
    assert "mend the coordination store, which takes no writes" in told[-1].advice
    assert "takes no writes" not in troubles(msgspec.structs.replace(AWAY, **FULL))[0].text, "it is not there at all"


def test_a_store_that_is_away_is_one_finding() -> None:
    assert len(troubles(AWAY)) == 1, "that nobody is known to be the master is no other"


def test_a_status_of_a_release_that_says_nothing_of_the_store_is_read() -> None:
    told = msgspec.to_builtins(AWAY)
    assert msgspec.convert(told, ClusterStatus) == AWAY
    for name in ("store_away_since", "store_read_only_since", "store_read_only_reason"):
        del told[name]
    del told["settings"]
    assert is_whole(msgspec.convert({**told, "master": msgspec.to_builtins(MASTER)}, ClusterStatus))


def test_members_that_are_taken_for_dead_do_not_count() -> None:
    status = changed(nodes=[*(msgspec.structs.replace(node, suspected=True) for node in NODES[:2]), NODES[2]])
    assert any("1 of 3 copies are in sync, and an OK needs 2" in each.text for each in troubles(status))


def test_many_partitions_are_one_finding() -> None:
    rows = [msgspec.structs.replace(PARTITION, partition=number, in_sync=["a", "b"]) for number in range(20)]
    found = troubles(changed(topics=[msgspec.structs.replace(TOPIC, partitions=rows)]))
    text = "partitions 0, 1, 2, 3, 4, 5, 6, 7 and 12 more: 2 of 3 copies are in sync"
    assert [each.text for each in found] == [f"{text}; node c:4150 lives and is not in sync"]


C_AWAY = ClusterNode("c", "10.0.0.3", 4150, 4151, holds=1, is_away=True)


@pytest.mark.parametrize(
    ("known", "name"), [([C_AWAY], "node c (was 10.0.0.3:4150) is away"), ([], "node c is away")]
)  # fmt: skip
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"in_sync": ["a", "b"]}, "2 of 3 copies are in sync"),
        ({"in_sync": ["a", "b", "c"]}, "2 of 3 copies are in sync"),  # its lease is over, and it is not put out yet
        ({"in_sync": ["a"], "replicas": ["a", "c"]}, "nothing is acknowledged: 1 of 3 copies are in sync"),
        ({"leader": "", "reason": "none", "in_sync": ["c"]}, "nobody leads: none"),
    ],
)
def test_a_node_that_is_away_is_named(
    known: list[ClusterNode], name: str, fields: dict[str, object], text: str
) -> None:
    status = msgspec.structs.replace(with_partition(**fields), nodes=NODES[:2], away=known)
    (found,) = [each for each in troubles(status) if text in each.text]
    assert name in found.text and "start " in found.advice
    assert [(each.node, each.holds, each.is_away) for each in away_nodes(status)] == [("c", 1, True)]


def test_nobody_is_to_be_started_where_all_live() -> None:
    (found,) = troubles(with_partition(in_sync=["a"]))
    assert "b:4150 lives and is not in sync, node c:4150 lives" in found.text
    assert "another secret (--cluster-secret-file)" in found.advice, "the port may be open"
    assert "start" not in found.advice and "4153" in found.advice
    lacking = with_partition(in_sync=["a", "b"], replicas=["a", "b"])
    (found,) = troubles(msgspec.structs.replace(lacking, nodes=NODES[:2]))
    assert "is away" not in found.text and found.advice.startswith("start more nodes")
    suspected = msgspec.structs.replace(NODES[2], suspected=True)
    found = troubles(changed(nodes=[*NODES[:2], suspected]))[-1]
    assert "node c:4150 does not answer" in found.text and "start the nodes" in found.advice


def test_many_nodes_that_are_away_are_not_all_named() -> None:
    rows = [
        msgspec.structs.replace(PARTITION, partition=number, in_sync=["a", "b"], replicas=["a", "b", f"x{number:02}"])
        for number in range(20)
    ]
    (found,) = troubles(changed(topics=[msgspec.structs.replace(TOPIC, partitions=rows)]))
    assert "node x07 is away and 12 more" in found.text and "x08" not in found.text


def test_a_status_of_a_release_that_does_not_name_who_is_away_is_read() -> None:
    told = msgspec.to_builtins(changed(nodes=NODES[:2]))
    del told["away"]
    (found,) = away_nodes(msgspec.convert(told, ClusterStatus))
    assert (found.node, found.address, found.is_away) == ("c", "c", True), "where it was is not known"


def test_nodes_with_the_same_address_are_a_problem() -> None:
    same = changed(nodes=[NODES[0], msgspec.structs.replace(NODES[1], host="a"), NODES[2]])
    (found,) = troubles(same)
    assert (found.level, found.subject) == (PROBLEM, "nodes") and "--broadcast-address" in found.advice
    assert found.text.startswith("2 nodes say that they are a:4150: a, b; clients reach one")
    dead = [*same.nodes[:1], msgspec.structs.replace(same.nodes[1], suspected=True), NODES[2]]
    assert not any("say that they are" in each.text for each in troubles(changed(nodes=dead))), "one of them is gone"


def test_a_node_is_found_by_its_id_and_by_an_address_that_is_its_alone() -> None:
    same = changed(nodes=[NODES[0], msgspec.structs.replace(NODES[1], host="a"), NODES[2]], away=[C_AWAY])
    assert [node and node.node for node in map(same.find_node, ["a", "b", "c:4150", "c:4151", "x"])] == [
        "a", "b", "c", "c", None,
    ]  # fmt: skip
    for address in ("a:4150", "a:4151"):
        with pytest.raises(SeveralNodes, match=f"2 nodes say that they are {address}: a, b; name the id"):
            same.find_node(address)


def test_a_node_that_is_away_is_found_where_nobody_lives_at_its_address() -> None:
    status = changed(nodes=NODES[:2], away=[C_AWAY, ClusterNode("d", "a", 4150, 4151, is_away=True)])
    assert [node and node.node for node in map(status.find_node, ["c", "10.0.0.3:4151", "a:4150", "d"])] == [
        "c", "c", "a", "d",
    ]  # fmt: skip
    twice = changed(away=[C_AWAY, msgspec.structs.replace(C_AWAY, node="e")])
    with pytest.raises(SeveralNodes, match=r"2 nodes say that they are 10\.0\.0\.3:4150: c, e; name the id"):
        twice.find_node("10.0.0.3:4150")


SPARE = ClusterNode(node="d", host="d", tcp_port=4150, http_port=4151, host_id="d", version=1)
GOING = msgspec.structs.replace(
    TOPIC, partitions=[msgspec.structs.replace(PARTITION, replicas=["a", "b", "d"], leaving=["c"])]
)
NOWHERE = "it is drained, and copies stay (1 are left): no node can take t/0: all have a copy, are full, or drain"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, NOWHERE),
        ({"nodes": [*NODES, msgspec.structs.replace(SPARE, is_full=True)]}, NOWHERE),
        ({"nodes": [*NODES, msgspec.structs.replace(SPARE, is_draining=True)]}, NOWHERE),
        ({"nodes": [*NODES, msgspec.structs.replace(SPARE, suspected=True)]}, NOWHERE),
        ({"nodes": [*NODES, msgspec.structs.replace(SPARE, holds=5, copies_max=5)]}, NOWHERE),
        ({"nodes": [*NODES, SPARE]}, ""),
        ({"nodes": [*NODES, SPARE], "drains": [Drain("c", left=1, reason="too few machines")]},
         "it is drained, and copies stay (1 are left): too few machines"),
        ({"nodes": [*NODES, SPARE], "drains": [Drain("c", left=1), Drain("d")]}, NOWHERE),
        ({"drains": [Drain("c", left=0)]}, ""),
        ({"topics": [GOING], "nodes": [*NODES, SPARE]}, ""),  # it gets its copy
        ({"topics": [GOING], "away": [msgspec.structs.replace(SPARE, is_away=True)]},
         "it is drained, and copies stay (1 are left): node d (d:4150) is to have t/0 and is away: start it, or have "
         "another one take its place with flintmq node remove d"),
        ({"topics": [GOING], "nodes": [*NODES, msgspec.structs.replace(SPARE, is_full=True)]},
         "it is drained, and copies stay (1 are left): node d (d:4150) is to have t/0 and has no room on its disk: "
         "free space there, or have other nodes take them with flintmq node drain d"),
        ({"drains": [Drain("c", left=1, reason="x")], "settings": {"is_upgrading": True}}, ""),
        ({"topics": [msgspec.structs.replace(TOPIC, replicator=2)]}, ""),  # the copy just goes
        ({"topics": [msgspec.structs.replace(TOPIC, is_deleting=True)]}, ""),
    ],
)  # fmt: skip
def test_a_drain_whose_copies_can_go_nowhere_is_told(fields: dict[str, object], text: str) -> None:
    found = [
        each for each in troubles(changed(**{"drains": [Drain("c", left=1)], **fields})) if "it is drained" in each.text
    ]
    assert [(each.level, each.subject, each.text) for each in found] == [(WARNING, "node c (c:4150)", text)] * bool(
        text
    )
    assert all("flintmq node drain c --undo" in each.advice for each in found)
