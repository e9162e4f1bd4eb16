"""Elections where nobody is known to have all of a partition: who has most is asked, and leads.

A node that writes to the kernel and no further may lack, after a power loss, what it acknowledged. While somebody lives
who is in sync and lost nothing, that one leads. When there is nobody, every node with a copy writes into the state how
far its copy is (:func:`told`). When all of them are back and have said it, the one with the highest epoch and then the
highest end leads, alone in sync; the others fetch what they lack from it::

    nobody leads --> each live holder: (node, incarnation, epoch, end) into the state --> who_has_most --> elected

Of two logs the one whose last batch is of the higher epoch has all that was ever acknowledged below its end as far as
either of them has it: who led in that epoch began with all of it. So nothing is cut off that one of those asked has.

The same where the store is found to be older than the copies, because a backup of it was put back: a copy knows of an
epoch that the store does not, or of another leader of the same one (:func:`known_epoch`,
:func:`contested`). By then the store may have had somebody elected in an epoch that had a leader
before, so two logs may have different batches of one epoch: a copy of which that can be so does not go on from where
its epochs agree with the leader's, it begins anew (:func:`is_doubtful`).

The only one in sync whose copy is gone says so instead (:func:`lost`), and nobody is elected by itself.

Rules of this file: no IO, no clock; what a process of before said counts no more; who does not come back is waited for,
until an operator decides.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from flintmq.cluster.state import (
    Ending,
    Member,
    NodeRecord,
    NoLeader,
    Older,
    PartitionState,
    candidates,
    elected,
    without_leader,
)
from flintmq.topic_meta import TO_DECIDE

_LOST = "lost/"


def lost(state: PartitionState, node: str, incarnation: str) -> PartitionState | None:
    """Let the only one in sync say that its copy is gone: nobody leads, and it is not asked how far it is, so that only
    an operator can have somebody lead.

    Returns:
        None when it is not the only one, or has said so.
    """
    if state.in_sync_nodes != (node,) or has_lost(state.in_sync[0]):
        return None
    member = Member(node, f"{_LOST}{incarnation}", False)  # no process is ever taken for one that has what this had
    return msgspec.structs.replace(state, leader="", incarnation="", in_sync=(member,))


def has_lost(member: Member) -> bool:
    """Whether a member of an in-sync set has said that its copy is gone."""
    return member.boot_id.startswith(_LOST)


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
    """Return the nodes that have to say how far they are: those who were in sync, and all others with a copy.

    Where the store is older than the copies, one that is gone may have been moved since: it is not waited for.
    """
    said = heard(state, live)
    gone = [member.node for member in state.in_sync if state.is_contested and has_lost(member)]
    nodes = dict.fromkeys((*state.in_sync_nodes, *state.holders))
    return [node for node in nodes if node not in said and node not in gone]


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
    now, older = elected(state, leader, (leader.member,)), state.older
    if older is not None and state.is_contested:
        led_by = next((each.led_by for each in state.ends if each.node == leader.node), (0, ""))
        older = msgspec.structs.replace(older, led_by=led_by)
    return msgspec.structs.replace(now, lossy_epoch=now.epoch, older=older)


def acknowledged(state: PartitionState) -> PartitionState | None:
    """Say no more that something may be lost; None: it is not said."""
    return msgspec.structs.replace(state, lossy_epoch=0) if state.may_have_lost else None


def describe(state: PartitionState, live: Mapping[str, NodeRecord]) -> str:
    """Tell for people who is waited for, and who has most so far; empty: nobody is asked."""
    if not asks_for_ends(state, live):
        return ""
    best, awaits = best_of(state, live), awaited(state, live)
    gone = [member.node for member in state.in_sync if has_lost(member)]
    waiting = [node for node in awaits if node not in gone]
    text = f"waits for {', '.join(waiting)}" if waiting else TO_DECIDE if awaits else "one is about to be elected"
    text = f"the copy that was in sync on node {', '.join(gone)} is lost; {text}" if gone else text
    return text if best is None else f"{text}; most of it has {best.node}: epoch {best.epoch}, up to {best.end}"


def known_epoch(state: PartitionState, noted: int, led_by: tuple[int, str]) -> int:
    """Return the epoch that a copy knows of and that the store cannot have had when a state was written: the store is
    older than the copy, or the state is not the latest. 0: there is none.

    Args:
        noted: the highest epoch that the copy has noted.
        led_by: an epoch that it was told of, and the process that led in it; (0, ""): none.
    """
    epoch, incarnation = led_by
    known = max(noted, epoch)
    if known > state.epoch:
        return known
    is_other = epoch == state.epoch and incarnation and state.incarnation not in ("", incarnation)
    return epoch if is_other else 0


def is_doubtful(state: PartitionState, noted: int, last_epoch: int, led_by: tuple[int, str]) -> bool:
    """Whether a copy may have batches of an epoch of which other copies have different ones, see
    :class:`flintmq.cluster.state.Older`.

    Who was elected by the store that was put back has batches of no epoch above the one that it was found with, and
    batches of lower epochs never come behind those of higher ones: a log that ends in a higher one is of before. Nor
    is there any doubt of a copy that was led by the same process last as the one that leads now.

    Args:
        noted: the highest epoch that the copy has noted.
        last_epoch: of its last batch; 0: it has none.
        led_by: see :attr:`flintmq.cluster.state.Ending.led_by`.
    """
    older = state.older
    if older is None or state.is_contested or noted > older.known + 1 or (led_by[1] and led_by == older.led_by):
        return False
    return 0 < last_epoch <= older.found


def contested(state: PartitionState, node: str, epoch: int) -> PartitionState:
    """Note that a node has a copy that knows of an epoch which the store does not, or of another leader of the same
    one: the store is older than the data, so nobody whom it calls in sync is known to have everything.

    Nobody leads until all who have a copy have said how far it is (power.py), the one that says this as well, whether
    or not the store knows of it. The next leader's epoch is above all that are known, and one is left out: who has not
    heard of this yet can tell that by the gap.

    Args:
        epoch: the highest that the copy knows of.
    """
    if state.is_contested and state.older is not None:
        found, known, ends = state.older.found, max(state.older.known, epoch), state.ends
    else:
        found, known, ends = state.epoch, max(state.epoch, epoch), ()
    is_known = node in (*state.holders, *state.in_sync_nodes)
    return msgspec.structs.replace(
        without_leader(state),
        epoch=known + 1,
        in_sync=tuple(each if has_lost(each) else Member(each.node, "", False) for each in state.in_sync),
        leaving=state.leaving if is_known else (*state.leaving, node),
        ends=ends,
        older=Older(found, known),
    )


def has_no_copy(state: PartitionState, live: Collection[str]) -> bool:
    """Whether no node lives that has a copy, or may have: what there was is lost, unless one comes back."""
    lost_by = {member.node for member in state.in_sync if has_lost(member)}
    return not any(node in live and node not in lost_by for node in (*state.holders, *state.in_sync_nodes))


def losses(state: PartitionState, live: Mapping[str, NodeRecord], node: str) -> list[str]:
    """Tell for people what is lost for good when a node is made the leader by hand."""
    said = heard(state, live)
    mine = said.get(node)
    gone = {member.node for member in state.in_sync if has_lost(member)}
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
        if other in gone:
            notes.append(f"node {other} had everything, and has lost its copy: what only it had is lost")
            continue
        notes += [f"node {other} {what} and does not answer: what only it has is lost"] if other != node else []
    if mine is not None and not notes:
        notes.append(f"no copy that answers has more: epoch {mine.epoch}, up to {mine.end}")
    return notes
