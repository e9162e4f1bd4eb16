"""The segments of a partition that may go: those that every channel has passed and no retention keeps.

Their age is counted on the clock of due times, which does not jump. A log is stored in order: a segment whose latest
message has a time that lies ahead, as a clock that was wrong gave it, was stored before the next one, and counts as
stored when that was; where all behind it lie ahead as well, it counts as stored now.

Rules of this file: no clock; what is not consumed by a channel never goes; the times of other segments count for one
only where its own lies ahead, because a clock that was behind for a while would make all before it old as well.

Source: Youzan's storage (retention in days), docs/decisions/0001, docs/decisions/0005.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakSet

from flintmq.broker.clock_steps import ClockSteps
from flintmq.errors import StorageError
from flintmq.storage import MemoryLog, PartitionLog, SegmentInfo
from flintmq.topic_meta import TopicMeta

DAY_NS = 86_400 * 1_000_000_000
_SEALED_BYTES_MIN = 4096  # a block of the disk, which the segment that follows takes
_AHEAD_NS = 60_000_000_000  # a time that lies less ahead is not told of: the clocks of a cluster's nodes differ


class Retention(NamedTuple):
    """Bounds within which consumed messages are kept: a time in ns, bytes; 0: no such limit, both 0: not at all."""

    time_ns: int
    size_bytes: int


class Consumed(Protocol):
    """A partition, or a replica of one.

    Attributes:
        durable_floor: no channel needs the log below this sequence, as the database has it.
    """

    @property
    def durable_floor(self) -> int: ...

    @property
    def meta(self) -> TopicMeta: ...

    @property
    def floor(self) -> int: ...

    @property
    def log(self) -> PartitionLog | MemoryLog: ...


@dataclass(slots=True)
class Removed:
    """Figures of what retention by time has removed of a topic; sizes in bytes."""

    segments: int = 0
    messages: int = 0
    size_bytes: int = 0


class Retaining:
    """Applies retention, and remembers what is to be told of it.

    Args:
        retention: of the node.
        clock_steps: how the wall clock was set.
        report: told of what cannot be deleted; it is tried again.

    Attributes:
        on_removed: told of a topic, and what retention by time has removed of it since it was told last.
        on_ahead: told once of topics in which a message has a time that lies ahead, as long as it is stored.
    """

    __slots__ = ("_ahead", "_clock_steps", "_removed", "_report", "_retention", "_told_ahead", "on_ahead", "on_removed")

    def __init__(self, retention: Retention, clock_steps: ClockSteps, report: Callable[[StorageError], None]) -> None:
        self._retention = retention
        self._clock_steps = clock_steps
        self._report = report
        self._removed: dict[str, Removed] = {}
        self._ahead: dict[str, None] = {}
        self._told_ahead: WeakSet[PartitionLog] = WeakSet()
        self.on_removed: Callable[[str, Removed], None] = lambda _topic, _removed: None
        self.on_ahead: Callable[[list[str]], None] = lambda _topics: None

    def apply(self, topic: str, partition: Consumed, now_ns: int, is_copied: bool = False) -> None:
        """Drop what may go of a partition or a replica; :meth:`tell` is to follow.

        Args:
            now_ns: the clock of due times.
            is_copied: whether the times in it were given by other nodes, which this one's clock says nothing about.
        """
        log = partition.log
        stored_ns = self._copied_ns if is_copied else self._clock_steps.stored_ns
        try:
            removed, is_ahead = drop_consumed(partition, self._retention, now_ns, stored_ns)
        except StorageError as error:
            self._report(error)
            return
        if removed.segments:
            all_removed = self._removed.setdefault(topic, Removed())
            all_removed.segments += removed.segments
            all_removed.messages += removed.messages
            all_removed.size_bytes += removed.size_bytes
        if isinstance(log, PartitionLog):
            if not is_ahead:
                self._told_ahead.discard(log)
            elif log not in self._told_ahead:
                self._told_ahead.add(log)
                self._ahead[topic] = None

    def sealable_bytes(self, partition: Consumed, now_ns: int, is_copied: bool = False) -> int:
        """Return the size in bytes of the active segment where all of it may go once it is sealed, as it can be now.

        Else 0. A log that is being synced has to wait: that sync is not about what follows the segment.

        Args:
            now_ns, is_copied: as for :meth:`apply`.
        """
        log = partition.log
        if not isinstance(log, PartitionLog) or not log.is_created or log.failed is not None or log.is_syncing:
            return 0
        if min(partition.durable_floor, partition.floor) < log.next_sequence:
            return 0
        *_, active = segments = log.segments()
        if active.size_bytes <= _SEALED_BYTES_MIN:
            return 0
        stored_ns = self._copied_ns if is_copied else self._clock_steps.stored_ns
        going = _going(partition, segments, self._retention, now_ns, stored_ns)
        return active.size_bytes if going.end >= active.end_sequence else 0

    def _copied_ns(self, wall_ns: int) -> int:
        return max(wall_ns, self._clock_steps.stored_ns(wall_ns))

    def tell(self) -> None:
        """Tell what was done since this was called last: once for each topic."""
        removed, self._removed = self._removed, {}
        for topic, what in removed.items():
            self.on_removed(topic, what)
        if self._ahead:
            ahead, self._ahead = self._ahead, {}
            self.on_ahead([*ahead])


def _as_it_is(wall_ns: int) -> int:
    return wall_ns


def drop_consumed(
    partition: Consumed, retention: Retention, now_ns: int, stored_ns: Callable[[int], int] = _as_it_is
) -> tuple[Removed, bool]:
    """Drop what may go; the topic's own days come before the node's time.

    Args:
        now_ns: the clock of due times.
        stored_ns: when something was stored, on that clock, from the wall time it was given.

    Returns:
        what was removed because of its age, and whether the time of something that was looked at lies ahead.

    Raises:
        WriteFailed: a file cannot be deleted.
    """
    log = partition.log
    removed = Removed()
    if isinstance(log, MemoryLog) or not _keeps(partition, retention):
        log.drop_before(min(partition.durable_floor, partition.floor))
        return removed, False
    going = _going(partition, log.segments(), retention, now_ns, stored_ns)
    if going.end:
        log.drop_before(going.end)
        for segment in going.old:
            if segment.end_sequence <= log.start_sequence:
                removed.segments += 1
                removed.messages += segment.end_sequence - segment.first_sequence
                removed.size_bytes += segment.size_bytes
    return removed, going.is_ahead


class _Going(NamedTuple):
    """The segments that may go.

    Attributes:
        end: everything below this sequence may; 0: nothing.
        old: those of them that may because of their age.
        is_ahead: whether the time of something that was looked at lies far ahead.
    """

    end: int
    old: list[SegmentInfo]
    is_ahead: bool


def _keeps(partition: Consumed, retention: Retention) -> bool:
    """Return whether something is kept that every channel has passed."""
    return bool(partition.meta.retention_days or retention.time_ns or retention.size_bytes)


def _going(
    partition: Consumed,
    segments: Sequence[SegmentInfo],
    retention: Retention,
    now_ns: int,
    stored_ns: Callable[[int], int],
) -> _Going:
    """Find which segments may go, the active one as if it were sealed."""
    floor = min(partition.durable_floor, partition.floor)
    if not _keeps(partition, retention):
        return _Going(floor, [], False)
    time_ns = partition.meta.retention_days * DAY_NS or retention.time_ns
    consumed = [segment for segment in segments if segment.end_sequence <= floor]
    kept_bytes = sum(segment.size_bytes for segment in consumed)
    ages = _Ages(segments, now_ns, stored_ns)
    old: list[SegmentInfo] = []
    end = 0
    for number, segment in enumerate(consumed):
        too_old = time_ns and ages.stored_ns(number) < now_ns - time_ns
        too_many = retention.size_bytes and kept_bytes > retention.size_bytes
        if not (too_old or too_many):
            break
        if too_old:
            old.append(segment)
        kept_bytes -= segment.size_bytes
        end = segment.end_sequence
    return _Going(end, old, ages.is_ahead)


class _Ages:
    """The times at which segments were stored; to be asked for one after the other.

    Attributes:
        is_ahead: whether the time of one that was looked at lies far ahead.
    """

    __slots__ = ("_found", "_found_ns", "_now_ns", "_segments", "_stored_ns", "is_ahead")

    def __init__(self, segments: Sequence[SegmentInfo], now_ns: int, stored_ns: Callable[[int], int]) -> None:
        self._segments = segments
        self._now_ns = now_ns
        self._stored_ns = stored_ns
        self._found = -1  # the segment that says when those before it were stored
        self._found_ns = 0
        self.is_ahead = False

    def stored_ns(self, number: int) -> int:
        """Return when the latest message of a segment was stored; not later than now."""
        while self._found < number:
            self._found, self._found_ns = self._next(number)
        return self._found_ns

    def _next(self, number: int) -> tuple[int, int]:
        for at in range(number, len(self._segments)):
            segment = self._segments[at]
            if segment.end_sequence == segment.first_sequence:
                continue
            found_ns = self._stored_ns(segment.timestamp_max)
            if found_ns <= self._now_ns:
                return at, found_ns
            self.is_ahead = self.is_ahead or found_ns > self._now_ns + _AHEAD_NS
        return len(self._segments), self._now_ns
