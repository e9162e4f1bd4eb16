"""All replicas of partitions on this node: opened, made, removed and set aside.

What is done with one that is here is elsewhere: :mod:`flintmq.broker.followed_replicas` while another node leads it,
:mod:`flintmq.broker.led_replicas` while this one does.

Rules of this file: no clock; every method is called on the loop, but what is handed to a :class:`Question`; ``done`` is
called once: with None when what was asked for survives a power loss, or with why it does not.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice

import msgspec

from flintmq.broker.channels import Channels
from flintmq.broker.log_marks import LogMarks
from flintmq.broker.logs import Logs, log_directory
from flintmq.broker.metadata import Metadata, Waiter
from flintmq.broker.progress import Progress, Question
from flintmq.broker.replica import HELD, REMOVING, SETTING_ASIDE, Replica, found_history
from flintmq.broker.replica_rows import KeptFloors, ReplicaRows, delete_rows
from flintmq.errors import FlintError, StorageError
from flintmq.storage import ChannelStore, Creation, Damage, LogPlace, PartitionLog, channel_store
from flintmq.storage.channel_store import StoredAbout, StoredLog, StoredReplica, StoredTopics
from flintmq.storage.records import Record
from flintmq.topic_meta import TopicMeta, encode_meta

_CREATIONS_MAX = 64  # replicas whose files are made at once
_NO_MARK = StoredLog(0, 1, 1)
Key = tuple[str, int]
"""A topic and the number of a partition."""


class ReplicaConflict(FlintError):
    """This node has something else under the name of a replica, or is doing something else with it."""


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


class Replicas(Mapping[Key, Replica]):
    """Owner of the replicas, by topic and number.

    Args:
        kept: where the floors of channels in order are kept.
        is_alone: whether there is a topic of a name that is not replicated.
        on_damage: told of messages that are missing.
        on_problem: told what could not be written, and is tried again.

    Attributes:
        new_count: replicas that have no files yet, or whose files are being made.
        hand_on: given what each flush has written, and whom to tell then, as soon as there is a replica.
        is_alone: as above.
        on_damaged: told of a replica that lacks something which it had; perhaps in the middle of reading it.
        on_settled: told of the directory of one, as :attr:`flintmq.broker.replica.Replica.on_settled`.
    """

    def __init__(
        self,
        logs: Logs,
        channels: Channels,
        metadata: Metadata,
        marks: LogMarks,
        progress: Progress,
        kept: KeptFloors,
        is_alone: Callable[[str], bool],
        on_damage: Callable[[Damage], None],
        on_problem: Callable[[StorageError], None],
    ) -> None:
        self._logs = logs
        self._channels = channels
        self._metadata = metadata
        self._marks = marks
        self._progress = progress
        self._kept = kept
        self.is_alone = is_alone
        self._on_damage = on_damage
        self._on_problem = on_problem
        self.hand_on: Callable[[list[Record], Waiter], None] | None = None
        self.on_damaged: Callable[[Replica], None] | None = None
        self.on_settled: Callable[[str, bool], None] = lambda _directory, _is_lost: None
        self._by_directory: dict[str, Replica] = {}
        self._replicas: dict[Key, Replica] = {}
        self._by_topic: dict[str, dict[int, Replica]] = {}
        self._new: dict[Replica, NewReplica] = {}
        self.new_count = 0

    def __getitem__(self, key: Key) -> Replica:
        return self._replicas[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def of_topic(self, topic: str) -> Mapping[int, Replica]:
        """Find the replicas of a topic, by number."""
        return self._by_topic.get(topic, {})

    def cursors(self) -> list[int]:
        """The numbers of the cursors of their channels."""
        return [cursor for replica in self._replicas.values() for cursor in replica.rows.cursors.values()]

    def logs(self) -> list[PartitionLog]:
        """The log of every replica, also of those that are led here."""
        return [replica.log for replica in self._replicas.values()]

    # -- start ---------------------------------------------------------------------------------------------------

    def open(self, stored: StoredTopics, floors: Mapping[int, int], wall_ns: int, strays: Iterable[Key]) -> None:
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
        held: dict[Key, StoredReplica] = {}
        cursors: dict[Key, dict[str, int]] = {}
        for (topic, number, channel), its in stored.channels.items():
            if (topic, number) in stored.replicas:
                cursors.setdefault((topic, number), {})[channel] = its.cursor
        for key, row in stored.replicas.items():
            if row.state == HELD:
                held[key] = row
                continue
            moved = self._logs.move_replica(*key, is_removed=row.state == REMOVING)
            if moved and row.state == REMOVING:
                self._progress.remove_later(moved)
            delete_rows(self._metadata, self._channels, *key, cursors.get(key, {}))
        lost: list[tuple[str, int, int]] = []
        self._logs.on_lost = lambda *what: lost.append(what)
        if held:
            self._open_held(held, cursors, stored, floors, wall_ns)
        for topic in {topic for topic, _ in (*strays, *stored.replicas)}:
            if not self.of_topic(topic) and not self.is_alone(topic):
                self._drop_empty(topic)
        self._logs.on_lost = self._log_lost
        for directory, first, end in lost:
            self._log_lost(directory, first, end)
        for replica in self._replicas.values():
            if replica.lost_from:
                replica.log.hold_from(replica.lost_from)

    def _clear(self, key: Key) -> None:
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
        held: Mapping[Key, StoredReplica],
        cursors: Mapping[Key, dict[str, int]],
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
        row_floors: dict[Key, dict[str, int]] = {}
        for each in stored.cursors:
            row_floors.setdefault((each.topic, each.partition), {})[each.channel] = each.row.floor
        damaged = {(each.topic, each.partition) for each in stored.cursors if each.is_lost or each.spilled_missing}
        for (key, row), log in zip(held.items(), logs, strict=True):
            if log.log_id != row.log_id:
                log = self._open_anew(key, row, log, wall_ns)
            replica = self.add(*key, row, log)
            backlog_start = stored.partitions.get(key, (1, None))[0]
            replica.rows.restore(cursors.get(key, {}), row_floors.get(key, {}), floors, backlog_start)
            replica.history = found_history(log, row.history, row.epoch)
            replica.epoch = max([row.epoch, *(epoch for epoch, _ in replica.history[-1:])])
            if stored.is_behind or key in unsure:
                replica.progress = replica.taken = (0, 0)  # what is missing is not known: it comes as a whole
            self._marks.restore(replica, stored.logs.get(key, _NO_MARK))
            if stored.is_older or key in damaged:
                self._note_damage(replica, is_progress_lost=True)

    def _open_anew(self, key: Key, row: StoredReplica, log: PartitionLog, wall_ns: int) -> PartitionLog:
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

    def add(self, topic: str, number: int, stored: StoredReplica, log: PartitionLog) -> Replica:
        """Have a replica of which the log is there, or is to be made."""
        rows = ReplicaRows(topic, number, self._metadata, self._channels, self._kept)
        replica = Replica(topic, number, stored, log, self._metadata, rows)
        replica.on_settled = partial(self.on_settled, log.directory)
        self._progress.hand_on = self.hand_on
        self._replicas[topic, number] = replica
        self._by_directory[log.directory] = replica
        self._by_topic.setdefault(topic, {})[number] = replica
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
        if replica.note_damage(lost_from, is_progress_lost) and self.on_damaged is not None:
            self.on_damaged(replica)

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
        if self.is_alone(topic):
            raise ReplicaConflict(f"there is a topic {topic} on this node alone: delete it, or take another name")
        stored = StoredReplica(topic_number, log_id, 0, [], 0, HELD, StoredAbout(encode_meta(topic_meta)))
        replica = self.add(topic, number, stored, self._logs.new(topic, number, log_id, is_replica=True))
        replica.work = "it is being created"
        self.new_count += 1
        for statement in channel_store.create_replica_tables():
            self._metadata.put_own(statement)
        replica.put()
        self._metadata.wait_here(partial(self._recorded, replica, done))
        return replica

    def _recorded(self, replica: Replica, done: Waiter, error: BaseException | None) -> None:
        if error is not None:
            self._refuse(replica, done, error)
        else:
            self._new[replica] = NewReplica(replica, done)

    def _refuse(self, replica: Replica, done: Waiter, error: BaseException) -> None:
        where = f"topic {replica.topic} partition {replica.number}"
        self.new_count -= 1
        self._forget(replica)
        self._delete_rows(replica)
        refusal = StorageError(f"{where}: a replica cannot be created: {error}")
        refusal.__cause__ = error
        done(refusal)

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
                self.new_count -= 1
                replica.work = ""
                self._marks.restore(replica, _NO_MARK)
                new.done(None)
                return
            log.close()
            error = StorageError(f"there is a log {log.log_id} in {log.directory}: move that directory away")
        self._refuse(replica, new.done, error)

    def remove(self, replica: Replica, done: Waiter) -> None:
        """Remove a replica that is not led here, with all that it has."""
        self._go(replica, REMOVING, "it is being removed", done)

    def set_aside(self, replica: Replica, done: Waiter) -> None:
        """Put the log of a replica that is not led here out of the way, and forget what else there is of it.

        The log is kept in the directory ``set-aside`` of the data directory until somebody removes it.
        """
        self._go(replica, SETTING_ASIDE, "it is being set aside", done)

    def _go(self, replica: Replica, state: int, work: str, done: Waiter) -> None:
        replica.begin(work)
        if replica.state != HELD:  # its directory could not be moved before
            self._move(replica, done)
            return
        replica.state = state
        replica.put()
        self._metadata.wait_here(partial(self._leave, replica, done))

    def _leave(self, replica: Replica, done: Waiter, error: BaseException | None) -> None:
        if error is not None:
            replica.state = HELD
            replica.work = ""
            replica.put()
            done(error)
        elif replica.log.is_syncing:
            self._metadata.wait_here(partial(self._leave, replica, done))
        else:
            replica.log.close()
            self._move(replica, done)

    def _move(self, replica: Replica, done: Waiter) -> None:
        begun: list[bool] = []
        is_last = not self.is_alone(replica.topic) and all(
            each.state != HELD for each in self.of_topic(replica.topic).values()
        )

        def move(_store: ChannelStore) -> str:
            begun.append(True)
            moved = self._logs.move_replica(replica.topic, replica.number, replica.state == REMOVING)
            if is_last:
                self._drop_empty(replica.topic)
            return moved

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
        if moved and replica.state == REMOVING:
            self._progress.remove_later(moved)
        self._forget(replica)
        replica.rows.drop_staged()
        self._delete_rows(replica)
        self._metadata.wait_here(done)

    def _drop_empty(self, topic: str) -> None:
        """Remove the directory of a topic in which there is nothing any more. Blocks."""
        with suppress(StorageError):  # the next start tries again
            self._logs.drop_empty(topic)

    def _delete_rows(self, replica: Replica) -> None:
        delete_rows(self._metadata, self._channels, replica.topic, replica.number, replica.rows.cursors)


def _place(key: Key, replica: StoredReplica, stored: StoredTopics) -> LogPlace:
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
