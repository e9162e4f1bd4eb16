"""Latency percentiles: the promised precision, the moving window, and that every finished message counts once."""

import bisect
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.broker.test_channel import SECOND, make_channel, make_log, publish, subscribe

from flintmq.broker.channel import ChannelState
from flintmq.broker.latency import Latency, Summary, _Stream
from flintmq.errors import StorageError

WINDOW = 10 * SECOND
QUANTILES = [q / 200 for q in range(1, 201)] + [0.999, 0.9999]


def summary_of(pairs):
    stream = _Stream()
    for value, weight in pairs:
        stream.insert(value, weight)
    return stream.summary()


def worst_errors(summary, pairs):
    """The largest error of a rank, as a part of the count and, above the median, of what lies above the rank."""
    pairs = sorted(pairs)
    values = [value for value, _ in pairs]
    totals = [0]
    for _, weight in pairs:
        totals.append(totals[-1] + weight)
    count = totals[-1]
    assert summary.count == count
    errors, tail_errors = [0.0], [0.0]
    for quantile, value in zip(QUANTILES, summary.values_at(QUANTILES), strict=True):
        rank = math.ceil(quantile * count)
        smaller, through = totals[bisect.bisect_left(values, value)], totals[bisect.bisect_right(values, value)]
        error = max(0, smaller + 1 - rank, rank - through)
        errors.append((error - 1) / count)  # ranks are whole numbers
        if quantile > 0.5 and rank < count:
            tail_errors.append((error - 1) / (count - rank))
    return max(errors), max(tail_errors)


def zigzag(count):
    return [(n if n % 2 else 10**9 - n, 1) for n in range(count)]


SHAPES = {
    "even": lambda r: [(r.randrange(10**9), 1) for _ in range(20_000)],
    "long tail": lambda r: [(int(r.lognormvariate(15, 2)), 1) for _ in range(20_000)],
    "ascending": lambda _: [(n, 1) for n in range(20_000)],
    "descending": lambda _: [(20_000 - n, 1) for n in range(20_000)],
    "few values": lambda r: [(r.randrange(7), 1) for _ in range(20_000)],
    "runs": lambda r: [(int(r.lognormvariate(15, 2)), r.choice((1, 1, 200, 2500))) for _ in range(10_000)],
    "zigzag": lambda _: zigzag(20_000),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_are_as_precise_as_promised_and_memory_is_bounded(shape):
    pairs = SHAPES[shape](random.Random(5))
    summary = summary_of(pairs)
    summary.check()
    error, tail_error = worst_errors(summary, pairs)
    assert error <= 0.01
    assert tail_error <= 0.13  # a tenth of what lies above the value that is found
    assert len(summary) < 600


@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 3000)), min_size=1, max_size=400))
def test_any_runs(pairs):
    summary = summary_of(pairs).compressed()
    summary.check()
    assert worst_errors(summary, pairs)[0] <= 0.01


def test_little_is_exact():
    assert summary_of([(30, 1), (10, 1), (20, 2)]).values_at([0.25, 0.5, 0.75, 0.76, 1]) == [10, 20, 20, 30, 30]
    assert summary_of([]).values_at([0.5, 1]) == [0, 0]


def test_a_merge_of_different_channels_is_precise_too():
    chance = random.Random(7)
    channels = [
        [(int(chance.lognormvariate(8 + which, 1)), chance.choice((1, 10))) for _ in range(3000)] for which in range(8)
    ]
    merged = Summary.of([summary_of(pairs) for pairs in channels])
    merged.check()
    error, tail_error = worst_errors(merged, [pair for pairs in channels for pair in pairs])
    assert error <= 0.01
    assert tail_error <= 0.13


def test_precision_gives_way_before_memory_does():
    pairs = zigzag(20_000)
    summary = summary_of(pairs)
    smaller = summary.compressed(entries_max=40)
    smaller.check()
    assert len(smaller) <= 40 < len(summary)
    assert worst_errors(smaller, pairs)[0] < 0.1


def test_the_window_moves_on():
    latency = Latency(WINDOW)
    latency.insert(100 * SECOND, 1, 10)
    latency.insert(106 * SECOND, 2, 5)  # the second half
    assert latency.summary(106 * SECOND).count == 15
    assert latency.summary(111 * SECOND).count == 5
    assert latency.summary(116 * SECOND).count == 0
    latency.insert(200 * SECOND, 3, 1)
    assert latency.summary(200 * SECOND).values_at([1]) == [3]
    assert latency.summary(1000 * SECOND).count == 0


def test_a_clock_that_is_set_back_neither_stops_the_window_nor_makes_negative_latencies():
    latency = Latency(WINDOW)
    latency.insert(100 * SECOND, 1, 1)
    latency.insert(50 * SECOND, -5, 1)
    assert latency.summary(50 * SECOND).values_at([0.5]) == [0]
    assert latency.summary(61 * SECOND).count == 0


# -- in a channel ------------------------------------------------------------------------------------------------------


def measured_channel(log, **options):
    channel = make_channel(log, **options)
    channel.latency = Latency(WINDOW)
    return channel


def latencies(channel, wall_ns=SECOND):
    """All latencies that were counted, as {latency: count}."""
    summary = channel.latency.summary(wall_ns)
    return dict(zip(summary._values, summary._weights, strict=True))


def test_every_finished_message_counts_with_its_own_timestamp():
    log = make_log()
    for timestamp_ns, count in ((1000, 3), (2000, 1), (2000, 2), (5000, 4)):
        log.append([b"x"] * count, timestamp_ns)
    log.advance_committed(log.next_sequence)
    channel = measured_channel(log)
    consumer = subscribe(channel, rdy=6)
    channel.pump(0, 0)
    assert channel.finish(consumer, (2, 1), SECOND) == []
    channel.finish(consumer, (4, 3), SECOND)
    channel.pump(0, 0)
    channel.finish(consumer, tuple(range(5, 11)), SECOND)
    assert latencies(channel) == {SECOND - 1000: 3, SECOND - 2000: 3, SECOND - 5000: 4}
    assert channel.finish(consumer, (5,), SECOND) == [5]
    assert channel.latency.summary(SECOND).count == 10


def test_same_timestamp_again_after_all_was_finished():
    log = make_log(4, batch=4)
    channel = measured_channel(log)
    consumer = subscribe(channel)
    channel.pump(0, 0)
    channel.finish(consumer, (1, 2, 3, 4), SECOND)
    publish(log, 3)
    channel.pump(0, 0)
    channel.finish(consumer, (5, 6, 7), SECOND)
    assert latencies(channel) == {SECOND - 1000: 7}


def test_requeued_deferred_sampled_and_timed_out_messages_count_when_they_are_finished():
    log = make_log(6, batch=2)
    log.append([b"x"] * 2, 3000, 5 * SECOND)
    log.advance_committed(log.next_sequence)
    channel = measured_channel(log)
    consumer = subscribe(channel, msg_timeout_ns=SECOND)
    channel.pump(0, 0)
    channel.requeue(consumer, 1, 0, 0)
    channel.requeue(consumer, 2, 4 * SECOND, 0)
    channel.handle_deadlines(2 * SECOND, 2 * SECOND)
    channel.pump(2 * SECOND, 2 * SECOND)
    channel.finish(consumer, (1, 3, 4, 5, 6), 2 * SECOND)
    channel.handle_deadlines(6 * SECOND, 6 * SECOND)
    channel.pump(6 * SECOND, 6 * SECOND)
    channel.finish(consumer, (2, 7, 8), 6 * SECOND)
    assert latencies(channel, 6 * SECOND) == {2 * SECOND - 1000: 5, 6 * SECOND - 1000: 1, 6 * SECOND - 3000: 2}


def test_a_consumer_without_a_slot_of_its_own_counts_too():
    channel = measured_channel(make_log(4, batch=4))
    others = [subscribe(channel, rdy=0) for _ in range(250)]
    consumer = subscribe(channel)
    assert len(others) == 250
    channel.pump(0, 0)
    channel.finish(consumer, (1, 2, 4), SECOND)
    assert latencies(channel) == {SECOND - 1000: 3}


def test_messages_moved_to_the_database_count_with_the_timestamp_of_their_frame():
    channel = measured_channel(make_log(100, batch=10), window_max=20)
    holder, consumer = subscribe(channel, rdy=1), subscribe(channel, rdy=10)
    for _ in range(30):
        channel.pump(0, 0)
        mine = [message.sequence for message in channel.window.held_by(consumer)]
        if mine:
            channel.finish(consumer, tuple(mine), SECOND)
    (held,) = channel.spilled.loaded
    assert channel.finish(holder, (held,), SECOND) == []
    assert channel.latency.summary(SECOND).count == channel.finish_count
    assert set(latencies(channel)) == {SECOND - 1000}


def test_messages_delivered_before_a_restart_count_after_it():
    log = make_log(10, batch=5)
    channel = measured_channel(log, state=ChannelState(2, window=b"\0\1\0"))
    consumer = subscribe(channel)
    channel.pump(0, 0)
    assert channel.finish(consumer, (2, 4, 5, 6), SECOND) == []
    assert latencies(channel) == {SECOND - 1000: 4}


def test_an_unreadable_log_costs_a_figure_and_no_finish():
    class Broken:
        def __init__(self, log):
            self.log = log
            self.is_broken = False

        def read(self, sequence):
            if self.is_broken:
                raise StorageError("cannot open")
            return self.log.read(sequence)

        def __getattr__(self, name):
            return getattr(self.log, name)

    log = Broken(make_log(10, batch=5))
    channel = measured_channel(log, state=ChannelState(2, window=b"\0\1\0"))
    consumer = subscribe(channel)
    channel.pump(0, 0)
    log.is_broken = True
    assert channel.finish(consumer, (2, 4, 5), SECOND) == []
    assert latencies(channel) == {SECOND - 1000: 1}


def test_timestamps_of_finished_messages_are_forgotten():
    log = make_log()
    channel = measured_channel(log)
    consumer = subscribe(channel)
    for number in range(1000):
        log.append([b"x"], number)
        log.advance_committed(log.next_sequence)
        channel.pump(0, 0)
        channel.finish(consumer, (number + 1,), SECOND)
    assert len(channel.latency._ends) < 200
    assert channel.latency.summary(SECOND).count == 1000
