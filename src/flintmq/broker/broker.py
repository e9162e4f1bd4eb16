"""Every topic of one nsqd, and the order in which the work of a loop turn is done.

A turn::

    connections parse what arrived -> publish(), subscribe(), finish ...     (marks partitions and channels)
    write_pending()        one append per partition that was published to and has its files
    begin_sync()/commit()  as the durability policy says, then the publishers' answers
    pump()                 deliveries of all marked channels

Beside it runs the flush: :meth:`Broker.take_flush` collects the progress of all channels as one transaction, which the
owner runs off the loop and reports with :meth:`Broker.flush_ended`. The files of new topics are made in the same way,
with :meth:`Broker.take_creations` and :meth:`Broker.creations_ended`: until then a topic takes messages and consumers,
which wait.

Rules of this file: no clock, no socket; iteration only over dicts and lists; every method is called on the loop.

Source: design/performance.md decision 2, design/reliability.md R1-R4.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from typing import Any

from flintmq.broker.channel import Channel, ChannelState
from flintmq.broker.creating import TopicConflict as TopicConflict
from flintmq.broker.delayed import DelayedNotes
from flintmq.broker.latency import Latency
from flintmq.broker.limiting import TopicLimits
from flintmq.broker.partition import Partition, PublishGroup
from flintmq.broker.retention import Retention, drop_consumed
from flintmq.broker.seek import drop_deferred, move
from flintmq.broker.spilled import Shares, SpilledStore
from flintmq.broker.subscription import Subscription
from flintmq.broker.tagged import TaggedChannel
from flintmq.broker.topic import Topic
from flintmq.broker.work import TOPICS_DIRECTORY as TOPICS_DIRECTORY
from flintmq.broker.work import BrokerOptions as BrokerOptions
from flintmq.broker.work import (
    DueQuery,
    Flush,
    NewTopic,
    Question,
    advance,
    count_spilled,
    cursor_statement,
    keep_nothing,
    log_directory,
    removal_path,
    spill_statements,
    topics_on_disk,
)
from flintmq.budget import Budget
from flintmq.errors import FlintError, StorageError
from flintmq.limits import READ_CACHE_BYTES, TAIL_CACHES_BYTES
from flintmq.names import directory_name, is_ephemeral
from flintmq.storage import (
    ChannelStore,
    Corruption,
    Creation,
    Damage,
    Files,
    FloorFile,
    LogPlace,
    MemoryLog,
    PartitionLog,
    ReadCache,
    channel_store,
    packs,
)
from flintmq.storage.channel_store import StoredChannel
from flintmq.topic_meta import PLAIN

_RETRY_NS = 1_000_000_000
_TURN_WEIGHT = 1024 * 1024  # of what one partition writes in one turn, see partition.py
_PUMPED_MAX = 128  # channels looked at in one turn, and
_PUMPED_LATE_MAX = 64  # as many more of those that earlier turns left over


class TopicNotFound(FlintError):
    """There is no such topic."""


class ChannelNotFound(FlintError):
    """The topic has no such channel, or not in the partition that was named."""


class PartitionNotFound(FlintError):
    """The topic has no partition of that number here."""


def _raise(_what: str, error: Exception) -> None:
    raise error


class Broker(TopicLimits):
    """Owner of all topics.

    Args:
        report: told of damage that a log found and set aside.

    Attributes:
        is_flush_urgent: whether a channel cannot go on before the next flush.
        budget: the memory that clients can make this nsqd use.
        left_bytes: of publishes that the last turn did not get to write, about.
        has_more_due: whether the last flush found more messages that are due than it read.
        write_error: why something published or created last could not be stored; None after the next good write.
        snapshots_due: logs to be synced, so that what they know of producers is written down.
        on_defect: told what was being done, and an exception that nobody expected there; the other members of the turn
            are served all the same. It is raised unless told otherwise.
    """

    def __init__(
        self,
        files: Files,
        store: ChannelStore,
        options: BrokerOptions,
        random_source: random.Random,
        report: Callable[[Corruption], None],
    ) -> None:
        self.topics: dict[str, Topic] = {}
        self.write_error: StorageError | None = None
        self.is_flush_urgent = False
        self.has_more_due = False
        self.left_bytes = 0
        self.snapshots_due: dict[PartitionLog, None] = {}
        self.options = options
        self._files = files
        self._store = store
        self._random = random_source
        self._report = report
        self._retention = Retention(options.retention_time_ns, options.retention_bytes)
        self.budget = budget = Budget(options.memory_budget_bytes)
        caches_bytes = budget.caches_max_bytes
        self._cache = ReadCache(min(READ_CACHE_BYTES, caches_bytes // 3), min(TAIL_CACHES_BYTES, caches_bytes * 2 // 3))
        self._floors = FloorFile(files)
        self._creations: dict[Topic, NewTopic] = {}
        self._deleted_early: list[NewTopic] = []  # while their files were being made
        self._publishing: dict[Partition, None] = {}
        self._pumping: dict[Channel, None] = {}
        self._pumping_late: dict[Channel, None] = {}  # of earlier turns that had too many
        self._flushing: dict[Channel, None] = {}
        self._armed: dict[Channel, int] = {}
        self._deadlines: list[tuple[int, int, Channel]] = []
        self._armed_count = 0
        self._metadata: list[channel_store.Statement] = []
        self._metadata_waiters: list[Callable[[BaseException | None], None]] = []
        self._flush: Flush | None = None  # that was taken and has not ended
        self._is_meta_new = False
        self._removals: list[str] = []
        self._questions: list[Question] = []
        self._cursors: dict[Channel, tuple[int, Partition]] = {}
        self._next_cursor = 1
        self._pack_numbers = count(1)
        self._shares = Shares(budget.deferred_max_bytes)
        self._delayed_notes = DelayedNotes()
        self._removal_count = 0
        self._clock_shift_ns = 0
        self._marks: dict[Partition, channel_store.StoredLog] = {}  # how far logs are, as the database has it
        self._told_lost: dict[str, list[tuple[int, int]]] | None = (
            None  # by the directories of logs that are being opened
        )
        self._grown: dict[Partition, None] = {}  # that are farther than that, perhaps
        self.on_known_damage: Callable[[list[tuple[int, int, bytes]]], None] = lambda _stored: None
        self.on_damage: Callable[[Damage], None] = lambda _damage: None
        self.on_problem: Callable[[StorageError], None] = lambda _error: None
        self.on_defect: Callable[[str, Exception], None] = _raise
        self.on_topic_change: Callable[[str, str | None, bool], None] = lambda _topic, _channel, _exists: None
        self._init_limits()

    # -- start ---------------------------------------------------------------------------------------------------

    def open(self, wall_ns: int) -> None:
        """Restore every topic and channel of the data directory.

        Raises:
            StorageError: the data directory cannot be used.
        """
        stored = self._store.load()
        self.on_known_damage(stored.damage)
        for damage in self._store.take_damages():
            self.on_damage(damage)
        self._settings = stored.settings
        self._pack_numbers = count(stored.next_pack)
        floors = self._floors.load()
        # a number that stands in the floors is not given to another channel, which would begin there
        self._next_cursor = max(stored.next_cursor, max(floors, default=0) + 1)
        cursors: dict[tuple[str, int], dict[str, channel_store.StoredCursor]] = {}
        if stored.is_older:
            floors = {}  # what was spilled behind them may be missing: rather again than never
        for cursor in stored.cursors:
            if not cursor.is_lost:
                advance(cursor, floors.get(cursor.id, 0))
            cursors.setdefault((cursor.topic, cursor.partition), {})[cursor.channel] = cursor
        on_disk = topics_on_disk(self._files)
        found = on_disk.partitions
        self._removal_count = on_disk.removal_number
        for path, name in on_disk.removed.items():
            self._removals.append(path)
            if name in stored.topics and name not in found:
                self._delete_rows(name, stored)
        for name in stored.topics:
            _, held = stored.metas.get(name, (PLAIN, [0]))
            found[name] = sorted({*found.get(name, ()), *held})
        channels: dict[str, dict[str, dict[int, StoredChannel]]] = {}
        for (topic_name, number, channel_name), channel in stored.channels.items():
            channels.setdefault(topic_name, {}).setdefault(channel_name, {})[number] = channel
        logs = iter(self._open_logs(found, stored, cursors, wall_ns))
        for name, numbers in found.items():
            self._restore_topic(name, {n: next(logs) for n in numbers}, stored, cursors, channels.get(name, {}))
        self._told_lost = None
        living = {identity for identity, _ in self._cursors.values()}
        self._floors.begin({cursor: floor for cursor, floor in floors.items() if cursor in living})

    def _open_logs(
        self,
        found: dict[str, list[int]],
        stored: channel_store.StoredTopics,
        cursors: dict[tuple[str, int], dict[str, channel_store.StoredCursor]],
        wall_ns: int,
    ) -> list[PartitionLog]:
        """Open the logs of all partitions, in the order of ``found``: what they have to sync is synced together."""
        places = []
        for name, numbers in found.items():
            for number in numbers:
                # cursors may be ahead of a log that lost its unsynced end; ids below them must not be used again
                mine = cursors.get((name, number), {})
                ends = [cursor.row.floor + len(cursor.window) for cursor in mine.values()]
                backlog_start, paused_at = stored.partitions.get((name, number), (1, None))
                mark = stored.logs.get((name, number), channel_store.StoredLog(0, 1, 1))
                durable_end = mark.written if stored.is_same_boot else mark.synced
                headers_from = stored.headers_from.get((name, number), 1)
                first = max([*ends, backlog_start, paused_at or 1, mark.written, headers_from])
                places.append(LogPlace(log_directory(name, number), number, first, durable_end))
        self._told_lost = {place.directory: [] for place in places}
        return PartitionLog.open_all(
            self._files,
            places,
            segment_bytes=self.options.segment_bytes,
            cache=self._cache,
            report=self._log_damaged,
            created_ns=wall_ns,
        )

    def _delete_rows(self, name: str, stored: channel_store.StoredTopics) -> None:
        """Go on with the deletion of a topic whose directory had been put out of the way."""
        del stored.topics[name]
        for topic, number, channel in [key for key in stored.channels if key[0] == name]:
            self._metadata.append(channel_store.delete_channel(topic, number, channel))
            del stored.channels[topic, number, channel]
        for cursor in stored.cursors:
            if cursor.topic == name:
                self._metadata += channel_store.delete_cursor(cursor.id)
        for topic, channel in [key for key in stored.settings if key[0] == name]:
            self._metadata += channel_store.put_settings(topic, channel, None)
            del stored.settings[topic, channel]
        self._metadata += channel_store.delete_topic(name)

    def _restore_topic(
        self,
        name: str,
        logs: dict[int, PartitionLog],
        stored: channel_store.StoredTopics,
        cursors: dict[tuple[str, int], dict[str, channel_store.StoredCursor]],
        channels: dict[str, dict[int, StoredChannel]],
    ) -> None:
        partitions = {}
        told: dict[int, list[tuple[int, int]]] = {}
        meta, recorded = stored.metas.get(name, (PLAIN, [0]))
        for number, log in logs.items():
            mine = cursors.get((name, number), {})
            backlog_start, paused_at = stored.partitions.get((name, number), (1, None))
            mark = stored.logs.get((name, number), channel_store.StoredLog(0, 1, 1))
            assert self._told_lost is not None
            told[number] = self._told_lost[log.directory]
            partition = Partition(name, number, log, self._delayed_notes)
            partition.headers_from = stored.headers_from.get((name, number), 0)
            partition.backlog_start = max(backlog_start, log.start_sequence)
            partition.paused_at = log.start_sequence if paused_at is None and stored.topics.get(name) else paused_at
            self._marks[partition] = mark
            self._grown[partition] = None
            gone = log.start_sequence - backlog_start
            if log.start_sequence > min([backlog_start, *(cursor.row.floor for cursor in mine.values())]):
                told[number].append(log.told_gap())
            gone -= _overlap(told[number], backlog_start, log.start_sequence)
            if not mine and gone > 0 and not stored.is_behind:
                self._tell_gone(partition, backlog_start, gone)
            partitions[number] = partition
        topic = Topic(name, partitions, stored.topics.get(name, False), meta)
        self.topics[name] = topic
        topic.is_starting = not topic.paused and any(p.paused_at is not None for p in partitions.values())
        if name not in stored.topics:
            self._metadata.append(channel_store.put_topic(name, False))
            self._hold_back(topic)  # it died before anything but its log was on disk
        for channel_name, parts in channels.items():
            paused = topic.channel_names[channel_name] = all(part.paused for part in parts.values())
            for number, partition in partitions.items():
                part = parts.get(number)
                if part is None and number in recorded:
                    continue  # deleted in this partition
                cursor = cursors.get((name, number), {}).get(channel_name)
                channel = self._add_channel(
                    topic, partition, channel_name, cursor, paused if part is None else part.paused
                )
                channel.skipped = part is not None and part.skipped
                if cursor is not None:
                    self._look_for_lost(partition, channel, cursor, None if stored.is_behind else told[number])
                if part is None or part.cursor != self._cursors[channel][0]:
                    self._put_channel(channel)
        self._limit_topic(topic)

    def _open_log(
        self, topic: str, number: int, wall_ns: int, next_sequence_min: int, durable_end: int = 1
    ) -> PartitionLog:
        options = self._log_options(number, wall_ns)
        directory = log_directory(topic, number)
        return PartitionLog.open(
            self._files, directory, next_sequence_min=next_sequence_min, durable_end=durable_end, **options
        )

    def _log_damaged(self, found: Corruption) -> None:
        if self._told_lost is not None and (told := self._told_lost.get(found.path.rpartition("/")[0])) is not None:
            told.append((found.first_sequence_lost, found.end_sequence_lost))
        self._report(found)

    # -- damage ----------------------------------------------------------------------------------------------------

    def _look_for_lost(
        self,
        partition: Partition,
        channel: Channel,
        cursor: channel_store.StoredCursor,
        told: list[tuple[int, int]] | None,
    ) -> None:
        """Let a channel begin again of which something is missing, and tell what cannot come again.

        Args:
            told: what the log has told of, from first to end (exclusive); None when progress may be behind.
        """
        start = partition.log.start_sequence
        if cursor.is_lost:
            if cursor.aside_count:
                channel.spilled.clear_from(start)  # it comes from the log
            return
        if cursor.aside_missing:
            move(channel, start, finish_older=False)
            self._tell(
                partition,
                channel,
                f"{cursor.aside_missing} messages that were set aside are missing; it begins again with sequence "
                f"{start}, so that those come again which are stored",
                is_more_possible=True,
            )
        gone = start - cursor.row.floor
        if gone > 0 and told is not None:
            unfinished = gone - cursor.window[:gone].count(1)
            unfinished -= _overlap([*cursor.row.holes, *told], cursor.row.floor, start)
            if unfinished > 0:
                self._tell_gone(partition, cursor.row.floor, unfinished, channel)

    def _tell_gone(self, partition: Partition, first: int, lost: int, channel: Channel | None = None) -> None:
        what = "the oldest messages that it has not finished are stored nowhere"
        self._tell(partition, channel, what, first, partition.log.start_sequence, lost)

    def _tell(
        self,
        partition: Partition,
        channel: Channel | None,
        what: str,
        first: int = 0,
        end: int = 0,
        lost: int = 0,
        is_more_possible: bool = False,
    ) -> None:
        name = "" if channel is None else channel.name
        path = log_directory(partition.topic_name, partition.number)
        self.on_damage(
            Damage(path, what, partition.topic_name, partition.number, name, first, end, lost, is_more_possible)
        )

    def _pack_damaged(self, channel: Channel, partition: Partition, stored: packs.StoredPack) -> None:
        """Spilled messages cannot be read any more: what of them the log still has is taken from there."""
        found = stored.found
        assert found is not None, "it is damaged"
        count = channel.spilled.forget_damaged(stored)
        if not stored.pieces:
            start = max(found.first, partition.log.start_sequence)
            if start <= found.last:
                move(channel, start, finish_older=False)
            lost = min(count, max(0, partition.log.start_sequence - found.first))
            what = f"{count} messages that were set aside cannot be read; it begins again with sequence {start}"
            self._tell(partition, channel, what, found.first, found.last + 1, lost)
        else:
            gone = [each for piece in stored.pieces for each in self._read_again(channel, piece)]
            what = (
                f"{count} messages that were set aside cannot be read; {count - len(gone)} are taken from the log again"
            )
            first, end = (gone[0], gone[-1] + 1) if gone else (0, 0)
            self._tell(partition, channel, what, first, end, len(gone))
        self.was_changed(channel)

    def _read_again(self, channel: Channel, piece: packs.Piece) -> Iterator[int]:
        """Spill messages again as the log has them; those that it does not have."""
        for sequence in range(piece.first, piece.end):
            try:
                batch = channel.log.read(sequence)
            except StorageError as error:
                self.on_problem(error)
                batch = None
            if batch is None or batch.first > sequence:
                yield sequence
            else:
                channel.spilled.put(sequence, piece.due_ns, piece.attempts, bytes(batch.frames(sequence, sequence + 1)))

    # -- how far logs are ------------------------------------------------------------------------------------------

    def note_synced(self) -> None:
        """Some logs have been synced that nobody waited for: it is written down with the next flush."""
        for partition, mark in self._marks.items():
            if partition.log.synced_sequence != mark.synced:
                self._grown[partition] = None

    def _take_marks(self) -> list[tuple[Partition, channel_store.StoredLog]]:
        taken = []
        for partition in self._grown:
            log = partition.log
            if isinstance(log, PartitionLog) and log.is_created and not partition.is_deleted:
                mark = channel_store.StoredLog(log.log_id, log.synced_sequence, log.next_sequence)
                if self._marks.get(partition) != mark:
                    taken.append((partition, mark))
        self._grown = {}
        return taken

    def _log_options(self, number: int, wall_ns: int) -> dict[str, Any]:
        return {
            "partition": number,
            "segment_bytes": self.options.segment_bytes,
            "cache": self._cache,
            "report": self._log_damaged,
            "created_ns": wall_ns,
        }

    # -- topics and channels ---------------------------------------------------------------------------------------

    def get_topic(self, name: str) -> Topic:
        """Find a topic.

        Raises:
            TopicNotFound: there is none of that name.
        """
        try:
            return self.topics[name]
        except KeyError:
            raise TopicNotFound(name) from None

    def topic(self, name: str, wall_ns: int, starting: bool = False, later: bool = False) -> Topic:
        """Find a topic or create it.

        Args:
            starting: a new topic takes messages, and hands out none before :meth:`start_topic`.
            later: its files are made by who asks for :meth:`take_creations`; nothing blocks here.

        Raises:
            StorageError: its log cannot be created.
        """
        topic = self.topics.get(name)
        if topic is not None:
            return topic
        if is_ephemeral(name):
            log: PartitionLog | MemoryLog = MemoryLog(0, self.options.ephemeral_depth_max, self.budget)
        elif later:
            log = self._new_log(name, 0, wall_ns)
        else:
            try:
                log = self._open_log(name, 0, wall_ns, 1)
            except (OSError, StorageError) as error:
                self.write_error = StorageError(f"cannot create topic {name}: {error}")
                raise self.write_error from error
            self._metadata.append(channel_store.put_topic(name, False))
        topic = self.topics[name] = Topic(name, {0: Partition(name, 0, log, self._delayed_notes)})
        if isinstance(log, PartitionLog) and not log.is_created:
            self._creations[topic] = NewTopic(topic, [Creation(log)])
        if starting:
            self._hold_back(topic)
        self._limit_topic(topic)
        self.on_topic_change(name, None, True)
        return topic

    def _new_log(self, topic: str, number: int, wall_ns: int) -> PartitionLog:
        return PartitionLog.new(self._files, log_directory(topic, number), **self._log_options(number, wall_ns))

    def start_topic(self, topic: Topic) -> None:
        """Begin to hand out what a starting topic has taken so far, to every channel from the first message on."""
        if topic.is_starting:
            topic.is_starting = False
            if not topic.paused:
                self._limit(topic, paused=False)

    def channel(
        self, topic: Topic, name: str, at: Mapping[int, int] | None = None, numbers: Iterable[int] | None = None
    ) -> tuple[list[Channel], bool]:
        """Find a channel or create it; the second value tells whether it is new.

        A new channel of a partition without channels begins with the backlog, of others at the present end, or where
        ``at`` says (partition to sequence). It is durable once :meth:`when_metadata_durable` calls back.

        Args:
            numbers: partitions in which the channel has to be, if it was deleted there; all when not given. A channel
                that is nowhere is made in all of them.
        """
        is_new = name not in topic.channel_names
        wanted = topic.partitions if is_new or numbers is None else numbers
        missing = [topic.partitions[number] for number in wanted if name not in topic.partitions[number].channels]
        if not missing and not is_new:
            return topic.channels(name), False
        for partition in missing:
            if at is not None:
                floor = min(max(at[partition.number], partition.log.start_sequence), partition.log.next_sequence)
            elif not partition.channels:
                floor = max(partition.backlog_start, partition.log.start_sequence)
            else:
                floor = partition.log.next_sequence if partition.paused_at is None else partition.paused_at
            cursor = channel_store.StoredCursor(0, "", 0, "", channel_store.CursorRow(floor), b"", 0, None)
            self._put_channel(self._add_channel(topic, partition, name, cursor, False, new=True))
        topic.channel_names[name] = False
        self._limit_topic(topic)
        self.on_topic_change(topic.name, name, True)
        return topic.channels(name), is_new

    def _add_channel(
        self,
        topic: Topic,
        partition: Partition,
        name: str,
        cursor: channel_store.StoredCursor | None,
        paused: bool,
        new: bool = False,
    ) -> Channel:
        if cursor is None:  # its creation was durable and its cursor was not: it has not been delivered anything
            cursor = channel_store.StoredCursor(
                0, "", 0, "", channel_store.CursorRow(partition.log.start_sequence), b"", 0, None
            )
        row = cursor.row
        ephemeral = is_ephemeral(name)
        kind = TaggedChannel if topic.meta.extend_support else Channel
        channel = kind(
            name,
            partition.number,
            partition.log,
            ChannelState(row.floor, cursor.window, row.deferred, row.attempts, row.holes),
            SpilledStore(cursor.aside_count, cursor.aside_next_due_ns, self._pack_numbers, self._shares),
            self._random,
            depth_max=self.options.ephemeral_depth_max if ephemeral or topic.ephemeral else None,
        )
        if isinstance(channel, TaggedChannel):
            channel.headers_from = partition.headers_from
        channel.budget = self.budget
        channel.paused = paused
        channel.limit = partition.paused_at
        channel.delayed = partition.delayed
        if self.options.latency_window_ns:
            channel.latency = Latency(self.options.latency_window_ns)
        if new:
            channel.counted_from = channel.floor
        partition.channels[name] = channel
        identity = cursor.id
        if not identity:
            identity = -self._next_cursor if ephemeral or topic.ephemeral else self._next_cursor
            self._next_cursor += 1
        self._cursors[channel] = identity, partition
        if topic.meta.ordered or self.own_settings(topic.name, name).is_ordered:
            self._order(channel, True)
        self._flushing[channel] = None
        self.mark(channel)
        return channel

    def order_channel(self, topic: Topic, name: str, is_ordered: bool, is_must: bool = False) -> None:
        """Let a channel be consumed in order, or no longer; of an ordered topic all are, for ever.

        It is durable once :meth:`when_metadata_durable` calls back.

        Args:
            is_must: until told otherwise it may not be consumed in any other way; else see :meth:`relax_order`.

        Raises:
            ChannelNotFound: the topic has no such channel.
        """
        parts = self.parts(topic, name)
        if topic.meta.ordered:
            return
        was_must = bool(self.own_settings(topic.name, name).is_order_must)
        self._remember_order(topic, name, is_ordered, is_ordered and (is_must or was_must))
        for channel in parts:
            if (channel.keep_floor is not None) != is_ordered:
                self._order(channel, is_ordered)
                self.mark(channel)

    def is_order_must(self, topic: Topic, name: str) -> bool:
        """Whether a channel, which need not exist, may only be consumed in order."""
        return topic.meta.ordered or bool(self.own_settings(topic.name, name).is_order_must)

    def relax_order(self, topic: Topic, name: str) -> bool:
        """End an order that only its consumers asked for, when none of those who are left did; whether it ended.

        Without any consumer it stays, also over a restart: those who asked for it may come back.
        """
        parts = topic.channels(name)
        if all(channel.keep_floor is None for channel in parts) or self.is_order_must(topic, name):
            return False
        consumers = [subscription for channel in parts for subscription in channel.subscriptions]
        if not consumers or any(subscription.wants_order for subscription in consumers):
            return False
        self.order_channel(topic, name, False)
        return True

    def _order(self, channel: Channel, is_ordered: bool) -> None:
        keep = partial(self._floors.put, self._cursors[channel][0]) if self._is_durable(channel) else keep_nothing
        channel.deliver_in_order(keep if is_ordered else None)

    def when_metadata_durable(
        self, callback: Callable[[BaseException | None], None], topic: Topic | None = None
    ) -> bool:
        """Call back when all channels and changes made so far survive; False when nothing is waiting to be written.

        Args:
            topic: which has to have its files, too.
        """
        new = None if topic is None else self._creations.get(topic)
        if new is None and self._deleted_early:
            new = self._deleted_early[-1]
        if new is not None:
            new.waiters.append(callback)
            return True
        if self._metadata:
            self._metadata_waiters.append(callback)
        elif self._flush is not None and self._flush.metadata_count:
            self._flush.waiters.append(callback)
        else:
            return False
        return True

    def delete_channel(self, topic: Topic, name: str, partition: int | None = None) -> list[Subscription]:
        """Remove a channel and all it held; return its consumers, whose connections are to be closed.

        Args:
            partition: where; the channel itself goes with the last one it is in. None for everywhere.

        Raises:
            ChannelNotFound: the topic has no such channel, or not there.
            PartitionNotFound: the topic has no such partition here.
        """
        subscriptions: list[Subscription] = []
        for channel in self.parts(topic, name, partition):
            subscriptions += channel.subscriptions
            _, its = self._cursors[channel]
            del its.channels[name]
            if self._is_durable(channel):
                self._metadata.append(channel_store.delete_channel(topic.name, its.number, name))
            self._forget(channel)
            if not its.channels:
                # as in nsqd, what was handed to the deleted channel is gone; the next one starts from here
                handed_out = its.log.next_sequence if its.paused_at is None else its.paused_at
                its.backlog_start = handed_out
                if not topic.ephemeral:
                    self._put_partition(its)
        is_gone = not topic.channels(name)
        if is_gone:
            del topic.channel_names[name]
            self._forget_settings(topic, name)
        else:
            self._name_paused(topic, name)
        self._limit_topic(topic)
        self.on_topic_change(topic.name, name, not is_gone)
        return subscriptions

    def _forget(self, channel: Channel) -> None:
        self._pumping.pop(channel, None)
        self._pumping_late.pop(channel, None)
        self.budget.waiting.pop(channel, None)
        self._flushing.pop(channel, None)
        self._armed.pop(channel, None)
        identity = self._cursors.pop(channel)[0]
        self._metadata += channel_store.delete_cursor(identity)
        try:
            self._floors.forget(identity)
        except StorageError as error:
            self.on_problem(error)  # at the next start there is no such cursor

    def delete_topic(self, name: str) -> list[Subscription]:
        """Remove a topic, its channels and its log; return all consumers.

        Raises:
            TopicNotFound: there is none of that name.
            StorageError: its directory cannot be renamed.
        """
        topic = self.get_topic(name)
        subscriptions: list[Subscription] = []
        for channel_name in list(topic.channel_names):
            subscriptions += self.delete_channel(topic, channel_name)
        for partition in topic.partitions.values():
            self._publishing.pop(partition, None)
            self._marks.pop(partition, None)
            self._grown.pop(partition, None)
            partition.delete()
        del self.topics[name]
        self._forget_settings(topic)
        if not topic.ephemeral:
            self._metadata += channel_store.delete_topic(name)
            new = self._creations.get(topic)
            if new is None:
                self._remove_files(name)
            elif new.is_under_way:
                self._deleted_early.append(new)  # its files go when they are there
            else:
                del self._creations[topic]
                self._metadata_waiters += new.waiters
        self.on_topic_change(name, None, False)
        return subscriptions

    def _remove_files(self, name: str) -> None:
        # renamed first, so that a crash in the middle of the removal does not bring half a topic back
        source = f"{TOPICS_DIRECTORY}/{directory_name(name)}"
        self._removal_count += 1
        target = removal_path(self._removal_count, name)
        try:
            self._files.rename(source, target)
        except OSError as error:
            raise StorageError(f"cannot remove topic {name}: {error}") from error
        self._removals.append(target)

    def pause_topic(self, topic: Topic, paused: bool) -> None:
        """Stop or go on handing the topic's messages to its channels."""
        if topic.paused == paused:
            return
        topic.paused = paused
        if not topic.is_starting:
            self._limit(topic, paused)
        if not topic.ephemeral:
            self._metadata.append(channel_store.put_topic(topic.name, paused))

    def _limit(self, topic: Topic, paused: bool) -> None:
        """Hand nothing more to channels from here on, or everything."""
        for partition in topic.partitions.values():
            partition.paused_at = partition.log.next_sequence if paused else None
            for channel in partition.channels.values():
                channel.limit = partition.paused_at
                self.mark(channel)
            if not topic.ephemeral:
                self._put_partition(partition)

    def pause_channel(self, topic: Topic, name: str, paused: bool, partition: int | None = None) -> None:
        """Stop or go on delivering to a channel's consumers, in one partition or in all.

        Raises:
            ChannelNotFound: the topic has no such channel, or not there.
            PartitionNotFound: the topic has no such partition here.
        """
        for channel in self.parts(topic, name, partition):
            channel.paused = paused
            self.mark(channel)
            self._put_channel(channel)
        self._name_paused(topic, name)

    def _name_paused(self, topic: Topic, name: str) -> None:
        """A channel is paused when it is in every partition."""
        topic.channel_names[name] = all(part.paused for part in topic.channels(name))

    def skip_channel(self, topic: Topic, name: str, skipped: bool, partition: int | None = None) -> None:
        """Finish everything of a channel without delivering it, or no longer, in one partition or in all.

        It is durable once :meth:`when_metadata_durable` calls back.

        Raises:
            ChannelNotFound: the topic has no such channel, or not there.
            PartitionNotFound: the topic has no such partition here.
        """
        for channel in self.parts(topic, name, partition):
            channel.skipped = skipped
            self.was_changed(channel)

    def empty_topic(self, topic: Topic) -> None:
        """Drop what no channel has been given yet."""
        for partition in topic.partitions.values():
            end = partition.log.next_sequence
            if not partition.channels:
                partition.backlog_start = end
                if partition.paused_at is not None:
                    partition.paused_at = end
            elif partition.paused_at is not None:
                for channel in partition.channels.values():
                    channel.leave_out(partition.paused_at, end)
                    self.mark(channel)
                partition.paused_at = end
                for channel in partition.channels.values():
                    channel.limit = end
            if not topic.ephemeral:
                self._put_partition(partition)

    def empty_channel(self, topic: Topic, name: str, partition: int | None = None) -> None:
        """Drop everything a channel holds, in one partition or in all.

        Raises:
            ChannelNotFound: the topic has no such channel, or not there.
            PartitionNotFound: the topic has no such partition here.
        """
        for channel in self.parts(topic, name, partition):
            channel.empty()
            self.was_changed(channel)

    def empty_deferred(self, topic: Topic, name: str, partition: int | None = None) -> None:
        """Drop what a channel has deferred, in all partitions or in one.

        Raises:
            ChannelNotFound: the topic has no such channel.
        """
        for channel in self.parts(topic, name, partition):
            drop_deferred(channel)
            self.was_changed(channel)

    def parts(self, topic: Topic, name: str, partition: int | None = None) -> list[Channel]:
        """A channel in one partition, or in every one that it is in.

        Raises:
            ChannelNotFound: the topic has no such channel, or not there.
            PartitionNotFound: the topic has no such partition here.
        """
        if name not in topic.channel_names:
            raise ChannelNotFound(name)
        if partition is None:
            return topic.channels(name)
        if partition not in topic.partitions:
            raise PartitionNotFound(partition)
        channel = topic.partitions[partition].channels.get(name)
        if channel is None:
            raise ChannelNotFound(name)
        return [channel]

    def was_changed(self, channel: Channel) -> None:
        """Let whoever asks for durability wait for what an operator has just done to a channel."""
        identity, _ = self._cursors[channel]
        if channel.keep_floor is not None:
            self._floors.forget(identity)  # it may have gone back
            self._questions.append(Question(lambda _store: self._floors.sync(), self._synced))
        channel.mark_changed()
        self._flushing[channel] = None
        self._mark_parts(channel)
        # even if nothing of it has changed: who waits for metadata waits for the flush that has the cursor
        self._put_channel(channel)

    def _is_durable(self, channel: Channel) -> bool:
        return not channel.ephemeral and not is_ephemeral(self._cursors[channel][1].topic_name)

    def _put_channel(self, channel: Channel) -> None:
        if self._is_durable(channel):
            identity, partition = self._cursors[channel]
            row = StoredChannel(identity, channel.paused, channel.skipped)
            self._metadata.append(channel_store.put_channel(partition.topic_name, partition.number, channel.name, row))

    def remember(self, statement: channel_store.Statement) -> None:
        """Have something of others written; durable once :meth:`when_metadata_durable` calls back."""
        self._metadata.append(statement)

    def has(self, channel: Channel) -> bool:
        """Whether a channel has not been deleted."""
        return channel in self._cursors

    @property
    def clock_shift_ns(self) -> int:
        """What is added to due times on their way to the disk: how far the wall clock has been set since the start."""
        return self._clock_shift_ns

    def _synced(self, _answer: object, error: BaseException | None) -> None:
        if isinstance(error, StorageError):
            self.on_problem(error)

    def ask(self, channel: Channel, read: Callable[[ChannelStore, int], Any], then: Question.Then) -> None:
        """Ask the database about a channel, of which everything so far is in it by then.

        Args:
            read: is given the number of the channel's cursor.
            then: called with the answer, or with why there is none.
        """
        identity, _ = self._cursors[channel]
        self._flushing[channel] = None
        self._questions.append(Question(lambda store: read(store, identity), then))
        self.is_flush_urgent = True

    def _put_partition(self, partition: Partition) -> None:
        self._metadata.append(
            channel_store.put_partition(
                partition.topic_name, partition.number, partition.backlog_start, partition.paused_at
            )
        )

    # -- one turn ------------------------------------------------------------------------------------------------

    def publish(self, topic: Topic, bodies: Sequence[bytes], due_ns: int = 0) -> PublishGroup:
        """Publish messages; they are written at the end of the turn.

        Args:
            due_ns: wall time before which they are not delivered, 0 for at once.
        """
        return self.publish_to(topic.next_partition(), bodies, due_ns)

    def publish_to(
        self,
        partition: Partition,
        bodies: Sequence[bytes],
        due_ns: int = 0,
        is_stored_form: bool = False,
        producer: tuple[bytes, int] | None = None,
    ) -> PublishGroup:
        """As :meth:`publish` for a partition that was looked up before; see :meth:`Partition.publish`.

        Args:
            producer: who counts these messages, and the sequence that it gave the first of them; see
                :meth:`Partition.publish_once`.
        """
        if producer is not None:
            group = partition.publish_once(*producer, bodies)
            if partition.has_pending:
                self._publishing[partition] = None
            self._note_snapshot(partition)
            return group
        if partition.bounds is not None:
            partition.bounds.admit(partition, bodies)
        self._publishing[partition] = None
        return partition.publish(bodies, due_ns, is_stored_form)

    def _note_snapshot(self, partition: Partition) -> None:
        log = partition.log
        if log.producers.is_snapshot_due and isinstance(log, PartitionLog) and log.failed is None:
            self.snapshots_due[log] = None

    @property
    def has_pending(self) -> bool:
        """Whether :meth:`write_pending` has something to do."""
        return bool(self._publishing)

    @property
    def has_held(self) -> bool:
        """Whether something was published that waits for files of its topic, or for the database."""
        partitions = (partition for topic in self.topics.values() for partition in topic.partitions.values())
        return any(partition.has_pending and not partition.is_writable for partition in partitions)

    def write_pending(self, wall_ns: int) -> list[PublishGroup]:
        """Append what the turn published; return the groups that now wait for durability."""
        if not self._publishing:
            return []
        groups: list[PublishGroup] = []
        error = None
        for partition in list(self._publishing):
            del self._publishing[partition]  # first: if writing it goes wrong, the others come in the next turn
            if not partition.is_writable:
                continue  # until its files are there, or the database knows what it has to
            self._grown[partition] = None
            # a quarter of what there is at least: it does not grow beyond four times what a turn brings
            weight = partition.pending_weight
            left = weight // 4 if weight > 4 * _TURN_WEIGHT else _TURN_WEIGHT
            try:
                while left > 0 and partition.has_pending:
                    group = partition.write_pending(wall_ns, left)
                    left -= partition.written_weight
                    error = error or partition.write_error
                    if group is not None:
                        groups.append(group)
            except Exception as defect:  # noqa: BLE001 - on_defect tells it; what the others have written is answered
                self.on_defect(f"writing to topic {partition.topic_name} partition {partition.number}", defect)
                partition.end_pending(StorageError(f"{partition.topic_name}: {defect!r}"))
            if partition.has_pending:
                self._publishing[partition] = None
        self.write_error = error
        self.left_bytes = sum(partition.pending_weight for partition in self._publishing) if self._publishing else 0
        return groups

    def commit(self, groups: Iterable[PublishGroup]) -> None:
        """Nothing more is waited for: answer the publishers and let consumers see the messages, in the log's order."""
        for group in groups:
            partition = group.partition
            try:
                if partition.is_deleted:
                    group.end(None)
                else:
                    self._grown[partition] = None
                    partition.commit_through(partition.storable_end)
                if partition.bounds is not None:
                    self._bound_backlog(partition, partition.bounds)
            except Exception as defect:  # noqa: BLE001 - on_defect tells it; the other publishers are answered
                self.on_defect(f"answering publishers of topic {partition.topic_name}", defect)
                self._end_group(group)
            for channel in partition.channels.values():
                if not channel.is_idle:
                    self._pumping[channel] = None

    def _end_group(self, group: PublishGroup) -> None:
        """Answer the publishers of what is stored, whatever went wrong on the way; nothing when they are."""
        try:
            group.end(None)
        except Exception as defect:  # noqa: BLE001 - as in commit
            self.on_defect(f"answering publishers of topic {group.partition.topic_name}", defect)

    def mark(self, channel: Channel) -> None:
        """Look at this channel at the end of the turn."""
        self._pumping[channel] = None

    def mark_in_turn(self, channels: Iterable[Channel]) -> None:
        """As :meth:`mark`, in this order, whatever was marked before."""
        for channel in channels:
            self._pumping.pop(channel, None)
            self._pumping[channel] = None

    @property
    def has_marked(self) -> bool:
        """Whether :meth:`pump` has something to do."""
        return bool(self._pumping) or bool(self._pumping_late)

    def pump(self, now_ns: int, wall_ns: int) -> list[Channel]:
        """Deliver from the marked channels; return them, so that their consumers' output can be written.

        When there are very many, the rest comes with the next turns.
        """
        self._delayed_notes.wall_ns = wall_ns
        marked, self._pumping = self._pumping, {}
        if self._pumping_late or len(marked) > _PUMPED_MAX:
            marked = self._share_turn(marked)
        for channel in marked:
            try:
                try:
                    channel.pump(now_ns, wall_ns)
                    if channel.policy is not None:
                        channel.policy.after_pump(now_ns, wall_ns)
                except StorageError as error:
                    # a file that cannot be opened now says nothing about its content; the other channels go on
                    self.on_problem(error)
                    self._arm(channel, now_ns + _RETRY_NS)
                if channel.wants_turn:
                    self._pumping[channel] = None
                deadline = channel.next_deadline_ns(now_ns, wall_ns)
                if deadline is not None:
                    self._arm(channel, deadline)
                if channel.is_changed or channel.spilled.needs_flush:
                    self._flushing[channel] = None
                    if channel.spilled.is_crowded or channel.spilled.is_pressing(wall_ns):
                        self.is_flush_urgent = True  # the channel goes on behind it
            except Exception as defect:  # noqa: BLE001 - on_defect tells it; the other channels go on
                self._channel_failed("delivering from", channel, defect, now_ns)
        return list(marked)

    def _share_turn(self, marked: dict[Channel, None]) -> dict[Channel, None]:
        """What of very many channels is looked at in this turn: first what is new, so that it waits for no backlog."""
        late = self._pumping_late
        now = dict.fromkeys(islice(marked, _PUMPED_MAX))
        late |= dict.fromkeys(islice(marked, _PUMPED_MAX, None))
        now |= dict.fromkeys(islice(late, _PUMPED_LATE_MAX))
        for channel in now:
            late.pop(channel, None)
        return now

    def _arm(self, channel: Channel, deadline_ns: int) -> None:
        armed = self._armed.get(channel)
        if armed is None or deadline_ns < armed:
            self._armed[channel] = deadline_ns
            self._armed_count += 1
            heapq.heappush(self._deadlines, (deadline_ns, self._armed_count, channel))

    @property
    def next_deadline_ns(self) -> int | None:
        """Monotonic time at which :meth:`expire` is to be called; None when never."""
        heap = self._deadlines
        while heap and self._armed.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def expire(self, now_ns: int, wall_ns: int) -> None:
        """Handle every timeout and due message up to now; the channels concerned are marked."""
        heap = self._deadlines
        while heap and heap[0][0] <= now_ns:
            deadline_ns, _, channel = heapq.heappop(heap)
            if self._armed.get(channel) != deadline_ns:
                continue
            del self._armed[channel]
            try:
                channel.expire(now_ns, wall_ns)
                self._mark_parts(channel)
            except Exception as defect:  # noqa: BLE001 - on_defect tells it; the other channels go on
                self._channel_failed("looking at the deadlines of", channel, defect, now_ns)

    def _channel_failed(self, what: str, channel: Channel, defect: Exception, now_ns: int) -> None:
        """Tell of a defect, and look at the channel again in a while."""
        cursor = self._cursors.get(channel)
        topic_name = "" if cursor is None else cursor[1].topic_name
        self.on_defect(f"{what} topic {topic_name} channel {channel.name}", defect)
        if cursor is not None:
            self._arm(channel, now_ns + _RETRY_NS)

    def _mark_parts(self, channel: Channel) -> None:
        """Look at a channel in all partitions: a consumer of several of them may have room again."""
        topic = self.topics[self._cursors[channel][1].topic_name]
        for part in topic.channels(channel.name):
            self.mark(part)

    # -- progress on disk ------------------------------------------------------------------------------------------

    def has_flush(self, wall_ns: int) -> bool:
        """Whether :meth:`take_flush` would have something to do; cheap enough for every tick."""
        self._delayed_notes.wall_ns = wall_ns
        if self._metadata or self._removals or self._questions or self._grown:
            return True
        return any(c.is_changed or c.spilled.has_changes or c.spilled.wants_due(wall_ns) for c in self._flushing)

    @property
    def has_metadata(self) -> bool:
        """Whether somebody waits for topics or channels to become durable."""
        return bool(self._metadata_waiters)

    def clock_moved(self, shift_ns: int) -> None:
        """The wall clock was set: rewrite due times on disk, so that a restart keeps the delays that are left.

        Args:
            shift_ns: wall time minus the clock that :meth:`pump` and :meth:`expire` are given.
        """
        self._metadata.append(packs.shift_packs(shift_ns - self._clock_shift_ns))
        self._clock_shift_ns = self._dead_letters.clock_shift_ns = shift_ns
        for channel in self._cursors:
            channel.mark_changed()
            self._flushing[channel] = None

    def take_flush(self, wall_ns: int) -> Flush:
        """Collect all progress since the last flush; the caller runs it and then calls :meth:`flush_ended`."""
        flush = self._flush = Flush(clock_shift_ns=self._clock_shift_ns)
        self.is_flush_urgent = False
        flush.statements = self._metadata
        flush.metadata_count = len(self._metadata)
        flush.must_sync, self._is_meta_new = self._is_meta_new, False
        self._metadata = []
        flush.waiters, self._metadata_waiters = self._metadata_waiters, []
        flush.removals, self._removals = self._removals, []
        flush.must_sync |= bool(flush.removals)  # else a power loss could leave the rows of what is gone
        flush.questions, self._questions = self._questions, []
        partitions: dict[Partition, None] = {}
        for channel in list(self._flushing):
            identity, partition = self._cursors[channel]
            durable = self._is_durable(channel)
            changes = channel.spilled.take_changes(wall_ns)
            if changes:
                channel.mark_changed()  # its row says how many are spilled
                flush.changes.append((channel, changes))
                flush.statements += spill_statements(identity, changes, self._clock_shift_ns)
                if changes.cleared_from is not None:
                    flush.questions.append(count_spilled(channel, identity))
            if channel.take_changed():
                partitions[partition] = None
                if durable:
                    shift_ns = self._clock_shift_ns
                    count_known = (
                        channel_store.UNKNOWN_COUNT if changes.cleared_from is not None else channel.spilled.count
                    )
                    flush.statements.append(cursor_statement(identity, channel, partition, shift_ns, count_known))
            spilled = channel.spilled
            if spilled.wants_due(wall_ns):
                query = (spilled.loaded_through, spilled.generation, wall_ns, spilled.room_bytes)
                flush.due.append(DueQuery(channel, identity, *query))
            elif spilled.next_due_ns is None:
                del self._flushing[channel]
        flush.floors = [(partition, partition.floor) for partition in partitions]
        flush.has_progress = bool(flush.statements)
        flush.marks = self._take_marks()
        if flush.marks:
            logs = [(partition.topic_name, partition.number, mark) for partition, mark in flush.marks]
            flush.statements.append(channel_store.put_logs(logs))
        loaded_count = sum(channel.spilled.has_loaded for channel in self._flushing)
        self._shares.divide(loaded_count, sum(bool(changes.packs) for _, changes in flush.changes))
        return flush

    def run_flush(self, flush: Flush, wall_ns: int, sync: bool) -> list[packs.DuePacks]:
        """Write a flush and read what is due. The only method that blocks and is called off the loop."""
        return flush.run(self._store, self._files, wall_ns, sync)

    def flush_ended(
        self, flush: Flush, answers: list[packs.DuePacks], error: BaseException | None, wall_ns: int
    ) -> None:
        """Take note of a flush: on failure everything in it is tried again with the next one."""
        self._flush = None
        if error is not None:
            self._metadata = flush.statements[: flush.metadata_count] + self._metadata
            self._removals = flush.removals + self._removals
            self._is_meta_new = self._is_meta_new or flush.must_sync
            self._grown |= dict.fromkeys(partition for partition, _ in flush.marks)
            for channel, changes in flush.changes:
                channel.spilled.restore_changes(changes)
            for channel in self._cursors:
                channel.mark_changed()
                self._flushing[channel] = None
        else:
            for channel, changes in flush.changes:
                if channel in self._cursors:
                    self.mark(channel)
                    if changes.cleared_from is not None:
                        channel.mark_changed()  # its row is to say how many are left
                        self._flushing[channel] = None
            self.has_more_due = False
            for query, read in zip(flush.due, answers, strict=True):
                is_current = query.channel in self._cursors and query.generation == query.channel.spilled.generation
                query.channel.spilled.accept_due(read, query.generation, query.wall_ns)
                for damaged in read.damaged if is_current else ():
                    self._pack_damaged(query.channel, self._cursors[query.channel][1], damaged)
                if query.channel in self._cursors:
                    self.has_more_due |= query.channel.spilled.wants_due(query.wall_ns)
                    self.mark(query.channel)
            for partition, mark in flush.marks:
                if not partition.is_deleted:
                    self._marks[partition] = mark
            for partition, floor in flush.floors:
                partition.durable_floor = floor
                self._retain(partition, wall_ns)
        for question in flush.questions:
            try:
                question.then(question.answer, error or question.error)
            except Exception as defect:  # noqa: BLE001 - on_defect tells it; the others are told
                self.on_defect("telling what the database answered", defect)
        for waiter in flush.waiters:
            try:
                waiter(error)
            except Exception as defect:  # noqa: BLE001 - as above
                self.on_defect("telling that a change is stored", defect)

    def _retain(self, partition: Partition, wall_ns: int) -> None:
        """Drop segments that every channel has passed and that the topic's retention does not keep."""
        if partition.is_deleted:
            return
        try:
            drop_consumed(partition, self._retention, wall_ns)
        except StorageError as error:
            self.on_problem(error)
        self._note_snapshot(partition)

    def retain_all(self, wall_ns: int) -> None:
        """Apply retention to every partition; to be called now and then, because time passes without any progress."""
        for topic in self.topics.values():
            for partition in topic.partitions.values():
                self._retain(partition, wall_ns)

    def memory_used(self) -> dict[str, int]:
        """What of the memory budget is used, by share, in bytes."""
        budget, cache = self.budget, self._cache
        deferred = sum(channel.spilled.memory_bytes for channel in self._cursors)
        return {
            "output": budget.output_bytes,
            "ephemeral": budget.ephemeral_bytes,
            "publishing": self.left_bytes,
            "receiving": budget.receiving_bytes,
            "caches": cache.used_bytes + cache.tails_bytes,
            "deferred": deferred,
        }

    def logs(self) -> list[PartitionLog]:
        """The log of every partition that has a disk."""
        return [
            partition.log
            for topic in self.topics.values()
            for partition in topic.partitions.values()
            if isinstance(partition.log, PartitionLog)
        ]

    def close(self) -> None:
        """Close every log and the store; what is to be kept has been flushed and synced by the caller. Blocks."""
        logs = self.logs()
        self._files.run_all([log.write_checkpoint for log in logs if log.has_checkpoint_due])
        for log in logs:
            log.close()
        self._floors.close()
        self._store.close()

    def describe(self) -> str:
        """A picture of the state for humans and failing tests."""
        return "\n".join(p.describe() for t in self.topics.values() for p in t.partitions.values())


def _overlap(ranges: Iterable[tuple[int, int]], first: int, end: int) -> int:
    """How many numbers from ``first`` to ``end`` (exclusive) lie in one of the ranges at least."""
    count = 0
    for start, stop in sorted(ranges):
        count += max(0, min(stop, end) - max(start, first))
        first = max(first, min(stop, end))
    return count
