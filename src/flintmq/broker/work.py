"""Work that the broker hands to a worker thread and takes back: files of new topics, and progress for the database.

Rules of this file: data and what follows from it alone; what is done with it is in :mod:`flintmq.broker.broker`.

Source: design/reliability.md R3 and R4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flintmq.broker.channel import Channel
from flintmq.broker.deferred import Changes
from flintmq.broker.partition import Partition
from flintmq.broker.topic import Topic
from flintmq.storage import Creation, channel_store


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """What the broker needs of nsqd's options; sizes in bytes, times in ns; without retention channels decide alone.

    Attributes:
        latency_window_ns: how far back the latencies of a channel are kept; 0 when they are not.
    """

    segment_bytes: int = 100 * 1024 * 1024
    ephemeral_depth_max: int = 10_000
    retention_time_ns: int = 0
    retention_bytes: int = 0
    latency_window_ns: int = 0


@dataclass(slots=True)
class DueQuery:
    """Rows set aside that have come due, to be read after the flush."""

    channel: Channel
    cursor: int
    after: tuple[int, int]
    generation: int


@dataclass(slots=True)
class Flush:
    """One transaction of progress, and what to do when it fails.

    Attributes:
        statements: to run in order.
        due: queries to run after it.
        metadata_count: how many of the broker's metadata statements it holds.
        clock_shift_ns: what is added to due times on their way to the disk.
        changes: aside changes taken, to be given back on failure.
        floors: the floor of each partition as written.
    """

    statements: list[channel_store.Statement] = field(default_factory=list)
    due: list[DueQuery] = field(default_factory=list)
    metadata_count: int = 0
    clock_shift_ns: int = 0
    waiters: list[Callable[[BaseException | None], None]] = field(default_factory=list)
    changes: list[tuple[Channel, Changes]] = field(default_factory=list)
    floors: list[tuple[Partition, int]] = field(default_factory=list)
    removals: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.statements or self.due or self.removals)


@dataclass(slots=True, eq=False)
class NewTopic:
    """A topic whose logs have no files yet.

    Attributes:
        creations: of its logs.
        is_recorded: whether the files may be made; those of a topic with partitions when the database has its meta,
            without which they would be found as a plain topic's.
        is_under_way: whether the files are being made.
        waiters: who is told when they are, and the topic is as durable as its channels, or why not.
    """

    topic: Topic
    creations: list[Creation]
    is_recorded: bool = True
    is_under_way: bool = False
    waiters: list[Callable[[BaseException | None], None]] = field(default_factory=list)

    @property
    def error(self) -> Exception | None:
        """Why its files could not be made; None when they were."""
        return next((creation.error for creation in self.creations if creation.error is not None), None)

    def finish(self) -> None:
        """Let those of its logs take appends that have files."""
        for creation in self.creations:
            if creation.error is None:
                creation.finish()


def advance(cursor: channel_store.StoredCursor, floor: int) -> None:
    """Let a cursor begin at ``floor``, when the database is behind it."""
    ahead = floor - cursor.row.floor
    if ahead > 0:
        cursor.row.floor = floor
        cursor.window = cursor.window[ahead:]


def aside_statements(identity: int, changes: Changes, shift_ns: int) -> list[channel_store.Statement]:
    """What the database has to do about messages set aside for one channel."""
    statements = []
    put, moved = changes.put, changes.moved
    if shift_ns:
        put = {sequence: (due_ns + shift_ns, attempts, frame) for sequence, (due_ns, attempts, frame) in put.items()}
        moved = {sequence: (due_ns + shift_ns, attempts) for sequence, (due_ns, attempts) in moved.items()}
    if changes.cleared:
        statements.append(channel_store.clear_aside(identity))
    if put:
        statements.append(channel_store.put_aside(identity, put))
    if moved:
        statements.append(channel_store.move_aside(identity, moved))
    if changes.removed:
        statements.append(channel_store.delete_aside(identity, changes.removed))
    return statements
