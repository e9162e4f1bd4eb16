"""Messages with a delay behind a backlog: they count as deferred at once, wherever cursors are."""

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.broker.world import SECOND, BrokerWorld

from flintmq.broker import delayed as module
from flintmq.broker import seek
from flintmq.broker.delayed import DelayedAhead, DelayedNotes


def counts(channel):
    return channel.depth, channel.deferred_count, channel.in_flight_count


def tell_time(world):
    """What the daemon does every 0.1 s."""
    world.broker.has_flush(world.due_clock_ns)


def backlog():
    """Two wait, three are delayed, one waits, one is delayed for longer."""
    world = BrokerWorld()
    world.create("t")
    world.create_channel("t", "c")
    world.publish("t", [b"a", b"b"])
    world.publish("t", [b"x", b"y", b"z"], delay_ns=30 * SECOND)
    world.publish("t", [b"c"])
    world.publish("t", [b"w"], delay_ns=300 * SECOND)
    tell_time(world)
    return world, world.channel("t", "c")


def test_they_count_as_deferred_at_once():
    _, channel = backlog()
    assert counts(channel) == (3, 4, 0)


def test_when_they_come_due_behind_the_backlog_they_wait():
    world, channel = backlog()
    world.clock.advance(31 * SECOND)
    tell_time(world)
    assert counts(channel) == (6, 1, 0)
    world.clock.advance(300 * SECOND)
    tell_time(world)
    assert counts(channel) == (7, 0, 0)


def test_the_figures_stay_as_the_cursor_goes_over_them():
    world, channel = backlog()
    consumer = world.subscribe("t", "c")
    seen = []
    for rdy in range(1, 5):
        consumer.ready(rdy)
        seen.append(counts(channel))
    assert seen == [(2, 4, 1), (1, 4, 2), (0, 4, 3), (0, 4, 3)]
    world.flush()
    assert counts(channel) == (0, 4, 3)


def test_every_channel_counts_for_itself():
    world, channel = backlog()
    world.create_channel("t", "d")
    other = world.channel("t", "d")
    world.publish("t", [b"v"], delay_ns=30 * SECOND)
    assert counts(channel) == (3, 5, 0)
    assert counts(other) == (0, 1, 0)


def test_a_message_that_an_operator_finished_is_in_neither_figure():
    _, channel = backlog()
    assert seek.drop(channel, 4) is True
    assert seek.drop(channel, 1) is True
    assert counts(channel) == (2, 3, 0)


def test_moving_and_emptying_the_channel_keeps_the_figures_right():
    world, channel = backlog()
    consumer = world.subscribe("t", "c")
    consumer.ready(10)
    world.leave(consumer)
    seek.move(channel, 1, finish_older=False)
    world.flush()
    assert counts(channel) == (3, 4, 0)
    channel.empty()
    assert counts(channel) == (0, 0, 0)


def test_after_a_restart_they_count_as_waiting_until_the_cursor_comes_to_them():
    world, _ = backlog()
    world.restart()
    tell_time(world)
    channel = world.channel("t", "c")
    assert counts(channel) == (7, 0, 0)
    world.subscribe("t", "c").ready(100)
    assert counts(channel) == (0, 4, 3)


def test_so_many_are_noted_and_no_more(monkeypatch):
    monkeypatch.setattr(module, "ENTRIES_MAX", 3)
    world, channel = backlog()
    world.publish("t", [b"1"], delay_ns=40 * SECOND)
    world.publish("t", [b"2"], delay_ns=50 * SECOND)
    assert counts(channel) == (4, 5, 0), "the last is one too many"
    world.publish("t", [b"3"], delay_ns=50 * SECOND)
    assert sum(counts(channel)) == 10


def test_notes_of_what_is_passed_or_due_make_room_for_others(monkeypatch):
    monkeypatch.setattr(module, "ENTRIES_MAX", 4)
    monkeypatch.setattr(module, "_CLEANING_INTERVAL", 1)
    world, channel = backlog()
    consumer = world.subscribe("t", "c")
    for round_number in range(20):
        consumer.ready(1000)
        consumer.ready(0)
        world.publish("t", [b"new"])
        world.publish("t", [b"later"], delay_ns=(400 + round_number) * SECOND)
        assert channel.depth == 1
    assert channel.deferred_count == 24


def test_a_deleted_topic_leaves_no_notes():
    world, _ = backlog()
    notes = world.broker._delayed_notes
    assert notes.entry_count == 2
    world.broker.delete_topic("t")
    assert notes.entry_count == 0


@given(
    batches=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), max_size=30),
    looks=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 4)), max_size=10),
)
def test_counts_are_those_of_a_list(batches, looks):
    notes = DelayedNotes()
    ahead = DelayedAhead(notes)
    due_of: dict[int, int] = {}
    sequence = 1
    for count, due in batches:
        if due:
            ahead.add(sequence, sequence + count, due)
            due_of |= dict.fromkeys(range(sequence, sequence + count), due)
        sequence += count
    for start, end, now in sorted(looks, key=lambda look: look[2]):
        notes.wall_ns = now
        expected = sum(start <= each < end and due > now for each, due in due_of.items())
        assert ahead.count(start, end) == expected
    assert notes.entry_count == len(ahead._firsts)
