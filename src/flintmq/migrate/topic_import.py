"""Bringing the queues of one NSQ topic into our log, and what the database is to say of it afterwards.

Picture of the log of a topic with two channels after a takeover::

    what was there | queue of channel a | queue of channel b | queue of the topic |
                   ^ first              every other channel has these as holes    ^ end

NSQ keeps a copy of a message for each channel, and so do we: what stood in two channels' queues is stored twice, and
each channel gets its own copy. Messages get new ids, because an id here is a place in the log; timestamps and attempts
stay. A paused topic stops where its own queue begins.

Crashes: an import writes only behind ``first``, which was written down before. Started again, it reads the same queues
and compares them with what the log has already; what is equal is kept, what is not (a power loss took a part, the files
were changed in between) is nobody's, or is removed with a log that held nothing else.

Source: NSQ's data files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flintmq.batch import Batch, decode_header, encode_batch, with_stamps
from flintmq.errors import WriteFailed
from flintmq.message import internal_id
from flintmq.migrate.diskqueue import Chunk
from flintmq.storage import PartitionLog, channel_store
from flintmq.storage.channel_store import CursorRow, Statement, StoredChannel, StoredCursor, StoredTopics

EVERYBODY = ""
_NOBODY = None
_SYNC_BYTES = 64 * 1024 * 1024


class LogDiffers(Exception):
    """A log that belongs to the takeover alone holds something else than the queues say."""


@dataclass(slots=True)
class Range:
    """Sequences ``first`` to ``end`` (exclusive) are for one channel, for :data:`EVERYBODY`, or, None, for nobody."""

    first: int
    end: int
    owner: str | None


class TopicImport:
    """Appends the queues of one topic to its log.

    Args:
        log: recovered, and used by nobody else.
        first: where the takeover began to append to it.

    Attributes:
        ranges: what was appended for whom, in order and without gaps.
        message_count, size_bytes: of what was appended or found, sizes as in the queue files.
    """

    def __init__(self, log: PartitionLog, first: int) -> None:
        self.log = log
        self.partition = log.partition
        self.first = first
        self.end = first
        self.ranges: list[Range] = []
        self.message_count = 0
        self.size_bytes = 0
        self._unsynced_bytes = 0

    def add(self, owner: str, chunk: Chunk) -> None:
        """Append messages of one queue, or find them in the log.

        Raises:
            LogDiffers: see there; start again with an empty log.
            StorageError: they cannot be stored.
        """
        log = self.log
        held = self._held(chunk) if self.end < log.next_sequence else 0
        bodies, stamps = chunk.bodies[held:], chunk.stamps[held:]
        if bodies:
            log.append(bodies, max(timestamp_ns for timestamp_ns, _ in stamps), stamps=stamps)
        self._note(self.end + len(chunk.bodies), owner)
        self.message_count += len(chunk.bodies)
        self.size_bytes += chunk.size_bytes
        self._unsynced_bytes += chunk.size_bytes
        if self._unsynced_bytes >= _SYNC_BYTES:
            self._sync()

    def _note(self, end: int, owner: str | None) -> None:
        if self.ranges and self.ranges[-1].owner == owner:
            self.ranges[-1].end = end
        elif end > self.end:
            self.ranges.append(Range(self.end, end, owner))
        self.end = end

    def _held(self, chunk: Chunk) -> int:
        """Count the messages of the chunk that the log has already; what it has instead of others is made nobody's."""
        log = self.log
        count = min(len(chunk.bodies), log.next_sequence - self.end)
        data = encode_batch(internal_id(log.partition, self.end), 0, 0, chunk.bodies[:count])
        data = with_stamps(data, chunk.stamps[:count])
        expected = Batch(data, decode_header(data))
        sequence = expected.first
        while sequence < expected.end:
            batch = log.read(sequence)
            if batch is None or batch.first > sequence:
                return self._give_up_rest()
            end = min(batch.end, expected.end)
            if batch.frames(sequence, end) != expected.frames(sequence, end):
                return self._give_up_rest()
            sequence = end
        return count

    def _give_up_rest(self) -> int:
        if self.first == 1:
            raise LogDiffers
        self._note(self.log.next_sequence, _NOBODY)
        return 0

    def finish(self) -> None:
        """Make everything durable.

        Raises:
            LogDiffers: see :meth:`add`.
            StorageError: it is not durable.
        """
        if self.end < self.log.next_sequence:
            self._give_up_rest()
        self._sync()

    def _sync(self) -> None:
        self._unsynced_bytes = 0
        ticket = self.log.begin_sync()
        if ticket is not None:
            try:
                ticket.run()
            except OSError as error:
                self.log.finish_sync(ticket, error)
            else:
                self.log.finish_sync(ticket, None)
        if self.log.failed is not None:
            raise WriteFailed(self.log.directory, self.log.failed)

    @property
    def queue_first(self) -> int:
        """The sequence at which the topic's own queue begins: what a paused topic does not hand out."""
        return next((each.first for each in self.ranges if each.owner == EVERYBODY), self.end)

    def holes(self, channel: str) -> list[tuple[int, int]]:
        """Return the ranges of the import that are not for a channel."""
        holes: list[tuple[int, int]] = []
        for each in self.ranges:
            if each.owner in (EVERYBODY, channel):
                continue
            if holes and holes[-1][1] == each.first:
                holes[-1] = (holes[-1][0], each.end)
            else:
                holes.append((each.first, each.end))
        return holes


@dataclass(slots=True)
class KnownTopic:
    """A topic as our database has it.

    Attributes:
        exists: whether it says anything.
        channels: by name, in each partition that it is in.
        partitions: (backlog_start, paused_at) of each that has a row.
    """

    exists: bool = False
    paused: bool = False
    channels: dict[str, dict[int, StoredChannel]] = field(default_factory=dict)
    partitions: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    cursors: dict[tuple[int, str], StoredCursor] = field(default_factory=dict)

    def next_sequence_min(self, partition: int) -> int:
        """Return the sequence a log must go on from at least, because those below it may have been delivered."""
        ends = [c.row.floor + len(c.window) for (number, _), c in self.cursors.items() if number == partition]
        backlog_start, paused_at = self.partitions.get(partition, (1, None))
        return max([*ends, backlog_start, paused_at or 1, 1])


def known_topics(stored: StoredTopics) -> dict[str, KnownTopic]:
    """Return the database by topic."""
    topics: dict[str, KnownTopic] = {}
    for name, paused in stored.topics.items():
        topics[name] = KnownTopic(True, paused)
    for (name, number, channel), part in stored.channels.items():
        topics.setdefault(name, KnownTopic()).channels.setdefault(channel, {})[number] = part
    for (name, number), row in stored.partitions.items():
        topics.setdefault(name, KnownTopic()).partitions[number] = row
    for cursor in stored.cursors:
        topics.setdefault(cursor.topic, KnownTopic()).cursors[cursor.partition, cursor.channel] = cursor
    return topics


@dataclass(slots=True)
class WantedTopic:
    """A topic as NSQ's files have it; None where they say nothing about a pause."""

    paused: bool | None = None
    channels: dict[str, bool | None] = field(default_factory=dict)


class TopicRows:
    """The rows of one topic after the takeover.

    Args:
        partitions: numbers of its partitions, at least one.
        log_end: one past the last sequence of a partition without an import.
        new_cursor: gives ids for cursors.
    """

    def __init__(
        self,
        name: str,
        known: KnownTopic,
        wanted: WantedTopic,
        done: TopicImport | None,
        partitions: list[int],
        log_end: Callable[[int], int],
        new_cursor: Callable[[], int],
    ) -> None:
        self._name = name
        self._known = known
        self._wanted = wanted
        self._done = done
        self._numbers = partitions
        self._log_end = log_end
        self._new_cursor = new_cursor
        self._is_new = not known.exists and (done is None or done.first == 1)

    def statements(self) -> Iterator[Statement]:
        """Yield what to write, in any order but in one transaction."""
        known, wanted, name = self._known, self._wanted, self._name
        paused = known.paused if wanted.paused is None else wanted.paused
        yield channel_store.put_topic(name, paused)
        for number in self._numbers:
            yield from self._partition(number, paused)
        for channel in [*known.channels, *(each for each in wanted.channels if each not in known.channels)]:
            parts = known.channels.get(channel)
            is_paused = wanted.channels.get(channel)
            for number in self._numbers if parts is None else parts:
                part = StoredChannel(0) if parts is None else parts[number]
                cursor, statements = self._cursor(number, channel)
                yield from statements
                changed = StoredChannel(
                    cursor or part.cursor, part.paused if is_paused is None else is_paused, part.skipped
                )
                if parts is None or changed != part:
                    yield channel_store.put_channel(name, number, channel, changed)

    def _import(self, number: int) -> TopicImport | None:
        return self._done if self._done is not None and self._done.partition == number else None

    def _partition(self, number: int, paused: bool) -> Iterator[Statement]:
        backlog_start, paused_at = self._known.partitions.get(number, (1, None))
        if paused and paused_at is None:
            done = self._import(number)
            yield channel_store.put_partition(
                self._name, number, backlog_start, self._end(number) if done is None else done.queue_first
            )
        elif self._known.paused and not paused:
            yield channel_store.put_partition(self._name, number, backlog_start, None)

    def _end(self, number: int) -> int:
        return 1 if self._is_new else self._log_end(number)

    def _cursor(self, number: int, channel: str) -> tuple[int, list[Statement]]:
        """Return the number of a channel's cursor, 0 when there is nothing to write, and what to write."""
        known, done = self._known, self._import(number)
        cursor = known.cursors.get((number, channel))
        is_new_channel = channel not in known.channels
        if done is None and (self._is_new or not is_new_channel):
            return 0, []  # it begins where the log does, or goes on as it was
        if cursor is not None:
            identity, row, window = cursor.id, cursor.row, cursor.window
        else:
            identity, window = self._new_cursor(), b""
            row = CursorRow(self._first_of_new(number, done) if is_new_channel else 1)
        if done is not None:
            row.holes = [*row.holes, *done.holes(channel)]
        if not window:
            # the floor would stay in front of a hole, and the log with it, until somebody consumes
            while row.holes and row.holes[0][0] <= row.floor:
                row.floor = max(row.floor, row.holes.pop(0)[1])
        spilled_count = 0 if cursor is None else cursor.spilled_count
        return identity, [channel_store.put_cursor(identity, self._name, number, channel, row, window, spilled_count)]

    def _first_of_new(self, number: int, done: TopicImport | None) -> int:
        """Return where a channel begins that we did not have: with the backlog if it is the first, otherwise now."""
        backlog_start, paused_at = self._known.partitions.get(number, (1, None))
        if not self._known.channels:
            return backlog_start
        if paused_at is not None:
            return paused_at
        return self._end(number) if done is None else done.first
