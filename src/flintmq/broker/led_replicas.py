"""Partitions that are kept on several nodes, while this one leads them: it begins, it ends, what others need of them.

    promote ─► a partition in Broker.topics, as a start would make it     demote ─► a replica again, whose rows stay
    whole_state, read_spilled ─► what a new replica needs                 hand_on ─► what each flush has written
    take_in ─► replicas of a topic that this node alone had               known, followed ─► the channels of a topic

Rules of this file: no clock; every method is called on the loop, but what is handed to a :class:`Question`; ``done`` is
called once.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import msgspec

from flintmq.broker.adoption import Adoption
from flintmq.broker.channels import Channels, FloorKeeper
from flintmq.broker.known_topic import KnownChannel, KnownTopic, completed, merged
from flintmq.broker.log_marks import LogMarks
from flintmq.broker.metadata import Metadata, Waiter
from flintmq.broker.partition import Partition, PublishGroup
from flintmq.broker.progress import Progress, Question
from flintmq.broker.publishes import Publishes
from flintmq.broker.replica import HELD, Replica, described, found_history
from flintmq.broker.replicas import Key, ReplicaConflict, Replicas
from flintmq.broker.subscription import Subscription
from flintmq.broker.topic import Topic
from flintmq.errors import StorageError
from flintmq.names import is_ephemeral
from flintmq.settings import NOTHING, Settings, decode_settings, encode_settings
from flintmq.storage import ChannelStore, DatabaseSnapshot, PartitionLog, channel_store, packs
from flintmq.storage.channel_store import StoredAbout, StoredChannel, StoredReplica, StoredTopics
from flintmq.storage.records import (
    ChannelRecord,
    PutBacklog,
    PutChannel,
    PutProgress,
    PutSpilled,
    Record,
    TopicRecord,
)
from flintmq.storage.rows import Statement
from flintmq.topic_meta import TopicMeta, encode_meta

STATE_READ_BYTES = 1024 * 1024
"""Of spilled messages that are read at once for another node, about."""
_PROMOTING = "it is being promoted"
Records = dict[Key, list[Record]]
"""Records by topic and partition; those of a topic go with each of its partitions."""
OnRecords = Callable[[Records, Waiter], None]
StateDone = Callable[[list[Record], "SpilledState | None", BaseException | None], None]


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


class LedReplicas:
    """Lets this node lead partitions, and lead them no longer.

    Attributes:
        on_records: given, behind each flush that was written, its records of the partitions led here, and whom to tell
            when other nodes have them: only then those are told who wait for what was changed. None: at once.
    """

    def __init__(
        self,
        replicas: Replicas,
        channels: Channels,
        metadata: Metadata,
        marks: LogMarks,
        progress: Progress,
        publishes: Publishes,
        adoption: Adoption,
    ) -> None:
        self._replicas = replicas
        self._channels = channels
        self._metadata = metadata
        self._marks = marks
        self._progress = progress
        self._publishes = publishes
        self._adoption = adoption
        self.on_records: OnRecords | None = None
        replicas.hand_on = self._hand_on

    def keep_floors_by(self, keeper: FloorKeeper) -> None:
        """Have the floors of channels in order brought to other nodes: of those that are made from now on."""
        self._channels.floor_keeper = keeper

    def known(self, topic: str) -> KnownTopic | None:
        """Return the channels of a topic and what is set for it; None: nothing of it is led here."""
        return self._adoption.known(topic)

    def followed(
        self, topic: str, numbers: Collection[int], done: Callable[[list[KnownTopic], BaseException | None], None]
    ) -> None:
        """Have read what those of a topic's partitions that are followed here have of its channels.

        It is as old as what their leaders have sent last. ``done`` is given one for each, or why it cannot be read.
        """
        replicas = [replica for number, replica in self._replicas.of_topic(topic).items() if number in numbers]
        followed = {replica.number: replica.about for replica in replicas if replica.partition is None}

        def read(store: ChannelStore) -> list[KnownTopic]:
            return [_known(store.load_partition(topic, number), about) for number, about in followed.items()]

        self._progress.ask(Question(read, lambda found, error: done(found or [], error)))
        self._channels.is_urgent = True

    def promote(
        self,
        replica: Replica,
        epoch: int,
        meta: TopicMeta,
        done: Waiter,
        begins_with: Sequence[KnownTopic] | None = None,
    ) -> None:
        """Lead a partition: it is in ``Broker.topics`` when ``done`` is called, its channels where a start has them.

        It takes publishes from then on. Nothing that is not known to be committed is delivered before
        :meth:`Broker.set_watermark` says so. :meth:`Replica.note_epoch` comes first, perhaps in the same turn.

        The topic is as the last leader of the partition said: paused, with its settings. When partitions of it are led
        here already, what is set here for it goes first, and it is paused if either of the two is.

        Args:
            epoch: that was noted, which its batches carry from now on.
            meta: of the topic; one that is older than what the partition's last leader knew is not taken.
            begins_with: what is known of the topic elsewhere, of a partition that never had a message: it gets these
                channels and those that the topic has here, from its first message on; see :meth:`hold_until_stored`.
                None: it goes on with those that it has.

        Raises:
            ValueError: another epoch was noted, or it is led here.
            StorageError: something else is being done with it, or its log takes nothing any more; or there is a topic
                of its name that is not replicated, which it must not become a partition of.
        """
        if epoch != replica.epoch:
            raise ValueError(f"{replica.describe()}: epoch {epoch} was not noted")
        if self._replicas.is_alone(replica.topic):
            raise StorageError(f"there is a topic {replica.topic} on this node alone: delete it here")
        if replica.log.failed is not None:
            raise StorageError(f"{replica.log.directory}: {replica.log.failed}")
        replica.begin(_PROMOTING)
        then = partial(self._promoted, replica, meta, begins_with, done)
        self._progress.ask(Question(lambda store: store.load_partition(replica.topic, replica.number), then))
        self._channels.is_urgent = True

    def _promoted(
        self,
        replica: Replica,
        meta: TopicMeta,
        begins_with: Sequence[KnownTopic] | None,
        done: Waiter,
        stored: StoredTopics,
        error: BaseException | None,
    ) -> None:
        if error is None:
            log = replica.log
            rows_end = min(replica.rows_end or log.next_sequence, log.next_sequence)
            try:
                replica.rows.limit_floors(rows_end)
                stored.logs[replica.topic, replica.number] = self._marks.mark(replica)
                self._adoption.keep_rows(replica.topic, self._keep)
                if begins_with is not None:
                    self._give_channels(replica, stored, begins_with)
                log.epoch = replica.epoch
                replica.partition = self._adoption.begin(
                    replica.topic, replica.number, log, stored, replica.about, meta, rows_end, replica.rows.kept_floors
                )
                self._publishes.note_snapshot(replica.partition)
                replica.rows_end = 0
                replica.put(must_sync=False)
                replica.forget_progress()
                self._marks.forget(replica)
                replica.rows.led()
            except Exception as failure:  # noqa: BLE001 - the owner tells it, and tries again
                error = failure
                replica.partition = None
                self._adoption.undo(replica.topic, replica.number)
        replica.work = ""
        done(error)

    def _give_channels(self, replica: Replica, stored: StoredTopics, begins_with: Sequence[KnownTopic]) -> None:
        """Let a partition without messages have the channels of its topic, as if they had been made there."""
        here, about = self.known(replica.topic), replica.about
        known = merged([*begins_with, *(() if here is None else (here,))])
        # what its leader before has said of the topic goes first
        own = {channel: decode_settings(each) for channel, each in about.settings.items()}
        settings = {each: completed(own.get(each, its), its) for each, its in {**own, **known.settings}.items()}
        encoded = {channel: encode_settings(each) for channel, each in settings.items() if each != NOTHING}
        replica.about = msgspec.structs.replace(about, paused=about.paused or known.paused, settings=encoded)
        for name, channel in known.channels.items():
            key = replica.topic, replica.number, name
            stored.channels.setdefault(key, StoredChannel(0, channel.paused, channel.skipped))

    def hold_until_stored(self, replica: Replica, done: Callable[[], None]) -> None:
        """Store nothing in a partition led here before everything that it began with is on all replicas in sync.

        Whatever is acknowledged later is then delivered to its channels, whoever leads. What is published meanwhile
        waits, or is refused when the database cannot take it.

        Args:
            done: called when it is so, unless the partition is led here no longer.

        Raises:
            ValueError: it is not led here.
        """
        partition = replica.partition
        if partition is None:
            raise ValueError(f"{replica.describe()}: it is not led here")
        partition.hold()

        def stored(error: BaseException | None) -> None:
            if replica.partition is not partition:
                return
            if error is not None:
                what = f"topic {replica.topic} partition {replica.number}: its channels cannot be stored: {error}"
                partition.end_pending(StorageError(what))
                self._metadata.wait(stored)
                return
            partition.release()
            if not partition.is_held:
                self._publishes.take_up(partition)
            done()

        if self._metadata.wait_for_all(stored):
            self._channels.is_urgent = True
        else:
            stored(None)

    def demote(
        self,
        replica: Replica,
        error: BaseException,
        unwritten: BaseException | None = None,
        keep: Callable[[list[PublishGroup]], None] = lambda groups: None,
    ) -> list[Subscription]:
        """Lead a partition no longer; what it has is kept, and :meth:`promote` goes on with it.

        The whole state has to come before :meth:`FollowedReplicas.apply` takes anything of another leader.

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
        if not any(other.partition is not None for other in self._replicas.of_topic(replica.topic).values()):
            self._adoption.keep_rows(replica.topic, None)
        replica.forget_progress()
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
        is_held = any(partition.is_held for partition in topic.partitions.values())
        if len(stored_logs) < len(logs) or self._replicas.of_topic(name) or is_held:
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
            stored = StoredReplica(topic_number, log.log_id, 0, history, 0, HELD, about)
            consumers, channels = self._adoption.end(partition)
            subscriptions += consumers
            replica = self._replicas.add(name, number, stored, log)
            self._released(replica, partition, channels)
            replica.put()
            replica.forget_progress()
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
        cursors = {name: cursor for name, (cursor, _) in channels.items()}
        floors = {name: floor for name, (_, floor) in channels.items()}
        replica.rows.restore(cursors, floors, {}, partition.backlog_start)
        replica.rows.durable_floor = min(partition.durable_floor, replica.floor)
        replica.partition = None
        self._marks.replace(partition, replica)

    def whole_state(self, replica: Replica, done: StateDone) -> None:
        """Have everything read that a new replica of a partition led here needs: records for
        :meth:`FollowedReplicas.apply`, and what is to be read of spilled messages, by :meth:`read_spilled`, for
        :meth:`FollowedReplicas.stage`.

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
                done([*replica.topic_records(), *records], spilled, None)

        self._progress.ask(Question(partial(_whole_state, replica.topic, replica.number), read))
        self._channels.is_urgent = True

    def read_spilled(self, spilled: SpilledState, done: Callable[[list[Record], BaseException | None], None]) -> None:
        """Have more of it read; ``done`` is given the records, none when that was all, or why they cannot be read."""

        def read(records: list[Record] | None, error: BaseException | None) -> None:
            done(records or [], error)

        self._progress.ask(Question(lambda _store: spilled.read(), read))
        self._channels.is_urgent = True

    def _hand_on(self, records: list[Record], ended: Waiter) -> None:
        """Give those records of a flush that are of partitions led here to who wants them."""
        found: Records = {}
        if self.on_records is not None:
            for record in records:
                if isinstance(record, TopicRecord):
                    for number, replica in self._replicas.of_topic(record.topic).items():
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
        for number, replica in self._replicas.of_topic(record.topic).items():
            if replica.partition is not None or replica.work == _PROMOTING:
                replica.about = described(replica.about, record, number)
                statements.append(replica.row())
        return statements


def _known(stored: StoredTopics, about: StoredAbout) -> KnownTopic:
    """Return what rows say of a topic."""
    names = {name: channel for (_, _, name), channel in stored.channels.items()}
    channels = {name: KnownChannel(channel.paused, channel.skipped) for name, channel in names.items()}
    settings = {channel: decode_settings(each) for channel, each in about.settings.items()}
    return KnownTopic(about.paused, channels, settings)


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
