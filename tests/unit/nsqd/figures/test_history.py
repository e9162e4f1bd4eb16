"""Bytes per partition and hour: what an hour has added, how many hours are kept, what was before the start."""

from __future__ import annotations

import asyncio

from flintmq.nsqd.figures.history import HOURS, HourlySizes
from flintmq.testing import ManualClock

HOUR_S = 3600


class Counted:
    """As much of a partition as is needed."""

    def __init__(self, size: int = 0) -> None:
        self.bytes_count = size


def test_each_hour_has_what_it_added():
    one, two = Counted(), Counted()
    history = HourlySizes(ManualClock(), lambda: [one, two])  # type: ignore[list-item]
    one.bytes_count = 100
    history.hour_ended()
    one.bytes_count, two.bytes_count = 130, 7
    history.hour_ended()
    history.hour_ended()
    assert history.of(one)[-3:] == [100, 30, 0]  # type: ignore[arg-type]
    assert history.of(two)[-3:] == [0, 7, 0]  # type: ignore[arg-type]
    assert history.last_hour(one) == 0  # type: ignore[arg-type]
    assert len(history.of(one)) == HOURS  # type: ignore[arg-type]


def test_a_day_is_kept_and_who_is_gone_is_forgotten():
    one = Counted()
    here = [one]
    history = HourlySizes(ManualClock(), lambda: here)  # type: ignore[arg-type, return-value]
    for number in range(1, 40):
        one.bytes_count += number
        history.hour_ended()
    assert history.of(one) == list(range(40 - HOURS, 40))  # type: ignore[arg-type]
    here.clear()
    history.hour_ended()
    assert history.of(one) == [0] * HOURS  # type: ignore[arg-type]


async def test_it_looks_at_the_full_hour():
    clock, one = ManualClock(), Counted(5)
    wall_ns = clock.wall_ns()
    history = HourlySizes(clock, lambda: [one])  # type: ignore[list-item]
    history.start()
    timer = history._timer
    assert timer is not None
    left_s = timer.when() - asyncio.get_running_loop().time()
    hour_ns = HOUR_S * 1_000_000_000
    wanted_s = (hour_ns - wall_ns % hour_ns) / 1e9
    assert wanted_s - 60 < left_s < wanted_s + 1
    history._look()
    assert history.last_hour(one) == 5  # type: ignore[arg-type]
    history.stop()
