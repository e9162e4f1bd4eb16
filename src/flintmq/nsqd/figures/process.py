"""Figures of this process: memory and garbage collection, in Python's terms under NSQ's names.

Source: NSQ's HTTP API, NSQ's latencies.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable

from flintmq.clock import Clock
from flintmq.net.metrics import resident_bytes

_PAUSE_COUNT = 256  # of the last collections, as Go's runtime keeps
_FULL_GENERATION = 2


class GcPauses:
    """Measures for how long the last full garbage collections stopped this process.

    Args:
        clock: of the daemon.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun_ns = 0
        self._pauses_ns: deque[int] = deque(maxlen=_PAUSE_COUNT)

    def start(self) -> None:
        """Begin to measure."""
        gc.callbacks.append(self._collecting)

    def stop(self) -> None:
        """Measure no more."""
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, about: dict[str, int]) -> None:
        if about["generation"] != _FULL_GENERATION:
            return
        if phase == "start":
            self._begun_ns = self._clock.monotonic_ns()
        else:
            self._pauses_ns.append(self._clock.monotonic_ns() - self._begun_ns)

    def percentiles_usec(self, percents: Iterable[float]) -> list[int]:
        """Pauses at ``percents``, chosen as nsqd does; zeros when there was none."""
        pauses = sorted(self._pauses_ns)
        if not pauses:
            return [0 for _ in percents]
        last = len(pauses) - 1
        return [pauses[min(last, int(percent / 100 * len(pauses) + 0.5))] // 1000 for percent in percents]


def memory(pauses: GcPauses) -> dict[str, int]:
    """nsqd's memory figures in Python's terms: blocks of its allocator, resident memory, full collections.

    What only Go's collector has is 0.
    """
    pause_100, pause_99, pause_95 = pauses.percentiles_usec((100, 99, 95))
    return {
        "heap_objects": sys.getallocatedblocks(),
        "heap_idle_bytes": 0,
        "heap_in_use_bytes": resident_bytes(),
        "heap_released_bytes": 0,
        "gc_pause_usec_100": pause_100,
        "gc_pause_usec_99": pause_99,
        "gc_pause_usec_95": pause_95,
        "next_gc_bytes": 0,
        "gc_total_runs": sum(generation["collections"] for generation in gc.get_stats()),
    }
