"""One consumer of several partitions: a plain client that subscribes to a topic with partitions.

It has a subscription to the channel's part in each partition. They share what the client has granted, so that RDY
bounds the messages in flight of all of them together, and one output.

Rules of this file: whatever changes what may be sent lets every part find its place in its own line; partitions are
offered the room in turn, so that a busy one does not keep the others waiting.

Source: Youzan's TCP protocol, NSQ's TCP protocol (RDY).
"""

from __future__ import annotations

from collections import deque
from collections.abc import KeysView, Sequence
from typing import Protocol

from flintmq.broker.channel import Channel
from flintmq.broker.subscription import Locality, Subscription
from flintmq.limits import WRITE_BUFFER_HIGH_BYTES
from flintmq.message import partition_of


class Upstreams(Protocol):
    """Messages of the same channel that other nodes of a cluster send to a consumer, within what it has granted."""

    def share(self) -> None:
        """Look again how much of RDY is theirs: something that it depends on has changed."""
        ...

    def finish(self, ids: Sequence[int]) -> list[int]:
        """Finish messages by internal id, and :meth:`share`; return those of which nobody is known."""
        ...

    def requeue(self, internal: int, delay_ns: int) -> bool:
        """Give a message back; False when it is not known where it came from."""
        ...

    def touch(self, internal: int) -> bool:
        """Restart a message's timeout; False as for :meth:`requeue`."""
        ...


class PartSubscription(Subscription):
    """A subscription to one partition, of a consumer that has several."""

    __slots__ = ("shared",)

    shared: SharedSubscription

    @property
    def capacity(self) -> int:
        return self.shared.capacity

    def find_place(self) -> None:
        for part in self.shared.parts:
            Subscription.find_place(part)

    def put(self, frames: bytes | memoryview, count: int) -> None:
        super().put(frames, count)
        self.shared.room_left -= len(frames)

    @property
    def has_finished(self) -> bool:
        return self.shared.has_finished

    def hold_back(self) -> None:
        self.shared.room_left = 0

    def had_one(self) -> None:
        self.shared.room_left = 0
        self.shared.has_answered = False

    def served(self) -> None:
        super().served()
        self.find_place()


class SharedSubscription:
    """The subscriptions of one consumer to several partitions, which a connection sees as one.

    Attributes:
        room_left: bytes that may still be put into the output.
        upstreams: bring what other nodes have of the channel; None: nothing comes from there.
    """

    def __init__(self, parts: Sequence[PartSubscription]) -> None:
        self.parts = tuple(parts)
        self.room_left = WRITE_BUFFER_HIGH_BYTES
        self.upstreams: Upstreams | None = None
        self._lent_count = 0
        self._rdy_count = 0
        self._is_open = False
        for part in self.parts:
            part.shared = self

    def add(self, part: PartSubscription) -> None:
        """Consume one more partition."""
        part.shared = self
        self.parts = (*self.parts, part)
        self._changed()

    def remove(self, part: Subscription) -> None:
        """Consume a partition no longer; of what it has in flight nothing counts any more."""
        self.parts = tuple(each for each in self.parts if each is not part)
        if self.parts:
            self._changed()

    @property
    def capacity(self) -> int:
        """Messages that may be sent now."""
        if not self._is_open or self.room_left <= 0:
            return 0
        return self._rdy_count - self._lent_count - self.in_flight_count

    def lend(self, count: int) -> bool:
        """Let other nodes send so many of the messages that the consumer has granted; return whether they were more."""
        before, self._lent_count = self._lent_count, count
        if count != before:
            self._find_places()
        return count < before

    def _find_places(self) -> None:
        if self.parts:
            self.parts[0].find_place()

    def _changed(self) -> None:
        self._find_places()
        if self.upstreams is not None:
            self.upstreams.share()

    @property
    def rdy_count(self) -> int:
        """The level the client set, for all partitions together."""
        return self._rdy_count

    @rdy_count.setter
    def rdy_count(self, count: int) -> None:
        self._rdy_count = count
        self._changed()

    @property
    def room_bytes(self) -> int:
        """Bytes that may be put into the output before the connection has to drain."""
        return self.room_left

    @room_bytes.setter
    def room_bytes(self, room_bytes: int) -> None:
        had_room = self.room_left > 0
        self.room_left = room_bytes
        if had_room != (room_bytes > 0):
            self._changed()

    @property
    def is_open(self) -> bool:
        """False until SUB was answered and after CLS: nothing is delivered."""
        return self._is_open

    @is_open.setter
    def is_open(self, is_open: bool) -> None:
        self._is_open = is_open
        self._changed()

    @property
    def has_finished(self) -> bool:
        """Whether the consumer has finished a message or given one back, so that it certainly reads."""
        return any(part.finish_count or part.requeue_count for part in self.parts)

    @property
    def has_answered(self) -> bool:
        """See :class:`flintmq.budget.Reader`; of all parts together."""
        return self.parts[0].has_answered

    @has_answered.setter
    def has_answered(self, has_answered: bool) -> None:
        for part in self.parts:
            part.has_answered = has_answered

    def take_put_bytes(self) -> int:
        """Return how many bytes have been put into the output since the last call."""
        return sum(part.take_put_bytes() for part in self.parts)

    @property
    def locality(self) -> Locality:
        """Nearness of the consumer."""
        return self.parts[0].locality

    @property
    def in_flight_count(self) -> int:
        return sum(part.in_flight_count for part in self.parts)

    @property
    def message_count(self) -> int:
        return sum(part.message_count for part in self.parts)

    @property
    def filtered_count(self) -> int:
        return sum(part.filtered_count for part in self.parts)

    @property
    def finish_count(self) -> int:
        return sum(part.finish_count for part in self.parts)

    @property
    def requeue_count(self) -> int:
        return sum(part.requeue_count for part in self.parts)

    def describe(self) -> str:
        """One line for humans."""
        return f"shared open={self.is_open} rdy={self.rdy_count} " + " ".join(part.describe() for part in self.parts)


class ChannelParts:
    """A channel's parts in several partitions; a connection sees them as one channel, and ids say which is meant.

    Args:
        channels: by the number of their partition.

    Attributes:
        upstreams: as of the subscription: what is said of messages of other partitions is for them.
    """

    def __init__(self, channels: dict[int, Channel], subscriptions: dict[int, PartSubscription]) -> None:
        self.upstreams: Upstreams | None = None
        self._channels = channels
        self._subscriptions = subscriptions
        self._turns = deque(channels.values())
        first = self._turns[0]
        # each begins with another one, so that a message of which consumers die is not the first for all of them
        self._turns.rotate(-first.joined_count)
        self.name = first.name
        self.ephemeral = first.ephemeral
        self.latency = first.latency  # only whether it is kept

    @property
    def numbers(self) -> KeysView[int]:
        """The partitions that its parts are in."""
        return self._channels.keys()

    def add(self, number: int, channel: Channel, subscription: PartSubscription) -> None:
        """Take in the part of one more partition."""
        self._channels[number] = channel
        self._subscriptions[number] = subscription
        self._turns.append(channel)

    def remove(self, number: int) -> None:
        """Let the part of a partition go: what is said of its messages fails."""
        channel = self._channels.pop(number)
        del self._subscriptions[number]
        self._turns.remove(channel)

    def in_turn(self) -> list[Channel]:
        """All parts, each time with another one first."""
        self._turns.rotate(-1)
        return list(self._turns)

    def finish(self, subscription: object, ids: Sequence[int], wall_ns: int = 0) -> list[int]:
        """Finish messages by internal id; return those that were not in flight here."""
        by_partition: dict[int, list[int]] = {}
        for internal in ids:
            by_partition.setdefault(partition_of(internal), []).append(internal)
        failed: list[int] = []
        others: list[int] = []
        for number, mine in by_partition.items():
            channel = self._channels.get(number)
            if channel is None:
                others += mine
            else:
                failed += channel.finish(self._subscriptions[number], mine, wall_ns)
        if self.upstreams is None:
            return failed + others
        return failed + self.upstreams.finish(others)

    def requeue(self, subscription: object, internal: int, delay_ns: int, wall_ns: int) -> bool:
        """Give a message back; False when it is not in flight here."""
        number = partition_of(internal)
        channel, upstreams = self._channels.get(number), self.upstreams
        if channel is None:
            return upstreams is not None and upstreams.requeue(internal, delay_ns)
        is_requeued = channel.requeue(self._subscriptions[number], internal, delay_ns, wall_ns)
        if upstreams is not None:
            upstreams.share()
        return is_requeued

    def touch(self, subscription: object, internal: int, now_ns: int) -> bool:
        """Restart a message's timeout; False when it is not in flight here."""
        number = partition_of(internal)
        channel = self._channels.get(number)
        if channel is None:
            return self.upstreams is not None and self.upstreams.touch(internal)
        return channel.touch(self._subscriptions[number], internal, now_ns)

    def is_in_flight(self, internal: int) -> bool:
        """Whether any consumer holds a message."""
        channel = self._channels.get(partition_of(internal))
        return channel is not None and channel.is_in_flight(internal)
