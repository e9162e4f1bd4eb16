"""Moving a channel to another place, finishing single messages and skipping: cases, and the channel's state machine."""

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.unit.broker.spill_disk import CURSOR, AsideDisk
from tests.unit.broker.test_channel import (
    SECOND,
    TIMEOUT,
    ChannelMachine,
    make_channel,
    make_log,
    publish,
    put_aside,
    received,
    sequences,
    subscribe,
)

from flintmq.broker import peek
from flintmq.broker.partition import Partition
from flintmq.broker.ranges import add_range
from flintmq.broker.seek import BadPlace, Place, TooManyHoles, drop, drop_spilled, move, parse_place, seek, sequence_at
from flintmq.limits import CHANNEL_HOLES_MAX

# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("timestamp:1700000000", Place("timestamp", 1_700_000_000)),
        ("virtual_queue:0", Place("virtual_queue", 0)),
        ("msgcount:12", Place("msgcount", 12)),
        ("special:-1", Place("special", -1)),
    ],
)
def test_places(text, place):
    assert parse_place(text) == place


@pytest.mark.parametrize(
    "text",
    (
        *(
            "",
            "timestamp",
            "timestamp:",
            "timestamp:-1",
            "timestamp:1.5",
            "msgcount: 1",
            "special:0",
            "special:1",
            "id:3",
        ),
        *("msgcount:1:2", "msgcount:" + "9" * 19, "Msgcount:1", "msgcount:\u0661", "msgcount:1\n"),
    ),
)
def test_what_is_no_place(text):
    with pytest.raises(BadPlace, match=r"^invalid consume offset:"):
        parse_place(text)


def test_a_text_that_is_no_place_is_shown_cut():
    with pytest.raises(BadPlace) as caught:
        parse_place("x" * 10_000)
    assert len(str(caught.value)) < 200


def at(log, text):
    return sequence_at(parse_place(text), Partition("t", 0, log))


def test_where_places_are():
    log = make_log(0)
    for number in range(4):
        log.append([b"%d" % number, b"xx"], (100 + number) * SECOND)
    log.advance_committed(log.next_sequence)
    assert [at(log, f"timestamp:{second}") for second in (0, 100, 101, 103, 104)] == [1, 1, 3, 7, 9]
    assert [at(log, f"msgcount:{count}") for count in (0, 1, 2, 8, 9)] == [1, 1, 2, 8, 9]
    assert at(log, "special:-1") == 9
    offsets = [log.read(sequence).offset_of(sequence) for sequence in range(1, 9)]
    assert [at(log, f"virtual_queue:{offset}") for offset in offsets] == list(range(1, 9))
    assert at(log, f"virtual_queue:{offsets[4] + 3}") == 5
    assert at(log, f"virtual_queue:{1 << 40}") == 9


# -- replay and skip ---------------------------------------------------------------------------------------------------


def go(channel, text):
    place = parse_place(text)
    seek(channel, place, sequence_at(place, Partition("t", 0, channel.log)))


def test_a_replay_brings_everything_from_there_on_again_with_attempts_1():
    channel = make_channel(make_log(10))
    consumer = subscribe(channel)
    channel.pump(0, 0)
    assert channel.finish(consumer, sequences(consumer)) == []
    go(channel, "msgcount:5")
    assert (channel.depth, channel.floor) == (6, 5)
    channel.pump(0, 0)
    assert received(consumer) == [(n, 1, b"m%d" % n) for n in range(5, 11)]


def test_what_consumers_hold_is_in_flight_no_more_and_they_stay():
    channel = make_channel(make_log(10))
    consumer, other = subscribe(channel, rdy=3), subscribe(channel, rdy=3)
    channel.pump(0, 0)
    held = sequences(consumer)
    consumer.rdy_count = other.rdy_count = 0
    go(channel, "msgcount:0")
    assert (consumer.in_flight_count, other.in_flight_count, channel.in_flight_count) == (0, 0, 0)
    assert channel.finish(consumer, held) == held
    assert not channel.touch(consumer, held[0], 0) and not channel.requeue(consumer, held[0], 0, 0)
    assert not channel.handle_deadlines(2 * TIMEOUT, 0), "nothing of it times out"
    consumer.rdy_count = 100
    channel.pump(2 * TIMEOUT, 0)
    assert [message[:2] for message in received(consumer)] == [(n, 1) for n in range(1, 11)]


def test_a_skip_finishes_what_is_older_deferred_or_not():
    log = make_log(6)
    publish(log, 1, due_ns=500 * SECOND)
    publish(log, 3)
    channel = make_channel(log)
    consumer = subscribe(channel, rdy=4)
    channel.pump(0, 0)
    channel.requeue(consumer, 1, 10 * SECOND, 0)
    channel.requeue(consumer, 2, 1000 * SECOND, 0)
    channel.requeue(consumer, 3, 0, 0)
    go(channel, "msgcount:9")
    assert (channel.depth, channel.deferred_count, channel.in_flight_count) == (2, 0, 0)
    received(consumer)
    channel.handle_deadlines(2000 * SECOND, 2000 * SECOND)
    channel.pump(2000 * SECOND, 2000 * SECOND)
    assert sequences(consumer) == [9, 10]


def test_a_replay_leaves_older_messages_that_are_deferred():
    channel = make_channel(make_log(10))
    consumer = subscribe(channel)
    channel.pump(0, 0)
    assert channel.requeue(consumer, 2, 1000 * SECOND, 0)
    assert channel.finish(consumer, [n for n in range(1, 11) if n != 2]) == []
    assert (channel.floor, channel.deferred_count) == (11, 1)
    disk = AsideDisk()
    assert sorted(put_aside(channel, disk)) == [2]
    go(channel, "msgcount:6")
    disk.flush(channel, 0)
    received(consumer)
    channel.pump(0, 0)
    assert sequences(consumer) == [6, 7, 8, 9, 10]
    disk.flush(channel, 1000 * SECOND)
    channel.pump(1000 * SECOND, 1000 * SECOND)
    assert [message[:2] for message in received(consumer)] == [(2, 2)]


def test_rows_read_before_a_seek_do_not_come_back():
    channel = make_channel(make_log(10))
    consumer = subscribe(channel)
    channel.pump(0, 0)
    channel.requeue(consumer, 2, 100 * SECOND, 0)
    channel.finish(consumer, [n for n in range(1, 11) if n != 2])
    disk = AsideDisk()
    assert sorted(put_aside(channel, disk)) == [2]
    generation = channel.spilled.generation
    read = disk.read_due(channel.spilled, 200 * SECOND)
    assert [piece.first for pack in read.packs for piece in pack.pieces] == [2]
    go(channel, "special:-1")
    channel.spilled.accept_due(read, generation, 200 * SECOND)
    received(consumer)
    channel.pump(200 * SECOND, 200 * SECOND)
    assert received(consumer) == []
    assert channel.deferred_count == 0


def test_a_delayed_publish_behind_the_place_waits_for_its_time():
    log = make_log(2)
    publish(log, 1, due_ns=30 * SECOND)
    channel = make_channel(log)
    consumer = subscribe(channel)
    channel.pump(0, 0)
    channel.finish(consumer, sequences(consumer))
    go(channel, "msgcount:0")
    channel.pump(0, 0)
    assert sequences(consumer) == [1, 2]
    channel.handle_deadlines(30 * SECOND, 30 * SECOND)
    channel.pump(30 * SECOND, 30 * SECOND)
    assert received(consumer) == [(3, 1, b"m3")]


def test_a_place_beyond_what_is_handed_out_is_the_end_of_that():
    channel = make_channel(make_log(10))
    channel.limit = 6
    go(channel, "special:-1")
    assert (channel.floor, channel.depth) == (6, 0)
    channel.limit = None
    assert channel.depth == 5


def sequences_in(changes):
    return sorted(s for new in changes.packs for piece in new.pieces for s in range(piece.first, piece.end))


def test_a_failed_flush_forgets_the_same_again():
    channel = make_channel(make_log(20))
    consumer = subscribe(channel)
    channel.pump(0, 0)
    for number in (3, 15):
        channel.requeue(consumer, number, 1000 * SECOND, 0)
    channel.finish(consumer, [n for n in range(1, 21) if n not in (3, 15)])
    failed = channel.spilled.take_changes()
    assert sequences_in(failed) == [3, 15]
    go(channel, "msgcount:10")
    channel.spilled.restore_changes(failed)
    again = channel.spilled.take_changes()
    assert (sequences_in(again), again.cleared_from) == ([3], 10)
    channel.spilled.restore_changes(again)
    assert channel.spilled.take_changes().cleared_from == 10


# -- single messages ---------------------------------------------------------------------------------------------------


def test_a_message_is_dropped_wherever_it_is():
    log = make_log(12)
    publish(log, 3, due_ns=1000 * SECOND)
    channel = make_channel(log)
    consumer = subscribe(channel, rdy=4)
    channel.pump(0, 0)
    channel.requeue(consumer, 1, 0, 0)
    channel.requeue(consumer, 2, 10 * SECOND, 0)
    channel.requeue(consumer, 3, 1000 * SECOND, 0)
    consumer.rdy_count = 0
    assert [drop(channel, n) for n in (1, 2, 3, 4, 8, 14)] == [True] * 6
    assert [drop(channel, n) for n in (1, 2, 3, 4, 8, 14, 99, 0)] == [False] * 8
    assert channel.finish(consumer, (4,)) == [4]
    received(consumer)
    consumer.rdy_count = 100
    channel.pump(0, 0)
    assert sequences(consumer) == [5, 6, 7, 9, 10, 11, 12]
    assert channel.deferred_count == 2
    assert sorted(put_aside(channel)) == [13, 15], "a delayed publish that was dropped is not even deferred"


def test_a_hole_does_not_keep_delayed_messages_from_counting_as_deferred():
    log = make_log(0)
    publish(log, 5, due_ns=1000 * SECOND)
    channel = make_channel(log)
    channel.leave_out(3, 4)
    channel.pump(0, 0)
    assert (channel.deferred_count, channel.depth) == (4, 0)


def test_only_the_database_knows_of_what_is_not_in_memory():
    channel = make_channel(make_log(5))
    consumer = subscribe(channel)
    channel.pump(0, 0)
    channel.requeue(consumer, 1, 1000 * SECOND, 0)
    disk = AsideDisk()
    put_aside(channel, disk)
    assert drop(channel, 1) is None
    pack = disk.store.find_spilled(CURSOR, 1)
    assert pack is not None and drop_spilled(channel, 1, pack, channel.spilled.generation)
    assert drop(channel, 1) is False, "and at once"
    assert put_aside(channel, disk) == {}
    assert disk.store.find_spilled(CURSOR, 1) is None
    assert channel.spilled.count == 0


def test_what_is_left_out_survives_a_restart():
    log = make_log(10)
    channel = make_channel(log)
    for number in (7, 3, 5, 4):
        assert drop(channel, number)
    assert list(channel.window.holes) == [(3, 6), (7, 8)]
    again = make_channel(log, channel.state())
    consumer = subscribe(again)
    again.pump(0, 0)
    assert sequences(consumer) == [1, 2, 6, 8, 9, 10]


@pytest.mark.slow
def test_holes_are_bounded():
    channel = make_channel(make_log(2 * CHANNEL_HOLES_MAX + 10, batch=1000))
    for number in range(CHANNEL_HOLES_MAX):
        assert drop(channel, 2 * number + 2)
    with pytest.raises(TooManyHoles, match=str(CHANNEL_HOLES_MAX)):
        drop(channel, 1)


def test_in_order_the_next_comes_when_the_one_in_the_way_is_dropped():
    channel = make_channel(make_log(5))
    channel.deliver_in_order(lambda floor: None)
    consumer = subscribe(channel)
    channel.pump(0, 0)
    assert sequences(consumer) == [1]
    assert drop(channel, 1)
    channel.pump(0, 0)
    assert sequences(consumer) == [2]


# -- skipping ----------------------------------------------------------------------------------------------------------


def test_a_skipped_channel_finishes_what_waits_and_delivers_nothing():
    log = make_log(10)
    channel = make_channel(log)
    consumer = subscribe(channel, rdy=3)
    channel.pump(0, 0)
    held = sequences(consumer)
    channel.requeue(consumer, held[0], 10 * SECOND, 0)
    channel.requeue(consumer, held[1], 0, 0)
    channel.skipped = True
    assert not channel.is_idle
    channel.pump(0, 0)
    publish(log, 5)
    channel.pump(0, 0)
    assert received(consumer) == []
    assert (channel.depth, channel.in_flight_count, channel.deferred_count) == (0, 1, 1)
    assert channel.finish(consumer, (held[2],)) == [], "what is in flight goes on"
    channel.handle_deadlines(10 * SECOND, 10 * SECOND)
    channel.pump(10 * SECOND, 10 * SECOND)
    assert (channel.floor, channel.depth, channel.deferred_count) == (16, 0, 0)
    channel.skipped = False
    publish(log, 1)
    channel.pump(10 * SECOND, 10 * SECOND)
    assert sequences(consumer) == [16]


def test_a_pause_comes_before_a_skip():
    channel = make_channel(make_log(10))
    channel.paused = channel.skipped = True
    channel.pump(0, 0)
    assert channel.depth == 10


def test_skipping_much_behind_a_stuck_message_does_not_fill_the_window():
    channel = make_channel(make_log(1000, batch=100), window_max=50)
    stuck = subscribe(channel, rdy=1)
    channel.pump(0, 0)
    assert sequences(stuck) == [1]
    channel.skipped = True
    channel.pump(0, 0)
    assert (channel.depth, channel.in_flight_count, len(channel.window) <= 50) == (0, 1, True)
    assert channel.finish(stuck, (1,)) == []


# -- any interleaving --------------------------------------------------------------------------------------------------


class SeekMachine(ChannelMachine):
    """The channel's machine, with an operator who moves the channel and finishes messages, and with retention."""

    @rule(count=st.integers(0, 40))
    def seek(self, count):
        self.flush()
        place = max(self.log.start_sequence, min(max(1, count), self.log.next_sequence))
        is_skip = place > self.channel.floor
        go(self.channel, f"msgcount:{count}")
        self.expect_moved(place, is_skip)

    @rule()
    def seek_to_the_end(self):
        self.flush()
        go(self.channel, "special:-1")
        self.expect_moved(self.log.next_sequence, True)

    def expect_moved(self, place, is_skip):
        for sequence in range(1, self.log.next_sequence):
            if sequence >= place:
                self.finished.discard(sequence)
                self.attempts.pop(sequence, None)
                self.owed.pop(sequence, None)
                self.held.pop(sequence, None)
                self.due.pop(sequence, None)
                batch = self.log.read(sequence)
                if batch.due_ns > self.now:
                    self.due[sequence] = batch.due_ns
            elif is_skip:
                self.finished.add(sequence)
                self.held.pop(sequence, None)
        for consumer in self.consumers:
            consumer.over = max(0, consumer.in_flight_count - consumer.rdy_count)
        self.move_turns()
        self.pump()

    def move_turns(self):
        """What new ones are still owed to, they are owed from where the cursor is now."""
        self.reached = self.channel.next
        new = next((s for s in range(self.channel.next, self.log.next_sequence) if self.is_new(s)), None)
        for sequence, (delivered, waited, _) in self.owed.items():
            if waited is not None:
                self.owed[sequence] = delivered, new, self.reached

    @rule(data=st.data())
    @precondition(lambda self: self.log.next_sequence > 1)
    def drop(self, data):
        sequence = data.draw(st.integers(1, self.log.next_sequence - 1))
        self.flush()
        rows = self.disk.rows()
        dropped = drop(self.channel, sequence)
        if dropped is None:
            pack = self.disk.store.find_spilled(CURSOR, sequence)
            dropped = pack is not None and drop_spilled(self.channel, sequence, pack, self.channel.spilled.generation)
        is_gone = sequence in self.finished or (sequence < self.log.start_sequence and sequence not in rows)
        assert dropped == (not is_gone), self.channel.describe()
        self.held.pop(sequence, None)
        self.finished.add(sequence)
        self.pump()

    @rule()
    def retain(self):
        self.flush()  # segments go when the progress behind them is on disk
        self.log.drop_before(self.channel.floor)

    @rule(data=st.data())
    def look(self, data):
        before = self.channel.describe(), self.channel.state()
        coming = list(peek.next_messages(self.channel, 100, 10, self.now))
        flying = list(peek.in_flight_messages(self.channel, 100, 10))
        deferred = list(peek.deferred_messages(self.channel, 100, 10))
        assert (self.channel.describe(), self.channel.state()) == before
        assert {each.sequence: each.owner for each in flying} == self.held
        assert all(each.attempts == self.attempts.get(each.sequence, 0) for each in (*coming, *flying, *deferred))
        assert all(each.sequence not in self.finished for each in (*coming, *flying, *deferred))
        free = sum(max(0, consumer.capacity) for consumer in self.consumers)
        assert not free or not coming, "what can be delivered has been"


TestSeekMachine = pytest.mark.slow(SeekMachine.TestCase)
TestSeekMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


class Drawn:
    """What a rule draws, given."""

    def __init__(self, *values):
        self.values = [*values]

    def draw(self, _):
        return self.values.pop(0)


def test_what_comes_again_and_what_a_seek_made_new_again_take_turns():
    """The same message waits behind both seeks, and was delivered between them."""
    machine = SeekMachine()
    machine.begin(window_max=8)
    machine.publish(count=19, batch=1)
    machine.connect(rdy=12)
    machine.connect(rdy=6)
    first, second = machine.consumers
    assert machine.held[1] is first
    machine.change_rdy(Drawn(second), rdy=0)
    machine.publish(count=13, batch=1)
    machine.requeue(Drawn(1), delay=0)
    machine.publish(count=9, batch=2)
    machine.finish(Drawn(first, [2, 3, 4, 5], []))
    machine.requeue(Drawn(1), delay=100)
    machine.disconnect(Drawn(second))
    machine.retain()
    machine.seek(count=0)
    assert machine.attempts[14] == 2 and 20 not in machine.held, "20 waits"
    machine.disconnect(Drawn(first))
    machine.seek(count=0)
    machine.connect(rdy=13)
    assert 14 not in machine.held and 20 in machine.held, "it was its turn"
    machine.seek(count=0)
    assert machine.attempts[14] == 3 and 20 not in machine.held, "which waits again"
    machine.teardown()


def test_move_keeps_what_is_stuck_aside_with_its_consumer():
    channel = make_channel(make_log(300, batch=10), window_max=100)
    stuck = subscribe(channel, rdy=1)
    channel.pump(0, 0)
    other = subscribe(channel, rdy=50)
    for _ in range(20):
        channel.pump(0, 0)
        numbers = sequences(other)
        if numbers:
            channel.finish(other, numbers)
    assert channel.spilled.loaded[1].owner is stuck
    move(channel, 200, finish_older=False)
    assert (stuck.in_flight_count, channel.in_flight_count, other.in_flight_count) == (1, 1, 0)
    assert channel.handle_deadlines(TIMEOUT, 0), "and it times out"
    stuck.rdy_count = 0
    channel.pump(TIMEOUT, 0)
    assert sequences(other)[:3] == [200, 1, 201]


# -- ranges, and the broker around a channel ---------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=20))
def test_ranges_stay_ascending_and_apart(added):
    ranges: deque[tuple[int, int]] = deque()
    expected: set[int] = set()
    for first, count in added:
        add_range(ranges, first, first + count)
        expected.update(range(first, first + count))
        assert [number for start, end in ranges for number in range(start, end)] == sorted(expected)
        assert all(before[1] < after[0] for before, after in pairwise(ranges))


def broker_with_delayed(disk, count):
    """A channel with ``count`` delayed messages set aside on disk, and one that is finished behind them."""
    topic = disk.broker.topic("t", 1)
    ((channel,), _) = disk.broker.channel(topic, "c")
    for number in range(count):
        disk.broker.publish(topic, [b"x"], 1000 * SECOND + number)
        disk.broker.commit_groups(disk.broker.write_pending(1))
    disk.publish(topic, 1)
    consumer = subscribe(channel)
    disk.broker.pump(0, 0)
    assert channel.finish(consumer, (count + 1,)) == []
    disk.flush()
    return channel


def test_how_many_are_left_aside_is_known_after_the_flush(disk):
    channel = broker_with_delayed(disk, 10)
    assert channel.spilled.count == 10
    move(channel, 5, finish_older=False)
    disk.broker.was_changed(channel)
    flush = disk.broker.take_flush(0)
    channel.spilled.put(99, 5000 * SECOND, 1, b"frame")  # while the flush is under way
    disk.broker.flush_ended(flush, disk.broker.run_flush(flush, 0, False), None, 0)
    assert channel.spilled.count == 5
    disk.die()
    (again,) = disk.open().topics["t"].channels("c")
    assert (again.floor, again.spilled.count) == (5, 4)


def test_a_flush_that_fails_counts_again(disk):
    channel = broker_with_delayed(disk, 10)
    move(channel, 5, finish_older=False)
    disk.broker.was_changed(channel)
    told: list[object] = []
    disk.broker.ask(channel, lambda store, cursor: store.spilled_count(cursor), lambda *answer: told.append(answer))
    assert disk.broker.is_flush_urgent and disk.broker.has_flush(0)
    error = OSError("no")
    flush = disk.broker.take_flush(0)
    disk.broker.flush_ended(flush, [], error, 0)
    assert told == [(None, error)]
    disk.flush()
    assert channel.spilled.count == 4


def test_who_waits_for_a_change_waits_for_the_cursor(disk):
    channel = broker_with_delayed(disk, 1)
    told: list[object] = []
    channel.skipped = True
    disk.broker.was_changed(channel)
    assert disk.broker.when_metadata_durable(told.append)
    disk.flush()
    assert told == [None]
    disk.die()
    (again,) = disk.open().topics["t"].channels("c")
    assert again.skipped
    disk.broker.delete_channel(disk.broker.topics["t"], "c")
    disk.broker.channel(disk.broker.topics["t"], "c")
    disk.flush()
    disk.die()
    (again,) = disk.open().topics["t"].channels("c")
    assert not again.skipped


def test_a_floor_that_goes_back_goes_back_on_disk(disk):
    topic = disk.broker.topic("t", 1)
    ((channel,), _) = disk.broker.channel(topic, "c")
    disk.broker.order_channel(topic, "c", True)
    disk.publish(topic, 10)
    consumer = subscribe(channel)
    for number in range(1, 11):
        disk.broker.mark(channel)
        disk.broker.pump(0, 0)
        assert channel.finish(consumer, (number,)) == []
    disk.broker.mark(channel)
    disk.broker.pump(0, 0)
    move(channel, 4, finish_older=False)
    disk.broker.was_changed(channel)
    disk.flush()
    disk.die()
    (again,) = disk.open().topics["t"].channels("c")
    assert again.floor == 4
