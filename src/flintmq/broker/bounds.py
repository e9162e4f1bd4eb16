"""The bounds of one topic: publishes that are refused, and the oldest messages dropped that no channel has been given.

A channel's bound is its own or the topic's; a topic without channels has the topic's. With ``refuse``, a publish is
refused while any of them has no room for it; what the present turn has published already counts. With ``drop_oldest``
a channel drops its oldest itself (:mod:`flintmq.broker.limiter`); here goes what waits for the first channel, and what
a paused topic holds back.

Rules of this file: no IO but the log's reads, for bytes.

Source: NSQ's issues (bounds).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from flintmq.broker.backlog import offset_at, unfinished_count
from flintmq.broker.channel import Channel
from flintmq.broker.clock_steps import ClockSteps
from flintmq.broker.partition import Partition
from flintmq.broker.state import Log
from flintmq.broker.topic import Topic
from flintmq.errors import RemoteProtocolError
from flintmq.message import FRAME_OVERHEAD_BYTES
from flintmq.settings import DROP_OLDEST, REFUSE, Limits

_BATCHES_MAX = 512  # passed over at once


class TopicFull(RemoteProtocolError):
    """A topic or one of its channels has as much as it may; nothing of the publish was stored.

    Args:
        fatal: as for any publish that fails: not on a topic with partitions.
    """

    def __init__(self, detail: str, fatal: bool, command: str = "PUB") -> None:
        super().__init__(f"E_{command}_FAILED", detail, fatal)


class TopicBounds:
    """The bounds of one topic, shared by its partitions here.

    Args:
        moved: told of a partition whose backlog begins elsewhere now.

    Attributes:
        limits: the topic's own.
        refused_count: messages whose publish was refused.
        dropped_count: messages dropped that no channel had been given.
        expired_count: messages that were too old, of those.
    """

    __slots__ = ("_moved", "_reserved", "_topic", "dropped_count", "expired_count", "limits", "refused_count",
                 "refusing")  # fmt: skip

    def __init__(self, topic: Topic, moved: Callable[[Partition], None]) -> None:
        self._topic = topic
        self._moved = moved
        self._reserved: dict[Partition, tuple[int, int]] = {}
        self.limits = Limits()
        self.refusing: dict[str, Limits] = {}
        self.refused_count = 0
        self.dropped_count = 0
        self.expired_count = 0

    def change(self, limits: Limits, channels: dict[str, Limits]) -> None:
        """Put other bounds into force.

        Args:
            channels: those of every channel.
        """
        self.limits = limits
        bounds = channels or {"": limits}
        self.refusing = {name: each for name, each in bounds.items() if each.is_bounded and each.overflow == REFUSE}

    # -- publishing ------------------------------------------------------------------------------------------------

    def admit(self, partition: Partition, bodies: Sequence[bytes]) -> None:
        """Count a publish in.

        Raises:
            TopicFull: there is no room for it.
        """
        if not self.refusing:
            return
        count = len(bodies)
        size = sum(map(len, bodies)) + count * FRAME_OVERHEAD_BYTES
        if not partition.has_pending:
            self._reserved.pop(partition, None)  # stored, or it failed
        for name, limits in self.refusing.items():
            self._check(name, limits, count, size)
        log = partition.log
        end, end_bytes = self._reserved.get(partition, (0, 0))
        self._reserved[partition] = (
            max(end, log.next_sequence) + count,
            max(end_bytes, log.end_offset_bytes) + size,
        )

    def _check(self, name: str, limits: Limits, count: int, size: int) -> None:
        partitions = self._topic.partitions.values()
        if limits.max_messages:
            used = sum(self._count(each, name) for each in partitions)
            if used + count > limits.max_messages:
                more = f"; this publish has {count} more" if count > 1 else ""
                raise self._full(name, count, f"{used} of max {limits.max_messages} messages{more}")
        if limits.max_bytes:
            used = sum(self._bytes(each, name) for each in partitions)
            if used + size > limits.max_bytes:
                raise self._full(name, count, f"{used} of max {limits.max_bytes} bytes; this publish has {size} more")

    def _full(self, name: str, count: int, used: str) -> TopicFull:
        self.refused_count += count
        topic = self._topic
        who = f"channel {name} has " if name else ""
        smaller = ", or publish fewer at once" if count > 1 else ""
        detail = f"topic {topic.name} is full: {who}{used}; raise the limit or consume{smaller}"
        return TopicFull(detail, fatal=not topic.meta.is_partitioned)

    def _count(self, partition: Partition, name: str) -> int:
        log = partition.log
        if not name:
            used = log.next_sequence - partition.backlog_start
        else:
            channel = partition.channels.get(name)
            used = 0 if channel is None else unfinished_count(channel)
        return used + max(0, self._reserved.get(partition, (0, 0))[0] - log.next_sequence)

    def _bytes(self, partition: Partition, name: str) -> int:
        log = partition.log
        if not name:
            used = log.end_offset_bytes - offset_at(log, partition.backlog_start)
        else:
            channel = partition.channels.get(name)
            limiter = None if channel is None else channel.limiter
            used = 0 if limiter is None else limiter.unfinished_bytes()
        return used + max(0, self._reserved.get(partition, (0, 0))[1] - log.end_offset_bytes)

    # -- what no channel has been given ----------------------------------------------------------------------------

    def committed(self, partition: Partition) -> list[Channel]:
        """Drop what is too much behind a publish that has been stored; return the channels it was held back from.

        Raises:
            StorageError: the log cannot be read now.
        """
        limits = self.limits
        if not limits.is_bounded or limits.overflow != DROP_OLDEST:
            return []
        start = partition.paused_at if partition.channels else partition.backlog_start
        if start is None:
            return []
        log = partition.log
        end = log.committed_sequence
        if limits.max_messages:
            start = max(start, end - limits.max_messages)
        if limits.max_bytes:
            start = _first_within(log, start, log.end_offset_bytes - limits.max_bytes)
        self.dropped_count += max(0, min(start, end) - self._backlog_start(partition))
        return self._begin_at(partition, min(start, end))

    def expire(self, partition: Partition, wall_ns: int, clock_steps: ClockSteps) -> None:
        """Pass over what is too old and waits for the first channel.

        Args:
            wall_ns: the clock of due times.
            clock_steps: how the wall clock was set.

        Raises:
            StorageError: the log cannot be read now.
        """
        ttl_ns = self.limits.ttl_ns
        if partition.channels or not ttl_ns:
            return
        log, start = partition.log, partition.backlog_start
        for _ in range(_BATCHES_MAX):
            batch = log.read(start) if start < log.committed_sequence else None
            if batch is None:
                break
            if max(partition.due_times.of(batch), clock_steps.stored_ns(batch.timestamp_ns)) + ttl_ns > wall_ns:
                break
            start = min(batch.end, log.committed_sequence)
        self.expired_count += start - partition.backlog_start
        self._begin_at(partition, start)

    @staticmethod
    def _backlog_start(partition: Partition) -> int:
        return partition.paused_at if partition.channels and partition.paused_at else partition.backlog_start

    def _begin_at(self, partition: Partition, start: int) -> list[Channel]:
        """Leave out everything below ``start`` that no channel has been given."""
        before = self._backlog_start(partition)
        if start <= before:
            return []
        changed = list(partition.channels.values())
        for channel in changed:
            channel.leave_out(before, start)
            channel.limit = start
        if not changed:
            partition.backlog_start = start
        if partition.paused_at is not None:
            partition.paused_at = max(partition.paused_at, start)
        self._moved(partition)
        return changed


def _first_within(log: Log, start: int, offset_bytes: int) -> int:
    """The first message from ``start`` on with at least so many bytes of the log before it, or as far as it got."""
    for _ in range(_BATCHES_MAX):
        batch = log.read(start) if start < log.next_sequence else None
        if batch is None:
            break
        into = offset_bytes - batch.header.offset_bytes
        positions = batch.positions()
        if into < positions[-1]:
            return max(start, batch.first + bisect_left(positions, into))
        start = batch.end
    return start
