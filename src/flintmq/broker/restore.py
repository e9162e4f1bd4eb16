"""The start: topics and channels as the database and the directory have them, each where it was.

Rules of this file: what the database has counts for what there is, the directory for what it does not know yet; a
deletion that had begun goes on.

Source: docs/decisions/0003, docs/decisions/0011.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from flintmq.batch import EXTENDED, RAW_IDS
from flintmq.broker.channels import Channels
from flintmq.broker.delayed import DelayedNotes
from flintmq.broker.log_marks import LogMarks
from flintmq.broker.logs import Logs, log_directory
from flintmq.broker.lost import Losses
from flintmq.broker.metadata import Metadata
from flintmq.broker.partition import Partition
from flintmq.broker.progress import Progress
from flintmq.broker.stored_layout import stored_layout
from flintmq.broker.topic import Topic
from flintmq.broker.topic_settings import TopicSettings
from flintmq.errors import StorageError
from flintmq.storage import LogPlace, PartitionLog
from flintmq.storage.channel_store import StoredChannel, StoredCursor, StoredLog, StoredTopics
from flintmq.storage.records import DeleteChannel, DeleteProgress, DeleteTopic, PutSettings, PutTopic, PutTopicMeta
from flintmq.topic_meta import PLAIN, TopicMeta

_NO_MARK = StoredLog(0, 1, 1)
_Key = tuple[str, int]  # a topic and the number of a partition


class Restore:
    """One start.

    Args:
        stored: what the database has.
        floors: of channels in order, ahead of the database.

    Attributes:
        strays: directories that are no partition of any topic, by topic and number, once :meth:`topics` has ended.
    """

    def __init__(
        self,
        stored: StoredTopics,
        floors: dict[int, int],
        logs: Logs,
        channels: Channels,
        metadata: Metadata,
        marks: LogMarks,
        progress: Progress,
        settings: TopicSettings,
        losses: Losses,
        delayed_notes: DelayedNotes,
    ) -> None:
        self._stored = stored
        self._logs = logs
        self._channels = channels
        self._metadata = metadata
        self._marks = marks
        self._progress = progress
        self._settings = settings
        self._losses = losses
        self._delayed_notes = delayed_notes
        self._cursors: dict[_Key, dict[str, StoredCursor]] = {}
        self.strays: list[_Key] = []
        if stored.is_older:
            floors = {}  # what was spilled behind them may be missing: rather again than never
        for cursor in stored.cursors:
            if not cursor.is_lost:
                _advance(cursor, floors.get(cursor.id, 0))
            self._cursors.setdefault((cursor.topic, cursor.partition), {})[cursor.channel] = cursor

    def topics(self, wall_ns: int) -> Iterator[Topic]:
        """Every topic that there is, with its channels. Blocks.

        Raises:
            StorageError: the data directory cannot be used.
        """
        stored = self._stored
        on_disk = self._logs.look()
        found = on_disk.partitions
        for path, name in on_disk.removed.items():
            self._progress.remove_later(path)
            if name in stored.topics and name not in found:
                self._delete_rows(name)
        for name in stored.topics:
            _, held = stored.metas.get(name, (PLAIN, [0]))
            found[name] = sorted({*found.get(name, ()), *held})
        replicated = {name for name, _ in stored.replicas}
        for name, numbers in found.items():
            if name not in stored.topics:
                self.strays += [(name, n) for n in numbers if self._is_stray(name, n, name in replicated)]
            if not numbers and name not in replicated:
                self._drop_empty(name)
        others = {*stored.replicas, *self.strays}
        own = {name: [n for n in numbers if (name, n) not in others] for name, numbers in found.items()}
        found = {name: numbers for name, numbers in own.items() if numbers}  # one may have died before it had a log
        channels: dict[str, dict[str, dict[int, StoredChannel]]] = {}
        for (topic_name, number, channel_name), channel in stored.channels.items():
            if (topic_name, number) in stored.replicas:
                continue
            channels.setdefault(topic_name, {}).setdefault(channel_name, {})[number] = channel
        places = [self._place(name, number) for name, numbers in found.items() for number in numbers]
        opened, told = self._logs.open_all(places, wall_ns)
        logs = iter(opened)
        for name, numbers in found.items():
            own_logs = {n: next(logs) for n in numbers}
            if name not in stored.topics and name not in stored.metas:
                self._find_meta(name, own_logs)
            yield self._topic(name, own_logs, told, channels.get(name, {}))
        self._logs.start_ended()

    def _is_stray(self, name: str, number: int, is_replicated: bool) -> bool:
        """Whether a directory that no row tells of is no partition of this node's own.

        It is what is left of the making of a replica that failed, or of a replica whose row was lost.
        """
        stored = self._stored
        if (name, number) in stored.replicas:
            return False
        return is_replicated or (stored.has_had_replicas and not self._logs.has_messages(name, number))

    def _drop_empty(self, name: str) -> None:
        """Remove what is left of a topic that died before it had a log, or whose last replica went."""
        with suppress(StorageError):  # nothing needs it to go
            self._logs.drop_empty(name)

    def _delete_rows(self, name: str) -> None:
        """Go on with the deletion of a topic whose directory had been put out of the way."""
        stored = self._stored
        del stored.topics[name]
        for topic, number, channel in [key for key in stored.channels if key[0] == name]:
            self._metadata.put(DeleteChannel(topic, number, channel))
            del stored.channels[topic, number, channel]
        for cursor in stored.cursors:
            if cursor.topic == name:
                self._metadata.put(DeleteProgress(name, cursor.partition, cursor.channel), cursor.id)
        for topic, channel in [key for key in stored.settings if key[0] == name]:
            self._metadata.put(PutSettings(topic, channel, None))
            del stored.settings[topic, channel]
        self._metadata.put(DeleteTopic(name))

    def _place(self, name: str, number: int) -> LogPlace:
        stored, key = self._stored, (name, number)
        # cursors may be ahead of a log that lost its unsynced end; ids below them must not be used again
        ends = [cursor.row.floor + len(cursor.window) for cursor in self._cursors.get(key, {}).values()]
        backlog_start, paused_at = stored.partitions.get(key, (1, None))
        mark = stored.logs.get(key, _NO_MARK)
        first = max([*ends, backlog_start, paused_at or 1, mark.written, stored.headers_from.get(key, 1)])
        durable_end = mark.written if stored.is_same_boot else mark.synced
        return LogPlace(log_directory(name, number), number, first, durable_end)

    def _find_meta(self, name: str, logs: dict[int, PartitionLog]) -> None:
        """Find out what a topic is that no row tells of, by what is stored of it: its directories may have been put
        here, such as those of copies that were set aside. Blocks.
        """
        stored = self._stored
        layouts = {number: stored_layout(log) for number, log in logs.items()}
        has_raw_ids = any(layout.flags & RAW_IDS for layout in layouts.values())
        meta = TopicMeta(
            partition_num=max(logs) + 1 if has_raw_ids else 0,
            extend_support=any(layout.flags & EXTENDED for layout in layouts.values()),
        )
        if meta == PLAIN and list(logs) == [0]:
            return
        stored.metas[name] = meta, list(logs)
        if meta.extend_support:
            for number, layout in layouts.items():
                if layout.headers_from:
                    stored.headers_from[name, number] = layout.headers_from

    def _topic(
        self,
        name: str,
        logs: dict[int, PartitionLog],
        told: dict[str, list[tuple[int, int]]],
        channels: dict[str, dict[int, StoredChannel]],
    ) -> Topic:
        stored = self._stored
        meta, _ = stored.metas.get(name, (PLAIN, [0]))
        partitions = {n: self._partition(name, n, log, told[log.directory]) for n, log in logs.items()}
        topic = Topic(name, partitions, stored.topics.get(name, False), meta)
        topic.is_starting = not topic.paused and any(p.paused_at is not None for p in partitions.values())
        if name not in stored.topics:
            self._metadata.put(PutTopic(name, False))
            if name in stored.metas:
                from_where = {n: each.headers_from for n, each in partitions.items() if each.headers_from}
                self._metadata.put(PutTopicMeta.of(name, meta, partitions, from_where))
            topic.hold_back()  # it died before anything but its log was on disk, or its directories were put here
            for partition in partitions.values():
                self._metadata.put_backlog(partition)
        for channel_name, parts in channels.items():
            self._channel(topic, channel_name, parts, told)
        return topic

    def _partition(self, name: str, number: int, log: PartitionLog, told: list[tuple[int, int]]) -> Partition:
        stored, key = self._stored, (name, number)
        mine = self._cursors.get(key, {})
        backlog_start, paused_at = stored.partitions.get(key, (1, None))
        partition = Partition(name, number, log, self._delayed_notes)
        partition.headers_from = stored.headers_from.get(key, 0)
        partition.backlog_start = max(backlog_start, log.start_sequence)
        partition.paused_at = log.start_sequence if paused_at is None and stored.topics.get(name) else paused_at
        self._marks.restore(partition, stored.logs.get(key, _NO_MARK))
        if log.start_sequence > min([backlog_start, *(cursor.row.floor for cursor in mine.values())]):
            told.append(log.told_gap())
        if not mine and not stored.is_behind:
            self._losses.look_without_channels(partition, backlog_start, told)
        return partition

    def _channel(
        self, topic: Topic, name: str, parts: dict[int, StoredChannel], told: dict[str, list[tuple[int, int]]]
    ) -> None:
        _, recorded = self._stored.metas.get(topic.name, (PLAIN, [0]))
        paused = topic.channel_names[name] = all(part.paused for part in parts.values())
        for number, partition in topic.partitions.items():
            part = parts.get(number)
            if part is None and number in recorded:
                continue  # deleted in this partition
            ranges = told[log_directory(topic.name, number)]
            self._part(topic, partition, name, part, paused if part is None else part.paused, ranges)

    def _part(
        self,
        topic: Topic,
        partition: Partition,
        name: str,
        part: StoredChannel | None,
        is_paused: bool,
        told: list[tuple[int, int]],
    ) -> None:
        """Make a channel of one partition."""
        stored, channels = self._stored, self._channels
        cursor = self._cursors.get((topic.name, partition.number), {}).get(name)
        is_ordered = self._settings.is_ordered(topic, name)
        channel = channels.add(topic, partition, name, cursor, is_paused, is_ordered)
        channel.skipped = part is not None and part.skipped
        if cursor is not None:
            self._losses.look(partition, channel, cursor, None if stored.is_behind else told)
        if part is None or part.cursor != channels.cursor(channel):
            channels.put(channel)

    def adopt(self, topic: Topic, number: int, log: PartitionLog) -> Partition:
        """Make a partition of a topic that is there, with the channels that it had, as a start would.

        Args:
            topic: which has the partition then.
            log: of the partition; it is open.
        """
        told: list[tuple[int, int]] = []
        partition = self._partition(topic.name, number, log, told)
        if topic.paused or topic.is_starting:
            partition.paused_at = log.next_sequence if partition.paused_at is None else partition.paused_at
        elif not self._stored.topics.get(topic.name):
            partition.paused_at = None
        topic.add(partition)
        for (_, _, name), part in self._stored.channels.items():
            self._part(topic, partition, name, part, part.paused, told)
            topic.channel_names[name] = all(each.paused for each in topic.channels(name))
        return partition


def _advance(cursor: StoredCursor, floor: int) -> None:
    """Let a cursor begin at ``floor``, when the database is behind it."""
    ahead = floor - cursor.row.floor
    if ahead > 0:
        cursor.row.floor = floor
        cursor.window = cursor.window[ahead:]
