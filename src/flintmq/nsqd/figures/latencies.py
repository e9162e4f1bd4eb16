"""Latencies from publishing to FIN, as they are now.

Source: NSQ's HTTP API (``e2e_processing_latency``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flintmq.broker.channel import Channel
from flintmq.broker.latency import Summary
from flintmq.broker.topic import Topic


@dataclass(frozen=True, slots=True)
class Latency:
    """The time that messages took from publishing to FIN.

    Attributes:
        count: of messages.
        percentiles: quantile and time in ns; None when they are not kept, and where there is no channel.
    """

    count: int = 0
    percentiles: Sequence[tuple[float, int]] | None = None


_NOT_KEPT = Latency()


class Latencies:
    """Sums up latencies as they are now, for one answer.

    Args:
        quantiles: which to show; none when they are not kept.
        wall_ns: wall time now.
    """

    def __init__(self, quantiles: Iterable[float] = (), wall_ns: int = 0) -> None:
        self._quantiles = sorted(quantiles, reverse=True)  # as nsqd has them
        self._wall_ns = wall_ns
        self._summaries: dict[Channel, Summary] = {}

    def of_channel(self, parts: Sequence[Channel]) -> Latency:
        """Sum up the latency of one channel, its partitions taken together, or of several channels."""
        return self._sum([self._summary(part) for part in parts]) if self._quantiles else _NOT_KEPT

    def of_topic(self, topic: Topic) -> Latency:
        """Sum up the latency of all channels of a topic; to be asked for behind theirs."""
        if not self._quantiles:
            return _NOT_KEPT
        parts = [channel for partition in topic.partitions.values() for channel in partition.channels.values()]
        latency = self._sum([self._summary(part) for part in parts])
        self._summaries.clear()  # kept from its channels' turn to its own
        return latency

    def forget(self) -> None:
        """Keep nothing of the channels that were asked for until now."""
        self._summaries.clear()

    def _summary(self, channel: Channel) -> Summary:
        summary = self._summaries.get(channel)
        if summary is None:
            summary = Summary() if channel.latency is None else channel.latency.summary(self._wall_ns)
            self._summaries[channel] = summary
        return summary

    def _sum(self, summaries: Sequence[Summary]) -> Latency:
        if not summaries:
            return _NOT_KEPT
        whole = Summary.of(summaries)
        return Latency(whole.count, list(zip(self._quantiles, whole.values_at(self._quantiles), strict=True)))
