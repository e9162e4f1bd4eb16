"""``/stats`` of NSQ, written as JSON and as text.

Rules of this file: fields and lines are NSQ's, in its order; what it does not know is left out where there is none.

Source: NSQ's HTTP API, NSQ's latencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from flintmq.broker.partition import Partition
from flintmq.broker.subscription import Locality
from flintmq.nsqd.client import Client
from flintmq.nsqd.figures.collection import ChannelFigures, TopicFigures
from flintmq.nsqd.figures.latencies import Latency
from flintmq.wire.codec import Deflate, Snappy

Row = dict[str, Any]

_DELIVERY_FIELDS = {
    Locality.ZONE: "zone_local_msg_count",
    Locality.REGION: "region_local_msg_count",
    Locality.GLOBAL: "global_msg_count",
}


def client_row(client: Client) -> Row:
    """Return what JSON says of one connection."""
    negotiated, request = client.negotiated, client.request
    host = client.peer.rpartition(":")[0]
    subscription = client.subscription
    row: Row = {
        "client_id": host if negotiated is None else request.client_id,
        "hostname": host if negotiated is None else request.hostname,
        "version": "V2",
        "remote_address": client.peer,
        "state": client.state_number,
        "ready_count": subscription.rdy_count if subscription else 0,
        "in_flight_count": subscription.in_flight_count if subscription else 0,
        "message_count": subscription.message_count if subscription else 0,
        **(_deliveries({subscription.locality: subscription.message_count}) if subscription else {}),
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


def _deliveries(counts: Mapping[Locality, int]) -> dict[str, int]:
    """Deliveries by how near the consumer was; zeros are left out."""
    return {_DELIVERY_FIELDS[locality]: count for locality, count in counts.items() if count}


def latency_row(latency: Latency) -> Row:
    """Return what JSON says of latencies."""
    pairs = latency.percentiles
    shown = None if pairs is None else [{"quantile": quantile, "value": value_ns} for quantile, value_ns in pairs]
    return {"count": latency.count, "percentiles": shown}


def _channel_row(channel: ChannelFigures, has_clients: bool) -> Row:
    return {
        "channel_name": channel.name,
        "depth": channel.depth,
        "backend_depth": channel.backend_depth,
        "in_flight_count": channel.in_flight_count,
        "deferred_count": channel.deferred_count,
        "message_count": channel.message_count,
        **_deliveries(channel.deliveries),
        "requeue_count": channel.requeue_count,
        "timeout_count": channel.timeout_count,
        "client_count": channel.client_count,
        "clients": [client_row(client) for client in channel.clients] if has_clients else None,
        "paused": channel.paused,
        **({"skipped": True} if channel.skipped else {}),
        **_filtered(channel.filtered_count),
        **channel.limits,
        "e2e_processing_latency": latency_row(channel.latency),
    }


def topic_row(topic: TopicFigures, has_clients: bool) -> Row:
    """Return what JSON says of one topic and its channels."""
    row: Row = {
        "topic_name": topic.name,
        "channels": [_channel_row(channel, has_clients) for channel in topic.channels],
        "depth": topic.depth,
        "backend_depth": topic.backend_depth,
        "message_count": topic.message_count,
        "message_bytes": topic.message_bytes,
        "paused": topic.paused,
        **topic.limits,
        "e2e_processing_latency": latency_row(topic.latency),
    }
    if topic.meta.is_partitioned:
        row |= topic.meta.for_clients()
        names = [channel.name for channel in topic.channels]
        row["partitions"] = [_partition_row(each, names) for each in topic.partitions]
    elif topic.meta.extend_support:
        row["extend_support"] = True
    if topic.meta.is_partitioned or topic.meta.version:
        row |= topic.meta.for_operators()
    return row


def _partition_row(partition: Partition, channel_names: Iterable[str]) -> Row:
    """Return what JSON says of one partition, in the words of the redesigned NSQ where NSQ has none."""
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
    """Return when a daemon started and for how long it has run, as Go prints them."""
    started = datetime.fromtimestamp(start_ns // 1_000_000_000, UTC)
    return started.isoformat().replace("+00:00", "Z"), go_duration((now_ns - start_ns) / 1e9)


def as_text(
    version_line: str,
    topics: Sequence[str] | None,
    producers: Iterable[Client],
    health: str,
    start_ns: int,
    now_ns: int,
    memory: Mapping[str, int] | None,
) -> str:
    """Write the text of ``/stats``.

    Args:
        topics: of each what :func:`topic_text` writes.
        producers: clients that have published.
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
    if memory is not None:
        lines += ["Memory:", *(f"   {name:<25}\t{value}" for name, value in memory.items()), ""]
    lines.append("Topics:" if topics else "Topics: None")
    for number, topic in enumerate(topics or ()):
        if number:
            lines.append("")  # as nsqd: a blank line between two topics, none before the first
        lines.append(topic)
    publishing = [_producer_line(client, now_ns) for client in producers]
    lines += ["", "Producers:" if publishing else "Producers: None", *publishing]
    return "\n".join(lines) + "\n"


def topic_text(topic: TopicFigures, has_clients: bool, now_ns: int) -> str:
    """Write the lines of one topic and its channels, without the last end of line."""
    mark = "*P " if topic.paused else "   "
    lines = [
        f"{mark}[{topic.name:<15}] depth: {topic.depth:<5} be-depth: {topic.backend_depth:<5} "
        f"msgs: {topic.message_count:<8} e2e%: {_latency_text(topic.latency)}"
    ]
    for channel in topic.channels:
        mark = "   *P " if channel.paused else "      "
        lines.append(
            f"{mark}[{channel.name:<25}] depth: {channel.depth:<5} "
            f"be-depth: {channel.backend_depth:<5} inflt: {channel.in_flight_count:<4} "
            f"def: {channel.deferred_count:<4} re-q: {channel.requeue_count:<5} "
            f"timeout: {channel.timeout_count:<5} msgs: {channel.message_count:<8} "
            f"e2e%: {_latency_text(channel.latency)}"
        )
        lines += [_client_line(client_row(client), now_ns) for client in channel.clients if has_clients]
    return "\n".join(lines)


def _producer_line(client: Client, now_ns: int) -> str:
    row = client_row(client)
    published = ",".join(f"{topic}={count}" for topic, count in sorted(client.pub_counts.items()))
    return (
        f"   [V2 {_client_name(row):<21}] msgs: {sum(client.pub_counts.values()):<8} "
        f"topics: {published} connected: {_connected(row, now_ns)}"
    )


def _latency_text(latency: Latency) -> str:
    return ", ".join(_human_duration(value_ns) for _, value_ns in latency.percentiles or ())


def _human_duration(value_ns: int) -> str:
    for unit_ns, unit in ((1_000_000_000, "s"), (1_000_000, "ms"), (1000, "us")):
        if value_ns > unit_ns:
            return f"{value_ns / unit_ns:.1f}{unit}"
    return f"{value_ns:.1f}ns"


def _client_name(client: Row) -> str:
    port = client["remote_address"].rpartition(":")[2]
    return f"{client['hostname']}:{port} {client['user_agent']}"


def _connected(client: Row, now_ns: int) -> str:
    return go_duration(max(0, now_ns // 1_000_000_000 - client["connect_ts"]))


def _client_line(client: Row, now_ns: int) -> str:
    return (
        f"        [V2 {_client_name(client):<21}] state: {client['state']} inflt: {client['in_flight_count']:<4} "
        f"rdy: {client['ready_count']:<4} fin: {client['finish_count']:<8} re-q: {client['requeue_count']:<8} "
        f"msgs: {client['message_count']:<8} connected: {_connected(client, now_ns)}"
    )
