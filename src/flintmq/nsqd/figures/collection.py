"""The one collection of what is counted of topics and channels; :mod:`flintmq.nsqd.figures` says who writes it down.

Rules of this file: figures are those of the moment in which they are collected, partitions added up; nothing here knows
how anything is called or written elsewhere.

Source: NSQ's HTTP API (``/stats``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flintmq.broker.channel import Channel
from flintmq.broker.partition import Partition
from flintmq.broker.subscription import Locality
from flintmq.broker.topic import Topic
from flintmq.nsqd.client import Client
from flintmq.nsqd.figures import limits
from flintmq.nsqd.figures.latencies import Latencies, Latency
from flintmq.topic_meta import TopicMeta


@dataclass(frozen=True, slots=True)
class ChannelFigures:
    """One channel.

    Attributes:
        backend_depth: the same as depth; 0 when it is ephemeral.
        deliveries: by how near the consumer was.
        limits: what its limits have done, by field of /stats.
        skipped: whether it finishes everything without delivering it.
        clients: who consumes it.
        parts: its part in each partition.
    """

    name: str
    depth: int
    backend_depth: int
    in_flight_count: int
    deferred_count: int
    message_count: int
    requeue_count: int
    timeout_count: int
    finish_count: int
    filtered_count: int
    deliveries: Mapping[Locality, int]
    limits: Mapping[str, int]
    paused: bool
    skipped: bool
    latency: Latency
    clients: Sequence[Client]
    parts: Sequence[Channel]

    @property
    def client_count(self) -> int:
        """The number of clients that consume it."""
        return len(self.clients)


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """One topic.

    Attributes:
        depth: messages that no channel has been given.
        backend_depth: the same; 0 when it is ephemeral.
        log_bytes: size of its logs.
        limits: what its limits have done, by field of /stats.
    """

    name: str
    depth: int
    backend_depth: int
    message_count: int
    message_bytes: int
    log_bytes: int
    limits: Mapping[str, int]
    paused: bool
    latency: Latency
    channels: Sequence[ChannelFigures]
    meta: TopicMeta
    partitions: Sequence[Partition]


def topics_of(
    topics: Mapping[str, Topic], latencies: Latencies, name: str = "", channel: str = ""
) -> Iterator[TopicFigures]:
    """Collect topics by name, each as it is when its turn comes; they may come and go meanwhile.

    Args:
        name: only this one; empty for all.
        channel: only this one, and only topics that have it; empty for all.
    """
    for each in [name] if name else sorted(topics):
        found = topics.get(each)
        if found is not None and (not channel or channel in found.channel_names):
            yield topic_of(found, latencies, channel)


def topic_of(topic: Topic, latencies: Latencies, channel: str = "") -> TopicFigures:
    """Collect one topic with its channels, or only the one named."""
    names = sorted(name for name in topic.channel_names if not channel or name == channel)
    channels = [_channel_of(name, topic.channels(name), topic.channel_names[name], latencies) for name in names]
    return TopicFigures(
        name=topic.name,
        depth=topic.depth,
        backend_depth=0 if topic.ephemeral else topic.depth,
        message_count=topic.message_count + limits.no_room_count(topic),
        message_bytes=topic.message_bytes,
        log_bytes=sum(partition.log.size_bytes for partition in topic.partitions.values()),
        limits=limits.of_topic(topic),
        paused=topic.paused,
        latency=latencies.of_topic(topic),
        channels=channels,
        meta=topic.meta,
        partitions=list(topic.partitions.values()),
    )


def _channel_of(name: str, parts: Sequence[Channel], is_paused: bool, latencies: Latencies) -> ChannelFigures:
    owners = dict.fromkeys(s.owner for part in parts for s in part.subscriptions)  # one may consume several parts
    depth = sum(part.depth for part in parts)
    deliveries = {locality: sum(part.locality_counts[locality] for part in parts) for locality in Locality}
    return ChannelFigures(
        name=name,
        depth=depth,
        backend_depth=0 if parts[0].ephemeral else depth,
        in_flight_count=sum(part.in_flight_count for part in parts),
        deferred_count=sum(part.deferred_count for part in parts),
        message_count=sum(part.message_count for part in parts),
        requeue_count=sum(part.requeue_count for part in parts),
        timeout_count=sum(part.timeout_count for part in parts),
        finish_count=sum(part.finish_count for part in parts),
        filtered_count=sum(part.filtered_count for part in parts),
        deliveries=deliveries,
        limits=limits.of_channel(parts),
        paused=is_paused,
        skipped=all(part.skipped for part in parts),
        latency=latencies.of_channel(parts),
        clients=[owner for owner in owners if isinstance(owner, Client)],
        parts=parts,
    )
