"""nsqd's HTTP API.

Rules of this file: parameters come only from the query string; the order of the checks is nsqd's, because clients know
which error comes first; publishing answers when the message is stored, without a task per request.

Source: reference/nsq.md 2.1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq.broker.broker import ChannelNotFound, TopicConflict
from flintmq.broker.topic import Topic
from flintmq.errors import FlintError
from flintmq.names import is_ephemeral, is_valid_name
from flintmq.net.http_messages import (
    EMPTY,
    HttpError,
    PendingResponse,
    Request,
    Response,
    json_response,
    plain_response,
    text_response,
)
from flintmq.net.http_router import Handler, Router
from flintmq.net.log_level import LogLevelApi
from flintmq.net.metrics import exposition, process_families
from flintmq.net.networks import Networks
from flintmq.nsqd import metrics, stats, stats_youzan
from flintmq.nsqd.config import ConfigApi, Running
from flintmq.nsqd.damage import DamageApi
from flintmq.nsqd.drain import DrainApi
from flintmq.nsqd.http_answer import PendingAnswer
from flintmq.nsqd.http_names import (
    found_topic,
    partition_here,
    partition_number,
    topic_name_of,
)
from flintmq.nsqd.http_parameters import KNOWN, NSQ_WORDS, style_of, switch_of
from flintmq.nsqd.http_publishing import PublishingApi
from flintmq.nsqd.inspection import InspectionApi
from flintmq.nsqd.settings_api import SettingsApi
from flintmq.nsqd.trace_api import TraceApi
from flintmq.nsqd.youzan_api import YouzanApi
from flintmq.topic_meta import (
    CHANGE_WORDS,
    CREATION_WORDS,
    BadTopicMeta,
    asks_for_headers_alone,
    asks_for_partitions,
    changed_meta,
    meta_of_query,
    partitions_of_text,
)

if TYPE_CHECKING:
    from flintmq.nsqd.server import Nsqd

log = logging.getLogger(__name__)

_TOPICS_PER_TURN = 20
_PART = ("topic", "channel", "partition")
_STATS = ("format", "topic", "channel", "include_clients", "include_mem", "partition", "leaderOnly", "needClients")
_HEALTHY = plain_response("OK")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class HttpApi:
    """The routes of one nsqd."""

    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._broker = nsqd.engine.broker
        self._style = style_of(nsqd.options.http_style)

    def router(self) -> Router:
        """Every route, complete."""
        router = Router(KNOWN)
        options = self._nsqd.options
        negotiated = self._style.negotiated
        router.add("GET", "/ping", self._ping, plain=True, is_logged=False)
        router.add("GET", "/info", self._info, takes=(), ignores=NSQ_WORDS, form=negotiated)
        router.add("GET", "/stats", self._stats, takes=_STATS, ignores=NSQ_WORDS, form=negotiated)
        nsqd = self._nsqd
        PublishingApi(
            nsqd.engine, nsqd.drain, nsqd.wire_limits, nsqd.publish, self._publish_nothing, negotiated
        ).add_routes(router)
        changes: tuple[tuple[str, Handler, tuple[str, ...]], ...] = (
            ("/topic/create", self._topic_create, ("topic", *CREATION_WORDS, "partitions", "version")),
            ("/topic/meta/update", self._topic_meta_update, ("topic", *CHANGE_WORDS, "version")),
            ("/topic/delete", self._topic_delete, ("topic",)),
            ("/topic/empty", self._topic_empty, ("topic",)),
            ("/topic/pause", self._topic_pause, ("topic",)),
            ("/topic/unpause", self._topic_unpause, ("topic",)),
            ("/channel/create", self._channel_create, _PART),
            ("/channel/delete", self._channel_delete, _PART),
            ("/channel/empty", self._channel_empty, _PART),
            ("/channel/emptydelayed", self._channel_empty_deferred, _PART),
            ("/channel/pause", self._channel_pause, _PART),
            ("/channel/unpause", self._channel_unpause, _PART),
            ("/channel/setorder", self._channel_set_order, ("topic", "channel", "order")),
        )
        for path, handler, takes in changes:
            router.add("POST", path, handler, takes=takes, ignores=NSQ_WORDS)
        router.add("GET", "/metrics", self._metrics, is_logged=False, takes=())
        networks = Networks(options.allow_config_from_cidr)
        running = Running(lambda: self._nsqd.options, self._nsqd.change_options, self._nsqd.options_filled_in)
        ConfigApi(running, networks).add_routes(router)
        LogLevelApi(networks, lambda word: running.change(running.options().replace(log_level=word))).add_routes(router)
        self._nsqd.debug.add_routes(router)
        InspectionApi(self._nsqd.engine).add_routes(router)
        TraceApi(self._nsqd.engine, self._nsqd.tracing).add_routes(router)
        DrainApi(self._nsqd.drain).add_routes(router)
        DamageApi(self._nsqd.engine, self._nsqd.damage).add_routes(router)
        SettingsApi(self._nsqd.engine).add_routes(router)
        YouzanApi(self._broker, nsqd.history, self._about, nsqd.engine.schedule).add_routes(router)
        return router

    # -- state -------------------------------------------------------------------------------------------------------

    def _ping(self, request: Request) -> Response:
        health = self._nsqd.health()
        if health != "OK":
            raise HttpError(500, health)
        return _HEALTHY

    def _info(self, request: Request) -> Response:
        return json_response(self._nsqd.info())

    def _stats(self, request: Request) -> Response | Coroutine[Any, Any, Response]:
        query = request.query
        if self._style.is_youzans(request):
            return self._youzans_stats(request)
        topic, topics = query.get("topic", ""), self._broker.topics
        include_clients = _BOOLEANS.get(query.get("include_clients", "true"), True)
        channel = query.get("channel", "")
        rows = stats.topic_rows(topics, self._latencies(), topic, channel, include_clients)
        if topic or len(topics) <= _TOPICS_PER_TURN:
            return self._stats_answer(query, list(rows), include_clients)
        return self._stats_in_turns(query, rows, include_clients)

    async def _stats_in_turns(
        self, query: Mapping[str, str], rows: Iterable[dict[str, Any]], include_clients: bool
    ) -> Response:
        """Answer with many topics, and let others have their turn meanwhile.

        Each is put into its final form in its turn: what is left to be done at once is to join them.
        """
        is_json = query.get("format") == "json"
        now_ns = self._nsqd.env.clock.wall_ns()
        found: list[Any] = []
        for row in rows:
            found.append(msgspec.Raw(msgspec.json.encode(row)) if is_json else stats.topic_lines(row, now_ns))
            if len(found) % _TOPICS_PER_TURN == 0:
                await asyncio.sleep(0)
        return self._stats_answer(query, found, include_clients)

    def _stats_answer(self, query: Mapping[str, str], found: list[Any], include_clients: bool) -> Response:
        nsqd = self._nsqd
        is_unknown = bool(query.get("topic")) and query["topic"] not in self._broker.topics
        topics = None if is_unknown else found
        producers = stats.producer_rows(nsqd.sessions) if include_clients and not is_unknown else None
        figures = stats.memory(nsqd.gc_pauses) if _BOOLEANS.get(query.get("include_mem", "true"), True) else None
        if query.get("format") != "json":
            rows = {"topics": topics, "producers": producers}
            now_ns = nsqd.env.clock.wall_ns()
            text = stats.as_text(nsqd.version_line, rows, nsqd.state_of_health(), nsqd.start_ns, now_ns, figures)
            return text_response(text)
        answer: dict[str, Any] = {
            "version": nsqd.version,
            "health": nsqd.state_of_health(),
            "start_time": nsqd.start_ns // 1_000_000_000,
            "durability": nsqd.options.durability,
            "topics": topics,
        }
        if figures is not None:
            answer["memory"] = figures
        answer["producers"] = producers
        return json_response(answer)

    async def _youzans_stats(self, request: Request) -> Response:
        """One entry for each partition; all of them are led here, so that ``leaderOnly`` leaves none out."""
        nsqd, query = self._nsqd, request.query
        topic, number = query.get("topic", ""), partition_number(request)
        switch_of(request, "leaderOnly")
        has_clients = switch_of(request, "needClients")
        if has_clients is None:
            has_clients = _BOOLEANS.get(query.get("include_clients", ""), bool(topic))
        rows = stats_youzan.rows(
            self._broker.topics, self._latencies(), nsqd.history, nsqd.sessions, topic=topic, partition=number,
            channel=query.get("channel", ""), has_clients=has_clients, clock_shift_ns=self._broker.clock_shift_ns,
        )  # fmt: skip
        found: list[dict[str, Any]] = []
        for row in rows:
            found.append(row)
            if len(found) % _TOPICS_PER_TURN == 0:
                await asyncio.sleep(0)
        if query.get("format") != "json":
            now_ns = nsqd.env.clock.wall_ns()
            times = stats.start_and_uptime(nsqd.start_ns, now_ns)
            return text_response(stats_youzan.as_text(nsqd.version_line, nsqd.health(), found, *times))
        answer: dict[str, Any] = {**self._about(), "topics": found}
        if _BOOLEANS.get(query.get("include_mem", "")):
            answer["memory"] = stats.memory(nsqd.gc_pauses)
        return json_response(answer)

    def _about(self) -> dict[str, Any]:
        nsqd = self._nsqd
        start_s = nsqd.start_ns // 1_000_000_000
        return {"version": nsqd.version, "health": nsqd.health(), "start_time": start_s}

    def _latencies(self) -> stats.Latencies:
        nsqd = self._nsqd
        return stats.Latencies(nsqd.options.e2e_processing_latency_percentile, nsqd.env.clock.wall_ns())

    async def _metrics(self, request: Request) -> Response:
        topics = await metrics.collect_topics(self._broker.topics, self._latencies())
        return exposition([*self._nsqd.metrics(), *topics, *process_families()])

    def _publish_nothing(self, topic: str, answer: Response) -> Response | PendingResponse:
        """A publish without messages, which creates its topic."""
        if topic not in self._broker.topics and not self._nsqd.options.auto_create_topics:
            raise HttpError(404, "E_TOPIC_NOT_EXIST")
        return self._created(topic, answer)

    def _refuse_while_draining(self) -> None:
        if self._nsqd.drain.is_on:
            raise HttpError(503, "DRAINING")

    # -- topics and channels -----------------------------------------------------------------------------------------

    def _topic_name(self, request: Request) -> str:
        name = request.query.get("topic")
        if name is None:
            raise HttpError(400, "MISSING_ARG_TOPIC")
        return name

    def _durably(self, topic: Topic | None = None, answer: Response = EMPTY) -> Response | PendingResponse:
        """Answer when the change survives, and the topic, which may be new."""
        self._nsqd.engine.schedule()
        source = self._nsqd.metadata_durable(topic)
        return answer if source is None else PendingAnswer(source, answer).pending

    def _created(self, name: str, answer: Response) -> Response | PendingResponse:
        """Answer when a topic exists and will."""
        try:
            topic = self._nsqd.create_topic(name)
        except FlintError:
            raise HttpError(500, "INTERNAL_ERROR") from None
        return self._durably(topic, answer)

    def _topic_create(self, request: Request) -> Response | PendingResponse:
        name = topic_name_of(request, "INVALID_TOPIC")
        if asks_for_headers_alone(request.query):
            return self._extended_create(name)
        if asks_for_partitions(request.query):
            return self._partitions_create(name, request)
        return self._created(name, EMPTY)

    def _extended_create(self, name: str) -> Response | PendingResponse:
        """A plain topic whose messages may carry headers."""
        self._refuse_while_draining()
        try:
            topic = self._nsqd.create_extended_topic(name)
        except TopicConflict as error:
            raise HttpError(400, str(error)) from None
        except FlintError:
            raise HttpError(503, "EXITING") from None
        return self._durably(topic)

    def _partitions_create(self, name: str, request: Request) -> Response | PendingResponse:
        """Partitions of a topic, which nsqlookupd asks for; ``partitions=0,2`` are those of them that come here."""
        self._refuse_while_draining()
        try:
            meta = meta_of_query(request.query)
            text = request.query.get("partitions")
            numbers = range(meta.partition_num) if text is None else partitions_of_text(text, meta.partition_num)
            if is_ephemeral(name):
                raise BadTopicMeta(f"topic {name} is ephemeral and cannot have partitions: take another name")
            topic = self._nsqd.create_partitions(name, meta, numbers)
        except (BadTopicMeta, TopicConflict) as error:
            raise HttpError(400, str(error)) from None
        except FlintError:
            raise HttpError(503, "EXITING") from None
        return self._durably(topic)

    def _topic_meta_update(self, request: Request) -> Response | PendingResponse:
        """Change what a topic was created with; nsqlookupd names the version, so that all nodes have the same."""
        topic = found_topic(self._broker, topic_name_of(request))
        try:
            meta = changed_meta(topic.meta, request.query)
            if "version" not in request.query and meta.is_like(topic.meta):
                return self._durably(topic)
            if meta.rank < topic.meta.rank:
                at = f"topic {topic.name} is at version {topic.meta.version}"
                raise HttpError(409, f"OLD_VERSION: {at}, this is {meta.version}")
            if self._nsqd.change_meta(topic, meta):
                log.info("TOPIC(%s): changed to version %d: %s", topic.name, meta.version, meta.changes())
        except (BadTopicMeta, TopicConflict) as error:
            raise HttpError(400, str(error)) from None
        return self._durably(topic)

    def _topic_delete(self, request: Request) -> Response | PendingResponse:
        name = self._topic_name(request)
        found_topic(self._broker, name)
        self._nsqd.delete_topic(name)
        return self._durably()

    def _topic_empty(self, request: Request) -> Response | PendingResponse:
        self._broker.empty_topic(found_topic(self._broker, topic_name_of(request, "INVALID_TOPIC")))
        return self._durably()

    def _topic_pause(self, request: Request) -> Response | PendingResponse:
        self._broker.pause_topic(found_topic(self._broker, self._topic_name(request)), True)
        return self._durably()

    def _topic_unpause(self, request: Request) -> Response | PendingResponse:
        self._broker.pause_topic(found_topic(self._broker, self._topic_name(request)), False)
        return self._durably()

    def _channel_names(self, request: Request) -> tuple[Topic, str]:
        topic = topic_name_of(request)
        channel = request.query.get("channel")
        if channel is None:
            raise HttpError(400, "MISSING_ARG_CHANNEL")
        if not is_valid_name(channel):
            raise HttpError(400, "INVALID_ARG_CHANNEL")
        return found_topic(self._broker, topic), channel

    def _channel_create(self, request: Request) -> Response | PendingResponse:
        topic, channel = self._channel_names(request)
        number = partition_here(request, topic)
        self._broker.channel(topic, channel, numbers=None if number is None else [number])
        return self._durably(topic)

    def _change_channel(
        self, request: Request, change: Callable[[Topic, str, int | None], object]
    ) -> Response | PendingResponse:
        topic, channel = self._channel_names(request)
        number = partition_here(request, topic)
        try:
            change(topic, channel, number)
        except ChannelNotFound:
            raise HttpError(404, "CHANNEL_NOT_FOUND") from None
        return self._durably()

    def _channel_delete(self, request: Request) -> Response | PendingResponse:
        return self._change_channel(request, self._nsqd.delete_channel)

    def _channel_empty(self, request: Request) -> Response | PendingResponse:
        return self._change_channel(request, self._broker.empty_channel)

    def _channel_empty_deferred(self, request: Request) -> Response | PendingResponse:
        return self._change_channel(request, self._broker.empty_deferred)

    def _channel_pause(self, request: Request) -> Response | PendingResponse:
        return self._change_channel(request, lambda t, c, p: self._broker.pause_channel(t, c, True, p))

    def _channel_unpause(self, request: Request) -> Response | PendingResponse:
        return self._change_channel(request, lambda t, c, p: self._broker.pause_channel(t, c, False, p))

    def _channel_set_order(self, request: Request) -> Response | PendingResponse:
        is_ordered = _BOOLEANS.get(request.query.get("order", ""))
        if is_ordered is None:
            raise HttpError(400, "INVALID_ARG_ORDER")
        return self._change_channel(request, lambda t, c, _: self._broker.order_channel(t, c, is_ordered, True))
