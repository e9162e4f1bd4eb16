"""Figures in the form of NSQ's nsqadmin: of a node, and of all nodes together.

Rules of this file: fields, their order and when they are left out are NSQ's. Where several nodes have a channel, its
sum lists all of them; the least of a percentile is the least.

Source: NSQ's HTTP API; nsqadmin of NSQ 1.3 (``/api``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flintmq.nsqadmin import daemons
from flintmq.nsqadmin.views import NodeRow

Row = dict[str, Any]
_SUMS = ("depth", "memory_depth", "backend_depth", "message_count", "delivery_msg_count")
_LOCALITIES = ("zone_local_msg_count", "region_local_msg_count", "global_msg_count")
_CHANNEL_SUMS = ("in_flight_count", "deferred_count", "requeue_count", "timeout_count", "client_count")
_CLIENT_FIELDS = (
    "remote_address", "version", "client_id", "hostname", "user_agent", "connect_ts", "connected", "in_flight_count",
    "ready_count", "finish_count", "requeue_count", "message_count", "sample_rate", "deflate", "snappy", "authed",
    "auth_identity", "auth_identity_url",
)  # fmt: skip
_TLS_FIELDS = (
    "tls", "tls_cipher_suite", "tls_version", "tls_negotiated_protocol", "tls_negotiated_protocol_is_mutual",
)  # fmt: skip


def node_row(node: NodeRow) -> Row:
    """Return a node as ``/api/nodes`` lists it."""
    row: Row = {
        "remote_addresses": node.remote_addresses or None,
        "remote_address": node.remote_addresses[0].rpartition("/")[2].replace("N/A", "")
        if node.remote_addresses
        else "",
        "hostname": node.hostname,
        "broadcast_address": node.broadcast_address,
        "tcp_port": node.tcp_port,
        "http_port": node.http_port,
        "version": node.version,
    }
    if node.zone:
        row["topology_zone"] = node.zone
    if node.region:
        row["topology_region"] = node.region
    topics = [{"topic": each.topic, "tombstoned": each.is_tombstoned} for each in node.topics]
    return row | {"topics": topics or None, "out_of_date": node.is_out_of_date}


def topic_stats(topic: daemons.Topic, node: NodeRow, now_s: int, has_clients: bool) -> Row:
    """Return the figures of a topic of one node."""
    is_partition = bool(topic.topic_full_name)  # Youzan's form: the depth is in bytes
    depth, on_disk = (0, 0) if is_partition else (topic.depth, topic.backend_depth)
    row: Row = {
        "node": node.address,
        "hostname": node.hostname,
        "topic_name": topic.topic_name,
        "depth": depth,
        "memory_depth": depth - on_disk,
        "backend_depth": on_disk,
        "message_count": topic.message_count,
        "delivery_msg_count": 0,
        "nodes": None,
        "channels": [channel_stats(each, topic.topic_name, node, now_s, has_clients) for each in topic.channels or ()],
        "paused": topic.paused,
        "e2e_processing_latency": _latency(topic.e2e_processing_latency),
    }
    return row


def channel_stats(channel: daemons.Channel, topic: str, node: NodeRow, now_s: int, has_clients: bool) -> Row:
    """Return the figures of a channel of one node."""
    deliveries = {name: count for name in _LOCALITIES if (count := getattr(channel, name))}
    delivered = sum(deliveries.values())
    clients = None
    if has_clients and channel.clients is not None:
        clients = [client_stats(each, node, now_s) for each in channel.clients]
    return {
        "node": node.address,
        "hostname": node.hostname,
        "topic_name": topic,
        "channel_name": channel.channel_name,
        "depth": channel.depth,
        "memory_depth": channel.depth - channel.backend_depth,
        "backend_depth": channel.backend_depth,
        "in_flight_count": channel.in_flight_count,
        "deferred_count": channel.deferred_count,
        "requeue_count": channel.requeue_count,
        "timeout_count": channel.timeout_count,
        "message_count": channel.message_count,
        **({"delivery_msg_count": delivered} if delivered else {}),
        **deliveries,
        "client_count": channel.connected,
        "nodes": None,
        "clients": clients,
        "paused": channel.paused,
        "e2e_processing_latency": _latency(channel.e2e_processing_latency),
    }


def client_stats(client: daemons.Client, node: NodeRow, now_s: int) -> Row:
    """Return a consumer; how long it is connected is in nanoseconds."""
    values = {"connected": max(0, now_s - client.connect_ts) * 1_000_000_000}
    row: Row = {"node": node.address}
    row |= {name: values.get(name, getattr(client, name, None)) for name in _CLIENT_FIELDS}
    places = {
        "node_topology_region": node.region,
        "node_topology_zone": node.zone,
        "topology_region": client.topology_region,
        "topology_zone": client.topology_zone,
    }
    row |= {name: place for name, place in places.items() if place}
    return row | {name: getattr(client, name) for name in _TLS_FIELDS}


def _latency(latency: daemons.Latency | None) -> Row:
    """Return the latency of one node; each percentile also as what a sum of one node has."""
    count = latency.count if latency else 0
    found = None
    if latency is not None and latency.percentiles is not None:
        found = []
        for each in latency.percentiles:
            value = _number(each.value)
            numbers = {"average": value, "count": count, "max": value, "min": value}
            found.append({**numbers, "quantile": each.quantile, "value": value})
    return {"count": count, "percentiles": found, "topic": "", "channel": "", "host": ""}


def _number(value: float) -> float:
    """Return a number that is written as Go does: without a fraction where it has none."""
    return int(value) if value == value // 1 else value


def sum_topic(name: str, rows: Iterable[Row]) -> Row:
    """Return a topic on all nodes together."""
    nodes = sorted(rows, key=lambda row: row["hostname"])
    channels: dict[str, list[Row]] = {}
    for row in nodes:
        for channel in row["channels"]:
            channels.setdefault(channel["channel_name"], []).append(channel)
    total: Row = {"node": "*" if nodes else "", "hostname": "", "topic_name": name}
    total |= {each: sum(row[each] for row in nodes) for each in _SUMS}
    total |= {"nodes": nodes or None}
    total |= {"channels": [_one_channel(each) for each in channels.values()] or None}
    total |= {"paused": any(row["paused"] for row in nodes)}
    return total | {"e2e_processing_latency": _sum_latency((row["e2e_processing_latency"] for row in nodes), name, "")}


def _one_channel(rows: list[Row]) -> Row:
    """Return a channel of a topic's sum: as it is where one node has it."""
    return rows[0] if len(rows) == 1 else sum_channel(rows[0]["topic_name"], rows[0]["channel_name"], rows)


def sum_channel(topic: str, name: str, rows: Iterable[Row]) -> Row:
    """Return a channel on all nodes together, its clients by node and how near they are."""
    nodes = sorted(rows, key=lambda row: row["hostname"])
    clients = [client for row in nodes for client in row["clients"] or ()]
    clients.sort(key=_nearness)
    total: Row = {"node": "*", "hostname": "", "topic_name": topic, "channel_name": name}
    total |= {each: sum(row.get(each, 0) for row in nodes) for each in ("depth", "memory_depth", "backend_depth")}
    total |= {each: sum(row[each] for row in nodes) for each in _CHANNEL_SUMS[:4]}
    total["message_count"] = sum(row["message_count"] for row in nodes)
    for each in ("delivery_msg_count", *_LOCALITIES):
        if count := sum(row.get(each, 0) for row in nodes):
            total[each] = count
    total["client_count"] = sum(row["client_count"] for row in nodes)
    total |= {"nodes": nodes, "clients": clients or None, "paused": any(row["paused"] for row in nodes)}
    latencies = (row["e2e_processing_latency"] for row in nodes)
    return total | {"e2e_processing_latency": _sum_latency(latencies, topic, name)}


def _nearness(client: Mapping[str, Any]) -> tuple[str, int, str, str]:
    region, zone = client.get("topology_region", ""), client.get("topology_zone", "")
    is_near = region == client.get("node_topology_region", "")
    rank = 0 if is_near and zone == client.get("node_topology_zone", "") else 1 if is_near else 2
    return client["node"], rank, region, zone


def _sum_latency(rows: Iterable[Row], topic: str, channel: str) -> Row:
    count = 0
    by_quantile: dict[float, Row] = {}
    for row in rows:
        count += row["count"]
        for each in row["percentiles"] or ():
            known = by_quantile.get(each["quantile"])
            if known is None:
                by_quantile[each["quantile"]] = {
                    name: each[name] for name in ("average", "count", "max", "min", "quantile")
                }
                continue
            known["max"], known["min"] = max(known["max"], each["max"]), min(known["min"], each["min"])
            both = known["count"] + each["count"]
            if both:
                average = known["average"] + (each["average"] - known["average"]) * each["count"] / both
                known["average"] = _number(average)
            known["count"] = both
    found = [by_quantile[each] for each in sorted(by_quantile, reverse=True)]
    return {"count": count, "percentiles": found or None, "topic": topic, "channel": channel, "host": "*"}


__all__ = ["channel_stats", "node_row", "sum_channel", "sum_topic", "topic_stats"]
