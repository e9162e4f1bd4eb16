"""The figures of all nsqd at one moment: asked for once, and shared by everybody who looks.

Rules of this file:

- However many look, the daemons are asked at most once in ``FRESH_S``. Whoever looks later than that has the next round
  begun, and waits for it only when the last one is older than ``SHOWN_S``, or something was changed since.
- A round ends within ``upstream.LOOK_S``: the nsqlookupd have ``_DISCOVERY_S`` of it. An nsqd that is alive, and needs
  longer for the figures of all of its topics, has until ``--http-client-request-timeout``. The nodes of a nsqlookupd
  that does not answer are those that it named last, for ``_REMEMBERED_S``.
- Topics, channels and nodes have a bound, and what is left out is said.
- A cluster knows of partitions that nobody leads, also when their nodes have ended and no nsqlookupd lists them any
  more: it is asked in each round for its nodes, and for all of its topics only while one of those is away, or a topic
  is on no node.
- Rates are between two rounds that are ``_RATE_S`` apart, at first less. A counter that went back was restarted: no
  rate.

Source: NSQ's HTTP API, NSQ's nsqlookupd.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from flintmq.addresses import format_address
from flintmq.client.admin import cluster as cluster_questions
from flintmq.client.admin.health import away_nodes, store_away
from flintmq.client.admin.results import ClusterStatus, ClusterTopic
from flintmq.env import Env
from flintmq.nsqadmin import daemons
from flintmq.nsqadmin.options import NsqadminOptions
from flintmq.nsqadmin.upstream import LOOK_S, Answers, Upstream
from flintmq.nsqadmin.views import ChannelRow, Missing, NodeRow, NodeTopic, Percentile, TopicRow

FRESH_S = 2.0
SHOWN_S = 11.0
"""A little more than the time between two steps of the history, which has a round taken for each."""

NODE_COUNT_MAX = 1000
TOPIC_COUNT_MAX = 20_000
CHANNEL_COUNT_MAX = 100_000
_DISCOVERY_S = 0.9
_REMEMBERED_S = 300.0
_INFO_S = 60.0
_NO_CLUSTER_S = 60.0
"""The time for which a nsqlookupd that knows no cluster is not asked for one again."""
NO_TOPIC = "-"
"""Asks for what a cluster is without its topics."""
_RATE_S = 4.0
_NS_PER_S = 1e9
_NS_PER_MS = 1e6

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """The nodes of the deployment, as discovery has them.

    Attributes:
        nodes: by ``host:http_port``; figures are not in them yet.
        topics: names that nsqlookupd remembers.
        is_listed_now: somebody has said now which nodes there are; else they are those of earlier.
    """

    nodes: dict[str, NodeRow]
    topics: list[str]
    missing: list[Missing]
    notes: list[str] = field(default_factory=list)
    is_listed_now: bool = True


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All figures of one round.

    Attributes:
        nodes: by ``host:http_port``.
        topics: on all nodes together, by name; those that only nsqlookupd remembers included.
        channels: of each topic by name, on all nodes together.
        on_node: topics of each node with their channels, and how many messages each of these has had: no more, because
            many of them are kept for as long as the round is shown.
        away: by topic of a cluster that has partitions which nobody leads: the nodes with copies of them that are away.
    """

    at_s: float
    nodes: dict[str, NodeRow]
    topics: dict[str, TopicRow]
    channels: dict[str, dict[str, ChannelRow]]
    on_node: dict[str, dict[str, dict[str, int]]]
    missing: list[Missing]
    notes: list[str]
    away: dict[str, list[Missing]] = field(default_factory=dict)


class Snapshots:
    """Keeps the latest snapshot."""

    def __init__(self, options: NsqadminOptions, env: Env, upstream: Upstream) -> None:
        self._env = env
        self._upstream = upstream
        self.lookupds = options.lookupd_http_address
        self._nsqds = options.nsqd_http_address
        self._latest: Snapshot | None = None
        self._taken_ns = 0
        self._is_changed = False
        self._round: asyncio.Task[Snapshot] | None = None
        self._rates = Rates()
        self._infos: OrderedDict[str, tuple[int, daemons.Info]] = OrderedDict()
        self._named: dict[str, tuple[int, list[daemons.Producer]]] = {}
        self._without_cluster: dict[str, int] = {}  # until when it is believed of a nsqlookupd

    @property
    def sources(self) -> tuple[str, ...]:
        """The addresses that were configured."""
        return self.lookupds or self._nsqds

    @property
    def rates(self) -> Rates:
        """The rates between the latest rounds."""
        return self._rates

    def forget(self) -> None:
        """Ask anew the next time, because something was changed; a round that is under way may have been too early."""
        self._is_changed = True

    async def close(self) -> None:
        """Give up a round that is under way."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)

    async def get(self, shown_s: float = SHOWN_S) -> Snapshot:
        """Return a snapshot that is at most ``shown_s`` old, and of after the last change."""
        if self._is_changed:
            return await self.fresh()
        if self._latest is None:
            if self._round is None or self._round.done():
                self._begin()
            assert self._round is not None
            return await asyncio.shield(self._round)
        age_s = (self._env.clock.monotonic_ns() - self._taken_ns) / _NS_PER_S
        if age_s < FRESH_S:
            return self._latest
        if self._round is None or self._round.done():
            self._begin()
        if age_s < shown_s or self._round is None:
            return self._latest
        return await asyncio.shield(self._round)

    async def fresh(self) -> Snapshot:
        """Return a snapshot of a round that begins now or later; however many want one, one is under way at a time."""
        before = self._round
        if before is not None and not before.done():
            await asyncio.wait({before})
        if self._round is None or self._round is before or self._round.done():
            self._begin()
        assert self._round is not None
        return await asyncio.shield(self._round)

    def _begin(self) -> None:
        self._is_changed = False
        self._round = asyncio.ensure_future(self._take())
        self._round.add_done_callback(_retrieved)

    async def _take(self) -> Snapshot:
        began_ns = self._env.clock.monotonic_ns()
        known = await self.discover()
        spent_s = (self._env.clock.monotonic_ns() - began_ns) / _NS_PER_S
        left_s = max(0.5, LOOK_S - spent_s)
        answers, _, status = await asyncio.gather(
            self._upstream.look_all("nsqd", known.nodes, daemons.stats(), left_s),
            self._ask_who_they_are(known.nodes, left_s),
            self._ask_cluster(left_s, NO_TOPIC),
        )
        missing = known.missing + answers.missing
        for each in answers.missing:
            known.nodes[each.address].problem = each
        if status is not None and (status.away or _has_others(known.topics, answers)):
            spent_s = (self._env.clock.monotonic_ns() - began_ns) / _NS_PER_S
            status = await self._ask_cluster(max(0.5, LOOK_S - spent_s)) or status
        snapshot: Snapshot = await self._env.run_blocking(self._put_together, known, answers.found, missing, status)
        self._latest, self._taken_ns = snapshot, self._env.clock.monotonic_ns()
        return snapshot

    async def _ask_cluster(self, within_s: float, topic: str | None = None) -> ClusterStatus | None:
        """Return the state of the cluster as the best of the nsqlookupd knows it; None: none of them knows of one."""
        now_ns = self._env.clock.monotonic_ns()
        asked = [each for each in self.lookupds if self._without_cluster.get(each, 0) <= now_ns]
        answers = await self._upstream.look_all(
            "nsqlookupd", asked, cluster_questions.cluster_status(topic=topic), within_s
        )
        for each in answers.failures:
            if each.status == 404:
                self._without_cluster[each.missing.address] = now_ns + int(_NO_CLUSTER_S * _NS_PER_S)
        return min(answers.found.values(), key=how_stale, default=None)

    def _put_together(
        self, known: Known, answers: dict[str, daemons.Stats], missing: list[Missing], status: ClusterStatus | None
    ) -> Snapshot:
        """Make a snapshot; in a thread, because many topics take 0.1 s, and one round at a time."""
        snapshot = merge(self._env.clock.wall_ns() / _NS_PER_S, known, answers, missing, status)
        self._name_kinds(snapshot.nodes)
        self._rates.tell(self._env.clock.monotonic_ns(), snapshot)
        return snapshot

    async def discover(self) -> Known:
        """Find the nodes, from every nsqlookupd or as configured."""
        if not self.lookupds:
            return await self._ask_configured()
        nodes, names = await asyncio.gather(
            self._upstream.look_all("nsqlookupd", self.lookupds, daemons.nodes(), _DISCOVERY_S),
            self._upstream.look_all("nsqlookupd", self.lookupds, daemons.topics(), _DISCOVERY_S),
        )
        now_ns = self._env.clock.monotonic_ns()
        missing = {each.address: each for each in (*nodes.missing, *names.missing)}
        for address in set(self._named) - set(self.lookupds):
            del self._named[address]
        for address, producers in nodes.found.items():
            self._named[address] = (now_ns, producers[:NODE_COUNT_MAX])
        listed = {}
        for address in self.lookupds:
            at_ns, producers = self._named.get(address, (0, []))
            if producers and now_ns - at_ns < _REMEMBERED_S * _NS_PER_S:
                listed[address] = producers
        notes: list[str] = []
        rows = united(listed)
        if len(rows) > NODE_COUNT_MAX:
            notes.append(f"there are {len(rows)} nsqd; the first {NODE_COUNT_MAX} are shown")
            rows = dict(list(rows.items())[:NODE_COUNT_MAX])
        topics = sorted({name for found in names.found.values() for name in found})
        return Known(rows, topics, list(missing.values()), notes, is_listed_now=bool(nodes.found))

    async def _ask_configured(self) -> Known:
        rows: dict[str, NodeRow] = {}
        for address in self._nsqds:
            host, _, port = address.rpartition(":")
            rows[address] = NodeRow(
                address=address, hostname=host, broadcast_address=host.strip("[]"), http_port=int(port)
            )
        return Known(rows, [], [])

    async def identify(self, nodes: dict[str, NodeRow]) -> None:
        """Note in the rows of nodes that were named at the start what they say of themselves."""
        if not self.lookupds:
            await self._ask_who_they_are(nodes, LOOK_S)
            self._name_kinds(nodes)

    async def _ask_who_they_are(self, nodes: dict[str, NodeRow], within_s: float) -> None:
        now_ns = self._env.clock.monotonic_ns()
        due = [
            address
            for address in nodes
            if address not in self._infos or now_ns - self._infos[address][0] > _INFO_S * _NS_PER_S
        ]
        if due:
            answers = await self._upstream.look_all("nsqd", due, daemons.info(), within_s)
            for address, found in answers.found.items():
                self._infos[address] = (now_ns, found)
                self._infos.move_to_end(address)
        while len(self._infos) > NODE_COUNT_MAX:
            self._infos.popitem(last=False)

    def _name_kinds(self, nodes: dict[str, NodeRow]) -> None:
        for address, node in nodes.items():
            known = self._infos.get(address)
            if known is None:
                node.kind = daemons.kind_of(node.version, "")
                continue
            found = known[1]
            node.kind, node.flintmq_version = found.kind, found.flintmq_version
            node.version = node.version or found.version
            node.hostname = found.hostname or node.hostname
            node.tcp_port = node.tcp_port or found.tcp_port
            node.zone, node.region = node.zone or found.topology_zone, node.region or found.topology_region
        newest = max((daemons.version_key(node.version) for node in nodes.values()), default=())
        for node in nodes.values():
            node.is_out_of_date = bool(node.version) and daemons.version_key(node.version) < newest


def _retrieved(task: asyncio.Task[Snapshot]) -> None:
    """Log why a round failed that nobody may have waited for."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("asking the daemons failed: %r", error, exc_info=error)


def united(listed: dict[str, list[daemons.Producer]]) -> dict[str, NodeRow]:
    """Return the nodes that several nsqlookupd list, by ``host:http_port``, sorted by host name."""
    rows: dict[str, NodeRow] = {}
    for lookupd, producers in listed.items():
        for each in producers:
            row = rows.get(each.address)
            if row is None:
                row = rows[each.address] = NodeRow(
                    address=each.address,
                    hostname=each.hostname,
                    broadcast_address=each.broadcast_address,
                    tcp_port=each.tcp_port,
                    http_port=each.http_port,
                    version=each.version,
                    zone=each.topology_zone,
                    region=each.topology_region,
                    remote_addresses=[],
                    topics=topics_of(each),
                )
            row.remote_addresses.append(f"{lookupd}/{each.remote_address or 'N/A'}")
            row.lookupd_count = len(row.remote_addresses)
    return dict(sorted(rows.items(), key=lambda item: (item[1].hostname, item[0])))


def topics_of(producer: daemons.Producer) -> list[NodeTopic]:
    """Return the topics of a node as nsqlookupd lists them; one without marks lists them as they are."""
    marks = producer.tombstones or []
    names = producer.topics or []
    rows = [NodeTopic(name, number < len(marks) and marks[number]) for number, name in enumerate(names)]
    return sorted(rows, key=lambda row: row.topic)


def _has_others(names: Iterable[str], answers: Answers[daemons.Stats]) -> bool:
    """Whether some of these topics are on no node that answers."""
    return not {each.topic_name for found in answers.found.values() for each in found.topics or ()}.issuperset(names)


def how_stale(status: ClusterStatus) -> tuple[bool, bool]:
    """Return a key by which the nsqlookupd comes first that knows how the cluster is now, and of these the master."""
    return bool(status.problem or store_away(status)), not status.is_master


def merge(
    at_s: float,
    known: Known,
    answers: dict[str, daemons.Stats],
    missing: list[Missing],
    status: ClusterStatus | None = None,
) -> Snapshot:
    """Put the figures of all nodes together.

    Args:
        status: of the cluster, with all of its topics where some of them may be on no node that answers; None: none.
    """
    topics: dict[str, TopicRow] = {}
    channels: dict[str, dict[str, ChannelRow]] = {}
    on_node: dict[str, dict[str, dict[str, int]]] = {}
    notes = list(known.notes)
    channel_count = 0
    left_out: set[str] = set()
    for address, node in known.nodes.items():
        found = answers.get(address)
        if found is None:
            continue
        if found.dropped_names:
            notes.append(f"nsqd {address} tells of {found.dropped_names} names that nothing can have: left out")
        counts: dict[str, dict[str, int]] = {}
        on_node[address] = counts
        node.health, node.start_time_s = found.health, found.start_time
        node.version = node.version or found.version
        names: set[str] = set()
        for topic in found.topics or ():
            name = sys.intern(topic.topic_name)  # the same one in every round
            counted = counts.setdefault(name, {})
            for channel in topic.channels or ():
                channel.channel_name = sys.intern(channel.channel_name)
                counted[channel.channel_name] = counted.get(channel.channel_name, 0) + channel.message_count
            total = topics.get(name)
            if total is None:
                if len(topics) >= TOPIC_COUNT_MAX or channel_count >= CHANNEL_COUNT_MAX:
                    left_out.add(name)
                    continue
                total = topics[name] = TopicRow(name=name)
                channels[name] = {}
            row = topic_row(topic, address)
            if name not in names:
                names.add(name)
                total.node_count += 1
            add_topic(total, row)
            of_topic = channels[name]
            for channel in topic.channels or ():
                sum_row = of_topic.get(channel.channel_name)
                if sum_row is None:
                    sum_row = of_topic[channel.channel_name] = ChannelRow(topic=name, name=channel.channel_name)
                    channel_count += 1
                one = channel_row(channel, name, address)
                add_channel(sum_row, one)
                node.depth += one.depth
                node.in_flight += one.in_flight
                node.deferred += one.deferred
                node.client_count += one.client_count
                node.channel_count += 1
            node.depth += row.depth
            node.message_count += row.message_count
        node.topic_count = len(names)
        if not node.topics:
            node.topics = [NodeTopic(name) for name in sorted(names)]
    for name, total in topics.items():
        sum_channels(total, channels[name].values())
    for name in known.topics:
        if name not in topics and len(topics) < TOPIC_COUNT_MAX:
            topics[name] = TopicRow(name=name, is_inactive=True)
            channels[name] = {}
    if left_out:
        notes.append(f"there are more topics and channels than are shown: {len(left_out)} topics are left out")
    away = {} if status is None else _tell_unled(status, topics, channels)
    return Snapshot(at_s, known.nodes, topics, channels, on_node, with_away(missing, away.values()), notes, away)


def _tell_unled(
    status: ClusterStatus, topics: dict[str, TopicRow], channels: dict[str, dict[str, ChannelRow]]
) -> dict[str, list[Missing]]:
    """Note in the rows of a cluster's topics that it has them, and what of them nobody leads; return who is away."""
    found: dict[str, list[Missing]] = {}
    for topic in status.topics:
        if not is_there(topic):
            continue
        row, unled = topics.get(topic.topic), sum(not each.leader for each in topic.partitions)
        if row is None and unled and len(topics) < TOPIC_COUNT_MAX:
            row = topics[topic.topic] = TopicRow(name=topic.topic)
            channels[topic.topic] = {}
        if row is None:
            continue
        row.unled_count, row.is_inactive = unled, False
        if not row.node_count:
            row.partition_count = topic.partition_num
        if unled:
            found[topic.topic] = away_of(topic, status)
    return found


def is_there(topic: ClusterTopic) -> bool:
    """Whether a cluster has a topic, and is not about to delete it."""
    return topic.partition_num > 0 and not topic.is_deleting


def away_of(topic: ClusterTopic, status: ClusterStatus) -> list[Missing]:
    """Return the nodes that are away and have copies of partitions which nobody leads."""
    lost = [each for each in topic.partitions if not each.leader]
    holders = {node for each in lost for node in (*each.replicas, *each.in_sync, *each.leaving)}
    return [
        Missing(
            "nsqd",
            format_address(node.host, node.http_port) if node.host and node.http_port else node.node[:64],
            "down",
            "it is away, and has copies of partitions that nobody leads: what they have is not in the figures",
        )
        for node in away_nodes(status)
        if node.node in holders
    ]


def with_away(missing: Iterable[Missing], away: Iterable[list[Missing]]) -> list[Missing]:
    """Return who is missing, and who is away besides."""
    found = {(each.daemon, each.address): each for each in missing}
    for each in (one for several in away for one in several):
        found.setdefault((each.daemon, each.address), each)
    return list(found.values())


def topic_row(topic: daemons.Topic, node: str) -> TopicRow:
    """Return the figures of a topic of a node, without those of its channels."""
    is_partition = bool(topic.topic_full_name)  # Youzan's form: the depth is in bytes
    return TopicRow(
        name=topic.topic_name,
        node=node,
        node_count=1,
        depth=0 if is_partition else topic.depth,
        backend_depth=0 if is_partition else topic.backend_depth,
        message_count=topic.message_count,
        message_bytes=topic.message_bytes,
        partition_count=topic.partition_num or (1 if is_partition else 0),
        zone_local_count=sum(each.zone_local_msg_count for each in topic.channels or ()),
        region_local_count=sum(each.region_local_msg_count for each in topic.channels or ()),
        global_count=sum(each.global_msg_count for each in topic.channels or ()),
        paused=topic.paused,
        settings=topic.settings,
        latency_count=topic.e2e_processing_latency.count if topic.e2e_processing_latency else 0,
        latency=percentiles(topic.e2e_processing_latency),
    )


def add_topic(total: TopicRow, one: TopicRow) -> None:
    """Add the figures of a node to those of all."""
    total.depth += one.depth
    total.backend_depth += one.backend_depth
    total.message_count += one.message_count
    total.message_bytes += one.message_bytes
    total.zone_local_count += one.zone_local_count
    total.region_local_count += one.region_local_count
    total.global_count += one.global_count
    total.partition_count = max(total.partition_count, one.partition_count)
    total.paused = total.paused or one.paused
    if one.settings and not total.settings:
        total.settings = one.settings
    if one.latency:
        total.latency, total.latency_count = joined(total.latency, total.latency_count, one.latency, one.latency_count)


def sum_channels(total: TopicRow, channels: Iterable[ChannelRow]) -> None:
    """Put what a topic's channels have into its row."""
    rows = list(channels)
    total.channel_count = len(rows)
    total.waiting = total.depth + max((row.depth for row in rows), default=0)
    total.in_flight = sum(row.in_flight for row in rows)
    total.deferred = sum(row.deferred for row in rows)
    total.requeue_count = sum(row.requeue_count for row in rows)
    total.timeout_count = sum(row.timeout_count for row in rows)
    total.client_count = sum(row.client_count for row in rows)


def channel_row(channel: daemons.Channel, topic: str, node: str) -> ChannelRow:
    """Return the figures of a channel of a node."""
    latency = channel.e2e_processing_latency
    return ChannelRow(
        topic=topic,
        name=channel.channel_name,
        node=node,
        depth=channel.depth,
        backend_depth=channel.backend_depth,
        in_flight=channel.in_flight_count,
        deferred=channel.deferred_count,
        message_count=channel.message_count,
        requeue_count=channel.requeue_count,
        timeout_count=channel.timeout_count,
        client_count=channel.connected,
        zone_local_count=channel.zone_local_msg_count,
        region_local_count=channel.region_local_msg_count,
        global_count=channel.global_msg_count,
        paused=channel.paused,
        skipped=channel.skipped,
        ordered=channel.ordered,
        latency_count=latency.count if latency else 0,
        latency=percentiles(latency),
    )


def add_channel(total: ChannelRow, one: ChannelRow) -> None:
    """Add the figures of a node to those of all."""
    total.depth += one.depth
    total.backend_depth += one.backend_depth
    total.in_flight += one.in_flight
    total.deferred += one.deferred
    total.message_count += one.message_count
    total.requeue_count += one.requeue_count
    total.timeout_count += one.timeout_count
    total.client_count += one.client_count
    total.zone_local_count += one.zone_local_count
    total.region_local_count += one.region_local_count
    total.global_count += one.global_count
    total.paused = total.paused or one.paused
    total.skipped = total.skipped or one.skipped
    total.ordered = total.ordered or one.ordered
    if one.oldest_age_s is not None:
        total.oldest_age_s = max(total.oldest_age_s or 0.0, one.oldest_age_s)
    if one.latency:
        total.latency, total.latency_count = joined(total.latency, total.latency_count, one.latency, one.latency_count)


def percentiles(latency: daemons.Latency | None) -> list[Percentile]:
    """Return the percentiles that a daemon tells, in milliseconds; none where nothing was measured."""
    if latency is None or not latency.percentiles or not latency.count:
        return []
    return [
        Percentile(each.quantile, each.value / _NS_PER_MS, each.value / _NS_PER_MS, each.value / _NS_PER_MS)
        for each in latency.percentiles
    ]


def joined(
    first: list[Percentile], first_count: int, second: list[Percentile], second_count: int
) -> tuple[list[Percentile], int]:
    """Return the percentiles of two sets of messages: extremes, and the average by how many there are."""
    count = first_count + second_count
    by_quantile = {each.quantile: each for each in first}
    for each in second:
        known = by_quantile.get(each.quantile)
        if known is None:
            by_quantile[each.quantile] = each
            continue
        average = (known.average_ms * first_count + each.average_ms * second_count) / max(1, count)
        by_quantile[each.quantile] = Percentile(
            each.quantile, min(known.min_ms, each.min_ms), max(known.max_ms, each.max_ms), average
        )
    return sorted(by_quantile.values(), key=lambda each: -each.quantile), count


class Rates:
    """Counters of two earlier rounds, and what those of a new one come to for each second since."""

    def __init__(self) -> None:
        self._base: _Round | None = None
        self._next: _Round | None = None

    def tell(self, now_ns: int, snapshot: Snapshot) -> None:
        """Put the rates into the rows of a round, and remember its counters as far as they will be needed."""
        now = _counters(now_ns, snapshot)
        if self._base is None:
            self._base = now
        elif self._next is None:
            if now_ns - self._base.at_ns >= _RATE_S * _NS_PER_S / 2:
                self._next = now
        elif now_ns - self._next.at_ns >= _RATE_S * _NS_PER_S:
            self._base, self._next = self._next, now
        before = self._base
        duration_s = (now_ns - before.at_ns) / _NS_PER_S
        if duration_s < _RATE_S / 4:
            return
        for address, count in now.nodes.items():
            known = before.nodes.get(address)
            if known is not None and count >= known:
                snapshot.nodes[address].in_per_s = (count - known) / duration_s
        if before.nodes.keys() != now.nodes.keys():  # a node that was away would look like a burst
            return
        for name, (count, waiting) in now.topics.items():
            old = before.topics.get(name)
            if old is not None and count >= old[0]:
                row = snapshot.topics[name]
                row.in_per_s = (count - old[0]) / duration_s
                row.growth_per_s = (waiting - old[1]) / duration_s
        for topic, (names, counts) in now.channels.items():
            old_names, old_counts = before.channels.get(topic, ((), counts))
            places = {name: 2 * number for number, name in enumerate(old_names)}
            for number, name in enumerate(names):
                place = places.get(name)
                arrived, left = counts[2 * number], counts[2 * number + 1]
                if place is not None and arrived >= old_counts[place]:
                    channel = snapshot.channels[topic][name]
                    arrived -= old_counts[place]
                    channel.in_per_s = arrived / duration_s
                    channel.out_per_s = max(0.0, (arrived - left + old_counts[place + 1]) / duration_s)


def _counters(at_ns: int, snapshot: Snapshot) -> _Round:
    return _Round(
        at_ns,
        {name: (row.message_count, row.waiting) for name, row in snapshot.topics.items()},
        {topic: (tuple(rows), _channel_counters(rows.values())) for topic, rows in snapshot.channels.items()},
        {address: node.message_count for address, node in snapshot.nodes.items() if node.problem is None},
    )


def _channel_counters(rows: Iterable[ChannelRow]) -> array[float]:
    return array("d", [n for row in rows for n in (row.message_count, row.depth + row.in_flight + row.deferred)])


@dataclass(frozen=True, slots=True)
class _Round:
    """The counters of a round; of channels by topic their names, and two numbers for each: a tenth of the memory."""

    at_ns: int
    topics: dict[str, tuple[int, int]]
    channels: dict[str, tuple[tuple[str, ...], array[float]]]
    nodes: dict[str, int]


__all__ = ["FRESH_S", "Known", "Rates", "Snapshot", "Snapshots"]
