"""What a node does about a partition: what the store says decides, and doubt changes nothing."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.cluster.models import KEYS, World, node, state

from flintmq.cluster.store import Span
from flintmq.cluster.view import View
from flintmq.nsqd.cluster.roles import Here, Role, followers_of, role_of

P = ("t", 0)
HERE = Here(7, 9)  # as models.state has it
ALL = Span.of_prefix(KEYS.prefix)


def role(
    world: World, me: str = "a", here: Here | None = HERE, view: View | None = None, incarnation: str = ""
) -> Role:
    if view is None:
        view = View(KEYS)
    view.feed(world.store.range(ALL))
    return role_of(view, node(me, incarnation=incarnation or f"{me}1"), P, here)


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
