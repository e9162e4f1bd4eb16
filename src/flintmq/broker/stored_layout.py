"""The layout of the messages that a log has: what their topic was can be read from that, where nothing else tells.

Rules of this file: a topic has partitions for its life, or never, so that all of its messages have ids of one kind; and
it keeps headers once it has them, so that those with headers are behind those without.

Source: docs/decisions/0001.
"""

from __future__ import annotations

from typing import NamedTuple

from flintmq.batch import EXTENDED, LAYOUT_FLAGS
from flintmq.storage import PartitionLog


class StoredLayout(NamedTuple):
    """Describes the messages of one log.

    Attributes:
        flags: of the last one, RAW_IDS and EXTENDED; 0 of a log that has none.
        headers_from: the first sequence with headers, or with none so far the one that is written next; 0: all have.
    """

    flags: int
    headers_from: int


def stored_layout(log: PartitionLog) -> StoredLayout:
    """Read what is needed of a log. Blocks.

    Raises:
        StorageError: a file cannot be read.
    """
    first, end = log.start_sequence, log.next_sequence
    if first >= end:
        return StoredLayout(0, 0)
    last = end - 1
    flags = _flags_at(log, last, 0)
    if not flags & EXTENDED:
        return StoredLayout(flags, end)
    if _flags_at(log, first, flags) & EXTENDED:
        return StoredLayout(flags, 0)
    while last - first > 1:  # first has none, last has
        middle = (first + last) // 2
        if _flags_at(log, middle, flags) & EXTENDED:
            last = middle
        else:
            first = middle
    return StoredLayout(flags, last)


def _flags_at(log: PartitionLog, sequence: int, at_end: int) -> int:
    batch = log.read(sequence)
    return at_end if batch is None else batch.header.flags & LAYOUT_FLAGS
