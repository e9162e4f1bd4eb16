"""Where a publish goes, and who stands in line behind whom."""

from __future__ import annotations

from typing import Any, cast

import pytest

from flintmq.client.core.lanes import Lane
from flintmq.client.core.publish import Publish
from flintmq.client.core.routing import DISTRUST_S, Place, Routes, Target, Turns
from flintmq.client.core.topology import Node, Topology


def topology(*leaders: str | None, count: int | None = None, **options: Any) -> Topology:
    known = {number: f"{name}:1" for number, name in enumerate(leaders) if name}
    nodes = tuple(Node(name, 1, distributed_id=name) for name in dict.fromkeys(leaders) if name)
    return Topology(nodes, known, len(leaders) if count is None else count, **options)


PLAIN = Topology((Node("n1", 1), Node("n2", 1)))


# --- routes ---


def test_nothing_is_known_at_first():
    routes = Routes(())
    assert not routes.knows("t")
    assert routes.targets("t") == ()
    assert routes.leader("t", 0) is None
    assert routes.never("t", 0) == ""
    assert routes.has_headers("t")
    assert "no nsqlookupd knows topic t" in routes.why_not("t", None)


def test_when_it_is_decided_whether_a_topic_has_headers():
    routes = Routes(())
    assert not routes.decides_headers("t")
    routes.learn("t", Topology(), is_guess=True)
    assert not routes.decides_headers("t"), "nothing can be published yet"
    routes.learn("t", PLAIN, is_guess=True)
    assert routes.decides_headers("t") and not routes.is_extended("t"), "a new topic, which nsqd makes without"
    routes.learn("t", topology("a", is_extended=True))
    assert routes.decides_headers("t") and routes.is_extended("t")
    assert Routes(("a:1",)).decides_headers("t"), "nobody will ever say more"


def test_a_topic_with_partitions_that_no_nsqlookupd_knows_any_more():
    """Its partitions stay, so that no nsqd makes a plain topic of that name; what is told says that it was there."""
    routes = Routes(())
    routes.learn("t", topology("a", "b"))
    routes.drop("t", 0, "a:1", 0.0)
    routes.learn("t", Topology(reason="TOPIC_NOT_FOUND"), is_guess=True)
    assert routes.why_gone("t") == "", "they list no nsqd at all: they have just started"
    routes.learn("t", Topology(PLAIN.nodes, reason="TOPIC_NOT_FOUND"), is_guess=True)
    assert "it had 2 partitions, and no nsqlookupd knows it any more (deleted?)" in routes.why_gone("t")
    assert "leaders are known of: 1" in routes.why_not("t", 0), "one may take it still"
    routes.drop("t", 1, "b:1", 0.0)
    assert "topic t: it had 2 partitions" in routes.why_not("t", 0)
    assert routes.targets("t") == ()
    routes.learn("t", topology("a", "b"))
    assert routes.why_gone("t") == ""


def test_plain_nsqd_and_partitions():
    routes = Routes(())
    routes.learn("plain", PLAIN)
    routes.learn("t", topology("a", "b", "a"))
    assert routes.targets("plain") == (Target("n1:1"), Target("n2:1"))
    assert routes.targets("t") == (Target("a:1", 0), Target("b:1", 1), Target("a:1", 2))
    assert [*dict.fromkeys(routes.addresses())] == ["n1:1", "n2:1", "a:1", "b:1"]
    assert routes.gaps == ()
    assert "has no partitions" in routes.never("plain", None)
    assert "partitions 0 to 2, not 3" in routes.never("t", 3)
    assert routes.never("t", 2) == ""


def test_a_log_stays_while_its_leader_changes():
    routes = Routes(())
    routes.learn("t", topology("a", "b", log_ids={0: "00000000000000a1"}))
    home = routes.home("t", 0, "a:1")
    assert home == routes.home("t", 0, "z:1"), "whoever leads"
    assert routes.nsqd_of(home) == "a:1"
    routes.drop("t", 0, "a:1", 100.0)
    assert routes.nsqd_of(home) is None
    routes.learn("t", topology("c", "b", log_ids={0: "00000000000000a1"}))
    assert routes.nsqd_of(home) == "c:1"
    routes.learn("t", topology("c", "b", log_ids={0: "00000000000000b2"}))
    assert routes.nsqd_of(home) is None, "the topic was created anew"
    other = routes.home("t", 1, "b:1")
    assert (other.address, routes.nsqd_of(other)) == ("b:1", "b:1"), "one that no cluster keeps is its nsqd's"
    assert routes.nsqd_of(routes.home("plain", None, "b:1")) == "b:1"


def test_who_does_not_lead_is_dropped_until_the_next_lookup_and_distrusted_for_a_while():
    routes = Routes(())
    routes.learn("t", topology("a", "b"))
    routes.drop("t", 0, "a:1", 100.0)
    assert routes.leader("t", 0) is None
    assert routes.targets("t") == (Target("b:1", 1),)
    assert routes.gaps == ("t",)
    assert "partition 0 of 2 of topic t has no nsqd that takes messages" in routes.why_not("t", 0)
    assert routes.distrusted("t", 101.0) == ((0, "a:1"),)
    routes.learn("t", topology("c", "b"))
    assert routes.leader("t", 0) == "c:1"
    assert routes.distrusted("t", 101.0) == ((0, "a:1"),)
    assert routes.distrusted("t", 100.0 + DISTRUST_S) == ()
    routes.drop("t", 0, "a:1", 102.0)
    assert routes.leader("t", 0) == "c:1", "an answer from before the move"


def test_a_topic_with_partitions_is_not_taken_for_one_without():
    routes = Routes(())
    routes.learn("t", topology("a"))
    routes.learn("t", PLAIN, is_guess=True)
    assert routes.targets("t") == (Target("a:1", 0),)
    routes.learn("t", PLAIN)
    assert routes.targets("t") == (Target("n1:1"), Target("n2:1")), "that is what nsqlookupd says"


def test_a_guess_forbids_nothing():
    routes = Routes(())
    routes.learn("t", PLAIN, is_guess=True)
    assert routes.never("t", 5) == ""
    assert routes.targets("t") == (Target("n1:1"), Target("n2:1"))


def test_headers():
    routes = Routes(())
    routes.learn("with", topology("a", is_extended=True))
    routes.learn("without", topology("a"))
    assert routes.has_headers("with")
    assert not routes.has_headers("without")


def test_without_nsqlookupd_one_nsqd_after_the_other_is_asked():
    routes = Routes(("a:1", "b:1"))
    assert routes.knows("t")
    assert routes.leader("t", 3) == "a:1"
    routes.drop("t", 3, "a:1", 0.0)
    assert routes.leader("t", 3) == "b:1"
    assert routes.leader("t", 4) == "a:1"
    routes.drop("t", 3, "b:1", 0.0)
    assert routes.leader("t", 3) == "a:1"


class FakeConnection:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_write_paused = False


def test_turns():
    connections = [FakeConnection(name) for name in "abc"]
    turns = Turns([Place(cast(Any, connection), None) for connection in connections], 2)

    def names(count: int) -> str:
        places = [turns.next() for _ in range(count)]
        return "".join(cast(FakeConnection, place.connection).name for place in places if place)

    assert names(6) == "abcabc"
    connections[1].is_write_paused = True
    assert names(4) == "acac"
    connections[0].is_write_paused = connections[2].is_write_paused = True
    assert len(names(3)) == 3, "somebody has to take it"
    assert Turns([], 0).next() is None


# --- lanes ---


class FakeWaiter:
    def __init__(self) -> None:
        self.is_done = False

    def done(self) -> bool:
        return self.is_done


def publish(*keys: str, deadline: float = 5.0, is_gathered: bool = True) -> Publish:
    bodies = [key.encode() for key in keys]
    waiters = [cast(Any, FakeWaiter()) for _ in keys] if is_gathered else [cast(Any, FakeWaiter())]
    made = Publish("t", bodies, waiters, deadline, 10 * len(keys), is_gathered=is_gathered)
    made.keys = [*keys] if is_gathered else [keys[0]]
    made.partition = 0
    return made


def waiting(lane: Lane) -> list[list[bytes]]:
    return [each.bodies for each in lane.queue]


def test_what_waits_is_gathered_in_its_order():
    lane = Lane("t", 0)
    assert not lane.push(publish("x"), 3, 100)
    assert lane.push(publish("y"), 3, 100)
    assert lane.push(publish("x"), 3, 100)
    assert not lane.push(publish("z"), 3, 100), "three at most"
    assert waiting(lane) == [[b"x", b"y", b"x"], [b"z"]]
    assert lane.queue[0].keys == ["x", "y", "x"]
    assert lane.queue[0].cost == 30


@pytest.mark.parametrize(
    "change",
    [
        lambda last: setattr(last, "tries", 1),
        lambda last: setattr(last, "is_unknown", True),
        lambda last: setattr(last, "is_gathered", False),
        lambda last: setattr(last, "cost", 95),
        lambda last: setattr(last, "deadline", 4.9),
        lambda last: setattr(last, "deadline", 5.1),
    ],
)
def test_what_is_not_mixed(change):
    lane = Lane("t", 0)
    last = publish("x")
    lane.push(last, 10, 100)
    change(last)
    assert not lane.push(publish("y"), 10, 100)
    assert waiting(lane) == [[b"x"], [b"y"]]


def test_putting_back():
    lane = Lane("t", 0)
    lane.push(publish("c"), 1, 100)
    lane.put_back(publish("a"), publish("b"))
    assert waiting(lane) == [[b"a"], [b"b"], [b"c"]]
    lane.remove(lane.queue[1])
    assert waiting(lane) == [[b"a"], [b"c"]]


def test_followers_of_the_one_under_way():
    lane = Lane("t", 0)
    lane.current = publish("x", "y")
    lane.push(publish("x", "z", "x"), 10, 1000)
    lane.push(publish("y", "m", is_gathered=False), 10, 1000)
    lane.push(publish("z"), 10, 1000)
    taken = lane.take_followers(lane.current)
    assert [each.bodies for each in taken] == [[b"x", b"x"], [b"y", b"m"]]
    assert [each.cost for each in taken] == [0, 20]
    assert waiting(lane) == [[b"z"], [b"z"]]
    assert lane.queue[0].keys == ["z"]
    assert len(lane.queue[0].waiters) == 1


def test_followers_of_one_in_the_line():
    lane = Lane("t", 0)
    first, second, third = (publish("x", deadline=deadline) for deadline in (1.0, 2.0, 3.0))
    for each in (first, second, third):
        lane.push(each, 10, 1000)
    assert lane.take_followers(second) == [third]
    assert [*lane.queue] == [first, second], "what stands before it goes on"


def test_cancelled_messages_leave_with_their_keys():
    gathered = publish("x", "y", "z")
    cast(FakeWaiter, gathered.waiters[1]).is_done = True
    assert gathered.drop_cancelled()
    assert gathered.bodies == [b"x", b"z"]
    assert gathered.keys == ["x", "z"]
    parts = gathered.split()
    assert [(part.keys, part.partition, part.needs_partition) for part in parts] == [(["x"], 0, True), (["z"], 0, True)]
