"""Topics and channels of one nsqd: created, deleted, and put into another state.

A new topic hands out nothing before it has the channels that nsqlookupds know of: publishing goes on meanwhile, and
what is published is stored, acknowledged and delivered to them, too.

Rules of this file: what is done to the broker here is also logged, ends what consumed it, and is durable once
:meth:`Topics.when_durable` says so. No topic is made of the last descriptors, so that topics can still be deleted.

Source: NSQ's HTTP API (``/topic``, ``/channel``), NSQ's nsqlookupd; Youzan's HTTP API.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import msgspec

from flintmq.broker.broker import TopicConflict
from flintmq.broker.partition import Ended
from flintmq.broker.subscription import Subscription
from flintmq.broker.topic import Topic
from flintmq.errors import RemoteProtocolError
from flintmq.names import is_ephemeral
from flintmq.net.isolation import for_each
from flintmq.nsqd import extended
from flintmq.nsqd.client import Client, Clients
from flintmq.nsqd.drain import Drain, Draining
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.file_room import FileRoom
from flintmq.nsqd.leadership import Leadership
from flintmq.nsqd.lookup import Lookup
from flintmq.nsqd.options import NsqdOptions
from flintmq.topic_meta import TopicMeta

log = logging.getLogger(__name__)


class Topics:
    """Creates, changes and deletes topics and channels.

    Args:
        lookup: knows which channels a topic has elsewhere.
        clients: who publishes, and may go on differently.

    Attributes:
        are_created: whether publishing and subscribing create topics (``--auto-create-topics``).
        leadership: asked which topics may be made here; None: all.
        room: for files of topics.
    """

    def __init__(self, engine: Engine, drain: Drain, lookup: Lookup, clients: Clients, options: NsqdOptions) -> None:
        self.are_created = options.auto_create_topics
        self._engine = engine
        self._broker = engine.broker
        self._drain = drain
        self._lookup = lookup
        self._clients = clients
        self._starting: dict[asyncio.Task[None], None] = {}
        self.leadership: Leadership | None = None
        self.room = FileRoom(engine.env.clock, lambda: engine.broker.new_log_count)

    # -- creating ----------------------------------------------------------------------------------------------------

    def create(self, name: str) -> Topic:
        """Find a topic or create it; who waits for it to be stored is told when it cannot be.

        Raises:
            Exiting: this nsqd is shutting down.
            OfTheCluster: the cluster has a topic of that name, and nothing of it is led here.
            TooFewDescriptors: it would take one of the last.
        """
        topic = self._broker.topics.get(name)
        if topic is not None:
            return topic
        self._check_new(name, 1)
        topic = self._broker.topic(name, self._engine.env.clock.wall_ns(), bool(self._lookup), later=True)
        return self._created(topic, True, "")

    def wish(self, name: str, is_extended: bool = False) -> Ended | None:
        """Have the cluster make a topic; what is returned ends when it is there. None: it is there, or is made here."""
        if self.leadership is None or self._drain.is_exiting:
            return None
        return self.leadership.wish(name, is_extended)

    def wanted(self, command: str, name: str, is_extended: bool = False) -> Topic:
        """Find the topic that a client publishes or subscribes to; create it unless topics are not made so.

        Raises:
            Exiting, TooFewDescriptors: as for :meth:`create`.
            RemoteProtocolError: it is not there.
        """
        if not self.are_created and name not in self._broker.topics:
            what = f"{command} topic {name} is not on this nsqd, which creates none by itself: use /topic/create"
            raise RemoteProtocolError("E_TOPIC_NOT_EXIST", what, fatal=True)
        return self.create_extended(name) if is_extended else self.create(name)

    def create_extended(self, name: str) -> Topic:
        """Find a plain topic whose messages may carry headers, or create it.

        Raises:
            Exiting: this nsqd is shutting down.
            TopicConflict: there is a topic of that name that was created otherwise.
            OfTheCluster, TooFewDescriptors: as for :meth:`create`.
        """
        is_new = name not in self._broker.topics
        if is_new:
            self._check_new(name, 1)
        else:
            self._drain.check_exiting()
        topic = self._broker.extended_topic(name, self._engine.env.clock.wall_ns(), bool(self._lookup))
        if topic.meta.is_partitioned or not topic.meta.extend_support:
            what = "with partitions" if topic.meta.is_partitioned else "without headers"
            raise TopicConflict(f"topic {name} is there already, {what}: delete it first, or take another name")
        return self._created(topic, is_new, ", messages may have headers")

    def create_partitions(self, name: str, meta: TopicMeta, numbers: Iterable[int]) -> Topic:
        """Create those partitions of a topic that are not here, and the topic with them.

        Raises:
            Exiting, Draining: this nsqd is shutting down, or about to.
            TopicConflict: there is a topic of that name that was created otherwise.
            StorageError: a partition cannot be added.
            OfTheCluster: the cluster has a topic of that name.
            TooFewDescriptors: they would take some of the last.
        """
        numbers = list(numbers)
        here = self._broker.topics.get(name)
        self._check_new(name, len(numbers if here is None else set(numbers) - here.partitions.keys()))
        if self._drain.is_on:
            raise Draining
        is_new = here is None
        wall_ns = self._engine.env.clock.wall_ns()
        topic = self._broker.create_partitions(name, meta, numbers, wall_ns, bool(self._lookup))
        held = ",".join(map(str, topic.partitions))
        return self._created(topic, is_new, f", partitions {held} of {meta.partition_num}")

    def create_partition(self, name: str, number: int, is_extended: bool) -> Topic:
        """Create one partition, if it is not here, and a topic with as many partitions as that takes.

        Args:
            is_extended: messages of a topic that is not here yet may have headers.

        Raises:
            As :meth:`create_partitions`.
        """
        topic = self._broker.topics.get(name)
        if topic is not None and number in topic.partitions:
            return topic
        if is_ephemeral(name):
            raise TopicConflict(f"topic {name} is ephemeral and cannot have partitions: take another name")
        if topic is None:
            meta = TopicMeta(partition_num=number + 1, extend_support=is_extended)
            return self.create_partitions(name, meta, [number])
        if not topic.meta.is_partitioned:
            raise TopicConflict(f"topic {name} is there already, without partitions: delete it first")
        self.create_partitions(name, topic.meta, [number])
        if number >= topic.meta.partition_num:
            version = topic.meta.version + 1
            self.change_meta(topic, msgspec.structs.replace(topic.meta, partition_num=number + 1, version=version))
        return topic

    def _check_new(self, name: str, log_count: int) -> None:
        self._drain.check_exiting()
        if self.leadership is not None:
            self.leadership.check_create(name)
        if log_count and not is_ephemeral(name):
            self.room.take("topic", name, log_count)

    def _created(self, topic: Topic, is_new: bool, about: str) -> Topic:
        self._engine.schedule()
        if is_new:
            log.info("TOPIC(%s): created%s", topic.name, about)
            if topic.is_starting:
                self._start(topic)
        return topic

    # -- starting ----------------------------------------------------------------------------------------------------

    def start_all(self) -> None:
        """Start the topics that an earlier process had not started yet."""
        for topic in list(self._broker.topics.values()):
            if topic.is_starting:
                self._start(topic)

    def stop_starting(self) -> None:
        """Ask no more for channels; the next process asks again."""
        for task in list(self._starting):
            task.cancel()

    def _start(self, topic: Topic) -> None:
        """Let a topic hand out messages once it has the channels that nsqlookupds know of."""
        task = self._engine.loop.create_task(self._create_channels(topic))
        self._starting[task] = None
        task.add_done_callback(lambda done: self._channels_created(topic, done))

    def _channels_created(self, topic: Topic, task: asyncio.Task[None]) -> None:
        self._starting.pop(task, None)
        if task.cancelled():
            return  # this nsqd stops; the next one asks again
        if task.exception() is not None:
            log.error("creating channels of topic %s ended unexpectedly", topic.name, exc_info=task.exception())
        if self._broker.topics.get(topic.name) is topic:
            self._broker.start_topic(topic)
            self._engine.schedule()

    async def _create_channels(self, topic: Topic) -> None:
        names = await self._lookup.channels_of(topic.name) if self._lookup else []
        if self._broker.topics.get(topic.name) is not topic:
            return
        for name in names:
            if name not in topic.channel_names:
                log.info("TOPIC(%s): new channel(%s), which nsqlookupd knows", topic.name, name)
                self._broker.channel(topic, name)

    # -- changing ----------------------------------------------------------------------------------------------------

    def change_meta(self, topic: Topic, meta: TopicMeta) -> bool:
        """Put another state of a topic into force; see :meth:`Broker.change_meta`.

        Who consumes a topic with partitions that gets headers is sent away, because it does not know them; of a plain
        topic it goes on, and gets the bodies alone.
        """
        had_headers = topic.meta.extend_support
        if not self._broker.change_meta(topic, meta):
            return False
        self._engine.schedule()
        if meta.extend_support and not had_headers:
            self._clients.look_up_again()  # publishes wait now, and what waits is counted
            leaving: dict[Client, None] = {}
            for partition in topic.partitions.values():
                for channel in partition.channels.values():
                    for subscription in channel.subscriptions:
                        extended.go_on(subscription, partition)
                        if meta.is_partitioned and isinstance(subscription.owner, Client):
                            leaving[subscription.owner] = None
            what = f"topic {topic.name}: messages have headers from now on, identify with extend_support"
            for_each(leaving, lambda client: client.dismiss("E_SUB_EXTEND_NEED", what), "closing")
        return True

    def relax_order(self, topic: Topic, channel: str) -> None:
        """Let a channel be consumed without order again when nobody is left who asked for it."""
        if self._broker.relax_order(topic, channel):
            what = "nobody is left who asked for it"
            log.info("TOPIC(%s): channel %s is no longer in order: %s", topic.name, channel, what)

    # -- deleting ----------------------------------------------------------------------------------------------------

    def delete(self, name: str) -> None:
        """Delete a topic with its channels and close their consumers.

        Raises:
            OfTheCluster: it is not this node's alone.
        """
        if self.leadership is not None:
            self.leadership.check_delete(name)
        self._close_consumers(self._broker.delete_topic(name))
        log.info("TOPIC(%s): deleted", name)

    def delete_channel(self, topic: Topic, name: str, partition: int | None = None) -> None:
        """Delete a channel and close its consumers; an ephemeral topic goes with its last channel.

        Args:
            partition: in which it is deleted; everywhere when not given.

        Raises:
            ChannelNotFound, PartitionNotFound: as :meth:`Broker.delete_channel`.
        """
        self._close_consumers(self._broker.delete_channel(topic, name, partition))
        where = "" if partition is None else f" in partition {partition}"
        log.info("TOPIC(%s): deleted channel %s%s", topic.name, name, where)
        if topic.ephemeral and not topic.channel_names:
            self.delete(topic.name)

    def _close_consumers(self, subscriptions: list[Subscription]) -> None:
        self._engine.schedule()
        owners = [each.owner for each in subscriptions if isinstance(each.owner, Client)]
        for_each(owners, lambda client: client.abort(), "closing")

    # -- durability --------------------------------------------------------------------------------------------------

    def when_durable(self, topic: Topic | None = None) -> Ended:
        """Return what ends when all changes of topics and channels so far are durable; it may have ended.

        Args:
            topic: which may be new, and has to have its files.
        """
        ended = Ended()
        if not self._broker.when_metadata_durable(ended.end, topic):
            ended.end(None)
        return ended
