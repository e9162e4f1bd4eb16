"""Settings of topics and channels: where they are kept, and what of the broker has limits because of them.

Rules of this file: part of the broker, which has the rest; a topic or channel without limits costs nothing: it has
neither a policy nor bounds.

Source: reference/nsq.md 7 (bounds, time to live, dead letters).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import msgspec

from flintmq.broker.bounds import TopicBounds
from flintmq.broker.channel import Channel
from flintmq.broker.creating import TopicCreation
from flintmq.broker.dead_letters import DeadLetters
from flintmq.broker.partition import Bounds, Partition, PublishGroup
from flintmq.broker.policy import ChannelPolicy
from flintmq.broker.topic import Topic
from flintmq.broker.work import BrokerOptions
from flintmq.errors import StorageError
from flintmq.names import is_ephemeral
from flintmq.settings import NO_LIMITS, NOTHING, Limits, Settings, check_dead_letter_topic, resolve
from flintmq.storage import channel_store


class TopicLimits(TopicCreation):
    """What the broker does about settings.

    Attributes:
        on_settings_change: told of every topic, and channel or None, whose settings have been changed.
        on_dead_letter_topic: finds a dead-letter topic or creates it.
    """

    options: BrokerOptions

    @abstractmethod
    def mark(self, channel: Channel) -> None:
        """Look at this channel at the end of the turn."""

    @abstractmethod
    def has(self, channel: Channel) -> bool:
        """Whether a channel has not been deleted."""

    @abstractmethod
    def publish_to(
        self, partition: Partition, bodies: list[bytes], due_ns: int = 0, is_stored_form: bool = False
    ) -> PublishGroup:
        """Publish messages to one partition."""

    @abstractmethod
    def parts(self, topic: Topic, name: str, partition: int | None = None) -> list[Channel]:
        """A channel in one partition, or in all."""

    def _init_limits(self) -> None:
        self.on_settings_change: list[Callable[[str, str | None], None]] = []
        self.on_dead_letter_topic: Callable[[str, int], Topic] = self.extended_topic
        self._settings: dict[tuple[str, str], Settings] = {}
        self._limited: dict[Channel, None] = {}
        self._ageing: dict[Partition, None] = {}
        self._moved: dict[Partition, None] = {}  # their backlog begins elsewhere, which the database has to be told
        self._dead_letters = DeadLetters(
            self._topic_of_dead_letters,
            lambda partition, bodies: self.publish_to(partition, bodies, is_stored_form=True),
            self._mark_living,
            self._report_problem,
        )

    # -- settings --------------------------------------------------------------------------------------------------

    def own_settings(self, topic: str, channel: str | None = None) -> Settings:
        """What was set for a topic or one of its channels itself."""
        return self._settings.get((topic, channel or ""), NOTHING)

    def settings_of(self, topic: str, channel: str | None = None) -> Limits:
        """What is in force for a topic or one of its channels, or would be if it were there."""
        layers = self._layers(topic, channel or "")
        return resolve(topic, *layers)

    def _layers(self, topic: str, channel: str) -> tuple[Settings, ...]:
        found = (self._settings.get((topic, channel)) if channel else None, self._settings.get((topic, "")))
        return (*(each for each in found if each is not None), self.options.settings)

    def change_settings(self, topic: Topic, channel: str | None, settings: Settings) -> None:
        """Replace what was set for a topic or one of its channels; durable with :meth:`when_metadata_durable`.

        Raises:
            ChannelNotFound: the topic has no such channel.
            BadSetting: under these settings dead letters would have nowhere to go.
        """
        if channel:
            self.parts(topic, channel)
        key = (topic.name, channel or "")
        above = [self.own_settings(topic.name)] if channel else []
        check_dead_letter_topic(topic.name, settings, *above, self.options.settings)
        self._keep_settings(topic, key, settings)
        self._apply_settings(topic)
        for listener in self.on_settings_change:
            listener(topic.name, channel or None)

    def _keep_settings(self, topic: Topic, key: tuple[str, str], settings: Settings) -> None:
        if settings == NOTHING:
            self._settings.pop(key, None)
        else:
            self._settings[key] = settings
        if not topic.ephemeral and not is_ephemeral(key[1]):
            self._metadata += channel_store.put_settings(*key, None if settings == NOTHING else settings)

    def _remember_order(self, topic: Topic, channel: str, is_ordered: bool, is_must: bool) -> None:
        own = self.own_settings(topic.name, channel)
        mine = msgspec.structs.replace(own, is_ordered=is_ordered or None, is_order_must=is_must or None)
        if mine != own:
            self._keep_settings(topic, (topic.name, channel), mine)

    def _forget_settings(self, topic: Topic, channel: str = "") -> None:
        """A topic or channel is deleted."""
        if self._settings.pop((topic.name, channel), None) is not None:
            self._metadata += channel_store.put_settings(topic.name, channel, None)

    # -- what has limits -------------------------------------------------------------------------------------------

    def _limit_topic(self, topic: Topic) -> None:
        """Put the settings of a topic and of its channels into force where there are any."""
        if self._settings or self.options.settings != NOTHING:
            self._apply_settings(topic)

    def _apply_settings(self, topic: Topic) -> None:
        if not topic.partitions:
            return
        limits = self.settings_of(topic.name)
        for partition in topic.partitions.values():
            for channel in partition.channels.values():
                self._limit_channel(topic, partition, channel)
        self._bound_topic(topic, limits)

    def _bound_topic(self, topic: Topic, limits: Limits) -> None:
        policies = {name: topic.channels(name)[0].policy for name in topic.channel_names}
        channels = {name: NO_LIMITS if each is None else each.limits for name, each in policies.items()}
        bounds = topic.first_partition.bounds
        is_limited = limits.is_bounded or limits.ttl_ms or any(each.is_bounded for each in channels.values())
        if bounds is None and is_limited:
            bounds = TopicBounds(topic, self._backlog_moved)
        if bounds is not None:
            bounds.change(limits, channels)
        for partition in topic.partitions.values():
            partition.bounds = bounds
            if limits.ttl_ms:
                self._ageing[partition] = None
            else:
                self._ageing.pop(partition, None)

    def _limit_channel(self, topic: Topic, partition: Partition, channel: Channel) -> None:
        limits = self.settings_of(topic.name, channel.name)
        if channel.policy is not None:
            channel.policy.change(limits)
        elif limits.is_limiting:
            channel.policy = ChannelPolicy(channel, partition, self._dead_letters, limits)
        if limits.ttl_ms or limits.max_attempts:
            self._limited[channel] = None
        else:
            self._limited.pop(channel, None)
        if limits.is_limiting:
            self.mark(channel)

    def _mark_living(self, channel: Channel) -> None:
        if self.has(channel):
            self.mark(channel)

    def _report_problem(self, error: StorageError) -> None:
        self.on_problem(error)

    def _topic_of_dead_letters(self, name: str, wall_ns: int) -> Topic:
        topic = self.topics.get(name) or self.on_dead_letter_topic(name, wall_ns)
        own = self.own_settings(name)
        if not own.dead_letters:
            mine = msgspec.structs.replace(own, dead_letters=True, max_attempts=None)
            self.change_settings(topic, None, mine)
        return topic

    # -- time and space --------------------------------------------------------------------------------------------

    def _bound_backlog(self, partition: Partition, bounds: Bounds) -> None:
        """Something published has been stored: drop what is too much that no channel has been given."""
        try:
            for channel in bounds.committed(partition):
                self.mark(channel)
        except StorageError as error:
            self.on_problem(error)

    def sweep(self, wall_ns: int) -> bool:
        """Pass over what is too old although nobody consumes it; whether a turn has to follow.

        Args:
            wall_ns: the clock of due times.
        """
        has_changed = False
        for channel in list(self._limited):
            if not self.has(channel) or channel.policy is None:
                del self._limited[channel]
            elif channel.policy.sweep(wall_ns):
                self.mark(channel)
                has_changed = True
        for partition in list(self._ageing):
            if partition.is_deleted or partition.bounds is None:
                del self._ageing[partition]
            elif not partition.channels:
                self._expire_backlog(partition, partition.bounds, wall_ns)
        moved, self._moved = self._moved, {}
        for partition in moved:
            if not partition.is_deleted and not is_ephemeral(partition.topic_name):
                self._put_partition(partition)
                self._metadata_waiters.append(partial(_backlog_kept, partition, partition.backlog_start))
                has_changed = True
        return has_changed

    def _expire_backlog(self, partition: Partition, bounds: Bounds, wall_ns: int) -> None:
        try:
            bounds.expire(partition, wall_ns, self._dead_letters.clock_shift_ns)
        except StorageError as error:
            self.on_problem(error)

    def _backlog_moved(self, partition: Partition) -> None:
        self._moved[partition] = None


def _backlog_kept(partition: Partition, start: int, error: BaseException | None) -> None:
    """The database knows where the backlog of a topic without channels begins: what is older may go."""
    if error is None and not partition.channels:
        partition.durable_floor = max(partition.durable_floor, start)
