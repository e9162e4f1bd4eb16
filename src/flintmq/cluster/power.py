"""Elections where everybody who had all of a partition lost its power: who has most is asked, and leads.

A node that writes to the kernel and no further may lack, after a power loss, what it acknowledged. While somebody lives
who is in sync and lost nothing, that one leads. When there is nobody, every node with a copy writes into the state how
far its copy is (:func:`told`). When all of them are back and have said it, the one with the highest epoch and then the
highest end leads, alone in sync; the others fetch what they lack from it::

    nobody leads --> each live holder: (node, incarnation, epoch, end) into the state --> who_has_most --> elected

Of two logs the one whose last batch is of the higher epoch has all that was ever acknowledged below its end as far as
either of them has it: who led in that epoch began with all of it. So nothing is cut off that one of those asked has.

Rules of this file: no IO, no clock; what a process of before said counts no more; who does not come back is waited for,
until an operator decides.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flintmq.cluster.state import Ending, NodeRecord, NoLeader, PartitionState, candidates, elected


def asks_for_ends(state: PartitionState, live: Mapping[str, NodeRecord]) -> bool:
    """Whether every node with a copy is to say how far that is."""
    return bool(state.epoch) and not state.leader and isinstance(candidates(state, live), NoLeader)


def told(state: PartitionState, ending: Ending) -> PartitionState | None:
    """Let a node say how far its copy is; None: it has, or is not to have one."""
    if ending in state.ends or state.leader or ending.node not in (*state.holders, *state.in_sync_nodes):
        return None
    others = tuple(each for each in state.ends if each.node != ending.node)
    return msgspec.structs.replace(state, ends=(*others, ending))


def heard(state: PartitionState, live: Mapping[str, NodeRecord]) -> dict[str, Ending]:
    """Return what the processes that live have said, by node."""
    return {
        each.node: each for each in state.ends if each.node in live and live[each.node].incarnation == each.incarnation
    }


def awaited(state: PartitionState, live: Mapping[str, NodeRecord]) -> list[str]:
    """Return the nodes that have to say how far they are: those who were in sync, and all others with a copy."""
    said = heard(state, live)
    return [node for node in dict.fromkeys((*state.in_sync_nodes, *state.holders)) if node not in said]


def who_has_most(state: PartitionState, live: Mapping[str, NodeRecord]) -> Ending | None:
    """Return the one who is to lead; None: somebody can be elected without asking, or somebody is waited for."""
    if not asks_for_ends(state, live) or awaited(state, live):
        return None
    return best_of(state, live)


def best_of(state: PartitionState, live: Mapping[str, NodeRecord]) -> Ending | None:
    """Return who has most of those who have said how far they are."""
    members, wanted = state.in_sync_nodes, state.replicas
    return max(
        heard(state, live).values(),
        key=lambda each: (
            each.epoch,
            each.end,
            each.node in members,
            each.node in wanted,
            not live[each.node].is_draining,
            not live[each.node].is_full,
            -wanted.index(each.node) if each.node in wanted else 0,
        ),
        default=None,
    )


def elected_with_loss(state: PartitionState, leader: NodeRecord) -> PartitionState:
    """Let a node lead that may lack some of what was acknowledged; it alone is in sync, and that stays to be seen until
    an operator says that it is known.
    """
    now = elected(state, leader, (leader.member,))
    return msgspec.structs.replace(now, lossy_epoch=now.epoch)


def acknowledged(state: PartitionState) -> PartitionState | None:
    """Say no more that something may be lost; None: it is not said."""
    return msgspec.structs.replace(state, lossy_epoch=0) if state.may_have_lost else None


def describe(state: PartitionState, live: Mapping[str, NodeRecord]) -> str:
    """Tell for people who is waited for, and who has most so far; empty: nobody is asked."""
    if not asks_for_ends(state, live):
        return ""
    waiting, best = awaited(state, live), best_of(state, live)
    text = f"waits for {', '.join(waiting)}" if waiting else "one is about to be elected"
    return text if best is None else f"{text}; most of it has {best.node}: epoch {best.epoch}, up to {best.end}"


def losses(state: PartitionState, live: Mapping[str, NodeRecord], node: str) -> list[str]:
    """Tell for people what is lost for good when a node is made the leader by hand."""
    said = heard(state, live)
    mine = said.get(node)
    notes = []
    if mine is None:
        notes.append(f"node {node} has not said how far its copy is")
    for other, ending in sorted(said.items()):
        if mine is None or other == node or (ending.epoch, ending.end) <= (mine.epoch, mine.end):
            continue
        if ending.end > mine.end:
            lost = f"{ending.end - mine.end} messages, from {mine.end} to {ending.end - 1}"
        else:
            lost = f"what it has of epoch {ending.epoch}"
        notes.append(f"node {other} has more: {lost}; that would be cut off, and lost")
    for other in awaited(state, live):
        what = "had everything" if other in state.in_sync_nodes else "has a copy"
        notes += [f"node {other} {what} and does not answer: what only it has is lost"] if other != node else []
    if mine is not None and not notes:
        notes.append(f"no copy that answers has more: epoch {mine.epoch}, up to {mine.end}")
    return notes
