"""Tell in nsqd's log what could not be read or written: at once, and the same again seldom, with how often it was.

A disk that stays full fails every flush, several times a second, and the log may be on that disk.
"""

from __future__ import annotations

import logging

from flintmq.clock import Clock

log = logging.getLogger(__name__)

AGAIN_NS = 10_000_000_000
"""Nanoseconds before a line is written again."""
LINES_MAX = 256
"""Different lines that are remembered; of more than these the oldest are written again sooner."""


class Problems:
    """Writes each problem to the log."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: dict[str, tuple[int, int]] = {}  # monotonic time of the last line, and how often it was since

    def tell(self, error: Exception) -> None:
        """Write a line, unless it was written a moment ago."""
        line, now_ns = str(error), self._clock.monotonic_ns()
        told_ns, count = self._told.pop(line, (now_ns - AGAIN_NS, 0))
        if now_ns - told_ns < AGAIN_NS:
            self._told[line] = told_ns, count + 1
            return
        if count:
            log.error("%s (%d times more since this was said last)", line, count)
        else:
            log.error("%s", line)
        self._told[line] = now_ns, 0
        if len(self._told) > LINES_MAX:
            del self._told[next(iter(self._told))]
