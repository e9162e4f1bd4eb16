"""One replicated partition, as far as this node has it: what it is, what it has lost, and what is being done with it.

A replica is a log, its leader's batches byte for byte, and rows in the database: which channels there are, how far each
is, what each has set aside. They are the rows that a partition of this node alone has, so that leading begins as a
start does. While another node leads, the partition is not in ``Broker.topics``: nothing of it is delivered.

Rows of the topic (whether it is paused, its settings, its meta) are kept with each replica, as the leader of that
partition last said; the tables of topics and settings have nothing of a topic that is replicated.

What a replica lost, of its log or of its channels, is told of and remembered (:attr:`Replica.is_damaged`) until it has
come again from a leader. A log that has lost something in the middle keeps what is behind it, in case that nobody else
has it, and is cut there when a leader orders that, which then sends all of it again.

Rules of this file: no clock; one thing at a time is done with a replica, and :attr:`Replica.work` says what.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from flintmq.batch import decode_header
from flintmq.broker.metadata import Metadata, Waiter
from flintmq.broker.partition import Partition
from flintmq.broker.replica_rows import ReplicaRows
from flintmq.errors import StorageError
from flintmq.storage import PartitionLog, channel_store
from flintmq.storage.channel_store import StoredAbout, StoredReplica
from flintmq.storage.records import PutSettings, PutTopic, PutTopicMeta, Record, TopicRecord
from flintmq.storage.rows import Statement
from flintmq.storage.segment import NO_STOP
from flintmq.topic_meta import TopicMeta, decode_meta

_HISTORY_MAX = 4096  # epochs that are remembered of one replica
HELD, REMOVING, SETTING_ASIDE = 0, 1, 2
"""Whether a replica stays, or what its directory is moved for."""


class Replica:
    """One replicated partition; changed by its owners in this package alone.

    Args:
        rows: where its channels are.

    Attributes:
        topic, number: of the partition.
        topic_number: of the topic, drawn when it was created.
        log_id: identity of the log, the same on every replica.
        epoch: the highest that was noted.
        durable_epoch: the highest of which that survives a power loss.
        history: ``(epoch, its first sequence)`` of every epoch that the log has something of, or that began here.
        log: the batches.
        partition: in ``Broker.topics`` while this node leads it; else None.
        progress: ``(epoch, n)`` of the leader's progress, as much of it as the database has; (0, 0): none of it.
        taken: the same, as the database will have it.
        about: what the leader said of the topic, and what is lost here.
        rows_end: what the rows say beyond this sequence is of messages that were cut off; 0: nothing is.
        state: whether it stays: ``HELD``, ``REMOVING`` or ``SETTING_ASIDE``.
        work: what is being done with it, so that nothing else can be; empty: nothing.
        is_deleted: whether it was removed or set aside.
        on_settled: told what becomes of messages that it lost: True: nobody else has them; False: another replica is to
            send them.
    """

    __slots__ = ("_metadata", "about", "durable_epoch", "epoch", "history", "is_deleted", "log", "log_id", "number",
                 "on_settled", "partition", "progress", "rows", "rows_end", "state", "taken", "topic", "topic_number",
                 "work")  # fmt: skip

    def __init__(
        self, topic: str, number: int, stored: StoredReplica, log: PartitionLog, metadata: Metadata, rows: ReplicaRows
    ) -> None:
        self.topic = topic
        self.number = number
        self.topic_number = stored.topic_number
        self.log_id = stored.log_id
        self.epoch = self.durable_epoch = stored.epoch
        self.history = stored.history
        self.log = log
        self.rows = rows
        self.partition: Partition | None = None
        self.progress = self.taken = stored.progress
        self.about = stored.about
        self.rows_end = stored.rows_end
        self.state = stored.state
        self.work = ""
        self.is_deleted = False
        self.on_settled: Callable[[bool], None] = lambda _is_lost: None
        self._metadata = metadata

    @property
    def topic_name(self) -> str:
        """The same as ``topic``, as partitions have it."""
        return self.topic

    @property
    def meta(self) -> TopicMeta:
        """Of the topic, as it was told last."""
        return decode_meta(self.about.meta)

    @property
    def floor(self) -> int:
        """The sequence below which no channel needs the log any more."""
        return self.rows.floor

    @property
    def durable_floor(self) -> int:
        """The same, as the database has it."""
        return self.rows.durable_floor

    def describe(self) -> str:
        """One line for people."""
        role = "led here" if self.partition is not None else "followed"
        return (
            f"replica {self.topic}/{self.number} {role} epoch={self.epoch} progress={self.progress} "
            f"history={self.history[-3:]} {self.work or 'idle'} {self.log.describe()}"
        )

    # -- one thing at a time -------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Make sure that nothing is being done with it.

        Raises:
            StorageError: something is, or it is gone.
        """
        if self.is_deleted or self.work:
            work = self.work or "it is gone"
            raise StorageError(f"replica of topic {self.topic} partition {self.number}: {work}")

    def check_followed(self) -> None:
        """Make sure that another node may change it.

        Raises:
            StorageError: something is being done with it.
            ValueError: it is led here.
        """
        self.check_idle()
        if self.partition is not None:
            raise ValueError(f"{self.describe()}: it is led here, demote it first")

    def begin(self, work: str) -> None:
        """Let nothing else be done with it until ``work`` is empty again.

        Raises:
            StorageError, ValueError: as :meth:`check_followed`.
        """
        self.check_followed()
        self.work = work

    # -- what is written of it -----------------------------------------------------------------------------------

    def row(self) -> Statement:
        """Return what writes its row."""
        stored = StoredReplica(
            self.topic_number,
            self.log_id,
            self.epoch,
            self.history,
            self.rows_end,
            self.state,
            self.about,
            self.progress,
        )
        return channel_store.put_replica(self.topic, self.number, stored)

    def put(self, must_sync: bool = True) -> None:
        """Have its row written with the next flush."""
        self._metadata.put_own(self.row(), must_sync)

    def take(self, progress: tuple[int, int]) -> None:
        """Have written how much of the leader's progress the database has, with the flush that writes it."""
        self.taken = progress
        committed = self.log.committed_sequence
        self._metadata.put_own(channel_store.put_replica_progress(self.topic, self.number, progress, committed))

    def forget_progress(self) -> None:
        """Let the whole state have to come before anything else of a leader's progress is taken."""
        self.progress = (0, 0)
        self.take(self.progress)

    # -- its epochs ----------------------------------------------------------------------------------------------

    @property
    def last_epoch(self) -> int:
        """The last that its log has something of, or that began here; -1: none."""
        return self.history[-1][0] if self.history else -1

    def enter(self, epoch: int, first: int) -> None:
        """Note that an epoch begins with a sequence.

        Raises:
            ValueError: it does not follow the last one.
        """
        history = self.history
        if history and epoch <= history[-1][0]:
            raise ValueError(f"{self.describe()}: epoch {epoch} does not follow")
        while history and history[-1][1] == first:
            del history[-1]  # it has no batch, and gets none
        history.append((epoch, first))
        below = [index for index, (_, begin) in enumerate(history) if begin <= self.log.start_sequence]
        del history[: max(below[-1] if below else 0, len(history) - _HISTORY_MAX)]

    def heard_of_leader(self, epoch: int, incarnation: str) -> None:
        """Remember which process leads in an epoch; it is written with whatever is written of the replica next.

        An epoch names one process for ever: who is told of another one knows that the coordination store is older.
        """
        if epoch > self.about.led_by[0]:
            self.about = msgspec.structs.replace(self.about, led_by=(epoch, incarnation))

    def note_epoch(self, epoch: int, begins: bool, done: Waiter) -> None:
        """Accept nothing under a lower epoch any more; what many replicas note in one turn is one transaction.

        Args:
            begins: whether this node leads in that epoch, which begins at the end of the log.
            done: called once: with None when it survives a power loss, or with why it does not.

        Raises:
            ValueError: a higher epoch was noted, or, with ``begins``, this one has begun.
            StorageError: something else is being done with it.
        """
        self.check_idle()
        if epoch < self.epoch:
            raise ValueError(f"{self.describe()}: epoch {epoch} is over")
        if begins and self.history[-1:] != [(epoch, self.log.next_sequence)]:
            self.enter(epoch, self.log.next_sequence)
        self.epoch = epoch

        def written(error: BaseException | None) -> None:
            if error is None:
                self.durable_epoch = max(self.durable_epoch, epoch)
            done(error)

        self.put()
        self._metadata.wait_here(written)

    # -- what it lost --------------------------------------------------------------------------------------------

    @property
    def lost_from(self) -> int:
        """The first sequence that it had and lacks; 0: it lacks nothing."""
        return self.about.lost_from

    @property
    def is_damaged(self) -> bool:
        """Whether it lacks something that it had: it must not lead while another replica has that."""
        return bool(self.about.lost_from) or self.about.is_progress_lost

    def note_damage(self, lost_from: int = 0, is_progress_lost: bool = False) -> bool:
        """Remember what it has lost; whether that was not known."""
        about = self.about
        earliest = min(about.lost_from or lost_from, lost_from or about.lost_from)
        now = msgspec.structs.replace(
            about, lost_from=earliest, is_progress_lost=about.is_progress_lost or is_progress_lost
        )
        if now == about:
            return False
        self.about = now
        if earliest:
            self.log.hold_from(earliest)
        self.put()
        return True

    def accept_damage(self) -> None:
        """Go on without what it has lost: nobody else has it, or all of it is to come behind the log's end."""
        self.about = msgspec.structs.replace(self.about, lost_from=0, is_progress_lost=False)
        self.log.hold_from(NO_STOP)
        self.put()
        self.on_settled(True)

    def lost_end_comes(self, is_whole: bool = False) -> None:
        """Forget what the log has lost if that is all behind its end, from where a leader goes on.

        Args:
            is_whole: it has started over.
        """
        if self.lost_from and (is_whole or self.lost_from >= self.log.next_sequence):
            self.about = msgspec.structs.replace(self.about, lost_from=0)
            self.log.hold_from(NO_STOP)
            self.put()
            self.on_settled(False)

    # -- its topic -----------------------------------------------------------------------------------------------

    def topic_records(self) -> list[Record]:
        """Build the records of the topic that it has."""
        topic, about = self.topic, self.about
        headers_from = {self.number: about.headers_from} if about.headers_from else {}
        records: list[Record] = [
            PutTopic(topic, about.paused),
            PutTopicMeta(topic, about.meta, [self.number], headers_from),
        ]
        return records + [PutSettings(topic, channel, settings) for channel, settings in about.settings.items()]


def described(about: StoredAbout, record: TopicRecord, number: int) -> StoredAbout:
    """Return what is known of a topic when one of its partitions is told this."""
    replace = msgspec.structs.replace
    if isinstance(record, PutTopic):
        return replace(about, paused=record.paused)
    if isinstance(record, PutTopicMeta):
        return replace(about, meta=record.meta, headers_from=record.headers_from.get(number, 0))
    settings = {channel: its for channel, its in about.settings.items() if channel != record.channel}
    if record.settings is not None:
        settings[record.channel] = record.settings
    return replace(about, settings=settings)


def found_history(log: PartitionLog, known: list[tuple[int, int]], noted: int) -> list[tuple[int, int]]:
    """Return the epochs of a log: those known before, without what is not in it any more, and with what came since.

    A batch may be in the log although the database was not told that its epoch began; only when an epoch was noted that
    is not known to have begun.

    Args:
        noted: the highest epoch that a batch can be of.
    """
    history = [(epoch, first) for epoch, first in known if first <= log.next_sequence]
    if history and history[-1][0] >= noted:
        return history
    sequence = max(log.start_sequence, history[-1][1] if history else 0)
    found = _epoch_at(log, sequence)
    last = _epoch_at(log, log.next_sequence - 1)
    while found is not None and last is not None:
        epoch, first = found
        if not history or epoch > history[-1][0]:
            while history and history[-1][1] == first:
                del history[-1]  # it has no batch
            history.append((epoch, first))
        if last[0] <= history[-1][0]:
            break
        low, high, found = first, log.next_sequence - 1, last
        while high - low > 1:
            middle = (low + high) // 2
            between = _epoch_at(log, middle) or last
            if between[0] > epoch:
                high, found = middle, between
            else:
                low = middle
    return history


def _epoch_at(log: PartitionLog, sequence: int) -> tuple[int, int] | None:
    """The epoch and the first sequence of the batch with a message, or of the one behind it; None at the end."""
    data, _ = log.fetch_stored(max(sequence, log.start_sequence), 1)
    if not data:
        return None
    header = decode_header(data)
    return header.epoch, header.first_sequence
