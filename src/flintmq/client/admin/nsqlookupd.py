"""Questions to nsqlookupd over HTTP. Each function is a method of ``LookupdAdmin``, on asyncio and blocking.

Rules of this file: as in :mod:`flintmq.client.admin.nsqd`. A change is made at one nsqlookupd only; what concerns nsqd
(partitions, ``everywhere``) it passes on to them.

Source: NSQ's nsqlookupd, Youzan's nsqlookupd.
"""

from __future__ import annotations

from typing import Any

from flintmq.client.admin.nsqd import changes, creation
from flintmq.client.admin.question import Question, check_changes, fields, get, nothing, plan, post, struct, text
from flintmq.client.admin.results import Channels, Found, ListedNode, Nodes, Topics
from flintmq.client.core.topology import parse_members
from flintmq.topic_meta import TopicMeta

ALL_PARTITIONS = "**"


def ping() -> Question[str]:
    """Return ``OK``."""
    return get("/ping", text)


def info() -> Question[dict[str, Any]]:
    """Return the versions, as nsqlookupd says them."""
    return get("/info", fields)


def metrics() -> Question[str]:
    """Return the figures as Prometheus reads them."""
    return get("/metrics", text)


def debug() -> Question[dict[str, Any]]:
    """Return everything that is registered, by ``category:key:subkey``."""
    return get("/debug", fields)


def lookup(topic: str, *, writable: bool = False, partition: int | None = None) -> Question[Found]:
    """Return where a topic is.

    An unknown topic is an empty answer, but a refusal with 404 where ``writable`` is asked for, and from NSQ's own.

    Args:
        writable: only nodes that are to be published to: none that is tombstoned or drains.
        partition: only this one.
    """
    access = "w" if writable else "r"
    return get("/lookup", struct(Found), topic=topic, access=access, metainfo=True, partition=partition)


def topics() -> Question[list[str]]:
    """Return the names of all topics."""

    def read(body: bytes) -> list[str]:
        return struct(Topics)(body).topics

    return get("/topics", read)


def channels(topic: str, *, partition: int | None = None) -> Question[list[str]]:
    """Return the names of a topic's channels; of one partition, if it is named."""

    def read(body: bytes) -> list[str]:
        return struct(Channels)(body).channels

    return get("/channels", read, topic=topic, partition=partition)


def nodes() -> Question[list[ListedNode]]:
    """Return every nsqd, with its topics."""

    def read(body: bytes) -> list[ListedNode]:
        return struct(Nodes)(body).producers

    return get("/nodes", read)


def members() -> Question[tuple[str, ...]]:
    """Return ``http://host:port`` of every nsqlookupd that this one knows, itself included."""

    def read(body: bytes) -> tuple[str, ...]:
        found = parse_members(body)
        if not found:
            raise ValueError("it lists no nsqlookupd")
        return found

    return get("/listlookup", read)


def create_topic(
    topic: str,
    *,
    partitions: int = 0,
    ordered: bool = False,
    multipart: bool = False,
    headers: bool = False,
    retention_days: int = 0,
    syncdisk: int = 0,
    auto_channels: bool = True,
    replicas: int = 0,
    dry_run: bool = False,
) -> Question[dict[str, Any] | None]:
    """Register a topic; with partitions: place and create them on the nsqd that are registered.

    Args:
        partitions: 0: a plain topic, which is only registered here, unless something else here needs partitions;
            then one.
        ordered: it can only be consumed in order, and whoever publishes names a partition.
        multipart: whoever publishes names a partition.
        headers: messages may carry headers.
        retention_days: how long consumed messages are kept; 0: as nsqd's options say.
        syncdisk: synced to the device after so many messages; 0: as nsqd's options say.
        auto_channels: False: subscribing creates no channel.
        replicas: copies of each partition, on as many nodes of a cluster; 0: as nsqlookupd's options say.
        dry_run: change nothing, and return what would be done; in a cluster only.
    """
    meta = TopicMeta(
        partition_num=partitions, ordered=ordered, multi_part=multipart, extend_support=headers,
        retention_days=retention_days, syncdisk=syncdisk, disable_channel_auto_create=not auto_channels,
    )  # fmt: skip
    query = creation(meta) | ({"replicator": replicas} if replicas else {})
    return post("/topic/create", plan, topic=topic, **query, dry_run=dry_run or None)


def delete_topic(topic: str, *, everywhere: bool = False, dry_run: bool = False) -> Question[dict[str, Any] | None]:
    """Remove a topic from what is registered here; nsqd that have it register it again when they connect anew.

    Args:
        everywhere: of a topic with partitions: delete it, messages included, on every nsqd that has some of it.
        dry_run: change nothing, and return what would be done; in a cluster only.
    """
    everything = ALL_PARTITIONS if everywhere else None
    return post("/topic/delete", plan, topic=topic, partition=everything, dry_run=dry_run or None)


def change_topic(
    topic: str,
    *,
    retention_days: int | None = None,
    syncdisk: int | None = None,
    auto_channels: bool | None = None,
    headers: bool = False,
    replicas: int | None = None,
    min_in_sync: int | None = None,
    dry_run: bool = False,
) -> Question[dict[str, Any] | None]:
    """Change what a topic was created with, on every nsqd that has a part of it; one that is away is told later.

    Args:
        retention_days, syncdisk, auto_channels: as of :meth:`create_topic`; None leaves it as it is.
        headers: True: messages may carry headers from now on, for good; False leaves it as it is.
        replicas: copies of each partition, in a cluster; they are made, or taken away, in the background.
        min_in_sync: with fewer copies in sync nothing is acknowledged, in a cluster.
        dry_run: change nothing, and return what would be done; in a cluster only.

    Raises:
        OptionError: nothing is to be changed.
    """
    query = changes(retention_days, syncdisk, auto_channels, headers)
    query |= {"replicator": replicas, "min_in_sync": min_in_sync}
    check_changes(query.values(), "retention_days, syncdisk, auto_channels, headers, replicas and min_in_sync")
    return post("/topic/meta/update", plan, topic=topic, **query, dry_run=dry_run or None)


def tombstone(topic: str, node: str, *, restore: bool = False) -> Question[None]:
    """Hide an nsqd from those who look for a topic, for a while, so that the topic can be deleted there.

    Args:
        node: ``broadcast_address:http_port``.
        restore: show it again instead.
    """
    return post("/topic/tombstone", nothing, topic=topic, node=node, restore=restore or None)


def set_log_level(level: str | int) -> Question[None]:
    """Have nsqlookupd log more or less from now on; only from the machine that it runs on.

    Args:
        level: ``debug``, ``info``, ``warn``, ``error`` or ``fatal``, or a number of Youzan's, 0 to 4.
    """
    return post("/loglevel/set", nothing, loglevel=level)


def create_channel(topic: str, channel: str) -> Question[None]:
    """Register a channel, with its topic; nsqd that get the topic later have the channel from the start."""
    return post("/channel/create", nothing, topic=topic, channel=channel)


def delete_channel(topic: str, channel: str) -> Question[None]:
    """Remove a channel from what is registered here."""
    return post("/channel/delete", nothing, topic=topic, channel=channel)
