"""What a new partition of a topic begins with: who is asked, what is told, and what is done when nobody tells."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.cluster.models import KEYS, state
from tests.unit.cluster.models import World as ClusterWorld

from flintmq.broker.known_topic import KnownChannel, KnownTopic, merged
from flintmq.cluster.view import PartitionId, View
from flintmq.nsqd.cluster import founding
from flintmq.nsqd.cluster.founding import Founding
from flintmq.nsqd.cluster.peers import PassageFailed
from flintmq.nsqd.cluster.table import Copy, Table
from flintmq.settings import Settings
from flintmq.wire.peer import CHANNELS_MAX, AskChannels, PeerReader, Purpose, encode_one

PAUSED = KnownChannel(paused=True)


class Node:
    """One node of a cluster, as far as its partitions begin."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.view = View(KEYS)
        self.table = Table()
        self.known: KnownTopic | None = None
        self.copies: list[KnownTopic] = []
        self.noted: list[PartitionId] = []
        self.later: list[PartitionId] = []
        broker: Any = SimpleNamespace(
            topics={}, led_replicas=SimpleNamespace(known=lambda topic: self.known, followed=self._followed)
        )
        due: Any = SimpleNamespace(note=self.noted.append, note_later=lambda partition, _: self.later.append(partition))
        peers: Any = world
        loop = asyncio.get_running_loop()
        self.founding = Founding(name, self.view, self.table, broker, peers, due, loop, lambda: None)
        self.hear(world.cluster)

    def _followed(self, topic: str, numbers: Any, done: Callable[..., None]) -> None:
        done(self.copies, None)

    def hear(self, cluster: ClusterWorld) -> None:
        """Know everything that the store has."""
        self.view.feed(cluster.store.range(KEYS.all))

    def has(self, number: int, end: int = 1, channels: tuple[str, ...] = (), leads: bool = False) -> Any:
        """Have a copy of a partition."""
        rows = SimpleNamespace(cursors=dict.fromkeys(channels, 1))
        replica: Any = SimpleNamespace(log=SimpleNamespace(next_sequence=end), rows=rows)
        copy = self.table.copies[("t", number)] = Copy(("t", number), replica)
        if leads:
            led: Any = SimpleNamespace(is_fenced=False)
            copy.led = self.table.led["t", number] = led
        return replica

    async def begins(self, number: int, epoch: int = 1) -> list[KnownTopic]:
        """Wait until it is known what a partition begins with."""
        assert self.founding.is_new(("t", number), self.has(number))
        while (found := self.founding.known(("t", number), epoch)) is None:
            self.noted.clear()
            while ("t", number) not in self.noted:
                await asyncio.sleep(0)
        return found


class World:
    """A cluster whose nodes can be asked, unless the test says otherwise."""

    def __init__(self, leaders: str) -> None:
        self.cluster = ClusterWorld()
        self.cluster.nodes("abc")
        self.cluster.topic("t", len(leaders))
        for number, leader in enumerate(leaders):
            self.elect(number, leader)
        self.nodes = {name: Node(self, name) for name in "abc"}
        self.failing: dict[str, Exception] = {}
        self.strangers: set[str] = set()
        self.questions: list[tuple[str, AskChannels]] = []

    def elect(self, number: int, leader: str, epoch: int = 1) -> None:
        self.cluster.partition("t", number, state(leader, leader or "c", "abc", epoch=epoch, log_id=9 + number))

    async def open_passage(self, record: Any, owner: Any, purpose: Purpose) -> Any:
        assert purpose is Purpose.CHANNELS
        if record.node in self.failing:
            raise self.failing[record.node]
        reader = PeerReader(is_trusted=True)

        def write(data: bytes) -> None:
            reader.receive(data)
            found = reader.next_frame()
            assert found is not None and isinstance(found[0], AskChannels)
            self.questions.append((record.node, found[0]))
            if record.node in self.strangers:  # as a session of clients answers what is not of its protocol
                owner.received(b"\0\0\0\x12\0\0\0\x01E_BAD_PROTOCOL")
            else:
                owner.received(encode_one(self.nodes[record.node].founding.answer(found[0])))

        return SimpleNamespace(write=write, give_up=lambda reason: None)


async def test_a_partition_begins_with_the_channels_of_all_others() -> None:
    world = World("abc")
    a, b, c = world.nodes.values()
    a.has(0, 9, ("x", "y"), leads=True)
    a.known = KnownTopic(True, {"x": PAUSED, "y": KnownChannel()}, {"": Settings(max_attempts=2)})
    b.has(1, 9, ("x", "z"), leads=True)
    limits = {"z": Settings(ttl_ms=5, is_ordered=True), "none": Settings(trace="all")}
    b.known = KnownTopic(True, {"x": PAUSED, "z": KnownChannel(skipped=True)}, limits)
    found = merged(await c.begins(2))
    assert found.channels == {"x": PAUSED, "y": KnownChannel(), "z": KnownChannel(skipped=True)}
    assert found.paused and found.settings == {"": Settings(max_attempts=2), **limits}
    assert sorted(name for name, _ in world.questions) == ["a", "b"]
    await c.founding.close()


def test_what_is_paused_is_so_everywhere() -> None:
    one = KnownTopic(True, {"x": PAUSED}, {"x": Settings(max_attempts=2)})
    other = KnownTopic(False, {"x": KnownChannel()}, {"x": Settings(max_attempts=3, ttl_ms=4)})
    assert merged([one, other]) == KnownTopic(False, {"x": KnownChannel()}, {"x": Settings(max_attempts=2, ttl_ms=4)})
    assert merged([one, KnownTopic(True)]) == one
    assert merged([]) == KnownTopic()


async def test_nodes_that_all_begin_ask_each_other_once_and_nobody_waits() -> None:
    world = World("abc")
    begun = await asyncio.gather(*(each.begins(number) for number, each in enumerate(world.nodes.values())))
    assert begun == [[], [], []] and len(world.questions) == 6
    for each in world.nodes.values():
        await each.founding.close()


async def test_where_nobody_else_leads_anything_nobody_is_asked() -> None:
    world = World("aa")
    a = world.nodes["a"]
    a.has(0, 9, ("x",), leads=True)
    assert a.founding.is_new(("t", 1), a.has(1)) and a.founding.known(("t", 1), 1) == []
    assert not a.founding.is_new(("t", 1), a.has(1, 2)), "it has had a message"
    assert not a.founding.is_new(("t", 1), a.has(1, 1, ("x",))), "it has channels"
    alone = World("a").nodes["a"]
    assert not alone.founding.is_new(("t", 0), alone.has(0)), "there is no other partition"


async def test_who_does_not_know_of_the_partition_tells_when_it_does() -> None:
    """Else whoever subscribes there a moment later would have no channel made at the new one."""
    world = World("a")
    a, c = world.nodes["a"], world.nodes["c"]
    a.has(0, 9, ("x",), leads=True)
    a.known = KnownTopic(channels={"x": KnownChannel()})
    world.elect(1, "c")
    c.hear(world.cluster)
    begins = asyncio.create_task(c.begins(1))
    while len(world.questions) < 2:
        await asyncio.sleep(0)
    assert not begins.done() and not a.founding.answer(AskChannels("t", [1])).numbers
    a.known = KnownTopic(channels={"x": KnownChannel(), "late": KnownChannel()})
    a.hear(world.cluster)
    assert merged(await begins).channels.keys() == {"x", "late"}
    await c.founding.close()


async def test_who_has_not_begun_to_lead_what_has_channels_is_asked_again() -> None:
    world = World("ac")
    a, c = world.nodes["a"], world.nodes["c"]
    a.has(0, 9, ("x",))
    begins = asyncio.create_task(c.begins(1))
    while len(world.questions) < 2:
        await asyncio.sleep(0)
    a.has(0, 9, ("x",), leads=True)
    a.known = KnownTopic(channels={"x": KnownChannel()})
    assert merged(await begins).channels.keys() == {"x"}
    a.table.led["t", 0].is_fenced = True
    assert not a.founding.answer(AskChannels("t", [1])).numbers, "others may lead it by now"
    await c.founding.close()


async def test_what_nobody_tells_is_known_from_copies_and_nsqlookupd_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(founding, "WITHIN_S", 0.1)
    world = World("abc")
    a, _, c = world.nodes.values()
    a.has(0, 9, ("x",), leads=True)
    a.known = KnownTopic(channels={"x": PAUSED})
    world.failing["b"] = PassageFailed("it is cut off")
    c.copies = [KnownTopic(channels={"copied": PAUSED}, settings={"copied": Settings(max_attempts=2)})]

    async def channels_of(topic: str) -> list[str]:
        assert topic == "t"
        return ["x", "looked-up"]

    c.founding.channels_of = channels_of
    with caplog.at_level(logging.WARNING):
        found = merged(await c.begins(2))
    assert found.channels == {"x": PAUSED, "copied": PAUSED, "looked-up": KnownChannel()}
    assert found.settings == {"copied": Settings(max_attempts=2)}
    (record,) = caplog.records
    said = record.getMessage()
    assert "t: partitions 2 begin without knowing which channels those of 1 have (node b: it is cut off)" in said
    assert "with copied, looked-up, x" in said
    await c.founding.close()


async def test_a_node_of_the_version_before_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    world = World("ac")
    c = world.nodes["c"]
    world.strangers.add("a")

    async def channels_of(topic: str) -> list[str]:
        return ["x"]

    c.founding.channels_of = channels_of
    with caplog.at_level(logging.WARNING):
        assert merged(await c.begins(1)).channels == {"x": KnownChannel()}
    assert (
        len(world.questions) == 1
        and "node a: it does not know the question; an earlier release? the peer sent a frame that" in caplog.text
    )
    await c.founding.close()


async def test_more_channels_than_one_answer_tells_come_in_several() -> None:
    world = World("ac")
    a, c = world.nodes["a"], world.nodes["c"]
    a.has(0, 9, ("x",), leads=True)
    names = [f"channel{number}" for number in range(2 * CHANNELS_MAX + 1)]
    limits = {"": Settings(max_attempts=2), names[-1]: Settings(max_attempts=3)}
    a.known = KnownTopic(False, dict.fromkeys(names, PAUSED), limits)
    found = merged(await c.begins(1))
    assert found == a.known
    assert len(world.questions) == 3
    await c.founding.close()


async def test_what_was_asked_for_an_epoch_that_is_over_is_asked_again() -> None:
    world = World("ac")
    a, c = world.nodes["a"], world.nodes["c"]
    a.has(0, 9, ("x",), leads=True)
    a.known = KnownTopic(channels={"x": KnownChannel()})
    c.has(1)
    assert c.founding.known(("t", 1), 1) is None
    while not c.noted:
        await asyncio.sleep(0)
    a.known = KnownTopic(channels={"x": KnownChannel(), "y": KnownChannel()})
    world.elect(1, "c", epoch=3)
    c.hear(world.cluster)
    assert merged(await c.begins(1, 3)).channels.keys() == {"x", "y"}
    await c.founding.close()


async def test_what_fails_unexpectedly_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World("ac")
    world.nodes["a"].has(0, 9, ("x",), leads=True)
    c = world.nodes["c"]
    c.has(1)
    world.failing["a"] = RuntimeError("a defect")
    assert c.founding.known(("t", 1), 1) is None
    while not c.later:
        await asyncio.sleep(0)
    assert c.later == [("t", 1)]
    del world.failing["a"]
    assert await c.begins(1) == []
    await c.founding.close()


async def test_a_node_that_ends_asks_nobody_any_more() -> None:
    world = World("ac")
    c = world.nodes["c"]
    world.nodes["a"].has(0, 9, ("x",))  # which it cannot tell of yet
    c.has(1)
    assert c.founding.known(("t", 1), 1) is None
    while not world.questions:
        await asyncio.sleep(0)
    await c.founding.close()
    assert not c.founding._asking
