"""The epochs of a log, and the place up to which two logs agree.

A history is a list of (epoch, first sequence), both ascending: from that sequence on, up to where the next entry
begins or the log ends, the log has what the leader of that epoch had there. An epoch has one leader, and a leader
never changes what it wrote; so of two logs that both know an epoch, each has up to where that epoch ends in it a prefix
of one and the same log.

::

    leader     (1, 0)          (3, 40)              (4, 70)         end 90
    follower   (1, 0)     (2, 30)     end 45                        largest common epoch: 1
                               |                                    it ends at 30 here, at 40 there: they agree up to 30

A leader notes its epoch before it writes anything. Such an entry without a batch says nothing that others do not say;
it goes when the log gets batches of others there, which may be of an older epoch: of one who led before, was not heard
when this one was elected, and leads again.

Rules of this file: nothing is decided by how long a log is. A place that is too low would throw away what was
acknowledged, one that is too high would keep what never was; so it is exact, or None.

Source: docs/decisions/0017; Kafka's KIP-101 and KIP-279 for the idea.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TypeAlias

from flintmq.wire.peer import HISTORY_MAX

History: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class LogShape:
    """A log as far as others have to know it.

    Attributes:
        history: its epochs; entries of what was dropped at its start may be missing.
        start: of its first message that is still there.
        end: one past its last one.
        offset_bytes: virtual position of ``start``.
    """

    history: History
    start: int
    end: int
    offset_bytes: int = 0


def cut(history: History, end: int) -> list[tuple[int, int]]:
    """Return the history of a log that now ends at ``end``: of epochs that have something before it."""
    return [entry for entry in history if entry[1] < end]


def trimmed(history: History, start: int) -> list[tuple[int, int]]:
    """Return the history of a log that now begins at ``start``: without epochs that ended before.

    One that ends just there stays: a follower may end there, too.
    """
    kept = 0
    while kept + 1 < len(history) and history[kept + 1][1] < start:
        kept += 1
    return list(history[kept:])


def latest(history: History) -> list[tuple[int, int]]:
    """Return as much of a history as a frame has room for."""
    return list(history[-HISTORY_MAX:])


def noted(history: History, epoch: int, end: int) -> list[tuple[int, int]]:
    """Return the history of a log that gets a batch of an epoch at its end, or the leader of one.

    Raises:
        ValueError: it has a batch of a later epoch, or the end is not its end.
    """
    if not is_history(history, end):
        raise ValueError(f"history {history[-3:]} of a log that ends at {end}")
    kept = cut(history, end)
    if kept and epoch < kept[-1][0]:
        raise ValueError(f"epoch {epoch} at {end}, after epoch {kept[-1][0]} from {kept[-1][1]} on")
    return kept if kept and epoch == kept[-1][0] else [*kept, (epoch, end)]


def is_history(history: History, end: int) -> bool:
    """Whether epochs and sequences ascend as they must, within a log that ends at ``end``."""
    ascends = all(one[0] < other[0] and one[1] < other[1] for one, other in pairwise(history))
    return ascends and (not history or history[-1][1] <= end)


def _epoch_ends(log: LogShape) -> dict[int, int]:
    history = cut(log.history, log.end)
    ends = [first for _, first in history[1:]]
    return dict(zip_longest((epoch for epoch, _ in history), ends, fillvalue=log.end)) if history else {}


def agreement(leader: LogShape, follower: LogShape) -> int | None:
    """Return the sequence up to which the follower's log is a prefix of the leader's; None: it has to start over.

    What the follower lacks from there on the leader has. An empty log agrees wherever the leader's is.
    """
    if follower.start == follower.end:
        return follower.end if leader.start <= follower.end <= leader.end else None
    leaders, followers = _epoch_ends(leader), _epoch_ends(follower)
    common = leaders.keys() & followers.keys()
    if not common:
        return None
    epoch = max(common)
    place = min(leaders[epoch], followers[epoch])
    return place if place >= max(leader.start, follower.start) else None
