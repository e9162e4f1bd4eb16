"""``/stats`` in the form of the redesigned NSQ: one entry for each partition of a topic, a plain one's number is 0.

Rules of this file: fields have its names and its meanings, which are not always NSQ's: a topic's ``depth`` is in bytes,
a channel's counts what is in flight. What is not kept here is an empty list, or left out, never a number that nobody
counted: the histograms (``msg_size_stats``, ``msg_write_latency_stats``, ``msg_consume_latency_stats``,
``msg_delivery_latency_stats``), ``hourly_subsize``, and of a publisher its failures and the time of its last message.

Source: Youzan's HTTP API.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from flintmq.broker import peek
from flintmq.broker.channel import Channel
from flintmq.broker.partition import Partition
from flintmq.broker.topic import Topic
from flintmq.errors import StorageError
from flintmq.nsqd.client import Client
from flintmq.nsqd.figures.history import HourlySizes
from flintmq.nsqd.figures.latencies import Latencies
from flintmq.nsqd.figures.nsq import client_row, latency_row

Row = dict[str, Any]

_NS_PER_S = 1_000_000_000


def rows(
    topics: Mapping[str, Topic],
    latencies: Latencies,
    history: HourlySizes,
    clients: Iterable[Client],
    *,
    topic: str = "",
    channel: str = "",
    partition: int | None = None,
    has_clients: bool = False,
    clock_shift_ns: int = 0,
) -> Iterator[Row]:
    """Partitions by topic and number, each as it is when its turn comes; topics may come and go meanwhile.

    Args:
        topic, partition: only this one; empty and None for all.
        channel: only this one; entries without it have none.
        has_clients: with those who consume and publish.
        clock_shift_ns: what makes wall time of a due time.
    """
    for name in [topic] if topic else sorted(topics):
        found = topics.get(name)
        for each in () if found is None else list(found.partitions.values()):
            if partition is None or partition == each.number:
                yield _row(found, each, latencies, history, clients, channel, has_clients, clock_shift_ns)
        latencies.forget()


def _row(
    topic: Topic | None,
    partition: Partition,
    latencies: Latencies,
    history: HourlySizes,
    clients: Iterable[Client],
    wanted: str,
    has_clients: bool,
    clock_shift_ns: int,
) -> Row:
    assert topic is not None
    log, meta = partition.log, topic.meta
    channels = [part for name, part in sorted(partition.channels.items()) if not wanted or name == wanted]
    publishers = [client for client in clients if topic.name in client.pub_counts]
    stored_bytes = log.end_offset_bytes
    has_own_name = meta.ordered or meta.multi_part
    return {
        "topic_name": topic.name,
        "topic_full_name": f"{topic.name}-{partition.number}",
        "topic_partition": str(partition.number),
        "log_id": f"{log.log_id:016x}",
        "channels": [_channel_row(partition, part, latencies, has_clients, clock_shift_ns) for part in channels],
        "channel_num": len(partition.channels),
        "depth": stored_bytes,
        "backend_depth": stored_bytes,
        "backend_start": _offset_of(partition, log.start_sequence),
        "message_count": log.next_sequence - 1,
        "is_leader": True,
        "hourly_pubsize": history.last_hour(partition),
        "client_pub_stats": [_publisher_row(client, topic.name) for client in publishers] if has_clients else None,
        "client_num": len(publishers),
        "msg_size_stats": [],
        "msg_write_latency_stats": [],
        "is_multi_ordered": meta.ordered,
        "is_multi_part": meta.multi_part,
        "is_ext": meta.extend_support,
        "is_channel_auto_create_disabled": meta.disable_channel_auto_create,
        "statsd_name": f"{topic.name}.{partition.number}" if has_own_name else topic.name,
        "pub_failed_cnt": partition.failed_count,
        "paused": topic.paused,
        "e2e_processing_latency": latency_row(latencies.of_channel(list(partition.channels.values()))),
    }


def _channel_row(
    partition: Partition, part: Channel, latencies: Latencies, has_clients: bool, clock_shift_ns: int
) -> Row:
    clients = [s.owner for s in part.subscriptions if isinstance(s.owner, Client)]
    aside_count = part.spilled.count - len(part.spilled.loaded)
    near_count = part.deferred_count - aside_count
    depth, unfinished_count = part.depth, part.depth + part.in_flight_count + near_count
    oldest_at, oldest_ns = _oldest(partition, part) if unfinished_count else (part.log.end_offset_bytes, 0)
    due_ns = 0 if part.spilled.next_due_ns is None or not aside_count else part.spilled.next_due_ns + clock_shift_ns
    return {
        "channel_name": part.name,
        "backlogs": depth if part.keep_floor is not None else depth + near_count,
        "depth": unfinished_count,
        "depth_size": part.log.end_offset_bytes - oldest_at,
        "depth_ts": _time_text(oldest_ns),
        "depth_ts_nano": oldest_ns,
        "backend_depth": unfinished_count,
        "in_flight_count": part.in_flight_count,
        "deferred_count": near_count,
        "deferred_from_delay_count": len(part.spilled.ready),
        "message_count": part.log.next_sequence - 1,
        "requeue_count": part.requeue_count,
        "timeout_count": part.timeout_count,
        "clients": [client_row(client) for client in clients] if has_clients else None,
        "client_num": len(part.subscriptions),
        "paused": part.paused,
        "skipped": part.skipped,
        "zan_test_skipped": False,
        "delayed_queue_count": aside_count,
        "delayed_queue_recent": _time_text(due_ns),
        "delayed_queue_recent_nano": due_ns,
        "e2e_processing_latency": latency_row(latencies.of_channel([part])),
        "msg_consume_latency_stats": [],
        "msg_delivery_latency_stats": [],
    }


def _oldest(partition: Partition, part: Channel) -> tuple[int, int]:
    """Virtual offset and time of the first message that the channel has not finished."""
    try:
        batch = peek.find(part.log, part.floor)
    except StorageError:
        batch = None  # the log says so itself in the health
    return (part.log.end_offset_bytes, 0) if batch is None else (batch.offset_of(part.floor), batch.timestamp_ns)


def _offset_of(partition: Partition, sequence: int) -> int:
    try:
        batch = peek.find(partition.log, sequence)
    except StorageError:
        batch = None
    return partition.log.end_offset_bytes if batch is None else batch.offset_of(sequence)


def _publisher_row(client: Client, topic: str) -> Row:
    return {
        "remote_address": client.peer,
        "user_agent": client.request.user_agent,
        "protocol": "tcp",
        "pub_count": client.pub_counts[topic],
    }


def _time_text(time_ns: int) -> str:
    """Wall time as Go prints it."""
    second, rest_ns = divmod(time_ns, _NS_PER_S)
    text = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d %H:%M:%S")
    fraction = f".{rest_ns:09d}".rstrip("0") if rest_ns else ""
    return f"{text}{fraction} +0000 UTC"


def as_text(version_line: str, health: str, found: Sequence[Row], started: str, uptime: str) -> str:
    """``/stats`` without ``format=json``."""
    lines = [version_line, f"start_time {started}", f"uptime {uptime}"]
    if not found:
        return "\n".join([*lines, "", "NO_TOPICS", ""])
    lines += ["", f"Health: {health}"]
    for topic in found:
        lines += [
            "",
            f"   [{topic['topic_full_name']:<15}] depth: {topic['depth']:<5} be-depth: {topic['backend_depth']:<5} "
            f"msgs: {topic['message_count']:<8} e2e%: ",
        ]
        for channel in topic["channels"]:
            mark = "   *P " if channel["paused"] else "      "
            lines.append(
                f"{mark}[{channel['channel_name']:<25}] depth: {channel['depth']:<5} "
                f"be-depth: {channel['backend_depth']:<5} inflt: {channel['in_flight_count']:<4} "
                f"def: {channel['deferred_count']:<4} re-q: {channel['requeue_count']:<5} "
                f"timeout: {channel['timeout_count']:<5} msgs: {channel['message_count']:<8} e2e%: "
            )
    return "\n".join(lines) + "\n"
