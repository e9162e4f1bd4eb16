"""What is no attempt, although nsqd counts it as one."""

from __future__ import annotations

from flintmq.client.core.attempts import Attempts
from flintmq.limits import ATTEMPTS_MAX
from flintmq.wire.client import Record


def record(name: str, deliveries: int) -> Record:
    return 1, deliveries, name.encode(), b""


def test_nsqd_is_believed_of_what_was_not_dropped_here():
    attempts = Attempts(5)
    assert not attempts.are_over(record("a", 5))
    assert attempts.are_over(record("a", 6))
    assert attempts.of(b"a", 6) == 6


def test_what_was_dropped_is_no_attempt():
    attempts = Attempts(2)
    for _ in range(10):
        attempts.note_dropped([record("a", 1), record("b", 1)])
    assert attempts.of(b"a", 12) == 2
    assert not attempts.are_over(record("a", 12))
    assert attempts.are_over(record("a", 13))
    assert attempts.are_over(record("c", 3))


def test_what_is_finished_is_forgotten_first():
    attempts = Attempts(2, count_max=2)
    attempts.note_dropped([record(name, 1) for name in "ab"])
    attempts.note_finished([b"a", b"unknown"])
    assert len(attempts) == 1
    assert attempts.of(b"a", 3) == 2, "the answer may have come too late"
    attempts.note_dropped([record("a", 1)])
    assert (len(attempts), attempts.of(b"a", 4)) == (2, 2)
    attempts.note_finished([b"a", b"b"])
    for name in "cdab":
        attempts.note_dropped([record(name, 1)])
        attempts.note_finished([name.encode()])
    assert len(attempts) == 0
    assert attempts.of(b"c", 3) == 3
    assert attempts.are_over(record("c", 3)), "none had to be forgotten that was not finished"


def test_what_had_to_be_forgotten_is_handed_out_and_not_given_up():
    attempts = Attempts(2, count_max=3)
    for name in "abcd":
        attempts.note_dropped([record(name, 1)] * 7)
    assert len(attempts) == 3
    assert not attempts.are_over(record("a", 8)), "it is not known what became of the seven"
    assert not attempts.are_over(record("a", 9))
    assert attempts.are_over(record("a", 10)), "it had two since"
    assert len(attempts) == 3


def test_the_one_dropped_last_is_known_longest():
    attempts = Attempts(2, count_max=2)
    for name in "abac":
        attempts.note_dropped([record(name, 1)])
    assert attempts.of(b"a", 3) == 1
    assert attempts.of(b"b", 3) == 3


def test_without_a_limit_nothing_is_kept():
    attempts = Attempts(ATTEMPTS_MAX + 1)
    attempts.note_dropped([record("a", 1)])
    assert len(attempts) == 0
    assert not attempts.are_over(record("a", ATTEMPTS_MAX))
