"""A partition: one log, its channels, and the publishes of the present loop turn.

Rules of this file: publishes are gathered and written once a turn; every publish belongs to a :class:`PublishGroup`,
which its connections wait for and which ends exactly once, stored or failed.

Source: design/performance.md decision 2 (group commit).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from flintmq.broker.channel import Channel
from flintmq.errors import StorageError
from flintmq.limits import BATCH_COUNT_MAX
from flintmq.storage import MemoryLog, PartitionLog

_MERGE_COUNT_MAX = 64  # publishes of fewer messages than this share a batch with their neighbours
_BATCH_BODIES_BYTES_MAX = 1024 * 1024  # a turn may gather more, but a batch is read back as a whole


class Waiter(Protocol):
    """Who is told that a publish has ended."""

    def publish_ended(self) -> None: ...


class Ended:
    """Something that connections wait for before they answer; it ends once.

    Attributes:
        ended: whether it has.
        error: why it failed; None when it ended well.
        waiters: who is told.
    """

    __slots__ = ("ended", "error", "waiters")

    def __init__(self) -> None:
        self.ended = False
        self.error: BaseException | None = None
        self.waiters: list[Waiter] = []

    def end(self, error: BaseException | None) -> None:
        """Tell every waiter; later calls do nothing."""
        if self.ended:
            return
        self.ended = True
        self.error = error
        for waiter in self.waiters:
            waiter.publish_ended()


class PublishGroup(Ended):
    """The publishes of one turn to one partition; ends when stored as the durability policy says, or failed.

    Attributes:
        end_sequence: one past the last message of the group.
    """

    __slots__ = ("end_sequence", "partition")

    def __init__(self, partition: Partition) -> None:
        super().__init__()
        self.partition = partition
        self.end_sequence = 0


class Partition:
    """Owner of one partition's log and channels.

    Attributes:
        backlog_start: where the first channel begins: what was published while there was no channel.
        paused_at: while the topic is paused or starting, nothing from this sequence on is handed to channels.
        write_error: why the last turn with publishes was not stored; None when it was.
    """

    __slots__ = ("_group", "_open", "_open_due_ns", "_pending", "backlog_start", "bytes_count", "channels",
                 "counted_from", "durable_floor", "is_deleted", "log", "number", "paused_at",
                 "topic_name", "write_error")  # fmt: skip

    def __init__(self, topic_name: str, number: int, log: PartitionLog | MemoryLog) -> None:
        self.topic_name = topic_name
        self.number = number
        self.log = log
        self.channels: dict[str, Channel] = {}
        self.backlog_start = log.start_sequence
        self.paused_at: int | None = None
        self.is_deleted = False
        self.counted_from = log.next_sequence
        self.bytes_count = 0
        self.durable_floor = log.start_sequence
        self._pending: list[tuple[int, Sequence[bytes]]] = []
        self._open: list[bytes] | None = None  # the last of pending while publishes may still be merged into it
        self._open_due_ns = 0
        self._group: PublishGroup | None = None
        self.write_error: StorageError | None = None

    def publish(self, bodies: Sequence[bytes], due_ns: int) -> PublishGroup:
        """Take messages for the end of the turn; the answer ends when they are stored."""
        if len(bodies) >= _MERGE_COUNT_MAX:
            self._pending.append((due_ns, bodies))
            self._open = None
        elif self._open is not None and self._open_due_ns == due_ns:
            self._open.extend(bodies)
        else:
            self._open, self._open_due_ns = list(bodies), due_ns
            self._pending.append((due_ns, self._open))
        group = self._group
        if group is None:
            group = self._group = PublishGroup(self)
        return group

    def join(self, body: bytes) -> PublishGroup | None:
        """Add a message without delay to the last publish of this turn; None when there is none that it can join."""
        if self._open is None or self._open_due_ns:
            return None
        self._open.append(body)
        return self._group

    def delete(self) -> None:
        """Close the log for good; publishes of this turn count as made before the deletion."""
        self.is_deleted = True
        self._pending, self._open = [], None
        if self._group is not None:
            self._group.end(None)
            self._group = None
        self.log.close()

    def write_pending(self, wall_ns: int) -> PublishGroup | None:
        """Append what the turn gathered; a failure ends the group at once.

        Returns:
            What has been written and not ended; None when there is nothing.
        """
        group, self._group = self._group, None
        pending, self._pending, self._open = self._pending, [], None
        if group is None:
            return None
        first = self.log.next_sequence
        self.write_error = None
        try:
            for due_ns, bodies in pending:
                size = sum(map(len, bodies))
                fits = size <= _BATCH_BODIES_BYTES_MAX and len(bodies) <= BATCH_COUNT_MAX
                for part in (bodies,) if fits else _parts(bodies):
                    self.log.append(part, wall_ns, due_ns)
                self.bytes_count += size
        except StorageError as error:
            self.write_error = error
            group.end(error)
            if self.log.next_sequence == first:
                return None
            # a restart would bring what was stored to light: it is delivered, though nobody was promised it
            group = PublishGroup(self)
        group.end_sequence = self.log.next_sequence
        return group

    @property
    def message_count(self) -> int:
        """Messages published since the process started."""
        count: int = self.log.next_sequence - self.counted_from
        return count

    @property
    def depth(self) -> int:
        """Messages no channel has been given yet: the topic's own depth."""
        committed: int = self.log.committed_sequence
        if not self.channels:
            return max(0, committed - self.backlog_start)
        return max(0, committed - self.paused_at) if self.paused_at is not None else 0

    @property
    def floor(self) -> int:
        """The sequence below which no channel needs the log any more."""
        if not self.channels:
            return self.backlog_start
        return min(channel.floor for channel in self.channels.values())

    def describe(self) -> str:
        """A picture of the state for humans and failing tests."""
        lines = [
            f"partition {self.topic_name}/{self.number} backlog_start={self.backlog_start} paused_at={self.paused_at}",
            f"  {self.log.describe()}",
        ]
        lines += [f"  {channel.describe()}" for channel in self.channels.values()]
        return "\n".join(lines)


def _parts(bodies: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Cut bodies into what fits into one batch each; a body is never cut."""
    start = size = 0
    for index, body in enumerate(bodies):
        if size and (size + len(body) > _BATCH_BODIES_BYTES_MAX or index - start == BATCH_COUNT_MAX):
            yield bodies[start:index]
            start, size = index, 0
        size += len(body)
    yield bodies[start:]
