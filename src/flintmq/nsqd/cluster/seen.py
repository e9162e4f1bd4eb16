"""Changes of the partitions of a node, for its log and its figures: elections, who is in sync, who catches up.

Rules of this file: nothing is decided here; a line of the log says what changed and why, once for each change.

Source: ``nsqd/replica_figures.py`` for what is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

from flintmq.addresses import format_address
from flintmq.broker.replica import Replica
from flintmq.cluster.following import Following
from flintmq.cluster.leading import Follower, Leading
from flintmq.cluster.state import LAG_NS_MAX, NodeRecord, PartitionState
from flintmq.cluster.view import PartitionId, View
from flintmq.nsqd.cluster.led import CatchUp, Led
from flintmq.nsqd.replica_figures import FollowerFigures, ReplicaFigures

log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000


class Seen:
    """Counts of changes, since this process started.

    Attributes:
        elected_count: how often a partition began to be led here.
        ended_count: how often one was led here no longer.
        joined_count, left_count: changes of the in-sync sets of what is led here.
        caught_up_count: copies that have caught up.
    """

    __slots__ = ("caught_up_count", "elected_count", "ended_count", "joined_count", "left_count")

    def __init__(self) -> None:
        self.elected_count = 0
        self.ended_count = 0
        self.joined_count = 0
        self.left_count = 0
        self.caught_up_count = 0

    def changed(self, before: PartitionState, now: PartitionState) -> None:
        """The in-sync set of what is led here was changed, by its leader."""
        members = set(before.in_sync_nodes)
        self.joined_count += len(set(now.in_sync_nodes) - members)
        self.left_count += len(members - set(now.in_sync_nodes))

    def look(self, led: Led, now_ns: int) -> None:
        """Note which followers begin to catch up, and which have; cheap where all are in sync."""
        leading = led.leading
        if len(leading.state.in_sync) > len(leading.followers) and not led.catching:
            return
        in_sync = leading.state.in_sync_nodes
        for node, follower in leading.followers.items():
            begun = led.catching.get(node)
            is_sent = follower.stream is not None and follower.acked >= 0
            if begun is None and is_sent and node not in in_sync:
                led.catching[node] = CatchUp(now_ns, follower.acked)
                log.info("CLUSTER: %s: node %s catches up: it has the log up to %d of %d%s", name_of(leading), node,
                         follower.acked, leading.end, _how_steady(leading, follower))  # fmt: skip
            elif begun is not None and node in in_sync:
                del led.catching[node]
                self.caught_up_count += 1
                log.info("CLUSTER: %s: node %s has caught up: %d messages in %.1f s", name_of(leading), node,
                         follower.acked - begun.first, (now_ns - begun.begun_ns) / _NS_PER_S)  # fmt: skip
            elif begun is not None and not is_sent:
                del led.catching[node]
                log.warning("CLUSTER: %s: node %s catches up no longer: its connection is gone, or it starts over",
                            name_of(leading), node)  # fmt: skip
        for node in [node for node in led.catching if node not in leading.followers]:
            del led.catching[node]


def why_changed(leading: Leading, wanted: PartitionState) -> str:
    """Tell why the leader wants another in-sync set."""
    now, members = leading.state.in_sync_nodes, wanted.in_sync_nodes
    out = [f"{node} is out: {_why_out(leading, node)}" for node in now if node not in members]
    new = [f"{node} has caught up" for node in members if node not in now]
    again = [
        f"{member.node} was started anew and has everything"
        for member in wanted.in_sync
        if member.node in now and member not in leading.state.in_sync
    ]
    return "; ".join([*out, *new, *again])


def _why_out(leading: Leading, node: str) -> str:
    follower = leading.followers.get(node)
    if node == leading.node:
        return "it reaches too few replicas, and others may reach each other"
    if node not in leading.state.holders:
        return "it is to keep no copy"
    if follower is None:
        return "it is not known any more"
    if follower.has_lost:
        return "it lacks what it had when it was in sync"
    if follower.is_ending:
        return "it ends"
    if follower.why_silent:
        return f"it takes nothing more: {follower.why_silent}"
    if follower.is_silent:
        return f"it is dead, or was not heard of for {LAG_NS_MAX // _NS_PER_S} s"
    return f"it was behind for {LAG_NS_MAX // _NS_PER_S} s"


def _how_steady(leading: Leading, follower: Follower) -> str:
    wait_ns = leading.steady_wait_ns(follower)
    if not wait_ns:
        return ""
    return f"; it fell out of sync again and again, and is taken in when it was steady for {wait_ns // _NS_PER_S} s"


def name_of(leading: Leading) -> str:
    """Return the name of an epoch of a partition, as it stands in the log."""
    return f"{leading.topic}/{leading.number} epoch {leading.epoch}"


def why_ended(view: View, node: str, leading: Leading) -> str:
    """Tell why a partition is led here no longer."""
    state = view.partitions.get((leading.topic, leading.number))
    if state is None:
        return "it is deleted"
    if state.epoch > leading.epoch:
        who = "this node" if state.leader == node else f"node {state.leader}" if state.leader else "nobody"
        return f"{who} leads it in epoch {state.epoch}"
    if leading.superseded_by:
        return f"a replica follows epoch {leading.superseded_by}"
    return "nobody leads it" if not state.leader else "the store says so"


# -- figures -----------------------------------------------------------------------------------------------------------


def figures_of(
    view: View,
    partition: PartitionId,
    replica: Replica | None,
    led: Led | None,
    following: Following | None,
) -> ReplicaFigures:
    """Return the figures of one partition.

    Args:
        replica: the copy here; None: it is being made.
    """
    topic, number = partition
    state = view.partitions.get(partition)
    epoch = 0 if state is None else state.epoch
    leader = view.leader(partition)
    end = 0 if replica is None else replica.log.next_sequence
    committed = 0 if replica is None else replica.log.committed_sequence
    followers: list[FollowerFigures] = []
    if led is not None:
        epoch = led.leading.epoch
        nodes = led.leading.followers
        in_sync = led.leading.state.in_sync_nodes
        start = led.replica.log.start_sequence
        followers = [_follower(each, in_sync, view.nodes, start, end) for each in nodes.values()]
    elif following is not None:
        epoch = max(epoch, following.epoch)
    return ReplicaFigures(
        topic=topic,
        partition=number,
        epoch=epoch,
        leader="" if leader is None else leader.node,
        in_sync=() if state is None else state.in_sync_nodes,
        replicas=() if state is None else state.replicas,
        leaving=() if state is None else state.leaving,
        is_leader=led is not None,
        is_ready=led is not None and led.is_ready,
        is_writable=led is not None and led.is_writable,
        state=_state(replica, led, following, leader is not None),
        committed=committed,
        end=end,
        followers=followers,
        may_have_lost=state is not None and state.may_have_lost,
    )


def _follower(
    follower: Follower, in_sync: Iterable[str], nodes: Mapping[str, NodeRecord], start: int, end: int
) -> FollowerFigures:
    record = nodes.get(follower.node)
    is_in_sync = follower.node in in_sync
    is_connected = follower.stream is not None
    acked = max(follower.acked, start)
    return FollowerFigures(
        node=follower.node,
        host="" if record is None else format_address(record.host, record.tcp_port),
        is_in_sync=is_in_sync,
        is_connected=is_connected,
        is_catching_up=is_connected and not is_in_sync,
        lag=max(0, end - acked),
        progress=100 if end <= start else 100 * min(acked - start, end - start) // (end - start),
    )


def _state(replica: Replica | None, led: Led | None, following: Following | None, has_leader: bool) -> str:
    if replica is None:
        return "is being made"
    if led is not None:
        if led.is_fenced:
            return "is held: its lease is gone"
        if not led.is_writable:
            return "not writable: too few copies are in sync"
        return "leads" if led.is_ready else "leads, and cannot be consumed yet"
    if following is None:
        return "is being changed"
    if following.broken is not None:
        return f"broken: {following.broken}"
    if following.stream is None:
        return "not connected to its leader" if has_leader else "nobody leads it"
    return "follows"


def sorted_partitions(partitions: Iterable[PartitionId], topic: str, number: int | None) -> Iterator[PartitionId]:
    """Return those that are asked for, by topic and number."""
    return iter(
        sorted(
            partition
            for partition in partitions
            if topic in ("", partition[0]) and (number is None or number == partition[1])
        )
    )
