"""Tell in a daemon's log what goes wrong again and again: at once, and the same again seldom, with how often it was.

A disk that stays full fails every flush, several times a second, and the log may be on that disk; a client that is
refused comes back at once.
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

    def tell(self, problem: object, level: int = logging.ERROR, example: str = "") -> None:
        """Write a line, unless it was written a moment ago.

        Args:
            problem: its text is the line.
            example: whom it was with this time, which makes it no other line.
        """
        line, now_ns = str(problem), self._clock.monotonic_ns()
        told_ns, count = self._told.pop(line, (now_ns - AGAIN_NS, 0))
        if now_ns - told_ns < AGAIN_NS:
            self._told[line] = told_ns, count + 1
            return
        more = f" ({count} times more since this was said last)" if count else ""
        log.log(level, "%s%s%s", line, example and f": {example}", more)
        self._told[line] = now_ns, 0
        if len(self._told) > LINES_MAX:
            del self._told[next(iter(self._told))]
