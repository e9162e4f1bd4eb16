"""What cannot be read or written is in the log, and does not fill it."""

from __future__ import annotations

from flintmq.errors import StorageError
from flintmq.net.problems import AGAIN_NS, LINES_MAX, Problems
from flintmq.testing import ManualClock


def test_the_same_is_told_at_once_and_again_seldom(caplog):
    clock = ManualClock()
    problems = Problems(clock)
    for _ in range(1_000):
        problems.tell(StorageError("topics/t: the disk is full"))
    problems.tell(StorageError("topics/u: the disk is full"))
    assert caplog.messages == ["topics/t: the disk is full", "topics/u: the disk is full"]
    clock.advance(AGAIN_NS)
    problems.tell(StorageError("topics/t: the disk is full"))
    assert caplog.messages[2:] == ["topics/t: the disk is full (999 times more since this was said last)"]
    clock.advance(AGAIN_NS)
    problems.tell(StorageError("topics/t: the disk is full"))
    assert caplog.messages[3:] == ["topics/t: the disk is full"]


def test_what_is_remembered_is_bounded(caplog):
    problems = Problems(ManualClock())
    for round_ in range(2):
        for number in range(LINES_MAX + 1):
            problems.tell(StorageError(f"{number}"))
        assert len(caplog.messages) == (round_ + 1) * (LINES_MAX + 1)
        assert len(problems._told) == LINES_MAX
