"""Creating topics: files are made by who asks for them, and a topic with partitions is known to the database before.

Rules of this file: part of the broker, which has the rest; nothing here blocks, but for adding a partition to a topic
that is there.

Source: design/reliability.md R1, docs/decisions/0009.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from flintmq.broker.channel import Channel
from flintmq.broker.delayed import DelayedNotes
from flintmq.broker.partition import Partition
from flintmq.broker.subscription import Subscription
from flintmq.broker.tagged import TaggedChannel
from flintmq.broker.topic import Topic
from flintmq.broker.work import NewTopic
from flintmq.errors import FlintError, StorageError
from flintmq.names import is_ephemeral
from flintmq.storage import Creation, PartitionLog, channel_store
from flintmq.topic_meta import EXTENDED_PLAIN, PLAIN, TopicMeta

_CREATIONS_MAX = 16  # topics whose files are made at once


class TopicConflict(FlintError):
    """There is a topic of that name that was created otherwise."""


class TopicCreation(ABC):
    """What the broker does to have new topics."""

    topics: dict[str, Topic]
    write_error: StorageError | None
    on_problem: Callable[[StorageError], None]
    on_topic_change: Callable[[str, str | None, bool], None]
    _creations: dict[Topic, NewTopic]
    _deleted_early: list[NewTopic]
    _delayed_notes: DelayedNotes
    _publishing: dict[Partition, None]
    _metadata: list[channel_store.Statement]
    _metadata_waiters: list[Callable[[BaseException | None], None]]
    _is_meta_new: bool

    @abstractmethod
    def topic(self, name: str, wall_ns: int, starting: bool = False, later: bool = False) -> Topic: ...

    @abstractmethod
    def _new_log(self, topic: str, number: int, wall_ns: int) -> PartitionLog: ...

    @abstractmethod
    def _open_log(self, topic: str, number: int, wall_ns: int, next_sequence_min: int) -> PartitionLog: ...

    @abstractmethod
    def _add_channel(
        self,
        topic: Topic,
        partition: Partition,
        name: str,
        cursor: channel_store.StoredCursor | None,
        paused: bool,
        new: bool = False,
    ) -> Channel: ...

    @abstractmethod
    def _put_partition(self, partition: Partition) -> None: ...

    @abstractmethod
    def _put_channel(self, channel: Channel) -> None: ...

    @abstractmethod
    def _limit_topic(self, topic: Topic) -> None: ...

    @abstractmethod
    def _forget_settings(self, topic: Topic, channel: str = "") -> None: ...

    @abstractmethod
    def _remove_files(self, name: str) -> None: ...

    @abstractmethod
    def when_metadata_durable(
        self, callback: Callable[[BaseException | None], None], topic: Topic | None = None
    ) -> bool:
        """Call back when all channels and changes made so far survive; False when nothing is waiting to be written."""

    @abstractmethod
    def delete_channel(self, topic: Topic, name: str, partition: int | None = None) -> list[Subscription]:
        """Remove a channel and all it held."""

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
        if topic is not None:
            if not topic.meta.is_like(meta):
                what = "with other properties" if topic.meta.is_partitioned else "without partitions"
                raise TopicConflict(f"topic {name} is there already, {what}: delete it first, or take another name")
            missing = [number for number in numbers if number not in topic.partitions]
            if missing and topic in self._creations:
                raise TopicConflict(f"topic {name} is being created with other partitions: ask again")
            for number in missing:
                self._add_partition(topic, number, wall_ns)
            return topic
        partitions = {}
        for number in sorted(numbers):
            log = self._new_log(name, number, wall_ns)
            partitions[number] = Partition(name, number, log, self._delayed_notes)
        topic = self.topics[name] = Topic(name, partitions, meta=meta)
        new = NewTopic(topic, [Creation(p.log) for p in partitions.values()], is_recorded=False)  # type: ignore[arg-type]
        self._creations[topic] = new
        self._metadata.append(channel_store.put_topic(name, False))
        self._metadata.append(channel_store.put_topic_meta(name, meta, partitions))
        self._is_meta_new = True
        self._metadata_waiters.append(lambda error: self._recorded(new, error))
        if starting:
            self._hold_back(topic)
        self._limit_topic(topic)
        self.on_topic_change(name, None, True)
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

    def change_meta(self, topic: Topic, meta: TopicMeta) -> bool:
        """Put another state of a topic into force, unless it has that or a higher one; whether anything changed.

        It is durable once :meth:`when_metadata_durable` calls back for the topic.

        Raises:
            TopicConflict: it says what cannot be changed.
        """
        if meta.rank <= topic.meta.rank:
            return False
        is_upgrade = meta.extend_support and not topic.meta.extend_support
        if topic.meta.extend_support and not meta.extend_support:
            raise TopicConflict(f"topic {topic.name} has headers, and keeps them for its life")
        topic.meta = meta
        for partition in topic.partitions.values():
            if is_upgrade:
                self._add_headers(partition, meta)
            else:
                partition.meta = meta
        if not topic.ephemeral:
            self._put_meta(topic)
            if is_upgrade:
                self._hold(topic)
        self.on_topic_change(topic.name, None, True)
        return True

    def _add_headers(self, partition: Partition, meta: TopicMeta) -> None:
        partition.add_headers(meta)
        for channel in partition.channels.values():
            TaggedChannel.take_over(channel, partition.headers_from)

    def _put_meta(self, topic: Topic) -> None:
        headers_from = {n: each.headers_from for n, each in topic.partitions.items() if each.headers_from}
        self._metadata.append(channel_store.put_topic_meta(topic.name, topic.meta, topic.partitions, headers_from))
        self._is_meta_new = True

    def _hold(self, topic: Topic) -> None:
        """Write nothing to a topic before the database knows that it has headers, and from which message on.

        Else a restart would not know how messages are laid out. While the database cannot take it, publishes fail.
        """
        for partition in topic.partitions.values():
            partition.hold()
        self._metadata_waiters.append(lambda error: self._headers_recorded(topic, error))

    def _headers_recorded(self, topic: Topic, error: BaseException | None) -> None:
        if self.topics.get(topic.name) is not topic:
            return  # deleted meanwhile
        if error is None:
            self._release(topic)
            return
        failure = StorageError(f"cannot give topic {topic.name} headers: {error}")
        for partition in topic.partitions.values():
            partition.end_pending(failure)
        self._metadata_waiters.append(lambda error: self._headers_recorded(topic, error))

    def _release(self, topic: Topic) -> None:
        if self.topics.get(topic.name) is not topic:
            return  # deleted meanwhile
        for partition in topic.partitions.values():
            partition.release()
            if not partition.is_held and partition.has_pending:
                self._publishing[partition] = None

    def hold_until_durable(self, topic: Topic, done: Callable[[BaseException | None], None]) -> bool:
        """Store nothing in a topic before all changes so far survive, so that they can be relied on from now on.

        Whatever is acknowledged later is then behind them, also after a crash. What is published meanwhile waits.

        Args:
            done: called once when they survive, or with why they do not, before anything that waits is stored.

        Returns:
            False when something of the topic is under way: it may be acknowledged before them, and nothing is held.
        """
        if any(partition.is_under_way for partition in topic.partitions.values()):
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

    def _recorded(self, new: NewTopic, error: BaseException | None) -> None:
        """The database has a new topic's meta, or could not take it."""
        if self._creations.get(new.topic) is not new:
            return  # deleted meanwhile
        if error is None:
            new.is_recorded = True
        else:
            del self._creations[new.topic]
            self._refuse_topic(new, StorageError(f"cannot create topic {new.topic.name}: {error}"))

    def _add_partition(self, topic: Topic, number: int, wall_ns: int) -> None:
        """Give a topic that is there one more partition; rare, so its files are made at once."""
        try:
            log = self._open_log(topic.name, number, wall_ns, 1)
        except OSError as error:
            raise StorageError(f"cannot add partition {number} of topic {topic.name}: {error}") from error
        partition = Partition(topic.name, number, log, self._delayed_notes)
        partition.paused_at = log.next_sequence if topic.paused or topic.is_starting else None
        partition.hold_like(topic.first_partition)
        topic.add(partition)
        for channel_name, paused in topic.channel_names.items():
            self._put_channel(self._add_channel(topic, partition, channel_name, None, paused))
        self._put_meta(topic)
        self._limit_topic(topic)
        self._put_partition(partition)
        self.on_topic_change(topic.name, None, True)

    @property
    def has_creations(self) -> bool:
        """Whether files of topics are to be made, or are being made."""
        return bool(self._creations) and any(new.is_recorded for new in self._creations.values())

    def take_creations(self) -> list[NewTopic]:
        """Topics whose files are to be made now; the caller does it with :func:`flintmq.storage.create_logs`."""
        taken = list(islice((new for new in self._creations.values() if new.is_recorded), _CREATIONS_MAX))
        for new in taken:
            # one after the other, so that no directory is made that an earlier topic of that name has not left yet
            assert not new.is_under_way, "the last ones have ended"
            new.is_under_way = True
        return taken

    def creations_ended(self, created: Sequence[NewTopic]) -> None:
        """Take note of files that were made, or could not be."""
        for new in created:
            topic = new.topic
            del self._creations[topic]
            error = new.error
            if self.topics.get(topic.name) is not topic:
                self._created_too_late(new)
            elif error is not None:
                self.write_error = StorageError(f"cannot create topic {topic.name}: {error}")
                self._refuse_topic(new, self.write_error)
                if topic.meta.is_partitioned:
                    self._discard(new)
            else:
                new.finish()
                self._metadata.append(channel_store.put_topic(topic.name, topic.paused))
                for partition in topic.partitions.values():
                    if partition.paused_at is not None:
                        self._put_partition(partition)
                    if partition.has_pending:
                        self._publishing[partition] = None
                self._metadata_waiters += new.waiters

    def _created_too_late(self, new: NewTopic) -> None:
        """It was deleted meanwhile."""
        self._deleted_early.remove(new)
        if new.error is None:
            self._discard(new)
        self._metadata_waiters += new.waiters

    def _discard(self, new: NewTopic) -> None:
        """Remove the files that were made of a topic that is not to be."""
        new.finish()
        for creation in new.creations:
            creation.log.close()
        try:
            self._remove_files(new.topic.name)
        except StorageError as error:
            self.on_problem(error)

    def _refuse_topic(self, new: NewTopic, error: StorageError) -> None:
        """Undo a topic that could not be created; the next who asks for it tries again."""
        topic = new.topic
        has_rows = topic.channel_names or topic.paused or topic.meta != PLAIN  # in the database
        for channel_name in list(topic.channel_names):
            self.delete_channel(topic, channel_name)
        if has_rows:
            self._metadata += channel_store.delete_topic(topic.name)
        for partition in topic.partitions.values():
            self._publishing.pop(partition, None)
            partition.refuse(error)
        del self.topics[topic.name]
        self._forget_settings(topic)
        self.on_topic_change(topic.name, None, False)
        for waiter in new.waiters:
            waiter(error)

    def _hold_back(self, topic: Topic) -> None:
        topic.is_starting = True
        for partition in topic.partitions.values():
            partition.paused_at = partition.backlog_start
            if not topic.ephemeral and topic not in self._creations:
                self._put_partition(partition)  # a topic that died before its start has it after a restart
