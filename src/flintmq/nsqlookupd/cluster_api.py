"""nsqlookupd's HTTP API in a cluster: topics of the cluster are answered from its store, all others as without one.

Rules of this file:

- Any nsqlookupd answers every question; what changes the cluster is handed on to the master, once, and answered here
  when it is known here, too.
- A topic of the cluster is served by whoever leads according to the store, whatever else says that it does; it can be
  read from once its leader has registered it.

Source: docs/decisions/0017; Youzan's nsqlookupd.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from flintmq.clock import Clock
from flintmq.cluster import orders
from flintmq.cluster.balance import Loads
from flintmq.cluster.controller import Controller, Refused
from flintmq.cluster.registration import Lookup, NsqdNode, Partitions, RegistrationDatabase
from flintmq.cluster.state import LookupdRecord, NodeRecord
from flintmq.cluster.view import View
from flintmq.names import is_ephemeral
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import Endpoint, NoAnswer
from flintmq.net.http_exchange import Request as Question
from flintmq.net.http_messages import JSON_TYPE, NSQ_TYPE
from flintmq.net.http_server import EMPTY, HttpError, Request, Response, Router, json_response
from flintmq.nsqlookupd.coordinator import Coordinator, Leader, NotDone, NotMaster
from flintmq.nsqlookupd.http_api import HttpApi, LookupdAddress, argument, info_row, producer_row, valid_argument
from flintmq.nsqlookupd.placement_api import TOP_COUNT, TOP_COUNT_MAX, PlacementApi, is_switched, plan_row
from flintmq.nsqlookupd.topics import TopicAdmin
from flintmq.topic_meta import (
    PLAIN,
    REPLICATOR_MAX,
    BadTopicMeta,
    TopicMeta,
    asks_for_partitions,
    changed_meta,
    meta_of_query,
    min_in_sync_of_query,
    parse_partition,
)
from flintmq.wire.identify import NSQ_VERSION

HANDED_ON = "X-Flintmq-Handed-On"
"""Of a request that another nsqlookupd has handed on, with the id of its cluster; it is not handed on again."""
HAND_ON_TIMEOUT_S = 40.0
"""Longer than the master takes for anything."""


class ClusterApi(HttpApi):
    """The handlers.

    Args:
        coordinator: this nsqlookupd's part in the cluster.
    """

    def __init__(
        self,
        database: RegistrationDatabase,
        clock: Clock,
        admin: TopicAdmin,
        me: Callable[[], LookupdAddress],
        allow_write_without_channels: bool,
        coordinator: Coordinator,
    ) -> None:
        super().__init__(database, clock, admin, me, allow_write_without_channels)
        self._coordinator = coordinator
        self._info = json_response({**info_row(), "ha_support": True})
        self._placement = PlacementApi(coordinator, self._at_master, self._ask_node)

    def add_routes(self, router: Router) -> None:
        """Answer what a nsqlookupd without a cluster does not know."""
        router.add("GET", "/cluster/status", self.status, takes=("topic",))
        router.add("GET", "/cluster/elections", self.elections, takes=("topic",))
        router.add("POST", "/cluster/partition/elect", self.elect, takes=("topic", "partition", "node", "dry_run"))
        router.add("POST", "/cluster/loss/acknowledge", self.acknowledge_loss, takes=("topic", "partition", "dry_run"))
        router.add("GET", "/cluster/stats", self.stats, takes=("topn",), refuses=())
        router.add("GET", "/cluster/balance/topn", self.busiest, takes=("topn",))
        self._placement.add_routes(router)

    # --- questions

    async def status(self, request: Request) -> Response:
        return json_response(await self._coordinator.status(request.query.get("topic", "")))

    async def elections(self, request: Request) -> Response:
        """``GET /cluster/elections``: who led and who leads since this nsqlookupd was started, the latest first."""
        wanted = request.query.get("topic")
        rows = [
            {
                "at": each.at_s,
                "topic": each.topic,
                "partition": each.partition,
                "epoch": each.epoch,
                "from": each.before,
                "to": each.now,
                "reason": each.reason,
            }
            for each in reversed(self._coordinator.elections)
            if wanted in (None, each.topic)
        ]
        return json_response({"elections": rows})

    def stats(self, request: Request) -> Coroutine[Any, Any, Response]:
        """``/cluster/stats`` of the redesigned NSQ: whether everything is as it is to be, and what nodes carry."""
        count = _top_count(request.query, 0)

        async def answer() -> dict[str, Any]:
            coordinator = self._coordinator
            loads, view = await self._placement.loads(), coordinator.view
            led, held = loads.of_nodes(view)
            return {
                "stable": coordinator.is_stable,
                "node_stat_list": [
                    {
                        "hostname": node.host,
                        "broadcast_address": node.host,
                        "tcp_port": node.tcp_port,
                        "http_port": node.http_port,
                        "leader_load_factor": round(led[name], 3),
                        "node_load_factor": round(held[name], 3),
                    }
                    for name, node in sorted(view.nodes.items())
                ],
                "topn_topics": _top_rows(loads, view, count),
            }

        return self._at_master(request, answer)

    def busiest(self, request: Request) -> Coroutine[Any, Any, Response]:
        """``GET /cluster/balance/topn``: the topics with the greatest load, and whether copies are moved by load."""
        count = _top_count(request.query, TOP_COUNT)

        async def answer() -> dict[str, Any]:
            loads, view = await self._placement.loads(), self._coordinator.view
            is_on = view.settings.balances and view.settings.balances_load
            return {"enabled": is_on, "topn_topics": _top_rows(loads, view, count)}

        return self._at_master(request, answer)

    async def loads(self) -> Loads:
        """Ask all nodes what they lead; return the loads of partitions."""
        return await self._placement.loads()

    async def _ask_node(self, node: NodeRecord, target: str) -> tuple[int, bytes]:
        return await self._admin.ask("GET", _unconnected(node), target)

    def lookup_partitions(self, request: Request) -> Response:
        """Answer ``/lookup`` of the redesigned NSQ; while writing is disabled publishers are named nobody."""
        topic, query = request.query.get("topic", ""), request.query
        disabled = self._coordinator.view.settings.write_disabled
        if not disabled or query.get("access") != "w" or not self._coordinator.has_topic(topic):
            return super().lookup_partitions(request)
        meta = self._meta(topic)
        if disabled == "ordered" and not meta.ordered:
            return super().lookup_partitions(request)
        answer: dict[str, Any] = {"channels": self._database.channels(topic), "partitions": None, "producers": None}
        if query.get("metainfo") and meta.is_partitioned:
            answer["meta"] = meta.for_clients()
        return json_response(dict(sorted(answer.items())))

    def _nodes_of(self, topic: str) -> Lookup | None:
        if not self._coordinator.has_topic(topic):
            return super()._nodes_of(topic)
        nodes = [leader.registration.node for leader in self._readable(topic).values() if leader.registration]
        return Lookup(self._database.channels(topic), _distinct(nodes))

    def _partitions_of(self, topic: str, is_for_writing: bool, names_logs: bool) -> Partitions | None:
        coordinator = self._coordinator
        if not coordinator.has_topic(topic):
            return super()._partitions_of(topic, is_for_writing, names_logs)
        found = coordinator.leaders(topic) if is_for_writing else self._readable(topic)
        if is_for_writing:
            found = {number: leader for number, leader in found.items() if not self._is_hidden(leader)}
        leaders = {number: _node(leader) for number, leader in found.items()}
        meta, channels = self._meta(topic), self._database.channels(topic)
        if names_logs and not meta.is_partitioned and topic in coordinator.view.topics:
            meta = msgspec.structs.replace(meta, partition_num=coordinator.view.topics[topic].partition_num)
        if meta.is_partitioned:
            states = coordinator.view.of_topic.get(topic, {})
            log_ids = {number: f"{states[number].log_id:016x}" for number in leaders if number in states}
            return Partitions(channels, meta, leaders, [], log_ids)
        return Partitions(channels, meta, {}, _distinct(list(leaders.values())))

    def _readable(self, topic: str) -> dict[int, Leader]:
        return {number: leader for number, leader in self._coordinator.leaders(topic).items() if leader.is_ready}

    def _is_hidden(self, leader: Leader) -> bool:
        if leader.node.is_draining:
            return True
        registration = leader.registration
        return registration is not None and self._database.is_hidden(registration, self._clock.monotonic_ns())

    def members(self, request: Request) -> Response:
        """List every nsqlookupd of the cluster."""
        view = self._coordinator.view
        addresses = dict.fromkeys(_address(record) for _, record in sorted(view.lookupds.items()))
        rows = [address.row() for address in addresses] or [self._me().row()]
        hidden = view.settings.hidden_lookupds
        rows = [row for row in rows if row["ID"] not in hidden] or rows
        leader = None if view.master is None else _address(view.master).row()
        return json_response({"lookupdleader": leader or rows[0], "lookupdnodes": rows})

    def _topic_names(self) -> list[str]:
        return sorted({*super()._topic_names(), *self._coordinator.view.topics})

    def _meta(self, topic: str) -> TopicMeta:
        record = self._coordinator.view.topics.get(topic)
        return super()._meta(topic) if record is None else record.meta

    def _node_rows(self) -> list[dict[str, Any]]:
        rows = super()._node_rows()
        connected = {(row["broadcast_address"], row["tcp_port"]) for row in rows}
        view = self._coordinator.view
        for name, record in sorted(view.nodes.items()):
            if (record.host, record.tcp_port) in connected:
                continue
            led: dict[str, list[int]] = {}
            for partition in sorted(view.led.get(name, ())):
                if view.leader(partition) is not None:
                    led.setdefault(partition[0], []).append(partition[1])
            named = {topic: numbers for topic, numbers in led.items() if self._meta(topic).is_partitioned}
            row = {**producer_row(_unconnected(record)), "tombstones": [False] * len(led), "topics": list(led)}
            rows.append({**row, "partitions": named} if named else row)
        return rows

    # --- changes

    def create_topic(self, request: Request) -> Response | Coroutine[Any, Any, Response]:
        topic = valid_argument(request, "topic")
        if is_ephemeral(topic):
            return super().create_topic(request)  # as without a cluster: it is one node's
        is_there = None if is_switched(request.query, "dry_run") else True
        return self._at_master(request, lambda: self._created(topic, request.query), topic, is_there)

    async def _created(self, topic: str, query: Mapping[str, str]) -> dict[str, Any] | None:
        coordinator = self._coordinator
        is_dry_run = is_switched(query, "dry_run")
        if why_not := coordinator.why_not_made(topic):
            raise HttpError(400, why_not)
        if not asks_for_partitions(query):
            count, copies = coordinator.default_shape()
            meta, is_any_fine = msgspec.structs.replace(PLAIN, replica=copies), True
        else:
            try:
                meta = meta_of_query(query, REPLICATOR_MAX)
            except BadTopicMeta as error:
                raise HttpError(400, str(error)) from None
            count, is_any_fine = meta.partition_num, False
        if is_dry_run:

            def order(controller: Controller) -> orders.Plan:
                return orders.Plan(controller.creation(topic, meta, count, is_any_fine), count=count * meta.replica)

            return plan_row(await coordinator.order(order, is_dry_run), is_dry_run)
        await coordinator.create(topic, meta, count, is_any_fine)
        return None

    def change_topic(self, request: Request) -> Coroutine[Any, Any, Response]:
        topic = valid_argument(request, "topic")
        if not self._coordinator.has_topic(topic):
            self._refuse_to_plan_for_nothing(request, topic)
            if "replicator" in request.query and (why_not := self._coordinator.why_no_copies(topic)):
                raise HttpError(400, f"INVALID_ARG_TOPIC_REPLICATOR: {why_not}")
            return super().change_topic(request)
        return self._at_master(request, lambda: self._changed(topic, request.query), topic, is_there=True)

    async def _changed(self, topic: str, query: Mapping[str, str]) -> dict[str, Any]:
        is_dry_run = is_switched(query, "dry_run")

        def order(controller: Controller) -> orders.Plan:
            try:
                meta = changed_meta(controller.record_of(topic).meta, query, is_of_cluster=True)
                return orders.alter(controller, topic, meta, min_in_sync_of_query(query))
            except BadTopicMeta as error:
                raise Refused(str(error)) from None

        return plan_row(await self._coordinator.order(order, is_dry_run), is_dry_run)

    def delete_topic(self, request: Request) -> Response | Coroutine[Any, Any, Response]:
        topic = argument(request, "topic")
        if not self._coordinator.has_topic(topic):
            self._refuse_to_plan_for_nothing(request, topic)
            return super().delete_topic(request)
        if request.query.get("partition", "**") != "**":
            raise HttpError(400, "REMOVE_SINGLE_PARTITION_NOT_ALLOWED")
        if not is_switched(request.query, "dry_run"):
            return self._at_master(request, lambda: self._coordinator.delete(topic), topic, is_there=False)

        async def planned() -> dict[str, Any]:
            def order(controller: Controller) -> orders.Plan:
                count = sum(len(state.holders) for state in controller.view.of_topic.get(topic, {}).values())
                return orders.Plan(controller.deletion(topic), count=count)

            return plan_row(await self._coordinator.order(order, True), True)

        return self._at_master(request, planned)

    def _refuse_to_plan_for_nothing(self, request: Request, topic: str) -> None:
        """Refuse ``dry_run`` for a topic that nobody has; one that the cluster has not has no plans."""
        if is_switched(request.query, "dry_run") and self._nodes_of(topic) is None:
            raise HttpError(404, f"there is no topic {topic}")

    def elect(self, request: Request) -> Coroutine[Any, Any, Response]:
        """Let a node lead a partition that nobody can lead without losing something."""
        node = request.query.get("node", "")

        def planned(controller: Controller, topic: str, number: int) -> orders.Plan:
            return orders.elect(controller, topic, number, node)

        return self._of_partition(request, planned)

    def acknowledge_loss(self, request: Request) -> Coroutine[Any, Any, Response]:
        """Say no more that messages of a partition may be lost."""
        return self._of_partition(request, orders.acknowledge_loss)

    def _of_partition(
        self, request: Request, planned: Callable[[Controller, str, int], orders.Plan]
    ) -> Coroutine[Any, Any, Response]:
        topic, number = valid_argument(request, "topic"), parse_partition(argument(request, "partition"))
        if number is None:
            raise HttpError(400, "INVALID_ARG_PARTITION")
        is_dry_run = is_switched(request.query, "dry_run")

        def order(controller: Controller) -> orders.Plan:
            return planned(controller, topic, number)

        async def ordered() -> dict[str, Any]:
            return plan_row(await self._coordinator.order(order, is_dry_run), is_dry_run)

        return self._at_master(request, ordered, topic)

    async def _at_master(
        self,
        request: Request,
        change: Callable[[], Coroutine[Any, Any, dict[str, Any] | None]],
        topic: str = "",
        is_there: bool | None = None,
    ) -> Response:
        """Change something as the master, or have it do it; return when that is known here.

        Args:
            is_there: the topic is to be there afterwards; False: it is to be gone; None: nothing is waited for.
        """
        coordinator = self._coordinator
        handed_on = request.header(HANDED_ON)
        if handed_on and coordinator.cluster_id and handed_on != coordinator.cluster_id:
            text = f"this nsqlookupd is of cluster {coordinator.cluster_id}, the request of {handed_on[:64]}"
            raise HttpError(400, text)
        if coordinator.is_master or coordinator.problem:
            try:
                answer = await change()
            except NotMaster as error:
                raise self._without_master(str(error)) from None
            except NotDone as error:
                raise HttpError(error.status, error.reason) from None
            return EMPTY if answer is None else json_response(answer)
        master = coordinator.view.master
        if handed_on or master is None:
            why = "is not the master of the cluster any more" if handed_on else "knows of no master of the cluster"
            raise self._without_master(f"this nsqlookupd {why}: nothing was changed, ask again presently")
        response = await self._ask_master(request, master)
        if response.status == 200 and is_there is not None:
            await coordinator.until_seen(topic, is_there)
        return response

    def _without_master(self, text: str) -> HttpError:
        """Return the refusal of a change that no master carries out; it names the store where that is the cause."""
        since_s = self._coordinator.store_away_since_s
        if since_s is not None:
            since = datetime.fromtimestamp(since_s, UTC)
            text += (
                f". The coordination store does not answer this nsqlookupd since {since:%Y-%m-%d %H:%M:%S} UTC, and "
                "without it nobody is the master: most members of an etcd, or the nsqlookupd that keeps the store, "
                "have to be there"
            )
        return HttpError(503, text)

    async def _ask_master(self, request: Request, master: LookupdRecord) -> Response:
        headers = {"Accept": "application/vnd.nsq; version=1.0", HANDED_ON: self._coordinator.cluster_id or "unknown"}
        if authorization := request.header("Authorization"):
            headers["Authorization"] = authorization
        question = Question(request.method, Endpoint("http", master.host, master.http_port), request.target, headers)
        try:
            answer = await HttpClient().ask(question, timeout_s=HAND_ON_TIMEOUT_S)
        except NoAnswer as error:
            if isinstance(error.error, ConnectionRefusedError):
                raise self._without_master(
                    f"the master of the cluster is away, and nothing was changed: {error}; ask again presently"
                ) from None
            raise self._without_master(
                f"the master of the cluster did not answer, and may have done what was asked: {error}; ask again"
            ) from None
        return Response(answer.status, answer.body, (JSON_TYPE, NSQ_TYPE) if answer.body else (NSQ_TYPE,))


def _top_count(query: Mapping[str, str], default: int) -> int:
    text = query.get("topn", str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) <= TOP_COUNT_MAX):
        raise HttpError(400, f"INVALID_ARG_TOPN: topn={text[:64]}, it must be 0 to {TOP_COUNT_MAX}")
    return int(text)


def _top_rows(loads: Loads, view: View, count: int) -> list[dict[str, Any]]:
    return [{"topic": topic, "load_factor": round(load, 3)} for topic, load in loads.of_topics(view, count)]


def _address(record: LookupdRecord) -> LookupdAddress:
    return LookupdAddress(record.host, record.tcp_port, record.http_port, record.https_port)


def _node(leader: Leader) -> NsqdNode:
    return _unconnected(leader.node) if leader.registration is None else leader.registration.node


def _unconnected(record: NodeRecord) -> NsqdNode:
    """Return a node that has no connection here, as the store has it."""
    address = f"{record.host}:{record.tcp_port}"
    return NsqdNode(
        node_id=address,
        remote_address=address,
        hostname=record.host,
        broadcast_address=record.host,
        tcp_port=record.tcp_port,
        http_port=record.http_port,
        version=NSQ_VERSION,
        topology_zone=record.zone,
        distributed_id=f"{record.host}:{record.peer_port}:{record.tcp_port}:{record.number}",
        is_draining=record.is_draining,
    )


def _distinct(nodes: list[NsqdNode]) -> list[NsqdNode]:
    return sorted({node.node_id: node for node in nodes}.values(), key=lambda node: node.sort_key)
