"""A partition of which all copies are lost: what an operator can do, and is told."""

from __future__ import annotations

import pytest
from tests.unit.cluster.models import Master, World, node, state

from flintmq.cluster import orders
from flintmq.cluster.controller import Refused, why_no_leader


@pytest.fixture
def world() -> World:
    """Partition 0 of topic t was on node a alone, which is gone."""
    world = World()
    world.nodes("bc")
    world.topic("t")
    world.partition("t", 0, state("a", "a"))
    return world


def settled(world: World) -> Master:
    master = Master(world)
    master.settle()
    return master


def test_it_begins_anew_as_another_log_on_a_node_that_lives(world: World):
    master = settled(world)
    plan = orders.elect(master.controller, "t", 0, "b")
    assert "everything that was stored is lost" in plan.notes[0]
    assert plan.swap is not None and "begins anew with an empty log" in plan.swap.reason
    world.swap(plan.swap)
    settled(world)
    now = world.state("t")
    assert now is not None
    assert (now.leader, now.in_sync_nodes, now.holders, now.topic_number) == ("b", ("b",), ("b",), 7)
    assert now.log_id not in (0, 9) and now.epoch == now.lossy_epoch == 4


def test_who_is_removed_is_forgotten_then(world: World):
    master = settled(world)
    drain = orders.drain(master.controller, "a", is_removal=True)
    assert "flintmq topic elect t 0 NODE --accept-loss" in drain.notes[0]
    assert drain.swap is not None
    world.swap(drain.swap)
    master = settled(world)
    assert master.view.drains
    plan = orders.elect(master.controller, "t", 0, "b")
    assert plan.swap is not None
    world.swap(plan.swap)
    assert not settled(world).view.drains


@pytest.mark.parametrize("in_sync_of_replicas", [("a", "a"), ("a", "ab")])
def test_a_partition_that_stays_until_its_node_is_back_is_no_move(world: World, in_sync_of_replicas: tuple[str, str]):
    """Its copy is neither made elsewhere nor taken away, so it is no row of the plan; a note tells of it."""
    world.partition("t", 0, state("a", *in_sync_of_replicas))
    world.topic("u", replica=2, number=8)
    world.partition("u", 0, state("b", "ba", topic_number=8, log_id=10))
    plan = orders.drain(settled(world).controller, "a")
    assert plan.swap is not None
    assert plan.rows == [{"topic": "u", "partition": 0, "from": "a", "to": "c"}] and plan.count == 1
    (note,) = plan.notes
    assert note.startswith("partition t/0: node a has the only copy") and "it stays as it is until that is back" in note


def test_a_node_is_drained_whose_only_copies_could_go_nowhere(world: World):
    for name in "bc":
        world.node(node(name, is_full=True))
    plan = orders.drain(settled(world).controller, "a", is_removal=True)
    assert plan.swap is not None and not plan.rows and plan.count == 0
    assert "partition t/0: node a has the only copy" in plan.notes[0]
    nowhere = "node a has a copy of partition t/0 that can go nowhere"
    assert f"When it is back it stays: {nowhere}" in plan.notes[0]
    # what stands can be asked for, and waited for, also when it cannot be ordered any more
    world.swap(plan.swap)
    world.node(node("a"))
    plan = orders.drain(settled(world).controller, "a", is_removal=True)
    assert plan.swap is None and not plan.rows and plan.notes[0].startswith(nowhere)
    assert "it stays until there are more nodes, or flintmq node drain a --undo" in plan.notes[0]


def test_many_partitions_that_stay_are_counted(world: World):
    world.topic("t", partition_num=30)
    for number in range(30):
        world.partition("t", number, state("a", "a", log_id=10 + number))
    notes = orders.drain(settled(world).controller, "a").notes
    assert len(notes) == 20
    assert notes[18].startswith("partition t/18: ") and notes[19] == "so it is with 11 more partitions"


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"is_full": True}, "no room"), ({"is_draining": True}, "drains"), ({"copies_max": 1}, "open files")],
)
def test_it_begins_on_no_node_that_takes_nothing(world: World, fields: dict[str, object], text: str):
    world.node(node("b", **fields))
    world.topic("u")
    world.partition("u", 0, state("b", "b", log_id=10))
    with pytest.raises(Refused, match=text):
        orders.elect(settled(world).controller, "t", 0, "b")


def test_it_does_not_while_somebody_lives_who_has_a_copy(world: World):
    world.partition("t", 0, state("a", "a", "ac"))
    master = settled(world)
    with pytest.raises(Refused, match="has no copy of partition t/0 or is not there; there are c"):
        orders.elect(master.controller, "t", 0, "b")
    plan = orders.elect(master.controller, "t", 0, "c")
    assert plan.swap is not None and "anew" not in plan.swap.reason


def test_what_to_do_is_said_where_no_node_is_named(world: World):
    master = settled(world)
    order = "flintmq topic elect t 0 NODE --accept-loss"
    with pytest.raises(Refused, match=order):
        orders.elect(master.controller, "t", 0, "")
    with pytest.raises(Refused, match=f"nothing to move.*{order}"):
        orders.move(master.controller, ("t", 0), "a", "b")
    assert "no node that has a copy is alive" in why_no_leader(master.view, ("t", 0))


def test_what_nobody_can_be_elected_of_is_not_moved_and_what_is_about_to_be_led_is(world: World):
    world.partition("t", 0, state("a", "a", "ac"))
    with pytest.raises(Refused, match=r"nobody leads it.*flintmq topic elect t 0 --dry-run"):
        orders.move(settled(world).controller, ("t", 0), "a", "b")
    world.partition("t", 0, state("a", "ac", "ac"))
    assert orders.move(Master(world).controller, ("t", 0), "a", "b").swap is not None
