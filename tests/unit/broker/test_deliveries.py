"""Deadlines of channels: who is looked at when, without anybody else doing anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.broker.world import MSG_TIMEOUT_NS, SECOND, BrokerWorld

from flintmq.errors import StorageError
from flintmq.topic_meta import TopicMeta


@pytest.fixture
def world() -> Iterator[BrokerWorld]:
    world = BrokerWorld()
    world.create("t")
    world.create_channel("t", "c")
    yield world


def look(world: BrokerWorld) -> None:
    """What the daemon's timer does."""
    world.broker.handle_deadlines(world.now_ns, world.due_clock_ns)
    world.pump()


def test_a_timeout_is_armed_by_the_delivery_and_again_behind_it(world):
    world.publish("t", [b"x"])
    consumer = world.subscribe("t", "c")
    assert world.broker.next_deadline_ns is None
    consumer.ready(1)
    for attempts in (1, 2, 3):
        assert [each.attempts for each in consumer.received()] == [attempts]
        assert world.broker.next_deadline_ns == world.now_ns + MSG_TIMEOUT_NS
        world.clock.advance(MSG_TIMEOUT_NS)
        look(world)


def test_what_is_earlier_comes_first_and_what_is_later_still_comes(world):
    world.publish("t", [b"a", b"b"])
    consumer = world.subscribe("t", "c")
    consumer.ready(2)
    first, second = consumer.received()
    consumer.requeue(first.internal, 5 * SECOND)
    assert world.broker.next_deadline_ns == world.now_ns + 5 * SECOND
    world.clock.advance(5 * SECOND)
    look(world)
    assert [each.internal for each in consumer.received()] == [first.internal]
    assert world.broker.next_deadline_ns == world.now_ns + MSG_TIMEOUT_NS - 5 * SECOND
    world.clock.advance(MSG_TIMEOUT_NS - 5 * SECOND)
    look(world)
    assert [each.internal for each in consumer.received()] == [second.internal]


def test_what_cannot_be_read_is_tried_again_after_a_while(world, monkeypatch):
    world.publish("t", [b"x"])
    consumer = world.subscribe("t", "c")
    log = world.channel("t", "c").log
    error = StorageError("too many open files")

    def fail(_sequence: int) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(type(log), "read", lambda self, sequence: fail(sequence))
        consumer.ready(1)
    assert (consumer.received(), world.problems) == ([], [error])
    assert world.broker.next_deadline_ns == world.now_ns + SECOND
    world.clock.advance(SECOND)
    look(world)
    assert [each.body for each in consumer.received()] == [b"x"]


def test_a_deleted_channel_has_no_deadline(world):
    world.publish("t", [b"x"])
    consumer = world.subscribe("t", "c")
    consumer.ready(1)
    assert world.broker.next_deadline_ns is not None
    world.broker.delete_channel(world.broker.topics["t"], "c")
    assert world.broker.next_deadline_ns is None


def test_a_consumer_of_all_partitions_has_room_again_in_all():
    """A timeout in one partition lets it have messages of another."""
    world = BrokerWorld()
    world.create("p", TopicMeta(partition_num=2))
    world.create_channel("p", "c")
    consumer = world.subscribe("p", "c")
    consumer.ready(1)
    world.publish("p", [b"0"], partition=0)
    world.publish("p", [b"1"], partition=1)
    (first,) = consumer.received()
    assert first.partition == 0
    world.clock.advance(MSG_TIMEOUT_NS)
    look(world)
    assert consumer.in_flight_count == 1
    again = consumer.received()
    consumer.finish([again[0].internal])
    assert {each.partition for each in [*again, *consumer.received()]} == {0, 1}


def test_a_channel_that_is_gone_is_not_looked_at_whoever_marks_it(world):
    """Its consumers learn of its end later, and mark it when they leave; nothing then names its partition."""
    world.publish("t", [b"x"])
    consumer = world.subscribe("t", "c")
    consumer.ready(1)
    assert consumer.received()
    channel = world.channel("t", "c")
    world.broker.delete_channel(world.broker.topics["t"], "c")
    world.broker.mark(channel)  # a defect would be raised here
    world.pump()
    assert world.broker.next_deadline_ns is None
    world.broker.deliveries.arm(channel, world.now_ns)
    look(world)
    assert world.broker.next_deadline_ns is None
