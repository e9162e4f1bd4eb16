"""The load of partitions, as their leaders tell, and the moves that let all nodes carry their part of it.

Rules of this file: no IO, no clock; what is decided here makes the greatest difference smaller with every step, so that
it comes to rest.

Source: reference/youzan.md 1.6 (a load of writes and of what is stored; moved within hours of the day).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flintmq.cluster.view import PartitionId, View

RATE_OVER_NS = 300_000_000_000
"""A rate is that of the last five minutes or so."""
STORED_OVER_S = 86_400.0
"""Bytes that are stored count as if they were written once in so long."""
COPY_LOAD = 100.0
"""Of a copy to which nothing is written, in bytes per second: many of them are a load as well."""


@dataclass(slots=True)
class _Known:
    end_bytes: int
    at_ns: int
    rate: float = 0.0
    stored_bytes: int = 0


class Loads:
    """The load of each partition in bytes per second."""

    def __init__(self) -> None:
        self._known: dict[PartitionId, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def told(self, partition: PartitionId, end_bytes: int, stored_bytes: int, now_ns: int) -> None:
        """Take note of what its leader tells.

        Args:
            end_bytes: virtual offset of the end of the log; it only grows.
            stored_bytes: of the log on disk.
        """
        known = self._known.get(partition)
        if known is None or end_bytes < known.end_bytes:
            self._known[partition] = _Known(end_bytes, now_ns, 0.0 if known is None else known.rate, stored_bytes)
            return
        passed_ns = now_ns - known.at_ns
        if passed_ns <= 0:
            return
        rate = (end_bytes - known.end_bytes) * 1e9 / passed_ns
        weight = min(1.0, passed_ns / RATE_OVER_NS)
        known.rate += (rate - known.rate) * weight
        known.end_bytes, known.at_ns, known.stored_bytes = end_bytes, now_ns, stored_bytes

    def forget_all_but(self, partitions: Mapping[PartitionId, object]) -> None:
        """Forget partitions that there are no longer."""
        for partition in [each for each in self._known if each not in partitions]:
            del self._known[partition]

    def of(self, partition: PartitionId) -> float:
        """Return the load of one copy of a partition."""
        known = self._known.get(partition)
        return COPY_LOAD if known is None else COPY_LOAD + known.rate + known.stored_bytes / STORED_OVER_S

    def of_nodes(self, view: View) -> tuple[dict[str, float], dict[str, float]]:
        """Return the load of what each node leads, and of what it has."""
        led = {node: sum(map(self.of, view.led.get(node, ()))) for node in view.nodes}
        held = {node: sum(map(self.of, view.held.get(node, ()))) for node in view.nodes}
        return led, held

    def of_topics(self, view: View, count: int) -> list[tuple[str, float]]:
        """Return the topics with the greatest load, and that, the greatest first."""
        totals: dict[str, float] = {}
        for partition in view.partitions:
            totals[partition[0]] = totals.get(partition[0], 0.0) + self.of(partition)
        return sorted(totals.items(), key=lambda pair: (-pair[1], pair[0]))[:count]
