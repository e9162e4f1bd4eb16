"""Timers without an event loop: order, cancelling, and that nothing piles up."""

from __future__ import annotations

import pytest

from flintmq.client.blocking.timers import CANCELLED_COUNT_MAX, Timers
from flintmq.testing import ManualClock


def pass_time(clock: ManualClock, seconds: float) -> None:
    clock.advance(round(seconds * 1e9) + 1000)  # a microsecond more than a rounded sum needs


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def timers(clock):
    return Timers(clock)


def test_calls_come_when_due_in_their_order(clock, timers):
    calls: list[str] = []
    began = timers.time()
    timers.call_later(2.0, calls.append, "second")
    timers.call_later(1.0, calls.append, "first")
    timers.call_at(began + 2.0, calls.append, "second, later")
    timers.run_due()
    assert calls == []
    assert timers.next_at() == pytest.approx(began + 1.0)
    pass_time(clock, 1.0)
    timers.run_due()
    assert calls == ["first"]
    pass_time(clock, 5.0)
    timers.run_due()
    assert calls == ["first", "second", "second, later"]
    assert timers.next_at() is None


def test_a_cancelled_call_does_not_come(clock, timers):
    calls: list[str] = []
    timer = timers.call_later(1.0, calls.append, "never")
    timers.call_later(2.0, calls.append, "yes")
    timer.cancel()
    timer.cancel()
    assert timers.next_at() == pytest.approx(timers.time() + 2.0)
    pass_time(clock, 3.0)
    timers.run_due()
    assert calls == ["yes"]


def test_a_call_may_cancel_and_schedule_others(clock, timers):
    calls: list[str] = []

    def first() -> None:
        calls.append("first")
        other.cancel()
        timers.call_later(0.0, calls.append, "scheduled")

    timers.call_later(1.0, first)
    other = timers.call_later(1.0, calls.append, "cancelled")
    pass_time(clock, 1.0)
    timers.run_due()
    assert calls == ["first"], "what it schedules comes with the next look, so that a look always ends"
    timers.run_due()
    assert calls == ["first", "scheduled"]


def test_a_timer_that_is_set_again_and_again_leaves_nothing_behind(timers):
    kept = [timers.call_later(1000.0, print) for _ in range(10)]
    for _ in range(10_000):
        timers.call_later(500.0, print).cancel()
    assert len(timers._heap) <= len(kept) + CANCELLED_COUNT_MAX + 1


@pytest.mark.parametrize(("error", "count"), [(KeyboardInterrupt, 2), (ZeroDivisionError, 1)])
def test_a_call_that_was_interrupted_is_made_again_and_one_that_failed_is_not(clock, timers, error, count):
    calls: list[str] = []

    def call() -> None:
        calls.append("call")
        if len(calls) == 1:
            raise error

    timers.call_later(1.0, call)
    pass_time(clock, 1.0)
    with pytest.raises(error):
        timers.run_due()
    timers.run_due()
    timers.run_due()
    assert len(calls) == count
    assert timers.next_at() is None
