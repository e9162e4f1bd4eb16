"""The system's clock stays where timestamps can say it."""

from __future__ import annotations

import time

import pytest

from flintmq.clock import WALL_NS_MAX, SystemClock

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
