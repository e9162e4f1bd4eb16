"""Delays of nsqd's event loop: a timer that notes how late it is called.

A turn of the loop that takes long delays everybody. The timer is late by what is left of such a turn when it comes due,
so turns longer than its interval are always seen, shorter ones now and then.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left

from flintmq.net.metrics import Family, labels_of

_INTERVAL_S = 0.02
BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class LoopDelays:
    """Counts delays of the running loop by their length."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look."""
        self._due = self._loop.time() + _INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._counts[bisect_left(BOUNDS_S, self._loop.time() - self._due)] += 1
        self.start()

    def counts_over(self) -> list[int]:
        """For each of ``BOUNDS_S`` how many delays were longer."""
        return [sum(self._counts[number + 1 :]) for number in range(len(BOUNDS_S))]

    def family(self) -> Family:
        """Return the delays for Prometheus."""
        about = "How often something on the event loop came late by more than the label's seconds, seen by samples"
        family = Family("flintmq_nsqd_loop_delays_total", "counter", about)
        for bound_s, count in zip(BOUNDS_S, self.counts_over(), strict=True):
            family.add(count, labels_of(over=f"{bound_s:g}"))
        return family
