"""Counts of what the limits of topics and channels have done, for ``/stats`` and ``/metrics``; zeros are left out.

Rules of this file: counts are of this process; a topic or channel without limits has no fields. An ephemeral one has
a limit always: --mem-queue-size, and a topic its share of --memory-budget.

Source: NSQ's HTTP API (the row of a topic, the row of a channel).
"""

from __future__ import annotations

from collections.abc import Sequence

from flintmq.broker.channel import Channel
from flintmq.broker.topic import Topic
from flintmq.storage import MemoryLog

CHANNEL_FIELDS = {
    "dead_letter_count": "Messages that reached the dead letters",
    "giving_up_count": "Messages on their way to the dead letters",
    "expired_count": "Messages that were too old to be delivered",
    "dropped_count": "Messages dropped because there were too many",
}
TOPIC_FIELDS = {
    "refused_count": "Messages whose publish was refused because there were too many",
    "expired_count": "Messages that were too old before any channel was given them",
    "dropped_count": "Messages dropped because there were too many, before any channel was given them",
}


def of_channel(parts: Sequence[Channel]) -> dict[str, int]:
    """The fields of one channel, its partitions added up."""
    dropped_count = sum(part.dropped_count for part in parts)
    limiters = [part.limiter for part in parts if part.limiter is not None]
    if not limiters:
        return {"dropped_count": dropped_count} if dropped_count else {}
    counts = {field: sum(getattr(limiter, field) for limiter in limiters) for field in CHANNEL_FIELDS}
    counts["dropped_count"] += dropped_count
    return {field: count for field, count in counts.items() if count}


def of_topic(topic: Topic) -> dict[str, int]:
    """The fields of one topic."""
    bounds = next(iter(topic.partitions.values())).bounds if topic.partitions else None
    dropped_count = no_room_count(topic)
    if bounds is None:
        return {"dropped_count": dropped_count} if dropped_count else {}
    counts = {field: getattr(bounds, field) for field in TOPIC_FIELDS}
    counts["dropped_count"] += dropped_count
    return {field: count for field, count in counts.items() if count}


def no_room_count(topic: Topic) -> int:
    """Messages that an ephemeral topic had no room for: its log never had them."""
    logs = [partition.log for partition in topic.partitions.values()]
    return sum(log.dropped_count for log in logs if isinstance(log, MemoryLog))
