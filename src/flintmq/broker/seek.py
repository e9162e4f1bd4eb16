"""The acts of an operator on a channel: let it go on at another place, and finish single messages.

A place is named by time, by offset or by count.

Texts::

    timestamp:<seconds since 1970>   the first message with this timestamp or a later one
    virtual_queue:<bytes>            the message whose frame contains this virtual offset, or the first one behind it
    msgcount:<number>                the message with this number in the partition, counted from 1; 0 is the first, too
    special:-1                       the end

Rules of this file: no IO but the log's reads, of which a search makes a few; a place that is not stored any more is the
first that is, and one that is not stored yet is the end.

Source: Youzan's TCP protocol (SUB_ADVANCED), Youzan's HTTP API (/channel/setoffset).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from flintmq.broker.channel import Channel
from flintmq.broker.partition import Partition
from flintmq.errors import FlintError
from flintmq.limits import CHANNEL_HOLES_MAX

TIMESTAMP, OFFSET, COUNT, SPECIAL = "timestamp", "virtual_queue", "msgcount", "special"
_PLACE = re.compile(r"(timestamp|virtual_queue|msgcount):([0-9]{1,18})|(special):(-1)", re.ASCII)
_NS_PER_S = 1_000_000_000
_SHOWN_MAX = 100


class BadPlace(ValueError):
    """A text names no place."""


class TooManyHoles(FlintError):
    """Too many single messages that a channel's cursor has not reached are left out already."""

    def __str__(self) -> str:
        return (
            f"channel {self.args[0]}: {CHANNEL_HOLES_MAX} waiting messages are finished already; let some be consumed"
        )


@dataclass(frozen=True, slots=True)
class Place:
    """A place in any partition."""

    kind: Literal["timestamp", "virtual_queue", "msgcount", "special"]
    value: int

    @property
    def is_of_one_partition(self) -> bool:
        """Whether it means something else in every partition."""
        return self.kind in (OFFSET, COUNT)


def parse_place(text: str) -> Place:
    """Read a place.

    Raises:
        BadPlace: the text is none.
    """
    found = _PLACE.fullmatch(text)
    if found is None:
        raise BadPlace(f"invalid consume offset:{text[:_SHOWN_MAX]}")
    kind = cast(Literal["timestamp", "virtual_queue", "msgcount", "special"], found[1] or found[3])
    return Place(kind, int(found[2] or found[4]))


def sequence_at(place: Place, partition: Partition) -> int:
    """The sequence of the first message at or behind a place; the end's when there is none.

    Raises:
        StorageError: the log cannot be read now.
    """
    log = partition.log
    if place.kind == TIMESTAMP:
        return log.sequence_at(place.value * _NS_PER_S)
    if place.kind == OFFSET:
        return log.sequence_at_offset(place.value)
    if place.kind == COUNT:
        return max(1, place.value)
    return log.next_sequence


def seek(channel: Channel, place: Place, sequence: int) -> None:
    """Let a channel go on at a place: what is stored from there on is delivered as if it never had been.

    What consumers hold of it is no longer in flight; what was finished before it was delivered comes, too. When the
    place is behind the oldest message that the channel has not passed, this is a skip, and everything older counts as
    finished; else it is a replay, which changes nothing about older messages that are deferred or stuck.

    Args:
        sequence: that :func:`sequence_at` found.
    """
    move(channel, sequence, finish_older=place.kind == SPECIAL or min(sequence, channel.end) > channel.floor)


def move(channel: Channel, sequence: int, finish_older: bool) -> None:
    """Set a channel's floor and cursor, see :func:`seek`.

    Args:
        finish_older: whether older messages that were spilled count as finished; else they stay as they are.
    """
    channel.restart_at(max(channel.log.start_sequence, min(sequence, channel.end)), finish_older)


def drop(channel: Channel, sequence: int) -> bool | None:
    """Finish a message wherever it is, though no consumer did; False when it is not there, or finished before.

    Returns:
        None when it may be spilled, which only the database knows.

    Raises:
        TooManyHoles: it waits, and too many are left out already.
        StorageError: the log cannot be read now; nothing has changed.
    """
    return _leave_out(channel, sequence) if sequence >= channel.next else channel.drop(sequence)


def drop_deferred(channel: Channel) -> None:
    """Finish everything that waits for its due time, though no consumer did; what is in flight or has come due stays.

    A message published with a delay that the cursor has not reached yet waits for consumers like others, and stays.
    """
    channel.drop_deferred()


def drop_spilled(channel: Channel, sequence: int, pack: int, generation: int) -> bool | None:
    """As :func:`drop`, when the database has the message in a pack; None when it has to be asked again."""
    dropped = drop(channel, sequence)
    return channel.window.drop_stored(sequence, pack, generation) if dropped is None else dropped


def _leave_out(channel: Channel, sequence: int) -> bool:
    """Never deliver a message that the cursor has not reached."""
    holes = channel.window.holes
    if sequence >= channel.log.committed_sequence or any(first <= sequence < end for first, end in holes):
        return False
    batch = channel.log.read(sequence)
    if batch is None or batch.first > sequence:
        return False
    if len(holes) >= CHANNEL_HOLES_MAX:
        raise TooManyHoles(channel.name)
    channel.leave_out(sequence, sequence + 1)
    return True
