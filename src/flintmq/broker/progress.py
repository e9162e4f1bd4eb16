"""The flush: what all channels got to, as one transaction that a worker thread runs.

:meth:`Progress.take` collects it on the loop, :meth:`Flush.run` writes it and reads what comes due,
:meth:`Progress.ended` takes note. A flush that failed is part of the next one.

Rules of this file: one flush at a time; :meth:`Flush.run` is all that runs off the loop, on data made for it.

Source: docs/decisions/0003.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from flintmq.broker.channel import Channel
from flintmq.broker.channels import Channels
from flintmq.broker.log_marks import LogMarks, Marks
from flintmq.broker.metadata import Metadata, MetadataBatch, Waiter
from flintmq.broker.partition import Partition
from flintmq.broker.spilled import LOOKAHEAD_NS, Changes
from flintmq.errors import StorageError
from flintmq.storage import ChannelStore, Files, channel_store, packs
from flintmq.storage.records import PutLog, PutProgress, PutSpilled, Record, ShiftDueTimes, ShiftSpilled


@dataclass(slots=True)
class DueQuery:
    """Spilled messages that come due, to be read after the flush.

    Attributes:
        wall_ns: when it was asked.
        bytes_max: how much there is room for.
    """

    channel: Channel
    cursor: int
    after: tuple[int, int]
    generation: int
    wall_ns: int
    bytes_max: int

    def run(self, store: ChannelStore, wall_ns: int, shift_ns: int) -> packs.DuePacks:
        """Read them; blocks.

        Args:
            shift_ns: what due times on disk have more.
        """
        after = (self.after[0] + shift_ns, self.after[1])
        found = store.due(self.cursor, after, wall_ns + LOOKAHEAD_NS + shift_ns, self.bytes_max)
        if shift_ns:
            found.shift(-shift_ns)
        return found


@dataclass(slots=True)
class Question:
    """Something that only the database knows, with everything in it that was so when it was asked.

    Attributes:
        read: asks it, off the loop.
        then: told the answer, or why there is none.
    """

    Then = Callable[[Any, BaseException | None], None]

    read: Callable[[ChannelStore], Any]
    then: Then
    answer: Any = None
    error: BaseException | None = None

    def ask(self, store: ChannelStore) -> None:
        """Have it read; what goes wrong is kept."""
        try:
            self.answer = self.read(store)
        except StorageError as error:
            self.error = error


@dataclass(slots=True)
class Flush:
    """One transaction of progress, and what to do when it fails.

    Attributes:
        metadata: of topics and channels; its statements come first.
        records: all that it says of topics, partitions and channels, by names.
        statements: to run in order.
        due: queries to run after it.
        must_sync: whether it has to survive a power loss, whatever the policy is.
        clock_shift_ns: what is added to due times on their way to the disk.
        changes: of spilled messages, taken, to be given back on failure.
        floors: the floor of each partition as written.
        marks: how far logs are, as written.
        has_progress: whether it has anything but that.
        has_room_left: told by its run, whether the database has more room to give back to the disk.
    """

    metadata: MetadataBatch = field(default_factory=MetadataBatch)
    records: list[Record] = field(default_factory=list)
    statements: list[channel_store.Statement] = field(default_factory=list)
    due: list[DueQuery] = field(default_factory=list)
    must_sync: bool = False
    clock_shift_ns: int = 0
    changes: list[tuple[Channel, Changes]] = field(default_factory=list)
    floors: list[tuple[Partition, int]] = field(default_factory=list)
    removals: list[str] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    marks: Marks = field(default_factory=list)
    has_progress: bool = True
    has_room_left: bool = False

    def add(self, record: Record, cursor: int = 0) -> None:
        """Have a record written.

        Args:
            cursor: the number of the channel's cursor, when it is about one.
        """
        self.records.append(record)
        self.statements += record.statements(cursor)

    @property
    def has_metadata(self) -> bool:
        """Whether it changes topics, channels or settings."""
        return bool(self.metadata.statements)

    def run(self, store: ChannelStore, files: Files, wall_ns: int, sync: bool) -> list[packs.DuePacks]:
        """Write it and read what is due; blocks."""
        if self.statements:
            # how far logs are is worth no sync of its own
            store.run_transaction(self.statements, (sync and self.has_progress) or self.must_sync)
        for path in self.removals:
            files.remove_directory(path)
        answers = [query.run(store, wall_ns, self.clock_shift_ns) for query in self.due]
        for question in self.questions:
            question.ask(store)
        with suppress(StorageError):  # what was written is, and the next flush tries this again
            self.has_room_left = store.give_back(is_busy=bool(self.due))
        return answers


class FlushOutcome(Protocol):
    """The one who acts on what a flush brought."""

    def mark(self, channel: Channel) -> None:
        """Look at this channel at the end of the turn."""

    def pack_damaged(self, channel: Channel, stored: packs.StoredPack) -> None:
        """Act on spilled messages that cannot be read any more."""

    def floor_written(self, partition: Partition, wall_ns: int) -> None:
        """Drop what lies below a partition's durable floor."""

    def on_defect(self, what: str, error: Exception) -> None:
        """Act on something that failed and that nobody expected."""


class Progress:
    """Owner of the flush.

    Args:
        outcome: acts on what a flush brought.

    Attributes:
        has_more_due: whether the last flush found more messages that are due than it read.
        clock_shift_ns: what is added to due times on their way to the disk.
        hand_on: given what a flush has written, and whom to tell when other nodes have it; None: nobody wants it.
    """

    __slots__ = ("_channels", "_has_room_left", "_marks", "_metadata", "_outcome", "_questions", "_removals",
                 "_running", "clock_shift_ns", "hand_on", "has_more_due")  # fmt: skip

    def __init__(self, channels: Channels, metadata: Metadata, marks: LogMarks, outcome: FlushOutcome) -> None:
        self._channels = channels
        self._metadata = metadata
        self._marks = marks
        self._outcome = outcome
        self._questions: list[Question] = []
        self._removals: list[str] = []
        self._running: Flush | None = None
        self._has_room_left = False
        self.hand_on: Callable[[list[Record], Waiter], None] | None = None
        self.has_more_due = False
        self.clock_shift_ns = 0

    def ask(self, question: Question) -> None:
        """Have the database asked behind everything that is so now."""
        self._questions.append(question)

    def remove_later(self, path: str) -> None:
        """Have a directory removed behind everything that is so now."""
        self._removals.append(path)

    def has_some(self, wall_ns: int) -> bool:
        """Whether :meth:`take` would have something; cheap enough for every tick."""
        if self._metadata or self._removals or self._questions or self._marks.grown or self._has_room_left:
            return True
        return any(
            c.is_changed or c.spilled.has_changes or c.spilled.wants_due(wall_ns) for c in self._channels.changed
        )

    def clock_moved(self, shift_ns: int) -> None:
        """The wall clock was set: rewrite due times on disk, so that a restart keeps the delays that are left.

        Args:
            shift_ns: wall time minus the clock of due times.
        """
        moved_ns = shift_ns - self.clock_shift_ns
        if self.hand_on is None:
            self._metadata.put(ShiftDueTimes(moved_ns))
        else:  # what is here of other nodes' channels is moved by these
            for channel in self._channels:
                cursor, partition = self._channels.cursor(channel), self._channels.partition(channel)
                where = partition.topic_name, partition.number, channel.name
                self._metadata.put(ShiftSpilled(*where, moved_ns), cursor)
        self.clock_shift_ns = shift_ns
        self._channels.note_all_changed()

    def take(self, wall_ns: int) -> Flush:
        """Collect all progress since the last flush; the caller runs it and then calls :meth:`ended`."""
        channels = self._channels
        metadata = self._metadata.take()
        channels.is_urgent = False
        flush = Flush(metadata, [*metadata.records], [*metadata.statements], clock_shift_ns=self.clock_shift_ns)
        flush.removals, self._removals = self._removals, []
        flush.must_sync = metadata.must_sync or bool(flush.removals)  # else rows of what is gone might come back
        flush.questions, self._questions = self._questions, []
        partitions: dict[Partition, None] = {}
        for channel in list(channels.changed):
            self._take_channel(flush, channel, wall_ns, partitions)
        flush.floors = [(partition, partition.floor) for partition in partitions]
        flush.has_progress = bool(flush.statements)
        flush.marks = self._marks.take()
        if flush.marks:
            logs = [(partition.topic_name, partition.number, mark) for partition, mark in flush.marks]
            flush.records += [PutLog(topic, n, mark.log_id, mark.synced, mark.written) for topic, n, mark in logs]
            flush.statements.append(channel_store.put_logs(logs))  # one for all: there may be thousands
        self._running = flush
        loaded_count = sum(channel.spilled.has_loaded for channel in channels.changed)
        channels.shares.divide(loaded_count, sum(bool(changes.packs) for _, changes in flush.changes))
        return flush

    def _take_channel(self, flush: Flush, channel: Channel, wall_ns: int, partitions: dict[Partition, None]) -> None:
        channels, spilled = self._channels, channel.spilled
        cursor, partition = channels.cursor(channel), channels.partition(channel)
        changes = spilled.take_changes(wall_ns)
        if changes:
            channel.mark_changed()  # its row says how many are spilled
            flush.changes.append((channel, changes))
            where = partition.topic_name, partition.number, channel.name
            flush.add(spilled_record(*where, changes, self.clock_shift_ns), cursor)
            if changes.cleared_from is not None:
                flush.questions.append(count_spilled(channel, cursor))
        if channel.take_changed():
            partitions[partition] = None
            if channels.is_durable(channel):
                count = channel_store.UNKNOWN_COUNT if changes.cleared_from is not None else spilled.count
                flush.add(progress_record(channel, partition, self.clock_shift_ns, count), cursor)
        if spilled.wants_due(wall_ns):
            query = (spilled.loaded_through, spilled.generation, wall_ns, spilled.room_bytes)
            flush.due.append(DueQuery(channel, cursor, *query))
        elif spilled.next_due_ns is None:
            del channels.changed[channel]

    def ended(self, flush: Flush, answers: list[packs.DuePacks], error: BaseException | None, wall_ns: int) -> None:
        """Take note of a flush: on failure everything in it is tried again with the next one."""
        self._running = None
        self._has_room_left = flush.has_room_left
        self._metadata.ended(flush.metadata, error, flush.must_sync)
        if error is not None:
            self._failed(flush)
        else:
            self._written(flush, answers, wall_ns)
        is_handed_on = error is None and self._hand_on(flush)
        for question in flush.questions:
            try:
                question.then(question.answer, error or question.error)
            except Exception as defect:  # noqa: BLE001 - on_defect tells it; the others are told
                self._outcome.on_defect("telling what the database answered", defect)
        self._tell(flush.metadata.local, error)
        if not is_handed_on:
            self._tell(flush.metadata.waiters, error)

    def _tell(self, waiters: Iterable[Waiter], error: BaseException | None) -> None:
        for waiter in waiters:
            try:
                waiter(error)
            except Exception as defect:  # noqa: BLE001 - on_defect tells it; the others are told
                self._outcome.on_defect("telling that a change is stored", defect)

    def _hand_on(self, flush: Flush) -> bool:
        """Give what was written to who wants it; whether the waiters are told then."""
        if self.hand_on is None or not flush.records:
            return False
        batch = flush.metadata
        waiting = [True]

        def ended(error: BaseException | None) -> None:
            if waiting:
                waiting.clear()
                self._metadata.handed_on(batch)
                self._tell(batch.waiters, error)

        self._metadata.handing_on(batch)
        try:
            self.hand_on(flush.records, ended)
        except Exception as defect:  # noqa: BLE001 - on_defect tells it; nobody waits for it
            self._outcome.on_defect("handing on what is written", defect)
            ended(defect)
        return True

    def release(self, channel: Channel) -> None:
        """Have written, with the metadata, all that there is of a channel, which is not asked again."""
        channels, spilled = self._channels, channel.spilled
        if self._running is not None:
            for taken in [each for each in self._running.changes if each[0] is channel]:
                self._running.changes.remove(taken)
                spilled.restore_changes(taken[1])  # whether they will have been written is not known
        changes = spilled.take_changes()
        cursor, partition = channels.cursor(channel), channels.partition(channel)
        count = channel_store.UNKNOWN_COUNT if changes.cleared_from is not None else spilled.count
        where = partition.topic_name, partition.number, channel.name
        if changes:
            self._metadata.put(spilled_record(*where, changes, self.clock_shift_ns), cursor)
        self._metadata.put(progress_record(channel, partition, self.clock_shift_ns, count), cursor)

    def _failed(self, flush: Flush) -> None:
        self._removals = flush.removals + self._removals
        self._marks.ended(flush.marks, is_written=False)
        for channel, changes in flush.changes:
            channel.spilled.restore_changes(changes)
        self._channels.note_all_changed()

    def _written(self, flush: Flush, answers: Iterable[packs.DuePacks], wall_ns: int) -> None:
        channels, outcome = self._channels, self._outcome
        for channel, changes in flush.changes:
            if channel in channels:
                outcome.mark(channel)
                if changes.cleared_from is not None:
                    channels.note_changed(channel)  # its row is to say how many are left
        self.has_more_due = False
        for query, read in zip(flush.due, answers, strict=True):
            channel = query.channel
            is_current = channel in channels and query.generation == channel.spilled.generation
            channel.spilled.accept_due(read, query.generation, query.wall_ns)
            for damaged in read.damaged if is_current else ():
                outcome.pack_damaged(channel, damaged)
            if channel in channels:
                self.has_more_due |= channel.spilled.wants_due(query.wall_ns)
                outcome.mark(channel)
        self._marks.ended(flush.marks, is_written=True)
        for partition, floor in flush.floors:
            partition.durable_floor = floor
            outcome.floor_written(partition, wall_ns)


def spilled_record(topic: str, partition: int, channel: str, changes: Changes, shift_ns: int) -> PutSpilled:
    """Build the record of what has changed of the spilled messages of one channel.

    Args:
        shift_ns: added to due times.
    """
    new = [packs.encoded_pack(each, shift_ns) for each in changes.packs]
    return PutSpilled(topic, partition, channel, changes.cleared_from, new, changes.done, [*changes.gone])


def progress_record(channel: Channel, partition: Partition, shift_ns: int, spilled_count: int) -> PutProgress:
    """Build the record of how far a channel is.

    Args:
        shift_ns: added to due times.
        spilled_count: how many of its messages are spilled; ``UNKNOWN_COUNT`` when only the database knows.
    """
    state = channel.state()
    deferred = [(sequence, due_ns + shift_ns) for sequence, due_ns in state.deferred]
    where = partition.topic_name, partition.number, channel.name
    return PutProgress(*where, state.floor, state.window, deferred, state.attempts, state.holes, spilled_count)


def count_spilled(channel: Channel, cursor: int) -> Question:
    """Have the messages counted that are still spilled, behind a flush that forgets some of them."""
    spilled = channel.spilled
    believed, generation = spilled.count, spilled.generation

    def then(count: Any, error: BaseException | None) -> None:
        if error is None and spilled.generation == generation:
            spilled.count += count - believed  # it went on counting meanwhile

    return Question(lambda store: store.spilled_count(cursor), then)
