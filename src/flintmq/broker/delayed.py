"""Messages of a partition that were published with a delay, while the cursors of its channels have not reached them.

They lie in the log among those that wait, so a channel behind a backlog would count them as waiting. Here it is noted
where they are, so that they count as deferred at once.

Rules of this file: one entry for each batch, and none for batches without a delay; no clock: whoever has one says what
time it is; what a start finds in the log is not noted, it counts as waiting until a cursor comes to it.

Source: NSQ's TCP protocol (depth and deferred messages).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

ENTRIES_MAX = 16_384  # of one partition, and
ENTRIES_TOTAL = 262_144  # of all; what is beyond counts as waiting until a cursor comes to it
_CLEANING_INTERVAL = 1024


class DelayedNotes:
    """Figures that the notes of all partitions have in common.

    Attributes:
        wall_ns: the clock of due times, as it was told last.
        shift_ns: by how much the wall clock has been set since the start: wall time minus that clock.
        entry_count: of all partitions.
    """

    __slots__ = ("entry_count", "shift_ns", "wall_ns")

    def __init__(self) -> None:
        self.wall_ns = 0
        self.shift_ns = 0
        self.entry_count = 0


class DelayedAhead:
    """The delayed batches of one partition that are not due.

    Attributes:
        refused_count: batches that were not noted because too many were.
    """

    __slots__ = ("_before", "_dues", "_ends", "_firsts", "_next_due_ns", "_notes", "refused_count")

    def __init__(self, notes: DelayedNotes | None = None) -> None:
        self._notes = notes or DelayedNotes()
        self._firsts: list[int] = []
        self._ends: list[int] = []
        self._dues: list[int] = []
        self._before: list[int] = [0]  # messages in all entries before each
        self._next_due_ns = 0
        self.refused_count = 0

    def __bool__(self) -> bool:
        return bool(self._firsts)

    @property
    def wants_cleaning(self) -> bool:
        """Whether to look for what can be forgotten: when it is full, and then not with every batch."""
        return self.is_full and self.refused_count % _CLEANING_INTERVAL == 0

    @property
    def is_full(self) -> bool:
        """Whether nothing more is noted."""
        return len(self._firsts) >= ENTRIES_MAX or self._notes.entry_count >= ENTRIES_TOTAL

    def add(self, first: int, end: int, due_ns: int) -> None:
        """Note a batch; it lies behind all that were noted before."""
        if self._firsts and self._ends[-1] == first and self._dues[-1] == due_ns:
            self._ends[-1] = end
            self._before[-1] += end - first
            return
        if self.is_full:
            self.refused_count += 1
            return
        self._notes.entry_count += 1
        self._next_due_ns = min(self._next_due_ns, due_ns) if self._firsts else due_ns
        self._firsts.append(first)
        self._ends.append(end)
        self._dues.append(due_ns)
        self._before.append(self._before[-1] + end - first)

    def count(self, start: int, end: int) -> int:
        """Messages from ``start`` to ``end`` (exclusive) that are not due."""
        if not self._firsts or start >= end:
            return 0
        if self._next_due_ns <= self._notes.wall_ns:
            self.forget_below(0)
        return max(0, self._count_below(end) - self._count_below(start))

    def _count_below(self, sequence: int) -> int:
        index = bisect_right(self._firsts, sequence)
        passed = self._before[index]
        return passed - max(0, self._ends[index - 1] - sequence) if index else 0

    def clear(self) -> None:
        """Forget everything."""
        self.forget_below(1 << 62)

    def forget_from(self, sequence: int) -> None:
        """Forget what lies at or beyond a sequence at which a batch begins: it is to be gone from the log."""
        count = bisect_left(self._firsts, sequence)
        self._notes.entry_count -= len(self._firsts) - count
        for notes in (self._firsts, self._ends, self._dues):
            del notes[count:]
        del self._before[count + 1 :]
        if self._ends and self._ends[-1] > sequence:
            self._before[-1] -= self._ends[-1] - sequence
            self._ends[-1] = sequence
        self._next_due_ns = min(self._dues, default=0)

    def forget_below(self, sequence: int) -> None:
        """Forget what is due, and what lies below a sequence."""
        wall_ns = self._notes.wall_ns
        start = bisect_left(self._ends, sequence + 1)
        kept = [index for index in range(start, len(self._dues)) if self._dues[index] > wall_ns]
        self._notes.entry_count -= len(self._dues) - len(kept)
        self._firsts = [self._firsts[index] for index in kept]
        self._ends = [self._ends[index] for index in kept]
        self._dues = [self._dues[index] for index in kept]
        sizes = (end - first for first, end in zip(self._firsts, self._ends, strict=True))
        self._before = list(accumulate(sizes, initial=0))
        self._next_due_ns = min(self._dues, default=0)
