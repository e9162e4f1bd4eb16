"""Timers without an event loop: a heap that somebody looks at.

Rules of this file:

- Nothing here waits, and nothing is locked: the owner's lock is held by whoever calls.
- A call is over when it has returned, or failed: one that an interrupt (Ctrl-C) broke off is made again, so what is
  called may come twice.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from flintmq.clock import Clock

CANCELLED_COUNT_MAX = 100


class CallTimer:
    """A call that is to come."""

    __slots__ = ("when", "is_cancelled", "_callback", "_args", "_timers")

    def __init__(self, timers: Timers, when: float, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.when = when
        self.is_cancelled = False
        self._timers = timers
        self._callback = callback
        self._args = args

    def cancel(self) -> None:
        """Let it not come."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self._timers.note_cancelled()

    def run(self) -> None:
        """Make the call."""
        self._callback(*self._args)


class Timers:
    """Callbacks and when they are due; a :class:`flintmq.client.core.timers.Timers`.

    Args:
        clock: its monotonic time is the time of everything here.
    """

    def __init__(self, clock: Clock) -> None:
        self._monotonic_ns = clock.monotonic_ns
        self._heap: list[tuple[float, int, CallTimer]] = []
        self._number = 0
        self._cancelled_count = 0

    def time(self) -> float:
        """Seconds on the clock that everything here is measured by."""
        return self._monotonic_ns() * 1e-9

    def call_at(self, when: float, callback: Callable[..., object], /, *args: Any) -> CallTimer:
        """Have ``callback(*args)`` called when it is time."""
        timer = CallTimer(self, when, callback, args)
        self._number += 1  # of equal times the first comes first
        heappush(self._heap, (when, self._number, timer))
        return timer

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> CallTimer:
        """Have ``callback(*args)`` called in ``delay`` seconds."""
        return self.call_at(self.time() + delay, callback, *args)

    def run_due(self) -> None:
        """Make the calls that are due now; not those that they schedule."""
        if not self._heap:
            return
        now = self.time()
        last = self._number
        self._drop_cancelled()
        while self._heap and self._heap[0][0] <= now and self._heap[0][1] <= last:
            timer = self._heap[0][2]
            try:
                timer.run()
            except Exception:
                timer.cancel()
                raise
            timer.cancel()
            self._drop_cancelled()

    def next_at(self) -> float | None:
        """Return when the next call is due, or None."""
        self._drop_cancelled()
        return self._heap[0][0] if self._heap else None

    def _drop_cancelled(self) -> None:
        while self._heap and self._heap[0][2].is_cancelled:
            heappop(self._heap)
            self._cancelled_count -= 1

    def note_cancelled(self) -> None:
        """Count a cancelled timer, and sweep when there are too many of them."""
        self._cancelled_count += 1
        if self._cancelled_count > CANCELLED_COUNT_MAX and self._cancelled_count > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].is_cancelled]
            heapify(self._heap)
            self._cancelled_count = 0
