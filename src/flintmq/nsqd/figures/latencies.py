"""Latencies from publishing to FIN, as they are now.

Source: reference/nsq.md 2.1 (``e2e_processing_latency``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flintmq.broker.channel import Channel
from flintmq.broker.latency import Summary
from flintmq.broker.topic import Topic

NO_LATENCY: dict[str, Any] = {"count": 0, "percentiles": None}


class Latencies:
    """Latencies from publishing to FIN as they are now, for one answer.

    Args:
        quantiles: which to show; none when they are not kept.
        wall_ns: wall time now.
    """

    def __init__(self, quantiles: Iterable[float] = (), wall_ns: int = 0) -> None:
        self._quantiles = sorted(quantiles, reverse=True)  # as nsqd has them
        self._wall_ns = wall_ns
        self._summaries: dict[Channel, Summary] = {}

    def of_channel(self, parts: Sequence[Channel]) -> dict[str, Any]:
        """``e2e_processing_latency`` of one channel, its partitions taken together."""
        return self._row([self._summary(part) for part in parts]) if self._quantiles else NO_LATENCY

    def of_topic(self, topic: Topic) -> dict[str, Any]:
        """``e2e_processing_latency`` of all channels of a topic; to be asked for behind theirs."""
        if not self._quantiles:
            return NO_LATENCY
        parts = [channel for partition in topic.partitions.values() for channel in partition.channels.values()]
        row = self._row([self._summary(part) for part in parts])
        self._summaries.clear()  # kept from its channels' turn to its own
        return row

    def forget(self) -> None:
        """Keep nothing of the channels that were asked for until now."""
        self._summaries.clear()

    def _summary(self, channel: Channel) -> Summary:
        summary = self._summaries.get(channel)
        if summary is None:
            summary = Summary() if channel.latency is None else channel.latency.summary(self._wall_ns)
            self._summaries[channel] = summary
        return summary

    def _row(self, summaries: Sequence[Summary]) -> dict[str, Any]:
        whole = Summary.of(summaries)
        values = whole.values_at(self._quantiles)
        pairs = zip(self._quantiles, values, strict=True)
        return {"count": whole.count, "percentiles": [{"quantile": q, "value": value} for q, value in pairs]}
