"""The system's clock stays where timestamps can say it."""

from __future__ import annotations

import time

import pytest

from flintmq.clock import WALL_NS_MAX, SystemClock, _boottime

YEAR_NS = 31_557_600 * 1_000_000_000


@pytest.mark.parametrize(
    ("now_ns", "told_ns"),
    [(-1, 0), (-60 * YEAR_NS, 0), (0, 0), (1, 1), (56 * YEAR_NS, 56 * YEAR_NS), (8000 * YEAR_NS, WALL_NS_MAX)],
)
def test_wall_time_is_between_1970_and_2253(monkeypatch, now_ns, told_ns):
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    assert SystemClock().wall_ns() == told_ns
    assert time.gmtime(WALL_NS_MAX // 1_000_000_000).tm_year == 2253
    assert WALL_NS_MAX + 9 * YEAR_NS < 1 << 63


def test_boot_time_is_that_of_the_system_or_else_monotonic_time(monkeypatch):
    clock = SystemClock()
    first = clock.boottime_ns()
    assert first <= clock.boottime_ns()
    if hasattr(time, "CLOCK_BOOTTIME"):
        assert first <= time.clock_gettime_ns(time.CLOCK_BOOTTIME) < first + 3600 * 10**9

    def refused(number):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(time, "clock_gettime_ns", refused)
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", 7, raising=False)
    assert _boottime() is time.monotonic_ns
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    assert _boottime() is time.monotonic_ns
