"""A partition's log is cut back: everything that is known of what goes, goes with it; a crash leaves no lie behind."""

from __future__ import annotations

import random

import pytest
from tests.sim.disk import DiskCrashed
from tests.unit.broker.world import SECOND, BrokerWorld

from flintmq.broker.broker import PartitionNotFound
from flintmq.broker.partition import Partition, PublishGroup
from flintmq.errors import StorageError
from flintmq.storage import PartitionLog

KEPT, GONE = 4, 3


class World(BrokerWorld):
    """A topic of which the first messages are committed and the others are stored."""

    def __init__(self) -> None:
        self.groups: list[PublishGroup] = []
        self.ended: list[BaseException | None] = []
        super().__init__()
        self.create("t")
        self.create_channel("t", "c")

    @property
    def partition(self) -> Partition:
        return self.broker.topics["t"].first_partition

    @property
    def log(self) -> PartitionLog:
        log = self.partition.log
        assert isinstance(log, PartitionLog)
        return log

    def store(self, body: bytes, producer: tuple[bytes, int] | None = None) -> PublishGroup:
        group = self.broker.publish_to(self.partition, [body], producer=producer)
        self.broker.commit_groups(self.broker.write_pending(1))
        self.pump()
        return group

    def fill(self) -> None:
        for number in range(KEPT):
            self.store(b"kept %d" % number)
        self.broker.set_watermark(self.partition, self.log.next_sequence)
        self.groups = [self.store(b"gone %d" % number) for number in range(GONE)]

    def begin(self) -> None:
        self.broker.cut_back(self.broker.topics["t"], 0, KEPT + 1, self.ended.append)

    def cut(self) -> None:
        self.begin()
        self.flush()


@pytest.fixture
def world() -> World:
    world = World()
    world.fill()
    return world


def test_what_is_not_committed_goes_and_others_come_in_its_place(world):
    consumer = world.subscribe("t", "c")
    consumer.ready(100)
    assert [each.body for each in consumer.received()] == [b"kept %d" % number for number in range(KEPT)]
    world.begin()
    assert all(isinstance(group.error, StorageError) for group in world.groups)
    waiting = world.store(b"meanwhile")
    assert (world.ended, waiting.ended) == ([], False)
    world.flush()
    assert world.ended == [None]
    assert world.log.next_sequence == KEPT + 1
    world.broker.set_watermark(world.partition, None)
    world.broker.commit_groups(world.broker.write_pending(1))
    world.pump()
    assert waiting.ended and waiting.error is None
    assert [(each.sequence, each.body) for each in consumer.received()] == [(KEPT + 1, b"meanwhile")]
    assert world.store(b"later").error is None
    assert [each.sequence for each in consumer.received()] == [KEPT + 2]
    world.channel("t", "c").check()


def test_channels_that_begin_behind_it_begin_at_it(world):
    topic = world.broker.topics["t"]
    world.create_channel("t", "late")
    world.create_channel("t", "ordered")
    world.broker.order_channel(topic, "ordered", True)
    world.channel("t", "c").leave_out(3, KEPT + 3)
    world.broker.pause_topic(topic, True)
    world.pump()
    world.flush()
    assert world.partition.paused_at == world.channel("t", "late").next == KEPT + GONE + 1
    world.cut()
    assert world.ended == [None]
    channels = world.partition.channels
    assert [channels[name].next for name in ("late", "ordered")] == [KEPT + 1] * 2
    assert [channel.limit for channel in channels.values()] == [KEPT + 1] * 3
    assert list(channels["c"].window.holes) == [(3, KEPT + 1)]
    world.die(power_loss=True)
    assert not world.problems
    assert world.log.next_sequence == KEPT + 1
    assert [world.channel("t", name).next for name in ("late", "ordered")] == [KEPT + 1] * 2
    for channel in world.partition.channels.values():
        channel.check()


def test_a_producer_publishes_again_what_was_cut_off(world):
    first = world.store(b"once", (b"p", 1))
    world.begin()
    assert isinstance(first.error, StorageError)
    again = world.store(b"once", (b"p", 1))
    assert not again.ended, "it is no duplicate of what goes"
    world.flush()
    world.broker.set_watermark(world.partition, None)
    world.broker.commit_groups(world.broker.write_pending(1))
    assert again.ended and again.error is None
    assert world.log.next_sequence == KEPT + 2
    assert world.log.producers.table.last(b"p") == 1


def test_delayed_messages_that_go_are_not_deferred(world):
    channel = world.channel("t", "c")
    world.broker.publish_to(world.partition, [b"x"] * 3, world.due_clock_ns + 100 * SECOND)
    world.broker.write_pending(1)
    assert world.partition.delayed
    world.cut()
    assert not world.partition.delayed and channel.deferred_count == 0


def test_at_its_end_nothing_is_done(world):
    world.broker.cut_back(world.broker.topics["t"], 0, world.log.next_sequence, world.ended.append)
    assert world.ended == [None] and not world.broker.has_metadata
    assert not any(group.ended for group in world.groups)


def test_what_is_committed_stays(world):
    with pytest.raises(ValueError, match="committed"):
        world.broker.cut_back(world.broker.topics["t"], 0, KEPT, world.ended.append)
    with pytest.raises(PartitionNotFound):
        world.broker.cut_back(world.broker.topics["t"], 1, KEPT, world.ended.append)
    assert world.ended == [] and not world.partition.is_held
    assert not any(group.ended for group in world.groups)


def test_while_the_database_cannot_be_written_nothing_is_cut(world):
    world.begin()
    waiting = world.store(b"meanwhile")
    error = OSError("disk")
    world.end_flush(world.take_flush(), [], error)
    assert world.ended == [error]
    assert world.log.next_sequence == KEPT + GONE + 1
    assert isinstance(waiting.error, StorageError) and not world.partition.is_held
    world.broker.set_watermark(world.partition, None)
    world.flush()
    assert world.store(b"later").error is None
    world.die(power_loss=False)
    assert world.log.next_sequence == KEPT + GONE + 2


def test_a_sync_under_way_ends_first(world):
    world.begin()
    ticket = world.log.begin_sync()
    assert ticket is not None
    world.flush()
    assert world.ended == [] and world.broker.has_metadata
    ticket.run()
    world.log.finish_sync(ticket, None)
    world.flush()
    assert world.ended == [None] and world.log.next_sequence == KEPT + 1


def test_a_topic_that_is_deleted_meanwhile_is_not_cut(world):
    world.begin()
    world.broker.delete_topic("t")
    world.flush()
    assert world.ended == [None]


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
def test_a_crash_at_every_operation_leaves_it_as_it_was_or_as_it_is_to_be(power_loss, capsys):
    nth, ends = 1, set()
    while True:
        world = World()
        world.fill()
        world.create_channel("t", "late")
        ticket = world.log.begin_sync()
        assert ticket is not None
        ticket.run()
        world.log.finish_sync(ticket, None)
        world.broker.note_synced()
        world.flush()
        capsys.readouterr()
        world.disk.crash_at(world.disk.operation_count + nth, power_loss, random.Random(nth))
        try:
            world.cut()
        except DiskCrashed:
            world.open()
        else:
            break
        ends.add(world.log.next_sequence)
        assert not capsys.readouterr().out, "nothing is called lost or damaged"
        assert world.channel("t", "late").next in (world.log.next_sequence, KEPT + 1)
        assert world.store(b"new").error is None
        nth += 1
    assert ends == {KEPT + 1, KEPT + GONE + 1}
    assert nth > 15
