"""Settings of topics and channels: where they are kept, and what has limits because of them.

Rules of this file: a topic or channel without limits costs nothing: it has neither a limiter nor bounds.

Source: NSQ's issues (bounds, time to live, dead letters).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec

from flintmq.broker.bounds import TopicBounds
from flintmq.broker.channel import Channel
from flintmq.broker.channels import Channels
from flintmq.broker.clock_steps import ClockSteps
from flintmq.broker.dead_letters import DeadLetters, FindElsewhere
from flintmq.broker.deliveries import Deliveries
from flintmq.broker.known_topic import completed
from flintmq.broker.limiter import ChannelLimiter
from flintmq.broker.metadata import Metadata
from flintmq.broker.partition import Bounds, Partition, PublishGroup
from flintmq.broker.topic import Topic
from flintmq.errors import StorageError
from flintmq.names import is_ephemeral
from flintmq.settings import NO_LIMITS, NOTHING, Limits, Settings, check_dead_letter_topic, resolve
from flintmq.storage.records import PutSettings


class Publish(Protocol):
    """As :meth:`flintmq.broker.publishes.Publishes.publish_to`."""

    def __call__(
        self, partition: Partition, bodies: Sequence[bytes], due_ns: int = 0, is_stored_form: bool = False
    ) -> PublishGroup: ...


class TopicSettings:
    """Owner of the settings of topics and channels.

    Args:
        topics: all there are, by name.
        default: what they inherit.
        metadata: where settings are written down.
        publish: takes dead letters.
        new_dead_letter_topic: creates a topic for them.
        report: told what could not be done.

    Attributes:
        on_change: told of every topic, and channel or None, whose settings have been changed.
    """

    def __init__(
        self,
        topics: Mapping[str, Topic],
        default: Settings,
        metadata: Metadata,
        channels: Channels,
        deliveries: Deliveries,
        publish: Publish,
        new_dead_letter_topic: Callable[[str, int], Topic],
        report: Callable[[StorageError], None],
    ) -> None:
        self._topics = topics
        self._default = default
        self._metadata = metadata
        self._channels = channels
        self._deliveries = deliveries
        self._new_dead_letter_topic = new_dead_letter_topic
        self._report = report
        self.on_change: list[Callable[[str, str | None], None]] = []
        self._settings: dict[tuple[str, str], Settings] = {}
        self._limited: dict[Channel, None] = {}
        self._ageing: dict[Partition, None] = {}
        self._moved: dict[Partition, None] = {}  # their backlog begins elsewhere, which the database has to be told
        self._dead_letters = DeadLetters(
            self._topic_of_dead_letters, partial(publish, is_stored_form=True), self._mark_living, report
        )

    def restore(self, settings: dict[tuple[str, str], Settings]) -> None:
        """Go on with what the database has: by topic and channel, which is empty for the topic's own."""
        self._settings = settings

    @property
    def clock_steps(self) -> ClockSteps:
        """The steps of the wall clock."""
        return self._dead_letters.clock_steps

    def clock_moved(self, shift_ns: int, due_clock_ns: int) -> None:
        """The wall clock was set, as :meth:`flintmq.broker.clock_steps.ClockSteps.moved` says it."""
        self._dead_letters.clock_steps.moved(shift_ns, due_clock_ns)

    # -- settings --------------------------------------------------------------------------------------------------

    def own(self, topic: str, channel: str | None = None) -> Settings:
        """Return what was set for a topic or one of its channels itself."""
        return self._settings.get((topic, channel or ""), NOTHING)

    def own_all(self, topic: str) -> dict[str, Settings]:
        """Return what was set for a topic itself, under an empty name, and for its channels."""
        return {channel: settings for (name, channel), settings in self._settings.items() if name == topic}

    def of(self, topic: str, channel: str | None = None) -> Limits:
        """Return what is in force for a topic or one of its channels, or would be if it were there."""
        layers = self._layers(topic, channel or "")
        return resolve(topic, *layers)

    def _layers(self, topic: str, channel: str) -> tuple[Settings, ...]:
        found = (self._settings.get((topic, channel)) if channel else None, self._settings.get((topic, "")))
        return (*(each for each in found if each is not None), self._default)

    def change(self, topic: Topic, channel: str | None, settings: Settings) -> None:
        """Replace what was set for a topic or one of its channels.

        Raises:
            BadSetting: under these settings dead letters would have nowhere to go.
        """
        key = (topic.name, channel or "")
        above = [self.own(topic.name)] if channel else []
        check_dead_letter_topic(topic.name, settings, *above, self._default)
        self._keep(topic, key, settings)
        self._apply(topic)
        for listener in self.on_change:
            listener(topic.name, channel or None)

    def _keep(self, topic: Topic, key: tuple[str, str], settings: Settings) -> None:
        if settings == NOTHING:
            self._settings.pop(key, None)
        else:
            self._settings[key] = settings
        if not topic.ephemeral and not is_ephemeral(key[1]):
            self._metadata.put(PutSettings.of(*key, settings))

    def is_ordered(self, topic: Topic, channel: str) -> bool:
        """Whether a channel is consumed in order, or would be if it were there."""
        return topic.meta.ordered or bool(self.own(topic.name, channel).is_ordered)

    def is_order_must(self, topic: Topic, channel: str) -> bool:
        """Whether a channel, which need not exist, may only be consumed in order."""
        return topic.meta.ordered or bool(self.own(topic.name, channel).is_order_must)

    def remember_order(self, topic: Topic, channel: str, is_ordered: bool, is_must: bool) -> None:
        """Keep that a channel is consumed in order, and whether it may not be in any other way."""
        own = self.own(topic.name, channel)
        mine = msgspec.structs.replace(own, is_ordered=is_ordered or None, is_order_must=is_must or None)
        if mine != own:
            self._keep(topic, (topic.name, channel), mine)

    def forget(self, topic: Topic, channel: str = "") -> None:
        """Drop what was set for a topic, or for one of its channels, that is deleted."""
        if self._settings.pop((topic.name, channel), None) is not None:
            self._metadata.put(PutSettings(topic.name, channel, None))

    def adopt(self, topic: str, settings: Mapping[str, Settings]) -> None:
        """Take over what another node had set for a topic, under an empty name, and for its channels.

        What is set for them here stays.
        """
        for channel, theirs in settings.items():
            self._settings[topic, channel] = completed(self.own(topic, channel), theirs)

    def release(self, topic: str) -> None:
        """Forget what is set for a topic that is not here any more, and not what is stored of it."""
        for key in [key for key in self._settings if key[0] == topic]:
            del self._settings[key]

    # -- what has limits -------------------------------------------------------------------------------------------

    def apply(self, topic: Topic) -> None:
        """Put the settings of a topic and of its channels into force where there are any."""
        if self._settings or self._default != NOTHING:
            self._apply(topic)

    def _apply(self, topic: Topic) -> None:
        if not topic.partitions:
            return
        limits = self.of(topic.name)
        for partition in topic.partitions.values():
            for channel in partition.channels.values():
                self._limit_channel(topic, partition, channel)
        self._bound_topic(topic, limits)

    def _bound_topic(self, topic: Topic, limits: Limits) -> None:
        limiters = {name: topic.channels(name)[0].limiter for name in topic.channel_names}
        channels = {name: NO_LIMITS if each is None else each.limits for name, each in limiters.items()}
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
        limits = self.of(topic.name, channel.name)
        if channel.limiter is not None:
            channel.limiter.change(limits)
        elif limits.is_limiting:
            channel.limiter = ChannelLimiter(channel, partition, self._dead_letters, limits)
        if limits.ttl_ms or limits.max_attempts:
            self._limited[channel] = None
        else:
            self._limited.pop(channel, None)
        if limits.is_limiting:
            self._deliveries.mark(channel)

    def _mark_living(self, channel: Channel) -> None:
        if channel in self._channels:
            self._deliveries.mark(channel)

    def _topic_of_dead_letters(self, name: str, wall_ns: int) -> Topic:
        topic = self._topics.get(name) or self._new_dead_letter_topic(name, wall_ns)
        self.take_dead_letters(topic)
        return topic

    def find_dead_letters(self, elsewhere: FindElsewhere) -> None:
        """Look for topics of dead letters elsewhere first."""
        self._dead_letters.elsewhere = elsewhere

    def take_dead_letters(self, topic: Topic) -> bool:
        """Remember that a topic has dead letters: none of its own are given up. Return whether that is new."""
        own = self.own(topic.name)
        if not own.dead_letters:
            mine = msgspec.structs.replace(own, dead_letters=True, max_attempts=None)
            self.change(topic, None, mine)
            return True
        return False

    # -- time and space --------------------------------------------------------------------------------------------

    def sweep(self, wall_ns: int) -> bool:
        """Pass over what is too old although nobody consumes it; whether a turn has to follow.

        Args:
            wall_ns: the clock of due times.
        """
        has_changed = False
        for channel in list(self._limited):
            if channel not in self._channels or channel.limiter is None:
                del self._limited[channel]
            elif channel.limiter.sweep(wall_ns):
                self._deliveries.mark(channel)
                has_changed = True
        for partition in list(self._ageing):
            if partition.is_deleted or partition.bounds is None:
                del self._ageing[partition]
            elif not partition.channels:
                self._expire_backlog(partition, partition.bounds, wall_ns)
        moved, self._moved = self._moved, {}
        for partition in moved:
            if not partition.is_deleted and not is_ephemeral(partition.topic_name):
                self._metadata.put_backlog(partition)
                self._metadata.wait(partial(_backlog_kept, partition, partition.backlog_start))
                has_changed = True
        return has_changed

    def _expire_backlog(self, partition: Partition, bounds: Bounds, wall_ns: int) -> None:
        try:
            bounds.expire(partition, wall_ns, self._dead_letters.clock_steps)
        except StorageError as error:
            self._report(error)

    def _backlog_moved(self, partition: Partition) -> None:
        self._moved[partition] = None


def _backlog_kept(partition: Partition, start: int, error: BaseException | None) -> None:
    """The database knows where the backlog of a topic without channels begins: what is older may go."""
    if error is None and not partition.channels:
        partition.durable_floor = max(partition.durable_floor, start)
