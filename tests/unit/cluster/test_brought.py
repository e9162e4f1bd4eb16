"""Topics that were a single node's and are given more partitions: which come with nodes, and which are made."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from tests.unit.cluster.models import KEYS, Master, World, node, state

from flintmq.cluster import orders
from flintmq.cluster.controller import Refused, why_no_leader
from flintmq.cluster.state import TopicRecord, decode, encode
from flintmq.cluster.view import View
from flintmq.nsqd.cluster.bringing import Bringing, NotBrought
from flintmq.storage import PartitionLog
from flintmq.topic_meta import PLAIN, TopicMeta


def _came(meta: TopicMeta, partition_num: int, there: Mapping[int, str], brought_num: int = 0) -> Master:
    """Topic t, of which nodes have brought some partitions: number and node. The log of partition n is n + 1."""
    world = World()
    world.nodes("abc")
    world.put(KEYS.topic("t"), TopicRecord(7, meta, partition_num, is_brought=True, brought_num=brought_num))
    for number, name in there.items():
        world.partition("t", number, state(name, name, log_id=number + 1))
    return Master(world)


def _expanded(master: Master, partition_num: int) -> orders.Plan:
    """Ask for so many partitions, and let the master do what follows."""
    plan = orders.expand(master.controller, "t", partition_num)
    if plan.swap is not None:
        master.world.swap(plan.swap)
        master.controller.ended(plan.swap, is_known=True)
    master.settle()
    return plan


def _numbers(master: Master) -> list[int]:
    return sorted(number for _, number in master.view.partitions)


@pytest.mark.parametrize("brought_num", [0, 2])
def test_a_topic_that_was_a_single_nodes_gets_more_partitions(brought_num):
    master = _came(TopicMeta(partition_num=2), 2, {0: "a", 1: "a"}, brought_num)
    plan = _expanded(master, 4)
    assert plan.count == 2 and not plan.notes
    assert _numbers(master) == [0, 1, 2, 3]
    record = master.view.topics["t"]
    assert (record.partition_num, record.meta.partition_num, record.meta.version) == (4, 4, 1)
    assert [master.world.state("t", number).log_id for number in (0, 1)] == [1, 2], "they stay"  # type: ignore[union-attr]
    _expanded(master, 5)
    assert _numbers(master) == [0, 1, 2, 3, 4]


def test_a_plain_topic_that_an_earlier_release_expanded_gets_well_by_itself():
    master = _came(PLAIN, 2, {0: "a"})
    assert "partition t/1 is created" in "".join(master.settle())
    assert _numbers(master) == [0, 1]
    assert master.settle() == []


def test_one_with_partitions_that_an_earlier_release_expanded_gets_well_when_that_is_asked_again():
    master = _came(TopicMeta(partition_num=4, version=1), 4, {0: "a", 1: "a"})
    assert master.settle() == [], "a node may have the others"
    with pytest.raises(Refused, match=r"partitions 2, 3 are not there: .* ask for partition_num=4 first"):
        orders.expand(master.controller, "t", 5)
    plan = _expanded(master, 4)
    assert plan.count == 2 and "partitions 2, 3 are made, empty" in plan.notes[0]
    assert _numbers(master) == [0, 1, 2, 3]
    assert master.view.topics["t"].meta == TopicMeta(partition_num=4, version=1)
    again = _expanded(master, 4)
    assert (again.swap, again.notes) == (None, [])


def test_a_plan_that_is_not_carried_out_says_the_same():
    master = _came(TopicMeta(partition_num=2), 2, {0: "a"})
    plan = orders.expand(master.controller, "t", 2)
    assert [row["partition"] for row in plan.rows] == [1]
    assert _numbers(master) == [0]


def test_partitions_that_are_yet_to_come_are_not_made():
    master = _came(TopicMeta(partition_num=3), 3, {1: "a"}, brought_num=3)
    again = _expanded(master, 3)
    assert (again.swap, again.notes) == (None, ["partitions 0, 2 come with the nodes that have them: start those"])
    assert _expanded(master, 5).notes == again.notes
    assert _numbers(master) == [1, 3, 4]
    assert why_no_leader(master.view, ("t", 2)) == "it is not created yet: it comes with the node that has it"
    master.world.delete(KEYS.partition("t", 4))
    master.follow()
    assert why_no_leader(master.view, ("t", 4)) == "it is not created yet"


def test_none_is_made_of_a_topic_that_nobody_has_brought_anything_of():
    master = _came(TopicMeta(partition_num=2), 2, {})
    assert _expanded(master, 2).swap is None
    assert _numbers(master) == []
    _expanded(master, 3)
    assert _numbers(master) == [2]


def test_a_partition_that_cannot_be_read_is_there():
    master = _came(TopicMeta(partition_num=2), 2, {0: "a"})
    master.world.put(KEYS.partition("t", 1), b"of a newer release")
    master.follow()
    assert _expanded(master, 2).swap is None
    _expanded(master, 3)
    assert _numbers(master) == [0, 2]


def test_how_many_were_brought_is_kept_by_other_orders():
    master = _came(TopicMeta(partition_num=2), 2, {0: "a", 1: "a"}, brought_num=2)
    meta = TopicMeta(partition_num=2, replica=2, version=1)
    plan = orders.alter(master.controller, "t", meta)
    assert plan.swap is not None
    assert decode(plan.swap.key, plan.swap.value or b"", TopicRecord).brought_num == 2


def test_a_record_of_another_release_reads_as_it_was_meant():
    of_before = b'{"number":7,"meta":{"partition_num":3},"partition_num":3,"is_brought":true}'
    record = decode("key", of_before, TopicRecord)
    assert (record.brought_below, record.knows_brought) == (3, False)
    plain = decode("key", b'{"number":7,"meta":{},"partition_num":3,"is_brought":true}', TopicRecord)
    assert (plain.brought_below, plain.knows_brought) == (1, True)
    made = TopicRecord(7, TopicMeta(partition_num=3), 3)
    assert (made.brought_below, made.knows_brought) == (0, True)
    assert b"brought" not in encode(made)


# -- the nodes that have them ------------------------------------------------------------------------------------------


def _bring(master: Master, name: str, meta: TopicMeta, *numbers: int) -> list[int]:
    """A node brings what it has alone of topic t; return the number that the cluster has given it, if it is taken."""
    world, view, taken = master.world, View(KEYS), []
    view.feed(world.store.range(KEYS.all))

    async def txn(request: Any) -> Any:
        result = world.store.apply(request)
        view.feed(world.store.events(KEYS.all, view.revision, world.store.revision))
        return result

    async def held() -> None: ...

    async def take_in(_topic: Any, number: int) -> None:
        taken.append(number)

    logs = {number: Mock(spec=PartitionLog, log_id=number + 1) for number in numbers}
    partitions = {number: SimpleNamespace(log=log) for number, log in logs.items()}
    store: Any = SimpleNamespace(txn=txn)
    topics: Any = {"t": SimpleNamespace(name="t", meta=meta, partitions=partitions)}
    bringing = Bringing(KEYS, view, store, random.Random(1), topics, lambda: node(name), held, take_in)
    asyncio.run(bringing.bring("t"))
    master.settle()
    return taken


@pytest.fixture(autouse=True)
def _no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs were no cluster's before."""
    monkeypatch.setattr("flintmq.nsqd.cluster.bringing.found_history", lambda *_: [])


def _alone() -> Master:
    world = World()
    world.nodes("abc")
    return Master(world)


@pytest.mark.parametrize(("meta", "count"), [(PLAIN, 1), (TopicMeta(partition_num=2), 2)])
def test_the_first_to_bring_one_says_how_many_come(meta, count):
    master = _alone()
    assert _bring(master, "a", meta, *range(count))
    record = master.view.topics["t"]
    assert (record.partition_num, record.brought_num, record.brought_below) == (count, count, count)
    _expanded(master, count + 1)
    assert _numbers(master) == list(range(count + 1))


@pytest.mark.parametrize("meta", [PLAIN, TopicMeta(partition_num=1)])
def test_who_died_before_it_had_replicas_goes_on_though_there_are_more_partitions_by_now(meta):
    master = _alone()
    (number,) = _bring(master, "a", meta, 0)
    _expanded(master, 3)
    assert _bring(master, "a", meta, 0) == [number]
    assert _numbers(master) == [0, 1, 2]


def test_who_died_before_it_had_replicas_goes_on_though_the_topic_was_changed():
    meta = TopicMeta(partition_num=2)
    master = _alone()
    (number,) = _bring(master, "a", meta, 0, 1)
    plan = orders.alter(master.controller, "t", msgspec.structs.replace(meta, retention_days=3, version=1))
    assert plan.swap is not None
    master.world.swap(plan.swap)
    assert _bring(master, "a", meta, 0, 1) == [number]


def test_who_comes_late_brings_what_it_has():
    meta = TopicMeta(partition_num=2)
    master = _alone()
    assert _bring(master, "a", meta, 0)
    _expanded(master, 4)
    assert _numbers(master) == [0, 2, 3]
    assert _bring(master, "b", meta, 1)
    assert _numbers(master) == [0, 1, 2, 3]
    assert master.world.state("t", 1).leader == "b"  # type: ignore[union-attr]
    with pytest.raises(NotBrought, match="node a has brought partition 0 with log 1, and node c has log 1"):
        _bring(master, "c", meta, 0)


def test_who_has_a_place_for_a_copy_of_what_others_have_brings_no_log_of_the_same_id():
    meta = TopicMeta(partition_num=1)
    master = _came(meta, 1, {})
    master.world.partition("t", 0, state("a", "a", "ab", log_id=1))
    master.follow()
    with pytest.raises(NotBrought, match="node a, b has brought partition 0 with log 1, and node b has log 1"):
        _bring(master, "b", meta, 0)


def test_who_has_what_the_cluster_made_keeps_it_alone():
    meta = TopicMeta(partition_num=2)
    master = _came(meta, 2, {0: "a"})
    _expanded(master, 2)
    with pytest.raises(NotBrought, match="partition 1 of it is one that the cluster makes: delete one of the two"):
        _bring(master, "b", meta, 1)
    with pytest.raises(NotBrought, match="the cluster has one of this name that was made otherwise"):
        _bring(master, "b", msgspec.structs.replace(meta, ordered=True), 1)
