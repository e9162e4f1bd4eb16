"""A topic: its partitions and the names of its channels. A channel exists in every partition.

Source: reference/nsq.md 1.10 (first channel gets the backlog, later ones start at now).
"""

from __future__ import annotations

from flintmq.broker.channel import Channel
from flintmq.broker.partition import Partition
from flintmq.names import is_ephemeral


class Topic:
    """Owner of one topic.

    Attributes:
        channel_names: every channel and whether it is paused.
        is_starting: nothing is handed to channels yet, because it is not known which there must be; whatever is
            created meanwhile begins with the first message.
    """

    __slots__ = ("channel_names", "ephemeral", "is_starting", "name", "partitions", "paused")

    def __init__(self, name: str, partitions: dict[int, Partition], paused: bool = False) -> None:
        self.name = name
        self.ephemeral = is_ephemeral(name)
        self.partitions = partitions
        self.paused = paused
        self.is_starting = False
        self.channel_names: dict[str, bool] = {}

    @property
    def first_partition(self) -> Partition:
        """The partition that plain clients publish to."""
        return next(iter(self.partitions.values()))

    def channels(self, name: str) -> list[Channel]:
        """A channel's part in each partition."""
        return [partition.channels[name] for partition in self.partitions.values()]

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
