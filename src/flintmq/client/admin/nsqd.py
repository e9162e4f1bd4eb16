"""Questions to nsqd over HTTP. Each function is a method of ``NsqdAdmin``, on asyncio and on blocking sockets.

Rules of this file: names of topics and channels, and all ranges, are checked by nsqd, whose words the exception has;
what the arguments themselves contradict is an :class:`OptionError`.

Source: NSQ's HTTP API, Youzan's HTTP API.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from flintmq.client.admin.question import Question, check_changes, fields, get, nothing, post, struct, text
from flintmq.client.admin.results import (
    Cancelled,
    DamageState,
    DrainState,
    Peeked,
    PeekedMessage,
    SettingsState,
    StoredMessage,
    Trace,
)
from flintmq.client.core.message import is_hex
from flintmq.client.core.start import StartAt, start_text
from flintmq.client.options import DAY_S, DELAY_MAX_S, SOURCE, Seconds, milliseconds, system_env
from flintmq.errors import OptionError
from flintmq.limits import MESSAGE_ID_SIZE
from flintmq.topic_meta import TopicMeta

MessageId = int | str | bytes
"""A message: :attr:`Message.id`, its hex digits, or the internal id as a number."""

TTL_MAX_S = 10 * 366 * DAY_S
_NS_PER_S = 1_000_000_000


# -- state -----------------------------------------------------------------------------------------------------------


def ping() -> Question[str]:
    """Return ``OK``; an nsqd that is not well refuses with 500 and the reason."""
    return get("/ping", text)


def info() -> Question[dict[str, Any]]:
    """Return versions, addresses and limits, as nsqd says them."""
    return get("/info", fields)


def stats(
    topic: str | None = None,
    channel: str | None = None,
    *,
    partition: int | None = None,
    clients: bool = True,
    memory: bool = False,
) -> Question[dict[str, Any]]:
    """Return ``/stats`` as nsqd says it: ``["topics"][0]["channels"][0]["depth"]`` and so on.

    Args:
        topic, channel: only these.
        partition: only this one, in the form of Youzan's NSQ: an entry for each partition instead of each topic.
        clients: with the clients of each channel, and the producers.
        memory: with figures of nsqd's memory.
    """
    return get(
        "/stats", fields, format="json", topic=topic, channel=channel, partition=partition,
        include_clients=clients, include_mem=memory,
    )  # fmt: skip


def metrics() -> Question[str]:
    """Return the figures as Prometheus reads them."""
    return get("/metrics", text)


def server_stats() -> Question[dict[str, Any]]:
    """Return version, health, start, and how many publishes could not be stored."""
    return get("/serverstats", fields)


def hourly_sizes(topic: str | None = None, *, partition: int | None = None) -> Question[dict[str, Any]]:
    """Return bytes published in the last full hour to each partition; of one topic, in each of the last 22 hours.

    Args:
        partition: needed if the topic has several.
    """
    return get("/message/historystats", fields, topic=topic, partition=partition)


def coordinator_stats(*, topic: str | None = None, partition: int | None = None) -> Question[dict[str, Any]]:
    """Return who of the partitions that an nsqd of a cluster has copies of is in sync, as the redesigned NSQ has it.

    Args:
        topic: without it no partition is listed.
        partition: only this one.
    """
    return get("/coordinator/stats", fields, topic=topic, partition=partition)


def cluster_copies(*, lagging: bool = False) -> Question[dict[str, Any]]:
    """Return what an nsqd of a cluster leads, and how far the copies of it on other nodes are.

    Args:
        lagging: only what has a copy that lacks something.
    """
    return get("/cluster/copies", fields, lagging=lagging or None)


def replicate_topic(topic: str) -> Question[None]:
    """Give a topic that this nsqd has alone to its cluster, with one copy; see :meth:`LookupdAdmin.change_topic`.

    The answer comes when clients can use it again. Another nsqd may have one of that name: then it is refused.
    """
    return post("/topic/replicate", nothing, topic=topic)


def channel_state(topic: str, channel: str, *, partition: int | None = None) -> Question[str]:
    """Return how far a channel is in every partition, or in one, as text for people."""
    return get("/message/stats", text, topic=topic, channel=channel, partition=partition)


# -- topics and channels ---------------------------------------------------------------------------------------------


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
) -> Question[None]:
    """Create a topic on this nsqd, all of its partitions included; nothing happens if it is there and the same.

    Args:
        partitions: 0: a plain topic as NSQ's, unless something else here needs partitions; then one.
        ordered: it can only be consumed in order, and whoever publishes names a partition.
        multipart: whoever publishes names a partition.
        headers: messages may carry headers; does not need partitions.
        retention_days: how long consumed messages are kept; 0: as nsqd's options say.
        syncdisk: synced to the device after so many messages; 0: as nsqd's options say.
        auto_channels: False: subscribing creates no channel.
    """
    meta = TopicMeta(
        partition_num=partitions, ordered=ordered, multi_part=multipart, extend_support=headers,
        retention_days=retention_days, syncdisk=syncdisk, disable_channel_auto_create=not auto_channels,
    )  # fmt: skip
    return post("/topic/create", nothing, topic=topic, **creation(meta))


def creation(meta: TopicMeta) -> dict[str, Any]:
    """The parameters of ``/topic/create``; none for a plain topic."""
    query = meta.query()
    del query["replicator"]  # 1, as by default
    if not meta.partition_num:
        del query["partition_num"]
    return query


def change_topic(
    topic: str,
    *,
    retention_days: int | None = None,
    syncdisk: int | None = None,
    auto_channels: bool | None = None,
    headers: bool = False,
) -> Question[None]:
    """Change what a topic was created with, on this nsqd; nsqlookupd tells the others that have a part of it. One of
    the cluster is refused here: ask nsqlookupd, :meth:`LookupdAdmin.change_topic`.

    Args:
        retention_days, syncdisk, auto_channels: as of :meth:`create_topic`; None leaves it as it is.
        headers: True: messages may carry headers from now on, for good; False leaves it as it is.

    Raises:
        OptionError: nothing is to be changed.
    """
    query = changes(retention_days, syncdisk, auto_channels, headers)
    check_changes(query.values(), "retention_days, syncdisk, auto_channels and headers")
    return post("/topic/meta/update", nothing, topic=topic, **query)


def changes(
    retention_days: int | None, syncdisk: int | None, auto_channels: bool | None, headers: bool
) -> dict[str, Any]:
    """The parameters of ``/topic/meta/update``; None for what stays as it is."""
    return {
        "retention": retention_days,
        "syncdisk": syncdisk,
        "disable_channel_auto_create": None if auto_channels is None else not auto_channels,
        "upgradeext": headers or None,
    }


def delete_topic(topic: str) -> Question[None]:
    """Delete a topic with its channels and messages, on this nsqd."""
    return post("/topic/delete", nothing, topic=topic)


def empty_topic(topic: str) -> Question[None]:
    """Drop the messages of a topic that have not reached its channels."""
    return post("/topic/empty", nothing, topic=topic)


def pause_topic(topic: str) -> Question[None]:
    """Let no message of a topic reach its channels until it is unpaused."""
    return post("/topic/pause", nothing, topic=topic)


def unpause_topic(topic: str) -> Question[None]:
    """End :meth:`pause_topic`."""
    return post("/topic/unpause", nothing, topic=topic)


def create_channel(topic: str, channel: str, *, partition: int | None = None) -> Question[None]:
    """Create a channel of a topic that exists; one that is there stays as it is.

    Args:
        partition: where it was deleted, and is to be again; here and in what follows None is for all partitions.
    """
    return post("/channel/create", nothing, topic=topic, channel=channel, partition=partition)


def delete_channel(topic: str, channel: str, *, partition: int | None = None) -> Question[None]:
    """Delete a channel, or what it has of one partition; its consumers are disconnected."""
    return post("/channel/delete", nothing, topic=topic, channel=channel, partition=partition)


def empty_channel(topic: str, channel: str, *, partition: int | None = None) -> Question[None]:
    """Drop what waits in a channel, is deferred or in flight."""
    return post("/channel/empty", nothing, topic=topic, channel=channel, partition=partition)


def empty_deferred(topic: str, channel: str, *, partition: int | None = None) -> Question[None]:
    """Drop what is deferred in a channel; what waits or is in flight stays."""
    return post("/channel/emptydelayed", nothing, topic=topic, channel=channel, partition=partition)


def pause_channel(topic: str, channel: str, *, partition: int | None = None) -> Question[None]:
    """Deliver nothing of a channel until it is unpaused."""
    return post("/channel/pause", nothing, topic=topic, channel=channel, partition=partition)


def unpause_channel(topic: str, channel: str, *, partition: int | None = None) -> Question[None]:
    """End :meth:`pause_channel`."""
    return post("/channel/unpause", nothing, topic=topic, channel=channel, partition=partition)


def limit_clients(
    topic: str, channel: str, ready: int, *, client_prefix: str | None = None, partition: int | None = None
) -> Question[None]:
    """Let consumers of a channel that are connected now hold at most so many messages, whatever they ask for.

    Args:
        ready: how many; 0 for none.
        client_prefix: only those whose address begins with this.
    """
    return post(
        "/channel/setclientlimit", nothing, topic=topic, channel=channel, ready=ready, client_prefix=client_prefix,
        partition=partition,
    )  # fmt: skip


def set_channel_order(topic: str, channel: str, ordered: bool) -> Question[None]:
    """Have a channel be consumed in order, or no more."""
    return post("/channel/setorder", nothing, topic=topic, channel=channel, order=ordered)


# -- replay ----------------------------------------------------------------------------------------------------------


def set_offset(topic: str, channel: str, start: StartAt, *, partition: int | None = None) -> Question[None]:
    """Let a channel go on at another place: back to have messages delivered again, or forward to leave some out.

    Args:
        start: a datetime with a time zone, a timedelta (so long ago), ``"beginning"`` of what is stored, ``"end"``,
            or of one partition ``Start.offset(bytes)`` and ``Start.count(messages)``.
        partition: only this one.
    """
    now_s = system_env().clock.wall_ns() / _NS_PER_S
    place = start_text(start, now_s).encode()
    return post("/channel/setoffset", nothing, place, topic=topic, channel=channel, partition=partition)


def skip_channel(topic: str, channel: str, *, partition: int | None = None) -> Question[None]:
    """Finish everything of a channel without delivering it, until it is unskipped."""
    return post("/channel/skip", nothing, topic=topic, channel=channel, partition=partition)


def unskip_channel(topic: str, channel: str, *, partition: int | None = None) -> Question[None]:
    """End :meth:`skip_channel`."""
    return post("/channel/unskip", nothing, topic=topic, channel=channel, partition=partition)


# -- settings --------------------------------------------------------------------------------------------------------


def topic_settings(topic: str) -> Question[SettingsState]:
    """Return what was set for a topic, and what is in force for it."""
    return get("/topic/settings", struct(SettingsState), topic=topic)


def channel_settings(topic: str, channel: str) -> Question[SettingsState]:
    """Return what was set for a channel, and what is in force for it."""
    return get("/channel/settings", struct(SettingsState), topic=topic, channel=channel)


def change_topic_settings(
    topic: str,
    *,
    max_attempts: int | None = None,
    dead_letter_topic: str | None = None,
    ttl: Seconds | None = None,
    max_messages: int | None = None,
    max_bytes: int | None = None,
    overflow: Literal["refuse", "drop_oldest"] | None = None,
    inherit: str | Iterable[str] = (),
) -> Question[SettingsState]:
    """Change settings of a topic, which its channels inherit; returns what is in force then.

    Args:
        max_attempts: deliveries after which a message goes to the dead letters; for this and the next three: None
            leaves it as it is, 0 is no limit.
        dead_letter_topic: where they go; ``{topic}`` stands for the topic's name.
        ttl: how old a message may be when it is delivered.
        max_messages, max_bytes: what may be there that is not finished.
        overflow: what happens beyond that: ``refuse`` publishing, or ``drop_oldest``.
        inherit: names of settings that are inherited again, ``ttl_ms`` for ``ttl``; of several words, or one text with
            commas.
    """
    named = (max_attempts, dead_letter_topic, ttl, max_messages, max_bytes, overflow)
    return post("/topic/settings", struct(SettingsState), _changes(named, inherit), topic=topic)


def change_channel_settings(
    topic: str,
    channel: str,
    *,
    max_attempts: int | None = None,
    dead_letter_topic: str | None = None,
    ttl: Seconds | None = None,
    max_messages: int | None = None,
    max_bytes: int | None = None,
    overflow: Literal["refuse", "drop_oldest"] | None = None,
    inherit: str | Iterable[str] = (),
) -> Question[SettingsState]:
    """Change settings of a channel, as :meth:`change_topic_settings` those of a topic."""
    named = (max_attempts, dead_letter_topic, ttl, max_messages, max_bytes, overflow)
    return post("/channel/settings", struct(SettingsState), _changes(named, inherit), topic=topic, channel=channel)


_SETTINGS = ("max_attempts", "dead_letter_topic", "ttl_ms", "max_messages", "max_bytes", "overflow")


def _changes(named: tuple[Any, ...], inherit: str | Iterable[str]) -> bytes:
    """The body of a change; null for what is to be inherited."""
    values = dict(zip(_SETTINGS, named, strict=True))
    ttl = values["ttl_ms"]
    if ttl is not None:
        values["ttl_ms"] = milliseconds(ttl, "ttl", 0, TTL_MAX_S)
    changes = {name: value for name, value in values.items() if value is not None}
    for name in inherit.split(",") if isinstance(inherit, str) else inherit:
        if name in changes:
            raise OptionError("inherit", name, "names of settings that are not set in the same call", SOURCE)
        changes[name] = None
    check_changes(changes, "max_attempts, dead_letter_topic, ttl, max_messages, max_bytes, overflow and inherit")
    return msgspec.json.encode(changes)


# -- messages --------------------------------------------------------------------------------------------------------


def peek(
    topic: str,
    channel: str,
    what: Literal["next", "in_flight", "deferred"] = "next",
    *,
    count: int = 10,
    max_body: int = 4096,
    partition: int | None = None,
) -> Question[list[PeekedMessage]]:
    """Return messages of a channel without disturbing them.

    Args:
        what: those delivered ``next``, those ``in_flight``, or those ``deferred``.
        count: at most so many, 1 to 100.
        max_body: at most so many bytes of each body.
        partition: only this one.
    """

    def read(body: bytes) -> list[PeekedMessage]:
        return struct(Peeked)(body).messages

    return get(
        "/channel/peek", read, topic=topic, channel=channel, what=what, count=count, max_body=max_body,
        partition=partition,
    )  # fmt: skip


def get_message(
    topic: str,
    message_id: MessageId | None = None,
    *,
    offset: int | None = None,
    count: int | None = None,
    partition: int | None = None,
) -> Question[StoredMessage]:
    """Return a stored message: by its id, by an offset that it contains, or by its number in the partition.

    Args:
        partition: needed for an offset or a number, if the topic has several.

    Raises:
        OptionError: not exactly one of the three was given.
    """
    ways = {
        "id": None if message_id is None else message_id_text(message_id),
        "virtual_offset": offset,
        "count": count,
    }
    given = {mode: position for mode, position in ways.items() if position is not None}
    if len(given) != 1:
        raise OptionError("message_id", message_id, "one of message_id, offset and count", SOURCE)
    ((mode, position),) = given.items()
    return get(
        "/message/get", struct(StoredMessage), topic=topic, search_mode=mode, search_pos=position, needext=True,
        partition=partition,
    )  # fmt: skip


def finish_message(topic: str, channel: str, message_id: MessageId) -> Question[None]:
    """Finish a message in one channel, wherever it is: waiting, deferred or in flight."""
    return post("/message/finish", nothing, topic=topic, channel=channel, msgid=message_id_text(message_id))


def cancel_message(topic: str, message_id: MessageId) -> Question[list[str]]:
    """Finish a message in every channel; returns those in which it was not finished already."""

    def read(body: bytes) -> list[str]:
        return struct(Cancelled)(body).channels

    return post("/message/cancel", read, topic=topic, msgid=message_id_text(message_id))


def message_id_text(message_id: MessageId) -> str:
    """An id as nsqd reads it in a query.

    Raises:
        OptionError: bytes that cannot be an id.
    """
    if isinstance(message_id, bytes):
        if len(message_id) != MESSAGE_ID_SIZE:
            raise OptionError("message_id", message_id, f"{MESSAGE_ID_SIZE} bytes, hex digits or a number", SOURCE)
        return message_id.decode("ascii", "replace") if is_hex(message_id) else message_id.hex()
    return str(message_id)


def enable_trace(topic: str, channel: str | None = None, *, only_traced: bool = False) -> Question[None]:
    """Record what happens to the messages of a topic, or of one channel of it, into the topic of traces.

    Args:
        only_traced: only of messages that were published with a trace id.
    """
    only = "traced" if only_traced else None
    return post("/message/trace/enable", nothing, topic=topic, channel=channel, only=only)


def disable_trace(topic: str, channel: str | None = None) -> Question[None]:
    """End :meth:`enable_trace`."""
    return post("/message/trace/disable", nothing, topic=topic, channel=channel)


def find_trace(
    topic: str, message_id: MessageId | None = None, *, trace_id: int | None = None, limit: int = 100
) -> Question[Trace]:
    """Return what this nsqd has recorded of a message, or of all messages with a trace id; the newest events.

    Args:
        limit: at most so many, 1 to 1000.

    Raises:
        OptionError: not exactly one of the two was given.
    """
    if (message_id is None) == (trace_id is None):
        raise OptionError("message_id", message_id, "one of message_id and trace_id", SOURCE)
    name = None if message_id is None else message_id_text(message_id)
    return get("/message/trace", struct(Trace), topic=topic, msgid=name, traceid=trace_id, limit=limit)


# -- the node --------------------------------------------------------------------------------------------------------


def get_config(name: str) -> Question[str]:
    """Return an option of the running nsqd, named as in its configuration file: text as it is, everything else JSON."""
    return get(f"/config/{_option(name)}", text)


def set_config(name: Literal["log_level", "nsqlookupd_tcp_addresses"], value: str | list[str]) -> Question[str]:
    """Change an option of the running nsqd, from where ``--allow-config-from-cidr`` lets it; returns the new value."""
    body = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    return Question("PUT", f"/config/{_option(name)}", text, body)


def _option(name: str) -> str:
    if not (name.isascii() and name.replace("_", "").isalnum()):
        raise OptionError("name", name, "the name of an option, such as log_level", SOURCE)
    return name


def set_log_level(level: str | int) -> Question[None]:
    """Have nsqd log more or less from now on, from where ``--allow-config-from-cidr`` lets it.

    Args:
        level: ``debug``, ``info``, ``warn``, ``error`` or ``fatal``, or a number of Youzan's, 0 to 4.
    """
    return post("/loglevel/set", nothing, loglevel=level)


def damage() -> Question[DamageState]:
    """Return what nsqd has found damaged in its data directory, which ``/stats`` tells of until it is acknowledged."""
    return get("/damage", struct(DamageState))


def acknowledge_damage() -> Question[DamageState]:
    """Have nsqd tell no more of the damage that :meth:`damage` returns; returns what is left of it."""
    return post("/damage/acknowledge", struct(DamageState))


def drain_state() -> Question[DrainState]:
    """Return whether nsqd drains, and what is left."""
    return get("/drain", struct(DrainState))


def drain(timeout: Seconds | None = None) -> Question[DrainState]:
    """Have nsqd take no more messages, wait until consumers have finished what it has, and end.

    Args:
        timeout: the longest that may take, 0 for as long as it takes; None: as nsqd's options say.
    """
    allowed = None if timeout is None else f"{milliseconds(timeout, 'timeout', 0, DELAY_MAX_S)}ms"
    return post("/drain", struct(DrainState), timeout=allowed)


def stop_drain() -> Question[DrainState]:
    """Have nsqd take messages again."""
    return Question("DELETE", "/drain", struct(DrainState))
