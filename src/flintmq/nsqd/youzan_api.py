"""The part of nsqd's HTTP API that only the redesigned NSQ has and that is none of ours otherwise.

::

    GET  /serverstats                    is this nsqd well, and how many publishes could it not store
    GET  /message/stats?topic=&channel=  the state of a channel in every partition, as text for people
    GET  /message/historystats           bytes published in the last full hour, by partition; with topic=, of one
                                         partition the last 22 hours, the latest last
    POST /channel/setclientlimit         bound what consumers of a channel may hold that are connected now

Rules of this file: answers have no envelope; fields and parameters are the redesigned NSQ's.

Source: reference/youzan.md 1.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flintmq.broker.broker import Broker
from flintmq.broker.topic import Topic
from flintmq.net.http_messages import EMPTY, HttpError, Request, Response, json_response, text_response
from flintmq.net.http_router import Router
from flintmq.nsqd.history import HourlySizes
from flintmq.nsqd.http_names import channel_of, partition_here, topic_of
from flintmq.nsqd.session import Session

_PART = ("topic", "channel", "partition")
_DIGITS_MAX = 9


class YouzanApi:
    """These routes of one nsqd.

    Args:
        about: version, health and start of this nsqd.
        schedule: lets what has changed be delivered.
    """

    def __init__(
        self,
        broker: Broker,
        history: HourlySizes,
        about: Callable[[], dict[str, Any]],
        schedule: Callable[[], None],
    ) -> None:
        self._broker = broker
        self._history = history
        self._about = about
        self._schedule = schedule

    def add_routes(self, router: Router) -> None:
        """Add them to a router."""
        router.add("GET", "/serverstats", self._server, takes=())
        router.add("GET", "/message/stats", self._channel, takes=_PART)
        router.add("GET", "/message/historystats", self._hours, takes=("topic", "partition"))
        takes = (*_PART, "client_prefix", "ready")
        router.add("POST", "/channel/setclientlimit", self._limit_clients, takes=takes)

    def _server(self, request: Request) -> Response:
        failed = sum(part.failed_count for topic in self._broker.topics.values() for part in topic.partitions.values())
        return json_response({**self._about(), "server_pub_failed": failed})

    def _channel(self, request: Request) -> Response:
        topic, name = channel_of(self._broker, request)
        number = partition_here(request, topic)
        found = [part for each, part in topic.partitions.items() if number in (None, each) and name in part.channels]
        lines = [f"topic {topic.name} partition {part.number} {part.channels[name].describe()}\n" for part in found]
        return text_response("".join(lines))

    def _hours(self, request: Request) -> Response:
        if "topic" not in request.query:
            if "partition" in request.query:
                raise HttpError(400, "MISSING_ARG_TOPIC")
            return json_response({"node_hourly_pub_size_stats": list(self._last_hour(self._broker.topics.values()))})
        topic = topic_of(self._broker, request)
        number = partition_here(request, topic)
        if number is None and len(topic.partitions) > 1:
            raise HttpError(400, "MISSING_ARG_PARTITION")
        partition = topic.first_partition if number is None else topic.partitions[number]
        return json_response({"hourly_pub_size": self._history.of(partition)})

    def _last_hour(self, topics: Iterable[Topic]) -> Iterable[dict[str, Any]]:
        for topic in topics:
            for partition in topic.partitions.values():
                size = self._history.last_hour(partition)
                yield {
                    "topic_name": topic.name,
                    "topic_partition": str(partition.number),
                    "hourly_pub_size": size,
                }

    def _limit_clients(self, request: Request) -> Response:
        topic, name = channel_of(self._broker, request)
        number = partition_here(request, topic)
        text = request.query.get("ready", "")
        if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
            raise HttpError(400, f"INVALID_OPTION: ready={text[:64]}, it must be a number of messages, 0 for none")
        prefix = request.query.get("client_prefix", "")
        parts = self._broker.parts(topic, name, number)
        for owner in dict.fromkeys(consumer.owner for part in parts for consumer in part.subscriptions):
            if isinstance(owner, Session) and owner.peer.startswith(prefix):
                owner.limit_ready(int(text))
        self._schedule()
        return EMPTY
