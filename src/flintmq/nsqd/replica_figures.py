"""A node's part in a cluster in figures, for whoever writes them down: ``figures/replicas.py``.

Rules of this file: figures are those of the moment in which they are asked for; nothing here knows how anything is
written elsewhere.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class FollowerFigures:
    """Another node's copy of what is led here.

    Attributes:
        node: its id.
        host: where it is; empty: it does not live.
        is_in_sync: it has all that is committed.
        is_connected: it is being sent the log.
        is_catching_up: it is connected, lacks messages, and is not in sync.
        lag: messages that it has not acknowledged.
        progress: how much of the log it has, in percent.
    """

    node: str
    host: str
    is_in_sync: bool
    is_connected: bool
    is_catching_up: bool
    lag: int
    progress: int


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """One partition of the cluster as far as it is on this node.

    Attributes:
        epoch: of its present leader, as far as it is known.
        leader: id of the node that leads; empty: none does.
        in_sync, replicas, leaving: ids of nodes, as the store has them.
        is_leader: this node leads.
        is_ready: it leads, and can be consumed.
        is_writable: it leads, and what is published can be acknowledged.
        state: in a word or a few, for people.
        committed: messages up to this sequence (exclusive) are committed, as far as it is known here.
        end: of the log here.
        followers: where this node leads.
        may_have_lost: a leader may have lacked, when it was elected, some of what was acknowledged, and nobody has
            acknowledged that.
    """

    topic: str
    partition: int
    epoch: int
    leader: str
    in_sync: Sequence[str]
    replicas: Sequence[str]
    leaving: Sequence[str]
    is_leader: bool
    is_ready: bool
    is_writable: bool
    state: str
    committed: int
    end: int
    followers: Sequence[FollowerFigures] = ()
    may_have_lost: bool = False

    @property
    def lag(self) -> int:
        """Messages that the copy here, or the one that is furthest behind of those that this node sends to, lacks of
        what is known here: of a leader what its followers have not acknowledged, of a follower what is not known to be
        committed.
        """
        if self.is_leader:
            return max((each.lag for each in self.followers), default=0)
        return max(0, self.end - self.committed)

    @property
    def is_whole(self) -> bool:
        """Whether every copy that is wanted is in sync."""
        return set(self.replicas) <= set(self.in_sync)


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """The node itself.

    Attributes:
        cluster: its name.
        node, incarnation: ids.
        has_lease: the store knows that it lives.
        revision: of the store, as far as it is followed.
        problem: why it takes no part any more; empty: it does.
        elected_count: how often this process was elected.
        ended_count: how often it led no longer.
        joined_count: copies that were taken into the in-sync set of what is led here.
        left_count: copies that were put out of it.
        caught_up_count: copies that have caught up.
        replicas: how many partitions are here, led and followed.
        set_aside_count: logs in ``set-aside/`` of the data directory, as they were counted last.
        double_topics: that this node has alone, from before it joined, although the cluster has one of that name.
    """

    cluster: str
    node: str
    incarnation: str
    has_lease: bool
    revision: int
    problem: str
    elected_count: int
    ended_count: int
    joined_count: int
    left_count: int
    caught_up_count: int
    replica_count: int
    leader_count: int
    set_aside_count: int = 0
    double_topics: tuple[str, ...] = ()


class ClusterPart(Protocol):
    """Knows the figures of a node's part in a cluster."""

    def figures(self) -> ClusterFigures:
        """Return those of the node itself."""
        ...

    def replicas(self, topic: str = "", partition: int | None = None) -> Iterator[ReplicaFigures]:
        """Yield those of the partitions that are here, each as it is when its turn comes, by topic and number.

        Args:
            topic: only of this one; empty for all.
            partition: only this one; None for all.
        """
        ...
