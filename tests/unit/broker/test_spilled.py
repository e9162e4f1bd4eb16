"""Messages outside a channel's window: cases, and a state machine with flushes and crashes in several steps."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.broker.spill_disk import CURSOR, AsideDisk
from tests.unit.broker.test_channel import TIMEOUT, make_channel, make_log, publish, received, sequences, subscribe

from flintmq.batch import Batch, decode_header, encode_batch
from flintmq.broker import spilled
from flintmq.broker.progress import count_spilled
from flintmq.broker.spilled import Shares, SpilledStore
from flintmq.broker.state import Message
from flintmq.broker.subscription import Subscription
from flintmq.limits import WINDOW_DEFERRED_MAX
from flintmq.storage import packs

SECOND = 1_000_000_000
HOUR = 3600 * SECOND


def somebody():
    return Subscription([], TIMEOUT, 15 * TIMEOUT)


def frame_of(sequence):
    return (b"frame of %d " % sequence).ljust(30 + sequence % 7, b".")


def load(disk, aside, wall_ns):
    """Flush until nothing more is to be read."""
    holder = SimpleNamespace(spilled=aside)
    disk.flush(holder, wall_ns)
    while aside.wants_due(wall_ns):
        disk.flush(holder, wall_ns)
    aside.come_due(wall_ns)


def take_ready(aside, owner):
    """Let a consumer have everything in line."""
    taken = []
    while aside.ready:
        each = aside.loaded[aside.ready.popleft()]
        each.owner = owner
        each.attempts += 1
        taken.append(each)
    return taken


# -- the store ---------------------------------------------------------------------------------------------------------


def test_what_is_far_away_costs_no_memory_once_it_is_written():
    disk, aside = AsideDisk(), SpilledStore()
    for sequence in range(1, 1001):
        aside.put(sequence, HOUR + sequence, 0, frame_of(sequence))
    assert aside.has_changes and aside.next_due_ns == HOUR + 1
    disk.write(aside.take_changes(SECOND))
    assert (aside.far_bytes, aside.loaded, aside.has_changes, aside.count) == (0, {}, False, 1000)
    assert len(disk.rows()) == 1000
    assert disk.query("SELECT COUNT(*) FROM aside_pack") == [(1,)]


def test_little_is_read_of_much_that_is_due_at_once(monkeypatch):
    monkeypatch.setattr(packs, "PACK_BYTES", 1000)
    monkeypatch.setattr(spilled, "LOADED_BYTES_MAX", 10_000)
    disk, aside, owner = AsideDisk(), SpilledStore(shares=Shares()), somebody()
    random.seed(5)
    for sequence in random.sample(range(1, 2001), 2000):
        aside.put(sequence, HOUR, 0, frame_of(sequence))
    seen: list[int] = []
    while len(seen) < 2000:
        load(disk, aside, HOUR)
        assert 0 < sum(len(each.frame or b"") for each in aside.loaded.values()) <= 11_000
        taken = take_ready(aside, owner)
        seen += [each.sequence for each in taken]
        finished, others = aside.finish_held(owner, [each.sequence for each in taken], 0)
        assert (len(finished), others) == (len(taken), ())
    assert sorted(seen) == list(range(1, 2001)) and aside.count == 0
    disk.write(aside.take_changes(HOUR))
    assert disk.rows() == {} and disk.query("SELECT COUNT(*) FROM aside_data") == [(0,)]


def test_it_is_read_ahead_and_never_early():
    disk, aside = AsideDisk(), SpilledStore()
    aside.put(1, HOUR, 0, frame_of(1))
    aside.put(2, HOUR + SECOND, 0, frame_of(2))
    load(disk, aside, HOUR - 3 * SECOND)
    assert (aside.next_soon_ns, list(aside.ready), aside.next_due_ns) == (None, [], HOUR)
    load(disk, aside, HOUR - SECOND)
    assert (aside.next_soon_ns, list(aside.ready), aside.next_due_ns) == (HOUR, [], None)
    aside.come_due(HOUR - 1)
    assert not aside.ready
    aside.come_due(HOUR)
    assert list(aside.ready) == [1]
    aside.put(3, HOUR, 4, frame_of(3))  # what is stored until then has been read
    assert aside.next_due_ns is None
    aside.come_due(HOUR + SECOND)
    assert list(aside.ready) == [1, 3, 2]
    load(disk, aside, HOUR + SECOND)
    assert sorted(disk.rows()) == [1, 2, 3] and aside.count == 3


def test_what_is_read_with_others_and_not_due_for_long_is_written_again():
    disk, aside = AsideDisk(), SpilledStore()
    aside.put(1, 100 * SECOND, 0, frame_of(1))
    aside.put(2, HOUR, 0, frame_of(2))
    load(disk, aside, 0)
    assert disk.query("SELECT COUNT(*) FROM aside_pack") == [(1,)], "so little is not divided"
    load(disk, aside, 100 * SECOND)
    assert (list(aside.ready), aside.next_due_ns) == ([1], HOUR)
    disk.write(aside.take_changes(100 * SECOND))
    assert disk.query("SELECT COUNT(*), SUM(count) FROM aside_pack") == [(2, 3)]
    assert sorted(disk.rows()) == [1, 2]
    assert disk.open().count == 2


def test_many_small_packs_that_are_due_together_become_one():
    disk, aside = AsideDisk(), SpilledStore()
    for sequence in range(1, 101):
        aside.put(sequence, HOUR, 0, frame_of(sequence))
        disk.write(aside.take_changes(sequence))
    assert disk.query("SELECT COUNT(*) FROM aside_pack") == [(100,)]
    load(disk, aside, HOUR)
    assert len(aside.ready) == 100
    disk.write(aside.take_changes(HOUR))
    assert disk.query("SELECT COUNT(*) FROM aside_pack") == [(1,)]
    assert {s: row[2] for s, row in disk.rows().items()} == {s: frame_of(s) for s in range(1, 101)}


def test_what_leaves_a_pack_before_it_is_written_enters_another():
    disk, aside = AsideDisk(), SpilledStore()
    for sequence in (1, 2):
        held = Message(sequence, 1, frame_of(sequence))
        held.owner = somebody()
        aside.put_loaded(held)
    for attempts in (2, 3):
        held = aside.loaded[1]
        held.attempts = attempts
        aside.make_ready(held)
    aside.finish(2)
    disk.write(aside.take_changes(SECOND))
    assert disk.rows() == {1: (0, 3, frame_of(1))}
    assert disk.open().count == 1


def test_a_batch_of_different_sizes_is_put_aside_in_part():
    bodies = [b"b" * (n * 3 % 11 + 1) for n in range(20)]
    data = encode_batch(41, 0, 7, bodies, due_ns=HOUR)
    batch = Batch(data, decode_header(data))
    disk, aside = AsideDisk(), SpilledStore()
    aside.put_batch(batch, 44, 59, HOUR)
    disk.write(aside.take_changes(SECOND))
    assert disk.rows() == {s: (HOUR, 0, bytes(batch.frames(s, s + 1))) for s in range(44, 59)}
    assert aside.count == 15


def test_what_waits_to_be_written_is_bounded_and_shared():
    shares = Shares()
    aside, other = SpilledStore(shares=shares), SpilledStore(shares=shares)
    big = bytes(1024 * 1024)
    for sequence in range(1, 3):
        aside.put(sequence, HOUR, 0, big)
    assert (aside.is_crowded, aside.is_full, aside.is_stuffed) == (True, False, False)
    for sequence in range(3, 17):
        aside.put(sequence, HOUR, 0, big)
    assert aside.is_full and aside.is_stuffed and not other.is_crowded
    failed = aside.take_changes(SECOND)
    assert not aside.is_full
    aside.restore_changes(failed)
    assert aside.is_stuffed, "what could not be written is still there"
    shares.divide(1, 100)
    other.put(99, HOUR, 0, bytes(400_000))
    assert other.is_full


@pytest.mark.slow
def test_a_disk_that_fails_does_not_let_memory_grow_with_what_consumers_defer():
    log = make_log(0)
    for _ in range(40):
        log.append([bytes(1_000_000)], 1)
    log.advance_committed(log.next_sequence)
    channel = make_channel(log)
    consumer = subscribe(channel, rdy=1)
    for number in range(1, 41):
        consumer.room_bytes = 1 << 30
        channel.pump(0, 0)
        if not channel.is_in_flight(number):
            break
        assert channel.requeue(consumer, number, HOUR, 0)
        channel.spilled.restore_changes(channel.spilled.take_changes())
    assert number == 18
    disk = AsideDisk()
    disk.flush(channel, 0)
    channel.pump(0, 0)
    assert channel.is_in_flight(18)


# -- in a channel ------------------------------------------------------------------------------------------------------


def test_a_run_that_came_due_is_delivered_with_one_put():
    log = make_log(0)
    publish(log, 300, batch=100, due_ns=HOUR)
    channel, disk = make_channel(log), AsideDisk()
    channel.pump(0, 0)
    assert (channel.floor, len(channel.window), channel.deferred_count) == (301, 0, 300)
    consumer = subscribe(channel, rdy=250)
    disk.flush(channel, HOUR)
    channel.pump(0, HOUR)
    assert [len(part) for part in consumer.out] == [sum(len(frame) for _, _, frame in list(disk.rows().values())[:250])]
    messages = received(consumer)
    assert [(sequence, attempts) for sequence, attempts, _ in messages] == [(n, 1) for n in range(1, 251)]
    assert channel.finish(consumer, tuple(range(1, 251))) == []
    channel.pump(0, HOUR)
    assert sequences(consumer) == list(range(251, 301))
    assert channel.finish(consumer, (*range(251, 301), 7)) == [7]
    assert (channel.finish_count, channel.in_flight_count, channel.spilled.count) == (300, 0, 0)


def test_several_consumers_share_what_came_due():
    log = make_log(0)
    publish(log, 400, batch=100, due_ns=HOUR)
    channel, disk = make_channel(log), AsideDisk()
    channel.pump(0, 0)
    consumers = [subscribe(channel, rdy=300) for _ in range(4)]
    disk.flush(channel, HOUR)
    channel.pump(0, HOUR)
    numbers = [sequences(consumer) for consumer in consumers]
    assert sorted(n for each in numbers for n in each) == list(range(1, 401))
    assert min(map(len, numbers)) >= 50


def test_a_run_times_out_message_by_message_and_comes_again():
    log = make_log(0)
    publish(log, 50, batch=50, due_ns=HOUR)
    channel, disk = make_channel(log), AsideDisk()
    channel.pump(0, 0)
    consumer = subscribe(channel, rdy=50)
    disk.flush(channel, HOUR)
    channel.pump(0, HOUR)
    received(consumer)
    assert channel.finish(consumer, tuple(range(1, 46))) == []
    assert channel.touch(consumer, 50, TIMEOUT - 1)
    assert channel.next_deadline_ns(0, HOUR) <= TIMEOUT
    assert channel.handle_deadlines(TIMEOUT, HOUR)
    channel.pump(TIMEOUT, HOUR)
    assert [message[:2] for message in received(consumer)] == [(46, 2), (47, 2), (48, 2), (49, 2)]
    disk.flush(channel, HOUR)
    assert {s: attempts for s, (_, attempts, _) in disk.rows().items()} == {46: 1, 47: 1, 48: 1, 49: 1, 50: 0}
    channel.remove(consumer)
    disk.flush(channel, HOUR)
    assert {s: attempts for s, (_, attempts, _) in disk.rows().items()} == {46: 2, 47: 2, 48: 2, 49: 2, 50: 1}


def test_short_delays_beyond_the_bound_are_put_aside():
    log = make_log(0)
    publish(log, 3 * WINDOW_DEFERRED_MAX, batch=1000, due_ns=30 * SECOND)
    channel, disk = make_channel(log), AsideDisk()
    channel.pump(0, 0)
    assert (channel.window.deferred_count, channel.spilled.count) == (WINDOW_DEFERRED_MAX, 2 * WINDOW_DEFERRED_MAX)
    assert channel.deferred_count == 3 * WINDOW_DEFERRED_MAX
    consumer = subscribe(channel, rdy=100_000)
    consumer.room_bytes = 1 << 30
    disk.flush(channel, 29 * SECOND)
    channel.pump(29 * SECOND, 29 * SECOND)
    assert sequences(consumer) == [] and channel.deferred_count == 3 * WINDOW_DEFERRED_MAX
    assert channel.next_deadline_ns(29 * SECOND, 29 * SECOND) == 30 * SECOND
    assert channel.handle_deadlines(30 * SECOND, 30 * SECOND)
    channel.pump(30 * SECOND, 30 * SECOND)
    assert sorted(sequences(consumer)) == list(range(1, 3 * WINDOW_DEFERRED_MAX + 1))


def test_the_cursor_waits_while_too_much_is_to_be_written():
    log = make_log(0)
    for _ in range(8):
        log.append([bytes(1_000_000)], 1, HOUR)
    log.append([b"now"], 1)
    log.advance_committed(log.next_sequence)
    channel, disk = make_channel(log), AsideDisk()
    consumer = subscribe(channel)
    channel.pump(0, 0)
    assert channel.next == 6 and sequences(consumer) == []
    disk.flush(channel, 0)
    channel.pump(0, 0)
    assert sequences(consumer) == [9]


# -- the broker --------------------------------------------------------------------------------------------------------


def test_a_broker_keeps_what_is_aside_over_a_kill_and_counts_it(disk):
    topic = disk.broker.topic("t", 1)
    ((channel,), _) = disk.broker.channel(topic, "c")
    disk.broker.publish(topic, [b"x" * 50] * 5000, HOUR)
    disk.broker.commit_groups(disk.broker.write_pending(1))
    disk.broker.pump(0, 0)
    disk.flush()
    consumer = subscribe(channel, rdy=3000)
    load_due(disk, HOUR)
    disk.broker.pump(0, HOUR)
    assert channel.finish(consumer, tuple(range(1, 2001))) == []
    disk.broker.mark(channel)
    load_due(disk, HOUR)
    assert channel.finish(consumer, tuple(range(2001, 2011))) == []  # the kill comes before this is written
    disk.die()
    disk.open()
    (again,) = disk.broker.topics["t"].channels("c")
    assert (again.spilled.count, again.deferred_count, again.floor) == (3000, 3000, 5001)
    consumer = subscribe(again, rdy=10_000)
    load_due(disk, HOUR)
    disk.broker.mark(again)
    disk.broker.pump(0, HOUR)
    assert sequences(consumer) == list(range(2001, 5001))
    again.empty()
    disk.broker.was_changed(again)
    disk.flush()
    disk.die()
    disk.open()
    (again,) = disk.broker.topics["t"].channels("c")
    assert (again.spilled.count, again.spilled.next_due_ns) == (0, None)


def test_pack_numbers_go_on_after_a_restart(disk):
    topic = disk.broker.topic("t", 1)
    for name in ("a", "b"):
        disk.broker.channel(topic, name)
    for round_number in range(3):
        disk.broker.publish(disk.broker.topics["t"], [b"x"] * 10, HOUR + round_number)
        disk.broker.commit_groups(disk.broker.write_pending(1))
        disk.broker.pump(0, 0)
        disk.flush()
        disk.die()
        disk.open()
    query = disk.broker._store._database.query
    assert query("SELECT cursor, SUM(count) FROM aside_pack GROUP BY cursor") == [(1, 30), (2, 30)]
    assert [c.spilled.count for name in "ab" for c in disk.broker.topics["t"].channels(name)] == [30, 30]


def test_a_clock_that_was_set_moves_what_is_aside(disk):
    topic = disk.broker.topic("t", 1)
    ((channel,), _) = disk.broker.channel(topic, "c")
    disk.broker.publish(topic, [b"x"] * 3, HOUR)
    disk.broker.commit_groups(disk.broker.write_pending(1))
    disk.broker.pump(0, 0)
    disk.flush()
    disk.broker.clock_moved(500 * SECOND, 0)
    disk.broker.publish(topic, [b"y"], HOUR)
    disk.broker.commit_groups(disk.broker.write_pending(1))
    disk.broker.pump(0, 0)
    disk.flush()
    assert disk.broker._store.due(1, (-1, -1), 2 * HOUR, 1).next_due_ns == HOUR + 500 * SECOND
    consumer = subscribe(channel)
    load_due(disk, HOUR - 1)
    disk.broker.pump(0, HOUR - 1)
    assert received(consumer) == []
    disk.broker.handle_deadlines(1, HOUR)
    disk.broker.pump(0, HOUR)
    assert sequences(consumer) == [1, 2, 3, 4]


def load_due(disk, wall_ns):
    flush = disk.broker.take_flush(wall_ns)
    disk.broker.flush_ended(flush, disk.broker.run_flush(flush, wall_ns, False), None, wall_ns)


def where_is(disk, aside, sequence, wall_ns=0):
    """What the database says with a flush that has ended: the pack of a message, and the generation."""
    disk.write(aside.take_changes(wall_ns))
    return disk.store.find_spilled(CURSOR, sequence), aside.generation


def test_what_was_finished_meanwhile_is_not_dropped_again_while_that_is_written():
    disk, aside = AsideDisk(), SpilledStore()
    aside.put_ready(1, 1, frame_of(1))
    aside.put_ready(2, 1, frame_of(2))
    (each, _) = take_ready(aside, owner := somebody())
    pack, generation = where_is(disk, aside, 1)
    aside.finish_held(owner, [1, 2], 0)
    aside.put(3, 1000 * SECOND, 1, frame_of(3))
    assert aside.take_changes().gone == {pack: None}, "of which the database did not know"
    assert (aside.drop(each.sequence), aside.drop_stored(1, pack, generation)) == (None, None), "it is asked again"
    assert aside.count == 1


def test_what_was_dropped_meanwhile_is_not_dropped_again_while_that_is_written():
    disk, aside = AsideDisk(), SpilledStore()
    for sequence in (1, 2):
        aside.put(sequence, 1000 * SECOND, 1, frame_of(sequence))
    pack, generation = where_is(disk, aside, 1)
    assert aside.drop_stored(1, pack, generation)
    assert aside.take_changes().done == {pack: [1]}
    assert aside.drop_stored(1, pack, generation) is False
    assert aside.count == 1


def test_what_enters_another_pack_meanwhile_is_dropped_from_there():
    """Read with another that comes due, and not due for long itself, a message leaves the pack it was found in."""
    disk, aside = AsideDisk(), SpilledStore()
    for sequence, seconds in ((1, 5), (2, 15)):
        aside.put(sequence, seconds * SECOND, 1, frame_of(sequence))
    pack, generation = where_is(disk, aside, 2)
    aside.accept_due(disk.read_due(aside, 4 * SECOND), generation, 4 * SECOND)  # what the same flush read
    aside.drop(1)
    disk.write(taken := aside.take_changes(4 * SECOND))
    assert taken.gone == {pack: None}
    assert (aside.drop(2), aside.drop_stored(2, pack, generation)) == (None, None), "it is asked again"
    pack, generation = where_is(disk, aside, 2, 4 * SECOND)
    assert aside.drop_stored(2, pack, generation)
    disk.write(aside.take_changes(4 * SECOND))
    assert (disk.rows(), aside.count) == ({}, 0)


# -- every interleaving ------------------------------------------------------------------------------------------------


class StoreMachine(RuleBasedStateMachine):
    """A store, its database, and flushes in steps, against a dictionary."""

    @initialize(pack_bytes=st.sampled_from([100, 1000]), small=st.sampled_from([50, 500]), loaded=st.integers(1, 40))
    def begin(self, pack_bytes, small, loaded):
        self.patch = pytest.MonkeyPatch()
        for module in (packs, spilled):
            self.patch.setattr(module, "PACK_BYTES", pack_bytes)
            self.patch.setattr(module, "SMALL_BYTES", small)
        self.patch.setattr(spilled, "LOADED_BYTES_MAX", loaded * 100)
        self.patch.setattr(spilled, "_SMALL_COUNT", 2)
        self.disk = AsideDisk()
        self.spilled = SpilledStore(shares=Shares())
        self.next = 1
        self.now = 1000 * SECOND
        self.owner = somebody()
        self.live = {}  # sequence -> (due_ns, attempts) as a restart has to find them
        self.held = {}  # sequence -> attempts
        self.written = {}
        self.flush: Any = None
        self.answer: Any = None
        self.found: Any = None

    # what the channel does

    @rule(count=st.integers(1, 12), delay=st.integers(0, 3000))
    def put_batch(self, count, delay):
        due_ns = self.now + delay * SECOND
        data = encode_batch(self.next, 0, 1, [b"b" * (n % 3 + 1) for n in range(count)], due_ns=due_ns)
        self.spilled.put_batch(Batch(data, decode_header(data)), self.next, self.next + count, due_ns)
        for _ in range(count):
            self.live[self.next] = due_ns, 0
            self.next += 1

    @rule(delays=st.lists(st.integers(0, 3000), min_size=1, max_size=8), attempts=st.integers(1, 3))
    def put(self, delays, attempts):
        for delay in delays:
            self.live[self.next] = self.now + delay * SECOND, attempts
            self.spilled.put(self.next, self.now + delay * SECOND, attempts, frame_of(self.next))
            self.next += 1

    @rule(is_held=st.booleans())
    def spill(self, is_held):
        if is_held:
            aside = Message(self.next, 2, frame_of(self.next))
            aside.owner = self.owner
            self.spilled.put_loaded(aside)
            self.held[self.next] = 2
            self.live[self.next] = 0, 2
        else:
            due_ns = 0 if self.spilled.room_bytes > 0 else self.spilled.loaded_through[0] + 1
            self.spilled.put_ready(self.next, 2, frame_of(self.next))
            self.live[self.next] = due_ns, 2
        self.next += 1

    @rule(count=st.integers(1, 30))
    def deliver(self, count):
        while self.spilled.ready and count:
            sequence = self.spilled.ready.popleft()
            aside = self.spilled.loaded[sequence]
            due_ns, attempts = self.live[sequence]
            assert due_ns <= self.now, "early"
            assert sequence not in self.held and aside.owner is None and aside.attempts == attempts
            aside.owner = self.owner
            aside.attempts += 1
            self.held[sequence] = attempts + 1
            count -= 1

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def finish(self, data):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, unique=True))
        finished, others = self.spilled.finish_held(self.owner, [s + 50 for s in [*chosen, self.next]], 50)
        assert ([aside.sequence for aside in finished], others) == (chosen, (self.next + 50,))
        for sequence in chosen:
            del self.held[sequence], self.live[sequence]

    @rule(data=st.data(), delay=st.sampled_from([0, 1, 30, 500]))
    @precondition(lambda self: self.held)
    def requeue(self, data, delay):
        sequence = data.draw(st.sampled_from(sorted(self.held)))
        aside = self.spilled.loaded[sequence]
        if delay:
            aside.owner = None
            self.spilled.defer(aside, self.now + delay * SECOND)
        else:
            self.spilled.make_ready(aside)
        self.live[sequence] = self.now + delay * SECOND if delay else 0, self.held.pop(sequence)

    @rule(data=st.data())
    @precondition(lambda self: self.flush is None and self.next > 1)
    def look_for(self, data):
        """Ask the database where a message is; until the next flush has ended that is nearly so."""
        self.take_flush(False)
        self.write(False)
        self.end_flush()
        sequence = data.draw(st.integers(1, self.next - 1))
        self.found = sequence, self.disk.store.find_spilled(CURSOR, sequence), self.spilled.generation

    @rule()
    @precondition(lambda self: self.found is not None)
    def drop(self):
        (sequence, pack, generation), self.found = self.found, None
        if sequence in self.spilled.loaded:
            if self.spilled.loaded[sequence].owner is None:
                self.spilled.ready.remove(sequence)
            self.spilled.finish(sequence)
            dropped: bool | None = True
        else:
            dropped = self.spilled.drop(sequence)
            if dropped is None:
                dropped = self.spilled.drop_stored(sequence, pack, generation) if pack is not None else False
        if dropped is None:
            return  # it would be asked for again
        assert dropped == (sequence in self.live)
        self.live.pop(sequence, None)
        self.held.pop(sequence, None)

    @rule(data=st.data())
    def clear_from(self, data):
        first = data.draw(st.integers(1, self.next))
        self.spilled.clear_from(first)
        for mapping in (self.live, self.held):
            for sequence in [each for each in mapping if each >= first]:
                del mapping[sequence]

    @rule(seconds=st.sampled_from([1, 5, 60, 1000, 10_000]))
    def time_passes(self, seconds):
        self.now += seconds * SECOND
        self.spilled.come_due(self.now)

    # what the broker does

    @rule(reads=st.booleans())
    @precondition(lambda self: self.flush is None)
    def take_flush(self, reads):
        changes = self.spilled.take_changes(self.now)
        recount = (
            count_spilled(cast(Any, SimpleNamespace(spilled=self.spilled)), CURSOR)
            if changes.cleared_from is not None
            else None
        )
        query = (self.spilled.loaded_through, self.spilled.generation, self.now, max(1, self.spilled.room_bytes))
        self.flush = changes, query if reads and self.spilled.wants_due(self.now) else None, dict(self.live), recount
        self.answer = None

    @rule(fails=st.booleans())
    @precondition(lambda self: self.flush is not None and self.answer is None)
    def write(self, fails):
        changes, query, live, _ = self.flush
        self.disk.write(changes)
        self.written = live
        assert {s: row[:2] for s, row in self.disk.rows().items()} == live
        read = None
        if query is not None:
            read = self.disk.store.due(CURSOR, query[0], query[2] + spilled.LOOKAHEAD_NS, query[3])
        self.answer = (None if fails else (read, self.disk.store.spilled_count(CURSOR)),)

    @rule()
    @precondition(lambda self: self.flush is not None)
    def end_flush(self):
        (changes, query, _, recount), answer = self.flush, self.answer
        self.flush = self.found = None
        if answer is None or answer[0] is None:  # it was not written, or what came behind that failed
            self.spilled.restore_changes(changes)
            return
        read, stored = answer[0]
        if read is not None:
            self.spilled.accept_due(read, query[1], query[2])
        if recount is not None:
            recount.then(stored, None)

    @rule()
    def die(self):
        self.spilled = self.disk.open()
        self.live = dict(self.written)
        self.held.clear()
        self.flush = self.found = None

    # what random steps seldom come to

    @rule(seconds=st.sampled_from([0, 60, 4000]))
    @precondition(lambda self: self.flush is None)
    def flush_and_deliver(self, seconds):
        self.time_passes(seconds)
        for _ in range(2):
            self.take_flush(True)
            self.write(False)
            self.end_flush()
            self.spilled.come_due(self.now)
        self.deliver(5)

    @rule(seconds=st.sampled_from([60, 4000]))
    @precondition(lambda self: self.flush is None)
    def begin_to_read(self, seconds):
        self.time_passes(seconds)
        self.take_flush(True)
        self.write(False)

    @rule()
    @precondition(lambda self: self.held and self.flush is None)
    def finish_all_and_fail(self):
        self.spilled.finish_held(self.owner, sorted(self.held), 0)
        for sequence in self.held:
            del self.live[sequence]
        self.held.clear()
        self.take_flush(False)
        self.end_flush()

    @invariant()
    def what_is_in_memory_is_known(self):
        if not hasattr(self, "spilled"):
            return
        aside = self.spilled
        assert {s for s, each in aside.loaded.items() if each.owner is not None} == set(self.held)
        assert len(set(aside.ready)) == len(aside.ready)
        assert {s for s, each in aside.loaded.items() if each.owner is None} == set(aside.ready)
        assert set(aside.loaded) <= set(self.live)
        assert aside._loaded_bytes == sum(len(each.frame or b"") for each in aside.loaded.values())
        assert aside._soon_bytes == sum(piece.size for _, _, piece in aside._soon)
        assert all(pack.left > 0 or pack in aside._touched for pack in aside._packs.values())

    def teardown(self):
        if not hasattr(self, "patch"):
            return  # it did not begin
        try:
            self.everything_comes_in_the_end_and_once()
        finally:
            self.patch.undo()
            self.disk.store.close()

    def everything_comes_in_the_end_and_once(self):
        if self.flush is not None:
            self.end_flush()
        self.now += 100_000 * SECOND
        for _ in range(1000):
            self.take_flush(True)
            self.write(False)
            self.end_flush()
            self.spilled.come_due(self.now)
            assert self.spilled.count == len(self.live)
            self.deliver(1000)
            if self.held:
                self.spilled.finish_held(self.owner, sorted(self.held), 0)
                for sequence in self.held:
                    del self.live[sequence]
                self.held.clear()
            elif not self.live:
                break
        assert not self.live and not self.spilled.count
        self.take_flush(True)
        self.write(False)
        assert [self.disk.query(f"SELECT COUNT(*) FROM aside_{name}")[0] for name in ("pack", "data", "done")] == [
            (0,)
        ] * 3


TestStoreMachine = pytest.mark.slow(StoreMachine.TestCase)
TestStoreMachine.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
