"""ManualClock stands still until it is moved."""

import pytest

from flintmq.clock import Clock
from flintmq.testing import ManualClock


def test_it_moves_only_by_hand():
    clock: Clock = ManualClock(wall_ns=10_000, monotonic_ns=500)
    assert (clock.wall_ns(), clock.monotonic_ns()) == (10_000, 500)
    assert (clock.wall_ns(), clock.monotonic_ns()) == (10_000, 500)


def test_time_passes_on_both_clocks():
    clock = ManualClock(wall_ns=10_000, monotonic_ns=500)
    clock.advance(7)
    clock.advance(0)
    assert (clock.wall_ns(), clock.monotonic_ns()) == (10_007, 507)


def test_only_the_wall_clock_jumps():
    clock = ManualClock(wall_ns=10_000, monotonic_ns=500)
    clock.jump_wall(-3_000)
    assert (clock.wall_ns(), clock.monotonic_ns()) == (7_000, 500)
    with pytest.raises(ValueError, match="jump_wall"):
        clock.advance(-1)


def test_it_starts_at_a_plausible_time():
    clock = ManualClock()
    assert clock.wall_ns() > 1_700_000_000_000_000_000
    assert clock.monotonic_ns() > 0
