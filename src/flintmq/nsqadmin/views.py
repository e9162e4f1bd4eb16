"""The answers to the questions that pages and exports have: one type each, complete when it is handed out.

Rules of this file: a view holds values only and asks nobody; what a daemon does not say is None; counters are those of
the daemons, since each was started; rates are per second; durations and times say their unit in the name. Every view
says who did not answer (``missing``), so that no page shows a part as the whole.

Source: NSQ's HTTP API, NSQ's nsqlookupd; docs/partitions.md.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Why = Literal["down", "slow", "refused", "unreadable"]
Kind = Literal["nsq", "flintmq", "youzan", "unknown"]


class Missing(msgspec.Struct, frozen=True):
    """A daemon that did not answer, or not with anything that can be used.

    Attributes:
        daemon: ``nsqd``, ``nsqlookupd`` or ``graphite``.
        address: ``host:port`` of its HTTP port.
        why: ``down``: no connection; ``slow``: no answer in time; ``refused``: an error; ``unreadable``: no answer of
            such a daemon.
        text: the same in words.
    """

    daemon: str
    address: str
    why: Why
    text: str


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The part that all views have.

    Attributes:
        at_s: when the daemons were asked, in seconds since 1970.
        missing: who did not answer.
        notes: what a reader of the page has to know about it, as sentences.
    """

    at_s: float
    missing: list[Missing] = []
    notes: list[str] = []


# -- figures -----------------------------------------------------------------------------------------------------------


class Percentile(msgspec.Struct, frozen=True):
    """One percentile of the end-to-end latency.

    Attributes:
        quantile: such as 0.99.
        min_ms, max_ms, average_ms: over the nodes; the average is weighted by how many messages each counted.
    """

    quantile: float
    min_ms: float
    max_ms: float
    average_ms: float


class ChannelRow(msgspec.Struct, kw_only=True, gc=False):
    """A channel, on all nodes or on one.

    Attributes:
        node: ``host:http_port``; ``*`` for all.
        depth: messages that wait; in flight and deferred ones come on top.
        backend_depth: the part of it that is on disk.
        in_per_s: messages that arrive; None: not known yet.
        out_per_s: messages that are done with; None: not known yet.
        oldest_age_s: of the oldest message that waits; None: not known.
        ordered: it is consumed in order.
    """

    topic: str
    name: str
    node: str = "*"
    depth: int = 0
    backend_depth: int = 0
    in_flight: int = 0
    deferred: int = 0
    message_count: int = 0
    requeue_count: int = 0
    timeout_count: int = 0
    client_count: int = 0
    zone_local_count: int = 0
    region_local_count: int = 0
    global_count: int = 0
    paused: bool = False
    skipped: bool = False
    ordered: bool = False
    in_per_s: float | None = None
    out_per_s: float | None = None
    oldest_age_s: float | None = None
    latency_count: int = 0
    latency: list[Percentile] = []


class TopicRow(msgspec.Struct, kw_only=True, gc=False):
    """A topic, on all nodes or on one.

    Attributes:
        node: as of :class:`ChannelRow`.
        depth: messages that no channel has yet; :attr:`waiting` is what people ask for.
        waiting: :attr:`depth`, and the most that waits in one channel of it.
        in_flight, deferred, requeue_count, timeout_count, client_count: of all its channels together.
        channel_count, node_count: how many there are.
        partition_count: 0: a plain topic.
        in_per_s: published; None: not known yet.
        growth_per_s: by how much ``waiting`` grows; None: not known yet.
        settings: limits and properties that its nsqd tell with it, such as ``partition_num`` and ``max_attempts``.
        is_inactive: no nsqd has it; nsqlookupd only remembers its name.
        unled_count: of a topic of a cluster: partitions that nobody leads, and that no figure has anything of.
    """

    name: str
    node: str = "*"
    depth: int = 0
    backend_depth: int = 0
    waiting: int = 0
    message_count: int = 0
    message_bytes: int = 0
    in_flight: int = 0
    deferred: int = 0
    requeue_count: int = 0
    timeout_count: int = 0
    client_count: int = 0
    channel_count: int = 0
    node_count: int = 0
    partition_count: int = 0
    zone_local_count: int = 0
    region_local_count: int = 0
    global_count: int = 0
    paused: bool = False
    in_per_s: float | None = None
    growth_per_s: float | None = None
    latency_count: int = 0
    latency: list[Percentile] = []
    settings: dict[str, Any] = {}
    is_inactive: bool = False
    unled_count: int = 0


class ClientRow(msgspec.Struct, kw_only=True):
    """A consumer or producer that is connected to an nsqd.

    Attributes:
        share: of the messages of its channel that went to it, 0 to 1; None for producers.
        locality: ``zone``, ``region`` or ``global``: how near it is to its nsqd; empty: nothing is known.
        attributes: words for people: ``TLS1.3``, ``Snappy``, ``Sampled 10%``, identity of AUTH.
        pub_counts: of producers: messages by topic.
    """

    node: str
    address: str
    client_id: str = ""
    hostname: str = ""
    user_agent: str = ""
    connected_s: float = 0
    in_flight: int = 0
    ready: int = 0
    message_count: int = 0
    finish_count: int = 0
    requeue_count: int = 0
    share: float | None = None
    zone: str = ""
    region: str = ""
    locality: str = ""
    attributes: list[str] = []
    pub_counts: dict[str, int] = {}


class NodeTopic(msgspec.Struct, frozen=True):
    """A topic of a node, as nsqlookupd lists it."""

    topic: str
    is_tombstoned: bool = False


class NodeRow(msgspec.Struct, kw_only=True):
    """An nsqd.

    Attributes:
        address: ``broadcast_address:http_port``, by which it is named in paths.
        version: of NSQ's protocol; of an nsqd of ours ``flintmq_version`` is its own.
        is_out_of_date: another node of the deployment has a newer version.
        remote_addresses: ``nsqlookupd/connection`` for each nsqlookupd that knows it.
        lookupd_count: nsqlookupd that know it.
        health: ``OK``, or what is wrong; empty: it did not say.
        problem: why its figures are not there; None: they are.
    """

    address: str
    hostname: str = ""
    broadcast_address: str = ""
    tcp_port: int = 0
    http_port: int = 0
    version: str = ""
    flintmq_version: str = ""
    kind: Kind = "unknown"
    is_out_of_date: bool = False
    zone: str = ""
    region: str = ""
    remote_addresses: list[str] = []
    lookupd_count: int = 0
    topics: list[NodeTopic] = []
    health: str = ""
    start_time_s: int = 0
    depth: int = 0
    in_flight: int = 0
    deferred: int = 0
    message_count: int = 0
    topic_count: int = 0
    channel_count: int = 0
    client_count: int = 0
    in_per_s: float | None = None
    problem: Missing | None = None


# -- views -------------------------------------------------------------------------------------------------------------


class NodesView(View, frozen=True, kw_only=True):
    """All nsqd.

    Attributes:
        lookupd_count: nsqlookupd that were asked; a node that fewer of them know is worth a look.
    """

    nodes: list[NodeRow]
    lookupd_count: int = 0


class NodeView(View, frozen=True, kw_only=True):
    """One nsqd.

    Attributes:
        topics: with figures of this node alone; ``channels`` by topic likewise.
        topic_total: topics of the node; at most ``page_size`` of them are in ``topics``.
        clients: consumers by ``topic/channel``; only where asked for.
        memory: as it says; empty: it does not.
        drain: its state of draining, of our own nsqd; ``draining`` also where its cluster takes everything from it.
        member: it as a node of a cluster; None: it is in none, or none is known.
        damage: what is damaged in its data directory, of our own nsqd.
    """

    node: NodeRow
    topics: list[TopicRow]
    topic_total: int
    page: int
    page_size: int
    channels: dict[str, list[ChannelRow]] = {}
    producers: list[ClientRow] = []
    memory: dict[str, int] = {}
    drain: dict[str, Any] = {}
    damage: dict[str, Any] = {}
    member: ClusterNodeRow | None = None


TOPIC_SORTS = (
    "name", "waiting", "depth", "in_flight", "deferred", "message_count", "in_per_s", "growth_per_s",
    "requeue_count", "timeout_count", "channel_count", "client_count", "node_count", "latency",
)  # fmt: skip
"""Columns that topics are sorted by; ``-`` before one of them is the other way round."""


State = Literal["all", "active", "inactive", "paused", "waiting", "lonely"]
STATES: tuple[State, ...] = ("all", "active", "inactive", "paused", "waiting", "lonely")


class TopicsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The part of all topics that is wanted.

    Attributes:
        text: part of the name of a topic, case ignored.
        sort: one of :data:`TOPIC_SORTS`, with ``-`` before it for the greatest first.
        page: from 1.
        state: ``all``, ``active`` (an nsqd has it), ``inactive``, ``paused``, ``waiting`` (something waits),
            ``lonely`` (something waits, and no consumer is connected).
    """

    text: str = ""
    sort: str = "name"
    page: int = 1
    page_size: int = 50
    state: State = "all"


class TopicsView(View, frozen=True, kw_only=True):
    """A page of topics.

    Attributes:
        total: topics in all; ``matching``: those that are asked for.
        page, page_count: the page that this is; the last one where there are fewer than was asked for.
        sums: of all topics together.
    """

    query: TopicsQuery
    topics: list[TopicRow]
    total: int
    matching: int
    page: int
    page_count: int
    sums: TopicRow


class PartitionRow(msgspec.Struct, kw_only=True):
    """A partition of a topic.

    Attributes:
        leader: ``host:tcp_port`` of who leads it; empty: nobody.
        leader_node: ``host:http_port`` of the same, as nodes are named in paths; empty: not known.
        epoch: how often a leader was elected; 0: not in a cluster.
        in_sync, replicas, leaving: nodes (``host:tcp_port``).
        lag: by node: messages that its copy lacks; only of copies that lack something.
        start_sequence, next_sequence: offsets of what is stored.
        confirmed: by channel: the offset below which everything is finished.
        reason: why nobody leads.
    """

    number: int
    leader: str = ""
    leader_node: str = ""
    is_ready: bool = True
    epoch: int = 0
    in_sync: list[str] = []
    replicas: list[str] = []
    leaving: list[str] = []
    lag: dict[str, int] = {}
    depth: int = 0
    message_count: int = 0
    message_bytes: int = 0
    start_sequence: int | None = None
    next_sequence: int | None = None
    confirmed: dict[str, int] = {}
    reason: str = ""


class QueryLogRow(msgspec.Struct, frozen=True, kw_only=True):
    """A partition log that a query on Spark reads.

    Attributes:
        node: who has it now, ``host:http_port``; empty: nobody who answers.
        read: the next message that the query reads.
        end: the next message to be stored; None: not known.
        messages: between the two; ``seconds``: age of the oldest of them; None: not known.
    """

    topic: str
    partition: int
    log_id: str
    node: str
    read: int
    end: int | None
    messages: int | None
    seconds: float | None


QueryStatus = Literal["running", "silent", "stopped", "failed"]


class QueryRow(msgspec.Struct, frozen=True, kw_only=True):
    """A query on Spark that reads topics.

    Attributes:
        id: of its checkpoint.
        state: ``silent``: it ran when its driver was last heard of, which is too long ago.
        heard_at_s: when its driver was last heard of; ``batch_at_s``: when its last micro-batch ended.
        batch: number of that; None: none has ended yet.
        row_count: rows read since the driver began to watch.
        error: why it failed.
        messages: that are stored and that it has not read; None: not known.
        seconds: age of the oldest of them; None: not known.
    """

    id: str
    name: str
    state: QueryStatus
    heard_at_s: float
    channel: str
    batch: int | None
    batch_at_s: float | None
    row_count: int
    error: str
    messages: int | None
    seconds: float | None
    logs: list[QueryLogRow]


class QueriesView(View, frozen=True, kw_only=True):
    """Every query on Spark that has reported itself, those that are furthest behind first."""

    queries: list[QueryRow]


class TopicView(View, frozen=True, kw_only=True):
    """One topic.

    Attributes:
        total: on all nodes.
        queries: those on Spark that read it, with their logs of this topic alone.
        nodes: on each.
        tombstoned: nodes that nsqlookupd hides.
        settings: by node, ``{"settings": ..., "effective": ...}`` of our own nsqd.
        is_found: False: nobody has it; then it is empty.
        is_of_cluster: a cluster has it.
        replicas, min_in_sync: of such a topic: copies that are wanted, and how many have to confirm; else 0.
        lost_if_deleted: what deleting it would lose, as a sentence.
    """

    name: str
    is_found: bool
    total: TopicRow
    nodes: list[TopicRow] = []
    channels: list[ChannelRow] = []
    partitions: list[PartitionRow] = []
    queries: list[QueryRow] = []
    producers: list[ClientRow] = []
    tombstoned: list[str] = []
    settings: dict[str, Any] = {}
    is_of_cluster: bool = False
    replicas: int = 0
    min_in_sync: int = 0
    lost_if_deleted: str = ""
    lost_if_emptied: str = ""


class ChannelView(View, frozen=True, kw_only=True):
    """One channel; ``clients`` are its consumers, the busiest first, at most 1000 of ``client_total``."""

    topic: str
    name: str
    is_found: bool
    total: ChannelRow
    nodes: list[ChannelRow] = []
    clients: list[ClientRow] = []
    client_total: int = 0
    partitions: list[PartitionRow] = []
    settings: dict[str, Any] = {}
    lost_if_deleted: str = ""
    lost_if_emptied: str = ""


class CounterRow(msgspec.Struct, frozen=True, kw_only=True):
    """The number of messages that a channel of a node has had."""

    node: str
    topic: str
    channel: str
    message_count: int


class CounterView(View, frozen=True, kw_only=True):
    """The messages that all channels have had; ``rows`` are the most, at most 1000."""

    message_count: int
    per_s: float | None
    rows: list[CounterRow]


class LookupdRow(msgspec.Struct, frozen=True, kw_only=True):
    """A nsqlookupd; ``problem`` says why it does not answer."""

    address: str
    version: str = ""
    node_count: int = 0
    topic_count: int = 0
    problem: Missing | None = None


class LookupView(View, frozen=True, kw_only=True):
    """Every nsqlookupd, and topics that no nsqd has, with their channels."""

    lookupds: list[LookupdRow]
    inactive: dict[str, list[str]]


class MoveRow(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a partition that is made or taken away; ``done`` is 0 to 1; None: not known."""

    topic: str
    partition: int
    sources: list[str]
    targets: list[str]
    done: float | None
    bytes_done: int | None = None
    bytes_total: int | None = None
    since_s: float
    state: str
    reason: str


class ClusterNodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """An nsqd of a cluster, as its nsqlookupd says.

    Attributes:
        address: ``host:tcp_port``; of one that is away where it was last, as far as that is known, else its id.
        is_away: it is to have copies, and is not there.
        left: of one that is drained: copies that it has still.
    """

    node_id: str
    address: str
    http_address: str
    zone: str
    leads: int
    holds: int
    is_draining: bool
    is_suspected: bool
    syncs: bool
    is_removal: bool = False
    is_away: bool = False
    left: int = 0


class ElectionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A change of who leads a partition.

    Attributes:
        before, now: who led and who leads (``host:tcp_port``); empty: nobody.
        reason: why; empty: no nsqlookupd that answers knows it.
    """

    at_s: float
    topic: str
    partition: int
    epoch: int
    before: str
    now: str
    reason: str


class ClusterView(View, frozen=True, kw_only=True):
    """A cluster of nsqd.

    Attributes:
        is_cluster: False: there is none, and everything else is empty.
        master: address of the nsqlookupd that elects; empty: none.
        troubled: partitions that nobody leads or that are not as often there as they should be, by topic.
        elections: those that the nsqlookupd or the history remember, the latest first.
        balances: leaders and copies are spread without being asked, copies only in ``balance_window`` (hours, UTC).
        is_upgrading: nothing is moved, because nodes are being restarted.
    """

    is_cluster: bool
    name: str = ""
    cluster_id: str = ""
    master: str = ""
    problem: str = ""
    lookupds: list[str] = []
    nodes: list[ClusterNodeRow] = []
    topic_count: int = 0
    partition_count: int = 0
    troubled: dict[str, list[PartitionRow]] = {}
    moves: list[MoveRow] = []
    elections: list[ElectionRow] = []
    balances: bool = True
    balance_window: str = ""
    is_upgrading: bool = False


Level = Literal["problem", "warning", "note", "ok"]


class FindingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be.

    Attributes:
        level: ``problem`` (does not work), ``warning`` (works, and will bite), ``note``.
        advice: what to do; empty: nothing.
        path: of the page about it, below the base path; empty: none.
    """

    level: Level
    subject: str
    text: str
    advice: str = ""
    path: str = ""


class ProblemsView(View, frozen=True, kw_only=True):
    """All that is wrong, the worst first."""

    findings: list[FindingRow]


class TopView(View, frozen=True, kw_only=True):
    """Top lists: channels (deepest, slowest, most requeued), topics that grow, queries on Spark that are behind.

    Each has at most ``count`` rows.
    """

    deepest: list[ChannelRow]
    slowest: list[ChannelRow]
    most_requeued: list[ChannelRow]
    growing: list[TopicRow]
    behind: list[QueryRow] = []


class PeekRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a channel.

    Attributes:
        message_id: as consumers see it.
        body: its text as far as it is UTF-8, cut at ``max_body``; None: the visitor may not see bodies.
        is_binary: the body is not UTF-8; then ``body`` shows it as hex.
        headers: JSON object it was published with; empty where bodies are hidden.
        due_in_ms: of deferred ones; timeout_in_ms: of those in flight, with ``consumer``.
    """

    node: str
    message_id: str
    partition: int = 0
    trace_id: int = 0
    timestamp_ns: int = 0
    attempts: int = 0
    body_size: int = 0
    body: str | None = None
    is_cut: bool = False
    is_binary: bool = False
    headers: dict[str, Any] = {}
    due_in_ms: int | None = None
    timeout_in_ms: int | None = None
    consumer: str = ""


class PeekView(View, frozen=True, kw_only=True):
    """Messages of a channel; ``can_peek`` False: no node of it can show them, because it is not one of ours."""

    topic: str
    channel: str
    what: Literal["next", "in_flight", "deferred"]
    can_peek: bool
    are_bodies_hidden: bool
    messages: list[PeekRow]


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a message, from the trace topic."""

    timestamp_ns: int
    action: str
    channel: str = ""
    partition: int | None = None
    message_id: str = ""
    trace_id: int | None = None
    attempts: int | None = None
    client: str = ""
    node: str = ""
    delay_ms: int | None = None
    count: int | None = None


class MessageView(View, frozen=True, kw_only=True):
    """A message that was searched for, and its life.

    Attributes:
        found: the stored message, from each node that has one under that id; empty: none.
        events: the oldest first.
        is_complete: False: there may be more events; a bound cut the search off.
        is_traced: some event was recorded; else tracing of the topic may be off.
    """

    topic: str
    by: Literal["id", "trace", "time"]
    value: str
    are_bodies_hidden: bool
    found: list[PeekRow]
    events: list[EventRow]
    is_complete: bool
    is_traced: bool


class DeadLettersView(View, frozen=True, kw_only=True):
    """The dead letters of a topic.

    Attributes:
        dead_topic: where they go, the topic itself if it is one of dead letters; empty: only channels give messages up,
            and theirs go to ``others``.
        others: further topics, to which those of some channels or nodes go, with how many messages wait there; None: it
            is not there yet.
        channel: the channel of it that nsqadmin looks at them with; empty: there is none yet, and ``can_open`` says
            whether it can be made.
        waiting: messages in that channel.
        reasons: how many of those shown died why.
    """

    topic: str
    dead_topic: str
    exists: bool
    channel: str
    waiting: int
    are_bodies_hidden: bool
    messages: list[PeekRow]
    reasons: dict[str, int] = {}
    others: dict[str, int | None] = {}


class DeadTopicRow(msgspec.Struct, frozen=True, kw_only=True):
    """A topic of dead letters.

    Attributes:
        topic: whose they are by its name; empty: that of each letter stands in its headers.
        message_count: that it has had.
    """

    name: str
    topic: str
    message_count: int


class DeadTopicsView(View, frozen=True, kw_only=True):
    """The topics of dead letters by name, at most 500 of ``total``.

    Attributes:
        unasked: topics of which it is not known whether they are, because there was no time to ask.
    """

    topics: list[DeadTopicRow]
    total: int
    unasked: int


class HistoryView(View, frozen=True, kw_only=True):
    """Figures over time, of all, of a node, a topic or a channel.

    Attributes:
        series: ``total``, ``node``, ``topic`` or ``channel``.
        step_s: between two points.
        times_s: when, in seconds since 1970; the lists below are as long, None: not known.
        is_recorded: False: there is no history of it, ``notes`` say why.
    """

    series: str
    name: str
    step_s: int
    is_recorded: bool
    times_s: list[int]
    depth: list[float | None]
    in_per_s: list[float | None]
    out_per_s: list[float | None]
    in_flight: list[float | None]
    latency_ms: list[float | None]


class PlannedCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy that an order to a cluster would make, move or take away.

    Attributes:
        source, target: nodes (``host:tcp_port``); no source: it is new; no target: it is taken away.
        size_bytes: of what would be copied; None: not known.
    """

    topic: str
    partition: int
    source: str
    target: str
    size_bytes: int | None = None


class PlanView(View, frozen=True, kw_only=True):
    """The outcome that an order to a cluster would have.

    Attributes:
        is_change: False: everything is so already.
        what: it, as a sentence of the cluster's.
        copies: the first of ``copy_count``.
        size_bytes: of all ``copies`` that would be made; None: not of each is it known.
    """

    is_change: bool
    what: str
    copies: list[PlannedCopy] = []
    copy_count: int = 0
    size_bytes: int | None = None
    notes: list[str] = []


class DoneView(View, frozen=True, kw_only=True):
    """The outcome of a change.

    Attributes:
        is_done: at least one daemon did it.
        text: what was done, as a sentence.
        failures: who did not do it, or could not be asked, and why.
    """

    is_done: bool
    text: str
    failures: list[Missing] = []


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One change, log-in or refusal.

    Attributes:
        who, role, how: of the visitor; ``address`` is that of the connection.
        action: as in notifications, such as ``delete_topic``; also ``log_in``, ``log_in_failed``, ``log_out``,
            ``set_config``, and ``change`` for a request that was refused before it was read what it is to change.
            ``more_refusals`` stands for those of strangers that have no row of their own.
        subject: what it was about: topic, ``topic/channel``, node, ``option=value``; method and path of a ``change``;
            how many ``more_refusals`` there were.
        outcome: ``done``, ``partly``, ``failed`` or ``refused``.
        failures: who did not do it, or could not be asked, and why.
        is_known: whether it is certain who it was; False: ``who`` is what somebody said.
        forwarded_for: address of the visitor, where the connection was that of a proxy that is believed; empty: it was
            not.
    """

    at_s: float
    who: str
    role: str
    how: str
    address: str
    action: str
    subject: str
    outcome: str
    failures: list[str] = []
    is_known: bool = True
    forwarded_for: str = ""


class AuditView(View, frozen=True, kw_only=True):
    """The latest changes, the newest first; ``path`` is the file that has all of them, empty: none.

    As many changes as were asked for, and refusals of strangers besides, which displace none.
    """

    rows: list[AuditRow]
    path: str
