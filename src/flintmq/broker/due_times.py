"""The due times of one partition: on a clock that does not jump while the process runs, and as wall time in its log.

The log outlives the process, so a batch is stored with the wall time at which it is due, by the wall clock as it is set
when the batch is written. Clocks that are set later move no delay while the process runs: of what was written under
which setting, it is noted where that begins in the log.

Rules of this file: no IO, no clock; nothing is noted unless the clock was set, and then once for a partition that is
published to with a delay. What the process did not write, its log had before: it counts as the clock was set when the
partition began here, which is at the start, or when this node began to lead it.

Source: docs/decisions/0005-clocks.md.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from flintmq.batch import Batch
from flintmq.broker.delayed import DelayedNotes

SETTINGS_MAX = 64
"""Settings of the clock that are noted; what is from before the oldest of them counts as that says."""


class DueTimes:
    """Makes wall time of due times on their way to the log of a partition, and due times of what is read from it.

    Args:
        notes: what knows how the clock is set.
    """

    __slots__ = ("_firsts", "_notes", "_shifts_ns")

    def __init__(self, notes: DelayedNotes) -> None:
        self._notes = notes
        self._firsts = [0]  # sequences from which on the shifts hold
        self._shifts_ns = [notes.shift_ns]

    def to_store(self, due_ns: int, first: int) -> int:
        """Return the wall time with which a batch is written.

        Args:
            due_ns: on the clock of due times; 0: at once.
            first: sequence of its first message, at which the log ends.
        """
        if not due_ns:
            return 0
        shift_ns, firsts, shifts = self._notes.shift_ns, self._firsts, self._shifts_ns
        if firsts[-1] >= first:  # the log was cut back since, or nothing could be written
            count = bisect_left(firsts, first)
            del firsts[count:], shifts[count:]
        if shifts[-1] != shift_ns:
            firsts.append(first)
            shifts.append(shift_ns)
            if len(firsts) > SETTINGS_MAX:
                del firsts[1], shifts[0]
        return max(1, due_ns + shift_ns)  # 0 would say that it has no delay

    def of(self, batch: Batch) -> int:
        """Return when a batch is due, on the clock of due times; 0: at once."""
        due_ns: int = batch.due_ns
        if not due_ns:
            return 0
        return due_ns - self._shifts_ns[bisect_right(self._firsts, batch.first) - 1]
