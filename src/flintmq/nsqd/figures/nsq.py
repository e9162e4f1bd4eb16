"""What ``/stats`` answers, as data and as text; statsd and Prometheus are told the same.

Source: reference/nsq.md 2.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from flintmq.broker.channel import Channel
from flintmq.broker.partition import Partition
from flintmq.broker.topic import Topic
from flintmq.nsqd.client import Client
from flintmq.nsqd.figures import limits
from flintmq.nsqd.figures.latencies import Latencies
from flintmq.nsqd.topology import channel_counts, client_counts
from flintmq.wire.codec import Deflate, Snappy

Row = dict[str, Any]


def client_row(client: Client) -> dict[str, Any]:
    """One connection."""
    negotiated, request = client.negotiated, client.request
    host = client.peer.rpartition(":")[0]
    subscription = client.subscription
    row: dict[str, Any] = {
        "client_id": host if negotiated is None else request.client_id,
        "hostname": host if negotiated is None else request.hostname,
        "version": "V2",
        "remote_address": client.peer,
        "state": client.state_number,
        "ready_count": subscription.rdy_count if subscription else 0,
        "in_flight_count": subscription.in_flight_count if subscription else 0,
        "message_count": subscription.message_count if subscription else 0,
        **(client_counts(subscription) if subscription else {}),
        "finish_count": subscription.finish_count if subscription else 0,
        "requeue_count": subscription.requeue_count if subscription else 0,
        **_filtered(subscription.filtered_count if subscription else 0),
        "connect_ts": client.connected_ns // 1_000_000_000,
        "sample_rate": 0 if negotiated is None else negotiated.sample_rate,
        "deflate": client.codec_name == Deflate.name,
        "snappy": client.codec_name == Snappy.name,
        "user_agent": request.user_agent,
    }
    grants = client.auth.grants if client.auth is not None else None
    if grants is not None:
        authorized = {
            "authed": grants.count > 0,
            "auth_identity": grants.identity,
            "auth_identity_url": grants.identity_url,
        }
        row |= {name: value for name, value in authorized.items() if value}
    row |= {"topology_zone": request.topology_zone, "topology_region": request.topology_region}
    if client.pub_counts:
        row["pub_counts"] = [{"topic": topic, "count": count} for topic, count in sorted(client.pub_counts.items())]
    tls = client.tls
    row |= {
        "tls": tls is not None,
        "tls_cipher_suite": tls.cipher_suite if tls is not None else "",
        "tls_version": tls.version if tls is not None else "",
        "tls_negotiated_protocol": "",
        "tls_negotiated_protocol_is_mutual": tls is not None,  # as Go says it, whatever was negotiated
    }
    return row


def _filtered(count: int) -> dict[str, int]:
    """Messages that a filter of a consumer finished; left out where there are none."""
    return {"filtered_count": count} if count else {}


def channel_row(
    name: str, parts: list[Channel], include_clients: bool, paused: bool, latencies: Latencies
) -> dict[str, Any]:
    """One channel, its partitions added up."""
    owners = dict.fromkeys(s.owner for part in parts for s in part.subscriptions)  # one may consume several parts
    clients = [owner for owner in owners if isinstance(owner, Client)]
    depth = sum(part.depth for part in parts)
    return {
        "channel_name": name,
        "depth": depth,
        "backend_depth": 0 if parts[0].ephemeral else depth,
        "in_flight_count": sum(part.in_flight_count for part in parts),
        "deferred_count": sum(part.deferred_count for part in parts),
        "message_count": sum(part.message_count for part in parts),
        **channel_counts(parts),
        "requeue_count": sum(part.requeue_count for part in parts),
        "timeout_count": sum(part.timeout_count for part in parts),
        "client_count": len(clients),
        "clients": [client_row(client) for client in clients] if include_clients else None,
        "paused": paused,
        **({"skipped": True} if all(part.skipped for part in parts) else {}),
        **_filtered(sum(part.filtered_count for part in parts)),
        **limits.of_channel(parts),
        "e2e_processing_latency": latencies.of_channel(parts),
    }


def topic_row(topic: Topic, channel: str, include_clients: bool, latencies: Latencies) -> dict[str, Any]:
    """One topic with its channels, or only the one named."""
    names = sorted(name for name in topic.channel_names if not channel or name == channel)
    row: dict[str, Any] = {
        "topic_name": topic.name,
        "channels": [
            channel_row(name, topic.channels(name), include_clients, topic.channel_names[name], latencies)
            for name in names
        ],
        "depth": topic.depth,
        "backend_depth": 0 if topic.ephemeral else topic.depth,
        "message_count": topic.message_count,
        "message_bytes": topic.message_bytes,
        "paused": topic.paused,
        **limits.of_topic(topic),
        "e2e_processing_latency": latencies.of_topic(topic),
    }
    if topic.meta.is_partitioned:
        row |= topic.meta.for_clients()
        row["partitions"] = [partition_row(each, names) for each in topic.partitions.values()]
    elif topic.meta.extend_support:
        row["extend_support"] = True
    if topic.meta.is_partitioned or topic.meta.version:
        row |= topic.meta.for_operators()
    return row


def partition_row(partition: Partition, channel_names: Iterable[str]) -> dict[str, Any]:
    """One partition of a topic that has them; what NSQ has no word for is named as in the redesigned NSQ."""
    log = partition.log
    parts = [partition.channels[name] for name in channel_names if name in partition.channels]
    return {
        "topic_full_name": f"{partition.topic_name}-{partition.number}",
        "topic_partition": str(partition.number),
        "is_leader": True,
        "depth": partition.depth,
        "backend_depth": partition.depth,
        "message_count": partition.message_count,
        "message_bytes": partition.bytes_count,
        "start_sequence": log.start_sequence,
        "next_sequence": log.next_sequence,
        "end_offset": log.end_offset_bytes,
        "channels": [
            {
                "channel_name": part.name,
                "depth": part.depth,
                "in_flight_count": part.in_flight_count,
                "deferred_count": part.deferred_count,
                "message_count": part.message_count,
                "requeue_count": part.requeue_count,
                "timeout_count": part.timeout_count,
                "client_count": len(part.subscriptions),
                "confirmed_sequence": part.floor,
                "ordered": part.keep_floor is not None,
            }
            for part in parts
        ],
    }


def topic_rows(
    topics: Mapping[str, Topic],
    latencies: Latencies,
    topic: str = "",
    channel: str = "",
    include_clients: bool = False,
) -> Iterator[dict[str, Any]]:
    """Topics by name, each as it is when its turn comes; they may come and go meanwhile.

    Args:
        topic: only this one; empty for all.
        channel: only this one, and only topics that have it; empty for all.
    """
    for name in [topic] if topic else sorted(topics):
        found = topics.get(name)
        if found is None or (channel and channel not in found.channel_names):
            continue
        yield topic_row(found, channel, include_clients, latencies)


def producer_rows(clients: Iterable[Client]) -> list[dict[str, Any]] | None:
    """Connections that have published; None when there are none, as nsqd has it."""
    return [client_row(client) for client in clients if client.pub_counts] or None


def go_duration(seconds: float) -> str:
    """A duration as Go prints it, to the microsecond."""
    if 0.000001 <= seconds < 1:
        return f"{seconds * 1000:.3f}".rstrip("0").rstrip(".") + "ms"
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    text = f"{rest:.6f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{int(hours)}h{int(minutes)}m{text}"
    return f"{int(minutes)}m{text}" if minutes else text


def start_and_uptime(start_ns: int, now_ns: int) -> tuple[str, str]:
    """When a daemon started and for how long it has run, as Go prints them."""
    started = datetime.fromtimestamp(start_ns // 1_000_000_000, UTC)
    return started.isoformat().replace("+00:00", "Z"), go_duration((now_ns - start_ns) / 1e9)


def as_text(
    version_line: str, stats: dict[str, Any], health: str, start_ns: int, now_ns: int, figures: dict[str, int] | None
) -> str:
    """``/stats`` without ``format=json``.

    Args:
        stats: rows; those of topics may be what :func:`topic_lines` made of them.
    """
    started, uptime = start_and_uptime(start_ns, now_ns)
    lines = [
        version_line,
        f"start_time {started}",
        f"uptime {uptime}",
        "",
        f"Health: {health}",
        "",
    ]
    if figures is not None:
        lines += ["Memory:", *(f"   {name:<25}\t{value}" for name, value in figures.items()), ""]
    lines.append("Topics:" if stats["topics"] else "Topics: None")
    for number, topic in enumerate(stats["topics"] or ()):
        if number:
            lines.append("")  # as nsqd: a blank line between two topics, none before the first
        lines.append(topic if isinstance(topic, str) else topic_lines(topic, now_ns))
    lines += ["", "Producers:" if stats["producers"] else "Producers: None"]
    for client in stats["producers"] or ():
        counts = client["pub_counts"]
        published = ",".join(f"{each['topic']}={each['count']}" for each in counts)
        lines.append(
            f"   [V2 {_client_name(client):<21}] msgs: {sum(each['count'] for each in counts):<8} "
            f"topics: {published} connected: {_connected(client, now_ns)}"
        )
    return "\n".join(lines) + "\n"


def topic_lines(topic: dict[str, Any], now_ns: int) -> str:
    """What :func:`as_text` says of one topic, without the last end of line."""
    mark = "*P " if topic["paused"] else "   "
    lines = [
        f"{mark}[{topic['topic_name']:<15}] depth: {topic['depth']:<5} be-depth: {topic['backend_depth']:<5} "
        f"msgs: {topic['message_count']:<8} e2e%: {_latency_text(topic)}"
    ]
    for channel in topic["channels"]:
        mark = "   *P " if channel["paused"] else "      "
        lines.append(
            f"{mark}[{channel['channel_name']:<25}] depth: {channel['depth']:<5} "
            f"be-depth: {channel['backend_depth']:<5} inflt: {channel['in_flight_count']:<4} "
            f"def: {channel['deferred_count']:<4} re-q: {channel['requeue_count']:<5} "
            f"timeout: {channel['timeout_count']:<5} msgs: {channel['message_count']:<8} "
            f"e2e%: {_latency_text(channel)}"
        )
        lines += [_client_line(client, now_ns) for client in channel["clients"] or ()]
    return "\n".join(lines)


def _latency_text(row: dict[str, Any]) -> str:
    percentiles = row["e2e_processing_latency"]["percentiles"] or ()
    return ", ".join(_human_duration(each["value"]) for each in percentiles)


def _human_duration(value_ns: int) -> str:
    for unit_ns, unit in ((1_000_000_000, "s"), (1_000_000, "ms"), (1000, "us")):
        if value_ns > unit_ns:
            return f"{value_ns / unit_ns:.1f}{unit}"
    return f"{value_ns:.1f}ns"


def _client_name(client: dict[str, Any]) -> str:
    port = client["remote_address"].rpartition(":")[2]
    return f"{client['hostname']}:{port} {client['user_agent']}"


def _connected(client: dict[str, Any], now_ns: int) -> str:
    return go_duration(max(0, now_ns // 1_000_000_000 - client["connect_ts"]))


def _client_line(client: dict[str, Any], now_ns: int) -> str:
    return (
        f"        [V2 {_client_name(client):<21}] state: {client['state']} inflt: {client['in_flight_count']:<4} "
        f"rdy: {client['ready_count']:<4} fin: {client['finish_count']:<8} re-q: {client['requeue_count']:<8} "
        f"msgs: {client['message_count']:<8} connected: {_connected(client, now_ns)}"
    )
