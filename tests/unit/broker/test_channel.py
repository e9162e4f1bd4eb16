"""Channel: directed cases, and a state machine that compares it with a simple model."""

import random
import struct

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.broker.spill_disk import AsideDisk
from tests.unit.storage.log_kit import Kit

from flintmq.broker.channel import Channel, ChannelState
from flintmq.broker.spilled import SpilledStore
from flintmq.broker.subscription import Subscription
from flintmq.limits import SEQUENCE_MAX
from flintmq.message import MESSAGE_HEADER
from flintmq.storage.memory_log import MemoryLog

SECOND = 1_000_000_000
TIMEOUT = 60 * SECOND


def make_log(count=0, batch=7, due_ns=0, count_max=1_000_000):
    log = MemoryLog(0, count_max)
    publish(log, count, batch, due_ns)
    return log


def publish(log, count, batch=7, due_ns=0):
    while count > 0:
        first = log.next_sequence
        log.append([b"m%d" % (first + i) for i in range(min(batch, count))], 1000, due_ns)
        count -= batch
    log.advance_committed(log.next_sequence)


def make_channel(log, state=None, aside=None, name="c", **options):
    return Channel(name, 0, log, state or ChannelState(1), aside or SpilledStore(), random.Random(1), **options)


def subscribe(channel, rdy=100, msg_timeout_ns=TIMEOUT, sample_rate=0):
    subscription = Subscription([], msg_timeout_ns, 15 * TIMEOUT, sample_rate)
    subscription.rdy_count = rdy
    subscription.is_open = True
    channel.add(subscription)
    return subscription


def received(subscription):
    """Take what was put out as [(sequence, attempts, body)]."""
    data = b"".join(bytes(part) for part in subscription.out)
    subscription.out.clear()
    messages, position = [], 0
    while position < len(data):
        (size,) = struct.unpack_from(">I", data, position)
        _, _, _, attempts, message_id = MESSAGE_HEADER.unpack_from(data, position)
        messages.append((int(message_id, 16), attempts, data[position + 34 : position + 4 + size]))
        position += 4 + size
    return messages


def sequences(subscription):
    return [message[0] for message in received(subscription)]


def test_backlog_is_delivered_in_order_up_to_rdy_and_again_as_it_is_finished():
    channel = make_channel(make_log(20))
    consumer = subscribe(channel, rdy=5)
    channel.pump(0, 0)
    assert received(consumer) == [(n, 1, b"m%d" % n) for n in range(1, 6)]
    assert channel.finish(consumer, (1, 2, 3)) == []
    channel.pump(0, 0)
    assert sequences(consumer) == [6, 7, 8]
    assert (channel.floor, channel.next, channel.in_flight_count, channel.depth) == (4, 9, 5, 12)
    assert [number for number in range(22) if channel.is_in_flight(number)] == [4, 5, 6, 7, 8]


def test_finish_out_of_order_keeps_the_floor_until_the_first_is_done():
    channel = make_channel(make_log(10))
    consumer = subscribe(channel)
    channel.pump(0, 0)
    assert channel.finish(consumer, (3, 2, 5, 4)) == []
    assert channel.floor == 1
    assert channel.finish(consumer, (1,)) == []
    assert channel.floor == 6
    assert channel.finish(consumer, tuple(range(6, 11))) == []
    assert (channel.floor, channel.in_flight_count, consumer.finish_count) == (11, 0, 10)


@pytest.mark.parametrize("ids", [(1,), (1, 1), (5, 99), (0, 1, 2), (2, 2, 3, 3)])
def test_finish_of_what_is_not_in_flight_here_says_which(ids):
    channel = make_channel(make_log(10))
    consumer, other = subscribe(channel, rdy=5), subscribe(channel, rdy=5)
    channel.pump(0, 0)
    mine = set(sequences(consumer))
    expected, left = [], set(mine)
    for number in sorted(ids):
        if number in left:
            left.remove(number)
        else:
            expected.append(number)
    assert sorted(channel.finish(consumer, ids)) == expected
    assert channel.in_flight_count == 10 - (len(mine) - len(left))
    assert other.in_flight_count == 5


def test_messages_are_spread_over_ready_consumers():
    channel = make_channel(make_log(10, batch=10))
    consumers = [subscribe(channel, rdy=100) for _ in range(5)]
    channel.pump(0, 0)
    counts = [len(sequences(consumer)) for consumer in consumers]
    assert sum(counts) == 10
    assert max(counts) <= 4


def test_requeue_counts_an_attempt_and_keeps_the_message():
    channel = make_channel(make_log(3))
    consumer = subscribe(channel)
    channel.pump(0, 0)
    received(consumer)
    assert channel.requeue(consumer, 2, 0, 0)
    assert not channel.requeue(consumer, 2, 0, 0)
    channel.pump(0, 0)
    assert received(consumer) == [(2, 2, b"m2")]
    assert channel.requeue_count == 1


def test_requeue_with_delay_waits_for_its_time():
    channel = make_channel(make_log(1))
    consumer = subscribe(channel)
    channel.pump(0, 0)
    received(consumer)
    assert channel.requeue(consumer, 1, 5 * SECOND, 0)
    channel.pump(0, 0)
    assert received(consumer) == []
    assert (channel.deferred_count, channel.depth, channel.in_flight_count) == (1, 0, 0)
    assert channel.next_deadline_ns(0, 0) == 5 * SECOND
    assert not channel.handle_deadlines(5 * SECOND - 1, 5 * SECOND - 1)
    assert channel.handle_deadlines(5 * SECOND, 5 * SECOND)
    channel.pump(5 * SECOND, 5 * SECOND)
    assert received(consumer) == [(1, 2, b"m1")]


def test_timeout_requeues_and_touch_postpones_it():
    channel = make_channel(make_log(4))
    consumer = subscribe(channel)
    channel.pump(0, 0)
    received(consumer)
    assert channel.touch(consumer, 2, 30 * SECOND)
    assert channel.handle_deadlines(TIMEOUT, 0)
    assert channel.timeout_count == 3
    channel.pump(TIMEOUT, 0)
    assert received(consumer) == [(1, 2, b"m1"), (3, 2, b"m3"), (4, 2, b"m4")]
    assert channel.handle_deadlines(90 * SECOND, 0)
    channel.pump(90 * SECOND, 0)
    assert received(consumer) == [(2, 2, b"m2")]


def test_touch_cannot_go_beyond_the_longest_timeout():
    channel = make_channel(make_log(1))
    consumer = subscribe(channel)
    channel.pump(0, 0)
    now = 0
    while channel.touch(consumer, 1, now) and now < 20 * TIMEOUT:
        now += TIMEOUT // 2
        if channel.handle_deadlines(now, 0):
            break
    assert now == 15 * TIMEOUT


def test_redelivery_is_not_timed_out_by_the_deadline_of_the_first_delivery():
    channel = make_channel(make_log(1))
    consumer = subscribe(channel)
    channel.pump(0, 0)
    channel.requeue(consumer, 1, 0, 0)
    channel.pump(59 * SECOND, 0)
    assert not channel.handle_deadlines(TIMEOUT, 0)
    assert channel.finish(consumer, (1,)) == []


def test_disconnect_requeues_at_once_and_the_slot_is_used_again():
    channel = make_channel(make_log(6))
    first = subscribe(channel, rdy=4)
    channel.pump(0, 0)
    assert sequences(first) == [1, 2, 3, 4]
    channel.finish(first, (2,))
    channel.remove(first)
    assert channel.in_flight_count == 0
    second = subscribe(channel)
    channel.pump(0, 0)
    assert [message[:2] for message in received(second)] == [(5, 1), (3, 2), (4, 2), (1, 2), (6, 1)]


def test_deferred_publish_is_overtaken_and_comes_when_due_with_attempts_1():
    log = make_log(2)
    publish(log, 1, due_ns=10 * SECOND)
    publish(log, 2)
    channel = make_channel(log)
    consumer = subscribe(channel)
    channel.pump(0, 0)
    assert sequences(consumer) == [1, 2, 4, 5]
    channel.finish(consumer, (1, 2, 4, 5))
    assert channel.floor == 3
    assert channel.handle_deadlines(10 * SECOND, 10 * SECOND)
    channel.pump(10 * SECOND, 10 * SECOND)
    assert received(consumer) == [(3, 1, b"m3")]


def test_deferred_publishes_count_as_deferred_without_a_consumer():
    log = make_log(0)
    publish(log, 2, due_ns=10 * SECOND)
    publish(log, 1)
    publish(log, 1, due_ns=10 * SECOND)
    channel = make_channel(log)
    channel.pump(0, 0)
    assert (channel.deferred_count, channel.depth) == (2, 2)
    channel.paused = True
    channel.pump(0, 0)
    assert channel.handle_deadlines(10 * SECOND, 10 * SECOND)
    assert (channel.deferred_count, channel.depth) == (0, 4)
    channel.paused = False
    consumer = subscribe(channel)
    channel.pump(10 * SECOND, 10 * SECOND)
    assert sorted(message[:2] for message in received(consumer)) == [(1, 1), (2, 1), (3, 1), (4, 1)]


@pytest.mark.parametrize("is_begun", [False, True], ids=["new", "behind-a-message"])
def test_what_a_power_loss_took_from_the_end_of_the_log_is_not_waited_for(is_begun):
    """Numbering goes on behind it; nobody can be given it, so it is no depth once there is a consumer."""
    kit = Kit()
    publish(kit.open(), 3)
    log = kit.open(next_sequence_min=9)
    channel = make_channel(log)
    consumer = subscribe(channel)
    channel.pump(0, 0)
    assert [number & SEQUENCE_MAX for number in sequences(consumer)] == [1, 2, 3]
    if is_begun:
        channel.finish(consumer, (2, 3))
        assert (channel.floor, channel.depth) == (1, 0)
        channel.finish(consumer, (1,))
    else:
        channel.finish(consumer, (1, 2, 3))
    assert (channel.depth, channel.in_flight_count, channel.floor) == (0, 0, 9)
    channel.window.check()
    publish(log, 1)
    channel.pump(0, 0)
    assert [number & SEQUENCE_MAX for number in sequences(consumer)] == [9]


def test_restart_redelivers_what_was_not_finished_and_nothing_else():
    log = make_log(10)
    channel = make_channel(log)
    consumer = subscribe(channel, rdy=8)
    channel.pump(0, 0)
    channel.finish(consumer, (1, 2, 4, 6))
    channel.requeue(consumer, 5, 30 * SECOND, 0)
    again = make_channel(log, channel.state())
    consumer = subscribe(again)
    again.pump(0, 0)
    assert received(consumer) == [(n, a, b"m%d" % n) for n, a in ((3, 2), (7, 2), (8, 2), (9, 1), (10, 1))]
    assert again.deferred_count == 1


def test_a_paused_channel_delivers_nothing_but_finishes():
    channel = make_channel(make_log(10))
    consumer = subscribe(channel, rdy=2)
    channel.pump(0, 0)
    channel.paused = True
    assert channel.finish(consumer, tuple(sequences(consumer))) == []
    channel.pump(0, 0)
    assert sequences(consumer) == []


def test_more_consumers_than_slots_share_one():
    channel = make_channel(make_log(600, batch=100))
    consumers = [subscribe(channel, rdy=2) for _ in range(300)]
    channel.pump(0, 0)
    held = [sequences(consumer) for consumer in consumers]
    assert sorted(number for numbers in held for number in numbers) == list(range(1, 601))
    assert channel.finish(consumers[299], held[298]) == held[298]
    assert channel.finish(consumers[299], held[299]) == []
    channel.remove(consumers[298])
    assert channel.depth == 2


def test_sampling_drops_for_good():
    channel = make_channel(make_log(1000, batch=100))
    consumer = subscribe(channel, rdy=2000, sample_rate=30)
    channel.pump(0, 0)
    got = sequences(consumer)
    assert 200 < len(got) < 400
    assert channel.finish(consumer, got) == []
    assert channel.floor == 1001


def test_delayed_messages_are_sampled_when_they_come_due():
    log = make_log(0)
    publish(log, 1000, batch=100, due_ns=SECOND)
    publish(log, 1000, batch=100, due_ns=100 * SECOND)
    channel = make_channel(log)
    consumer = subscribe(channel, rdy=3000, sample_rate=30)
    channel.pump(0, 0)
    assert (channel.deferred_count, sequences(consumer)) == (2000, [])
    channel.handle_deadlines(SECOND, SECOND)
    channel.pump(SECOND, SECOND)
    soon = received(consumer)
    AsideDisk().flush(channel, 100 * SECOND)
    channel.pump(100 * SECOND, 100 * SECOND)
    late = received(consumer)
    assert 200 < len(soon) < 400 and 200 < len(late) < 400
    assert {attempts for _, attempts, _ in soon + late} == {1}
    channel.requeue(consumer, soon[0][0], 0, 0)
    channel.pump(100 * SECOND, 100 * SECOND)
    assert received(consumer) == [(soon[0][0], 2, soon[0][2])], "it was chosen before"
    assert channel.finish(consumer, [sequence for sequence, _, _ in soon + late]) == []
    assert (channel.floor, channel.spilled.count, channel.deferred_count) == (2001, 0, 0)


def put_aside(channel, disk=None):
    """What the database has after a flush: sequence -> (due_ns, attempts, frame)."""
    disk = disk or AsideDisk()
    disk.write(channel.spilled.take_changes())
    return disk.rows()


def test_a_stuck_message_does_not_hold_the_window():
    log = make_log(500, batch=10)
    channel = make_channel(log, window_max=100)
    stuck = subscribe(channel, rdy=1)
    channel.pump(0, 0)
    assert sequences(stuck) == [1]
    other = subscribe(channel, rdy=50)
    seen = []
    for _ in range(40):
        channel.pump(0, 0)
        numbers = sequences(other)
        seen += numbers
        assert channel.finish(other, numbers) == [] if numbers else True
    assert seen == list(range(2, 501))
    assert channel.spilled.count == 1
    assert channel.floor == 501
    assert channel.finish(stuck, (1,)) == []
    assert channel.spilled.count == 0


def test_what_was_moved_aside_times_out_and_comes_again():
    log = make_log(300, batch=10)
    channel = make_channel(log, window_max=100)
    stuck = subscribe(channel, rdy=1)
    channel.pump(0, 0)
    other = subscribe(channel, rdy=50)
    for _ in range(20):
        channel.pump(0, 0)
        numbers = sequences(other)
        if numbers:
            channel.finish(other, numbers)
    stuck.rdy_count = 0
    assert channel.handle_deadlines(TIMEOUT, 0)
    channel.pump(TIMEOUT, 0)
    assert received(other) == [(1, 2, b"m1")]
    assert channel.requeue(other, 1, 0, 0)
    channel.pump(TIMEOUT, 0)
    assert received(other) == [(1, 3, b"m1")]
    assert channel.finish(other, (1,)) == []


def test_an_ephemeral_channel_keeps_the_first_and_drops_what_overflows():
    log = make_log(0)
    channel = make_channel(log, name="c#ephemeral", depth_max=10)
    publish(log, 8)
    channel.pump(0, 0)
    publish(log, 8)
    channel.pump(0, 0)
    assert channel.depth == 10
    consumer = subscribe(channel)
    channel.pump(0, 0)
    assert sequences(consumer) == list(range(1, 11))
    publish(log, 3)
    channel.pump(0, 0)
    assert sequences(consumer) == [17, 18, 19]
    assert channel.finish(consumer, [*range(1, 11), 17, 18, 19]) == []
    assert channel.floor == 20


def test_empty_drops_everything():
    channel = make_channel(make_log(20))
    consumer = subscribe(channel, rdy=5)
    channel.pump(0, 0)
    channel.requeue(consumer, 1, 5 * SECOND, 0)
    channel.empty()
    assert (channel.depth, channel.in_flight_count, channel.deferred_count) == (0, 0, 0)
    assert channel.finish(consumer, (2,)) == [2]


def test_confirm_moves_the_cursor_and_never_back():
    channel = make_channel(make_log(20))
    channel.confirm(15)
    assert (channel.floor, channel.depth) == (15, 6)
    channel.confirm(3)
    assert channel.floor == 15
    channel.confirm(1000)
    assert channel.floor == 21


def test_a_consumer_that_does_not_read_gets_no_more():
    log = MemoryLog(0, 1000)
    log.append([bytes(100_000)] * 50, 1)
    log.advance_committed(log.next_sequence)
    channel = make_channel(log)
    consumer = subscribe(channel)
    channel.pump(0, 0)
    assert sum(len(part) for part in consumer.out) < 1_400_000
    assert consumer.capacity == 0


class ChannelMachine(RuleBasedStateMachine):
    """Random operations against a model that knows of each message whether it is finished, held or waiting."""

    @initialize(window_max=st.sampled_from([8, 40, 1000]))
    def begin(self, window_max):
        self.window_max = window_max
        self.log = make_log(0)
        self.now = 0
        self.consumers = []
        self.held = {}
        self.attempts = {}
        self.finished = set()
        self.published = 0
        self.due = {}
        self.owed = {}
        self.reached = 0
        self.disk = AsideDisk()
        self.channel = make_channel(self.log, window_max=window_max)

    def pump(self):
        self.flush()
        self.channel.pump(self.now, self.now)
        for consumer in self.consumers:
            for sequence, attempts, body in received(consumer):
                assert body == b"m%d" % sequence
                assert sequence not in self.finished, "delivered after FIN"
                assert sequence not in self.held, "in flight twice"
                assert attempts == self.attempts.get(sequence, 0) + 1
                assert self.due.pop(sequence, 0) <= self.now, "delivered early"
                self.attempts[sequence] = attempts
                self.held[sequence] = consumer
            assert consumer.in_flight_count <= max(consumer.rdy_count, 0) + consumer.over
            assert consumer.in_flight_count == sum(owner is consumer for owner in self.held.values())
        self.check_turns()
        assert not self.channel.depth or not any(c.capacity > 0 for c in self.consumers), "nothing waits for nobody"

    def check_turns(self):
        """Between two deliveries of a message that comes again, something new is delivered if it can be.

        ``owed`` has, of each such message, its deliveries, the first sequence that was new after the last of them (None
        when nothing was, or something new has been delivered since), and up to where new ones had been delivered before
        the turn it was in.
        """
        again = [sequence for sequence, attempts in self.attempts.items() if attempts > 1]
        new = next((s for s in range(self.channel.next, self.log.next_sequence) if self.is_new(s)), None)
        for sequence in again:
            delivered, waited, reached = self.owed.get(sequence, (1, None, 0))
            if waited is not None and self.channel.next > reached:
                waited = None  # kept, because the cursor may go back
                self.owed[sequence] = delivered, waited, reached
            if self.attempts[sequence] > max(delivered, 2) and waited is not None:
                assert new != waited, f"{sequence} came again, {waited} waited: {self.channel.describe()}"
            if self.attempts[sequence] != delivered:
                self.owed[sequence] = self.attempts[sequence], new, self.reached
        self.reached = self.channel.next

    def is_new(self, sequence):
        """Whether a message beyond the cursor could be delivered now."""
        return sequence not in self.finished and self.due.get(sequence, 0) <= self.now

    def flush(self):
        """What the database does: apply changes, then hand over what is due."""
        self.disk.flush(self.channel, self.now, bytes_max=100)

    @rule(count=st.integers(1, 20), batch=st.integers(1, 9))
    def publish(self, count, batch):
        before = self.log.next_sequence
        publish(self.log, count, batch)
        self.published += self.log.next_sequence - before
        self.pump()

    @rule(delay=st.integers(1, 200))
    def publish_deferred(self, delay):
        self.due[self.log.next_sequence] = self.now + delay * SECOND
        publish(self.log, 1, due_ns=self.now + delay * SECOND)
        self.published += 1
        self.pump()

    @rule(rdy=st.integers(0, 15))
    @precondition(lambda self: len(self.consumers) < 4)
    def connect(self, rdy):
        consumer = subscribe_for_machine(self.channel, rdy)
        self.consumers.append(consumer)
        self.pump()

    @rule(data=st.data(), rdy=st.integers(0, 15))
    @precondition(lambda self: self.consumers)
    def change_rdy(self, data, rdy):
        consumer = data.draw(st.sampled_from(self.consumers))
        consumer.over = max(0, consumer.in_flight_count - rdy)
        consumer.rdy_count = rdy
        self.pump()

    @rule(data=st.data())
    @precondition(lambda self: self.consumers)
    def disconnect(self, data):
        consumer = data.draw(st.sampled_from(self.consumers))
        self.channel.remove(consumer)
        self.consumers.remove(consumer)
        self.held = {s: owner for s, owner in self.held.items() if owner is not consumer}
        self.pump()

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def finish(self, data):
        consumer = data.draw(st.sampled_from([c for c in self.consumers if c in self.held.values()]))
        mine = [s for s, owner in self.held.items() if owner is consumer]
        chosen = data.draw(st.lists(st.sampled_from(mine), min_size=1, unique=True))
        strangers = data.draw(st.lists(st.integers(1, self.log.next_sequence), max_size=2))
        wrong = [s for s in strangers if s not in mine]
        failed = self.channel.finish(consumer, tuple(chosen + wrong))
        assert sorted(failed) == sorted(wrong)
        for sequence in chosen:
            del self.held[sequence]
            self.finished.add(sequence)
        self.pump()

    @rule(data=st.data(), delay=st.sampled_from([0, 1, 30, 100]))
    @precondition(lambda self: self.held)
    def requeue(self, data, delay):
        sequence = data.draw(st.sampled_from(sorted(self.held)))
        assert self.channel.requeue(self.held.pop(sequence), sequence, delay * SECOND, self.now)
        if delay:
            self.due[sequence] = self.now + delay * SECOND
        self.pump()

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def touch(self, data):
        sequence = data.draw(st.sampled_from(sorted(self.held)))
        assert self.channel.touch(self.held[sequence], sequence, self.now)

    @rule(seconds=st.sampled_from([0.5, 5, 31, 61, 130]))
    def time_passes(self, seconds):
        self.now += int(seconds * SECOND)
        self.channel.handle_deadlines(self.now, self.now)
        base = 0
        self.held = {s: c for s, c in self.held.items() if self.owner_of(s, base) is c}
        self.pump()

    def owner_of(self, sequence, _base):
        message = self.channel.window.held(sequence)
        return None if message is None else message.owner

    @rule()
    def restart(self):
        self.flush()
        state = self.channel.state()
        self.channel = make_channel(self.log, state, self.disk.open(), window_max=self.window_max)
        # attempts of what is aside are written when it is deferred or queued again, not at every delivery
        for sequence, (_, attempts, _) in self.disk.rows().items():
            self.attempts[sequence] = attempts
        self.held.clear()
        self.consumers.clear()
        self.owed = {sequence: (attempts, None, 0) for sequence, attempts in self.attempts.items()}  # turns begin anew

    @invariant()
    def counts_hold(self):
        channel = self.channel
        assert channel.in_flight_count == len(self.held)
        assert all(
            channel.is_in_flight(sequence) == (sequence in self.held) for sequence in range(self.log.next_sequence)
        )
        channel.check()
        waiting = self.published - len(self.finished) - len(self.held)
        assert channel.depth + channel.deferred_count == waiting, channel.describe()

    @invariant()
    def who_can_take_something_stands_in_line(self):
        channel = self.channel
        assert list(channel.subscriptions) == self.consumers
        for consumer in self.consumers:
            assert (consumer in consumer.line) == (consumer.capacity > 0), consumer.describe()
            if consumer.in_flight_count and consumer.runs:
                assert channel.next_deadline_ns(self.now, self.now) <= consumer.runs[0].deadline_ns

    def teardown(self):
        """Everything published is delivered in the end."""
        if not hasattr(self, "channel"):
            return
        consumer = subscribe_for_machine(self.channel, 1000)
        self.consumers.append(consumer)
        for other in self.consumers[:-1]:
            other.rdy_count = 0
            other.over = 1000
        for _ in range(60):
            self.now += 70 * SECOND
            self.channel.handle_deadlines(self.now, self.now)
            self.held = {s: c for s, c in self.held.items() if self.owner_of(s, 0) is c}
            self.pump()
            mine = [s for s, owner in self.held.items() if owner is consumer]
            if mine:
                assert self.channel.finish(consumer, tuple(mine)) == []
                for sequence in mine:
                    del self.held[sequence]
                    self.finished.add(sequence)
        assert len(self.finished) == self.published, self.channel.describe()


def subscribe_for_machine(channel, rdy):
    consumer = MachineSubscription([], TIMEOUT, 15 * TIMEOUT)
    consumer.rdy_count = rdy
    consumer.is_open = True
    consumer.room_bytes = 1 << 40
    channel.add(consumer)
    return consumer


class MachineSubscription(Subscription):
    __slots__ = ("over",)

    def __init__(self, *args):
        super().__init__(*args)
        self.over = 0


TestChannelMachine = pytest.mark.slow(ChannelMachine.TestCase)
TestChannelMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
