"""The role of a node in a partition, from what the store says and what is here.

Rules of this file: no IO, no state; what cannot be told for certain leaves everything as it is.

Source: docs/decisions/0017; ``cluster/state.py`` for who writes what.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flintmq.cluster.power import has_lost, known_epoch
from flintmq.cluster.state import NodeRecord, PartitionState
from flintmq.cluster.view import Fate, PartitionId, View


class Role(Enum):
    """Things to do about one partition."""

    NOTHING = "nothing"
    CREATE = "make a replica"
    FOLLOW = "follow its leader"
    LEAD = "lead it"
    SET_ASIDE = "put the log of its replica aside, which is of another log or topic, or perhaps of a later state"
    REMOVE = "remove its replica, which is not wanted any more"
    LOST = "be in sync no longer: the replica that was is not here"


@dataclass(frozen=True, slots=True)
class Here:
    """The replica that a node has.

    Attributes:
        topic_number: of the topic, when it was made.
        log_id: of its log.
        epoch: the highest that it has noted.
        led_by: an epoch that it was told of, and the process that led in it; (0, ""): none.
    """

    topic_number: int
    log_id: int
    epoch: int = 0
    led_by: tuple[int, str] = (0, "")


def role_of(
    view: View,
    me: NodeRecord,
    partition: PartitionId,
    here: Here | None,
    was_here: bool = False,
    is_store_older: bool = False,
) -> Role:
    """Return what a node is to do about a partition.

    Args:
        me: this process.
        here: None: it has no replica.
        was_here: without a replica: it is known to have had one of this log.
        is_store_older: what the store says may be from before what the replica knows.
    """
    topic, number = partition
    state = view.partitions.get(partition)
    if state is None:
        if here is None:
            return Role.NOTHING
        if view.keys.partition(topic, number) in view.unreadable or view.keys.topic(topic) in view.unreadable:
            return Role.FOLLOW
        match view.fate(topic, here.topic_number):
            case Fate.DELETED:
                return Role.REMOVE
            case Fate.UNKNOWN:
                return Role.SET_ASIDE
            case Fate.THERE:
                is_beyond = number >= view.topics[topic].partition_num  # partitions are never taken away: it was older
                return Role.SET_ASIDE if is_beyond and (here.epoch or is_store_older) else Role.FOLLOW
    is_wanted = me.node in state.holders or me.node in state.in_sync_nodes
    record = view.topics.get(topic)
    if here is None:
        if not is_wanted or record is None or record.number != state.topic_number or record.is_deleting:
            return Role.NOTHING
        return Role.LOST if is_lost(state, me.node, was_here) else Role.CREATE
    if (here.topic_number, here.log_id) != (state.topic_number, state.log_id):
        return _of_another(view, topic, here)
    if state.is_led_by(me.node, me.incarnation):
        return Role.LEAD
    if not is_wanted and state.in_sync:
        if known_epoch(state, here.epoch, here.led_by):
            return Role.FOLLOW  # the store is older than the replica, which may be the one that has most
        return Role.SET_ASIDE if is_store_older else Role.REMOVE
    return Role.FOLLOW


def is_lost(state: PartitionState, me: str, was_here: bool) -> bool:
    """Whether a node without a replica lacks what the state says that it has: a new one would be in sync, and empty.

    Who is in sync of a partition that was just made has nothing to lack; nor has who leads because an operator, or the
    lack of anybody else, has it lead in spite of what is lost.

    Args:
        was_here: it is known to have had a replica of this log.
    """
    mine = next((member for member in state.in_sync if member.node == me), None)
    if mine is None or (state.leader == me and state.may_have_lost and state.lossy_epoch == state.epoch):
        return False
    return was_here or has_lost(mine)


def _of_another(view: View, topic: str, here: Here) -> Role:
    """Return the role where something else of that name is here."""
    return Role.REMOVE if view.fate(topic, here.topic_number) is Fate.DELETED else Role.SET_ASIDE


def followers_of(state: PartitionState, me: str) -> list[str]:
    """Return the nodes that a leader sends a partition to."""
    return [node for node in dict.fromkeys((*state.holders, *state.in_sync_nodes)) if node != me]
