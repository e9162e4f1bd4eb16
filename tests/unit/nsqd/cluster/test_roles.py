"""What a node does about a partition: what the store says decides, and doubt changes nothing."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from tests.unit.cluster.models import KEYS, World, node, state

from flintmq.cluster.power import awaited, contested, describe, elected_with_loss, losses, lost, told, who_has_most
from flintmq.cluster.state import Ending, NoLeader, PartitionState, candidates, elected
from flintmq.cluster.store import Span
from flintmq.cluster.view import View
from flintmq.nsqd.cluster.roles import Here, Role, followers_of, role_of

P = ("t", 0)
HERE = Here(7, 9)  # as models.state has it
ALL = Span.of_prefix(KEYS.prefix)


def role(
    world: World,
    me: str = "a",
    here: Here | None = HERE,
    view: View | None = None,
    incarnation: str = "",
    was_here: bool = False,
    is_store_older: bool = False,
) -> Role:
    if view is None:
        view = View(KEYS)
    view.feed(world.store.range(ALL))
    return role_of(view, node(me, incarnation=incarnation or f"{me}1"), P, here, was_here, is_store_older)


@pytest.fixture
def world() -> World:
    world = World()
    world.nodes("abc")
    world.topic("t", number=7)
    return world


def test_the_process_that_was_elected_leads(world: World) -> None:
    world.partition("t", 0, state("a", "ab", "abc"))
    assert role(world, "a") is Role.LEAD
    assert role(world, "b") is Role.FOLLOW
    assert role(world, "a", incarnation="a2") is Role.FOLLOW, "the same node, started anew"


def test_who_is_to_have_a_copy_makes_one(world: World) -> None:
    world.partition("t", 0, state("a", "ab", "abc"))
    assert role(world, "c", None) is Role.CREATE
    assert role(world, "a", None) is Role.CREATE, "also the leader"
    world.node(node("d"))
    assert role(world, "d", None) is Role.NOTHING


def test_a_copy_is_made_only_of_a_topic_that_is_there(world: World) -> None:
    world.partition("t", 0, state("a", "ab", topic_number=8))
    assert role(world, "b", None) is Role.NOTHING, "the topic is another one"
    world.delete(KEYS.topic("t"))
    assert role(world, "b", None) is Role.NOTHING


def test_a_partition_that_the_topic_has_not_yet_in_an_older_store_is_set_aside(world: World) -> None:
    later = ("t", 1)  # the topic has one partition, and none is ever taken away
    view = View(KEYS)
    view.feed(world.store.range(ALL))

    def role_of_later(here: Here, is_store_older: bool) -> Role:
        return role_of(view, node("a"), later, here, False, is_store_older)

    assert role_of_later(dataclasses.replace(HERE, epoch=1), False) is Role.SET_ASIDE, "somebody led it"
    assert role_of_later(HERE, True) is Role.SET_ASIDE
    assert role_of_later(HERE, False) is Role.FOLLOW, "perhaps it is about to be made"
    world.topic("t", partition_num=2, number=7)
    view.feed(world.store.range(ALL))
    assert role_of_later(dataclasses.replace(HERE, epoch=1), True) is Role.FOLLOW, (
        "its state is missing, which the master makes"
    )


@pytest.mark.parametrize("here", [Here(7, 10), Here(6, 9)])
def test_what_is_of_another_log_or_topic_is_set_aside(world: World, here: Here) -> None:
    world.partition("t", 0, state("a", "ab"))
    assert role(world, "a", here) is Role.SET_ASIDE
    assert role(world, "b", here) is Role.SET_ASIDE


def test_who_is_to_have_no_copy_removes_it(world: World) -> None:
    world.partition("t", 0, state("a", "ab"))
    assert role(world, "c") is Role.REMOVE
    world.partition("t", 0, state("a", "abc", "ab"))
    assert role(world, "c") is Role.FOLLOW, "it is in sync still"


def test_only_a_state_that_is_later_than_the_copy_has_it_removed(world: World) -> None:
    world.partition("t", 0, state("a", "ab"))  # in epoch 3
    assert role(world, "c", Here(7, 9, epoch=3, led_by=(3, "a1"))) is Role.REMOVE
    assert role(world, "c", Here(7, 9, epoch=4)) is Role.FOLLOW, "the store is older than the copy"
    assert role(world, "c", Here(7, 9, epoch=3, led_by=(3, "b1"))) is Role.FOLLOW, "it had another leader in epoch 3"
    assert role(world, "c", Here(7, 9, epoch=3), is_store_older=True) is Role.SET_ASIDE
    assert role(world, "b", Here(7, 9, epoch=3), is_store_older=True) is Role.FOLLOW


def test_who_had_a_copy_that_is_in_sync_makes_no_empty_one(world: World) -> None:
    for in_sync in ("ab", "a"):
        world.partition("t", 0, state("a", in_sync, "abc"))
        assert role(world, "a", None, was_here=True) is Role.LOST, "also who leads"
        assert role(world, "a", None) is Role.CREATE, "it was just made"
    assert role(world, "b", None, was_here=True) is Role.CREATE, "it is sent everything"
    gone = lost(state("a", "a"), "a", "a1")
    assert gone is not None
    world.partition("t", 0, gone)
    assert role(world, "a", None) is Role.LOST, "a process of before has said so"
    assert not asks_a_node(gone)


def asks_a_node(gone: PartitionState) -> bool:
    """Whether somebody is elected as soon as the node is there."""
    live = {"a": node("a")}
    return who_has_most(gone, live) is not None or not isinstance(candidates(gone, live), NoLeader)


def test_who_was_elected_in_spite_of_the_loss_begins_anew(world: World) -> None:
    gone = lost(state("a", "a"), "a", "a1")
    assert gone is not None and lost(gone, "a", "a2") is None, "it is said once"
    taken = elected_with_loss(gone, node("a"))
    world.partition("t", 0, taken)
    assert role(world, "a", None, was_here=True) is Role.CREATE
    world.partition("t", 0, elected(taken, node("a")))
    assert role(world, "a", None, was_here=True) is Role.LOST, "it had one since"


def test_a_lost_copy_is_waited_for_unless_the_store_is_older_and_it_was_moved() -> None:
    live = {name: node(name) for name in "ab"}
    gone = lost(state("a", "a", "ab"), "a", "a1")
    assert gone is not None and awaited(gone, live) == ["a", "b"]
    assert "the copy that was in sync on node a is lost" in describe(gone, live)
    assert any("node a had everything, and has lost its copy" in note for note in losses(gone, live, "b"))
    known = lost(contested(state("a", "a"), "b", 4), "a", "a1")
    assert known is not None and awaited(known, live) == ["b"]
    said = told(known, Ending("b", "b1", 4, 100))
    assert said is not None
    most = who_has_most(said, live)
    assert most is not None and most.node == "b"


def test_only_the_last_one_in_sync_says_that_its_copy_is_lost() -> None:
    assert lost(state("a", "ab"), "a", "a1") is None
    assert lost(state("b", "b"), "a", "a1") is None


def test_a_topic_that_was_seen_to_be_deleted_goes_with_its_copies(world: World) -> None:
    view = View(KEYS)
    world.partition("t", 0, state("a", "ab"))
    assert role(world, view=view) is Role.LEAD
    record = world.record("t")
    assert record is not None
    world.put(KEYS.topic("t"), msgspec.structs.replace(record, is_deleting=True))
    world.delete(KEYS.partition("t", 0))
    assert role(world, view=view) is Role.REMOVE
    world.delete(KEYS.topic("t"))
    assert role(world, view=view) is Role.REMOVE, "also later"


def test_a_topic_that_went_while_nobody_looked_is_set_aside(world: World) -> None:
    world.delete(KEYS.topic("t"))
    assert role(world) is Role.SET_ASIDE
    assert role(world, here=None) is Role.NOTHING


def test_doubt_changes_nothing(world: World) -> None:
    assert role(world) is Role.FOLLOW, "the state is not made yet"
    world.put(KEYS.partition("t", 0), b"?")
    assert role(world) is Role.FOLLOW
    world.delete(KEYS.partition("t", 0))
    world.put(KEYS.topic("t"), b"?")
    assert role(world) is Role.FOLLOW


def test_a_leader_sends_to_everybody_who_has_or_is_to_have_something() -> None:
    assert followers_of(state("a", "ab", "ac", leaving=("d",)), "a") == ["c", "d", "b"]
    assert followers_of(state("a", "a"), "a") == []


def test_nobody_is_said_to_be_waited_for_who_has_lost_its_copy(world: World) -> None:
    alone = lost(state("a", "a", "ab"), "a", "a1")
    assert alone is not None
    live = {name: node(name) for name in "ab"}
    assert describe(alone, live) == "the copy that was in sync on node a is lost; waits for b"
    heard = told(alone, Ending("b", "b1", 1, 5))
    assert heard is not None
    text = describe(heard, live)
    assert text.startswith(
        "the copy that was in sync on node a is lost; an operator has to say who leads; most of it has b"
    )
    assert who_has_most(heard, live) is None
