"""Topics that were a single node's and are given more partitions: which come with nodes, and which are made."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from tests.unit.cluster.models import KEYS, Master, World, node, state

from flintmq.cluster import orders
from flintmq.cluster.controller import Refused, why_no_leader
from flintmq.cluster.state import TopicRecord, decode, encode
from flintmq.cluster.store import OutcomeUnknown
from flintmq.cluster.view import View
from flintmq.nsqd.cluster.belonging import OPERATIONS_TAKEN_MAX
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


def _bring(
    master: Master,
    name: str,
    meta: TopicMeta,
    *numbers: int,
    answers: Sequence[bool | None] = (),
    log_id: int = 0,
) -> list[int]:
    """A node brings what it has alone of topic t; return the number that the cluster has given it, if it is taken.

    Args:
        answers: whether each of the first requests takes place, of which the answers are lost; None: it is answered.
        log_id: of all of them, which were made together; 0: each has its own.
    """
    world, view, taken, lost = master.world, View(KEYS), [], iter(answers)
    view.feed(world.store.range(KEYS.all))

    async def txn(request: Any) -> Any:
        for lists in (request.conditions, request.then, request.otherwise):
            assert len(lists) <= OPERATIONS_TAKEN_MAX
        is_done = next(lost, None)
        if is_done is False:
            raise OutcomeUnknown("no answer")
        result = world.store.apply(request)
        view.feed(world.store.events(KEYS.all, view.revision, world.store.revision))
        if is_done:
            raise OutcomeUnknown("no answer")
        return result

    async def held() -> None: ...

    async def take_in(_topic: Any, number: int) -> None:
        taken.append(number)

    logs = {number: Mock(spec=PartitionLog, log_id=log_id or number + 1) for number in numbers}
    partitions = {number: SimpleNamespace(log=log) for number, log in logs.items()}
    store: Any = SimpleNamespace(txn=txn)
    topics: Any = {"t": SimpleNamespace(name="t", meta=meta, partitions=partitions)}
    bringing = Bringing(KEYS, view, store, random.Random(1), topics, lambda: node(name), held, take_in)
    try:
        asyncio.run(bringing.bring("t"))
    finally:
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


@pytest.mark.parametrize(("numbers", "count"), [((0, 1), 2), ((1,), 2), ((0, 2), 3)])
def test_a_plain_topic_that_a_cluster_had_brings_all_partitions_that_were_restored(numbers, count):
    master = _alone()
    assert _bring(master, "a", PLAIN, *numbers)
    record = master.view.topics["t"]
    assert (record.partition_num, record.brought_below, record.meta) == (count, count, PLAIN)
    assert _numbers(master) == list(numbers)
    assert {master.world.state("t", number).leader for number in numbers} == {"a"}  # type: ignore[union-attr]


def test_nodes_that_have_parts_of_a_plain_topic_bring_them_one_behind_the_other():
    master = _alone()
    (number,) = _bring(master, "a", PLAIN, 0)
    assert _bring(master, "b", PLAIN, 2, 3) == [number]
    assert _bring(master, "c", PLAIN, 1) == [number]
    record = master.view.topics["t"]
    assert (record.partition_num, record.brought_below) == (4, 4)
    assert "".join(master.world.state("t", each).leader for each in range(4)) == "acbb"  # type: ignore[union-attr]


def test_one_that_another_node_has_brought_already_changes_nothing():
    master = _alone()
    _bring(master, "a", PLAIN, 0, 1)
    before = master.world.store.revision
    with pytest.raises(NotBrought, match="node a has brought partition 1 with log 2, and node b has log 2"):
        _bring(master, "b", PLAIN, 1, 2)
    _expanded(master, 3)
    assert master.world.store.revision > before
    record = master.view.topics["t"]
    with pytest.raises(NotBrought, match="partition 3 of it is one that the cluster makes"):
        _bring(master, "c", PLAIN, 3)
    assert master.view.topics["t"] == record and _numbers(master) == [0, 1, 2]


def test_what_is_refused_leaves_no_topic_behind():
    master = _alone()
    master.world.put(KEYS.topic("u"), TopicRecord(8, PLAIN, 1, is_brought=True, brought_num=1))
    master.world.partition("u", 0, state("c", "c", log_id=2, topic_number=8))
    master.follow()
    with pytest.raises(NotBrought, match="node c has log 2 as u/0, and node a as t/1: was its data directory copied"):
        _bring(master, "a", PLAIN, 0, 1)
    assert "t" not in master.view.topics and _numbers(master) == [0]


@pytest.mark.parametrize("is_done", [True, False])
def test_a_record_is_there_with_its_partitions_or_not_at_all(is_done):
    master = _alone()
    answers = [is_done, *[False] * 3]
    with pytest.raises(NotBrought, match="ask again"):
        _bring(master, "a", PLAIN, 0, 1, answers=answers)
    assert ("t" in master.view.topics) is is_done and len(_numbers(master)) == 2 * is_done
    assert _bring(master, "a", PLAIN, 0, 1), "asked again it goes on"
    assert _numbers(master) == [0, 1]


def test_a_request_of_which_the_answer_is_lost_is_sent_again():
    master = _alone()
    assert _bring(master, "a", PLAIN, 0, 1, answers=[True, False])
    assert _numbers(master) == [0, 1]


def test_many_partitions_come_in_several_transactions():
    master = _alone()
    assert _bring(master, "a", TopicMeta(partition_num=300), *range(300))
    assert _numbers(master) == list(range(300))


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("is_changed", [True, False])
def test_who_is_cut_off_between_transactions_goes_on_there(place: int, is_done: bool, is_changed: bool) -> None:
    count, at_once = 255, OPERATIONS_TAKEN_MAX - 1
    meta, master = TopicMeta(partition_num=count), _alone()
    with pytest.raises(NotBrought, match="ask again"):
        _bring(master, "a", meta, *range(count), answers=[*[None] * place, is_done, *[False] * 3], log_id=5)
    assert _numbers(master) == list(range(min(count, (place + is_done) * at_once))), "the cluster makes none of them"
    before = master.view.topics.get("t")
    if is_changed and before is not None:
        asked = msgspec.structs.replace(meta, retention_days=3, replica=2, version=1)
        plan = orders.alter(master.controller, "t", asked)
        assert plan.swap is not None
        master.world.swap(plan.swap)
        master.settle()
    (number,) = _bring(master, "a", meta, *range(count), log_id=5)
    assert before is None or number == before.number
    assert _numbers(master) == list(range(count))
    assert {state.leader for state in master.view.partitions.values()} == {"a"}
    assert {state.log_id for state in master.view.partitions.values()} == {5}


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
