"""A topic: its partitions on this node and the names of its channels.

A channel exists in every partition, but those in which an operator has deleted it.

Source: NSQ's TCP protocol (first channel gets the backlog, later ones start at now).
"""

from __future__ import annotations

from itertools import islice

from flintmq.broker.channel import Channel
from flintmq.broker.partition import Partition
from flintmq.names import is_ephemeral
from flintmq.topic_meta import PLAIN, TopicMeta


class Topic:
    """Owner of one topic.

    Attributes:
        channel_names: every channel and whether it is paused, in each partition.
        meta: what it was created with; of a plain topic nothing.
        waited_ns: monotonic time when publishes last had to wait for what a subscription changed.
        is_starting: nothing is handed to channels yet, because it is not known which there must be; whatever is
            created meanwhile begins with the first message.
    """

    __slots__ = ("_turn", "channel_names", "ephemeral", "is_starting", "meta", "name", "partitions", "paused",
                 "waited_ns")  # fmt: skip

    def __init__(
        self, name: str, partitions: dict[int, Partition], paused: bool = False, meta: TopicMeta = PLAIN
    ) -> None:
        self.name = name
        self.ephemeral = is_ephemeral(name)
        self.partitions = partitions
        self.paused = paused
        self.is_starting = False
        self.meta = meta
        self.channel_names: dict[str, bool] = {}
        self.waited_ns = -(1 << 62)
        self._turn = 0
        for partition in partitions.values():
            partition.meta = meta

    @property
    def first_partition(self) -> Partition:
        """The only partition of a plain topic."""
        return next(iter(self.partitions.values()))

    def next_partition(self) -> Partition:
        """The partition that the next publish goes to which names none: each in its turn."""
        partitions = self.partitions
        if len(partitions) == 1:
            return next(iter(partitions.values()))
        self._turn = (self._turn + 1) % len(partitions)
        return next(islice(partitions.values(), self._turn, None))

    def add(self, partition: Partition) -> None:
        """Take one more partition in; they stay in the order of their numbers."""
        partition.meta = self.meta
        self.partitions[partition.number] = partition
        self.partitions = dict(sorted(self.partitions.items()))

    def remove(self, number: int) -> None:
        """Let a partition go, with its part of each channel; a channel that is nowhere else goes with it."""
        self.partitions = {each: partition for each, partition in self.partitions.items() if each != number}
        self.channel_names = {
            name: all(part.paused for part in parts) for name in self.channel_names if (parts := self.channels(name))
        }

    def hold_back(self) -> None:
        """Hand out nothing until it is known which channels there must be: a topic that is starting."""
        self.is_starting = True
        for partition in self.partitions.values():
            partition.paused_at = partition.backlog_start

    def channels(self, name: str) -> list[Channel]:
        """A channel's part in each partition that it is in."""
        return [partition.channels[name] for partition in self.partitions.values() if name in partition.channels]

    @property
    def depth(self) -> int:
        """Messages that no channel has been given yet."""
        return sum(partition.depth for partition in self.partitions.values())

    @property
    def message_count(self) -> int:
        """Messages published since the process started."""
        return sum(partition.message_count for partition in self.partitions.values())

    @property
    def message_bytes(self) -> int:
        """Bytes of bodies published since the process started."""
        return sum(partition.bytes_count for partition in self.partitions.values())
