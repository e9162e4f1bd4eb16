"""The part of nsqd's HTTP API that only the redesigned NSQ has and that is none of ours otherwise.

::

    GET  /serverstats                    is this nsqd well, and how many publishes could it not store
    GET  /message/stats?topic=&channel=  the state of a channel in every partition, as text for people
    GET  /message/historystats           bytes published in the last full hour, by partition; with topic=, of one
                                         partition the last 22 hours, the latest last
    GET  /coordinator/stats?topic=       who of a partition that this nsqd has a copy of is in sync, and who catches up
    POST /channel/setclientlimit         bound what consumers of a channel may hold that are connected now

Rules of this file: answers have no envelope; fields and parameters are the redesigned NSQ's.

Source: Youzan's HTTP API.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flintmq.broker.topic import Topic
from flintmq.net.http_auth import KNOWN
from flintmq.net.http_messages import EMPTY, HttpError, Request, Response, json_response, text_response
from flintmq.nsqd.api.arguments import channel_of, number, one_partition, partition_here, partition_number, topic_of
from flintmq.nsqd.api.route import ALL_READ, DRY, TOPIC_ADMIN, TOPIC_READ, WALKS, Route
from flintmq.nsqd.client import Client
from flintmq.nsqd.figures import replicas
from flintmq.nsqd.figures.figures import Figures
from flintmq.nsqd.in_turns import in_turns
from flintmq.nsqd.node import Node

_DIGITS_MAX = 9


class YouzanApi:
    """These routes of one nsqd."""

    def __init__(self, node: Node, figures: Figures) -> None:
        self._node = node
        self._figures = figures
        self._broker = node.engine.broker

    def server(self, request: Request) -> Response:
        """``/serverstats``."""
        failed = sum(part.failed_count for topic in self._broker.topics.values() for part in topic.partitions.values())
        return json_response({**self._figures.about(), "server_pub_failed": failed})

    def channel(self, request: Request) -> Response:
        """``/message/stats``."""
        topic, name = channel_of(self._broker, request)
        here = partition_here(request, topic)
        found = [part for each, part in topic.partitions.items() if here in (None, each) and name in part.channels]
        lines = [f"topic {topic.name} partition {part.number} {part.channels[name].describe()}\n" for part in found]
        return text_response("".join(lines))

    def hours(self, request: Request) -> Response:
        """``/message/historystats``."""
        if "topic" not in request.query:
            if "partition" in request.query:
                raise HttpError(400, "MISSING_ARG_TOPIC")
            return json_response({"node_hourly_pub_size_stats": list(self._last_hour(self._broker.topics.values()))})
        topic = topic_of(self._broker, request)
        return json_response({"hourly_pub_size": self._figures.history.of(one_partition(request, topic))})

    def _last_hour(self, topics: Iterable[Topic]) -> Iterable[dict[str, Any]]:
        for topic in topics:
            for partition in topic.partitions.values():
                size = self._figures.history.last_hour(partition)
                yield {
                    "topic_name": topic.name,
                    "topic_partition": str(partition.number),
                    "hourly_pub_size": size,
                }

    async def coordinator(self, request: Request) -> Response:
        """``/coordinator/stats``; without a topic no partitions are listed, as there."""
        part = self._figures.cluster
        if part is None:
            raise HttpError(500, "Coordinator is disabled.")
        topic, node = request.query.get("topic", ""), part.figures().node
        found = in_turns(part.replicas(topic, partition_number(request))) if topic else in_turns(())
        return json_response(replicas.coordinator_stats([replicas.coordinator_row(node, each) async for each in found]))

    def limit_clients(self, request: Request) -> Response:
        """``/channel/setclientlimit``."""
        topic, name = channel_of(self._broker, request)
        here = partition_here(request, topic)
        text = request.query.get("ready", "")
        limit = number(text) if len(text) <= _DIGITS_MAX else None
        if limit is None:
            raise HttpError(400, f"INVALID_OPTION: ready={text[:64]}, it must be a number of messages, 0 for none")
        prefix = request.query.get("client_prefix", "")
        parts = self._broker.parts(topic, name, here)
        for owner in dict.fromkeys(consumer.owner for part in parts for consumer in part.subscriptions):
            if isinstance(owner, Client) and owner.peer.startswith(prefix):
                owner.limit_ready(limit)
        self._node.engine.schedule()
        return EMPTY


_PART = ("topic", "channel", "partition")
ROUTES = (
    Route("GET", "/serverstats", KNOWN, YouzanApi.server, (), ()),
    Route("GET", "/message/stats", TOPIC_READ, YouzanApi.channel, _PART, ()),
    Route("GET", "/message/historystats", TOPIC_READ, YouzanApi.hours, ("topic", "partition"), ()),
    Route(
        "GET", "/coordinator/stats", ALL_READ, YouzanApi.coordinator, ("topic", "partition", "format"), (), line=WALKS
    ),
    Route(
        "POST", "/channel/setclientlimit", TOPIC_ADMIN, YouzanApi.limit_clients, (*_PART, "client_prefix", "ready"), DRY
    ),
)
