"""Every topic of one nsqd: what there is and what operators do to it; the work of a turn is with those it owns.

A turn::

    connections parse what arrived -> publish(), subscribe(), finish ...     (marks partitions and channels)
    write_pending()        one append per partition that was published to and has its files      publishes.py
    commit_groups()        once it is as durable as the policy says: the publishers' answers    publishes.py
    pump()                 deliveries of all marked channels                                     deliveries.py

Beside it runs the flush (progress.py): :meth:`Broker.take_flush` collects the progress of all channels as one
transaction, which the owner runs off the loop and reports with :meth:`Broker.flush_ended`. The files of new topics are
made in the same way (new_topics.py), with :meth:`Broker.take_creations` and :meth:`Broker.creations_ended`: until then
a topic takes messages and consumers, which wait.

Rules of this file: no clock, no socket; iteration only over dicts and lists; every method is called on the loop,
but :meth:`Broker.run_flush`.

Source: docs/decisions/0002, docs/decisions/0001, docs/decisions/0003.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from operator import itemgetter
from typing import Any

from flintmq.broker.adoption import Adoption
from flintmq.broker.channel import Channel
from flintmq.broker.channels import Channels, first_cursor
from flintmq.broker.delayed import DelayedNotes
from flintmq.broker.deliveries import Deliveries
from flintmq.broker.followed_replicas import FollowedReplicas
from flintmq.broker.led_replicas import LedReplicas
from flintmq.broker.log_marks import LogMarks
from flintmq.broker.logs import TOPICS_DIRECTORY as TOPICS_DIRECTORY
from flintmq.broker.logs import Logs
from flintmq.broker.lost import Losses
from flintmq.broker.metadata import Metadata, Waiter
from flintmq.broker.new_topics import NewTopic, NewTopics
from flintmq.broker.options import BrokerOptions as BrokerOptions
from flintmq.broker.partition import Partition, PublishGroup
from flintmq.broker.progress import Flush, Progress, Question
from flintmq.broker.publishes import Publishes
from flintmq.broker.replica import Replica
from flintmq.broker.replica_rows import KeptFloors
from flintmq.broker.replicas import NewReplica, Replicas
from flintmq.broker.restore import Restore
from flintmq.broker.retention import Retaining, Retention
from flintmq.broker.seek import drop_deferred
from flintmq.broker.subscription import Subscription
from flintmq.broker.tagged import TaggedChannel
from flintmq.broker.topic import Topic
from flintmq.broker.topic_settings import TopicSettings
from flintmq.budget import Budget
from flintmq.errors import DiskFull, FlintError, StorageError
from flintmq.limits import READ_CACHE_BYTES, TAIL_CACHES_BYTES
from flintmq.names import is_ephemeral
from flintmq.settings import Limits, Settings
from flintmq.storage import (
    ChannelStore,
    Corruption,
    Creation,
    Damage,
    Files,
    MemoryLog,
    PartitionLog,
    ReadCache,
    channel_store,
    packs,
)
from flintmq.storage.records import DeleteChannel, DeleteTopic, PutTopic, PutTopicMeta
from flintmq.topic_meta import EXTENDED_PLAIN, PLAIN, TopicMeta

_SEALED_MAX = 64
"""Segments that are sealed at once on a full disk: each is a new file, and a sync."""


class TopicNotFound(FlintError):
    """There is no such topic."""


class ChannelNotFound(FlintError):
    """The topic has no such channel, or not in the partition that was named."""


class PartitionNotFound(FlintError):
    """The topic has no partition of that number here."""


class TopicConflict(FlintError):
    """There is a topic of that name that was created otherwise."""


def _raise(_what: str, error: Exception) -> None:
    raise error


class Broker:
    """Owner of all topics.

    Args:
        report: told of damage that a log found and set aside.

    Attributes:
        budget: the memory that clients can make this nsqd use.
        publishes: what is published and not stored.
        replicas: what this node has of partitions that are kept on several.
        deliveries: channels that are to be looked at, now or at some time.
        retaining: what retention does.
        mark: has a channel looked at; see :meth:`Deliveries.mark`.
        publish_to, write_pending, commit_groups: what happens to a publish in a turn; see :class:`Publishes`, whose
            methods they are.
        on_settings_change: told of every topic, and channel or None, whose settings have been changed.
        find_dead_letters: see :class:`TopicSettings`, whose method it is.
        on_dead_letter_topic: finds a dead-letter topic or creates it.
        on_problem: told what could not be read or written, and is tried again.
        on_damage: told of messages that are missing.
        on_log_failed: told once of the directory of each log that takes no more messages, and why; maybe in a thread.
        on_known_damage: told once of damage that earlier processes found.
        on_topic_change: told of a topic, a channel or None, and whether it is there now.
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
        self.options = options
        self.on_known_damage: Callable[[list[tuple[int, int, bytes]]], None] = lambda _stored: None
        self.on_damage: Callable[[Damage], None] = lambda _damage: None
        self.on_problem: Callable[[StorageError], None] = lambda _error: None
        self.on_log_failed: Callable[[str, str], None] = lambda _directory, _reason: None
        self.on_defect: Callable[[str, Exception], None] = _raise
        self.on_topic_change: Callable[[str, str | None, bool], None] = lambda _topic, _channel, _exists: None
        self.on_dead_letter_topic: Callable[[str, int], Topic] = self.extended_topic
        self._files = files
        self._store = store
        self.budget = budget = Budget(options.memory_budget_bytes)
        caches_bytes = budget.caches_max_bytes
        self._cache = ReadCache(min(READ_CACHE_BYTES, caches_bytes // 3), min(TAIL_CACHES_BYTES, caches_bytes * 2 // 3))
        self._delayed_notes = DelayedNotes()
        self._logs = Logs(files, self._cache, options.segment_bytes, report)
        self._logs.on_failed = self._tell_log_failed
        self._metadata = metadata = Metadata()
        self._marks = LogMarks()
        self._losses = Losses(self._tell_damage, self._tell_problem)
        self._channels = channels = Channels(files, options, budget, metadata, random_source, self._tell_problem)
        self._progress = Progress(channels, metadata, self._marks, self)
        self.deliveries = deliveries = Deliveries(self.topics, channels, self._tell_problem, self._tell_defect)
        self.mark = deliveries.mark
        self.publishes = Publishes(self.topics, deliveries, self._marks, self._tell_problem, self._tell_defect)
        self.publish_to = self.publishes.publish_to
        self.write_pending = self.publishes.write_pending
        self.commit_groups = self.publishes.commit_groups
        self._new_topics = NewTopics(metadata, self._topic_created, self._refuse_topic, self._discard)
        self._settings = TopicSettings(
            self.topics,
            options.settings,
            metadata,
            channels,
            deliveries,
            self.publish_to,
            self._dead_letter_topic,
            self._tell_problem,
        )
        retention = Retention(options.retention_time_ns, options.retention_bytes)
        self.retaining = Retaining(retention, self._settings.clock_steps, self._tell_problem)
        self.on_settings_change = self._settings.on_change
        self.find_dead_letters = self._settings.find_dead_letters
        adoption = Adoption(
            self,
            self._logs,
            channels,
            metadata,
            self._marks,
            self._progress,
            self.publishes,
            deliveries,
            self._settings,
            self._losses,
            self._delayed_notes,
        )
        kept = KeptFloors(channels, self._progress, self._tell_problem)
        self.replicas = Replicas(
            self._logs,
            channels,
            metadata,
            self._marks,
            self._progress,
            kept,
            self._is_unreplicated,
            self._tell_damage,
            self._tell_problem,
        )
        self.followed_replicas = FollowedReplicas(channels, metadata, self._marks, self._progress, self.publishes, kept)
        self.led_replicas = LedReplicas(
            self.replicas, channels, metadata, self._marks, self._progress, self.publishes, adoption
        )

    def _is_unreplicated(self, topic: str) -> bool:
        found = self.topics.get(topic)
        return found is not None and not found.partitions.keys() <= self.replicas.of_topic(topic).keys()

    def _tell_problem(self, error: StorageError) -> None:
        self.on_problem(error)

    def _tell_log_failed(self, directory: str, reason: str) -> None:
        self.on_log_failed(directory, reason)

    def data_removed(self, why: str) -> None:
        """Take nothing more into any log: the data directory is not there any more. Whoever calls tells the log."""
        for log in self.logs():
            if log.failed is None:
                log.failed = why

    def log_removed(self, log: PartitionLog) -> None:
        """Take nothing more into a log whose files were removed."""
        if log.failed is None:
            log.failed = "its files were removed while nsqd ran: what it has goes when nsqd ends"
            self._tell_log_failed(log.directory, log.failed)

    def _tell_damage(self, damage: Damage) -> None:
        self.on_damage(damage)

    def _dead_letter_topic(self, name: str, wall_ns: int) -> Topic:
        return self.on_dead_letter_topic(name, wall_ns)

    def _tell_defect(self, what: str, error: Exception) -> None:
        self.on_defect(what, error)

    # -- start ---------------------------------------------------------------------------------------------------

    def open(self, wall_ns: int) -> None:
        """Restore every topic and channel of the data directory. Blocks.

        Raises:
            StorageError: the data directory cannot be used.
        """
        stored = self._store.load()
        self.on_known_damage(stored.damage)
        for damage in self._store.take_damages():
            self.on_damage(damage)
        self._settings.restore(stored.settings)
        floors = self._channels.load_floors()
        self._channels.restore(stored.next_cursor, stored.next_pack, floors)
        restore = Restore(
            stored,
            floors,
            self._logs,
            self._channels,
            self._metadata,
            self._marks,
            self._progress,
            self._settings,
            self._losses,
            self._delayed_notes,
        )
        for topic in restore.topics(wall_ns):
            self.topics[topic.name] = topic
            for name in topic.channel_names:
                for channel in topic.channels(name):
                    self.mark(channel)
            self._settings.apply(topic)
        floors = {} if stored.is_older else floors
        self.replicas.open(stored, floors, wall_ns, restore.strays)
        self._channels.begin_floors(floors, self.replicas.cursors())

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
            TopicConflict: it is replicated, and none of its partitions is led here.
        """
        topic = self.topics.get(name)
        if topic is not None:
            return topic
        self._refuse_replicated(name)
        if is_ephemeral(name):
            log: PartitionLog | MemoryLog = MemoryLog(0, self.options.ephemeral_depth_max, self.budget, wall_ns)
        elif later:
            log = self._logs.new(name, 0, wall_ns)
        else:
            try:
                log = self._logs.open(name, 0, wall_ns)
            except (OSError, StorageError) as error:
                failure = self.publishes.write_error = StorageError(f"cannot create topic {name}: {error}")
                raise failure from error
            self._metadata.put(PutTopic(name, False))
        topic = Topic(name, {0: Partition(name, 0, log, self._delayed_notes)})
        if isinstance(log, PartitionLog) and not log.is_created:
            self._new_topics.add(topic, [Creation(log)], is_recorded=True)
        self._add_topic(topic, starting)
        return topic

    def _refuse_replicated(self, name: str) -> None:
        if self.replicas.of_topic(name):
            raise TopicConflict(f"topic {name} is replicated: its partitions come and go with the cluster's state")

    def _add_topic(self, topic: Topic, starting: bool) -> None:
        self.topics[topic.name] = topic
        if starting:
            topic.hold_back()
            if not topic.ephemeral and topic not in self._new_topics:
                self._put_backlogs(topic)  # a topic that died before its start has it after a restart
        self._settings.apply(topic)
        self.on_topic_change(topic.name, None, True)

    def _put_backlogs(self, topic: Topic) -> None:
        for partition in topic.partitions.values():
            self._metadata.put_backlog(partition)

    def create_partitions(
        self, name: str, meta: TopicMeta, numbers: Iterable[int], wall_ns: int, starting: bool = False
    ) -> Topic:
        """Create those of ``numbers`` that are not here, and the topic with them; their files are made later.

        It is durable once :meth:`when_metadata_durable` calls back for the topic.

        Raises:
            TopicConflict: there is a plain topic of that name, or one with another meta.
            StorageError: a partition cannot be added to a topic that is there.
        """
        topic = self.topics.get(name)
        if self.replicas.of_topic(name) and (topic is None or not topic.partitions.keys() >= {*numbers}):
            self._refuse_replicated(name)
        if topic is not None:
            if not topic.meta.is_like(meta):
                what = "with other properties" if topic.meta.is_partitioned else "without partitions"
                raise TopicConflict(f"topic {name} is there already, {what}: delete it first, or take another name")
            missing = [number for number in numbers if number not in topic.partitions]
            if missing and topic in self._new_topics:
                raise TopicConflict(f"topic {name} is being created with other partitions: ask again")
            for number in missing:
                self._add_partition(topic, number, wall_ns)
            return topic
        logs = {number: self._logs.new(name, number, wall_ns) for number in sorted(numbers)}
        partitions = {number: Partition(name, number, log, self._delayed_notes) for number, log in logs.items()}
        topic = Topic(name, partitions, meta=meta)
        self._metadata.put(PutTopic(name, False))
        self._metadata.put(PutTopicMeta.of(name, meta, partitions), must_sync=True)
        self._new_topics.add(topic, [Creation(log) for log in logs.values()], is_recorded=False)
        self._add_topic(topic, starting)
        return topic

    def extended_topic(self, name: str, wall_ns: int, starting: bool = False) -> Topic:
        """Find a topic or create it as a plain one whose messages may carry headers.

        Its consumers get the headers if they identified with ``extend_support``, and otherwise the bodies alone.
        """
        topic = self.topics.get(name)
        if topic is not None:
            return topic
        if not is_ephemeral(name):
            return self.create_partitions(name, EXTENDED_PLAIN, [0], wall_ns, starting)
        topic = self.topic(name, wall_ns, starting)
        topic.meta = topic.first_partition.meta = EXTENDED_PLAIN
        return topic

    def _add_partition(self, topic: Topic, number: int, wall_ns: int) -> None:
        """Give a topic that is there one more partition; rare, so its files are made at once."""
        try:
            log = self._logs.open(topic.name, number, wall_ns)
        except OSError as error:
            raise StorageError(f"cannot add partition {number} of topic {topic.name}: {error}") from error
        partition = Partition(topic.name, number, log, self._delayed_notes)
        partition.paused_at = log.next_sequence if topic.paused or topic.is_starting else None
        partition.hold_like(topic.first_partition)
        topic.add(partition)
        for channel_name, paused in topic.channel_names.items():
            self._channels.put(self._add_channel(topic, partition, channel_name, None, paused))
        self.put_meta(topic)
        self._settings.apply(topic)
        self._metadata.put_backlog(partition)
        self.on_topic_change(topic.name, None, True)

    def change_meta(self, topic: Topic, meta: TopicMeta) -> bool:
        """Put another state of a topic into force, unless it has that or a higher one; whether anything changed.

        A topic has partitions for its life, or never: a state that says otherwise is of another topic of this name.

        It is durable once :meth:`when_metadata_durable` calls back for the topic.

        Raises:
            TopicConflict: it says what cannot be changed.
        """
        if meta.is_partitioned != topic.meta.is_partitioned or meta.rank <= topic.meta.rank:
            return False
        is_upgrade = meta.extend_support and not topic.meta.extend_support
        if topic.meta.extend_support and not meta.extend_support:
            raise TopicConflict(f"topic {topic.name} has headers, and keeps them for its life")
        topic.meta = meta
        for partition in topic.partitions.values():
            if is_upgrade:
                partition.add_headers(meta)
                for channel in partition.channels.values():
                    TaggedChannel.take_over(channel, partition.headers_from)
            else:
                partition.meta = meta
        if not topic.ephemeral:
            self.put_meta(topic)
            if is_upgrade:
                self._hold_until_recorded(topic)
        self.on_topic_change(topic.name, None, True)
        return True

    def put_meta(self, topic: Topic) -> None:
        """Have written what a topic is, and which of its partitions are here."""
        headers_from = {n: each.headers_from for n, each in topic.partitions.items() if each.headers_from}
        record = PutTopicMeta.of(topic.name, topic.meta, topic.partitions, headers_from)
        self._metadata.put(record, must_sync=True)

    # -- new topics ------------------------------------------------------------------------------------------------

    @property
    def new_log_count(self) -> int:
        """Logs of new topics and replicas that have no files yet, or whose files are being made."""
        return self._new_topics.log_count + self.replicas.new_count

    @property
    def has_creations(self) -> bool:
        """Whether files of topics are to be made, or are being made."""
        return self._new_topics.has_some or self.replicas.has_creations

    def take_creations(self) -> list[NewTopic | NewReplica]:
        """Topics whose files are to be made now; the caller does it with :func:`flintmq.storage.create_logs`."""
        return [*self._new_topics.take(), *self.replicas.take_creations()]

    def creations_ended(self, created: Sequence[NewTopic | NewReplica]) -> None:
        """Take note of files that were made, or could not be."""
        self._new_topics.ended([new for new in created if isinstance(new, NewTopic)])
        for new in created:
            if isinstance(new, NewReplica):
                self.replicas.creation_ended(new)

    def _topic_created(self, new: NewTopic) -> None:
        topic = new.topic
        self._metadata.put(PutTopic(topic.name, topic.paused))
        for partition in topic.partitions.values():
            if partition.paused_at is not None:
                self._metadata.put_backlog(partition)
            self.publishes.take_up(partition)

    def _refuse_topic(self, new: NewTopic, error: StorageError) -> None:
        """Undo a topic that could not be created; the next who asks for it tries again."""
        topic = new.topic
        if new.error is not None:
            self.publishes.write_error = error
        has_rows = topic.channel_names or topic.paused or topic.meta != PLAIN  # in the database
        for channel_name in list(topic.channel_names):
            self.delete_channel(topic, channel_name)
        if has_rows:
            self._metadata.put(DeleteTopic(topic.name))
        for partition in topic.partitions.values():
            self.publishes.forget(partition)
            partition.refuse(error)
        del self.topics[topic.name]
        self._settings.forget(topic)
        self.on_topic_change(topic.name, None, False)
        for waiter in new.waiters:
            waiter(error)
        if new.error is not None and topic.meta.is_partitioned:
            self._discard(new)

    def _discard(self, new: NewTopic) -> None:
        """Remove the files that were made of a topic that is not to be."""
        new.finish()
        for creation in new.creations:
            creation.log.close()
        try:
            self._progress.remove_later(self._logs.put_away(new.topic.name))
        except StorageError as error:
            self.on_problem(error)

    # -- held back -------------------------------------------------------------------------------------------------

    def _hold_until_recorded(self, topic: Topic) -> None:
        """Write nothing to a topic before the database knows that it has headers, and from which message on.

        Else a restart would not know how messages are laid out. While the database cannot take it, publishes fail.
        """
        for partition in topic.partitions.values():
            partition.hold()
        self._metadata.wait(lambda error: self._headers_recorded(topic, error))

    def _headers_recorded(self, topic: Topic, error: BaseException | None) -> None:
        if self.topics.get(topic.name) is not topic:
            return  # deleted meanwhile
        if error is None:
            self._release(topic)
            return
        failure = StorageError(f"cannot give topic {topic.name} headers: {error}")
        for partition in topic.partitions.values():
            partition.end_pending(failure)
        self._metadata.wait(lambda error: self._headers_recorded(topic, error))

    def _release(self, topic: Topic) -> None:
        if self.topics.get(topic.name) is not topic:
            return  # deleted meanwhile
        for partition in topic.partitions.values():
            partition.release()
            if not partition.is_held:
                self.publishes.take_up(partition)

    def hold_until_durable(self, topic: Topic, done: Waiter) -> bool:
        """Store nothing in a topic before all changes so far survive, so that they can be relied on from now on.

        Whatever is acknowledged later is then behind them, also after a crash. What is published meanwhile waits.

        Args:
            done: called once when they survive, or with why they do not, before anything that waits is stored.

        Returns:
            False when something of the topic is under way: it may be acknowledged before them, and nothing is held.
            Neither is it while the disk fails, as they probably will not survive.
        """
        if self.write_error is not None or any(partition.is_under_way for partition in topic.partitions.values()):
            return False

        def ended(error: BaseException | None) -> None:
            try:
                done(error)
            finally:
                self._release(topic)

        if self.when_metadata_durable(ended, topic):
            for partition in topic.partitions.values():
                partition.hold()
        else:
            done(None)
        return True

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
            self._channels.put(self._add_channel(topic, partition, name, floor, False))
        topic.channel_names[name] = False
        self._settings.apply(topic)
        self.on_topic_change(topic.name, name, True)
        return topic.channels(name), is_new

    def _add_channel(self, topic: Topic, partition: Partition, name: str, floor: int | None, paused: bool) -> Channel:
        """Make a channel that nobody has stored.

        Args:
            floor: where it begins; None for the start of the log, and what is counted of it does then not begin there.
        """
        cursor = None if floor is None else first_cursor(floor)
        is_ordered = self._settings.is_ordered(topic, name)
        channel = self._channels.add(topic, partition, name, cursor, paused, is_ordered, is_new=floor is not None)
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
        was_must = bool(self._settings.own(topic.name, name).is_order_must)
        self._settings.remember_order(topic, name, is_ordered, is_ordered and (is_must or was_must))
        for channel in parts:
            if (channel.keep_floor is not None) != is_ordered:
                self._channels.order(channel, is_ordered)
                self.mark(channel)

    def is_order_must(self, topic: Topic, name: str) -> bool:
        """Whether a channel, which need not exist, may only be consumed in order."""
        return self._settings.is_order_must(topic, name)

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

    def when_metadata_durable(self, callback: Waiter, topic: Topic | None = None) -> bool:
        """Call back when all channels and changes made so far survive; False when nothing is waiting to be written.

        Args:
            topic: which has to have its files, too.
        """
        return self._new_topics.wait(callback, topic) or self._metadata.wait_for_all(callback)

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
            its = self._channels.partition(channel)
            del its.channels[name]
            if self._channels.is_durable(channel):
                self._metadata.put(DeleteChannel(topic.name, its.number, name))
            self.deliveries.forget(channel)
            self._channels.remove(channel)
            if not its.channels:
                # as in nsqd, what was handed to the deleted channel is gone; the next one starts from here
                handed_out = its.log.next_sequence if its.paused_at is None else its.paused_at
                its.backlog_start = handed_out
                if not topic.ephemeral:
                    self._metadata.put_backlog(its)
        is_gone = not topic.channels(name)
        if is_gone:
            del topic.channel_names[name]
            self._settings.forget(topic, name)
        else:
            self._name_paused(topic, name)
        self._settings.apply(topic)
        self.on_topic_change(topic.name, name, not is_gone)
        return subscriptions

    def delete_topic(self, name: str) -> list[Subscription]:
        """Remove a topic, its channels and its log; return all consumers.

        Raises:
            TopicNotFound: there is none of that name.
            TopicConflict: it is replicated.
            StorageError: its directory cannot be renamed.
        """
        topic = self.get_topic(name)
        self._refuse_replicated(name)
        subscriptions: list[Subscription] = []
        for channel_name in list(topic.channel_names):
            subscriptions += self.delete_channel(topic, channel_name)
        for partition in topic.partitions.values():
            self.publishes.forget(partition)
            self._marks.forget(partition)
            partition.delete()
        del self.topics[name]
        self._settings.forget(topic)
        if not topic.ephemeral:
            self._metadata.put(DeleteTopic(name))
            if not self._new_topics.delete(topic):
                self._progress.remove_later(self._logs.put_away(name))
        self.on_topic_change(name, None, False)
        return subscriptions

    def pause_topic(self, topic: Topic, paused: bool) -> None:
        """Stop or go on handing the topic's messages to its channels."""
        if topic.paused == paused:
            return
        topic.paused = paused
        if not topic.is_starting:
            self._limit(topic, paused)
        if not topic.ephemeral:
            self._metadata.put(PutTopic(topic.name, paused))

    def _limit(self, topic: Topic, paused: bool) -> None:
        """Hand nothing more to channels from here on, or everything."""
        for partition in topic.partitions.values():
            partition.paused_at = partition.log.next_sequence if paused else None
            for channel in partition.channels.values():
                channel.limit = partition.paused_at
                self.mark(channel)
            if not topic.ephemeral:
                self._metadata.put_backlog(partition)

    def pause_channel(self, topic: Topic, name: str, paused: bool, partition: int | None = None) -> None:
        """Stop or go on delivering to a channel's consumers, in one partition or in all.

        Raises:
            ChannelNotFound: the topic has no such channel, or not there.
            PartitionNotFound: the topic has no such partition here.
        """
        for channel in self.parts(topic, name, partition):
            channel.paused = paused
            self.mark(channel)
            self._channels.put(channel)
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
                self._metadata.put_backlog(partition)

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
        channels = self._channels
        if channel.keep_floor is not None:
            channels.forget_floor(channel)  # it may have gone back
            self._progress.ask(Question(lambda _store: channels.sync_floors(), self._floors_synced))
        channels.note_changed(channel)
        self.deliveries.mark_parts(channel)
        # even if nothing of it has changed: who waits for metadata waits for the flush that has the cursor
        channels.put(channel)

    def _floors_synced(self, _answer: object, error: BaseException | None) -> None:
        if isinstance(error, StorageError):
            self.on_problem(error)

    def remember(self, statement: channel_store.Statement) -> None:
        """Have something of others written; durable once :meth:`when_metadata_durable` calls back."""
        self._metadata.put_own(statement)

    def has(self, channel: Channel) -> bool:
        """Whether a channel has not been deleted."""
        return channel in self._channels

    def ask(self, channel: Channel, read: Callable[[ChannelStore, int], Any], then: Question.Then) -> None:
        """Ask the database about a channel, of which everything so far is in it by then.

        Args:
            read: is given the number of the channel's cursor.
            then: called with the answer, or with why there is none.
        """
        cursor = self._channels.cursor(channel)
        self._channels.changed[channel] = None
        self._progress.ask(Question(lambda store: read(store, cursor), then))
        self._channels.is_urgent = True

    # -- settings --------------------------------------------------------------------------------------------------

    def give_to_cluster(self, topic: Topic, topic_number: int, done: Waiter) -> list[Subscription]:
        """Make replicas of the partitions of a topic; see :meth:`LedReplicas.take_in`."""
        settings = {channel: self._settings.own(topic.name, channel) for channel in ("", *topic.channel_names)}
        return self.led_replicas.take_in(topic, topic_number, settings, done)

    def take_dead_letters(self, topic: Topic) -> None:
        """Remember that a topic has dead letters, before any of them is stored that is published from now on."""
        if self._settings.take_dead_letters(topic):
            self.hold_until_durable(topic, lambda _error: None)

    def own_settings(self, topic: str, channel: str | None = None) -> Settings:
        """Return what was set for a topic or one of its channels itself."""
        return self._settings.own(topic, channel)

    def settings_of(self, topic: str, channel: str | None = None) -> Limits:
        """Return what is in force for a topic or one of its channels, or would be if it were there."""
        return self._settings.of(topic, channel)

    def change_settings(self, topic: Topic, channel: str | None, settings: Settings) -> None:
        """Replace what was set for a topic or one of its channels; durable with :meth:`when_metadata_durable`.

        Raises:
            ChannelNotFound: the topic has no such channel.
            BadSetting: under these settings dead letters would have nowhere to go.
        """
        if channel:
            self.parts(topic, channel)
        self._settings.change(topic, channel, settings)

    def sweep(self, wall_ns: int) -> bool:
        """Pass over what is too old although nobody consumes it; whether a turn has to follow.

        Args:
            wall_ns: the clock of due times.
        """
        return self._settings.sweep(wall_ns)

    # -- one turn ------------------------------------------------------------------------------------------------

    def publish(self, topic: Topic, bodies: Sequence[bytes], due_ns: int = 0) -> PublishGroup:
        """Publish messages to the partition whose turn it is; see :meth:`Publishes.publish_to`."""
        return self.publish_to(topic.next_partition(), bodies, due_ns)

    def free_bytes(self) -> int:
        """Bytes that can be written to the disk of the data directory."""
        return self._files.free_bytes()

    @property
    def write_error(self) -> StorageError | None:
        """Why something published or created last could not be stored; None after the next good write."""
        return self.publishes.write_error

    @property
    def has_pending(self) -> bool:
        """Whether :meth:`write_pending` has something to do."""
        return bool(self.publishes.pending)

    @property
    def has_held(self) -> bool:
        """Whether something was published that waits for files of its topic, or for the database."""
        return self.publishes.has_held

    def set_watermark(self, partition: Partition, sequence: int | None) -> None:
        """Let nothing of a partition be committed from ``sequence`` on; see :meth:`Publishes.set_watermark`."""
        self.publishes.set_watermark(partition, sequence)

    def cut_back(self, topic: Topic, number: int, sequence: int, done: Waiter) -> None:
        """Let the log of a partition end before ``sequence``, and everything that is known of it with it.

        What is published meanwhile waits. Whoever published what goes is told that it failed; it may be stored
        elsewhere. A crash on the way leaves the log as it was or as it is to be, and nothing counts as lost.

        Args:
            sequence: as for :meth:`flintmq.storage.PartitionLog.cut_back_to`, which blocks in a flush that ends.
            done: called once with None when it is done, or with why it is not.

        Raises:
            PartitionNotFound: the topic has no such partition here.
            ValueError, StorageError: as :meth:`flintmq.storage.PartitionLog.begin_cut` says; nothing has changed.
        """
        partition = topic.partitions.get(number)
        if partition is None or not isinstance(partition.log, PartitionLog):
            raise PartitionNotFound(number)
        if not partition.log.begin_cut(sequence):
            done(None)
            return
        partition.hold()
        # first what is known elsewhere: a start would take what is missing for lost
        self._marks.limit(partition, sequence)
        error = StorageError(f"topic {topic.name} partition {number}: what was not committed is cut off")
        partition.cut_back_to(sequence, error)
        for channel in partition.channels.values():
            self.was_changed(channel)
        self._metadata.put_backlog(partition)
        if topic.meta.extend_support:
            self.put_meta(topic)  # it says from where on messages have headers
        self._metadata.wait_here(lambda error: self._cut_log(partition, sequence, done, error))

    def _cut_log(self, partition: Partition, sequence: int, done: Waiter, error: BaseException | None) -> None:
        log = partition.log
        if error is None and not partition.is_deleted and isinstance(log, PartitionLog):
            if log.is_syncing:
                self._metadata.wait_here(lambda error: self._cut_log(partition, sequence, done, error))
                return
            try:
                log.cut_back_to(sequence)
            except (StorageError, ValueError) as failure:
                error = failure
        if not partition.is_deleted:
            if error is not None and isinstance(log, PartitionLog):
                partition.end_pending(StorageError(f"topic {partition.topic_name}: {error}"))
                log.abandon_cut()
            self._marks.limit(partition, None)
            partition.forget_written()
            partition.release()
            if not partition.is_held:
                self.publishes.take_up(partition)
        done(error)

    def note_synced(self) -> None:
        """Some logs have been synced that nobody waited for: it is written down with the next flush."""
        self._marks.note_synced()

    def mark_in_turn(self, channels: Iterable[Channel]) -> None:
        """As :attr:`mark`, in this order, whatever was marked before."""
        self.deliveries.mark_in_turn(channels)

    @property
    def has_marked(self) -> bool:
        """Whether :meth:`pump` has something to do."""
        return bool(self.deliveries.marked or self.deliveries.late)

    def pump(self, now_ns: int, wall_ns: int) -> list[Channel]:
        """Deliver from the marked channels; return them, so that their consumers' output can be written."""
        self._delayed_notes.wall_ns = wall_ns
        return self.deliveries.pump(now_ns, wall_ns)

    @property
    def next_deadline_ns(self) -> int | None:
        """Monotonic time at which :meth:`handle_deadlines` is to be called; None when never."""
        return self.deliveries.next_deadline_ns

    def handle_deadlines(self, now_ns: int, wall_ns: int) -> None:
        """Handle every timeout and due message up to now; the channels concerned are marked."""
        self.deliveries.handle_deadlines(now_ns, wall_ns)

    # -- progress on disk ------------------------------------------------------------------------------------------

    @property
    def is_flush_urgent(self) -> bool:
        """Whether a channel cannot go on before the next flush."""
        return self._channels.is_urgent

    @property
    def has_more_due(self) -> bool:
        """Whether the last flush found more messages that are due than it read."""
        return self._progress.has_more_due

    @property
    def has_metadata(self) -> bool:
        """Whether somebody waits for topics or channels to become durable."""
        return self._metadata.has_waiters

    @property
    def clock_shift_ns(self) -> int:
        """Time added to due times on their way to the disk: by how much the wall clock has been set since the start."""
        return self._progress.clock_shift_ns

    def clock_moved(self, shift_ns: int, due_clock_ns: int) -> None:
        """The wall clock was set: rewrite due times on disk, so that a restart keeps the delays that are left.

        To be told before anything is stored with a time of the clock that was set.

        Args:
            shift_ns: wall time minus the clock that :meth:`pump` and :meth:`handle_deadlines` are given.
            due_clock_ns: what that clock shows.
        """
        self._delayed_notes.shift_ns = shift_ns
        self._progress.clock_moved(shift_ns)
        self._settings.clock_moved(shift_ns, due_clock_ns)

    def has_flush(self, wall_ns: int) -> bool:
        """Whether :meth:`take_flush` would have something to do; cheap enough for every tick."""
        self._delayed_notes.wall_ns = wall_ns
        return self._progress.has_some(wall_ns)

    def take_flush(self, wall_ns: int) -> Flush:
        """Collect all progress since the last flush; the caller runs it and then calls :meth:`flush_ended`."""
        return self._progress.take(wall_ns)

    def run_flush(self, flush: Flush, wall_ns: int, sync: bool) -> list[packs.DuePacks]:
        """Write a flush and read what is due. The only method that blocks and is called off the loop."""
        return flush.run(self._store, self._files, wall_ns, sync)

    def flush_ended(
        self, flush: Flush, answers: list[packs.DuePacks], error: BaseException | None, wall_ns: int
    ) -> None:
        """Take note of a flush: on failure everything in it is tried again with the next one.

        Args:
            wall_ns: the clock of due times, for retention.
        """
        self._progress.ended(flush, answers, error, wall_ns)
        self.retaining.tell()

    def pack_damaged(self, channel: Channel, stored: packs.StoredPack) -> None:
        """Spilled messages cannot be read any more: what of them the log still has is taken from there."""
        self._losses.pack_damaged(channel, self._channels.partition(channel), stored)
        self.was_changed(channel)

    def floor_written(self, partition: Partition, wall_ns: int) -> None:
        """Drop segments that every channel has passed and that the topic's retention does not keep.

        Args:
            wall_ns: the clock of due times.
        """
        if partition.is_deleted:
            return
        self.retaining.apply(partition.topic_name, partition, wall_ns)
        self.publishes.note_snapshot(partition)

    def retain_all(self, wall_ns: int) -> None:
        """Apply retention to every partition; to be called now and then, because time passes without any progress.

        Args:
            wall_ns: the clock of due times.
        """
        for topic in self.topics.values():
            for partition in topic.partitions.values():
                self.floor_written(partition, wall_ns)
        for replica in self._followed():
            self.retaining.apply(replica.topic, replica, wall_ns, is_copied=True)
        self.retaining.tell()

    def _followed(self) -> Iterator[Replica]:
        """Yield the replicas that other nodes lead, as far as nothing is being done with them."""
        return (each for each in self.replicas.values() if each.partition is None and not each.work)

    def seal_consumed(self, wanted_bytes: int, wall_ns: int) -> list[PartitionLog]:
        """Seal active segments of which nothing is needed any more, for a disk that is full: the largest first.

        What channels, replay or retention keep of a sealed segment, they keep of these.

        Args:
            wanted_bytes: seal no more than it takes to free so many, and at most ``_SEALED_MAX`` segments.
            wall_ns: the clock of due times.

        Returns:
            logs to be synced; after that, :meth:`retain_all` drops what was sealed.
        """
        retaining = self.retaining
        found: list[tuple[int, Partition | Replica]] = [
            (retaining.sealable_bytes(partition, wall_ns), partition)
            for topic in self.topics.values()
            for partition in topic.partitions.values()
            if not partition.is_held and not partition.is_handed_over
        ]
        found += [(retaining.sealable_bytes(replica, wall_ns, True), replica) for replica in self._followed()]
        sealed: list[PartitionLog] = []
        for size, each in nlargest(_SEALED_MAX, found, key=itemgetter(0)):
            log = each.log
            if wanted_bytes <= 0 or not size or not isinstance(log, PartitionLog):
                break
            try:
                log.roll()
            except DiskFull:
                break
            except StorageError as error:
                self._tell_problem(error)
                continue
            # nothing goes yet; but where it says who published, that is written down with the sync
            if isinstance(each, Partition):
                self.floor_written(each, wall_ns)
            else:
                retaining.apply(each.topic, each, wall_ns, is_copied=True)
            sealed.append(log)
            wanted_bytes -= size
        retaining.tell()
        return sealed

    def memory_used(self) -> dict[str, int]:
        """Count the bytes of the memory budget that are used, by share."""
        budget, cache = self.budget, self._cache
        return {
            "output": budget.output_bytes,
            "ephemeral": budget.ephemeral_bytes,
            "publishing": self.publishes.left_bytes,
            "receiving": budget.receiving_bytes,
            "caches": cache.used_bytes + cache.tails_bytes,
            "deferred": self._channels.spilled_bytes,
        }

    def logs(self) -> list[PartitionLog]:
        """The log of every partition that has a disk."""
        logs = [
            partition.log
            for topic in self.topics.values()
            for partition in topic.partitions.values()
            if isinstance(partition.log, PartitionLog)
        ]
        return list(dict.fromkeys([*logs, *self.replicas.logs()])) if self.replicas else logs

    def unfinished_count(self) -> int:
        """Messages that have a disk and that some channel, or without channels nobody, has finished."""
        partitions = [partition for topic in self.topics.values() for partition in topic.partitions.values()]
        return sum(each.log.next_sequence - each.floor for each in partitions if isinstance(each.log, PartitionLog))

    def close(self) -> None:
        """Close every log and the store; what is to be kept has been flushed and synced by the caller. Blocks."""
        logs = self.logs()
        self._files.run_all([log.write_checkpoint for log in logs if log.has_checkpoint_due])
        for log in logs:
            log.close()
        self._channels.close()
        self._store.close()

    def describe(self) -> str:
        """A picture of the state for humans and failing tests."""
        return "\n".join(p.describe() for t in self.topics.values() for p in t.partitions.values())
