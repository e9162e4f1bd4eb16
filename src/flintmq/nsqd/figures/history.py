"""Bytes that were published to each partition in each of the last hours.

Rules of this file: nothing is counted per message; at the full hour what partitions have counted is written down.

Source: Youzan's HTTP API (``/message/historystats``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from flintmq.broker.partition import Partition
from flintmq.clock import Clock

HOURS = 22  # that are shown, of a day without the two that are not over
_HOUR_NS = 3_600_000_000_000
_MARGIN_S = 0.1  # a timer that comes early would find the hour not over


class _Hours:
    """Of one partition: bytes until the last full hour, and what each hour before it has added."""

    __slots__ = ("added", "until")

    def __init__(self) -> None:
        self.until = 0
        self.added: deque[int] = deque(maxlen=HOURS)


class HourlySizes:
    """Bytes of bodies published per partition and hour of this process.

    Args:
        partitions: all there are now.
    """

    def __init__(self, clock: Clock, partitions: Callable[[], Iterable[Partition]]) -> None:
        self._clock = clock
        self._partitions = partitions
        self._hours: dict[Partition, _Hours] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to watch the clock."""
        left_s = (_HOUR_NS - self._clock.wall_ns() % _HOUR_NS) / 1e9 + _MARGIN_S
        self._timer = asyncio.get_running_loop().call_later(left_s, self._look)

    def stop(self) -> None:
        """Watch it no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self.hour_ended()
        self.start()

    def hour_ended(self) -> None:
        """Write down what the hour that is over has added."""
        before, self._hours = self._hours, {}
        for partition in self._partitions():
            if partition.bytes_count:
                hours = self._hours[partition] = before.get(partition) or _Hours()
                hours.added.append(partition.bytes_count - hours.until)
                hours.until = partition.bytes_count

    def of(self, partition: Partition) -> list[int]:
        """Return what each of the last :data:`HOURS` full hours has added, the latest last; 0 before the process."""
        hours = self._hours.get(partition)
        added = () if hours is None else tuple(hours.added)
        return [0] * (HOURS - len(added)) + list(added)

    def last_hour(self, partition: Partition) -> int:
        """Return what the last full hour has added."""
        hours = self._hours.get(partition)
        return hours.added[-1] if hours is not None and hours.added else 0
