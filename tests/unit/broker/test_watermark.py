"""A mark from outside up to which messages are committed: what consumers see, and when publishers are answered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.broker.world import BrokerWorld, Consumer

from flintmq.broker.partition import Partition, PublishGroup
from flintmq.storage import LogPlace, PartitionLog, ReadCache
from flintmq.testing import MemoryDisk


@pytest.fixture
def world() -> Iterator[BrokerWorld]:
    world = BrokerWorld()
    world.create("t")
    world.create_channel("t", "c")
    yield world


def partition_of(world: BrokerWorld) -> Partition:
    return world.broker.topics["t"].first_partition


def publish(world: BrokerWorld, *bodies: bytes) -> PublishGroup:
    """One batch of its own, as the durability policy wants it."""
    group = world.broker.publish_to(partition_of(world), list(bodies))
    world.broker.commit_groups(world.broker.write_pending(1))
    world.pump()
    return group


def reader(world: BrokerWorld) -> Consumer:
    consumer = world.subscribe("t", "c")
    consumer.ready(100)
    return consumer


def bodies(consumer: Consumer) -> list[bytes]:
    return [each.body for each in consumer.received()]


def set_watermark(world: BrokerWorld, sequence: int | None) -> None:
    world.broker.set_watermark(partition_of(world), sequence)
    world.pump()


def test_nothing_beyond_it_is_delivered_or_answered(world):
    consumer = reader(world)
    assert publish(world, b"1").ended and bodies(consumer) == [b"1"]
    set_watermark(world, 2)
    groups = [publish(world, b"2"), publish(world, b"3", b"4")]
    log = partition_of(world).log
    assert [group.ended for group in groups] == [False, False]
    assert (bodies(consumer), log.committed_sequence, log.next_sequence) == ([], 2, 5)
    assert log.fetch(2, 5, 1000) == (b"", 2)
    set_watermark(world, 3)
    assert [group.ended for group in groups] == [True, False]
    assert bodies(consumer) == [b"2"]
    set_watermark(world, 4)  # in the middle of a publish: it is not stored before its end is
    assert not groups[1].ended
    set_watermark(world, 100)
    assert groups[1].ended and groups[1].error is None
    assert bodies(consumer)[-1:] == [b"4"]
    assert publish(world, b"5").ended and bodies(consumer) == [b"5"]


def test_without_it_everything_is_as_ever(world):
    consumer = reader(world)
    set_watermark(world, 1)
    group = publish(world, b"1")
    assert not group.ended and bodies(consumer) == []
    set_watermark(world, None)
    assert group.ended and bodies(consumer) == [b"1"]
    assert publish(world, b"2").ended and bodies(consumer) == [b"2"]


def test_conditions_hold_up_what_lies_below_it(world):
    consumer = reader(world)
    group = world.broker.publish_to(partition_of(world), [b"1"])
    (written,) = world.broker.write_pending(1)
    written.add_condition()
    set_watermark(world, 10)
    assert not group.ended and bodies(consumer) == []
    assert written.meet_condition()
    world.broker.commit_groups([written])
    world.pump()
    assert group.ended and bodies(consumer) == [b"1"]


def test_batches_that_came_from_elsewhere_are_seen_up_to_it(world):
    """What a replica has: the leader's batches, which nobody has published here."""
    other = BrokerWorld()
    other.create("t")
    for body in (b"1", b"2", b"3"):
        publish(other, body)
    consumer = reader(world)
    set_watermark(world, 1)
    log, theirs = partition_of(world).log, partition_of(other).log
    assert isinstance(log, PartitionLog)
    for sequence in (1, 2, 3):
        batch = theirs.read(sequence)
        assert batch is not None
        log.append_batch(bytes(batch.data))
    assert bodies(consumer) == []
    set_watermark(world, 3)
    assert bodies(consumer) == [b"1", b"2"]
    set_watermark(world, 50)
    assert bodies(consumer) == [b"3"]


def test_it_does_not_go_back(world):
    publish(world, b"1", b"2")
    with pytest.raises(ValueError, match="topic t partition 0: watermark 2 is below 3, up to which it is committed"):
        world.broker.set_watermark(partition_of(world), 2)
    assert partition_of(world).watermark is None


@pytest.mark.parametrize(("end", "committed"), [(None, 4), (1, 1), (2, 2), (4, 4), (9, 4)])
def test_a_log_may_be_opened_with_more_stored_than_committed(end, committed):
    disk = MemoryDisk()

    def open_log(place: LogPlace) -> PartitionLog:
        disk.release()
        files, cache = disk.attach(), ReadCache()
        (log,) = PartitionLog.open_all(files, [place], segment_bytes=1000, cache=cache, report=print, created_ns=1)
        return log

    log = open_log(LogPlace("p", 0))
    for body in (b"1", b"2", b"3"):
        log.append([body], 1)
    log = open_log(LogPlace("p", 0, committed_end=end))
    assert (log.committed_sequence, log.next_sequence) == (committed, 4)
    assert log.fetch(committed, 4, 100)[0] == b""
