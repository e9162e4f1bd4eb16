"""A store that was put back from a backup: copies know of epochs that it does not have, and none of them is cut off."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.cluster.models import Master, World, node, state

from flintmq.cluster import power
from flintmq.cluster.controller import why_no_leader
from flintmq.cluster.power import contested, has_no_copy, is_doubtful, known_epoch, told
from flintmq.cluster.state import Ending, NoLeader, Older, PartitionState, candidates


@pytest.mark.parametrize(
    ("noted", "led_by", "expected"),
    [
        (2, (2, "a1"), 0),
        (3, (3, "a1"), 0),
        (3, (0, ""), 0),
        (4, (0, ""), 4),
        (3, (5, "b1"), 5),
        (3, (3, "b1"), 3),
        (3, (2, "b1"), 0),
    ],
)
def test_a_copy_that_knows_of_a_later_epoch_or_another_leader_of_the_same_shows_that_the_store_is_older(
    noted: int, led_by: tuple[int, str], expected: int
):
    assert known_epoch(state("a", "ab"), noted, led_by) == expected


def test_of_an_epoch_in_which_nobody_leads_any_more_it_is_not_known_who_did():
    assert known_epoch(state("", "ab"), 3, (3, "b1")) == 0


def test_who_says_so_is_believed_and_nobody_else_is():
    live = {name: node(name) for name in "abc"}
    now = contested(state("a", "ab", "ab", ends=(Ending("b", "b1", 1, 1),)), "c", 5)
    assert (now.leader, now.incarnation, now.epoch, now.ends) == ("", "", 6, ())
    assert now.older == Older(3, 5) and now.is_contested
    assert now.leaving == ("c",), "it may have most, so it takes part until the others have it"
    assert candidates(now, live) is NoLeader.STORE_OLDER
    assert power.awaited(now, live) == ["a", "b", "c"]


def test_another_one_may_know_of_still_later_epochs_and_what_was_said_stays():
    once = contested(state("a", "ab"), "a", 5)
    said = told(once, Ending("a", "a1", 5, 40))
    assert said is not None
    twice = contested(said, "b", 9)
    assert (twice.epoch, twice.older, twice.ends) == (10, Older(3, 9), said.ends)
    assert not known_epoch(twice, 9, (9, "x"))


def settled(world: World, before: PartitionState) -> tuple[PartitionState, Master]:
    world.partition("t", 0, before)
    master = Master(world)
    master.settle()
    now = world.state("t")
    assert now is not None
    return now, master


def test_who_has_most_leads_above_all_epochs_when_all_have_said_it():
    world = World()
    world.nodes("ab")
    world.topic("t", replica=3)
    before = contested(state("a", "ab", "abc"), "b", 5)
    for ending in Ending("a", "a1", 4, 90), Ending("b", "b1", 5, 70):
        before = told(before, ending) or before
    now, master = settled(world, before)
    assert not now.leader, "who is not there may have more"
    reason = why_no_leader(master.view, ("t", 0))
    assert "the coordination store is older than the data" in reason and "waits for c" in reason
    world.nodes("c")
    said = told(now, Ending("c", "c1", 3, 200))
    assert said is not None
    now, _ = settled(world, said)
    assert (now.leader, now.in_sync_nodes, now.epoch, now.lossy_epoch) == ("b", ("b",), 7, 7)
    assert not now.is_contested and now.older == Older(3, 5)


def test_who_is_not_to_have_a_copy_any_more_and_has_most_leads_until_the_others_have_it():
    world = World()
    world.nodes("abc")
    world.topic("t", replica=2)
    before = contested(state("a", "ab"), "c", 5)
    for ending in Ending("a", "a1", 2, 90), Ending("b", "b1", 2, 90), Ending("c", "c1", 5, 95):
        before = told(before, ending) or before
    now, _ = settled(world, before)
    assert (now.leader, now.replicas, now.leaving) == ("c", ("a", "b"), ("c",))


@pytest.mark.parametrize(
    ("noted", "last_epoch", "expected"),
    [
        (3, 3, True),  # perhaps a leader of the store that was put back wrote it
        (6, 2, True),
        (5, 4, False),  # no batch of epoch 4 or 5 is of such a one
        (3, 0, False),  # it has nothing
        (7, 3, False),  # it has followed since, and was looked at then
    ],
)
def test_a_copy_that_may_have_other_messages_under_the_same_epoch_is_not_taken_for_the_same(
    noted: int, last_epoch: int, expected: bool
):
    now = contested(state("a", "ab"), "b", 5)
    assert not is_doubtful(now, noted, last_epoch, (3, "x")), "nobody leads yet"
    later = msgspec.structs.replace(now, epoch=7, leader="b", incarnation="b1")
    assert is_doubtful(later, noted, last_epoch, (3, "x")) is expected


def test_a_copy_that_was_led_by_the_same_process_last_is_taken_for_the_same():
    said = told(contested(state("a", "ab"), "b", 5), Ending("b", "b1", 3, 70, (5, "c1")))
    assert said is not None
    now = power.elected_with_loss(said, node("b"))
    assert now.older == Older(3, 5, (5, "c1"))
    assert not is_doubtful(now, 5, 3, (5, "c1"))
    assert is_doubtful(now, 5, 3, (5, "a1")) and is_doubtful(now, 5, 3, (0, ""))


def test_a_copy_that_is_known_to_be_lost_stays_so():
    alone = power.lost(state("a", "a"), "a", "a1")
    assert alone is not None
    now = contested(alone, "b", 5)
    assert power.has_lost(now.in_sync[0])
    assert has_no_copy(alone, {"a": node("a")}) and not has_no_copy(now, {"b": node("b")})
