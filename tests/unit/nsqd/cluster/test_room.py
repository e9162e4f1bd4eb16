"""When a node calls its disk full, and when no longer."""

from __future__ import annotations

from flintmq.errors import DiskFull, WriteFailed
from flintmq.nsqd.cluster.room import FULL_BYTES, HOLD_NS_MAX, HOLD_NS_MIN, LOOK_NS, ROOM_BYTES, DiskRoom

PLENTY = 10 * ROOM_BYTES


class Case:
    def __init__(self) -> None:
        self.free = PLENTY
        self.error: Exception | None = None
        self.copies: Exception | None = None
        self.changes: list[bool] = []
        self.now_ns = LOOK_NS
        errors = (lambda: self.error, lambda: self.copies)
        self.room = DiskRoom(lambda: self.free, errors, lambda: self.changes.append(self.room.is_full))

    def pass_time(self, duration_ns: int) -> None:
        end_ns = self.now_ns + duration_ns
        while self.now_ns < end_ns:
            self.now_ns += LOOK_NS
            self.room.tick(self.now_ns)

    def fail(self) -> None:
        self.error = DiskFull("a segment", self.free, 1)
        self.room.tick(self.now_ns)


def test_little_room_is_full_before_a_write_fails_and_some_more_is_needed_afterwards():
    case = Case()
    case.pass_time(LOOK_NS)
    case.free = FULL_BYTES - 1
    case.pass_time(LOOK_NS)
    case.free = ROOM_BYTES - 1
    case.pass_time(10 * LOOK_NS)
    assert case.changes == [True]
    case.free = ROOM_BYTES
    case.pass_time(LOOK_NS)
    assert case.changes == [True, False]


def test_a_write_that_finds_no_room_counts_whatever_the_file_system_says():
    case = Case()
    case.fail()
    assert case.changes == [True]
    case.pass_time(HOLD_NS_MIN - LOOK_NS)
    assert case.changes == [True]
    case.pass_time(LOOK_NS)
    assert case.changes == [True, False]
    case.pass_time(HOLD_NS_MAX)
    assert case.changes == [True, False], "it is the same error still"
    case.error = WriteFailed("a segment", "the disk is gone")
    case.pass_time(LOOK_NS)
    assert case.changes == [True, False], "that is another matter"


def test_writes_of_two_kinds_find_no_room_each_by_itself():
    case = Case()
    case.copies = WriteFailed("a copy", "it is damaged")
    case.fail()
    assert case.changes == [True], "the other one's error is another matter"
    case.pass_time(HOLD_NS_MIN)
    case.copies = DiskFull("a copy", case.free, 1)
    case.pass_time(LOOK_NS)
    case.pass_time(HOLD_NS_MAX)
    assert case.changes == [True, False, True, False]
    case.copies = None
    case.pass_time(HOLD_NS_MAX)
    assert case.changes == [True, False, True, False], "what is left was known"


def test_it_goes_back_and_forth_ever_more_slowly():
    case = Case()
    for times in (1, 2, 4, 8, 12, 12):
        case.fail()
        assert case.room.is_full
        case.pass_time(times * HOLD_NS_MIN - LOOK_NS)
        assert case.room.is_full
        case.pass_time(LOOK_NS)
        assert not case.room.is_full
    case.pass_time(2 * HOLD_NS_MAX)
    case.fail()
    case.pass_time(HOLD_NS_MIN)
    assert not case.room.is_full, "it was long ago"
