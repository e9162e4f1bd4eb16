"""Whether a partition may be published to and read here: asked by a node of a cluster, None where there is none.

What belongs to a cluster is led by one node at a time. A node that has a copy and does not lead it answers
E_FAILED_ON_NOT_LEADER, as does one that has just become the leader and cannot tell yet what is committed, to whoever
reads; a leader that cannot have anything acknowledged answers E_FAILED_ON_NOT_WRITABLE.

Source: reference/youzan.md 1.3 (error table: a publisher's connection goes on, a consumer's is closed).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flintmq.broker.partition import Partition, PublishGroup
from flintmq.errors import FlintError, RemoteProtocolError
from flintmq.wire.server import Publish, Subscribe

NOT_LEADER = "E_FAILED_ON_NOT_LEADER"
NOT_WRITABLE = "E_FAILED_ON_NOT_WRITABLE"


class OfTheCluster(FlintError):
    """A topic cannot be made or deleted here, because the cluster has it.

    Args:
        topic: which.
    """

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic

    def __str__(self) -> str:
        return f"topic {self.topic} is one of the cluster: nsqlookupd creates and deletes it, and says who leads it"


@dataclass(frozen=True, slots=True)
class LedElsewhere:
    """A partition that cannot be read here.

    Attributes:
        number: of the partition.
        log_id: of its log, the same on every node.
        epoch: in which it is led, or was last.
        address: of the node that leads it, as clients reach it; empty: none does, or this one, which is not ready.
    """

    number: int
    log_id: int
    epoch: int
    address: str


class Leadership(Protocol):
    """Knows what this node leads; asked by whoever serves clients."""

    def to_publish(self, event: Publish) -> Partition | None:
        """As :func:`flintmq.nsqd.partitions.to_publish`, of what is led here and can be written.

        Raises:
            RemoteProtocolError: also NOT_LEADER and NOT_WRITABLE, which end no connection.
        """
        ...

    def to_consume(self, event: Subscribe) -> list[int] | None:
        """As :func:`flintmq.nsqd.partitions.to_consume`, of what is led here and ready.

        Raises:
            RemoteProtocolError: also NOT_LEADER, which ends the connection.
        """
        ...

    def check_read(self, command: str, topic: str, number: int | None) -> None:
        """See that a partition may be read here; without a number, all of the topic that are here.

        Raises:
            RemoteProtocolError: NOT_LEADER, which ends no connection.
        """
        ...

    def elsewhere(self, topic: str) -> list[LedElsewhere] | None:
        """Return the partitions of a topic that cannot be read here; None when the topic is no business of the cluster.

        It may not know any partition of a topic that is being created.
        """
        ...

    def check_create(self, topic: str) -> None:
        """See that a topic may be made on this node alone.

        Raises:
            OfTheCluster: the cluster has one of this name.
        """
        ...

    def check_delete(self, topic: str) -> None:
        """See that a topic may be deleted on this node alone.

        Raises:
            OfTheCluster: it is one of the cluster.
        """
        ...

    def is_replicated(self, topic: str) -> bool:
        """Whether what a topic here has is kept on other nodes as well."""
        ...


class Replication(Protocol):
    """Knows what other nodes have of the logs here; told by the engine."""

    def look(self) -> None:
        """A turn ends: see to it that nothing is acknowledged or delivered that may not be any more."""
        ...

    def written(self, groups: Sequence[PublishGroup]) -> None:
        """Groups were written, and those of partitions that are led here are to be sent on."""
        ...

    def synced(self, logs: Iterable[Any]) -> None:
        """These logs were synced."""
        ...


def not_leader(command: str, topic: str, number: int | None, why: str, fatal: bool) -> RemoteProtocolError:
    """Return the error for a partition that is led elsewhere, or not ready."""
    return RemoteProtocolError(NOT_LEADER, f"{command} topic {topic}{_shown(number)} {why}", fatal)


def not_writable(command: str, topic: str, number: int, why: str) -> RemoteProtocolError:
    """Return the error for a partition in which nothing can be acknowledged now."""
    return RemoteProtocolError(NOT_WRITABLE, f"{command} topic {topic}{_shown(number)} {why}", fatal=False)


def _shown(number: int | None) -> str:
    return "" if number is None else f" partition {number}"
