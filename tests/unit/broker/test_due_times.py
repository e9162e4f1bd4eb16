"""Due times in the log are wall time; those of a process that runs follow a clock that does not jump."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.broker.world import SECOND, BrokerWorld

from flintmq.batch import decode_batch, encode_batch
from flintmq.broker import due_times as module
from flintmq.broker import peek
from flintmq.broker.delayed import DelayedNotes
from flintmq.broker.due_times import DueTimes

HOUR = 3600 * SECOND
KINDS = ("plain", "once")


def batch_of(first: int, due_ns: int):
    return decode_batch(encode_batch(first, 0, 7, [b"x"], due_ns=due_ns))


def set_clock(world: BrokerWorld, shift_ns: int) -> None:
    """Set the wall clock; the clock of due times, which the world has one of, goes on."""
    world.broker.clock_moved(shift_ns, world.due_clock_ns)


def publish(world: BrokerWorld, body: bytes, delay_ns: int, kind: str) -> None:
    """Publish as one who counts messages does, or any other."""
    if kind == "plain":
        world.publish("t", [body], delay_ns=delay_ns)
        return
    partition = world.broker.topics["t"].first_partition
    due_ns = world.due_clock_ns + delay_ns
    world.broker.publish_to(partition, [body], due_ns, producer=(b"p", partition.log.next_sequence))
    world.broker.commit_groups(world.broker.write_pending(world.clock.wall_ns()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift_ns", [-HOUR, HOUR])
def test_the_log_has_the_wall_time_at_which_a_message_is_due(shift_ns, kind):
    world = BrokerWorld()
    world.create("t")
    due_ns = world.due_clock_ns + 15 * SECOND
    publish(world, b"before", 15 * SECOND, kind)
    set_clock(world, shift_ns)
    publish(world, b"behind", 15 * SECOND, kind)
    log = world.broker.topics["t"].first_partition.log
    batches = [log.read(sequence) for sequence in (1, 2)]
    assert [batch and batch.due_ns for batch in batches] == [due_ns, due_ns + shift_ns]


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("delay_s", [15, 900])
@pytest.mark.parametrize("shift_ns", [-HOUR, HOUR])
def test_no_clock_that_is_set_moves_a_delay_that_runs(shift_ns, delay_s, in_order):
    world = BrokerWorld()
    world.create("t")
    world.create_channel("t", "c")
    if in_order:
        channel = world.channel("t", "c")
        channel.deliver_in_order(lambda floor: None)
    expected = []
    for number, each_ns in enumerate((0, shift_ns, 2 * shift_ns, 0)):
        set_clock(world, each_ns)
        expected.append(b"%d" % number)
        world.publish("t", expected[-1:], delay_ns=delay_s * SECOND)
    channel = world.channel("t", "c")
    assert not list(peek.next_messages(channel, 10, 100, world.due_clock_ns))
    world.pass_time((delay_s - 1) * SECOND)
    consumer = world.subscribe("t", "c")
    consumer.ready(100)
    world.flush()
    assert consumer.received() == []
    world.pass_time(2 * SECOND)
    world.flush()
    got = consumer.received()
    while in_order and len(got) < len(expected):
        consumer.finish([got[-1].internal])
        got += consumer.received()
    assert [each.body for each in got] == expected


@pytest.mark.parametrize("has_channel", [False, True])
@pytest.mark.parametrize("shift_ns", [-HOUR, HOUR])
def test_a_start_finds_the_delays_of_messages_behind_a_step(shift_ns, has_channel):
    world = BrokerWorld()
    world.create("t")
    if has_channel:
        world.create_channel("t", "c")
    set_clock(world, shift_ns)
    world.publish("t", [b"soon"], delay_ns=15 * SECOND)
    world.publish("t", [b"later"], delay_ns=900 * SECOND)
    world.clock.jump_wall(shift_ns)  # the clock of due times of the next process begins with it
    world.die(power_loss=False)
    if not has_channel:
        world.create_channel("t", "c")
    consumer = world.subscribe("t", "c")
    consumer.ready(100)
    seen = []
    for passed_s in (14, 2, 880, 5):
        world.pass_time(passed_s * SECOND)
        world.flush()
        got = consumer.received()
        consumer.finish([each.internal for each in got])
        seen.append([each.body for each in got])
    assert seen == [[], [b"soon"], [], [b"later"]]


def test_what_was_set_before_a_log_was_cut_back_is_forgotten():
    notes = DelayedNotes()
    times = DueTimes(notes)
    for first, shift_ns in ((5, HOUR), (9, 2 * HOUR)):
        notes.shift_ns = shift_ns
        assert times.to_store(100 * HOUR, first) == 100 * HOUR + shift_ns
    notes.shift_ns = 3 * HOUR
    assert times.to_store(100 * HOUR, 7) == 103 * HOUR
    assert [times.of(batch_of(first, 200 * HOUR)) // HOUR for first in (4, 5, 6, 7, 9)] == [200, 199, 199, 197, 197]


def test_no_delay_is_none_whatever_the_clock_was_set_to():
    notes = DelayedNotes()
    times = DueTimes(notes)
    notes.shift_ns = -50 * HOUR
    assert times.to_store(0, 1) == 0 and times.of(batch_of(1, 0)) == 0
    assert times.to_store(40 * HOUR, 1) == 1, "it is due, and it has a delay"


def test_where_it_begins_when_the_clock_was_set_all_that_is_there_counts_as_that_says():
    notes = DelayedNotes()
    notes.shift_ns = HOUR
    times = DueTimes(notes)
    assert times.of(batch_of(3, 5 * HOUR)) == 4 * HOUR


@given(
    steps=st.lists(
        st.tuples(st.integers(-5, 5), st.integers(1, 3), st.one_of(st.none(), st.integers(0, 4))), max_size=30
    ),
    settings_max=st.integers(2, 30),
)
def test_everything_is_due_when_it_was_published_for(steps, settings_max):
    before, module.SETTINGS_MAX = module.SETTINGS_MAX, settings_max
    try:
        notes = DelayedNotes()
        times = DueTimes(notes)
        stored: list[tuple[int, int, int, int]] = []  # first, as stored, due, setting
        first, changes = 1, 0
        for hours, count, cut in steps:
            if cut is not None and stored:
                stored = stored[: max(0, len(stored) - cut)]
                first = stored[-1][0] + 1 if stored else 1
            changes += hours * HOUR != notes.shift_ns
            notes.shift_ns = hours * HOUR
            for _ in range(count):
                due_ns = (100 + first) * HOUR
                stored.append((first, times.to_store(due_ns, first), due_ns, changes))
                first += 1
        for at, as_stored, due_ns, setting in stored:
            if changes - setting < settings_max - 1:
                assert times.of(batch_of(at, as_stored)) == due_ns
        assert len(times._firsts) == len(times._shifts_ns) <= settings_max
    finally:
        module.SETTINGS_MAX = before
