"""Leading begins and ends: a replica becomes a partition of a topic as a start would make one of it, and one again.

Rules of this file: no clock, no IO; what a partition had is kept, in the database or on its way there; a topic is there
as long as one of its partitions is led here.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from flintmq.broker.channels import Channels
from flintmq.broker.delayed import DelayedNotes
from flintmq.broker.deliveries import Deliveries
from flintmq.broker.known_topic import KnownChannel, KnownTopic
from flintmq.broker.log_marks import LogMarks
from flintmq.broker.logs import Logs
from flintmq.broker.lost import Losses
from flintmq.broker.metadata import Metadata
from flintmq.broker.partition import Partition
from flintmq.broker.progress import Progress
from flintmq.broker.publishes import Publishes
from flintmq.broker.restore import Restore
from flintmq.broker.subscription import Subscription
from flintmq.broker.topic import Topic
from flintmq.broker.topic_settings import TopicSettings
from flintmq.names import is_ephemeral
from flintmq.settings import decode_settings
from flintmq.storage import PartitionLog
from flintmq.storage.channel_store import StoredAbout, StoredCursor, StoredTopics
from flintmq.storage.records import PutSettings
from flintmq.storage.rows import Statement
from flintmq.topic_meta import TopicMeta, decode_meta


class Topics(Protocol):
    """The owner of the topics, as far as it is needed here."""

    topics: dict[str, Topic]
    on_topic_change: Callable[[str, str | None, bool], None]

    def change_meta(self, topic: Topic, meta: TopicMeta) -> bool: ...

    def pause_topic(self, topic: Topic, paused: bool) -> None: ...

    def put_meta(self, topic: Topic) -> None: ...


class Adoption:
    """Takes partitions into topics, and out of them.

    Args:
        owner: of the topics.
    """

    def __init__(
        self,
        owner: Topics,
        logs: Logs,
        channels: Channels,
        metadata: Metadata,
        marks: LogMarks,
        progress: Progress,
        publishes: Publishes,
        deliveries: Deliveries,
        settings: TopicSettings,
        losses: Losses,
        delayed_notes: DelayedNotes,
    ) -> None:
        self._owner = owner
        self._logs = logs
        self._channels = channels
        self._metadata = metadata
        self._marks = marks
        self._progress = progress
        self._publishes = publishes
        self._deliveries = deliveries
        self._settings = settings
        self._losses = losses
        self._delayed_notes = delayed_notes

    def begin(
        self,
        name: str,
        number: int,
        log: PartitionLog,
        stored: StoredTopics,
        about: StoredAbout,
        meta: TopicMeta,
        rows_end: int,
        floors: Mapping[int, int],
    ) -> Partition:
        """Take a partition into its topic, which is made if this is its first here.

        Args:
            stored: what the database has of the partition.
            about: what its last leader said of the topic.
            meta: of the topic, as it is now.
            rows_end: what ``stored`` says beyond this sequence is not so.
            floors: of channels in order, ahead of the database, by cursor.

        Raises:
            StorageError: nothing has changed.
        """
        owner, key = self._owner, (name, number)
        theirs = decode_meta(about.meta)
        # it has partitions for its life, or never: what was told otherwise was told of another of this name
        told = theirs if theirs.is_partitioned == meta.is_partitioned else meta
        clamped = clamp(stored, key, rows_end)
        unshift(stored, self._delayed_notes.shift_ns)
        stored.topics[name] = about.paused
        stored.headers_from[key] = min(about.headers_from, rows_end)
        topic = owner.topics.get(name)
        settings = {channel: decode_settings(each) for channel, each in about.settings.items()}
        is_new = topic is None
        if topic is None:
            topic = owner.topics[name] = Topic(name, {}, about.paused, told)
        elif told.rank > topic.meta.rank:
            owner.change_meta(topic, told.with_headers_of(topic.meta))
        if topic.meta.extend_support and not told.extend_support:
            stored.headers_from[key] = log.next_sequence
        self._settings.adopt(name, settings)
        before = dict(topic.channel_names)
        restore = Restore(
            stored,
            dict(floors),
            self._logs,
            self._channels,
            self._metadata,
            self._marks,
            self._progress,
            self._settings,
            self._losses,
            self._delayed_notes,
        )
        partition = restore.adopt(topic, number, log)
        partition.take_over()
        for channel in partition.channels.values():
            if channel.name in clamped and channel.spilled.count:
                channel.spilled.clear_from(rows_end)
            self._deliveries.mark(channel)
        if about.paused and not topic.paused:
            self._pause(topic, partition)
        # the record of a store that was put back may be from before it had them
        meta = meta.with_headers_of(topic.meta)
        if not owner.change_meta(topic, meta) and (topic.meta, partition.headers_from) != (theirs, about.headers_from):
            owner.put_meta(topic)
        if not is_new:
            for each in settings:
                self._metadata.put(PutSettings.of(name, each, self._settings.own(name, each)))
        if stored.partitions.get(key, (1, None))[1] != partition.paused_at:
            self._metadata.put_backlog(partition)
        self._settings.apply(topic)
        owner.on_topic_change(name, None, True)
        for channel_name in topic.channel_names:
            if channel_name not in before:
                owner.on_topic_change(name, channel_name, True)
        return partition

    def _pause(self, topic: Topic, partition: Partition) -> None:
        """Pause a topic because one of its partitions was: what was paused stays so."""
        paused_at = partition.paused_at
        self._owner.pause_topic(topic, True)
        partition.paused_at = paused_at
        for channel in partition.channels.values():
            channel.limit = paused_at
        self._metadata.put_backlog(partition)

    def undo(self, name: str, number: int) -> None:
        """Take back what :meth:`begin` did of a partition before it failed."""
        topic = self._owner.topics.get(name)
        if topic is None:
            return
        partition = topic.partitions.get(number)
        if partition is not None:
            self.end(partition)
            self._marks.forget(partition)
        elif not topic.partitions:
            del self._owner.topics[name]
            self._settings.release(name)

    def end(self, partition: Partition) -> tuple[list[Subscription], dict[str, tuple[int, int]]]:
        """Take a partition out of its topic, and have written where its channels are.

        Returns:
            the consumers, whose connections are to be closed; and of each channel the number of its cursor, and its
            floor.
        """
        owner, name = self._owner, partition.topic_name
        topic = owner.topics[name]
        subscriptions: list[Subscription] = []
        left: dict[str, tuple[int, int]] = {}
        for channel in list(partition.channels.values()):
            subscriptions += channel.subscriptions
            channel.tell_all_released()  # its consumers are not detached one by one, and nobody listens later
            self._deliveries.forget(channel)
            if is_ephemeral(channel.name):
                self._channels.remove(channel)
            else:
                self._progress.release(channel)
                left[channel.name] = self._channels.release(channel), channel.floor
            channel.paused = True  # nothing more goes to consumers that are not closed yet
        self._publishes.forget(partition)
        before = list(topic.channel_names)
        topic.remove(partition.number)
        partition.channels = {}
        if topic.partitions:
            self._settings.apply(topic)
        else:
            del owner.topics[name]
            self._settings.release(name)
        for channel_name in before:
            if channel_name not in topic.channel_names:
                owner.on_topic_change(name, channel_name, False)
        owner.on_topic_change(name, None, bool(topic.partitions))
        return subscriptions, left

    def known(self, name: str) -> KnownTopic | None:
        """Return the channels of a topic and what is set for it; None: nothing of it is led here."""
        topic = self._owner.topics.get(name)
        if topic is None:
            return None
        parts = {each: topic.channels(each) for each in topic.channel_names if not is_ephemeral(each)}
        channels = {
            each: KnownChannel(all(part.paused for part in its), all(part.skipped for part in its))
            for each, its in parts.items()
        }
        settings = {each: its for each, its in self._settings.own_all(name).items() if not is_ephemeral(each)}
        return KnownTopic(topic.paused, channels, settings)

    def keep_rows(self, name: str, keep: Callable[..., list[Statement]] | None) -> None:
        """Let the rows of a topic be written as ``keep`` says; None: in the tables of topics and settings."""
        if keep is None:
            self._metadata.keepers.pop(name, None)
        else:
            self._metadata.keepers[name] = keep


def clamp(stored: StoredTopics, key: tuple[str, int], end: int) -> set[str]:
    """Take back what the rows of a partition say beyond a sequence, at which its log ends or ended once.

    Returns:
        the channels that were beyond it.
    """
    clamped = {cursor.channel for cursor in stored.cursors if clamp_cursor(cursor, end)}
    if key in stored.partitions:
        backlog_start, paused_at = stored.partitions[key]
        stored.partitions[key] = min(backlog_start, end), None if paused_at is None else min(paused_at, end)
    return clamped


def unshift(stored: StoredTopics, shift_ns: int) -> None:
    """Make due times of the wall times that rows have.

    Args:
        shift_ns: wall time minus the clock of due times.
    """
    if not shift_ns:
        return
    for cursor in stored.cursors:
        cursor.row.deferred = [(sequence, due_ns - shift_ns) for sequence, due_ns in cursor.row.deferred]
        if cursor.spilled_next_due_ns is not None:
            cursor.spilled_next_due_ns -= shift_ns


def clamp_cursor(cursor: StoredCursor, end: int) -> bool:
    """Let a channel be nowhere beyond a sequence; whether it was."""
    row = cursor.row
    if row.floor + len(cursor.window) <= end and all(stop <= end for _, stop in row.holes):
        return False
    row.floor = min(row.floor, end)
    cursor.window = cursor.window[: end - row.floor]
    row.deferred = [each for each in row.deferred if each[0] < end]
    row.attempts = [each for each in row.attempts if each[0] < end]
    row.holes = [(first, min(stop, end)) for first, stop in row.holes if first < end]
    return True
