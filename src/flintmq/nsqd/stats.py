"""What ``/stats`` answers, as data and as text.

Source: reference/nsq.md 2.1.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from flintmq.broker.channel import Channel
from flintmq.broker.topic import Topic
from flintmq.nsqd.session import Session

NO_LATENCY: dict[str, Any] = {"count": 0, "percentiles": None}


def memory() -> dict[str, int]:
    """nsqd's memory figures in Python's terms; those that only Go's collector has are 0."""
    resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "heap_objects": len(gc.get_objects(generation=2)) if gc.get_count()[2] < 0 else sys.getallocatedblocks(),
        "heap_idle_bytes": 0,
        "heap_in_use_bytes": resident_bytes,
        "heap_released_bytes": 0,
        "gc_pause_usec_100": 0,
        "gc_pause_usec_99": 0,
        "gc_pause_usec_95": 0,
        "next_gc_bytes": 0,
        "gc_total_runs": sum(generation["collections"] for generation in gc.get_stats()),
    }


def channel_row(name: str, parts: list[Channel], include_clients: bool, paused: bool) -> dict[str, Any]:
    """One channel, its partitions added up."""
    clients = [s.owner for part in parts for s in part.subscriptions if isinstance(s.owner, Session)]
    depth = sum(part.depth for part in parts)
    return {
        "channel_name": name,
        "depth": depth,
        "backend_depth": 0 if parts[0].ephemeral else depth,
        "in_flight_count": sum(part.in_flight_count for part in parts),
        "deferred_count": sum(part.deferred_count for part in parts),
        "message_count": sum(part.message_count for part in parts),
        "requeue_count": sum(part.requeue_count for part in parts),
        "timeout_count": sum(part.timeout_count for part in parts),
        "client_count": len(clients),
        "clients": [client.stats() for client in clients] if include_clients else None,
        "paused": paused,
        "e2e_processing_latency": NO_LATENCY,
    }


def topic_row(topic: Topic, channel: str, include_clients: bool) -> dict[str, Any]:
    """One topic with its channels, or only the one named."""
    names = sorted(name for name in topic.channel_names if not channel or name == channel)
    return {
        "topic_name": topic.name,
        "channels": [
            channel_row(name, topic.channels(name), include_clients, topic.channel_names[name]) for name in names
        ],
        "depth": topic.depth,
        "backend_depth": 0 if topic.ephemeral else topic.depth,
        "message_count": topic.message_count,
        "message_bytes": topic.message_bytes,
        "paused": topic.paused,
        "e2e_processing_latency": NO_LATENCY,
    }


def collect(
    topics: dict[str, Topic], sessions: Iterable[Session], topic: str, channel: str, include_clients: bool
) -> dict[str, Any]:
    """``topics`` and ``producers`` of ``/stats``; a filter that matches nothing gives what nsqd gives."""
    rows: list[dict[str, Any]] | None = [
        topic_row(topics[name], channel, include_clients)
        for name in sorted(topics)
        if (not topic or name == topic) and (not channel or channel in topics[name].channel_names)
    ]
    producers: list[dict[str, Any]] | None = None
    if topic and topic not in topics:
        rows = None
    elif include_clients:
        producers = [session.stats() for session in sessions if session.pub_counts] or None
    return {"topics": rows, "producers": producers}


def go_duration(seconds: float) -> str:
    """A duration as Go prints it, to the microsecond."""
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    text = f"{rest:.6f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{int(hours)}h{int(minutes)}m{text}"
    return f"{int(minutes)}m{text}" if minutes else text


def as_text(
    version_line: str, stats: dict[str, Any], health: str, start_ns: int, now_ns: int, figures: dict[str, int] | None
) -> str:
    """``/stats`` without ``format=json``."""
    started = datetime.fromtimestamp(start_ns // 1_000_000_000, UTC)
    lines = [
        version_line,
        f"start_time {started.isoformat().replace('+00:00', 'Z')}",
        f"uptime {go_duration((now_ns - start_ns) / 1e9)}",
        "",
        f"Health: {health}",
        "",
    ]
    if figures is not None:
        lines += ["Memory:", *(f"   {name:<25}\t{value}" for name, value in figures.items()), ""]
    lines.append("Topics:" if stats["topics"] else "Topics: None")
    for topic in stats["topics"] or ():
        mark = "*P " if topic["paused"] else "   "
        lines += [
            "",
            f"{mark}[{topic['topic_name']:<15}] depth: {topic['depth']:<5} be-depth: {topic['backend_depth']:<5} "
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
            lines += [_client_line(client, now_ns) for client in channel["clients"] or ()]
    lines += ["", "Producers:" if stats["producers"] else "Producers: None"]
    for client in stats["producers"] or ():
        counts = client["pub_counts"]
        published = ",".join(f"{each['topic']}={each['count']}" for each in counts)
        lines.append(
            f"   [V2 {_client_name(client):<21}] msgs: {sum(each['count'] for each in counts):<8} "
            f"topics: {published} connected: {_connected(client, now_ns)}"
        )
    return "\n".join(lines) + "\n"


def _client_name(client: dict[str, Any]) -> str:
    port = client["remote_address"].rpartition(":")[2]
    return f"{client['hostname']}:{port} {client['user_agent']}".rstrip()


def _connected(client: dict[str, Any], now_ns: int) -> str:
    return go_duration(max(0, now_ns // 1_000_000_000 - client["connect_ts"]))


def _client_line(client: dict[str, Any], now_ns: int) -> str:
    return (
        f"        [V2 {_client_name(client):<21}] state: {client['state']} inflt: {client['in_flight_count']:<4} "
        f"rdy: {client['ready_count']:<4} fin: {client['finish_count']:<8} re-q: {client['requeue_count']:<8} "
        f"msgs: {client['message_count']:<8} connected: {_connected(client, now_ns)}"
    )
