"""Which segments are old, by the times that clocks gave them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sim.disk import CrashingDisk

from flintmq.broker.clock_steps import ClockSteps
from flintmq.broker.retention import Removed, Retaining, Retention, drop_consumed
from flintmq.storage import PartitionLog, ReadCache, SegmentInfo
from flintmq.topic_meta import PLAIN

MINUTE = 60_000_000_000
NOW = 100_000 * MINUTE
KEPT = Retention(60 * MINUTE, 0)


def _fail(error: object) -> None:
    pytest.fail(str(error))


@dataclass
class Log:
    """Segments of one message and 10 bytes each; the last one is active."""

    times_ns: list[int]
    start_sequence: int = 1

    def segments(self) -> list[SegmentInfo]:
        count = len(self.times_ns)
        return [
            SegmentInfo(number, number + 1, 10, self.times_ns[number - 1], number < count)
            for number in range(self.start_sequence, count + 1)
        ]

    def drop_before(self, sequence: int) -> int:
        dropped, self.start_sequence = sequence - self.start_sequence, sequence
        return 10 * dropped


@dataclass
class Consumed:
    """A partition of which channels have passed everything below a sequence."""

    log: Any
    floor: int
    durable_floor: int = field(init=False)
    meta: Any = PLAIN

    def __post_init__(self) -> None:
        self.durable_floor = self.floor


@pytest.mark.parametrize(
    ("minutes", "start"),
    [
        ([-100, -90, -50, -10], 3),
        ([500, -90, -50, -10], 3),  # one that lies ahead counts as the next
        ([500, -50, -90, -10], 1),
        ([-90, 500, 500, -61, 0], 5),
        ([-90, 500, 500, -59, 0], 2),
        ([-90, 500, 500, 500], 2),  # all lie ahead: they count as stored now
        ([-50, -99_999, -40, 0], 1),  # one that lies behind makes none before it old
        ([-99_999, -50, -40, 0], 2),
    ],
)
def test_a_segment_is_old_by_its_own_time_or_by_the_next_where_its_own_lies_ahead(minutes, start):
    log = Log([NOW + each * MINUTE for each in minutes])
    removed, is_ahead = drop_consumed(Consumed(log, len(minutes)), KEPT, NOW)
    assert log.start_sequence == start
    assert removed == Removed(start - 1, start - 1, 10 * (start - 1))
    assert is_ahead == (500 in minutes[:start])


def test_what_a_channel_waits_for_stays():
    log = Log([NOW - 90 * MINUTE] * 5)
    drop_consumed(Consumed(log, 3), KEPT, NOW)
    assert log.start_sequence == 3


def test_what_goes_because_of_its_size_is_not_told_as_old():
    log = Log([NOW - 90 * MINUTE, NOW, NOW, NOW])
    removed, _ = drop_consumed(Consumed(log, 4), Retention(60 * MINUTE, 10), NOW)
    assert (log.start_sequence, removed.segments) == (3, 1)


@pytest.mark.parametrize("shift_minutes", [1000, -1000])
@pytest.mark.parametrize("is_copied", [False, True])
def test_steps_of_the_clock_make_nothing_old(shift_minutes, is_copied):
    steps = ClockSteps()
    steps.moved(shift_minutes * MINUTE, NOW)
    now = NOW + 50 * MINUTE
    own = [NOW - MINUTE, now + shift_minutes * MINUTE]
    log = Log(own if not is_copied else [NOW - MINUTE, now - MINUTE, now])  # the other node's clock is right
    retaining = Retaining(KEPT, steps, _fail)
    retaining.apply("t", Consumed(log, len(log.times_ns)), now, is_copied)
    assert log.start_sequence == 1
    if is_copied:
        retaining.apply("t", Consumed(log, 3), now + 20 * MINUTE, is_copied)
        assert log.start_sequence == (2 if shift_minutes > 0 else 1), "a step back keeps it for that much longer"


def test_each_topic_is_told_once_and_each_log_that_is_ahead():
    files = CrashingDisk().attach()
    told: list[Any] = []
    retaining = Retaining(KEPT, ClockSteps(), _fail)
    retaining.on_removed = lambda topic, removed: told.append((topic, removed))
    retaining.on_ahead = told.append
    logs = []
    for number in range(2):
        log = PartitionLog.open(
            files,
            f"t/{number}",
            partition=number,
            segment_bytes=200,
            cache=ReadCache(),
            report=_fail,
            created_ns=1,
        )
        for minutes in (-90, -80, 500, 0):
            log.append([b"x" * 150], NOW + minutes * MINUTE)
        logs.append(log)
    for _ in range(2):
        for log in logs:
            retaining.apply("t", SimpleNamespace(log=log, floor=5, durable_floor=5, meta=PLAIN), NOW)
        retaining.tell()
    assert [log.start_sequence for log in logs] == [3, 3]
    ((topic, removed), ahead) = told
    assert (topic, removed.segments, removed.messages, ahead) == ("t", 4, 4, ["t"])
