"""What a window says of itself, who writes it, and rules that hold wherever a message is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.unit.broker.test_channel import TIMEOUT, make_channel, make_log, publish, received, sequences, subscribe

import flintmq.broker
from flintmq.broker.state import ChannelState
from flintmq.broker.window import Window
from flintmq.budget import Budget

MS = 1_000_000
SECOND = 1000 * MS
BROKER = Path(flintmq.broker.__file__).parent


def busy_channel():
    """A channel with some of everything: finished, in flight, queued, deferred, spilled, left out."""
    log = make_log(60, batch=10)
    channel = make_channel(log, window_max=40)
    one, other = subscribe(channel, rdy=10), subscribe(channel, rdy=8)
    channel.pump(0, 0)
    mine = sequences(one)
    channel.finish(one, mine[2:4])
    channel.requeue(one, mine[4], 0, 0)
    channel.requeue(one, mine[5], 5 * SECOND, 0)
    channel.requeue(one, mine[6], 5000 * SECOND, 0)
    channel.touch(other, sequences(other)[0], 1)
    one.rdy_count = other.rdy_count = 0
    channel.leave_out(50, 55)
    channel.spill()
    channel.requeue(one, mine[-1], 0, 0)
    return channel


def test_a_window_with_some_of_everything_is_right():
    channel = busy_channel()
    channel.check()
    assert channel.in_flight_count and channel.spilled.loaded and channel.window.queued and len(channel.window)


def break_floor(window):
    window.floor += 1


def break_beginning(window):
    window._states[0] = 0


def break_count(window):
    window.in_flight_count += 1


def break_slot(window):
    window._states[-1] = 77


def break_run(window):
    for subscription in window.consumers:
        subscription.runs.clear()


def break_heap(window):
    window._timeouts.clear()


def break_line(window):
    window.queued.clear()
    window.spilled.ready.clear()
    window.queue_new(window.next + 1)


def break_line_twice(window):
    window.queue_new(window.next + 1)
    window.queued.extend([window.next - 1, window.next - 1])


def break_due(window):
    window._deferred[window.next - 1] = 5


def break_attempts(window):
    window._attempts[window.floor - 1] = 2


def break_place(window):
    sequence, message = next(iter(window.spilled.loaded.items()))
    window.spilled.loaded[window.next + 3] = window.spilled.loaded.pop(sequence)
    message.sequence = window.next + 3


def break_bytes(window):
    window.spilled.far_bytes += 1


@pytest.mark.parametrize(
    "broken",
    [
        break_floor,
        break_beginning,
        break_count,
        break_slot,
        break_run,
        break_heap,
        break_line,
        break_line_twice,
        break_due,
        break_attempts,
        break_place,
        break_bytes,
    ],
    ids=lambda broken: broken.__name__,
)
def test_check_finds_what_is_wrong(broken):
    channel = busy_channel()
    broken(channel.window)
    with pytest.raises(AssertionError):
        channel.check()


def written_outside():
    """Where another class or module of the broker writes what a window has, or looks behind it."""
    names = {name for name in Window.__slots__ if name not in ("spilled", "consumers")}
    own = {"floor", "in_flight_count"}  # also names of what others have
    for path in sorted(BROKER.glob("*.py")):
        if path.name == "window.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Attribute) and target.attr in names - own and "window" in ast.unparse(target):
                    yield f"{path.name}:{target.lineno} {ast.unparse(target)}"
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and "window" in ast.unparse(node.value):
                yield f"{path.name}:{node.lineno} {ast.unparse(node)}"


def test_nobody_else_writes_it():
    assert list(written_outside()) == []


# -- rules that hold wherever a message is


def test_deliveries_apart_time_out_apart():
    log = make_log(1)
    channel = make_channel(log)
    consumer = subscribe(channel, rdy=2)
    channel.pump(0, 0)
    publish(log, 1)
    channel.pump(11 * MS, 0)
    assert consumer.in_flight_count == 2
    channel.handle_deadlines(TIMEOUT, 0)
    assert (channel.timeout_count, consumer.in_flight_count) == (1, 1)
    channel.handle_deadlines(TIMEOUT + 11 * MS, 0)
    assert (channel.timeout_count, consumer.in_flight_count) == (2, 0)


@pytest.mark.parametrize("is_spilled", [False, True])
def test_touch_does_not_go_beyond_the_most(is_spilled):
    log = make_log(2, batch=2)
    channel = make_channel(log)
    consumer = subscribe(channel, rdy=2)
    channel.pump(0, 0)
    if is_spilled:
        channel.spill()
        assert channel.spilled.loaded.keys() == {1}
    most = consumer.max_msg_timeout_ns
    for now in range(0, most, TIMEOUT // 2):
        assert channel.touch(consumer, 1, now)
    channel.handle_deadlines(most - 1, 0)
    assert channel.is_in_flight(1)
    channel.handle_deadlines(most, 0)
    assert not channel.is_in_flight(1)


@pytest.mark.parametrize("is_spilled", [False, True])
def test_the_most_counts_from_the_delivery(is_spilled):
    """Spilled after it was delivered, late in the life of the process."""
    channel = make_channel(make_log(2, batch=2))
    consumer = subscribe(channel, rdy=2)
    delivered = 100 * TIMEOUT
    channel.pump(delivered, 0)
    if is_spilled:
        channel.spill()
    for touched in range(delivered, delivered + consumer.max_msg_timeout_ns, TIMEOUT // 2):
        channel.handle_deadlines(touched, 0)
        assert channel.touch(consumer, 1, touched), "in flight until the most is over"
    channel.handle_deadlines(delivered + consumer.max_msg_timeout_ns, 0)
    assert not channel.is_in_flight(1)


@pytest.mark.parametrize("is_spilled", [False, True])
def test_a_message_comes_back_alike_from_wherever(is_spilled):
    channel = make_channel(make_log(2, batch=2))
    consumer = subscribe(channel, rdy=2)
    channel.pump(0, 0)
    received(consumer)
    channel.finish(consumer, (2,))
    if is_spilled:
        channel.spill()
    assert (not is_spilled) == channel.window.unfinished_count
    ways = (
        lambda: channel.requeue(consumer, 1, 0, 0),
        lambda: channel.handle_deadlines(TIMEOUT, 0),
        lambda: channel.requeue(consumer, 1, SECOND, 0) and channel.handle_deadlines(0, SECOND),
        lambda: channel.touch(consumer, 1, TIMEOUT // 2) and channel.handle_deadlines(TIMEOUT * 3 // 2, 0),
    )
    for attempts, come_back in enumerate(ways[: 2 if is_spilled else 4], 2):
        assert come_back()
        channel.check()
        channel.pump(0, 0)
        assert received(consumer) == [(1, attempts, b"m1")]
        channel.check()
    assert channel.finish(consumer, (1,)) == []
    channel.check()
    assert (channel.floor, channel.in_flight_count, channel.spilled.count) == (3, 0, 0)


def test_confirming_is_progress():
    channel = make_channel(make_log(10, batch=5))
    subscribe(channel, rdy=0)
    channel.take_changed()
    channel.confirm(5)
    assert channel.take_changed() and channel.state().floor == 5


@pytest.mark.parametrize("comes_again", [False, True])
def test_with_the_output_of_all_at_its_bound_nothing_goes_out(comes_again):
    channel = make_channel(make_log(10, batch=5), state=ChannelState(1, bytes(5)) if comes_again else None)
    channel.budget = budget = Budget(1600)
    budget.output_bytes = budget.output_max_bytes
    consumer = subscribe(channel, rdy=10)
    consumer.finish_count = 1
    channel.pump(0, 0)
    assert (received(consumer), list(budget.waiting)) == ([], [channel])
    budget.output_bytes = 0
    channel.pump(0, 0)
    assert received(consumer)


def short_of_memory(output_bytes, state):
    """A channel of ten messages and its budget, of which so much is used."""
    channel = make_channel(make_log(10, batch=5), state=state)
    channel.budget = budget = Budget(1600)
    budget.output_bytes = output_bytes
    assert (budget.output_short_bytes, budget.output_max_bytes) == (300, 600)
    return channel, budget


NEW, AGAIN = ChannelState(1), ChannelState(1, bytes(5))


def test_what_comes_again_stops_when_the_output_of_all_is_full():
    """Even in a step of many: what is left waits for memory."""
    channel, budget = short_of_memory(580, AGAIN)
    consumers = [subscribe(channel, rdy=10), subscribe(channel, rdy=10)]
    for consumer in consumers:
        consumer.finish_count = 1
    channel.limit = 6  # nothing new
    channel.pump(0, 0)
    assert sum(len(received(consumer)) for consumer in consumers) == 1
    assert budget.is_full and list(budget.waiting) == [channel]


@pytest.mark.parametrize("state", [NEW, AGAIN], ids=["new", "again"])
def test_while_memory_is_short_a_consumer_that_has_shown_nothing_waits(state):
    channel, budget = short_of_memory(301, state)
    stranger = subscribe(channel, rdy=10)
    channel.pump(0, 0)
    assert received(stranger) == []
    assert list(budget.to_ask) == [stranger.owner]


@pytest.mark.parametrize("state", [NEW, AGAIN], ids=["new", "again"])
def test_while_memory_is_short_an_answer_is_worth_one_delivery(state):
    channel, _ = short_of_memory(301, state)
    channel.limit = 6
    one, other = subscribe(channel, rdy=1), subscribe(channel, rdy=10)
    one.has_answered = other.has_answered = True
    channel.pump(0, 0)
    assert len(received(one)) == 1
    assert not one.has_answered and not other.has_answered
    before = received(other)
    assert before and other.capacity == 0
    channel.pump(0, 0)
    assert received(other) == []
