"""Whether a partition may be published to and read here: asked by a node of a cluster, None where there is none.

What belongs to a cluster is led by one node at a time. A node that has a copy and does not lead it answers
E_FAILED_ON_NOT_LEADER, as does one that has just become the leader and cannot tell yet what is committed, to whoever
reads; a leader that cannot have anything acknowledged answers E_FAILED_ON_NOT_WRITABLE.

Source: Youzan's TCP protocol (error table: a publisher's connection goes on, a consumer's is closed).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flintmq.broker.partition import Ended, Partition, PublishGroup
from flintmq.broker.subscription import Subscription
from flintmq.errors import FlintError, RemoteProtocolError
from flintmq.net.isolation import for_each
from flintmq.nsqd.client import Client
from flintmq.nsqd.pending_reply import PendingReply
from flintmq.wire.server import Publish, Subscribe

NOT_LEADER = "E_FAILED_ON_NOT_LEADER"
NOT_WRITABLE = "E_FAILED_ON_NOT_WRITABLE"


class OfTheCluster(FlintError):
    """A topic cannot be made, changed or deleted here, because the cluster has it.

    Args:
        topic: which.
    """

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic

    def __str__(self) -> str:
        who = "nsqlookupd creates, changes and deletes it, and says who leads it"
        return f"topic {self.topic} is one of the cluster: {who}"


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


class NotOfOneNode(OfTheCluster):
    """A topic cannot be made here, because topics of a cluster are made by it."""

    def __str__(self) -> str:
        return f"topic {self.topic} has to be made by the cluster: ask /topic/create of nsqlookupd"


class Leadership(Protocol):
    """Knows what this node leads; asked by whoever serves clients."""

    def to_publish(self, event: Publish) -> Partition | None:
        """As :func:`flintmq.nsqd.partitions.to_publish`, of what is led here and can be written.

        Raises:
            RemoteProtocolError: also NOT_LEADER and NOT_WRITABLE, which end no connection.
        """
        ...

    def elsewhere(self, event: Publish) -> PendingReply | None:
        """Take a publish to a topic of which nothing is led here, and which may have to be made; None: it is for here.

        Raises:
            RemoteProtocolError: NOT_WRITABLE, too much waits already.
        """
        ...

    def prepare(self, client: Client, event: Subscribe) -> Ended | None:
        """Return what has to end before a client subscribes, so that its channel is where it has to be; None: nothing.

        What it ends with is the answer, if that is an error.
        """
        ...

    def relay(self, client: Client, event: Subscribe) -> Ended | None:
        """Subscribe a client to what other nodes lead of a topic; None: it is to have what is led here.

        What is returned ends when all that lead something of it serve the client.
        """
        ...

    def wish(self, topic: str, is_extended: bool = False) -> Ended | None:
        """Have the cluster make a topic that is not there; None: it is this node's own.

        Raises:
            OfTheCluster: it is there, and nothing of it is led here.
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

    def led_elsewhere(self, topic: str) -> list[LedElsewhere] | None:
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

    def was_deleted(self, topic: str) -> bool:
        """Whether the cluster had a topic of this name and has deleted it; not of one that is this node's own."""
        ...

    def is_ready(self, topic: str, number: int) -> bool:
        """Whether a partition may be read here."""
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


def not_writable(command: str, topic: str, number: int | None, why: str) -> RemoteProtocolError:
    """Return the error for a partition in which nothing can be acknowledged now."""
    return RemoteProtocolError(NOT_WRITABLE, f"{command} topic {topic}{_shown(number)} {why}", fatal=False)


def dismiss(subscriptions: Iterable[Subscription], why: str) -> None:
    """End the connections of consumers that have to go on elsewhere, each once.

    Args:
        why: for them, and the log.
    """
    owners = {each.owner: None for each in subscriptions if isinstance(each.owner, Client)}
    for_each(owners, lambda client: client.dismiss(NOT_LEADER, why), "closing")


def _shown(number: int | None) -> str:
    return "" if number is None else f" partition {number}"
