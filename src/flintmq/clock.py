"""The only reader of time. Everything else is handed ``now``.

Two clocks, never mixed: *wall* time is for the timestamp field of messages and for due times that must survive a
restart; *monotonic* time is for deadlines of this process. On an event loop the monotonic clock is ``loop.time()``.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Reads time."""

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch; may jump."""
        ...

    def monotonic_ns(self) -> int:
        """Nanoseconds since an arbitrary point; never goes back."""
        ...


class SystemClock:
    """The operating system's clocks."""

    def wall_ns(self) -> int:
        return time.time_ns()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()
