"""Consuming in order: one message at a time per channel and partition, whatever happens between two of them.

Any interleaving of it all is in :mod:`tests.unit.broker.test_interleavings`.
"""

import random
import struct

import pytest
from tests.sim.disk import CrashingDisk

from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.broker.subscription import Subscription
from flintmq.errors import WriteFailed
from flintmq.message import internal_id, sequence_of, with_location
from flintmq.storage import ChannelStore, create_logs
from flintmq.topic_meta import TopicMeta

SECOND = 1_000_000_000
ORDERED = TopicMeta(partition_num=2, ordered=True)
FRAME = struct.Struct(">IIQHQQQI")  # with offset and raw size


class World:
    """A broker on a disk in memory, with the topic ``t`` of two partitions, and what its owner does in a turn."""

    def __init__(self):
        self.disk = CrashingDisk(rng=random.Random(1))
        self.now = SECOND
        self.open()
        topic = self.broker.create_partitions("t", ORDERED, [0, 1], 1)
        self.flush()
        taken = self.broker.take_creations()
        create_logs([creation for new in taken for creation in new.creations], True)
        self.broker.creations_ended(taken)
        self.broker.channel(topic, "c")
        self.flush()

    def open(self):
        files = self.disk.attach()
        self.broker = Broker(files, ChannelStore(files), BrokerOptions(), random.Random(1), print)
        self.broker.open(self.now)
        self.flush()

    def crash(self, power_loss):
        self.disk.crash(power_loss, random.Random(self.now))
        self.open()

    @property
    def topic(self):
        return self.broker.topics["t"]

    def channel(self, number):
        return self.topic.partitions[number].channels["c"]

    def publish(self, number, bodies, due_ns=0):
        self.broker.publish_to(self.topic.partitions[number], bodies, due_ns)
        groups = self.broker.write_pending(self.now)
        log = self.topic.partitions[number].log
        ticket = log.begin_sync()
        if ticket is not None:
            ticket.run()
            log.finish_sync(ticket, None)
        self.broker.commit_groups(groups)
        self.pump()

    def flush(self):
        flush = self.broker.take_flush(self.now)
        self.broker.flush_ended(flush, self.broker.run_flush(flush, self.now, True), None, self.now)

    def pump(self):
        self.broker.pump(self.now, self.now)

    def subscribe(self, number, rdy_count=1, timeout_s=60):
        subscription = Subscription([], timeout_s * SECOND, 900 * SECOND)
        subscription.layout = with_location
        self.channel(number).add(subscription)
        subscription.rdy_count = rdy_count
        subscription.is_open = True
        self.broker.mark(self.channel(number))
        self.pump()
        return subscription

    def finish(self, number, subscription, sequence):
        failed = self.channel(number).finish(subscription, (internal_id(number, sequence),))
        self.broker.mark(self.channel(number))
        self.pump()
        return not failed

    def requeue(self, number, subscription, sequence, delay_ns):
        channel = self.channel(number)
        done = channel.requeue(subscription, internal_id(number, sequence), delay_ns, self.now)
        self.broker.mark(channel)
        self.pump()
        return done

    def pass_time(self, for_ns):
        self.now += for_ns
        self.broker.handle_deadlines(self.now, self.now)
        self.pump()


def received(subscription):
    """What was put out: (sequence, attempts, body), with the place of each checked against its frame."""
    found = []
    data = b"".join(bytes(part) for part in subscription.out)
    subscription.out.clear()
    while data:
        size, kind, _, attempts, internal, trace, offset, raw_size = FRAME.unpack_from(data)
        body = data[FRAME.size : size + 4]
        assert (kind, trace) == (2, 0)
        assert raw_size == 34 + len(body)
        assert offset >= 0
        found.append((sequence_of(internal), attempts, body))
        data = data[size + 4 :]
    return found


@pytest.fixture
def world():
    return World()


def test_the_next_comes_when_the_last_is_finished(world):
    world.publish(0, [b"a", b"b", b"c"])
    consumer = world.subscribe(0, 100)
    assert received(consumer) == [(1, 1, b"a")]
    assert world.finish(0, consumer, 1)
    assert received(consumer) == [(2, 1, b"b")]


def test_partitions_do_not_wait_for_each_other(world):
    for number in (0, 1):
        world.publish(number, [b"a"])
    consumers = [world.subscribe(number) for number in (0, 1)]
    assert [received(consumer) for consumer in consumers] == [[(1, 1, b"a")]] * 2


def test_one_in_flight_over_all_consumers(world):
    world.publish(0, [b"a", b"b"])
    first, second = world.subscribe(0), world.subscribe(0)
    assert (received(first), received(second)) == ([(1, 1, b"a")], [])
    world.finish(0, first, 1)
    assert (received(first), received(second)) == ([], [(2, 1, b"b")]), "who waits longest is next"


def test_offsets_are_frame_bytes_before_the_message(world):
    world.publish(0, [b"a", b"bb"])
    world.publish(0, [b"ccc"])
    consumer = world.subscribe(0)
    offsets = []
    for sequence in (1, 2, 3):
        offsets.append(FRAME.unpack_from(consumer.out[0])[6])
        consumer.out.clear()
        world.finish(0, consumer, sequence)
    assert offsets == [0, 35, 71]


def test_requeued_at_once_it_comes_at_once(world):
    world.publish(0, [b"a", b"b"])
    consumer = world.subscribe(0)
    received(consumer)
    assert world.requeue(0, consumer, 1, 0)
    assert received(consumer) == [(1, 2, b"a")]


@pytest.mark.parametrize("delay_s", [5, 3600])
def test_requeued_with_a_delay_it_stands_in_the_way(world, delay_s):
    """Also for so long that another channel would move it out of the way."""
    world.publish(0, [b"a", b"b"])
    consumer = world.subscribe(0)
    received(consumer)
    world.requeue(0, consumer, 1, delay_s * SECOND)
    world.flush()
    world.pass_time(delay_s * SECOND - 1)
    assert received(consumer) == []
    world.pass_time(1)
    assert received(consumer) == [(1, 2, b"a")]


def test_a_delayed_publish_stands_in_the_way(world):
    world.publish(0, [b"a"])
    world.publish(0, [b"b", b"c"], due_ns=world.now + 5 * SECOND)
    world.publish(0, [b"d"])
    consumer = world.subscribe(0)
    seen = received(consumer)
    world.finish(0, consumer, 1)
    assert received(consumer) == []
    world.pass_time(5 * SECOND)
    for sequence in (2, 3, 4):
        seen += received(consumer)
        world.finish(0, consumer, sequence)
    assert seen == [(1, 1, b"a"), (2, 1, b"b"), (3, 1, b"c"), (4, 1, b"d")]


def test_a_timeout_brings_the_same_one(world):
    world.publish(0, [b"a", b"b"])
    consumer = world.subscribe(0, timeout_s=1)
    received(consumer)
    world.pass_time(SECOND)
    assert received(consumer) == [(1, 2, b"a")]


def test_rdy_0_pauses(world):
    world.publish(0, [b"a", b"b"])
    consumer = world.subscribe(0)
    received(consumer)
    consumer.rdy_count = 0
    world.finish(0, consumer, 1)
    assert received(consumer) == []
    consumer.rdy_count = 1
    world.broker.mark(world.channel(0))
    world.pump()
    assert received(consumer) == [(2, 1, b"b")]


def test_what_was_finished_does_not_come_again_after_a_kill(world):
    world.publish(0, [b"a", b"b", b"c"])
    consumer = world.subscribe(0)
    world.finish(0, consumer, 1)
    world.finish(0, consumer, 2)
    world.crash(power_loss=False)
    assert received(world.subscribe(0)) == [(3, 1, b"c")]


def test_nothing_goes_out_while_the_floor_cannot_be_kept(world):
    problems: list[Exception] = []
    world.broker.on_problem = problems.append
    world.publish(0, [b"a", b"b"])
    consumer = world.subscribe(0)
    received(consumer)
    world.disk.fail("write", times=1, path="ordered.floors")
    world.finish(0, consumer, 1)
    assert received(consumer) == []
    assert isinstance(problems[0], WriteFailed)
    world.pass_time(SECOND)
    assert received(consumer) == [(2, 1, b"b")]


def test_a_channel_made_anew_does_not_begin_where_the_old_one_was(world):
    world.publish(0, [b"a", b"b"])
    consumer = world.subscribe(0)
    world.finish(0, consumer, 1)
    world.broker.delete_channel(world.topic, "c")
    world.flush()
    world.crash(power_loss=False)
    world.broker.channel(world.topic, "c")
    world.publish(0, [b"c"])
    assert received(world.subscribe(0)) == [(3, 1, b"c")], "as in nsqd, what the old one was handed is gone"


def test_a_channel_becomes_ordered_and_plain_again(world):
    world.broker.topics["t"].meta = TopicMeta(partition_num=2)
    channel = world.channel(0)
    channel.deliver_in_order(None)
    world.publish(0, [b"a", b"b", b"c"])
    plain = world.subscribe(0, 2)
    assert [sequence for sequence, _, _ in received(plain)] == [1, 2]
    world.broker.order_channel(world.topic, "c", True)
    channel.remove(plain)
    consumer = world.subscribe(0, 100)
    assert received(consumer) == [(1, 2, b"a")]
    world.finish(0, consumer, 1)
    assert received(consumer) == [(2, 2, b"b")]
    world.broker.order_channel(world.topic, "c", False)
    world.pump()
    assert received(consumer) == [(3, 1, b"c")]


def test_what_was_in_flight_before_order_began_comes_in_order_however_often(world):
    world.broker.topics["t"].meta = TopicMeta(partition_num=2)
    world.channel(0).deliver_in_order(None)
    world.publish(0, [b"a", b"b"])
    plain = world.subscribe(0, 2)
    world.broker.order_channel(world.topic, "c", True)
    consumer = world.subscribe(0)
    world.channel(0).remove(plain)
    world.broker.mark(world.channel(0))
    world.pump()
    assert received(consumer) == [(1, 2, b"a")]
    world.requeue(0, consumer, 1, 0)
    assert received(consumer) == [(1, 3, b"a")]


def test_what_was_deferred_before_order_began_stands_in_the_way(world):
    world.broker.topics["t"].meta = TopicMeta(partition_num=2)
    world.channel(0).deliver_in_order(None)
    world.publish(0, [b"a"], due_ns=world.now + 10 * SECOND)
    world.publish(0, [b"b"], due_ns=world.now + 5 * SECOND)
    world.broker.order_channel(world.topic, "c", True)
    consumer = world.subscribe(0)
    world.pass_time(5 * SECOND)
    assert received(consumer) == []
    world.pass_time(5 * SECOND)
    assert received(consumer) == [(1, 1, b"a")]
