"""The segments of a partition that may go: those that every channel has passed and no retention keeps.

Rules of this file: no clock; what is not consumed by a channel never goes.

Source: Youzan's storage (retention in days), docs/decisions/0001.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from flintmq.storage import MemoryLog, PartitionLog
from flintmq.topic_meta import TopicMeta

DAY_NS = 86_400 * 1_000_000_000


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


def drop_consumed(partition: Consumed, retention: Retention, wall_ns: int) -> None:
    """Drop what may go; the topic's own days come before the node's time.

    Raises:
        WriteFailed: a file cannot be deleted.
    """
    time_ns = partition.meta.retention_days * DAY_NS or retention.time_ns
    log = partition.log
    floor = min(partition.durable_floor, partition.floor)
    if isinstance(log, MemoryLog) or not (time_ns or retention.size_bytes):
        log.drop_before(floor)
        return
    consumed = [segment for segment in log.segments() if segment.end_sequence <= floor]
    kept_bytes = sum(segment.size_bytes for segment in consumed)
    drop_to = 0
    for segment in consumed:
        too_old = time_ns and segment.timestamp_max < wall_ns - time_ns
        too_many = retention.size_bytes and kept_bytes > retention.size_bytes
        if not (too_old or too_many):
            break
        kept_bytes -= segment.size_bytes
        drop_to = segment.end_sequence
    if drop_to:
        log.drop_before(drop_to)
