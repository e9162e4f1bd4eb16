"""The partitions of the cluster that are on this node: which have a copy here, and which of those are led here.

Rules of this file: nothing is decided here; a partition that is led is in all four tables, or in the first alone.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio

from flintmq.broker.partition import Partition
from flintmq.broker.replica import Replica
from flintmq.cluster.following import Following
from flintmq.cluster.view import PartitionId
from flintmq.nsqd.cluster.copies import FollowedLog
from flintmq.nsqd.cluster.led import Led
from flintmq.storage import PartitionLog


class Copy:
    """One partition of the cluster, as far as it is here, and what is being done with it.

    Args:
        partition: topic and number.
        replica: in the broker; None: it is being made.

    Attributes:
        following: lets another node change it; None: this node leads it, or it is being changed.
        followed: its log, as :attr:`following` wants it.
        led: this node leads it.
        is_busy: something is being done with it, whose end says so to :class:`Settling`.
        ended_epoch: in which this process led last: it leads no more before the store names a later one.
        last_leader: node and incarnation of another process that led, as the store said, and its epoch.
        again: tries again with a copy that could not be written.
    """

    __slots__ = (
        "again",
        "ended_epoch",
        "followed",
        "following",
        "is_busy",
        "last_leader",
        "led",
        "partition",
        "replica",
    )

    def __init__(self, partition: PartitionId, replica: Replica | None) -> None:
        self.partition = partition
        self.replica = replica
        self.following: Following | None = None
        self.followed: FollowedLog | None = None
        self.led: Led | None = None
        self.is_busy = False
        self.ended_epoch = 0
        self.last_leader: tuple[str, str, int] | None = None
        self.again: asyncio.TimerHandle | None = None


class Table:
    """Finds each of them.

    Attributes:
        copies: all that are here, or are being made.
        led: those that are led here.
        by_partition, by_log: the same, by what the broker and the engine know of them.
    """

    __slots__ = ("by_log", "by_partition", "copies", "led")

    def __init__(self) -> None:
        self.copies: dict[PartitionId, Copy] = {}
        self.led: dict[PartitionId, Led] = {}
        self.by_partition: dict[Partition, Led] = {}
        self.by_log: dict[PartitionLog, Led] = {}

    def add(self, partition: PartitionId, replica: Replica | None) -> Copy:
        """Take in a copy."""
        copy = self.copies[partition] = Copy(partition, replica)
        return copy

    def remove(self, copy: Copy) -> None:
        """Forget a copy, which is led here no longer."""
        del self.copies[copy.partition]

    def begin_led(self, copy: Copy, led: Led) -> None:
        """This node leads a copy from now on."""
        copy.led = self.led[copy.partition] = led
        self.by_partition[led.partition] = self.by_log[led.replica.log] = led

    def end_led(self, copy: Copy) -> None:
        """This node leads a copy no longer."""
        led, copy.led = copy.led, None
        assert led is not None
        copy.ended_epoch = led.leading.epoch
        del self.led[copy.partition]
        del self.by_partition[led.partition]
        del self.by_log[led.replica.log]
