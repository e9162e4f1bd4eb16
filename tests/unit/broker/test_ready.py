"""Who is served next: everybody in turn, the near ones first, at a cost that does not depend on who only waits."""

from collections import Counter

import pytest
from tests.unit.broker.test_channel import (
    SECOND,
    TIMEOUT,
    make_channel,
    make_log,
    publish,
    sequences,
    subscribe,
)

from flintmq.broker.subscription import Locality, Subscription


def subscribe_at(channel, locality, rdy=1):
    subscription = Subscription([], TIMEOUT, 15 * TIMEOUT, locality=locality)
    subscription.rdy_count = rdy
    subscription.is_open = True
    channel.add(subscription)
    return subscription


# -- turns -------------------------------------------------------------------------------------------------------------


def test_consumers_take_turns_when_messages_come_one_by_one():
    log = make_log(0)
    channel = make_channel(log)
    consumers = [subscribe(channel, rdy=1) for _ in range(7)]
    order = []
    for _ in range(21):
        publish(log, 1)
        channel.pump(0, 0)
        for number, consumer in enumerate(consumers):
            for sequence in sequences(consumer):
                order.append(number)
                assert channel.finish(consumer, (sequence,)) == []
    assert order == [*range(7)] * 3


def test_a_quick_consumer_takes_nothing_from_a_slow_one_that_is_ready():
    log = make_log(0)
    channel = make_channel(log)
    quick, slow = subscribe(channel, rdy=100), subscribe(channel, rdy=100)
    counts: Counter[object] = Counter()
    for _ in range(50):
        publish(log, 1)
        channel.pump(0, 0)
        for name, consumer in (("quick", quick), ("slow", slow)):
            got = sequences(consumer)
            counts[name] += len(got)
            if got and consumer is quick:
                channel.finish(quick, got)
    assert counts == {"quick": 25, "slow": 25}


def test_redeliveries_take_the_same_turns():
    channel = make_channel(make_log(4))
    first = subscribe(channel, rdy=4)
    channel.pump(0, 0)
    consumers = [subscribe(channel, rdy=4) for _ in range(4)]
    first.is_open = False
    for sequence in sequences(first):
        channel.requeue(first, sequence, 0, 0)
    channel.pump(0, 0)
    assert [sequences(consumer) for consumer in consumers] == [[1], [2], [3], [4]]


@pytest.mark.parametrize("what", ["rdy_count", "is_open", "room_bytes"])
def test_who_is_ready_again_stands_behind_who_waits(what):
    log = make_log(0)
    channel = make_channel(log)
    consumers = [subscribe(channel, rdy=1) for _ in range(3)]
    value = getattr(consumers[0], what)
    setattr(consumers[0], what, 0)
    publish(log, 2)
    channel.pump(0, 0)
    assert [sequences(consumer) for consumer in consumers] == [[], [1], [2]]
    setattr(consumers[0], what, value)
    channel.finish(consumers[1], (1,))
    publish(log, 2)
    channel.pump(0, 0)
    assert [sequences(consumer) for consumer in consumers] == [[3], [4], []]


def test_every_rdy_1_of_thousands_is_served():
    log = make_log(0)
    channel = make_channel(log)
    consumers = [subscribe(channel, rdy=1) for _ in range(2000)]
    counts: Counter[object] = Counter()
    for _ in range(3):
        publish(log, 2000, batch=100)
        channel.pump(0, 0)
        for number, consumer in enumerate(consumers):
            got = sequences(consumer)
            counts[number] += len(got)
            assert channel.finish(consumer, got) == []
    assert set(counts.values()) == {3}
    assert (channel.depth, channel.in_flight_count) == (0, 0)


# -- cost --------------------------------------------------------------------------------------------------------------


class Counting(Subscription):
    """A subscription that counts how often it is looked at."""

    __slots__ = ("looks",)

    def __init__(self):
        self.looks = 0
        super().__init__([], TIMEOUT, 15 * TIMEOUT)

    @property
    def capacity(self):
        self.looks += 1
        return super().capacity


def test_consumers_that_are_not_ready_cost_nothing_in_a_turn():
    log = make_log(0)
    channel = make_channel(log)
    idle = [Counting() for _ in range(500)]
    for consumer in idle:
        consumer.is_open = True
        channel.add(consumer)
    full = [Counting() for _ in range(500)]
    for consumer in full:
        consumer.is_open, consumer.rdy_count = True, 1
        channel.add(consumer)
    publish(log, 500)
    channel.pump(0, 0)
    busy = subscribe(channel, rdy=1)
    for consumer in (*idle, *full):
        consumer.looks = 0
    for turn in range(100):
        publish(log, 1)
        channel.pump(turn, turn)
        channel.next_deadline_ns(turn, turn)
        channel.handle_deadlines(turn, turn)
        assert channel.finish(busy, sequences(busy)) == []
    assert sum(consumer.looks for consumer in (*idle, *full)) == 0


def test_a_line_of_thousands_costs_for_those_it_serves():
    log = make_log(0)
    channel = make_channel(log)
    consumers = [Counting() for _ in range(1000)]
    for consumer in consumers:
        consumer.is_open, consumer.rdy_count = True, 1
        channel.add(consumer)
        consumer.looks = 0
    for turn in range(100):
        publish(log, 1)
        channel.pump(turn, turn)
    assert sum(consumer.looks > 0 for consumer in consumers) == 100


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_timeouts_of_different_lengths_come_in_their_order():
    channel = make_channel(make_log(3))
    timeouts = (3 * SECOND, SECOND, 2 * SECOND)
    consumers = [subscribe(channel, rdy=1, msg_timeout_ns=timeout) for timeout in timeouts]
    channel.pump(0, 0)
    held = [sequences(consumer)[0] for consumer in consumers]
    for consumer in consumers:
        consumer.rdy_count = 0
    timed_out = []
    while (deadline_ns := channel.next_deadline_ns(0, 0)) is not None:
        before = channel.depth
        assert channel.handle_deadlines(deadline_ns, 0)
        assert channel.depth == before + 1
        timed_out.append(deadline_ns)
    assert timed_out == sorted(timeouts)
    assert (channel.timeout_count, channel.depth, sorted(held)) == (3, 3, [1, 2, 3])


def test_the_next_run_of_a_consumer_times_out_in_its_own_time():
    log = make_log(1)
    channel = make_channel(log)
    consumer = subscribe(channel)
    channel.pump(0, 0)
    publish(log, 1)
    channel.pump(10 * SECOND, 0)
    assert channel.finish(consumer, (1,)) == []
    assert not channel.handle_deadlines(TIMEOUT, 0)
    assert channel.next_deadline_ns(TIMEOUT, 0) == TIMEOUT + 10 * SECOND
    assert channel.handle_deadlines(TIMEOUT + 10 * SECOND, 0)
    assert channel.next_deadline_ns(TIMEOUT + 10 * SECOND, 0) is None


def test_consumers_that_come_and_go_leave_nothing_behind():
    log = make_log(0, count_max=10_000)
    channel = make_channel(log)
    stays = subscribe(channel, rdy=1)
    publish(log, 1)
    channel.pump(0, 0)
    for _ in range(2000):
        publish(log, 1)
        guest = subscribe(channel, rdy=1)
        channel.pump(0, 0)
        assert guest.in_flight_count == 1
        channel.finish(guest, sequences(guest))
        channel.remove(guest)
    assert len(channel.window._deadlines._heap) < 100
    assert channel.next_deadline_ns(0, 0) == TIMEOUT
    assert channel.handle_deadlines(TIMEOUT, 0)
    assert (channel.timeout_count, stays.in_flight_count) == (1, 0)


# -- near ones first ---------------------------------------------------------------------------------------------------


def test_the_near_are_served_first_and_the_others_at_once_when_they_are_not_ready():
    channel = make_channel(make_log(6))
    far = subscribe_at(channel, Locality.GLOBAL, 3)
    region = subscribe_at(channel, Locality.REGION, 1)
    zone = subscribe_at(channel, Locality.ZONE, 2)
    channel.pump(0, 0)
    assert (sequences(zone), sequences(region), sequences(far)) == ([1, 2], [3], [4, 5, 6])
    assert channel.locality_counts == [2, 1, 3]


def test_who_is_near_gets_everything_while_it_keeps_up():
    log = make_log(0)
    channel = make_channel(log)
    far, zone = subscribe_at(channel, Locality.GLOBAL, 100), subscribe_at(channel, Locality.ZONE)
    for _ in range(20):
        publish(log, 1)
        channel.pump(0, 0)
        assert channel.finish(zone, sequences(zone)) == []
    assert (zone.message_count, far.message_count) == (20, 0)
    zone.rdy_count = 0
    publish(log, 1)
    channel.pump(0, 0)
    assert sequences(far) == [21]


def test_redeliveries_go_to_the_near_first_and_count_again():
    channel = make_channel(make_log(1))
    far = subscribe_at(channel, Locality.GLOBAL)
    channel.pump(0, 0)
    zone = subscribe_at(channel, Locality.ZONE)
    assert channel.requeue(far, 1, 0, 0)
    channel.pump(0, 0)
    assert (sequences(far), sequences(zone)) == ([1], [1])
    assert channel.locality_counts == [1, 0, 1]


def test_the_near_share_among_themselves():
    channel = make_channel(make_log(10, batch=10))
    zone = [subscribe_at(channel, Locality.ZONE, 100) for _ in range(5)]
    far = subscribe_at(channel, Locality.GLOBAL, 100)
    channel.pump(0, 0)
    counts = [len(sequences(consumer)) for consumer in zone]
    assert (sum(counts), min(counts) >= 1, far.message_count) == (10, True, 0)


# -- channels ----------------------------------------------------------------------------------------------------------


def test_a_channel_whose_messages_only_wait_is_not_looked_at_when_more_come(disk):
    broker = disk.broker
    topic = broker.topic("t", 1)
    (idle,), _ = broker.channel(topic, "idle")
    (busy,), _ = broker.channel(topic, "busy")
    consumer = subscribe(busy, rdy=2)
    disk.publish(topic, 1)
    assert broker.pump(0, 0) == [idle, busy]
    for first in range(2, 10):
        assert busy.finish(consumer, sequences(consumer)) == []
        disk.publish(topic, 1)
        assert broker.pump(0, 0) == [busy], first
    late = subscribe(idle, rdy=100)
    broker.mark(idle)
    broker.pump(0, 0)
    assert sequences(late) == [*range(1, 10)]
    disk.publish(topic, 1)
    assert broker.pump(0, 0) == [idle, busy]
    assert sequences(late) == [10]


def test_a_delayed_message_behind_nothing_is_looked_at_whoever_consumes(disk):
    broker = disk.broker
    topic = broker.topic("t", 1)
    (channel,), _ = broker.channel(topic, "c")
    broker.publish(topic, [b"x"], due_ns=5 * SECOND)
    broker.commit_groups(broker.write_pending(1))
    broker.pump(0, 0)
    disk.publish(topic, 1)
    broker.pump(0, 0)
    assert (channel.deferred_count, channel.depth) == (1, 1)
    assert broker.next_deadline_ns == 5 * SECOND
