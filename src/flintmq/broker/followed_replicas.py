"""Replicas that other nodes lead: writes what the leader sends, its batches and how far its channels are.

    append, cut_back, start_over ─► the log            a cut waits until the database knows, and runs behind a flush
    stage, apply                 ─► rows, with the next flush, and with them how much of the progress that is
    keep_floors                  ─► the file of floors, at once

Rules of this file: no clock; every method is called on the loop; ``done`` is called once: with None when what was asked
for survives a power loss, or with why it does not.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from flintmq.batch import BatchError, BatchHeader, decode_header
from flintmq.broker.channels import Channels
from flintmq.broker.log_marks import LogMarks
from flintmq.broker.metadata import Metadata, Waiter
from flintmq.broker.progress import Progress, Question
from flintmq.broker.publishes import Publishes
from flintmq.broker.replica import Replica, described
from flintmq.broker.replica_rows import KeptFloors
from flintmq.errors import StorageError
from flintmq.limits import SEQUENCE_MAX
from flintmq.storage import ChannelStore
from flintmq.storage.records import (
    DeleteTopic,
    PutChannel,
    PutLog,
    PutSettings,
    PutSpilled,
    PutTopic,
    PutTopicMeta,
    Record,
    ShiftDueTimes,
)

_CHANGES_MAX = 8  # logs that are cut back, or start over, behind one flush: others wait for it


class _Change:
    """A log that is to be cut back, or to start over.

    Args:
        before: history and end of the rows, if it cannot be.
        change: does it; blocks.
        is_whole: nothing is left of the log then.
    """

    __slots__ = ("_change", "before", "done", "has_run", "is_whole", "replica")

    def __init__(
        self,
        replica: Replica,
        before: tuple[list[tuple[int, int]], int],
        change: Callable[[], None],
        done: Waiter,
        is_whole: bool,
    ) -> None:
        self.replica = replica
        self.before = before
        self.done = done
        self.is_whole = is_whole
        self.has_run = False
        self._change = change

    def run(self, _store: ChannelStore) -> None:
        """Change the log, in a worker thread."""
        self.has_run = True
        try:
            self._change()
        except ValueError as error:
            raise StorageError(str(error)) from error


class FollowedReplicas:
    """Writes to replicas that other nodes lead."""

    def __init__(
        self,
        channels: Channels,
        metadata: Metadata,
        marks: LogMarks,
        progress: Progress,
        publishes: Publishes,
        kept: KeptFloors,
    ) -> None:
        self._channels = channels
        self._metadata = metadata
        self._marks = marks
        self._progress = progress
        self._publishes = publishes
        self._kept = kept
        self._changes: deque[_Change] = deque()
        self._changing_count = 0

    # -- the log -------------------------------------------------------------------------------------------------

    def append(self, replica: Replica, data: bytes | memoryview, after_gap: bool = False) -> int:
        """Write whole batches of the leader's log, byte for byte; the end of the log then.

        Those before one that is refused are written. An epoch that the log has had nothing of is noted in the history.

        Args:
            after_gap: the leader has nothing between the end of this log and the first batch; see
                :meth:`flintmq.storage.PartitionLog.append_batch`.

        Raises:
            StorageError: it cannot be written; or something else is being done with the replica.
            BatchError: the bytes are damaged, or no whole batches.
            ValueError: they do not follow what the log ends with, or their epoch is none that may come; or the
                partition is led here.
        """
        replica.check_followed()
        log, batches = replica.log, memoryview(data)
        begin = position = 0
        run: list[BatchHeader] = []  # batches of one epoch, that are written together
        refused: BatchError | ValueError | None = None
        self._marks.grown[replica] = None
        try:
            while position < len(batches):
                try:
                    header = self._checked(replica, batches, position, run[-1].epoch if run else replica.last_epoch)
                except (BatchError, ValueError) as error:
                    refused = error
                    break
                if run and (header.epoch != run[0].epoch or after_gap):
                    self._append_run(replica, batches[begin:position], run, after_gap)
                    begin, run, after_gap = position, [], False
                run.append(header)
                position += header.size
            if run:
                self._append_run(replica, batches[begin:position], run, after_gap)
            if refused is not None:
                raise refused
        finally:
            if log.producers.is_snapshot_due:
                self._publishes.snapshots_due[log] = None
        return log.next_sequence

    def _checked(self, replica: Replica, batches: memoryview, position: int, last: int) -> BatchHeader:
        """Read the header of a batch that is whole, and of an epoch that may come behind ``last``."""
        header = decode_header(batches, position)
        if position + header.size > len(batches):
            raise BatchError(f"cut short: {len(batches) - position} of {header.size} bytes")
        if not last <= header.epoch <= replica.epoch:
            raise ValueError(
                f"{replica.describe()}: a batch of epoch {header.epoch}: "
                f"epochs from {max(last, 0)} to {replica.epoch} may come"
            )
        return header

    def _append_run(self, replica: Replica, batches: memoryview, run: list[BatchHeader], after_gap: bool) -> None:
        log, first, epoch = replica.log, run[0].first_sequence, run[0].epoch
        try:
            if len(run) == 1:
                log.append_batch(batches, after_gap, run[0])
            else:
                log.append_batches(batches, run)
        finally:
            if log.next_sequence > first and epoch > replica.last_epoch:
                replica.enter(epoch, first)
                replica.put(must_sync=False)

    def cut_back(self, replica: Replica, sequence: int, done: Waiter) -> None:
        """Let the log end before ``sequence``, where its leader's goes on otherwise; and its history: an epoch that
        began there, and has no batch, goes also when nothing else does.

        It is done in the thread of the flush, and nothing can be done with the replica before ``done``. A crash leaves
        it as it was or as it is to be.

        Args:
            sequence: as for :meth:`flintmq.storage.PartitionLog.cut_back_to`.

        Raises:
            ValueError, StorageError: as :meth:`flintmq.storage.PartitionLog.check_cut` says; nothing has changed.
        """
        replica.check_followed()
        replica.rows.limit_floors(sequence)
        history = [(epoch, first) for epoch, first in replica.history if first < sequence]
        if replica.lost_from and sequence <= replica.lost_from:
            replica.log.uncommit(sequence)
        if replica.log.check_cut(sequence) is None:
            if history == replica.history:
                done(None)
            else:
                self._cut_history(replica, history, done)
            return
        cut = partial(replica.log.cut_back_to, sequence)
        self._change_log(replica, "its log is being cut back", sequence, history, cut, done)

    def _cut_history(self, replica: Replica, history: list[tuple[int, int]], done: Waiter) -> None:
        """Forget epochs that have no batch, before there is another one's in their place: the next start, which finds
        them in the database, would take that for theirs.
        """
        replica.begin("its history is being cut back")
        before, replica.history = replica.history, history

        def written(error: BaseException | None) -> None:
            if error is not None:
                replica.history = before
            _ended(replica, done, error)

        replica.put()
        self._metadata.wait_here(written)

    def start_over(self, replica: Replica, sequence: int, offset_bytes: int, done: Waiter) -> None:
        """Let go of the log's batches: it begins with ``sequence``, where its leader's does, and is empty.

        Of its progress, the whole state has to come again. As :meth:`cut_back` otherwise.

        Args:
            offset_bytes: virtual position of that message's frame.

        Raises:
            ValueError: there is no such sequence, or no such position.
            StorageError: the log takes nothing any more.
        """
        replica.check_followed()
        if not 0 < sequence <= SEQUENCE_MAX or offset_bytes < 0:
            raise ValueError(f"{replica.describe()}: no log begins with {sequence} at offset {offset_bytes}")
        if replica.log.failed is not None:
            raise StorageError(f"{replica.log.directory}: {replica.log.failed}")
        replica.rows.limit_floors(sequence)
        start_over = partial(replica.log.start_over, sequence, offset_bytes)
        self._change_log(replica, "its log starts over", sequence, [], start_over, done, is_whole=True)

    def _change_log(
        self,
        replica: Replica,
        work: str,
        sequence: int,
        history: list[tuple[int, int]],
        change: Callable[[], None],
        done: Waiter,
        is_whole: bool = False,
    ) -> None:
        """Change a log when the database knows: a start would take what is missing for lost."""
        replica.begin(work)
        before = replica.history, replica.rows_end
        replica.history = history
        replica.rows_end = min(sequence, replica.rows_end or sequence)
        self._marks.limit(replica, sequence)
        replica.put()
        if is_whole:
            replica.forget_progress()
        self._metadata.wait_here(partial(self._recorded_change, _Change(replica, before, change, done, is_whole)))

    def _recorded_change(self, change: _Change, error: BaseException | None) -> None:
        if error is not None:
            self._change_ended(change, error)
        elif change.replica.log.is_syncing:
            self._metadata.wait_here(partial(self._recorded_change, change))
        else:
            self._changes.append(change)
            self._begin_changes()

    def _begin_changes(self) -> None:
        """Have some logs changed behind the next flush, in its thread: it waits for the device."""
        while self._changes and self._changing_count < _CHANGES_MAX:
            change = self._changes.popleft()
            self._changing_count += 1
            change.replica.log.lend()
            self._progress.ask(Question(change.run, partial(self._changed, change)))
            self._channels.is_urgent = True

    def _changed(self, change: _Change, _answer: None, error: BaseException | None) -> None:
        self._changing_count -= 1
        change.replica.log.take_back()
        if not change.has_run:  # the flush failed before it
            self._changes.append(change)
        else:
            self._change_ended(change, error)
        self._begin_changes()

    def _change_ended(self, change: _Change, error: BaseException | None) -> None:
        replica = change.replica
        self._marks.limit(replica, None)
        if error is None:
            replica.lost_end_comes(is_whole=change.is_whole)
        elif replica.log.failed is None:
            replica.history, replica.rows_end = change.before
        _ended(replica, change.done, error)

    # -- progress ------------------------------------------------------------------------------------------------

    def apply(
        self,
        replica: Replica,
        position: tuple[int, int],
        records: Sequence[Record],
        is_whole: bool,
        done: Waiter,
    ) -> None:
        """Write what the leader's flushes say of the partition, with the next flush, and with it how far that is.

        What it says of its own log is left out. What it says of the topic is kept with this replica, see
        :mod:`flintmq.broker.replica`. It may be ahead of the log.

        Args:
            position: ``(epoch, n)`` of the records.
            is_whole: with what was staged they say all that there is: whatever was known before of the partition's
                channels is forgotten. Else they follow what was applied before.

        Raises:
            ValueError: they are of another partition, of an epoch that is over or was not noted, or do not follow; or
                the partition is led here. Nothing of them is written.
            StorageError: something else is being done with the replica; or a floor cannot be kept: nothing is written.
        """
        replica.check_followed()
        epoch, n = position
        if epoch != replica.epoch:
            raise ValueError(f"{replica.describe()}: progress of epoch {epoch}")
        if not is_whole and (epoch, n - 1) != replica.taken:
            raise ValueError(f"{replica.describe()}: progress {n} does not follow {replica.taken}")
        for record in records:
            number = getattr(record, "partition", replica.number)
            if (getattr(record, "topic", ""), number) != (replica.topic, replica.number):
                raise ValueError(f"{replica.describe()}: {type(record).__name__} is not of this partition")
        replica.rows.make_room(records)
        about = replica.about
        if is_whole:
            replica.rows.begin_anew({each.channel for each in records if isinstance(each, PutChannel)})
            about = msgspec.structs.replace(about, paused=False, headers_from=0, settings={}, is_progress_lost=False)
        for record in records:
            if isinstance(record, PutTopic | PutTopicMeta | PutSettings):
                about = described(about, record, replica.number)
            elif not isinstance(record, PutLog | DeleteTopic | ShiftDueTimes):
                replica.rows.write(record)
        if is_whole or about != replica.about:
            replica.about = about
            if is_whole:
                replica.rows_end = 0
            replica.put(must_sync=False)
        replica.take(position)
        self._metadata.wait_here(partial(self._applied, replica, position, replica.floor, done))

    def _applied(
        self, replica: Replica, position: tuple[int, int], floor: int, done: Waiter, error: BaseException | None
    ) -> None:
        if error is not None or self._kept.are_syncing:
            # the next flush has it all again: nothing is to be sent a second time
            self._metadata.wait_here(partial(self._applied, replica, position, floor, done))
            return
        replica.progress = position
        replica.rows.durable_floor = floor
        done(None)

    def stage(self, replica: Replica, records: Sequence[Record], done: Waiter) -> None:
        """Write a part of what is spilled, with the next flush: :meth:`apply` takes it with the rest of a whole state.

        Until then, nobody finds it: it is kept under cursors that a start removes.

        Raises:
            ValueError: it is something else, or of another partition; or the partition is led here.
            StorageError: something else is being done with the replica.
        """
        replica.check_followed()
        for record in records:
            if not isinstance(record, PutSpilled) or record.cleared_from is not None or record.gone:
                raise ValueError(f"{replica.describe()}: {type(record).__name__} is no part of a whole state")
            if (record.topic, record.partition) != (replica.topic, replica.number):
                raise ValueError(f"{replica.describe()}: {type(record).__name__} is not of this partition")
            replica.rows.stage(record)
        self._metadata.wait_here(partial(self._when_written, done))

    def _when_written(self, done: Waiter, error: BaseException | None) -> None:
        if error is not None:
            # the next flush has it all again: nothing is to be sent a second time
            self._metadata.wait_here(partial(self._when_written, done))
        else:
            done(None)

    def keep_floors(self, replica: Replica, floors: Sequence[tuple[str, int]]) -> None:
        """Keep how far channels in order are, as the leader says, ahead of its progress; it outlives the process.

        What goes back is synced with the next flush, so before the progress is stored that comes behind it.

        Args:
            floors: channels, and the sequence below which everything is finished; 0: what is kept is not so any more.

        Raises:
            ValueError: it is led here.
            StorageError: something else is being done with the replica, or they cannot be written.
        """
        replica.check_followed()
        for name, floor in floors:
            replica.rows.keep_floor(name, floor)


def _ended(replica: Replica, done: Waiter, error: BaseException | None) -> None:
    """Let something else be done with a replica; what was not done is taken back in its row."""
    replica.work = ""
    if error is not None:
        replica.put()
    done(error)
