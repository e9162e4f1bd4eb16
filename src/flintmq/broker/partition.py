"""A partition: one log, its channels, and the publishes of the present loop turn.

Rules of this file: publishes are gathered and written once a turn, much of it over several turns; every publish belongs
to a :class:`PublishGroup`, which its connections wait for and which ends exactly once, stored or failed.

Source: docs/decisions/0002 (group commit).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol, TypeAlias

from flintmq.batch import EXTENDED, RAW_IDS
from flintmq.broker.channel import Channel
from flintmq.broker.clock_steps import ClockSteps
from flintmq.broker.delayed import DelayedAhead, DelayedNotes
from flintmq.broker.due_times import DueTimes
from flintmq.broker.producers import OncePublish, Producers
from flintmq.errors import PartitionFailed, StorageError
from flintmq.limits import BATCH_COUNT_MAX
from flintmq.message import EMPTY_HEADERS, FRAME_OVERHEAD_BYTES, TRACE_ID_SIZE
from flintmq.settings import Limits
from flintmq.storage import MemoryLog, PartitionLog
from flintmq.topic_meta import PLAIN, TopicMeta

_MERGE_COUNT_MAX = 64  # publishes of fewer messages than this share a batch with their neighbours
_BATCH_BODIES_BYTES_MAX = 1024 * 1024  # a turn may gather more, but a batch is read back as a whole
_APPEND_WEIGHT = 8 * 1024  # an append costs about what writing so many bytes does
_TURN_WEIGHT = 1024 * 1024  # a group takes no more publishes than this


class Waiter(Protocol):
    """Somebody who is told that a publish has ended."""

    def publish_ended(self) -> None: ...


class Bounds(Protocol):
    """The part of a topic's bounds that a partition needs; see :class:`flintmq.broker.bounds.TopicBounds`."""

    refused_count: int
    dropped_count: int
    expired_count: int

    def change(self, limits: Limits, channels: dict[str, Limits]) -> None: ...

    def admit(self, partition: Partition, bodies: Sequence[bytes]) -> None: ...

    def committed(self, partition: Partition) -> list[Channel]: ...

    def expire(self, partition: Partition, wall_ns: int, clock_steps: ClockSteps) -> None: ...


class PartitionEvents(Protocol):
    """A listener to what is published to one partition."""

    def publishing(self, group: PublishGroup, count: int, is_stored_form: bool) -> None:
        """Messages joined a group, in this order; in the form they are stored in they may have trace ids."""

    def publisher(self, group: PublishGroup, client: str) -> None:
        """Tell who published what joined a group last."""

    def published(self, group: PublishGroup) -> None:
        """The messages of a group are stored and may be delivered."""


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
        """Tell every waiter; later calls do nothing. What the first one that fails raises is raised behind the last."""
        if self.ended:
            return
        self.ended = True
        self.error = error
        defect: Exception | None = None
        for waiter in self.waiters:
            try:
                waiter.publish_ended()
            except Exception as failure:  # noqa: BLE001 - raised below, when the others have been told
                defect = defect or failure
        if defect is not None:
            raise defect


class PublishGroup(Ended):
    """The publishes of one turn to one partition; ends when stored as the durability policy says, or failed.

    Attributes:
        first_sequence, end_sequence: its messages, the end exclusive; unknown before they are written.
        first_offset: bytes of the partition before them, as unknown.
        message_count, frame_bytes: what has been published to it; counted on topics with partitions alone.
        pending: ``(due_ns, bodies, size)`` that are to be written, each as one batch, on the clock of due times; size
            -1 while it may grow.
        weight: what that costs, about as much as writing so many bytes.
        notes: of who listens to the partition's events.
        once: the publish of a producer that counts, which has a group of its own; None for others.
        longer_from: of its messages those from here on are a byte longer than they were when they were published.
        conditions: that have to be met before it is stored as the durability policy says.
    """

    __slots__ = ("conditions", "end_sequence", "first_offset", "first_sequence", "frame_bytes", "longer_from",
                 "message_count", "notes", "once", "partition", "pending", "weight")  # fmt: skip

    def __init__(self, partition: Partition) -> None:
        super().__init__()
        self.partition = partition
        self.first_sequence = -1
        self.end_sequence = 0
        self.first_offset = 0
        self.message_count = 0
        self.frame_bytes = 0
        self.pending: deque[tuple[int, Sequence[bytes], int]] = deque()
        self.weight = 0
        self.notes: object = None
        self.once: Once | None = None
        self.longer_from = 1 << 62
        self.conditions = 0

    def add_condition(self) -> None:
        """Wait for one thing more."""
        self.conditions += 1

    def meet_condition(self) -> bool:
        """One of the things that it waits for has come true; whether it waits for no other."""
        assert self.conditions > 0, "a condition is met once"
        self.conditions -= 1
        return not self.conditions


Once: TypeAlias = OncePublish[PublishGroup]


class Partition:
    """Owner of one partition's log and channels.

    Attributes:
        adopted: batches of another node that were stored and not committed when this one began to take publishes; None
            when there were none. What is a duplicate of them ends with it.
        backlog_start: where the first channel begins: what was published while there was no channel.
        paused_at: while the topic is paused or starting, nothing from this sequence on is handed to channels.
        meta: of its topic.
        headers_from: of an extended topic: messages below this sequence were stored before it had headers, without
            room for them.
        is_handed_over: another node goes on with it, and says what becomes of what was published.
        is_open: it takes what is published like the message before: it is neither deleted nor held.
        prefix: what a stored body begins with that has neither trace id nor headers; None on a plain topic.
        write_error: why the last turn with publishes was not stored; None when it was.
        events: who wants to know what is published, if anybody does.
        bounds: of its topic, if it has any.
        delayed: what was published with a delay since the process started, as far as some channel is behind it.
        due_times: of what is in the log, on the clock of due times.
        is_unwaited: what is published and nobody waits for needs no sync, whatever the node's policy.
        producers: who publishes with sequences; None before the first.
        written: groups that are in the log and not committed.
        written_weight: what the last :meth:`write_pending` cost.
        failed_count: publishes that could not be stored since the process started.
        watermark: nothing at or beyond this sequence is committed, whatever else is true of it; None for no such limit.
    """

    __slots__ = ("_group", "_groups", "_hold_count", "_meta", "_open", "_open_due_ns", "adopted", "backlog_start",
                 "bounds", "bytes_count", "channels", "counted_from", "delayed", "due_times", "durable_floor",
                 "events", "failed_count", "headers_from", "is_deleted", "is_handed_over", "is_open", "is_unwaited",
                 "log", "number", "paused_at", "prefix", "producers", "topic_name", "watermark", "write_error",
                 "written", "written_weight")  # fmt: skip

    def __init__(
        self, topic_name: str, number: int, log: PartitionLog | MemoryLog, notes: DelayedNotes | None = None
    ) -> None:
        self.topic_name = topic_name
        self.number = number
        self.log = log
        self.channels: dict[str, Channel] = {}
        self.backlog_start = log.start_sequence
        self.paused_at: int | None = None
        self._meta = PLAIN
        self.prefix: bytes | None = None
        self.is_deleted = False
        self.is_handed_over = False
        self.counted_from = log.next_sequence
        self.bytes_count = 0
        self.failed_count = 0
        self.durable_floor = log.start_sequence
        self._groups: deque[PublishGroup] = deque()  # oldest first
        self.written: deque[PublishGroup] = deque()  # oldest first
        self._group: PublishGroup | None = None  # the last of them while publishes may still join it
        self._open: list[bytes] | None = None  # the last of pending while publishes may still be merged into it
        self._open_due_ns = 0
        self.write_error: StorageError | None = None
        self.events: PartitionEvents | None = None
        self.bounds: Bounds | None = None
        notes = notes or DelayedNotes()
        self.delayed = DelayedAhead(notes)
        self.due_times = DueTimes(notes)
        self.is_unwaited = False
        self.headers_from = 0
        self._hold_count = 0
        self.is_open = True
        self.producers: Producers[PublishGroup] | None = None
        self.written_weight = 0
        self.watermark: int | None = None
        self.adopted: PublishGroup | None = None

    @property
    def meta(self) -> TopicMeta:
        return self._meta

    @meta.setter
    def meta(self, meta: TopicMeta) -> None:
        self._meta = meta
        self.log.layout = (RAW_IDS if meta.has_raw_ids else 0) | (EXTENDED if meta.extend_support else 0)
        if isinstance(self.log, PartitionLog):
            self.log.expect_layout(self.log.layout)
        prefix = (bytes(TRACE_ID_SIZE) if meta.has_raw_ids else b"") + (EMPTY_HEADERS if meta.extend_support else b"")
        self.prefix = prefix or None

    def add_headers(self, meta: TopicMeta) -> None:
        """Let messages have headers from the next one that is written on.

        What has been published and is not written has none, which it says from now on.

        Args:
            meta: what the topic becomes.
        """
        at = TRACE_ID_SIZE if meta.has_raw_ids else 0
        for group in self._groups:
            is_begun = group.first_sequence >= 0
            group.longer_from = self.log.next_sequence - group.first_sequence if is_begun else 0
            group.pending = deque(
                (
                    due_ns,
                    [body[:at] + EMPTY_HEADERS + body[at:] for body in bodies],
                    size + len(bodies) if size >= 0 else size,
                )
                for due_ns, bodies, size in group.pending
            )
        self._group = self._open = None
        self.headers_from = self.log.next_sequence
        self.meta = meta

    def has_headers(self, sequence: int) -> bool:
        """Whether a message was stored with room for headers, so that its body begins behind them."""
        return self._meta.extend_support and sequence >= self.headers_from

    @property
    def is_held(self) -> bool:
        """Whether nothing is written for now: what is published waits."""
        return self._hold_count > 0

    def hold(self) -> None:
        """Write nothing from the next :meth:`write_pending` on, until :meth:`release` was called as often as this."""
        self._hold_count += 1
        self.is_open = False

    def release(self) -> None:
        """Write again what is published, if nobody else holds it."""
        assert self._hold_count, "it is held"
        self._hold_count -= 1
        self.is_open = not self._hold_count and not self.is_deleted

    def hold_like(self, other: Partition) -> None:
        """Be held as often as another partition of the topic, of which all are held together."""
        self._hold_count = other._hold_count
        self.is_open = other.is_open

    @property
    def is_writable(self) -> bool:
        """Whether what is published is written with the turn; else it waits, and takes memory."""
        return self.log.is_created and not self.is_held

    def publish(self, bodies: Sequence[bytes], due_ns: int, is_stored_form: bool = False) -> PublishGroup:
        """Take messages for the end of the turn; the answer ends when they are stored.

        Args:
            due_ns: the clock of due times before which they are not delivered, 0 for at once.
            is_stored_form: bodies have their trace ids and headers where the topic has them, see batch.py.
        """
        if self.prefix is not None and not is_stored_form:
            bodies = [self.prefix + body for body in bodies]
        group = self._group
        if group is None or group.weight > _TURN_WEIGHT:
            group = self._group = PublishGroup(self)
            self._groups.append(group)
            self._open = None
        if self.events is not None:
            self.events.publishing(group, len(bodies), is_stored_form)
        size = sum(map(len, bodies))
        if self.prefix is not None:
            self._count(group, len(bodies), size)
        if self._open is not None and self._open_due_ns == due_ns and len(bodies) < _MERGE_COUNT_MAX:
            self._open.extend(bodies)
            group.weight += size
            return group
        group.weight += size + _APPEND_WEIGHT
        if size > _BATCH_BODIES_BYTES_MAX or len(bodies) > BATCH_COUNT_MAX:
            group.pending += [(due_ns, part, sum(map(len, part))) for part in _parts(bodies)]
            self._open = None
        elif len(bodies) >= _MERGE_COUNT_MAX:
            group.pending.append((due_ns, bodies, size))
            self._open = None
        else:
            self._open, self._open_due_ns = list(bodies), due_ns
            group.pending.append((due_ns, self._open, -1))
        return group

    def publish_once(
        self,
        producer_id: bytes,
        sequence: int,
        bodies: Sequence[bytes],
        due_ns: int = 0,
        is_stored_form: bool = False,
    ) -> PublishGroup:
        """As :meth:`publish`, of a producer that counts its messages: what it published before is not stored again.

        Args:
            sequence: that it gave the first of ``bodies``.

        Returns:
            What ends when all of them are stored; it has ended when they are.

        Raises:
            SequenceGap: it left out a sequence; nothing is stored.
            TopicFull: there is no room for them.
        """
        if self.log.failed is not None:  # not even of what is in it is known whether it would survive
            group = PublishGroup(self)
            group.end(PartitionFailed(self.topic_name, self.log.failed))
            return group
        if self.producers is None:
            self.producers = Producers(self.log)
        producers = self.producers
        end = sequence + len(bodies)
        ranges = producers.new_ranges(producer_id, sequence, end)
        if not ranges:
            carrier = producers.carrier_of(producer_id, sequence, end)
            if carrier is None and self.adopted is not None and not self.adopted.ended:
                carrier = self.adopted  # it may be among those, and they may yet be cut off
            if carrier is None:
                carrier = PublishGroup(self)
                carrier.end(None)
            return carrier
        is_whole = ranges[0] == (sequence, end)
        parts = [bodies] if is_whole else [bodies[start - sequence : stop - sequence] for start, stop in ranges]
        if self.bounds is not None:
            self.bounds.admit(self, bodies)
        self._group = self._open = None  # it ends on its own
        group = PublishGroup(self)
        self._groups.append(group)
        group.once = producers.begin(producer_id, ranges, group)
        if self.events is not None:
            self.events.publishing(group, sum(map(len, parts)), is_stored_form)
        for part in parts:
            if self.prefix is not None and not is_stored_form:
                part = [self.prefix + body for body in part]
            size = sum(map(len, part))
            if self.prefix is not None:
                self._count(group, len(part), size)
            group.weight += size + _APPEND_WEIGHT
            group.pending.append((due_ns, part, size))
        return group

    def has_published(self, producer_id: bytes, sequence: int) -> bool:
        """Whether a message of a producer is a duplicate."""
        last = (self.producers or Producers(self.log)).last(producer_id)
        return last is not None and sequence <= last

    def published_by(self, prefix: bytes) -> dict[bytes, int]:
        """Return the last sequences taken of the producers whose ids begin with ``prefix``."""
        return (self.producers or Producers(self.log)).with_prefix(prefix)

    def _count(self, group: PublishGroup, count: int, size: int) -> None:
        overhead = FRAME_OVERHEAD_BYTES - (TRACE_ID_SIZE if self._meta.has_raw_ids else 0)
        group.message_count += count
        group.frame_bytes += size + count * overhead

    @property
    def has_pending(self) -> bool:
        """Whether there is something to write."""
        return bool(self._groups)

    @property
    def is_under_way(self) -> bool:
        """Whether something was published that is neither stored as the durability policy says nor failed."""
        return bool(self._groups) or self.log.next_sequence != self.log.committed_sequence

    @property
    def pending_weight(self) -> int:
        """The work left to :meth:`write_pending`, as the bytes whose writing costs about as much."""
        groups = self._groups
        return groups[0].weight if len(groups) == 1 else sum(group.weight for group in groups)

    def refuse(self, error: StorageError) -> None:
        """End what has been published, and take no more, because there will be no log."""
        self.is_deleted, self.is_open = True, False
        self.end_pending(error)

    def end_pending(self, error: StorageError | None) -> None:
        """End what has been published and not written."""
        groups, self._groups = self._groups, deque()
        self._group = self._open = None
        for group in groups:
            group.end(error)

    def join(self, body: bytes) -> PublishGroup | None:
        """Add a message without delay to the last publish of this turn; None when there is none that it can join."""
        group = self._group
        if self._open is None or self._open_due_ns or group is None:
            return None
        if self.prefix is not None:
            body = self.prefix + body
            self._count(group, 1, len(body))
        self._open.append(body)
        return group

    def take_over(self) -> None:
        """Take publishes from now on, behind batches of another node; only the watermark commits these and those."""
        log = self.log
        self.watermark = log.committed_sequence
        if log.committed_sequence < log.next_sequence:
            group = self.adopted = PublishGroup(self)
            group.first_sequence, group.end_sequence = log.committed_sequence, log.next_sequence
            self.written.append(group)

    def hand_over(self, error: BaseException, unwritten: BaseException | None = None) -> list[PublishGroup]:
        """Take no more publishes, and leave the log alone: another node goes on with it.

        Args:
            error: what those are told whose publishes are not committed; they may be stored all the same.
            unwritten: what those are told of whose publishes nothing was written, and whether what was written is
                stored can be found out. None: ``error`` is told to all.

        Returns:
            with ``unwritten``, what was written and is not committed; nobody is told of that yet.
        """
        self.is_deleted, self.is_open = True, False
        self.is_handed_over = True
        kept = [] if unwritten is None else [group for group in self.written if not group.ended]
        groups, self._groups = [*([] if kept else self.written), *self._groups], deque()
        self.written.clear()
        self._group = self._open = None
        self.delayed.clear()
        defect: Exception | None = None
        for group in groups:
            group.pending.clear()
            try:
                group.end(error if unwritten is None or group.first_sequence >= 0 else unwritten)
            except Exception as failure:  # noqa: BLE001 - raised below, when the others have been told
                defect = defect or failure
        if defect is not None:
            raise defect
        return kept

    def delete(self) -> None:
        """Close the log for good; publishes of this turn count as made before the deletion."""
        self.is_deleted, self.is_open = True, False
        self.end_pending(None)
        self.delayed.clear()
        self.log.close()

    def write_pending(self, wall_ns: int, weight_max: int = 1 << 62) -> PublishGroup | None:
        """Append what the oldest group gathered, or a part of it; a failure ends the group at once.

        Args:
            weight_max: after so much the rest is left to the next call, but something is always written.

        Returns:
            What has been written as a whole and not ended; None when there is nothing.
        """
        self.written_weight = 0
        while self._groups and self._groups[0].ended:
            self._groups.popleft()  # it failed with one before it
        if not self._groups:
            return None
        group = self._groups[0]
        if group is self._group:
            self._group = self._open = None  # what is published from now on is not to keep it from ending
        if group.first_sequence < 0:
            group.first_sequence, group.first_offset = self.log.next_sequence, self.log.end_offset_bytes
        self.write_error = None
        try:
            while group.pending:
                if self.written_weight and self.written_weight + max(0, group.pending[0][2]) > weight_max:
                    group.weight -= self.written_weight
                    return None
                self._append(*group.pending.popleft(), wall_ns, group.once)
        except StorageError as error:
            self._groups.popleft()
            self.failed_count += max(1, len(group.waiters))
            self.write_error = error
            group.end(error)
            if self.log.next_sequence == group.first_sequence:
                return None
            # a restart would bring what was stored to light: it is delivered, though nobody was promised it
            once = group.once
            group = PublishGroup(self)
            if once is not None:
                once.keep_written(group)
        else:
            self._groups.popleft()
        group.end_sequence = self.log.next_sequence
        self.written.append(group)
        return group

    @property
    def storable_end(self) -> int:
        """The sequence up to which the log could be committed: the first that waits for something, or the watermark."""
        end: int = self.log.committed_sequence
        for group in self.written:
            if group.conditions and not group.ended:
                break
            end = group.end_sequence
        return end if self.watermark is None else self._below_watermark(self.watermark, end)

    def _below_watermark(self, watermark: int, end: int) -> int:
        is_writing = bool(self._groups) and self._groups[0].first_sequence >= 0
        if not self.written and not is_writing:
            end = self.log.next_sequence  # batches of another log, which nobody here has published
        return min(end, watermark)

    def commit_through(self, end: int) -> None:
        """Let consumers see everything below ``end``, and answer those who published it.

        What a listener or a waiter fails with is raised behind the last of them.

        Args:
            end: sequence up to which everything is stored as the durability policy says, the end exclusive.
        """
        self.log.advance_committed(end)
        written = self.written
        defect: Exception | None = None
        while written and (written[0].ended or written[0].end_sequence <= end):
            group = written.popleft()
            if group.ended:
                continue  # it failed
            try:
                try:
                    if self.events is not None:
                        self.events.published(group)
                finally:
                    group.end(None)
            except Exception as failure:  # noqa: BLE001 - raised below, when the others have been told
                defect = defect or failure
        if defect is not None:
            raise defect

    def cut_back_to(self, sequence: int, error: StorageError) -> None:
        """The log is to end before ``sequence``, which is not below what is committed: forget what goes.

        Args:
            error: what those are told who published it; it may still be stored elsewhere.
        """
        groups = [group for group in self.written if group.end_sequence > sequence]
        groups += [group for group in self._groups if group.first_sequence >= 0]
        self._group = self._open = None
        self.backlog_start = min(self.backlog_start, sequence)
        self.durable_floor = min(self.durable_floor, sequence)
        self.counted_from = min(self.counted_from, sequence)
        self.headers_from = min(self.headers_from, sequence)
        if self.paused_at is not None:
            self.paused_at = min(self.paused_at, sequence)
        self.delayed.forget_from(sequence)
        for channel in self.channels.values():
            channel.cut_back_to(sequence)
        for group in groups:
            if group.once is not None:
                group.once.forget_written()
            group.pending.clear()
            group.end(error)

    def forget_written(self) -> None:
        """Drop the groups that have failed: their sequences may be others' now."""
        self.written = deque(group for group in self.written if not group.ended)

    def _append(self, due_ns: int, bodies: Sequence[bytes], size: int, wall_ns: int, once: Once | None) -> None:
        if size < 0:
            size = sum(map(len, bodies))
        fits = size <= _BATCH_BODIES_BYTES_MAX and len(bodies) <= BATCH_COUNT_MAX
        for part in (bodies,) if fits else _parts(bodies):  # many small publishes may have grown into too much
            stored_due_ns = self.due_times.to_store(due_ns, self.log.next_sequence)
            if once is None:
                self.log.append(part, wall_ns, stored_due_ns)
            else:
                once.append(self.log, part, wall_ns, stored_due_ns)
            if due_ns:
                self._note_delayed(len(part), due_ns)
        self.bytes_count += size - (len(self.prefix) * len(bodies) if self.prefix is not None else 0)
        self.written_weight += size + _APPEND_WEIGHT

    def _note_delayed(self, count: int, due_ns: int) -> None:
        delayed = self.delayed
        if delayed.wants_cleaning:
            delayed.forget_below(min((channel.next for channel in self.channels.values()), default=self.backlog_start))
        end = self.log.next_sequence
        delayed.add(end - count, end, due_ns)

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
    ends = list(accumulate(map(len, bodies)))
    start = size = 0
    while start < len(bodies):
        end = bisect_right(ends, size + _BATCH_BODIES_BYTES_MAX, start, min(len(bodies), start + BATCH_COUNT_MAX))
        end = max(end, start + 1)
        yield bodies[start:end]
        start, size = end, ends[end - 1]
