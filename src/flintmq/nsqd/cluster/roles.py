"""The role of a node in a partition, from what the store says and what is here.

Rules of this file: no IO, no state; what cannot be told for certain leaves everything as it is.

Source: docs/decisions/0017; ``cluster/state.py`` for who writes what.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flintmq.cluster.state import NodeRecord, PartitionState
from flintmq.cluster.view import Fate, PartitionId, View


class Role(Enum):
    """Things to do about one partition."""

    NOTHING = "nothing"
    CREATE = "make a replica"
    FOLLOW = "follow its leader"
    LEAD = "lead it"
    SET_ASIDE = "put the log of its replica aside, which is of another log or topic"
    REMOVE = "remove its replica, which is not wanted any more"


@dataclass(frozen=True, slots=True)
class Here:
    """The replica that a node has.

    Attributes:
        topic_number: of the topic, when it was made.
        log_id: of its log.
    """

    topic_number: int
    log_id: int


def role_of(view: View, me: NodeRecord, partition: PartitionId, here: Here | None) -> Role:
    """Return what a node is to do about a partition.

    Args:
        me: this process.
        here: None: it has no replica.
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
                return Role.FOLLOW
    is_wanted = me.node in state.holders or me.node in state.in_sync_nodes
    record = view.topics.get(topic)
    if here is None:
        if not is_wanted or record is None or record.number != state.topic_number or record.is_deleting:
            return Role.NOTHING
        return Role.CREATE
    if (here.topic_number, here.log_id) != (state.topic_number, state.log_id):
        return _of_another(view, topic, here)
    if state.is_led_by(me.node, me.incarnation):
        return Role.LEAD
    if not is_wanted and state.in_sync:
        return Role.REMOVE
    return Role.FOLLOW


def _of_another(view: View, topic: str, here: Here) -> Role:
    """Return the role where something else of that name is here."""
    return Role.REMOVE if view.fate(topic, here.topic_number) is Fate.DELETED else Role.SET_ASIDE


def followers_of(state: PartitionState, me: str) -> list[str]:
    """Return the nodes that a leader sends a partition to."""
    return [node for node in dict.fromkeys((*state.holders, *state.in_sync_nodes)) if node != me]
