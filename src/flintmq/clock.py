"""The only reader of time. Everything else is handed ``now``.

Three clocks, never mixed: *wall* time is for the timestamp field of messages and for due times that must survive a
restart; *monotonic* time is for deadlines of this process; *boot* time is for what others count meanwhile, such as a
lease: it goes on while the machine is suspended. On an event loop the monotonic clock is ``loop.time()``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

WALL_NS_MAX = (1 << 63) - (1 << 58)
"""In 2253: nanoseconds are signed 64 bits on the wire and in the database, and due times lie up to nine years ahead."""


class Clock(Protocol):
    """Reads time."""

    def wall_ns(self) -> int:
        """Return nanoseconds since the Unix epoch, 0 to ``WALL_NS_MAX``; may jump."""
        ...

    def monotonic_ns(self) -> int:
        """Return nanoseconds since an arbitrary point; never goes back."""
        ...

    def boottime_ns(self) -> int:
        """Return nanoseconds since an arbitrary point, those in which the machine was suspended among them; never
        goes back.
        """
        ...


def _boottime() -> Callable[[], int]:
    """The clock that counts suspends; where the system has none, the monotonic one."""
    number = getattr(time, "CLOCK_BOOTTIME", None)
    if number is None:
        return time.monotonic_ns
    try:
        time.clock_gettime_ns(number)
    except OSError:  # an older kernel
        return time.monotonic_ns
    return partial(time.clock_gettime_ns, number)


class SystemClock:
    """The operating system's clocks."""

    def wall_ns(self) -> int:
        # a machine without a battery may begin before 1970: then it is 1970 until its clock is set
        now_ns = time.time_ns()
        return now_ns if 0 <= now_ns <= WALL_NS_MAX else min(max(now_ns, 0), WALL_NS_MAX)

    monotonic_ns = staticmethod(time.monotonic_ns)  # read for every command that takes a while
    boottime_ns = staticmethod(_boottime())
