"""The times at which messages were stored, on the clock of due times, whatever the wall clock was set to meanwhile.

A message has the wall time at which it was stored and nothing else, and a limit of age is counted on a clock that does
not jump. So what the wall clock was set to is remembered, and since when; of a time that it has shown twice, the later
is taken: a step back may keep a message for that much longer than its limit, and no step gives one up before it.

Rules of this file: no IO, no clock; what was stored before this process is counted from as the wall clock was at its
start.

Source: docs/decisions/0005-clocks.md.
"""

from __future__ import annotations

STEP_MIN_NS = 100_000_000
"""Less than this belongs to the step before it: a clock that is hurried or held back goes by many small ones."""
STEPS_MAX = 64
"""Steps that are remembered; what is from before the oldest of them is counted as that says."""
_SLACK_NS = 100_000_000  # by which a step may be noticed late, or not be worth one


class ClockSteps:
    """Remembers how the wall clock was set."""

    __slots__ = ("_since_ns", "_shifts_ns")

    def __init__(self) -> None:
        self._shifts_ns = [0]
        self._since_ns = [0]  # on the clock of due times; that of the first is not looked at

    def moved(self, shift_ns: int, due_clock_ns: int) -> None:
        """The wall clock was set.

        Args:
            shift_ns: by how much since the start, in all: wall time minus the clock of due times.
            due_clock_ns: when that was noticed.
        """
        if abs(shift_ns - self._shifts_ns[-1]) < STEP_MIN_NS:
            self._shifts_ns[-1] = shift_ns
            return
        self._shifts_ns.append(shift_ns)
        self._since_ns.append(due_clock_ns)
        if len(self._shifts_ns) > STEPS_MAX:
            del self._shifts_ns[0], self._since_ns[0]

    def stored_ns(self, wall_ns: int) -> int:
        """Return when the wall clock showed a time, the last time that it did or will, on the clock of due times.

        Args:
            wall_ns: the time.
        """
        found_ns = latest_ns = wall_ns - self._shifts_ns[-1]
        for number in range(len(self._since_ns) - 1, 0, -1):
            since_ns = self._since_ns[number]
            if found_ns >= since_ns:
                break
            if found_ns < since_ns - _SLACK_NS:
                latest_ns = 0  # it was not shown behind this step
            found_ns = min(wall_ns - self._shifts_ns[number - 1], since_ns)
            latest_ns = max(latest_ns, found_ns)
        return latest_ns
