"""Replicas of partitions: what this node has of a partition that is kept on several nodes, led here or elsewhere.

A replica is a log, its leader's batches byte for byte, and rows in the database: which channels there are, how far each
is, what each has set aside. They are the rows that a partition of this node alone has, so that leading begins as a
start does. While another node leads, the partition is not in ``Broker.topics``: nothing of it is delivered.

Rows of the topic (whether it is paused, its settings, its meta) are kept with each replica, as the leader of that
partition last said; the tables of topics and settings have nothing of a topic that is replicated.

What a replica lost, of its log or of its channels, is told of and remembered (:attr:`Replica.is_damaged`) until it has
come again from a leader. A log that has lost something in the middle keeps what is behind it, in case that nobody else
has it, and is cut there when a leader orders that, which then sends all of it again.

Rules of this file: no clock; every method is called on the loop, but what is handed to a :class:`Question`; ``done`` is
called once: with None when what was asked for survives a power loss, or with why it does not.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import msgspec

from flintmq.batch import BatchError, BatchHeader, decode_header
from flintmq.broker.adoption import Adoption
from flintmq.broker.channels import Channels, FloorKeeper
from flintmq.broker.log_marks import LogMarks
from flintmq.broker.logs import Logs, log_directory
from flintmq.broker.metadata import Metadata, Waiter
from flintmq.broker.partition import Partition, PublishGroup
from flintmq.broker.progress import Progress, Question
from flintmq.broker.publishes import Publishes
from flintmq.broker.subscription import Subscription
from flintmq.broker.topic import Topic
from flintmq.errors import FlintError, StorageError
from flintmq.limits import SEQUENCE_MAX
from flintmq.names import is_ephemeral
from flintmq.settings import NOTHING, Settings, encode_settings
from flintmq.storage import (
    ChannelStore,
    Creation,
    Damage,
    DatabaseSnapshot,
    LogPlace,
    PartitionLog,
    channel_store,
    packs,
)
from flintmq.storage.channel_store import StoredAbout, StoredLog, StoredReplica, StoredTopics
from flintmq.storage.records import (
    ChannelRecord,
    DeleteChannel,
    DeleteProgress,
    DeleteTopic,
    PutBacklog,
    PutChannel,
    PutLog,
    PutProgress,
    PutSettings,
    PutSpilled,
    PutTopic,
    PutTopicMeta,
    Record,
    ShiftDueTimes,
    TopicRecord,
)
from flintmq.storage.rows import Statement
from flintmq.storage.segment import NO_STOP
from flintmq.topic_meta import TopicMeta, decode_meta, encode_meta

_CREATIONS_MAX = 64  # replicas whose files are made at once
_CHANGES_MAX = 8  # logs that are cut back, or start over, behind one flush: others wait for it
STATE_READ_BYTES = 1024 * 1024
"""Of spilled messages that are read at once for another node, about."""
_HISTORY_MAX = 4096  # epochs that are remembered of one replica
_PROMOTING = "it is being promoted"
_HELD, _REMOVING, _SETTING_ASIDE = 0, 1, 2
_NO_MARK = StoredLog(0, 1, 1)
_Key = tuple[str, int]  # a topic and the number of a partition
Records = dict[_Key, list[Record]]
"""Records by topic and partition; those of a topic go with each of its partitions."""
OnRecords = Callable[[Records, Waiter], None]
StateDone = Callable[[list[Record], "SpilledState | None", BaseException | None], None]


def _last_epoch(replica: Replica) -> int:
    return replica.history[-1][0] if replica.history else -1


class ReplicaConflict(FlintError):
    """This node has something else under the name of a replica, or is doing something else with it."""


class Replica:
    """One replicated partition, as far as this node has it; changed by :class:`Replicas` alone.

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
        meta: of the topic, as it was told last.
        durable_floor: no channel needs the log below this sequence, as the database has it.
        work: what is being done with it, so that nothing else can be; empty: nothing.
        is_deleted: whether it was removed or set aside.
    """

    __slots__ = ("_about", "_backlog_start", "_cursors", "_floors", "_kept_floors", "_ordered_floors", "_packs",
                 "_rows_end", "_staged", "_staged_packs", "_state", "_taken", "durable_epoch", "durable_floor", "epoch",
                 "history", "is_deleted", "log", "log_id", "number", "partition", "progress", "topic", "topic_number",
                 "work")  # fmt: skip

    def __init__(self, topic: str, number: int, stored: StoredReplica, log: PartitionLog) -> None:
        self.topic = topic
        self.number = number
        self.topic_number = stored.topic_number
        self.log_id = stored.log_id
        self.epoch = self.durable_epoch = stored.epoch
        self.history = stored.history
        self.log = log
        self.partition: Partition | None = None
        self.progress = stored.progress
        self.work = ""
        self.is_deleted = False
        self._rows_end = stored.rows_end
        self._state = stored.state
        self._about = stored.about
        self._taken = stored.progress  # what the database will have
        self._cursors: dict[str, int] = {}  # of its channels
        self._kept_floors: dict[int, int] = {}  # of channels in order, ahead of the database, by cursor
        self._ordered_floors: dict[str, int] = {}  # the same as its leader told, also of channels that are not here yet
        self._floors: dict[str, int] = {}  # of its channels, as the database will have them
        self._backlog_start = 1
        self._packs: dict[int, int] = {}  # the leader's numbers of packs of spilled messages, and those here
        self._staged: dict[str, int] = {}  # cursors of what came of a whole state that is not complete, by channel
        self._staged_packs: dict[int, int] = {}  # the same as ``_packs``
        self.durable_floor = 1

    @property
    def topic_name(self) -> str:
        """The same as ``topic``, as partitions have it."""
        return self.topic

    @property
    def meta(self) -> TopicMeta:
        return decode_meta(self._about.meta)

    @property
    def lost_from(self) -> int:
        """The first sequence that it had and lacks; 0: it lacks nothing."""
        return self._about.lost_from

    @property
    def is_damaged(self) -> bool:
        """Whether it lacks something that it had: it must not lead while another replica has that."""
        return bool(self._about.lost_from) or self._about.is_progress_lost

    @property
    def floor(self) -> int:
        """The sequence below which no channel needs the log any more."""
        return min(self._floors.values(), default=self._backlog_start)

    def stored(self) -> StoredReplica:
        """Return what its row has."""
        return StoredReplica(
            self.topic_number,
            self.log_id,
            self.epoch,
            self.history,
            self._rows_end,
            self._state,
            self._about,
            self.progress,
        )

    def describe(self) -> str:
        """One line for people."""
        role = "led here" if self.partition is not None else "followed"
        return (
            f"replica {self.topic}/{self.number} {role} epoch={self.epoch} progress={self.progress} "
            f"history={self.history[-3:]} {self.work or 'idle'} {self.log.describe()}"
        )


class SpilledState:
    """The spilled messages of a partition as of one flush, read piece by piece. Blocks; for a worker thread."""

    def __init__(self, snapshot: DatabaseSnapshot, topic: str, number: int, cursors: Mapping[str, int]) -> None:
        self._snapshot = snapshot
        self._where = topic, number
        self._left = deque(cursors.items())
        self._after = 0

    def read(self) -> list[Record]:
        """Return what follows, about ``STATE_READ_BYTES`` of it; nothing: that was all.

        Raises:
            StorageError: it cannot be read.
        """
        while self._left:
            channel, cursor = self._left[0]
            found, done, after = packs.next_packs(self._snapshot.query, cursor, self._after, STATE_READ_BYTES)
            if after is None:
                self._left.popleft()
                self._after = 0
                continue
            self._after = after
            if found:
                return [PutSpilled(*self._where, channel, None, found, done, [])]
        return []

    def close(self) -> None:
        """Let go of the database as it was."""
        self._snapshot.close()


class NewReplica:
    """A replica whose files are to be made.

    Attributes:
        creations: of its log.
        done: told when they are, or why not.
        is_under_way: whether they are being made.
    """

    __slots__ = ("creations", "done", "is_under_way", "replica")

    def __init__(self, replica: Replica, done: Waiter) -> None:
        self.replica = replica
        self.done = done
        self.creations = [Creation(replica.log)]
        self.is_under_way = False


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


class Replicas(Mapping[_Key, Replica]):
    """Owner of the replicas, by topic and number.

    Args:
        is_here: whether there is a topic of a name that is not replicated.
        on_damage: told of messages that are missing.
        on_problem: told what could not be written, and is tried again.

    Attributes:
        on_records: given, behind each flush that was written, its records of the partitions led here, and whom to tell
            when other nodes have them: only then those are told who wait for what was changed. None: at once.
        on_damaged: told of a replica that lacks something which it had; perhaps in the middle of reading it.
    """

    def __init__(
        self,
        logs: Logs,
        channels: Channels,
        metadata: Metadata,
        marks: LogMarks,
        progress: Progress,
        publishes: Publishes,
        adoption: Adoption,
        is_here: Callable[[str], bool],
        on_damage: Callable[[Damage], None],
        on_problem: Callable[[StorageError], None],
    ) -> None:
        self._logs = logs
        self._channels = channels
        self._metadata = metadata
        self._marks = marks
        self._progress = progress
        self._publishes = publishes
        self._adoption = adoption
        self._is_here = is_here
        self._on_damage = on_damage
        self._on_problem = on_problem
        self._syncing_floors = 0  # times that it is under way, or waits for the next flush
        self.on_records: OnRecords | None = None
        self.on_damaged: Callable[[Replica], None] | None = None
        self._by_directory: dict[str, Replica] = {}
        self._replicas: dict[_Key, Replica] = {}
        self._by_topic: dict[str, dict[int, Replica]] = {}
        self._new: dict[Replica, NewReplica] = {}
        self._changes: deque[_Change] = deque()
        self._changing_count = 0

    def __getitem__(self, key: _Key) -> Replica:
        return self._replicas[key]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def keep_floors_by(self, keeper: FloorKeeper) -> None:
        """Have the floors of channels in order brought to other nodes: of those that are made from now on."""
        self._channels.floor_keeper = keeper

    def of_topic(self, topic: str) -> Mapping[int, Replica]:
        """Find the replicas of a topic, by number."""
        return self._by_topic.get(topic, {})

    def cursors(self) -> list[int]:
        """The numbers of the cursors of their channels."""
        return [cursor for replica in self._replicas.values() for cursor in replica._cursors.values()]

    def logs(self) -> list[PartitionLog]:
        """The log of every replica, also of those that are led here."""
        return [replica.log for replica in self._replicas.values()]

    # -- start ---------------------------------------------------------------------------------------------------

    def open(self, stored: StoredTopics, floors: Mapping[int, int], wall_ns: int, strays: Iterable[_Key]) -> None:
        """Open what the database has of replicas, all of them as followers; go on with removals. Blocks.

        Args:
            floors: of channels in order, ahead of the database.
            strays: directories that are in the way of replicas, as :class:`flintmq.broker.restore.Restore` says.

        Raises:
            StorageError: the data directory cannot be used.
        """
        for path in self._logs.removed_replicas():
            self._progress.remove_later(path)
        for key in strays:
            self._clear(key)
        held: dict[_Key, StoredReplica] = {}
        cursors: dict[_Key, dict[str, int]] = {}
        for (topic, number, channel), its in stored.channels.items():
            if (topic, number) in stored.replicas:
                cursors.setdefault((topic, number), {})[channel] = its.cursor
        for key, row in stored.replicas.items():
            if row.state == _HELD:
                held[key] = row
                continue
            moved = self._logs.move_replica(*key, is_removed=row.state == _REMOVING)
            if moved and row.state == _REMOVING:
                self._progress.remove_later(moved)
            self._delete_rows(*key, cursors.get(key, {}))
        lost: list[tuple[str, int, int]] = []
        self._logs.on_lost = lambda *what: lost.append(what)
        if held:
            self._open_held(held, cursors, stored, floors, wall_ns)
        self._logs.on_lost = self._log_lost
        for directory, first, end in lost:
            self._log_lost(directory, first, end)
        for replica in self._replicas.values():
            if replica.lost_from:
                replica.log.hold_from(replica.lost_from)

    def _clear(self, key: _Key) -> None:
        """Put a directory that is in the way of a replica out of it: remove it if nothing was ever stored in it."""
        has_messages = self._logs.has_messages(*key)
        try:
            moved = self._logs.move_replica(*key, is_removed=not has_messages)
        except StorageError as error:
            self._on_problem(error)  # the next start tries again; until then no replica can be made there
            return
        if has_messages:
            what = f"no row tells what it is, and the topic is replicated; it is set aside as {moved}, and comes anew"
            self._on_damage(Damage(log_directory(*key), what, *key))
        else:
            self._progress.remove_later(moved)

    def _open_held(
        self,
        held: Mapping[_Key, StoredReplica],
        cursors: Mapping[_Key, dict[str, int]],
        stored: StoredTopics,
        floors: Mapping[int, int],
        wall_ns: int,
    ) -> None:
        logs, _ = self._logs.open_all([_place(key, row, stored) for key, row in held.items()], wall_ns)
        self._logs.start_ended()
        unsure = {
            (each.topic, each.partition)
            for each in stored.cursors
            # which of its packs is which of the leader's is not written down
            if each.is_lost or each.spilled_missing or each.spilled_next_due_ns is not None
        }
        damaged = {(each.topic, each.partition) for each in stored.cursors if each.is_lost or each.spilled_missing}
        for (key, row), log in zip(held.items(), logs, strict=True):
            if log.log_id != row.log_id:
                log = self._open_anew(key, row, log, wall_ns)
            replica = self._add(Replica(*key, row, log))
            replica._cursors = cursors.get(key, {})
            replica._kept_floors = {each: floors[each] for each in replica._cursors.values() if each in floors}
            replica._backlog_start = stored.partitions.get(key, (1, None))[0]
            replica.history = found_history(log, row.history, row.epoch)
            replica.epoch = max([row.epoch, *(epoch for epoch, _ in replica.history[-1:])])
            if stored.is_behind or key in unsure:
                replica.progress = replica._taken = (0, 0)  # what is missing is not known: it comes as a whole
            self._marks.restore(replica, stored.logs.get(key, _NO_MARK))
            if stored.is_older or key in damaged:
                self._note_damage(replica, is_progress_lost=True)
        for cursor in stored.cursors:
            if (cursor.topic, cursor.partition) in held:
                self._replicas[cursor.topic, cursor.partition]._floors[cursor.channel] = cursor.row.floor
        for replica in self._replicas.values():
            replica.durable_floor = replica.floor

    def _open_anew(self, key: _Key, row: StoredReplica, log: PartitionLog, wall_ns: int) -> PartitionLog:
        """Set a log aside that is not the one which the database has, and begin an empty one. Blocks."""
        log.close()
        moved = self._logs.move_replica(*key, is_removed=False)
        what = f"it is log {log.log_id}, and log {row.log_id} was here; it is set aside as {moved}, and comes anew"
        self._on_damage(Damage(log.directory, what, key[0], key[1]))
        row.history, row.progress = [], (0, 0)
        row.about = msgspec.structs.replace(row.about, lost_from=1)
        place = LogPlace(log_directory(*key), key[1], log_id=row.log_id, is_replica=True)
        (log,), _ = self._logs.open_all([place], wall_ns)
        self._logs.start_ended()
        return log

    def _add(self, replica: Replica) -> Replica:
        self._progress.hand_on = self._hand_on
        self._replicas[replica.topic, replica.number] = replica
        self._by_directory[replica.log.directory] = replica
        self._by_topic.setdefault(replica.topic, {})[replica.number] = replica
        return replica

    def _forget(self, replica: Replica) -> None:
        replica.is_deleted = True
        del self._replicas[replica.topic, replica.number]
        del self._by_directory[replica.log.directory]
        others = self._by_topic[replica.topic]
        del others[replica.number]
        if not others:
            del self._by_topic[replica.topic]
        self._marks.forget(replica)

    # -- what it lost --------------------------------------------------------------------------------------------

    def _log_lost(self, directory: str, first: int, _end: int) -> None:
        replica = self._by_directory.get(directory)
        if replica is not None:
            self._note_damage(replica, lost_from=first)

    def _note_damage(self, replica: Replica, lost_from: int = 0, is_progress_lost: bool = False) -> None:
        about = replica._about
        earliest = min(about.lost_from or lost_from, lost_from or about.lost_from)
        now = msgspec.structs.replace(
            about, lost_from=earliest, is_progress_lost=about.is_progress_lost or is_progress_lost
        )
        if now == about:
            return
        replica._about = now
        if earliest:
            replica.log.hold_from(earliest)
        self._put_row(replica)
        if self.on_damaged is not None:
            self.on_damaged(replica)

    def accept_damage(self, replica: Replica) -> None:
        """Go on without what a replica has lost: nobody else has it, or all of it is to come behind the log's end."""
        replica._about = msgspec.structs.replace(replica._about, lost_from=0, is_progress_lost=False)
        replica.log.hold_from(NO_STOP)
        self._put_row(replica)

    def lost_end_comes(self, replica: Replica, is_whole: bool = False) -> None:
        """Forget what a log has lost if that is all behind its end, from where a leader goes on.

        Args:
            is_whole: it has started over.
        """
        if replica.lost_from and (is_whole or replica.lost_from >= replica.log.next_sequence):
            replica._about = msgspec.structs.replace(replica._about, lost_from=0)
            replica.log.hold_from(NO_STOP)
            self._put_row(replica)

    # -- which there are -----------------------------------------------------------------------------------------

    def create(
        self, topic: str, number: int, topic_number: int, log_id: int, topic_meta: TopicMeta, done: Waiter
    ) -> Replica:
        """Make a replica that is empty; its files are made by who asks for :meth:`take_creations`.

        It is not there before ``done``, and is gone again when that gets an error.

        Args:
            topic_number, log_id: 1 to 2^63 - 1, the same on every node.

        Raises:
            ReplicaConflict: there is a replica of the partition, or a topic of that name that is not replicated.
        """
        if (topic, number) in self._replicas:
            raise ReplicaConflict(f"topic {topic} partition {number}: there is a replica already: set it aside first")
        if self._is_here(topic):
            raise ReplicaConflict(f"there is a topic {topic} on this node alone: delete it, or take another name")
        stored = StoredReplica(topic_number, log_id, 0, [], 0, _HELD, StoredAbout(encode_meta(topic_meta)))
        replica = self._add(Replica(topic, number, stored, self._logs.new(topic, number, log_id, is_replica=True)))
        replica.work = "it is being created"
        for statement in channel_store.create_replica_tables():
            self._metadata.put_own(statement)
        self._put_row(replica)
        self._metadata.wait_here(partial(self._recorded, replica, done))
        return replica

    def _recorded(self, replica: Replica, done: Waiter, error: BaseException | None) -> None:
        if error is not None:
            self._refuse(replica, done, error)
        else:
            self._new[replica] = NewReplica(replica, done)

    def _refuse(self, replica: Replica, done: Waiter, error: BaseException) -> None:
        where = f"topic {replica.topic} partition {replica.number}"
        self._forget(replica)
        self._delete_rows(replica.topic, replica.number, {})
        done(StorageError(f"{where}: a replica cannot be created: {error}"))

    @property
    def has_creations(self) -> bool:
        """Whether files are to be made, or are being made."""
        return bool(self._new)

    def take_creations(self) -> list[NewReplica]:
        """Replicas whose files are to be made now; the caller does it with :func:`flintmq.storage.create_logs`."""
        taken = list(islice(self._new.values(), _CREATIONS_MAX))
        for new in taken:
            assert not new.is_under_way, "the last ones have ended"
            new.is_under_way = True
        return taken

    def creation_ended(self, new: NewReplica) -> None:
        """Take note that the files of a replica were made, or could not be."""
        replica, creation = new.replica, new.creations[0]
        del self._new[replica]
        error = creation.error
        if error is None:
            creation.finish()
            log = replica.log
            if log.log_id == replica.log_id and log.next_sequence == 1:
                replica.work = ""
                self._marks.restore(replica, _NO_MARK)
                new.done(None)
                return
            log.close()
            error = StorageError(f"there is a log {log.log_id} in {log.directory}: move that directory away")
        self._refuse(replica, new.done, error)

    def remove(self, replica: Replica, done: Waiter) -> None:
        """Remove a replica that is not led here, with all that it has."""
        self._go(replica, _REMOVING, "it is being removed", done)

    def set_aside(self, replica: Replica, done: Waiter) -> None:
        """Put the log of a replica that is not led here out of the way, and forget what else there is of it.

        The log is kept in the directory ``set-aside`` of the data directory until somebody removes it.
        """
        self._go(replica, _SETTING_ASIDE, "it is being set aside", done)

    def _go(self, replica: Replica, state: int, work: str, done: Waiter) -> None:
        self._begin(replica, work)
        if replica._state != _HELD:  # its directory could not be moved before
            self._move(replica, done)
            return
        replica._state = state
        self._put_row(replica)
        self._metadata.wait_here(partial(self._leave, replica, done))

    def _leave(self, replica: Replica, done: Waiter, error: BaseException | None) -> None:
        if error is not None:
            replica._state = _HELD
            self._ended(replica, done, error, must_put=True)
        elif replica.log.is_syncing:
            self._metadata.wait_here(partial(self._leave, replica, done))
        else:
            replica.log.close()
            self._move(replica, done)

    def _move(self, replica: Replica, done: Waiter) -> None:
        begun: list[bool] = []

        def move(_store: ChannelStore) -> str:
            begun.append(True)
            return self._logs.move_replica(replica.topic, replica.number, replica._state == _REMOVING)

        self._progress.ask(Question(move, partial(self._left, replica, done, begun)))
        self._channels.is_urgent = True

    def _left(
        self, replica: Replica, done: Waiter, begun: list[bool], moved: str | None, error: BaseException | None
    ) -> None:
        if not begun:  # the flush failed before it
            self._move(replica, done)
            return
        if error is not None:
            # its log is closed: nothing else can be made of it; who asks again, or the next start, goes on with this
            replica.work = ""
            done(error)
            return
        if moved and replica._state == _REMOVING:
            self._progress.remove_later(moved)
        self._forget(replica)
        self.drop_staged(replica)
        self._delete_rows(replica.topic, replica.number, replica._cursors)
        self._metadata.wait_here(done)

    def _delete_rows(self, topic: str, number: int, cursors: Mapping[str, int]) -> None:
        put = self._metadata.put_own
        for name, cursor in cursors.items():
            put(channel_store.delete_channel(topic, number, name))
            for statement in channel_store.delete_cursor(cursor):
                put(statement)
            self._channels.forget_cursor(cursor)
        for statement in channel_store.delete_replica(topic, number):
            put(statement, must_sync=True)

    # -- the log -------------------------------------------------------------------------------------------------

    def note_epoch(self, replica: Replica, epoch: int, begins: bool, done: Waiter) -> None:
        """Accept nothing under a lower epoch any more; what many replicas note in one turn is one transaction.

        Args:
            begins: whether this node leads in that epoch, which begins at the end of its log.

        Raises:
            ValueError: a higher epoch was noted, or, with ``begins``, this one has begun.
            StorageError: something else is being done with it.
        """
        self._check_idle(replica)
        if epoch < replica.epoch:
            raise ValueError(f"{replica.describe()}: epoch {epoch} is over")
        if begins and replica.history[-1:] != [(epoch, replica.log.next_sequence)]:
            self._enter(replica, epoch, replica.log.next_sequence)
        replica.epoch = epoch

        def written(error: BaseException | None) -> None:
            if error is None:
                replica.durable_epoch = max(replica.durable_epoch, epoch)
            done(error)

        self._put_row(replica)
        self._metadata.wait_here(written)

    def _enter(self, replica: Replica, epoch: int, first: int) -> None:
        history = replica.history
        if history and epoch <= history[-1][0]:
            raise ValueError(f"{replica.describe()}: epoch {epoch} does not follow")
        while history and history[-1][1] == first:
            del history[-1]  # it has no batch, and gets none
        history.append((epoch, first))
        below = [index for index, (_, begin) in enumerate(history) if begin <= replica.log.start_sequence]
        del history[: max(below[-1] if below else 0, len(history) - _HISTORY_MAX)]

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
        self._check_idle(replica)
        self._check_followed(replica)
        log, batches = replica.log, memoryview(data)
        begin = position = 0
        run: list[BatchHeader] = []  # batches of one epoch, that are written together
        refused: BatchError | ValueError | None = None
        self._marks.grown[replica] = None
        try:
            while position < len(batches):
                try:
                    header = self._checked(replica, batches, position, run[-1].epoch if run else _last_epoch(replica))
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
            if log.next_sequence > first and epoch > _last_epoch(replica):
                self._enter(replica, epoch, first)
                self._put_row(replica, must_sync=False)

    def advance_committed(self, replica: Replica, sequence: int) -> None:
        """Take note that everything below ``sequence``, as far as the log has it, is on all replicas that count."""
        replica.log.advance_committed(sequence)

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
        self._check_idle(replica)
        self._check_followed(replica)
        self._limit_floors(replica, sequence)
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
        self._begin(replica, "its history is being cut back")
        before, replica.history = replica.history, history

        def written(error: BaseException | None) -> None:
            if error is not None:
                replica.history = before
            self._ended(replica, done, error, must_put=error is not None)

        self._put_row(replica)
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
        self._check_idle(replica)
        self._check_followed(replica)
        if not 0 < sequence <= SEQUENCE_MAX or offset_bytes < 0:
            raise ValueError(f"{replica.describe()}: no log begins with {sequence} at offset {offset_bytes}")
        if replica.log.failed is not None:
            raise StorageError(f"{replica.log.directory}: {replica.log.failed}")
        self._limit_floors(replica, sequence)
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
        self._begin(replica, work)
        before = replica.history, replica._rows_end
        replica.history = history
        replica._rows_end = min(sequence, replica._rows_end or sequence)
        self._marks.limit(replica, sequence)
        self._put_row(replica)
        if is_whole:
            self._put_progress(replica, (0, 0))
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
            self.lost_end_comes(replica, is_whole=change.is_whole)
        elif replica.log.failed is None:
            replica.history, replica._rows_end = change.before
        self._ended(replica, change.done, error, must_put=error is not None)

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

        What it says of its own log is left out. What it says of the topic is kept with this replica, see the head of
        this file. It may be ahead of the log.

        Args:
            position: ``(epoch, n)`` of the records.
            is_whole: with what was staged they say all that there is: whatever was known before of the partition's
                channels is forgotten. Else they follow what was applied before.

        Raises:
            ValueError: they are of another partition, of an epoch that is over or was not noted, or do not follow; or
                the partition is led here. Nothing of them is written.
            StorageError: something else is being done with the replica.
        """
        self._check_idle(replica)
        self._check_followed(replica)
        epoch, n = position
        if epoch != replica.epoch:
            raise ValueError(f"{replica.describe()}: progress of epoch {epoch}")
        if not is_whole and (epoch, n - 1) != replica._taken:
            raise ValueError(f"{replica.describe()}: progress {n} does not follow {replica._taken}")
        for record in records:
            number = getattr(record, "partition", replica.number)
            if (getattr(record, "topic", ""), number) != (replica.topic, replica.number):
                raise ValueError(f"{replica.describe()}: {type(record).__name__} is not of this partition")
        put, about = self._metadata.put_own, replica._about
        if is_whole:
            self._forget_rows(replica, {each.channel for each in records if isinstance(each, PutChannel)})
            self._take_staged(replica)
            about = msgspec.structs.replace(about, paused=False, headers_from=0, settings={}, is_progress_lost=False)
        for record in records:
            if isinstance(record, PutTopic | PutTopicMeta | PutSettings):
                about = described(about, record, replica.number)
            elif not isinstance(record, PutLog | DeleteTopic | ShiftDueTimes):
                for statement in self._statements(replica, record):
                    put(statement)
        if is_whole or about != replica._about:
            replica._about = about
            if is_whole:
                replica._rows_end = 0
            self._put_row(replica, must_sync=False)
        replica._taken = position
        where = replica.topic, replica.number
        put(channel_store.put_replica_progress(*where, position, replica.log.committed_sequence))
        self._metadata.wait_here(partial(self._applied, replica, position, replica.floor, done))

    def stage(self, replica: Replica, records: Sequence[Record], done: Waiter) -> None:
        """Write a part of what is spilled, with the next flush: :meth:`apply` takes it with the rest of a whole state.

        Until then, nobody finds it: it is kept under cursors that a start removes.

        Raises:
            ValueError: it is something else, or of another partition; or the partition is led here.
            StorageError: something else is being done with the replica.
        """
        self._check_idle(replica)
        self._check_followed(replica)
        for record in records:
            if not isinstance(record, PutSpilled) or record.cleared_from is not None or record.gone:
                raise ValueError(f"{replica.describe()}: {type(record).__name__} is no part of a whole state")
            if (record.topic, record.partition) != (replica.topic, replica.number):
                raise ValueError(f"{replica.describe()}: {type(record).__name__} is not of this partition")
            if record.channel not in replica._staged:
                replica._staged[record.channel] = -self._channels.new_cursor()
            numbered = self._renumbered(replica._staged_packs, record)
            for statement in numbered.statements(replica._staged[record.channel]):
                self._metadata.put_own(statement)
        self._metadata.wait_here(partial(self._when_written, done))

    def _when_written(self, done: Waiter, error: BaseException | None) -> None:
        if error is not None:
            # the next flush has it all again: nothing is to be sent a second time
            self._metadata.wait_here(partial(self._when_written, done))
        else:
            done(None)

    def drop_staged(self, replica: Replica) -> None:
        """Forget what :meth:`stage` has written."""
        for cursor in replica._staged.values():
            for statement in channel_store.delete_cursor(cursor):
                self._metadata.put_own(statement)
        replica._staged, replica._staged_packs = {}, {}

    def _take_staged(self, replica: Replica) -> None:
        """Let what was staged be what is spilled."""
        for name, staged in replica._staged.items():
            cursor = replica._cursors.get(name)
            if cursor is None:
                cursor = replica._cursors[name] = self._channels.new_cursor()
            self._metadata.put_own(channel_store.move_packs(staged, cursor))
        replica._packs = replica._staged_packs
        replica._staged, replica._staged_packs = {}, {}

    def _forget_rows(self, replica: Replica, left: Collection[str]) -> None:
        """Forget where the channels are, and those that are not among ``left``."""
        put = self._metadata.put_own
        for name, cursor in replica._cursors.items():
            for statement in channel_store.delete_cursor(cursor):
                put(statement)
            if name not in left or name not in replica._ordered_floors:
                self._channels.forget_cursor(cursor)
            if name not in left:
                put(channel_store.delete_channel(replica.topic, replica.number, name))
        put(channel_store.delete_partition(replica.topic, replica.number))
        floors = {name: floor for name, floor in replica._ordered_floors.items() if name in left}
        # what is kept of these stays where it is: there is no moment without it
        replica._cursors = {name: cursor for name, cursor in replica._cursors.items() if name in floors}
        replica._kept_floors = {cursor: floors[name] for name, cursor in replica._cursors.items()}
        replica._ordered_floors = floors
        replica._floors, replica._packs = {}, {}
        replica._backlog_start = 1

    def keep_floors(self, replica: Replica, floors: Sequence[tuple[str, int]]) -> None:
        """Keep how far channels in order are, as the leader says, ahead of its progress; it outlives the process.

        What goes back is synced with the next flush, so before the progress is stored that comes behind it.

        Args:
            floors: channels, and the sequence below which everything is finished; 0: what is kept is not so any more.

        Raises:
            ValueError: it is led here.
            StorageError: something else is being done with the replica, or they cannot be written.
        """
        self._check_idle(replica)
        self._check_followed(replica)
        for name, floor in floors:
            cursor = replica._cursors.get(name)
            if floor:
                replica._ordered_floors[name] = floor
                if cursor is not None:
                    self._keep_floor(replica, cursor, floor)
                continue
            replica._ordered_floors.pop(name, None)
            if cursor is not None:
                replica._kept_floors.pop(cursor, None)
                if self._channels.unkeep_floor(cursor):
                    self._sync_floors()

    def _keep_floor(self, replica: Replica, cursor: int, floor: int) -> None:
        if self._channels.keep_floor(cursor, floor):
            self._sync_floors()
        replica._kept_floors[cursor] = floor

    def _sync_floors(self) -> None:
        """Have what went back survive a power loss: who leads after one would pass over what is between."""
        self._syncing_floors += 1
        self._progress.ask(Question(lambda _store: self._channels.sync_floors(), self._floors_synced))

    def _floors_synced(self, _answer: object, error: BaseException | None) -> None:
        self._syncing_floors -= 1
        if error is not None:
            if isinstance(error, StorageError):
                self._on_problem(error)
            self._sync_floors()  # with the next flush; no progress is stored meanwhile

    def _limit_floors(self, replica: Replica, end: int) -> None:
        """Let no channel in order be beyond a log that was cut back, or lost its end with the power: the sequences from
        there on are other messages' from now on, which nobody has finished.

        Raises:
            StorageError: it cannot be written.
        """
        for name, floor in replica._ordered_floors.items():
            replica._ordered_floors[name] = min(floor, end)
        for cursor, floor in replica._kept_floors.items():
            if floor > end:
                self._keep_floor(replica, cursor, end)

    def _statements(self, replica: Replica, record: ChannelRecord | PutBacklog) -> list[Statement]:
        """Find what a record does to this node's database, which has numbers of its own."""
        if isinstance(record, PutBacklog):
            replica._backlog_start = record.backlog_start
            return record.statements()
        name, cursors = record.channel, replica._cursors
        if isinstance(record, DeleteProgress):
            cursor = cursors.pop(name, None)
            replica._floors.pop(name, None)
            replica._ordered_floors.pop(name, None)
            if cursor is None:
                return []
            replica._kept_floors.pop(cursor, None)
            self._channels.forget_cursor(cursor)
            return record.statements(cursor)
        if isinstance(record, DeleteChannel):
            return record.statements()
        cursor = cursors.get(name)
        if cursor is None:
            cursor = cursors[name] = self._channels.new_cursor()
            if name in replica._ordered_floors:  # it was told before there was a place for it
                self._keep_floor(replica, cursor, replica._ordered_floors[name])
        if isinstance(record, PutProgress):
            replica._floors[name] = record.floor
        if isinstance(record, PutSpilled):
            record = self._renumbered(replica._packs, record)
        return record.statements(cursor)

    def _renumbered(self, numbers: dict[int, int], record: PutSpilled) -> PutSpilled:
        """Give packs the numbers that they have here; what is said of one that is not here is left out."""
        for pack in record.packs:
            if pack.number not in numbers:
                numbers[pack.number] = self._channels.new_pack()
        done = {number: sequences for number, sequences in record.done.items() if number in numbers}
        gone = [number for number in record.gone if number in numbers]
        record = msgspec.structs.replace(record, done=done, gone=gone).renumbered(numbers)
        for number in gone:
            del numbers[number]
        return record

    def _applied(
        self, replica: Replica, position: tuple[int, int], floor: int, done: Waiter, error: BaseException | None
    ) -> None:
        if error is not None or self._syncing_floors:
            # the next flush has it all again: nothing is to be sent a second time
            self._metadata.wait_here(partial(self._applied, replica, position, floor, done))
            return
        replica.progress = position
        replica.durable_floor = floor
        done(None)

    def whole_state(self, replica: Replica, done: StateDone) -> None:
        """Have everything read that a new replica of a partition led here needs: records for :meth:`apply`, and what
        is to be read of spilled messages for :meth:`stage`, by :meth:`read_spilled`.

        Args:
            done: given the records, which say what is so behind the flush that ``on_records`` was given last, and the
                spilled messages as of then, to be closed; or nothing, and why they could not be read.

        Raises:
            ValueError: it is not led here.
        """
        if replica.partition is None:
            raise ValueError(f"{replica.describe()}: it is not led here")
        partition = replica.partition

        def read(found: tuple[list[Record], SpilledState | None] | None, error: BaseException | None) -> None:
            records, spilled = found or ([], None)
            if error is None and replica.partition is not partition:
                error = StorageError(f"topic {replica.topic} partition {replica.number}: it is not led here any more")
                if spilled is not None:
                    spilled.close()
            if error is not None:
                done([], None, error)
            else:
                done([*_records_of(replica), *records], spilled, None)

        self._progress.ask(Question(partial(_whole_state, replica.topic, replica.number), read))
        self._channels.is_urgent = True

    def read_spilled(self, spilled: SpilledState, done: Callable[[list[Record], BaseException | None], None]) -> None:
        """Have more of it read; ``done`` is given the records, none when that was all, or why they cannot be read."""

        def read(records: list[Record] | None, error: BaseException | None) -> None:
            done(records or [], error)

        self._progress.ask(Question(lambda _store: spilled.read(), read))
        self._channels.is_urgent = True

    # -- leading -------------------------------------------------------------------------------------------------

    def promote(self, replica: Replica, epoch: int, meta: TopicMeta, done: Waiter) -> None:
        """Lead a partition: it is in ``Broker.topics`` when ``done`` is called, its channels where a start has them.

        It takes publishes from then on. Nothing that is not known to be committed is delivered before
        :meth:`Broker.set_watermark` says so. :meth:`note_epoch` comes first, perhaps in the same turn.

        The topic is as the last leader of the partition said: paused, with its settings. When partitions of it are led
        here already, what is set here for it goes first, and it is paused if either of the two is.

        Args:
            epoch: that was noted, which its batches carry from now on.
            meta: of the topic; one that is older than what the partition's last leader knew is not taken.

        Raises:
            ValueError: another epoch was noted, or it is led here.
            StorageError: something else is being done with it, or its log takes nothing any more; or there is a topic
                of its name that is not replicated, which it must not become a partition of.
        """
        if epoch != replica.epoch:
            raise ValueError(f"{replica.describe()}: epoch {epoch} was not noted")
        if self._is_here(replica.topic):
            raise StorageError(f"there is a topic {replica.topic} on this node alone: delete it here")
        if replica.log.failed is not None:
            raise StorageError(f"{replica.log.directory}: {replica.log.failed}")
        self._begin(replica, _PROMOTING)
        then = partial(self._promoted, replica, meta, done)
        self._progress.ask(Question(lambda store: store.load_partition(replica.topic, replica.number), then))
        self._channels.is_urgent = True

    def _promoted(
        self, replica: Replica, meta: TopicMeta, done: Waiter, stored: StoredTopics, error: BaseException | None
    ) -> None:
        if error is None:
            log = replica.log
            rows_end = min(replica._rows_end or log.next_sequence, log.next_sequence)
            try:
                self._limit_floors(replica, rows_end)
                stored.logs[replica.topic, replica.number] = self._marks.mark(replica)
                self._adoption.keep_rows(replica.topic, self._keep)
                log.epoch = replica.epoch
                replica.partition = self._adoption.begin(
                    replica.topic, replica.number, log, stored, replica._about, meta, rows_end, replica._kept_floors
                )
                self._publishes.note_snapshot(replica.partition)
                replica._packs, replica._rows_end = {}, 0
                self._put_row(replica, must_sync=False)
                self._put_progress(replica, (0, 0))
                self._marks.forget(replica)
                self.drop_staged(replica)
            except Exception as failure:  # noqa: BLE001 - the owner tells it, and tries again
                error = failure
                replica.partition = None
                self._adoption.undo(replica.topic, replica.number)
        replica.work = ""
        done(error)

    def demote(
        self,
        replica: Replica,
        error: BaseException,
        unwritten: BaseException | None = None,
        keep: Callable[[list[PublishGroup]], None] = lambda groups: None,
    ) -> list[Subscription]:
        """Lead a partition no longer; what it has is kept, and :meth:`promote` goes on with it.

        The whole state has to come before :meth:`apply` takes anything of another leader.

        Args:
            error: what those are told whose publishes are not committed; they may be stored all the same.
            unwritten: as for :meth:`flintmq.broker.partition.Partition.hand_over`.
            keep: called with what was written and is not committed; nobody is told of that yet.

        Returns:
            its consumers, whose connections are to be closed.

        Raises:
            ValueError: it is not led here.
        """
        partition = replica.partition
        if partition is None:
            raise ValueError(f"{replica.describe()}: it is not led here")
        subscriptions, channels = self._adoption.end(partition)
        self._released(replica, partition, channels)
        if not any(other.partition is not None for other in self._by_topic[replica.topic].values()):
            self._adoption.keep_rows(replica.topic, None)
        self._put_progress(replica, (0, 0))
        keep(partition.hand_over(error, unwritten))
        return subscriptions

    def take_in(
        self, topic: Topic, topic_number: int, settings: Mapping[str, Settings], done: Waiter
    ) -> list[Subscription]:
        """Make replicas of the partitions of a topic that this node alone has; they go on as they are.

        Nothing of it is led afterwards: :meth:`promote` goes on with it, as after :meth:`demote`.

        Args:
            topic_number: that the cluster has given it.
            settings: what is set for it, under an empty name, and for its channels.

        Returns:
            its consumers, whose connections are to be closed.

        Raises:
            ReplicaConflict: it is ephemeral, being made, or replicated already; nothing has changed.
        """
        name = topic.name
        logs = {number: partition.log for number, partition in topic.partitions.items()}
        stored_logs = {n: log for n, log in logs.items() if isinstance(log, PartitionLog) and log.is_created}
        if len(stored_logs) < len(logs) or self.of_topic(name) or any(p.is_held for p in topic.partitions.values()):
            raise ReplicaConflict(f"topic {name} cannot become one of the cluster now: it is being made or changed")
        encoded = {channel: encode_settings(each) for channel, each in settings.items() if each != NOTHING}
        for statement in channel_store.create_replica_tables():
            self._metadata.put_own(statement)
        meta, is_paused = encode_meta(topic.meta), topic.paused
        subscriptions: list[Subscription] = []
        for number, partition in list(topic.partitions.items()):
            log = stored_logs[number]
            about = StoredAbout(meta, is_paused, partition.headers_from, encoded)
            history = found_history(log, [], 0)
            replica = Replica(name, number, StoredReplica(topic_number, log.log_id, 0, history, 0, _HELD, about), log)
            consumers, channels = self._adoption.end(partition)
            subscriptions += consumers
            self._add(replica)
            self._released(replica, partition, channels)
            self._put_row(replica)
            self._put_progress(replica, (0, 0))
            partition.hand_over(StorageError(f"topic {name} becomes one of the cluster: publish it again"))
        for statement in channel_store.delete_own_rows(name):
            self._metadata.put_own(statement, must_sync=True)
        for channel in encoded:
            for statement in channel_store.put_settings(name, channel, None):
                self._metadata.put_own(statement, must_sync=True)
        self._metadata.wait_here(done)
        return subscriptions

    def _released(self, replica: Replica, partition: Partition, channels: Mapping[str, tuple[int, int]]) -> None:
        """Keep where the channels of a partition are that is led here no longer."""
        replica._cursors = {name: cursor for name, (cursor, _) in channels.items()}
        replica._floors = {name: floor for name, (_, floor) in channels.items()}
        replica._backlog_start = partition.backlog_start
        replica.durable_floor = min(partition.durable_floor, replica.floor)
        replica._kept_floors = {}
        replica._ordered_floors = {}
        replica.partition = None
        self._marks.replace(partition, replica)

    def _hand_on(self, records: list[Record], ended: Waiter) -> None:
        """Give those records of a flush that are of partitions led here to who wants them."""
        found: Records = {}
        if self.on_records is not None:
            for record in records:
                if isinstance(record, TopicRecord):
                    for number, replica in self._by_topic.get(record.topic, {}).items():
                        if replica.partition is not None:
                            found.setdefault((record.topic, number), []).append(record)
                elif isinstance(record, ChannelRecord | PutBacklog):
                    if not isinstance(record, PutBacklog) and is_ephemeral(record.channel):
                        continue
                    key = record.topic, record.partition
                    if key in self._replicas and self._replicas[key].partition is not None:
                        found.setdefault(key, []).append(record)
        if found and self.on_records is not None:
            self.on_records(found, ended)
        else:
            ended(None)

    def _keep(self, record: TopicRecord) -> list[Statement]:
        """Find what is to be written of a topic that is replicated: the rows of those of its partitions led here."""
        statements = []
        for number, replica in self._by_topic.get(record.topic, {}).items():
            if replica.partition is not None or replica.work == _PROMOTING:
                replica._about = described(replica._about, record, number)
                statements.append(channel_store.put_replica(replica.topic, number, replica.stored()))
        return statements

    # -- what they have in common --------------------------------------------------------------------------------

    def _check_idle(self, replica: Replica) -> None:
        if replica.is_deleted or replica.work:
            work = replica.work or "it is gone"
            raise StorageError(f"replica of topic {replica.topic} partition {replica.number}: {work}")

    def _check_followed(self, replica: Replica) -> None:
        if replica.partition is not None:
            raise ValueError(f"{replica.describe()}: it is led here, demote it first")

    def _begin(self, replica: Replica, work: str) -> None:
        self._check_idle(replica)
        self._check_followed(replica)
        replica.work = work

    def _ended(self, replica: Replica, done: Waiter, error: BaseException | None, must_put: bool) -> None:
        replica.work = ""
        if must_put:
            self._put_row(replica)
        done(error)

    def _put_row(self, replica: Replica, must_sync: bool = True) -> None:
        self._metadata.put_own(channel_store.put_replica(replica.topic, replica.number, replica.stored()), must_sync)

    def _put_progress(self, replica: Replica, progress: tuple[int, int]) -> None:
        replica.progress = replica._taken = progress
        committed = replica.log.committed_sequence
        where = replica.topic, replica.number
        self._metadata.put_own(channel_store.put_replica_progress(*where, progress, committed))


def _place(key: _Key, replica: StoredReplica, stored: StoredTopics) -> LogPlace:
    mark = stored.logs.get(key, _NO_MARK)
    durable_end = mark.written if stored.is_same_boot else mark.synced
    return LogPlace(
        log_directory(*key),
        key[1],
        durable_end=max(durable_end, 1),
        committed_end=max(replica.committed, 1),
        log_id=replica.log_id,
        is_replica=True,
    )


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


def _records_of(replica: Replica) -> list[Record]:
    """Build the records of the topic that a replica has."""
    topic, about = replica.topic, replica._about
    headers_from = {replica.number: about.headers_from} if about.headers_from else {}
    records: list[Record] = [
        PutTopic(topic, about.paused),
        PutTopicMeta(topic, about.meta, [replica.number], headers_from),
    ]
    return records + [PutSettings(topic, channel, settings) for channel, settings in about.settings.items()]


def _whole_state(topic: str, number: int, store: ChannelStore) -> tuple[list[Record], SpilledState | None]:
    """Read all that the database has of a partition, but for what is spilled. Blocks; for a worker thread."""
    stored = store.load_partition(topic, number)
    records: list[Record] = []
    if (topic, number) in stored.partitions:
        records.append(PutBacklog(topic, number, *stored.partitions[topic, number]))
    for (_, _, name), channel in stored.channels.items():
        records.append(PutChannel(topic, number, name, channel.paused, channel.skipped))
    for each in stored.cursors:
        where = topic, number, each.channel
        if not each.is_lost:
            row, count = each.row, each.spilled_count + each.spilled_missing
            lists = row.deferred, row.attempts, row.holes
            records.append(PutProgress(*where, row.floor, each.window, *lists, count))
    cursors = {each.channel: each.id for each in stored.cursors if each.spilled_next_due_ns is not None}
    return records, SpilledState(store.snapshot(), topic, number, cursors) if cursors else None


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
