"""The answers of nsqd and nsqlookupd, of NSQ, Youzan's NSQ and FlintMQ, as they are read.

Rules of this file: everything may be missing or null and then is empty; of another type it makes the answer
unreadable. Old daemons, and Youzan's, put all of it into ``data``. Names that no topic or channel can have are dropped
here and counted, so nothing behind this file meets one. What there are thousands of has no part in the garbage
collection: an answer has no cycles.

Source: NSQ's HTTP API, NSQ's nsqlookupd, Youzan's HTTP API.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from flintmq.addresses import format_address
from flintmq.client.admin.question import Question, get
from flintmq.names import is_valid_name, shortened
from flintmq.nsqadmin.views import Kind

Value = TypeVar("Value")


class Quantile(msgspec.Struct, gc=False):
    """One percentile; ``value`` in nanoseconds."""

    quantile: float = 0.0
    value: float = 0.0


TEXT_SIZE_MAX = 256
"""Characters of a text that a client or a node says of itself: NSQ's nsqd hands on whatever it was told."""
_NODE_TEXTS = ("hostname", "version", "topology_zone", "topology_region")
_CLIENT_TEXTS = (*_NODE_TEXTS, "client_id", "user_agent", "auth_identity", "auth_identity_url")


def _shorten(row: msgspec.Struct, names: tuple[str, ...]) -> None:
    for name in names:
        if len(text := getattr(row, name)) > TEXT_SIZE_MAX:
            setattr(row, name, shortened(text, TEXT_SIZE_MAX))


class Latency(msgspec.Struct, gc=False):
    """The end-to-end latency as nsqd tells it."""

    count: int = 0
    percentiles: list[Quantile] | None = None


class PubCount(msgspec.Struct, gc=False):
    """Messages that a producer has published to a topic."""

    topic: str = ""
    count: int = 0


class Client(msgspec.Struct, gc=False):
    """A connection to nsqd."""

    client_id: str = ""
    hostname: str = ""
    version: str = ""
    remote_address: str = ""
    user_agent: str = ""
    state: int = 0
    ready_count: int = 0
    in_flight_count: int = 0
    message_count: int = 0
    finish_count: int = 0
    requeue_count: int = 0
    connect_ts: int = 0
    sample_rate: int = 0
    deflate: bool = False
    snappy: bool = False
    authed: bool = False
    auth_identity: str = ""
    auth_identity_url: str = ""
    topology_zone: str = ""
    topology_region: str = ""
    tls: bool = False
    tls_cipher_suite: str = ""
    tls_version: str = ""
    tls_negotiated_protocol: str = ""
    tls_negotiated_protocol_is_mutual: bool = False
    pub_counts: list[PubCount] | None = None

    def __post_init__(self) -> None:
        _shorten(self, _CLIENT_TEXTS)


class Channel(msgspec.Struct, gc=False):
    """A channel of a topic; ``depth_ts_nano`` is of its oldest message, and only Youzan's form has it."""

    channel_name: str = ""
    depth: int = 0
    backend_depth: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    message_count: int = 0
    requeue_count: int = 0
    timeout_count: int = 0
    zone_local_msg_count: int = 0
    region_local_msg_count: int = 0
    global_msg_count: int = 0
    client_count: int | None = None
    client_num: int = 0
    clients: list[Client] | None = None
    paused: bool = False
    skipped: bool = False
    depth_ts_nano: int = 0
    confirmed_sequence: int | None = None
    ordered: bool = False
    e2e_processing_latency: Latency | None = None

    @property
    def connected(self) -> int:
        """Clients that are connected."""
        return self.client_num or len(self.clients or ()) if self.client_count is None else self.client_count


class Partition(msgspec.Struct, gc=False):
    """A partition of a topic as our nsqd tells it."""

    topic_partition: str = "0"
    is_leader: bool = True
    depth: int = 0
    message_count: int = 0
    message_bytes: int = 0
    start_sequence: int | None = None
    next_sequence: int | None = None
    channels: list[Channel] | None = None


class Topic(msgspec.Struct, gc=False):
    """A topic; in Youzan's form one partition of it, whose depth is in bytes, and whose log our own nsqd names."""

    topic_name: str = ""
    topic_full_name: str = ""
    topic_partition: str = ""
    log_id: str = ""
    channels: list[Channel] | None = None
    depth: int = 0
    backend_depth: int = 0
    backend_start: int = 0
    message_count: int = 0
    message_bytes: int = 0
    paused: bool = False
    e2e_processing_latency: Latency | None = None
    partitions: list[Partition] | None = None
    is_leader: bool = True
    partition_num: int = 0
    replica: int = 0
    ordered: bool = False
    multi_part: bool = False
    extend_support: bool = False
    disable_channel_auto_create: bool = False
    retention_days: int = 0
    syncdisk: int = 0
    max_attempts: int = 0
    dead_letter_topic: str = ""
    ttl_ms: int = 0
    max_messages: int = 0
    max_bytes: int = 0
    overflow: str = ""

    def as_partitions(self) -> list[Partition]:
        """Return the partitions of it that a node tells of: our own in a list, Youzan's as itself."""
        if self.partitions or not self.topic_full_name:
            return self.partitions or []
        return [
            Partition(
                topic_partition=self.topic_partition,
                is_leader=self.is_leader,
                message_count=self.message_count,
                message_bytes=max(0, self.depth - self.backend_start),
                channels=self.channels,
            )
        ]

    @property
    def settings(self) -> dict[str, Any]:
        """The properties and limits that are not as by default."""
        names = (
            "partition_num", "replica", "ordered", "multi_part", "extend_support", "disable_channel_auto_create",
            "retention_days", "syncdisk", "max_attempts",
            "dead_letter_topic", "ttl_ms", "max_messages", "max_bytes", "overflow",
        )  # fmt: skip
        return {name: value for name in names if (value := getattr(self, name))}


class Stats(msgspec.Struct):
    """The answer of ``/stats``."""

    version: str = ""
    health: str = ""
    start_time: int = 0
    topics: list[Topic] | None = None
    memory: dict[str, int] | None = None
    producers: list[Client] | None = None
    dropped_names: int = 0


class Info(msgspec.Struct):
    """The answer of ``/info``."""

    version: str = ""
    flintmq_version: str = ""
    broadcast_address: str = ""
    hostname: str = ""
    http_port: int = 0
    tcp_port: int = 0
    start_time: int = 0
    topology_zone: str = ""
    topology_region: str = ""

    def __post_init__(self) -> None:
        _shorten(self, _NODE_TEXTS)

    @property
    def kind(self) -> Kind:
        """The NSQ that it is of."""
        return kind_of(self.version, self.flintmq_version)


class Producer(msgspec.Struct):
    """An nsqd as nsqlookupd lists it."""

    remote_address: str = ""
    hostname: str = ""
    broadcast_address: str = ""
    tcp_port: int = 0
    http_port: int = 0
    version: str = ""
    topology_zone: str = ""
    topology_region: str = ""
    topics: list[str] | None = None
    tombstones: list[bool] | None = None

    def __post_init__(self) -> None:
        _shorten(self, _NODE_TEXTS)

    @property
    def address(self) -> str:
        """``host:http_port``, by which nsqadmin names it."""
        return format_address(self.broadcast_address, self.http_port)

    @property
    def tcp(self) -> str:
        """``host:tcp_port``."""
        return format_address(self.broadcast_address, self.tcp_port)


class Producers(msgspec.Struct):
    """The answer of ``/nodes`` and ``/lookup``."""

    producers: list[Producer] | None = None
    channels: list[str] | None = None


class Names(msgspec.Struct):
    """The answer of ``/topics`` and ``/channels``."""

    topics: list[str] | None = None
    channels: list[str] | None = None


class Copy(msgspec.Struct):
    """Another node's copy of what a node leads."""

    messages_done: int = 0


class Led(msgspec.Struct):
    """A partition that a node leads."""

    topic: str = ""
    partition: int = -1
    messages: int = 0
    followers: dict[str, Copy] = {}


class Copies(msgspec.Struct):
    """The answer of ``/cluster/copies``."""

    partitions: list[Led] = []


class _Wrapped(msgspec.Struct, Generic[Value]):
    data: Value | None = None


def stats(
    topic: str | None = None, channel: str | None = None, *, clients: bool = False, memory: bool = False
) -> Question[Stats]:
    """Ask an nsqd for figures."""
    return get(
        "/stats", read_stats, format="json", topic=topic, channel=channel, include_clients=clients, include_mem=memory
    )


def partition_stats(topic: str, partition: int) -> Question[Stats]:
    """Ask our own nsqd, or Youzan's, for figures in the latter's form, which tell how old messages are."""
    return get(
        "/stats", read_stats, format="json", topic=topic, partition=partition, include_clients=False, include_mem=False
    )


def cluster_copies() -> Question[Copies]:
    """Ask our own nsqd how far the copies are of what it leads, where one is not in sync."""
    return get("/cluster/copies", _reader(Copies), lagging=True)


def info() -> Question[Info]:
    """Ask a daemon who it is."""
    return get("/info", _reader(Info))


def nodes() -> Question[list[Producer]]:
    """Ask a nsqlookupd for every nsqd."""
    return get("/nodes", _read_producers)


def lookup(topic: str) -> Question[list[Producer]]:
    """Ask a nsqlookupd who has a topic."""
    return get("/lookup", _read_producers, topic=topic)


def topics() -> Question[list[str]]:
    """Ask a nsqlookupd for the names of topics."""
    return get("/topics", lambda body: [name for name in _reader(Names)(body).topics or () if is_valid_name(name)])


def channels(topic: str) -> Question[list[str]]:
    """Ask a nsqlookupd for the names of the channels of a topic."""
    return get(
        "/channels",
        lambda body: [name for name in _reader(Names)(body).channels or () if is_valid_name(name)],
        topic=topic,
    )


def read_stats(body: bytes) -> Stats:
    """Read ``/stats``."""
    found: Stats = _reader(Stats)(body)
    every = found.topics or []
    found.topics = [topic for topic in every if is_valid_name(topic.topic_name)]
    found.dropped_names = len(every) - len(found.topics)
    for topic in found.topics:
        channels = topic.channels or []
        topic.channels = [channel for channel in channels if is_valid_name(channel.channel_name)]
        found.dropped_names += len(channels) - len(topic.channels)
    return found


def _read_producers(body: bytes) -> list[Producer]:
    found = _reader(Producers)(body).producers or []
    return [each for each in found if each.broadcast_address and 0 < each.http_port < 65536]


def _reader(kind: type[Value]) -> Any:
    decoders = _DECODERS.get(kind)
    if decoders is None:
        decoders = msgspec.json.Decoder(kind), msgspec.json.Decoder(_Wrapped[kind])  # type: ignore[valid-type]
        _DECODERS[kind] = decoders
    plain, wrapped = decoders

    def read(body: bytes) -> Any:
        if b'"data"' in body[:200]:
            found = wrapped.decode(body).data
            if found is not None:
                return found
        return plain.decode(body)

    return read


_DECODERS: dict[type, tuple[Any, Any]] = {}


def kind_of(version: str, flintmq_version: str) -> Kind:
    """Return whose nsqd has this version."""
    if flintmq_version:
        return "flintmq"
    if not version:
        return "unknown"
    return "youzan" if "HA" in version else "nsq"


def version_key(version: str) -> tuple[int, ...]:
    """Return a version as numbers to compare; what is none comes before all others."""
    numbers: list[int] = []
    for word in version.partition("-")[0].partition("+")[0].split(".")[:4]:
        if not (word.isascii() and word.isdigit() and len(word) < 10):
            return ()
        numbers.append(int(word))
    return (*numbers, 0 if "-" in version else 1)
