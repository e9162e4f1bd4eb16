"""``--status-every``: how long things took, a log line every so many of them.

Source: NSQ 1.3, apps/nsq_to_http, with github.com/bitly/timer_metrics. Other than there no two lines come within a
second.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

LINES_EVERY_S = 1.0
TIMES_MAX = 100_000
_MS_PER_S = 1000


class StatusLog:
    """The last times that were noted.

    Args:
        every: a line after so many; 0: none.
        prefix: what it begins with.
        now: seconds that never jump.
    """

    def __init__(self, every: int, prefix: str, now: Callable[[], float]) -> None:
        self._every = every
        self._prefix = prefix
        self._now = now
        self._times_s: deque[float] = deque(maxlen=min(every, TIMES_MAX))
        self._count = 0
        self._said_at = -math.inf

    def note(self, took_s: float, count: int = 1) -> None:
        """Note that ``count`` things took so long each."""
        if not self._every:
            return
        self._count += count
        self._times_s.extend([took_s] * min(count, self._every, TIMES_MAX))
        now = self._now()
        if self._count >= self._every and now >= self._said_at + LINES_EVERY_S:
            self._said_at = now
            log.info("%s", self._line(self._count))
            self._count = 0

    def _line(self, count: int) -> str:
        times = sorted(self._times_s)
        p99, p95 = _percentile(99, times) * _MS_PER_S, _percentile(95, times) * _MS_PER_S
        average = sum(times) / len(times) * _MS_PER_S
        return f"{self._prefix} finished {count} - 99th: {p99:.02f}ms - 95th: {p95:.02f}ms - avg: {average:.02f}ms"


def _percentile(percent: int, values: Sequence[float]) -> float:
    return values[min(len(values) - 1, math.ceil(percent / 100 * len(values) + 0.5))]
