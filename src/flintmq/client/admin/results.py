"""Answers of the daemons, where it has a fixed form; ``/stats`` and ``/info`` are handed on as they are.

Rules of this file: fields have the daemons' names, but for units, which go last; a field that an older daemon does not
send has a default.

Source: Youzan's HTTP API (``/message/get``), NSQ's nsqlookupd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flintmq.addresses import format_address
from flintmq.client.core.topology import Node, TopicMeta
from flintmq.errors import UNREADABLE_JSON, FlintError


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as nsqd has it.

    Attributes:
        id: ``partition << 50 | sequence``.
        message_id: as consumers see it: 16 hex digits, or on a topic with partitions the 32 of its 16 bytes.
        text: its body; what is not UTF-8 in there is replaced. :attr:`body` is exact.
        timestamp_ns: when nsqd accepted it, since 1970.
        attempts: deliveries so far; of a message that was not looked for in a channel, what is stored with it.
        offset: bytes of its partition's log before it.
        queue_cnt_index: its number in the partition, from 1.
        ext: its headers, as JSON; empty if there are none.
    """

    id: int
    message_id: str
    text: str = msgspec.field(name="body")
    body_base64: bytes | None = None
    trace_id: int = 0
    timestamp_ns: int = msgspec.field(name="timestamp")
    attempts: int = 0
    offset: int = 0
    queue_cnt_index: int = 0
    ext: str = ""

    @property
    def body(self) -> bytes:
        """Return what was published; the beginning of it, if less was asked for."""
        return self.text.encode() if self.body_base64 is None else self.body_base64

    @property
    def headers(self) -> dict[str, Any]:
        """The headers it was published with; empty if there are none, or none that are a JSON object."""
        try:
            return msgspec.json.decode(self.ext, type=dict[str, Any])
        except UNREADABLE_JSON:
            return {}


class DamageReport(msgspec.Struct, frozen=True):
    """Something in an nsqd's data directory that is not as it was written.

    Attributes:
        at: when it was found, in seconds since 1970.
        path: the file or directory.
        reason: what was found and what was done about it.
        topic, partition, channel: what it concerns, as far as it is about one.
        first, end: the sequences of the messages that are lost (the end exclusive); 0 when that is not known.
        lost: how many messages are lost.
        is_more_possible: whether there may be more.
        elsewhere: how many messages a copy in a cluster had and is to get from another one; they are not lost.
    """

    at: int
    path: str
    reason: str
    topic: str = ""
    partition: int = -1
    channel: str = ""
    first: int = 0
    end: int = 0
    lost: int = 0
    is_more_possible: bool = False
    elsewhere: int = 0


class DamageState(msgspec.Struct, frozen=True):
    """The damage that nobody has acknowledged.

    Attributes:
        count: reports in all; at most 1000 of them are listed.
        lost: messages that are lost by what is listed.
        is_more_possible: whether there may be more.
        reports: the newest first.
    """

    count: int
    lost: int
    is_more_possible: bool
    reports: list[DamageReport]


class Holder(msgspec.Struct, frozen=True):
    """The consumer that a message is in flight with."""

    remote_address: str = ""
    client_id: str = ""
    hostname: str = ""


class PeekedMessage(StoredMessage, frozen=True, kw_only=True):
    """A message of a channel.

    Attributes:
        body_size: of all of its body.
        due_ns: when it comes due, since 1970; of deferred ones.
        due_in_ms: until then.
        timeout_in_ms: until it is taken back from ``client``; of those in flight.
    """

    partition: int = 0
    body_size: int = 0
    due_ns: int | None = msgspec.field(name="due", default=None)
    due_in_ms: int | None = None
    timeout_in_ms: int | None = None
    client: Holder | None = None


class Peeked(msgspec.Struct, frozen=True):
    """The answer of ``/channel/peek``."""

    messages: list[PeekedMessage]


class Cancelled(msgspec.Struct, frozen=True):
    """The answer of ``/message/cancel``."""

    channels: list[str]


class SettingsState(msgspec.Struct, frozen=True):
    """Settings of a topic or channel.

    Attributes:
        settings: what was set here.
        effective: what is in force, what is inherited included.
    """

    topic: str
    settings: dict[str, Any]
    effective: dict[str, Any]
    channel: str = ""


class TraceEvent(msgspec.Struct, frozen=True):
    """Something that happened to a message; what is not known, or does not apply, is None or empty.

    Attributes:
        timestamp_ns: since 1970.
        action: PUB, START (it was delivered), FIN, REQ, REQ_DEFER, TIMEOUT, TOUCH and more.
        msgid: internal id, ``partition << 50 | sequence``.
        message_id: as consumers see it, as :attr:`StoredMessage.message_id`.
        traceid: 0 or None if it was published without.
        offset: bytes of its partition's log before it.
        client: address of who published or consumes.
        node: address of the nsqd.
        delay_ms: of REQ_DEFER.
        count: of DROPPED: events that were not recorded.
    """

    timestamp_ns: int = msgspec.field(name="timestamp")
    action: str
    topic: str = ""
    msgid: int | None = None
    traceid: int | None = None
    partition: int | None = None
    channel: str = ""
    message_id: str = ""
    offset: int | None = None
    attempts: int | None = None
    client: str = ""
    node: str = ""
    delay_ms: int | None = None
    count: int | None = None


class Trace(msgspec.Struct, frozen=True):
    """The recorded trace of a message.

    Attributes:
        events: the oldest first.
        complete: False: there may be more; a bound cut the search off, or ``limit``.
        searched_bytes: how much was looked through.
        oldest_ns: time of the oldest that was looked at; None if there was nothing.
    """

    events: list[TraceEvent]
    complete: bool
    searched_bytes: int = 0
    oldest_ns: int | None = msgspec.field(name="oldest", default=None)


class DrainState(msgspec.Struct, frozen=True):
    """Whether an nsqd drains, and what is left.

    Attributes:
        since_s: seconds since 1970.
        seconds_left: None: as long as it takes.
        message_count, topic_count: what is left, in all topics.
        topics: the first of those that are not empty, with their channels.
    """

    draining: bool
    since_s: int = msgspec.field(name="since", default=0)
    seconds_left: float | None = None
    message_count: int = 0
    topic_count: int = 0
    topics: list[dict[str, Any]] = []


class ListedNode(Node, frozen=True):
    """An nsqd as nsqlookupd lists it.

    Attributes:
        topics, tombstones: side by side: whether the node is hidden from who looks for the topic.
        partitions: of its topics with partitions, as the daemon says.
    """

    remote_address: str = ""
    topology_zone: str = ""
    topology_region: str = ""
    topics: list[str] = msgspec.field(default_factory=list)
    tombstones: list[bool] = msgspec.field(default_factory=list)
    partitions: dict[str, Any] = msgspec.field(default_factory=dict)


class Nodes(msgspec.Struct, frozen=True):
    """The answer of ``/nodes``."""

    producers: list[ListedNode]


class Found(msgspec.Struct, frozen=True):
    """The place of a topic.

    Attributes:
        producers: every nsqd that has some of it.
        partitions: the nsqd of each partition; empty if the topic has none.
        meta: what the topic was created with; None for a plain one.
    """

    channels: list[str]
    producers: list[ListedNode]
    partitions: dict[int, ListedNode] = {}
    meta: TopicMeta | None = None


class Topics(msgspec.Struct, frozen=True):
    """The answer of ``/topics``."""

    topics: list[str]


class Channels(msgspec.Struct, frozen=True):
    """The answer of ``/channels``."""

    channels: list[str]


class ClusterLookupd(msgspec.Struct, frozen=True):
    """A nsqlookupd of a cluster.

    Attributes:
        lookupd, incarnation: ids; the latter is another one after each start.
    """

    lookupd: str
    incarnation: str
    host: str
    tcp_port: int
    http_port: int


class ClusterNode(msgspec.Struct, frozen=True):
    """An nsqd of a cluster.

    Attributes:
        node, incarnation: ids; the former is its data directory's, the latter another one after each start.
        host, tcp_port, http_port: where clients reach it; of one that is away where they did, empty and 0: not known.
        syncs: what it acknowledges survives a power loss.
        host_id, zone: of its machine; empty: not known.
        version: of what nodes say to each other.
        is_draining: it gets no partitions, and gives its own away.
        is_full: its disk has no room: it leads nothing that another one can lead.
        is_older: its data directory was an older copy when it started: what it had in sync counts no more.
        copies_max: partitions for which it has open files; 0: no limit, or it does not say.
        kept_alone: topics that are to be the cluster's and are its alone still, with reasons; the first of them.
        kept_alone_count: how many there are.
        suspected: the master takes it for dead.
        leads, holds: partitions.
        is_away: it has copies, or is to have some, and does not live.
    """

    node: str
    host: str
    tcp_port: int
    http_port: int
    incarnation: str = ""
    peer_port: int = 0
    syncs: bool = False
    host_id: str = ""
    zone: str = ""
    version: int = 0
    is_draining: bool = False
    is_full: bool = False
    is_older: bool = False
    copies_max: int = 0
    kept_alone: list[tuple[str, str]] = []
    kept_alone_count: int = 0
    suspected: bool = False
    leads: int = 0
    holds: int = 0
    is_away: bool = False

    @property
    def address(self) -> str:
        """``host:port`` of its TCP port; its id where that is not known."""
        return format_address(self.host, self.tcp_port) if self.host else self.node


class ClusterPartition(msgspec.Struct, frozen=True):
    """A partition of a cluster; nodes by id.

    Attributes:
        epoch: how often a leader was elected.
        leader, address: who leads; empty: nobody does.
        is_ready: it can be consumed, as far as the nsqlookupd knows that was asked.
        in_sync: who has all that was acknowledged.
        replicas: who is to have a copy.
        leaving: who is to have none any more, once the others do.
        may_have_lost: a leader may have lacked, when it was elected, some of what was acknowledged, and nobody has
            acknowledged that.
        reason: why nobody leads.
        unconfirmed: those in sync who may lack some of it again, until their leader has seen what they have: their
            machine was restarted, or their data directory was older or empty.
        unready_s: for how long the leader could have said there that it is ready, and has not; 0: it has, or nobody
            leads, or the release of that nsqlookupd does not say it.
    """

    partition: int
    epoch: int = 0
    leader: str = ""
    address: str = ""
    is_ready: bool = False
    in_sync: list[str] = []
    replicas: list[str] = []
    leaving: list[str] = []
    may_have_lost: bool = False
    reason: str = ""
    unconfirmed: list[str] = []
    unready_s: float = 0.0

    @property
    def confirmed(self) -> list[str]:
        """The members of the in-sync set that are known to have everything."""
        return [node for node in self.in_sync if node not in self.unconfirmed]


class ClusterTopic(msgspec.Struct, frozen=True):
    """A topic of a cluster.

    Attributes:
        number: drawn when it was created.
        replicator: copies of each partition that are wanted.
        min_in_sync: with fewer in sync nothing is acknowledged.
        meta: what it was created with.
    """

    topic: str
    partitions: list[ClusterPartition]
    number: str = ""
    partition_num: int = 0
    replicator: int = 0
    min_in_sync: int = 1
    is_deleting: bool = False
    meta: dict[str, Any] = {}


class Drain(msgspec.Struct, frozen=True):
    """A node that everything is taken from.

    Attributes:
        is_removal: it is forgotten when it has nothing and has ended.
        left: copies that it has.
        reason: why they stay; empty: they go, or the one that was asked does not know.
    """

    node: str
    is_removal: bool = False
    left: int = 0
    reason: str = ""


class SeveralNodes(FlintError):
    """An address is that of several nodes of a cluster, which their configuration has in common by mistake.

    Args:
        address: ``host:port``.
        nodes: their ids.
    """

    def __init__(self, address: str, nodes: Sequence[str]) -> None:
        super().__init__(address, tuple(nodes))
        self.address = address
        self.nodes = tuple(nodes)

    def __str__(self) -> str:
        return f"{len(self.nodes)} nodes say that they are {self.address}: {', '.join(self.nodes)}; name the id"


class ClusterStatus(msgspec.Struct, frozen=True):
    """The state of a cluster, as the nsqlookupd knows it that was asked.

    Attributes:
        problem: why that one takes no part; empty: it does.
        revision: of the coordination store, as far as it is known.
        is_master: that one is the master.
        master: the one that is; None: there is none.
        nodes: those that live.
        away: those that have copies, or are to have some, and do not live; empty from an older release, see
            :func:`flintmq.client.admin.health.away_nodes`.
        unreadable: keys of the store that cannot be read, and why.
        drains: nodes that an operator has everything taken from.
        settings: of the whole cluster: ``balances``, ``balance_window``, ``is_upgrading`` and so on.
        store_away_since_s: since when that one is without the coordination store, and all of this as it was then, in
            seconds since 1970; None: it has it, or has been without it for no longer than a lease.
        store_read_only_since_s: since when the coordination store takes no writes, as far as that one knows, in seconds
            since 1970; None: it takes them.
        store_read_only_reason: why it takes none.
    """

    cluster: str
    cluster_id: str
    problem: str
    revision: int
    is_master: bool
    master: ClusterLookupd | None
    lookupds: list[ClusterLookupd]
    nodes: list[ClusterNode]
    topics: list[ClusterTopic]
    unreadable: list[dict[str, str]] = []
    drains: list[Drain] = []
    settings: dict[str, Any] = {}
    away: list[ClusterNode] = []
    store_away_since_s: float | None = msgspec.field(name="store_away_since", default=None)
    store_read_only_since_s: float | None = msgspec.field(name="store_read_only_since", default=None)
    store_read_only_reason: str = ""

    def find_node(self, name: str) -> ClusterNode | None:
        """Return the node with this id, or at this address (``host:port`` of TCP or HTTP). Those that are away are
        known by the address that they had, where no node that lives has it.

        Raises:
            SeveralNodes: several have that address.
        """
        for nodes in (self.nodes, self.away):
            found = next((node for node in nodes if node.node == name), None)
            if found is not None:
                return found
        for nodes in (self.nodes, self.away):
            there = [node for node in nodes if node.host and name in _addresses(node)]
            if len(there) > 1:
                raise SeveralNodes(name, sorted(node.node for node in there))
            if there:
                return there[0]
        return None


def _addresses(node: ClusterNode) -> tuple[str, ...]:
    return node.address, format_address(node.host, node.http_port)


class Move(msgspec.Struct, frozen=True):
    """A copy of a partition that is being made, or taken away.

    Attributes:
        sources: ids of the nodes whose copies go.
        targets: ids of the nodes that get one.
        bytes_done, bytes_total: of the copies that are being made; None: not known.
        since_s: seconds since 1970.
        state: of it, as the master says it.
        reason: why it does not go on.
    """

    topic: str
    partition: int
    sources: list[str] = msgspec.field(name="from", default_factory=list)
    targets: list[str] = msgspec.field(name="to", default_factory=list)
    bytes_done: int | None = None
    bytes_total: int | None = None
    since_s: float = msgspec.field(name="since", default=0)
    state: str = ""
    reason: str = ""


class Election(msgspec.Struct, frozen=True):
    """A change of who leads a partition; nodes by id.

    Attributes:
        at_s: when that nsqlookupd saw it, in seconds since 1970.
        epoch: how often a leader was elected by then.
        before, now: who led, and who leads; empty: nobody.
        reason: why; empty: another nsqlookupd was the master, and knows it.
    """

    at_s: float = msgspec.field(name="at")
    topic: str
    partition: int
    epoch: int = 0
    before: str = msgspec.field(name="from", default="")
    now: str = msgspec.field(name="to", default="")
    reason: str = ""


class Elections(msgspec.Struct, frozen=True):
    """The answer of ``/cluster/elections``."""

    elections: list[Election]


class Moves(msgspec.Struct, frozen=True):
    """The answer of ``/cluster/moves``."""

    moves: list[Move]
