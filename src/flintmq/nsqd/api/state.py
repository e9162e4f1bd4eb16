"""The part of nsqd's HTTP API that says how this nsqd is.

::

    GET /ping       OK, or why the disk cannot be trusted
    GET /info       version, addresses and limits
    GET /stats      ?format=json&topic=&channel=&include_clients=&include_mem=      what there is, and what was counted
    GET /metrics    the same for Prometheus

Source: NSQ's HTTP API, Youzan's HTTP API.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from flintmq.clock import Clock
from flintmq.net.http_auth import KNOWN, OPEN
from flintmq.net.http_envelope import Style
from flintmq.net.http_messages import HttpError, Request, Response, json_response, plain_response, text_response
from flintmq.net.metrics import exposition
from flintmq.nsqd.api.arguments import lenient_switch, partition_number, switch
from flintmq.nsqd.api.route import ALL_READ, TOPIC_READ, WALKS, Route
from flintmq.nsqd.figures import nsq, replicas, youzan
from flintmq.nsqd.figures.collection import TopicFigures
from flintmq.nsqd.figures.figures import Figures
from flintmq.nsqd.identity import Identity
from flintmq.nsqd.in_turns import in_turns
from flintmq.nsqd.node import Node
from flintmq.nsqd.replica_figures import ClusterPart

_HEALTHY = plain_response("OK")


class StateApi:
    """These routes of one nsqd.

    Args:
        durability: the name of the policy.
        style: which requests are the redesigned NSQ's.
    """

    def __init__(self, node: Node, identity: Identity, figures: Figures, durability: str, style: Style) -> None:
        self._node = node
        self._topics = node.engine.broker.topics
        self._clock: Clock = node.engine.env.clock
        self._identity = identity
        self._figures = figures
        self._durability = durability
        self._style = style

    def ping(self, _request: Request) -> Response:
        """``/ping``."""
        health = self._node.health()
        if health != "OK":
            raise HttpError(500, health)
        return _HEALTHY

    def info(self, _request: Request) -> Response:
        """``/info``."""
        return json_response(self._identity.info(self._node.drain.is_on))

    async def metrics(self, _request: Request) -> Response:
        """``/metrics``."""
        return exposition(await self._figures.families())

    async def stats(self, request: Request) -> Response:
        """``/stats``; others get their turn between topics."""
        if self._style.is_youzans(request):
            return await self._youzans_stats(request)
        topics = self._figures.topics(request.query.get("topic", ""), request.query.get("channel", ""))
        written = self._writer(request)
        found = [written(topic) async for topic in in_turns(topics)]
        if self._figures.cluster is None:
            return self._stats_answer(request, found)
        return await self._stats_of_cluster(request, found, self._figures.cluster)

    def _writer(self, request: Request) -> Callable[[TopicFigures], Any]:
        """Return what puts a topic into its final form: all that is left to be done at once is to join them."""
        has_clients = lenient_switch(request, "include_clients", True)
        leadership = self._node.leadership

        def is_alone(topic: TopicFigures) -> bool:
            """Whether this node alone has a topic, although it is one of a cluster."""
            return leadership is not None and not leadership.is_replicated(topic.name)

        if request.query.get("format") == "json":

            def row(topic: TopicFigures) -> msgspec.Raw:
                alone = {"replicated": False} if is_alone(topic) else {}
                return msgspec.Raw(msgspec.json.encode(nsq.topic_row(topic, has_clients) | alone))

            return row
        now_ns = self._clock.wall_ns()

        def text(topic: TopicFigures) -> str:
            written = nsq.topic_text(topic, has_clients, now_ns)
            return f"{written}\n   [{topic.name} is not replicated]" if is_alone(topic) else written

        return text

    async def _stats_of_cluster(self, request: Request, topics: list[Any], part: ClusterPart) -> Response:
        """Answer also with the copies of partitions that are here, led or not."""
        copies = in_turns(part.replicas(request.query.get("topic", "")))
        if request.query.get("format") != "json":
            lines = [replicas.replica_text(each) async for each in copies]
            return self._stats_answer(request, topics, replicas.cluster_text(part.figures(), lines))
        rows = [msgspec.Raw(msgspec.json.encode(replicas.replica_row(each))) async for each in copies]
        return self._stats_answer(request, topics, replicas.cluster_row(part.figures(), rows))

    def _stats_answer(self, request: Request, topics: list[Any], cluster: Any = None) -> Response:
        identity, health = self._identity, self._node.state_of_health()
        is_known = not request.query.get("topic") or request.query["topic"] in self._topics
        has_producers = is_known and lenient_switch(request, "include_clients", True)
        producers = self._figures.producers() if has_producers else []
        memory = self._figures.memory() if lenient_switch(request, "include_mem", True) else None
        if request.query.get("format") != "json":
            now_ns = self._clock.wall_ns()
            text = nsq.as_text(identity.version_line, topics, producers, health, identity.start_ns, now_ns, memory)
            return text_response(text if cluster is None else f"{text}\n{cluster}\n")
        answer: dict[str, Any] = {
            "version": identity.version,
            "health": health,
            "start_time": identity.start_ns // 1_000_000_000,
            "durability": self._durability,
            "topics": topics if is_known else None,
        }
        if memory is not None:
            answer["memory"] = memory
        answer["producers"] = [nsq.client_row(client) for client in producers] or None
        lookups = {} if request.query.get("topic") else self._node.lookup.connected()  # they are nothing of a topic
        if lookups:
            answer["nsqlookupds"] = [{"address": name, "connected": is_up} for name, is_up in lookups.items()]
        if cluster is not None:
            answer["cluster"] = cluster
        return json_response(answer)

    async def _youzans_stats(self, request: Request) -> Response:
        """One entry for each partition; all of them are led here, so that ``leaderOnly`` leaves none out."""
        query, figures = request.query, self._figures
        topic, partition = query.get("topic", ""), partition_number(request)
        switch(request, "leaderOnly")
        has_clients = switch(request, "needClients")
        if has_clients is None:
            has_clients = lenient_switch(request, "include_clients", bool(topic))
        rows = figures.partitions(topic, query.get("channel", ""), partition, has_clients)
        found = [row async for row in in_turns(rows)]
        if query.get("format") != "json":
            identity = self._identity
            times = nsq.start_and_uptime(identity.start_ns, self._clock.wall_ns())
            return text_response(youzan.as_text(identity.version_line, self._node.health(), found, *times))
        answer: dict[str, Any] = {**figures.about(), "topics": found}
        if lenient_switch(request, "include_mem", False):
            answer["memory"] = figures.memory()
        return json_response(answer)


_STATS = ("format", "topic", "channel", "include_clients", "include_mem", "partition", "leaderOnly", "needClients")
ROUTES = (
    # what asks it tells whether the process lives, and often cannot send headers
    Route("GET", "/ping", OPEN, StateApi.ping, None, is_plain=True, is_logged=False),
    Route("GET", "/info", KNOWN, StateApi.info, (), (), is_negotiated=True),
    Route("GET", "/stats", TOPIC_READ, StateApi.stats, _STATS, (), is_negotiated=True, line=WALKS),
    Route("GET", "/metrics", ALL_READ, StateApi.metrics, (), is_logged=False, line=WALKS),
)
