"""The questions that pages and exports have, and how each becomes a view.

Rules of this file: nothing is raised because a daemon is down, slow or wrong; the view says so. Lists have a bound and
are cut, sorted and filtered here, so that a page costs what it shows. Looking changes nothing.

Source: NSQ's HTTP API, NSQ's nsqlookupd; docs/partitions.md, docs/cluster.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flintmq.addresses import format_address
from flintmq.client.admin import cluster as cluster_questions
from flintmq.client.admin import nsqd as nsqd_questions
from flintmq.client.admin.health import store_away
from flintmq.client.admin.question import Question
from flintmq.client.admin.results import ClusterPartition, ClusterStatus, ClusterTopic, Election, Move
from flintmq.env import Env
from flintmq.names import is_valid_name
from flintmq.nsqadmin import daemons
from flintmq.nsqadmin.access import Visitor
from flintmq.nsqadmin.audit import Audit
from flintmq.nsqadmin.daemons import cluster_copies
from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.history import History, SeriesKind
from flintmq.nsqadmin.messages import PEEK_COUNT, By, Messages, What
from flintmq.nsqadmin.problems import findings
from flintmq.nsqadmin.queries import Queries, query_of
from flintmq.nsqadmin.snapshots import (
    NO_TOPIC,
    Snapshot,
    Snapshots,
    add_channel,
    add_topic,
    away_of,
    channel_row,
    how_stale,
    is_there,
    sum_channels,
    topic_row,
    with_away,
)
from flintmq.nsqadmin.upstream import LOOK_S, Answers, NotAnswered, Upstream
from flintmq.nsqadmin.views import (
    TOPIC_SORTS,
    AuditView,
    ChannelRow,
    ChannelView,
    ClientRow,
    ClusterNodeRow,
    ClusterView,
    CounterRow,
    CounterView,
    DeadLettersView,
    DeadTopicsView,
    ElectionRow,
    HistoryView,
    LookupdRow,
    LookupView,
    MessageView,
    Missing,
    MoveRow,
    NodesView,
    NodeView,
    PartitionRow,
    PeekView,
    PlannedCopy,
    PlanView,
    ProblemsView,
    QueriesView,
    TopicRow,
    TopicsQuery,
    TopicsView,
    TopicView,
    TopView,
)

PAGE_SIZE_MAX = 500
CLIENT_COUNT_MAX = 1000
COUNTER_COUNT_MAX = 1000
INACTIVE_COUNT_MAX = 200
PARTITION_COUNT_MAX = 64
ELECTION_COUNT_MAX = 200
SEEN_LOGS_MAX = 8
MEMBER_COUNT_MAX = 10_000
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class _Cluster:
    """A cluster as its nsqlookupd know it.

    Attributes:
        status: as the best of them does; None: there is no cluster, or none that answers is in one.
        stale: why the others do not know how it is now, by address; empty where the best one does not know it either.
    """

    status: ClusterStatus | None
    missing: list[Missing]
    stale: dict[str, str]

    def find(self, topic: str) -> ClusterTopic | None:
        """Return a topic of it; None: it has no such topic."""
        found = self.status.topics if self.status is not None else ()
        return next((each for each in found if each.topic == topic and is_there(each)), None)


class Gather:
    """Asks, and puts together."""

    def __init__(
        self, env: Env, upstream: Upstream, snapshots: Snapshots, audit: Audit, past: History, queries: Queries
    ) -> None:
        self._audit = audit
        self._queries = queries
        self._kept_already: set[Election] = set()
        self._members: dict[str, str] = {}  # addresses by id, also of nodes of a cluster that are gone
        self._history = past
        self.messages = Messages(env, upstream, snapshots)
        self._env = env
        self._upstream = upstream
        self._snapshots = snapshots

    @property
    def snapshots(self) -> Snapshots:
        """The figures of all, which everybody shares."""
        return self._snapshots

    # -- lists --------------------------------------------------------------------------------------------------------

    async def nodes(self) -> NodesView:
        """Return every nsqd."""
        found = await self._snapshots.get()
        return NodesView(
            at_s=found.at_s,
            missing=found.missing,
            notes=found.notes,
            nodes=list(found.nodes.values()),
            lookupd_count=len(self._snapshots.lookupds),
        )

    async def topics(self, query: TopicsQuery, page_size_max: int | None = None) -> TopicsView:
        """Return a page of topics; what cannot be in a query is as by default."""
        return topics_view(await self._snapshots.get(), query, page_size_max or PAGE_SIZE_MAX)

    async def history(self, series: SeriesKind, name: str, span_s: int) -> HistoryView:
        """Return figures over time.

        Args:
            series: whose; ``total`` has no name, ``node`` its address, ``topic`` its name, ``channel``
                ``topic/channel``.
            span_s: so many seconds before now, at most 7 days.
        """
        return await self._history.read(series, name, span_s)

    async def audit(self, count: int = 200, text: str = "") -> AuditView:
        """Return the latest changes."""
        return AuditView(at_s=self._now_s(), rows=self._audit.latest(count, text), path=self._audit.path)

    async def counter(self) -> CounterView:
        """Return how many messages all channels have had."""
        found = await self._snapshots.get()
        rows = [
            CounterRow(node=address, topic=topic, channel=channel, message_count=count)
            for address, topics in found.on_node.items()
            for topic, channels in topics.items()
            for channel, count in channels.items()
        ]
        rates = [row.in_per_s for of_topic in found.channels.values() for row in of_topic.values()]
        known = [rate for rate in rates if rate is not None]
        return CounterView(
            at_s=found.at_s,
            missing=found.missing,
            notes=found.notes,
            message_count=sum(row.message_count for row in rows),
            per_s=sum(known) if known or not rates else None,
            rows=sorted(rows, key=lambda row: -row.message_count)[:COUNTER_COUNT_MAX],
        )

    async def top(self, count: int = 10) -> TopView:
        """Return the channels and topics that stand out."""
        found, queries = await asyncio.gather(self._snapshots.get(), self._queries.rows())
        count = max(1, min(count, 100))
        channels = [row for rows in found.channels.values() for row in rows.values()]

        def most(key: Callable[[ChannelRow], float]) -> list[ChannelRow]:
            return sorted((row for row in channels if key(row) > 0), key=lambda row: (-key(row), row.topic, row.name))[
                :count
            ]

        growing = [row for row in found.topics.values() if (row.growth_per_s or 0) > 0]
        return TopView(
            at_s=found.at_s,
            missing=found.missing,
            notes=found.notes,
            deepest=most(lambda row: row.depth),
            slowest=most(slowest_ms),
            most_requeued=most(lambda row: row.requeue_count + row.timeout_count),
            growing=sorted(growing, key=lambda row: (-(row.growth_per_s or 0), row.name))[:count],
            behind=[row for row in queries if row.messages][:count],
        )

    def forget_query(self, query: str) -> bool:
        """Forget a query on Spark; whether it was known."""
        return self._queries.forget(query)

    async def queries(self) -> QueriesView:
        """Return every query on Spark that has reported itself."""
        rows, found = await asyncio.gather(self._queries.rows(), self._snapshots.get())
        return QueriesView(at_s=self._now_s(), missing=found.missing, notes=found.notes, queries=rows)

    async def problems(self) -> ProblemsView:
        """Return what is wrong."""
        found, queries, cluster = await asyncio.gather(
            self._snapshots.get(), self._queries.rows(), self._cluster_status()
        )
        return ProblemsView(
            at_s=found.at_s,
            missing=found.missing,
            notes=found.notes,
            findings=findings(
                found, len(self._snapshots.lookupds), cluster.status, cluster.missing, queries, cluster.stale
            ),
        )

    async def peek(self, topic: str, channel: str, what: What, visitor: Visitor, count: int = PEEK_COUNT) -> PeekView:
        """Return messages of a channel: the next ones, those in flight, or the deferred ones."""
        return await self.messages.peek(topic, channel, what, visitor, count)

    async def message(self, topic: str, by: By, value: str, visitor: Visitor) -> MessageView:
        """Return a message and its life."""
        return await self.messages.find(topic, by, value, visitor)

    async def dead_letters(self, topic: str, visitor: Visitor) -> DeadLettersView:
        """Return the dead letters of a topic."""
        return await self.messages.dead_letters(topic, visitor)

    async def dead_topics(self) -> DeadTopicsView:
        """Return the topics of dead letters."""
        return await self.messages.dead_topics()

    async def lookup(self) -> LookupView:
        """Return every nsqlookupd, and the topics that no nsqd has."""
        found = await self._snapshots.get()
        lookupds = self._snapshots.lookupds
        names = sorted(name for name, row in found.topics.items() if row.is_inactive)
        notes = list(found.notes)
        if len(names) > INACTIVE_COUNT_MAX:
            notes.append(f"{len(names)} topics are inactive; the channels of the first {INACTIVE_COUNT_MAX} are shown")
        infos, nodes, topics, channels = await asyncio.gather(
            self._upstream.look_all("nsqlookupd", lookupds, daemons.info()),
            self._upstream.look_all("nsqlookupd", lookupds, daemons.nodes()),
            self._upstream.look_all("nsqlookupd", lookupds, daemons.topics()),
            self.channels_of(names[:INACTIVE_COUNT_MAX]),
        )
        problems = {each.address: each for each in (*nodes.missing, *topics.missing)}
        rows = [
            LookupdRow(
                address=address,
                version=infos.found[address].version if address in infos.found else "",
                node_count=len(nodes.found.get(address, ())),
                topic_count=len(topics.found.get(address, ())),
                problem=problems.get(address),
            )
            for address in lookupds
        ]
        inactive = {name: channels.get(name, []) for name in names}
        return LookupView(at_s=found.at_s, missing=found.missing, notes=notes, lookupds=rows, inactive=inactive)

    async def channels_of(self, topics: Iterable[str]) -> dict[str, list[str]]:
        """Return the channels that nsqlookupd has of each topic."""
        names = list(topics)
        answers = await asyncio.gather(
            *(self._upstream.look_all("nsqlookupd", self._snapshots.lookupds, daemons.channels(name)) for name in names)
        )
        return {
            name: sorted({channel for found in answer.found.values() for channel in found})
            for name, answer in zip(names, answers, strict=True)
        }

    # -- one of them --------------------------------------------------------------------------------------------------

    async def node(self, address: str, page: int = 1, page_size: int = 50, text: str = "") -> NodeView | None:
        """Return one nsqd with a page of its topics; None: there is none of that address."""
        known = await self._snapshots.get()
        node = known.nodes.get(address)
        if node is None:
            return None
        missing: list[Missing] = []
        asking = asyncio.ensure_future(self.member(address))
        try:
            found = await self._upstream.look("nsqd", address, daemons.stats(clients=True, memory=True))
        except NotAnswered as error:
            found = daemons.Stats()
            missing.append(error.missing)
        drain: dict[str, Any] = {}
        damage: dict[str, Any] = {}
        if node.kind == "flintmq" and not missing:
            (drain, damage), missing = await self._extras_of(address)
        member = await asking
        if member is not None and member.is_draining:
            drain = {**drain, "draining": True}
        topics = _joined_partitions(found.topics or [], address)
        rows = sorted(topics.values(), key=lambda each: each[0].name)
        rows = [each for each in rows if text.lower() in each[0].name.lower()]
        page_size = max(1, min(page_size, PAGE_SIZE_MAX))
        page = _page(page, page_size, len(rows))
        shown = rows[(page - 1) * page_size : page * page_size]
        return NodeView(
            at_s=known.at_s,
            missing=missing,
            node=node,
            topics=[topic for topic, _ in shown],
            topic_total=len(rows),
            page=page,
            page_size=page_size,
            channels={topic.name: channels for topic, channels in shown},
            producers=[client_row(each, address, self._now_s()) for each in (found.producers or ())[:CLIENT_COUNT_MAX]],
            memory=found.memory or {},
            drain=drain,
            damage=damage,
            member=member,
        )

    async def member(self, address: str) -> ClusterNodeRow | None:
        """Return a node as its cluster knows it; None: it is in none, or nobody tells.

        Args:
            address: ``host:http_port``.
        """
        status = (await self._cluster_status(NO_TOPIC)).status
        found = _member_rows(status) if status is not None else ()
        return next((row for row in found if row.http_address == address), None)

    async def _extras_of(self, address: str) -> tuple[list[dict[str, Any]], list[Missing]]:
        """Ask one of ours whether it drains, and what is damaged; an older one, which does not know, is not missing."""
        found: list[dict[str, Any]] = []
        missing: list[Missing] = []
        for answer in await asyncio.gather(
            self._upstream.look("nsqd", address, _as_fields(nsqd_questions.drain_state())),
            self._upstream.look("nsqd", address, _as_fields(nsqd_questions.damage())),
            return_exceptions=True,
        ):
            if isinstance(answer, NotAnswered):
                if answer.status != 404:
                    missing = [answer.missing]
                found.append({})
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append(answer)
        return found, missing

    async def holders(self, topic: str) -> tuple[list[str], Snapshot]:
        """Return the nodes that have a topic, and the snapshot that says so; for one that is new they are asked."""
        found = await self._snapshots.get()
        if topic not in found.topics:
            found = await self._snapshots.fresh()
        holding = [address for address, topics in found.on_node.items() if topic in topics]
        for address, node in found.nodes.items():  # one that does not answer may have it all the same
            if node.problem is not None and any(each.topic == topic for each in node.topics):
                holding.append(address)
        return holding, found

    async def topic(self, name: str) -> TopicView:
        """Return one topic."""
        holding, known = await self.holders(name)
        question = daemons.stats(name, clients=True)
        answers, cluster = await self._ask_holders(name, holding, known, question)
        of_cluster = cluster.find(name)
        total = TopicRow(name=name)
        nodes: list[TopicRow] = []
        channels: dict[str, ChannelRow] = {}
        producers: list[ClientRow] = []
        for address in holding:
            found = answers.found.get(address)
            if found is None:
                continue
            for row, of_node in _joined_partitions(found.topics or [], address).values():
                if row.name != name:
                    continue
                nodes.append(row)
                total.node_count += 1
                add_topic(total, row)
                for channel in of_node:
                    add_channel(channels.setdefault(channel.name, ChannelRow(topic=name, name=channel.name)), channel)
            producers += [
                client_row(each, address, self._now_s())
                for each in found.producers or ()
                if any(count.topic == name for count in each.pub_counts or ())
            ]
        sum_channels(total, channels.values())
        listed = known.topics.get(name)
        _copy_rates(listed, total, known.channels.get(name, {}), channels)
        total.is_inactive = not nodes and of_cluster is None and listed is not None and listed.is_inactive
        if not nodes and (total.is_inactive or of_cluster is not None):
            names = (await self.channels_of([name]))[name]
            channels = {channel: ChannelRow(topic=name, name=channel) for channel in names}
        partitions, missing = await self._partitions(name, total, answers, known, cluster)
        await self._tell_ages(name, channels, holding, known, total.partition_count)
        return TopicView(
            at_s=known.at_s,
            missing=with_away([*known.missing, *answers.missing], [missing]),
            notes=known.notes,
            name=name,
            is_found=bool(nodes) or of_cluster is not None or listed is not None,
            total=total,
            nodes=nodes,
            channels=sorted(channels.values(), key=lambda row: row.name),
            partitions=partitions,
            is_of_cluster=of_cluster is not None,
            replicas=of_cluster.replicator if of_cluster is not None else 0,
            min_in_sync=of_cluster.min_in_sync if of_cluster is not None else 0,
            queries=[
                query_of(name, row) for row in await self._queries.rows() if any(log.topic == name for log in row.logs)
            ],
            producers=producers[:CLIENT_COUNT_MAX],
            tombstoned=[
                address
                for address, node in known.nodes.items()
                if any(each.topic == name and each.is_tombstoned for each in node.topics)
            ],
            settings=await self._settings(holding, known, nsqd_questions.topic_settings(name)),
            lost_if_deleted=lost_by_topic(total, channels.values(), is_deleted=True),
            lost_if_emptied=lost_by_topic(total, channels.values(), is_deleted=False),
        )

    async def channel(self, topic: str, name: str) -> ChannelView:
        """Return one channel."""
        holding, known = await self.holders(topic)
        question = daemons.stats(topic, name, clients=True)
        answers, cluster = await self._ask_holders(topic, holding, known, question)
        total = ChannelRow(topic=topic, name=name)
        nodes: list[ChannelRow] = []
        clients: list[ClientRow] = []
        of_topic = TopicRow(name=topic)
        for address in holding:
            found = answers.found.get(address)
            for each in (found.topics or ()) if found else ():
                if each.topic_name != topic:
                    continue
                add_topic(of_topic, topic_row(each, address))
                for channel in each.channels or ():
                    if channel.channel_name != name:
                        continue
                    row = channel_row(channel, topic, address)
                    if each.partitions:
                        row.ordered = any(
                            one.ordered and one.channel_name == name
                            for partition in each.partitions
                            for one in partition.channels or ()
                        )
                    nodes.append(row)
                    add_channel(total, row)
                    node = known.nodes[address]
                    clients += [
                        client_row(client, address, self._now_s(), node.zone, node.region)
                        for client in channel.clients or ()
                    ]
        delivered = sum(client.message_count for client in clients)
        for client in clients:
            client.share = client.message_count / delivered if delivered else None
        clients.sort(key=lambda client: (-client.message_count, client.node, client.address))
        listed = known.channels.get(topic, {}).get(name)
        if listed is not None:
            total.in_per_s, total.out_per_s = listed.in_per_s, listed.out_per_s
        partitions, missing = await self._partitions(topic, of_topic, answers, known, cluster)
        await self._tell_ages(topic, {name: total}, holding, known, of_topic.partition_count)
        is_registered = (
            not nodes
            and (of_topic.unled_count > 0 or (topic in known.topics and known.topics[topic].is_inactive))
            and name in (await self.channels_of([topic])).get(topic, [])
        )
        return ChannelView(
            at_s=known.at_s,
            missing=with_away([*known.missing, *answers.missing], [missing]),
            notes=known.notes,
            topic=topic,
            name=name,
            is_found=bool(nodes) or is_registered,
            total=total,
            nodes=nodes,
            clients=clients[:CLIENT_COUNT_MAX],
            client_total=len(clients),
            partitions=partitions,
            settings=await self._settings(holding, known, nsqd_questions.channel_settings(topic, name)),
            lost_if_deleted=lost_by_channel(total, is_deleted=True),
            lost_if_emptied=lost_by_channel(total, is_deleted=False),
        )

    async def _settings(self, holding: Iterable[str], known: Snapshot, question: Any) -> dict[str, Any]:
        ours = [each for each in holding if known.nodes[each].kind == "flintmq"]
        answers = await self._upstream.look_all("nsqd", ours, question)
        return {
            address: {"settings": found.settings, "effective": found.effective}
            for address, found in answers.found.items()
        }

    async def _tell_ages(
        self, topic: str, channels: dict[str, ChannelRow], holding: Iterable[str], known: Snapshot, partition_count: int
    ) -> None:
        """Ask our own nsqd, and Youzan's, how old the oldest message of each channel is."""
        asked = [each for each in holding if known.nodes[each].kind in ("flintmq", "youzan")]
        if not any(channel.depth for channel in channels.values()):
            return
        now_ns = self._env.clock.wall_ns()
        numbers = range(max(1, min(partition_count, PARTITION_COUNT_MAX)))
        for answers in await asyncio.gather(
            *(self._upstream.look_all("nsqd", asked, daemons.partition_stats(topic, number)) for number in numbers)
        ):
            for found in answers.found.values():
                for each in found.topics or ():
                    for channel in each.channels or ():
                        row = channels.get(channel.channel_name)
                        if row is not None and channel.depth_ts_nano > 0 and channel.depth:
                            age_s = max(0.0, (now_ns - channel.depth_ts_nano) / _NS_PER_S)
                            row.oldest_age_s = max(row.oldest_age_s or 0.0, age_s)

    # -- partitions and clusters --------------------------------------------------------------------------------------

    async def is_of_cluster(self, topic: str) -> bool:
        """Whether a cluster has a topic, as far as a nsqlookupd tells."""
        return (await self._cluster_status(topic)).find(topic) is not None

    async def _ask_holders(
        self, topic: str, holding: list[str], known: Snapshot, question: Question[daemons.Stats]
    ) -> tuple[Answers[daemons.Stats], _Cluster]:
        """Ask the nodes that have a topic, and the cluster what it knows of it.

        Args:
            holding: the cluster may name more, which have it since a moment ago: they are asked, and added.
        """
        answers, cluster = await asyncio.gather(
            self._upstream.look_all("nsqd", holding, question), self._cluster_status(topic)
        )
        found = cluster.find(topic)
        if found is None or cluster.status is None:
            return answers, cluster
        leaders = {each.leader for each in found.partitions}
        addresses = [format_address(node.host, node.http_port) for node in cluster.status.nodes if node.node in leaders]
        if new := [each for each in addresses if each not in holding and each in known.nodes]:
            more = await self._upstream.look_all("nsqd", new, question)
            answers = Answers({**answers.found, **more.found}, [*answers.failures, *more.failures])
            holding += new
        return answers, cluster

    async def _partitions(
        self, topic: str, total: TopicRow, answers: Answers[daemons.Stats], known: Snapshot, cluster: _Cluster
    ) -> tuple[list[PartitionRow], list[Missing]]:
        """Return the partitions of a topic, and who did not say what it has of them.

        Args:
            total: of the topic; a cluster knows how many partitions it has, and which of them nobody leads.
        """
        rows: dict[int, PartitionRow] = {}
        for address, found in answers.found.items():
            node = known.nodes[address]
            for each in found.topics or ():
                if each.topic_name != topic:
                    continue
                for partition in each.as_partitions():
                    _add_partition(rows, partition, format_address(node.broadcast_address, node.tcp_port), address)
        of_cluster = cluster.find(topic)
        if not rows and not total.partition_count and of_cluster is None:
            return [], []
        missing = list(cluster.missing)
        if of_cluster is not None and cluster.status is not None:
            total.partition_count = of_cluster.partition_num
            total.unled_count = sum(not each.leader for each in of_cluster.partitions)
            missing += away_of(of_cluster, cluster.status)
            if not rows:  # made without a number of partitions: nsqd tells of it as of a plain topic
                rows = await self._led(of_cluster, known, cluster.status)
            _add_cluster(rows, of_cluster, cluster.status)
            await self._tell_lag(topic, rows, known, cluster.status)
        for number in range(min(total.partition_count, PARTITION_COUNT_MAX)):
            rows.setdefault(number, PartitionRow(number=number, is_ready=False, reason="no node that answers has it"))
        return [rows[number] for number in sorted(rows)], missing

    async def _led(self, topic: ClusterTopic, known: Snapshot, status: ClusterStatus) -> dict[int, PartitionRow]:
        """Ask the leaders of a topic for each of its partitions."""
        nodes = {node.node: format_address(node.host, node.http_port) for node in status.nodes}
        asked = [
            (each.partition, nodes[each.leader])
            for each in topic.partitions[:PARTITION_COUNT_MAX]
            if nodes.get(each.leader) in known.nodes
        ]
        rows: dict[int, PartitionRow] = {}
        for (number, address), answers in zip(
            asked,
            await asyncio.gather(
                *(
                    self._upstream.look_all("nsqd", [address], daemons.partition_stats(topic.topic, number))
                    for number, address in asked
                )
            ),
            strict=True,
        ):
            for found in answers.found.get(address, daemons.Stats()).topics or ():
                for partition in found.as_partitions() if found.topic_name == topic.topic else ():
                    if partition.topic_partition == str(number):
                        _add_partition(rows, partition, "", address)
        return rows

    async def _tell_lag(
        self, topic: str, rows: dict[int, PartitionRow], known: Snapshot, status: ClusterStatus
    ) -> None:
        """Ask the leaders how many messages the copies lack that are not in sync."""
        names = {node.node: node.address for node in status.nodes}
        leaders = {row.leader_node for row in rows.values() if row.leader_node in known.nodes}
        answers = await self._upstream.look_all("nsqd", leaders, cluster_copies())
        for found in answers.found.values():
            for led in found.partitions:
                row = rows.get(led.partition)
                if led.topic != topic or row is None:
                    continue
                for node, copy in led.followers.items():
                    if (lag := led.messages - copy.messages_done) > 0:
                        row.lag[names.get(node, node[:64])] = lag

    async def _cluster_status(self, topic: str | None = None) -> _Cluster:
        answers = await self._upstream.look_all(
            "nsqlookupd", self._snapshots.lookupds, cluster_questions.cluster_status(topic=topic)
        )
        found = sorted(answers.found.values(), key=how_stale)
        failures = [each.missing for each in answers.failures if each.status != 404]  # 404: it is in no cluster
        for node in found[0].nodes if found else ():
            self._members.pop(node.node, None)
            self._members[node.node] = node.address
        while len(self._members) > MEMBER_COUNT_MAX:
            del self._members[next(iter(self._members))]
        status = found[0] if found else None
        stale = {}
        if status is not None and not _why_stale(status):
            stale = {address: why for address, each in answers.found.items() if (why := store_away(each))}
            stale |= {
                address: f"this nsqlookupd takes no part: {each.problem}"
                for address, each in answers.found.items()
                if each.problem
            }
        return _Cluster(status, failures, stale)

    async def cluster(self) -> ClusterView:
        """Return the state of the cluster, if there is one."""
        lookupds = self._snapshots.lookupds
        told, moves, elections = await asyncio.gather(
            self._cluster_status(),
            self._upstream.look_all("nsqlookupd", lookupds, cluster_questions.cluster_moves()),
            self._upstream.look_all("nsqlookupd", lookupds, cluster_questions.cluster_elections()),
        )
        at_s = self._now_s()
        status, missing = told.status, told.missing
        if status is None:
            return ClusterView(at_s=at_s, missing=missing, is_cluster=False)
        kept = await self._keep(elections)
        names = self._members
        troubled: dict[str, list[PartitionRow]] = {}
        for topic in status.topics:
            rows: dict[int, PartitionRow] = {}
            _add_cluster(rows, topic, status)
            bad = [
                row
                for row in rows.values()
                if not row.leader or len(row.in_sync) < max(topic.min_in_sync, min(topic.replicator, len(row.replicas)))
            ]
            if bad and len(troubled) < PAGE_SIZE_MAX:
                troubled[topic.topic] = bad
        found_moves = next((moves.found[each] for each in self._snapshots.lookupds if moves.found.get(each)), [])
        return ClusterView(
            at_s=at_s,
            missing=missing,
            notes=[f"nsqlookupd {address}: {why}" for address, why in told.stale.items()],
            is_cluster=True,
            name=status.cluster,
            cluster_id=status.cluster_id,
            master=format_address(status.master.host, status.master.http_port) if status.master else "",
            problem=_why_stale(status),
            lookupds=[format_address(each.host, each.http_port) for each in status.lookupds],
            nodes=_member_rows(status) + _away(status, names),
            topic_count=len(status.topics),
            partition_count=sum(len(topic.partitions) for topic in status.topics),
            troubled=troubled,
            moves=[_move_row(move, names) for move in found_moves[:PAGE_SIZE_MAX]],
            elections=joined_elections([*elections.found.values(), kept], names),
            balances=bool(status.settings.get("balances", True)),
            balance_window=_window(status.settings.get("balance_window")),
            is_upgrading=bool(status.settings.get("is_upgrading")),
        )

    async def keep_elections(self) -> bool:
        """Ask for elections and keep what is new; whether there is a cluster."""
        status = (await self._cluster_status()).status
        if status is not None:
            question = cluster_questions.cluster_elections()
            await self._keep(await self._upstream.look_all("nsqlookupd", self._snapshots.lookupds, question))
        return status is not None

    async def _keep(self, answers: Answers[list[Election]]) -> list[Election]:
        """Keep what is new among elections; return all that are kept."""
        told = {each for found in answers.found.values() for each in found if is_valid_name(each.topic)}
        if new := told - self._kept_already:
            await self._history.keep_elections(new, self._members)
            self._kept_already = told
        kept, names = await self._history.kept_elections()
        for node, address in names.items():
            self._members.setdefault(node, address)
        return kept

    async def plan(self, question: Question[dict[str, Any] | None], topic: str = "") -> PlanView:
        """Return what an order to a cluster would come to, of the first nsqlookupd that answers.

        Args:
            topic: whose copies are made or moved, for their sizes.

        Raises:
            Refused: the cluster refuses it.
        """
        missing = []
        plan: dict[str, Any] | None = None
        for address in self._snapshots.lookupds:
            try:
                plan = await self._upstream.look("nsqlookupd", address, question) or {}
                break
            except NotAnswered as error:
                if 400 <= error.status < 500:
                    raise Refused(400, _named(error.word[:2000], self._members)) from None
                missing.append(error.missing)
        if plan is None:
            return PlanView(at_s=self._now_s(), missing=missing, is_change=True, what="")
        await self._cluster_status()  # names of the nodes
        view = await self.topic(topic) if topic else None
        sizes = {row.number: row.message_bytes for row in view.partitions} if view is not None else {}
        copies = [_planned(row, self._members, sizes) for row in plan.get("copies") or () if isinstance(row, dict)]
        made = [row for row in copies if row.target]
        known = [row.size_bytes for row in made if row.size_bytes is not None]
        return PlanView(
            at_s=self._now_s(),
            missing=view.missing if view is not None else [],
            is_change=bool(plan.get("changes", True)),
            what=_named(str(plan.get("what") or "")[:2000], self._members),
            copies=copies[:PAGE_SIZE_MAX],
            copy_count=int(plan.get("copy_count") or 0),
            size_bytes=sum(known) if len(known) == len(made) else None,
            notes=self.notes_of(plan),
        )

    def notes_of(self, plan: dict[str, Any]) -> list[str]:
        """Return what a cluster adds to an order, with addresses in the place of ids of nodes."""
        return [_named(str(note)[:2000], self._members) for note in plan.get("notes") or ()][:20]

    async def seen_of(self, topic: str, channel: str = "") -> str:
        """Return what tells a topic from another one that takes its name later, for :func:`is_another`.

        Empty: nobody has it, and all who were asked say so.
        """
        logs, plain = await self._told_of(topic, channel)
        if not _has_topic(logs, plain):
            await self._snapshots.fresh()  # another node may have one of that name by now
            logs, plain = await self._told_of(topic, channel)
            if not _has_topic(logs, plain) and all(each.status == 404 for each in (*logs.failures, *plain.failures)):
                return ""
        ids = {each.log_id for found in logs.found.values() for each in found.topics or () if each.log_id}
        count = sum(
            sum(one.message_count for one in each.channels or () if one.channel_name == channel)
            if channel
            else each.message_count
            for found in plain.found.values()
            for each in found.topics or ()
        )
        return ".".join((str(count), *sorted(ids)[:SEEN_LOGS_MAX]))

    async def _told_of(self, topic: str, channel: str) -> tuple[Answers[daemons.Stats], Answers[daemons.Stats]]:
        """Ask who has a topic for its logs, and for its figures."""
        holding, _ = await self.holders(topic)
        return await asyncio.gather(
            self._upstream.look_all("nsqd", holding, daemons.partition_stats(topic, 0)),
            self._upstream.look_all("nsqd", holding, daemons.stats(topic, channel or None)),
        )

    def _now_s(self) -> float:
        return self._env.clock.wall_ns() / _NS_PER_S


# -- the parts of views ------------------------------------------------------------------------------------------------


def topics_view(found: Snapshot, query: TopicsQuery, page_size_max: int = PAGE_SIZE_MAX) -> TopicsView:
    """Filter, sort and cut the topics of a snapshot."""
    column = query.sort.removeprefix("-")
    if column not in TOPIC_SORTS:
        query = TopicsQuery(text=query.text, page=query.page, page_size=query.page_size, state=query.state)
        column = "name"
    text = query.text.lower()
    is_wanted = _STATES[query.state]
    rows = [row for row in found.topics.values() if is_wanted(row) and text in row.name.lower()]
    rows.sort(key=lambda row: row.name)
    if column != "name":
        rows.sort(key=_sort_key(column), reverse=query.sort.startswith("-"))
    elif query.sort.startswith("-"):
        rows.reverse()
    page_size = max(1, min(query.page_size, page_size_max))
    page = _page(query.page, page_size, len(rows))
    sums = TopicRow(name="")
    rates = []
    for row in found.topics.values():
        sums.depth += row.depth
        sums.waiting += row.waiting
        sums.in_flight += row.in_flight
        sums.deferred += row.deferred
        sums.message_count += row.message_count
        sums.message_bytes += row.message_bytes
        sums.requeue_count += row.requeue_count
        sums.timeout_count += row.timeout_count
        sums.client_count += row.client_count
        sums.channel_count += row.channel_count
        if row.in_per_s is not None:
            rates.append(row.in_per_s)
    sums.node_count = len(found.nodes)
    sums.in_per_s = sum(rates) if rates else None
    return TopicsView(
        at_s=found.at_s,
        missing=found.missing,
        notes=found.notes,
        query=query,
        topics=rows[(page - 1) * page_size : page * page_size],
        total=len(found.topics),
        matching=len(rows),
        page=page,
        page_count=max(1, -(-len(rows) // page_size)),
        sums=sums,
    )


_STATES: dict[str, Callable[[TopicRow], bool]] = {
    "all": lambda row: True,
    "active": lambda row: not row.is_inactive,
    "inactive": lambda row: row.is_inactive,
    "paused": lambda row: row.paused,
    "waiting": lambda row: row.waiting > 0,
    "lonely": lambda row: row.waiting > 0 and not row.client_count,
}


def _sort_key(column: str) -> Callable[[TopicRow], float]:
    if column == "latency":
        return lambda row: max((each.max_ms for each in row.latency), default=0.0)
    return lambda row: getattr(row, column) or 0.0


def slowest_ms(row: ChannelRow) -> float:
    """Return the highest percentile of a channel's latency; 0 where nothing is measured."""
    return max((each.max_ms for each in row.latency), default=0.0)


def _page(page: int, page_size: int, count: int) -> int:
    return max(1, min(page, -(-count // page_size)))


def _joined_partitions(topics: Iterable[daemons.Topic], address: str) -> dict[str, tuple[TopicRow, list[ChannelRow]]]:
    """Return topics of a node with their channels; Youzan's list one entry for each partition."""
    found: dict[str, tuple[TopicRow, dict[str, ChannelRow]]] = {}
    for topic in topics:
        row = topic_row(topic, address)
        known = found.get(row.name)
        if known is None:
            known = found[row.name] = (row, {})
        else:
            add_topic(known[0], row)
        for channel in topic.channels or ():
            one = channel_row(channel, row.name, address)
            if one.name in known[1]:
                add_channel(known[1][one.name], one)
            else:
                known[1][one.name] = one
    rows = {
        name: (row, sorted(channels.values(), key=lambda each: each.name)) for name, (row, channels) in found.items()
    }
    for row, channels in rows.values():
        sum_channels(row, channels)
    return rows


def _copy_rates(
    listed: TopicRow | None, total: TopicRow, known: dict[str, ChannelRow], channels: dict[str, ChannelRow]
) -> None:
    if listed is not None:
        total.in_per_s, total.growth_per_s = listed.in_per_s, listed.growth_per_s
    for name, channel in channels.items():
        if name in known:
            channel.in_per_s, channel.out_per_s = known[name].in_per_s, known[name].out_per_s


def client_row(client: daemons.Client, node: str, now_s: float, zone: str = "", region: str = "") -> ClientRow:
    """Return what is shown of a connection.

    Args:
        zone, region: of its nsqd.
    """
    attributes = []
    if client.tls:
        attributes.append(client.tls_version or "TLS")
    if client.deflate:
        attributes.append("Deflate")
    if client.snappy:
        attributes.append("Snappy")
    if client.sample_rate:
        attributes.append(f"Sampled {client.sample_rate}%")
    if client.auth_identity:
        attributes.append(client.auth_identity)
    is_near = bool(region) and client.topology_region == region
    locality = "zone" if is_near and zone and client.topology_zone == zone else "region" if is_near else ""
    return ClientRow(
        node=node,
        address=client.remote_address,
        client_id=client.client_id,
        hostname=client.hostname,
        user_agent=client.user_agent,
        connected_s=max(0.0, now_s - client.connect_ts) if client.connect_ts else 0.0,
        in_flight=client.in_flight_count,
        ready=client.ready_count,
        message_count=client.message_count,
        finish_count=client.finish_count,
        requeue_count=client.requeue_count,
        zone=client.topology_zone,
        region=client.topology_region,
        locality=locality or ("global" if region and client.topology_region else ""),
        attributes=attributes,
        pub_counts={each.topic: each.count for each in client.pub_counts or () if is_valid_name(each.topic)},
    )


def _add_partition(rows: dict[int, PartitionRow], partition: daemons.Partition, tcp: str, address: str) -> None:
    number = int(partition.topic_partition) if partition.topic_partition.isdecimal() else -1
    if not 0 <= number < 1024 or not partition.is_leader:
        return
    rows[number] = PartitionRow(
        number=number,
        leader=tcp,
        leader_node=address,
        depth=max((channel.depth for channel in partition.channels or ()), default=partition.depth),
        message_count=partition.message_count,
        message_bytes=partition.message_bytes,
        start_sequence=partition.start_sequence,
        next_sequence=partition.next_sequence,
        confirmed={
            channel.channel_name: channel.confirmed_sequence
            for channel in partition.channels or ()
            if channel.confirmed_sequence is not None
        },
    )


def _add_cluster(rows: dict[int, PartitionRow], topic: ClusterTopic, status: ClusterStatus) -> None:
    for partition in topic.partitions:
        row = rows.setdefault(partition.partition, PartitionRow(number=partition.partition))
        _tell_cluster(row, partition, status)


def _tell_cluster(row: PartitionRow, partition: ClusterPartition, status: ClusterStatus) -> None:
    by_id = {node.node: node for node in status.nodes}

    def named(ids: Iterable[str]) -> list[str]:
        return [by_id[each].address if each in by_id else each for each in ids]

    row.epoch, row.reason, row.is_ready = partition.epoch, partition.reason, partition.is_ready
    row.in_sync, row.replicas, row.leaving = (
        named(partition.confirmed), named(partition.replicas), named(partition.leaving)
    )  # fmt: skip
    leader = by_id.get(partition.leader)
    row.leader = leader.address if leader else partition.address
    if leader is not None:
        row.leader_node = format_address(leader.host, leader.http_port)


def _why_stale(status: ClusterStatus) -> str:
    """Tell why a nsqlookupd does not know how its cluster is now; empty: it does."""
    return status.problem or store_away(status)


def _member_rows(status: ClusterStatus) -> list[ClusterNodeRow]:
    drains = {each.node: each for each in status.drains}
    return [
        ClusterNodeRow(
            node_id=node.node,
            address=node.address,
            http_address=format_address(node.host, node.http_port),
            zone=node.zone,
            leads=node.leads,
            holds=node.holds,
            is_draining=node.is_draining or node.node in drains,
            is_suspected=node.suspected,
            syncs=node.syncs,
            is_removal=node.node in drains and drains[node.node].is_removal,
            left=drains[node.node].left if node.node in drains else 0,
        )
        for node in status.nodes
    ]


def _away(status: ClusterStatus, names: Mapping[str, str]) -> list[ClusterNodeRow]:
    """Return the nodes that are to have copies, and are not there."""
    here = {node.node for node in status.nodes}
    drains = {each.node: each for each in status.drains}
    holds: dict[str, int] = {}
    for topic in status.topics:
        for partition in topic.partitions:
            for node in {*partition.replicas, *partition.in_sync} - here:
                holds[node] = holds.get(node, 0) + 1
    return [
        ClusterNodeRow(
            node_id=node[:64],
            address=names.get(node, node)[:64],
            http_address="",
            zone="",
            leads=0,
            holds=count,
            is_draining=node in drains,
            is_suspected=True,
            syncs=False,
            is_removal=node in drains and drains[node].is_removal,
            is_away=True,
            left=count,
        )
        for node, count in sorted(holds.items())[:PAGE_SIZE_MAX]
    ]


def joined_elections(told: Iterable[list[Election]], names: dict[str, str]) -> list[ElectionRow]:
    """Join what several nsqlookupd have seen: each election once, with a reason if one of them knows it."""
    rows: dict[tuple[str, int, int, str], ElectionRow] = {}
    for elections in told:
        for each in elections:
            key = (each.topic, each.partition, each.epoch, each.now)
            if not is_valid_name(each.topic) or (key in rows and not each.reason):
                continue
            rows[key] = ElectionRow(
                at_s=each.at_s,
                topic=each.topic,
                partition=each.partition,
                epoch=each.epoch,
                before=names.get(each.before, each.before)[:64],
                now=names.get(each.now, each.now)[:64],
                reason=_with_names(each.reason[:500], names),
            )
    return sorted(rows.values(), key=lambda row: -row.at_s)[:ELECTION_COUNT_MAX]


def _has_topic(*told: Answers[daemons.Stats]) -> bool:
    return any(found.topics for answers in told for found in answers.found.values())


def is_another(seen: str, now: str) -> bool:
    """Whether what has a name now is not what a page showed.

    By the ids of the logs, which only our own nsqd have; else it is when fewer messages were ever published to it. That
    is so after an nsqd was started anew as well: whoever is asked once more loses nothing. Nothing at all (empty) is
    no other topic: it is gone.
    """
    if not now:
        return False
    (seen_count, *seen_ids), (count, *ids) = seen.split("."), now.split(".")
    if seen_ids and ids:
        return not set(seen_ids) & set(ids)
    return seen_count.isdigit() and len(seen_count) < 20 and int(count) < int(seen_count)


def _planned(row: dict[str, Any], names: dict[str, str], sizes: dict[int, int]) -> PlannedCopy:
    number = row.get("partition")
    source, target = (str(row.get(each) or "")[:64] for each in ("from", "to"))
    return PlannedCopy(
        topic=str(row.get("topic") or "")[:64],
        partition=number if isinstance(number, int) else 0,
        source=names.get(source, source),
        target=names.get(target, target),
        size_bytes=0 if not source else sizes.get(number) if target and isinstance(number, int) else None,
    )


def _with_names(text: str, names: dict[str, str]) -> str:
    """Put addresses in the place of ids of nodes, and leave out what stands beside it: partition, leader, epoch."""
    text = text.partition(": ")[2] if text.startswith("partition ") else text
    text = text.partition(": ")[2] if " leads from epoch " in text.partition(": ")[0] else text
    return _named(text, names)


def _named(text: str, names: dict[str, str]) -> str:
    """Put addresses in the place of ids of nodes."""
    words = ((word, word.strip(",;:")) for word in text.split())
    return " ".join(word.replace(name, names[name]) if name in names else word for word, name in words)


def _window(value: object) -> str:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(hour, int) for hour in value):
        return "never" if value[0] == value[1] else f"{value[0]:02d}-{value[1]:02d}"
    return ""


def _move_row(move: Move, names: dict[str, str]) -> MoveRow:
    done = None
    if move.bytes_done is not None and move.bytes_total:
        done = min(1.0, max(0.0, move.bytes_done / move.bytes_total))
    return MoveRow(
        topic=move.topic,
        partition=move.partition,
        sources=[names.get(each, each) for each in move.sources],
        targets=[names.get(each, each) for each in move.targets],
        done=done,
        bytes_done=move.bytes_done,
        bytes_total=move.bytes_total,
        since_s=move.since_s,
        state=move.state,
        reason=_with_names(move.reason[:500], names),
    )


def lost_by_topic(total: TopicRow, channels: Iterable[ChannelRow], is_deleted: bool) -> str:
    """Say what deleting or emptying a topic loses."""
    rows = list(channels)
    unled = ""
    if total.unled_count:
        has = "has" if total.unled_count == 1 else "have"
        unled = f"what {_count(total.unled_count, 'partition')} {has} that nobody leads is not known"
    if not is_deleted:
        text = f"{_count(total.depth, 'message')} of {total.name} that no channel has yet; channels keep what they have"
        return f"{text}; {unled}" if unled else text
    names = ", ".join(row.name for row in rows[:5]) + (" and more" if len(rows) > 5 else "")
    waiting = sum(row.depth + row.in_flight + row.deferred for row in rows)
    parts = [_count(len(rows), "channel") + (f" ({names})" if rows else "")]
    parts.append(f"{_count(waiting, 'message')} waiting in them, in flight or deferred")
    if total.depth:
        parts.append(f"{_count(total.depth, 'message')} that no channel has yet")
    text = f"topic {total.name} on {_count(total.node_count, 'node')}, " + ", ".join(parts)
    return f"{text}; {unled}, and would be lost as well" if unled else text


def lost_by_channel(total: ChannelRow, is_deleted: bool) -> str:
    """Say what deleting or emptying a channel loses."""
    text = (
        f"{_count(total.depth, 'message')} waiting, {total.in_flight:,} in flight, {total.deferred:,} deferred in "
        f"{total.topic}/{total.name}"
    )
    if is_deleted:
        text += f"; {_count(total.client_count, 'consumer')} will be disconnected"
    return text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _as_fields(question: Any) -> Any:
    return question.__class__(question.method, question.target, _fields, question.body)


def _fields(body: bytes) -> dict[str, Any]:
    from flintmq.client.admin.question import fields

    return fields(body)


__all__ = ["LOOK_S", "Gather", "client_row", "lost_by_channel", "lost_by_topic", "topics_view"]
