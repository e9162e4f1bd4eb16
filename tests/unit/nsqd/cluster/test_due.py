"""What fails with partitions again and again is tried again each time, and told now and then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from flintmq.cluster.view import PartitionId
from flintmq.errors import DiskFull, StorageError
from flintmq.nsqd.cluster.due import FAILED_AGAIN_S, Due
from flintmq.nsqd.cluster.rounds import AGAIN_S, TOLD_EVERY_S
from flintmq.nsqd.cluster.table import Copy

A, B = Copy(("a", 0), None), Copy(("b", 0), None)
WHAT = "making a replica"


class Loop:
    """Time that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, call: Callable[..., object], *arguments: Any) -> None:
        self.call_later(0.0, call, *arguments)

    def call_later(self, after_s: float, call: Callable[..., object], *arguments: Any) -> None:
        self.waiting.append((self.now + after_s, lambda: call(*arguments)))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [each for each in self.waiting if each[0] <= end]:
            first = min(due, key=lambda each: each[0])
            self.waiting.remove(first)
            self.now = first[0]
            first[1]()
        self.now = end


class Case:
    """Partitions with which something is done, and fails as ``error`` says."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.settled: list[PartitionId] = []
        self.error: Callable[[str], Exception] | None = None
        self.refusal: Exception | None = None
        self.due = Due(cast(Any, self.loop), self._settle, lambda: True, lambda: None)

    def _settle(self, partition: PartitionId) -> None:
        self.settled.append(partition)
        if self.refusal is not None:
            raise self.refusal
        if self.error is not None:
            self.due.ended(A if partition == A.partition else B, self.error(partition[0]), WHAT)


def full(topic: str, free: list[int] = [0]) -> Exception:  # noqa: B006 - each time another number is free
    free[0] += 1
    error = StorageError(f"topic {topic}: a replica cannot be created: {free[0]} bytes free")
    error.__cause__ = DiskFull(topic, free[0], 100)
    return error


def test_a_full_disk_is_told_of_one_copy_and_now_and_then(caplog: pytest.LogCaptureFixture):
    case = Case()
    case.error = full
    case.due.note_all([A.partition, B.partition])
    case.loop.run(TOLD_EVERY_S - FAILED_AGAIN_S)
    assert len(case.settled) >= 2 * (TOLD_EVERY_S - FAILED_AGAIN_S) / FAILED_AGAIN_S
    (line,) = caplog.messages
    assert line.startswith("CLUSTER: a/0: making a replica failed: topic a") and "of this copy alone" in line
    case.loop.run(2 * FAILED_AGAIN_S)
    assert len(caplog.messages) == 2
    case.due.ended(B, None, WHAT)
    case.loop.run(2 * FAILED_AGAIN_S)
    assert len(caplog.messages) == 3, "a copy was made, and then one could not be made again"


def test_other_failures_are_told_of_each_partition_and_each_reason(caplog: pytest.LogCaptureFixture):
    case = Case()
    case.error = ValueError
    case.due.note_all([A.partition, B.partition])
    case.loop.run(10 * FAILED_AGAIN_S)
    assert [line.split(":")[1] for line in caplog.messages] == [" a/0", " b/0"]
    case.error = OSError
    case.loop.run(10 * FAILED_AGAIN_S)
    assert len(caplog.messages) == 4


def test_what_cannot_be_begun_is_told_once_until_it_can(caplog: pytest.LogCaptureFixture):
    case = Case()
    case.refusal = StorageError("too few files")
    case.due.note(A.partition)
    with caplog.at_level(logging.ERROR):
        case.loop.run(10 * AGAIN_S)
        assert len(case.settled) >= 10 and len(caplog.messages) == 1
        case.refusal = None
        case.loop.run(2 * AGAIN_S)
        case.refusal = StorageError("too few files")
        case.due.note(A.partition)
        case.loop.run(AGAIN_S)
        assert len(caplog.messages) == 2
