"""Idempotent publishing: which publishes of a producer are stored, on their way, or out of order.

A producer counts the messages that it publishes to a partition: 1, 2, 3 ... What is known of it::

    1 ..... | .................... last | last + 1
    stored    written or to be written    expected next

What is not above ``last`` is a duplicate, unless a power loss took it (a hole, see ``storage/producers.py``): it has
the fate of the publish that carries it. ``last + 1`` is taken. Beyond that there is a gap: a publish that failed must
not be overtaken by those that were sent behind it.

Rules of this file: no clock, no IO; what is in the log is remembered by the log (``storage/producers.py``), here is
only what has not ended; when a publish fails, those of the same producer behind it fail at once, and its sequences are
free again.

Source: docs/idempotent.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from flintmq.errors import FlintError
from flintmq.limits import PRODUCERS_MAX
from flintmq.storage import MemoryLog, PartitionLog
from flintmq.storage.producers import Ranges


class Group(Protocol):
    """Of :class:`flintmq.broker.partition.PublishGroup` what is needed here."""

    error: BaseException | None
    waiters: list[Any]
    pending: deque[Any]

    def end(self, error: BaseException | None) -> None: ...


AnyGroup = TypeVar("AnyGroup", bound=Group)


class SequenceGap(FlintError):
    """A producer left out a sequence: nothing is stored.

    Args:
        producer_id, sequence: of the publish.
        expected: the sequence that comes next.
    """

    def __init__(self, producer_id: bytes, sequence: int, expected: int) -> None:
        super().__init__(producer_id, sequence, expected)
        self.producer_id = producer_id
        self.sequence = sequence
        self.expected = expected

    def __str__(self) -> str:
        return f"producer {self.producer_id.decode()} sequence {self.sequence}, expected {self.expected}"


class OncePublish(Generic[AnyGroup]):
    """One publish on its way; a :class:`flintmq.broker.partition.Waiter` of its group.

    Args:
        ranges: its messages that are to be stored.

    Attributes:
        last: the last sequence taken of its producer, this publish included.
        written: the last sequence of its producer that is in the log.
    """

    __slots__ = ("_before", "_index", "_line", "_next", "_ranges", "group", "last", "producer_id", "written")

    def __init__(self, line: _Line[AnyGroup], producer_id: bytes, ranges: Ranges, group: AnyGroup) -> None:
        self._line = line
        self.producer_id = producer_id
        self._ranges = ranges
        self._index = 0
        self._next = self.first
        self._before = self.written = line.last
        self.last = max(line.last, ranges[-1][1] - 1)
        self.group = group

    @property
    def first(self) -> int:
        """Its first message."""
        return self._ranges[0][0]

    def carries(self, first: int, end: int) -> bool:
        """Whether some of these messages are to be stored by it."""
        return any(start < end and first < stop for start, stop in self._ranges)

    def without_own(self, ranges: Ranges) -> Ranges:
        """Leave out what is to be stored by it."""
        for first, end in self._ranges:
            cut = [piece for start, stop in ranges for piece in ((start, min(stop, first)), (max(start, end), stop))]
            ranges = [(start, stop) for start, stop in cut if start < stop]
        return ranges

    def append(self, log: PartitionLog | MemoryLog, bodies: Sequence[bytes], wall_ns: int, due_ns: int = 0) -> None:
        """Write its next messages as one batch.

        Args:
            due_ns: wall time before which they are not delivered, 0 for at once.

        Raises:
            StorageError: as the log says.
        """
        log.append(bodies, wall_ns, due_ns, producer=(self.producer_id, self._next))
        self._next += len(bodies)
        self.written = max(self.written, self._next - 1)
        if self._next == self._ranges[self._index][1] and self._index + 1 < len(self._ranges):
            self._index += 1
            self._next = self._ranges[self._index][0]

    def forget_written(self) -> None:
        """Take note that what is in the log of it is to be cut off."""
        self.written = self._before

    def publish_ended(self) -> None:
        """Its group has ended."""
        if self.group.error is None:
            self._line.stored(self)
        else:
            self._line.failed(self)

    def keep_written(self, group: AnyGroup) -> None:
        """It failed when a part of it had been written, whose durability is that of another group."""
        start = self._ranges[self._index][0]
        written = [*self._ranges[: self._index], *([(start, self._next)] if start < self._next else [])]
        self._line.begin(OncePublish(self._line, self.producer_id, written, group))


class _Line(Generic[AnyGroup]):
    """The publishes of one producer that are under way, oldest first.

    Attributes:
        last: the last sequence taken.
    """

    __slots__ = ("_owner", "last", "publishes")

    def __init__(self, owner: Producers[AnyGroup], last: int) -> None:
        self._owner = owner
        self.last = last
        self.publishes: deque[OncePublish[AnyGroup]] = deque()

    def begin(self, publish: OncePublish[AnyGroup]) -> None:
        self.publishes.append(publish)
        self.last = publish.last
        publish.group.waiters.insert(0, publish)  # before those who look at what it leaves behind
        self._owner.line_begun(publish.producer_id, self)

    def carrier_of(self, first: int, end: int) -> AnyGroup | None:
        """Find the group that some of these messages wait for; the last of several."""
        return next((each.group for each in reversed(self.publishes) if each.carries(first, end)), None)

    def without_carried(self, ranges: Ranges) -> Ranges:
        """Leave out what is under way."""
        for publish in self.publishes if ranges else ():
            ranges = publish.without_own(ranges)
        return ranges

    def stored(self, publish: OncePublish[AnyGroup]) -> None:
        if publish in self.publishes:
            self.publishes.remove(publish)  # the first: groups end in their order
            self._end_if_idle(publish.producer_id)

    def failed(self, publish: OncePublish[AnyGroup]) -> None:
        """Fail whatever is behind it: nobody may overtake it."""
        if publish not in self.publishes:
            return  # with one before it
        behind: list[OncePublish[AnyGroup]] = []
        while (last := self.publishes.pop()) is not publish:
            behind.append(last)
        self.last = publish.written
        for each in reversed(behind):
            each.group.pending.clear()
            each.group.end(SequenceGap(each.producer_id, each.first, self.last + 1))
        self._end_if_idle(publish.producer_id)

    def _end_if_idle(self, producer_id: bytes) -> None:
        if not self.publishes:
            self._owner.line_ended(producer_id, self.last)


class Producers(Generic[AnyGroup]):
    """The producers of one partition.

    Args:
        log: that remembers what is written.
    """

    __slots__ = ("_lines", "_log", "_rolled_back")

    def __init__(self, log: PartitionLog | MemoryLog) -> None:
        self._log = log
        self._lines: dict[bytes, _Line[AnyGroup]] = {}
        # of producers that the log does not know because what they began with failed
        self._rolled_back: dict[bytes, int] = {}

    def last(self, producer_id: bytes) -> int | None:
        """The last sequence taken of a producer; None when it may begin anywhere."""
        line = self._lines.get(producer_id)
        if line is not None:
            return line.last
        last = self._log.producers.table.last(producer_id)
        return self._rolled_back.get(producer_id) if last is None else last

    def with_prefix(self, prefix: bytes) -> dict[bytes, int]:
        """Return the last sequences taken of the producers whose ids begin with ``prefix``."""
        known = (*(each for each, _ in self._log.producers.table.items()), *self._lines)
        found = {each: self.last(each) for each in known if each.startswith(prefix)}
        return {each: last for each, last in found.items() if last is not None}

    def new_ranges(self, producer_id: bytes, first: int, end: int) -> Ranges:
        """Find those of the messages from ``first`` to ``end`` (exclusive) that are no duplicates.

        Raises:
            SequenceGap: one before them is missing.
        """
        last = self.last(producer_id)
        if last is None or first == last + 1:
            return [(first, end)]
        if first > last:
            raise SequenceGap(producer_id, first, last + 1)
        line = self._lines.get(producer_id)
        holes = self._log.producers.table.holes(producer_id, first, min(end, last + 1))
        ranges = sorted(holes if line is None else line.without_carried(holes))
        if end > last + 1:
            ranges.append((last + 1, end))
        return ranges

    def carrier_of(self, producer_id: bytes, first: int, end: int) -> AnyGroup | None:
        """Find the group that duplicates wait for; None when they are stored."""
        self._log.producers.table.touch(producer_id)
        line = self._lines.get(producer_id)
        return None if line is None else line.carrier_of(first, end)

    def begin(self, producer_id: bytes, ranges: Ranges, group: AnyGroup) -> OncePublish[AnyGroup]:
        """Take messages that are no duplicates; ``group`` carries nothing else."""
        line = self._lines.get(producer_id)
        if line is None:
            last = self.last(producer_id)
            line = _Line(self, ranges[0][0] - 1 if last is None else last)
        publish = OncePublish(line, producer_id, ranges, group)
        line.begin(publish)
        return publish

    def line_begun(self, producer_id: bytes, line: _Line[AnyGroup]) -> None:
        """A producer has something under way."""
        self._lines[producer_id] = line
        self._rolled_back.pop(producer_id, None)

    def line_ended(self, producer_id: bytes, last: int) -> None:
        """Nothing of a producer is under way any more."""
        self._lines.pop(producer_id, None)
        if self._log.producers.table.last(producer_id) is None:
            self._rolled_back[producer_id] = last
            if len(self._rolled_back) > PRODUCERS_MAX:
                del self._rolled_back[next(iter(self._rolled_back))]
