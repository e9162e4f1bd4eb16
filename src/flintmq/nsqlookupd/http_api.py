"""nsqlookupd's HTTP API: what clients and operators ask the registration database.

Rules of this file: one function per endpoint, thin; status codes and texts are NSQ's. ``*`` is an ordinary, invalid
name: upstream takes it for a wildcard, so that ``POST /topic/delete?topic=*`` deletes everything. A request without
parameters of the redesigned NSQ is answered exactly as by NSQ; one with them as Youzan's nsqlookupd says.
Source: NSQ's HTTP API, NSQ's nsqlookupd, Youzan's nsqlookupd.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from flintmq.clock import Clock
from flintmq.cluster.registration import (
    Lookup,
    NsqdNode,
    Partitions,
    Registration,
    RegistrationDatabase,
    TooManyRegistrations,
)
from flintmq.names import is_ephemeral, is_valid_name
from flintmq.net.http_envelope import NSQ, Style, enveloped
from flintmq.net.http_router import Handler
from flintmq.net.http_server import EMPTY, HttpError, Request, Response, Router, json_response, plain_response
from flintmq.net.log_level import LogLevelApi, set_log_level
from flintmq.net.networks import LOOPBACK, Networks
from flintmq.nsqlookupd.topics import TopicAdmin
from flintmq.topic_meta import (
    CHANGE_WORDS,
    CLUSTER_CHANGE_WORDS,
    CREATION_WORDS,
    BadTopicMeta,
    TopicMeta,
    asks_for_partitions,
    meta_of_query,
    parse_partition,
)
from flintmq.version import __version__
from flintmq.wire.identify import NSQ_VERSION

_log = logging.getLogger(__name__)

_NO_PART = ("partition", "dry_run")
"""Refused where everything is changed that a topic, a channel or a node has."""
_FIXED = ("partition", "partition_num", "multipart", "orderedmulti", "extend")
"""Stays as a topic was created, or is changed by another request."""
_LOOKUP = ("access", "metainfo", "partition", "consistent", "logs")
_KNOWN = (*_LOOKUP, "metaInfo", "force", "partition_num", "move_leader", "move_from", "move_to", "topn", "enable",
          "remove_node", "dry_run", "min_in_sync", *CREATION_WORDS, *CHANGE_WORDS)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LookupdAddress:
    """A nsqlookupd as ``/listlookup`` has it.

    Attributes:
        https_port: 0: it has none, or one that nobody has told us of. The redesigned NSQ has no word for it.
    """

    host: str
    tcp_port: int
    http_port: int
    https_port: int = 0

    def row(self) -> dict[str, Any]:
        """Return it as it stands in the answer; ports are strings there."""
        row = {
            "ID": f"{self.host}:0:{self.tcp_port}:nsqlookup",
            "NodeIP": self.host,
            "TcpPort": str(self.tcp_port),
            "HttpPort": str(self.http_port),
            "RpcPort": "0",
            "Epoch": 0,
        }
        return {**row, "HttpsPort": str(self.https_port)} if self.https_port else row


def build_router(
    database: RegistrationDatabase,
    clock: Clock,
    admin: TopicAdmin,
    me: Callable[[], LookupdAddress],
    allow_write_without_channels: bool = True,
    style: str = NSQ,
    api: HttpApi | None = None,
) -> Router:
    """Return the routes of nsqlookupd.

    Args:
        me: this nsqlookupd; known when it listens.
        allow_write_without_channels: who wants to publish is also told of topics that have no channel yet.
        style: ``youzan``: questions are answered as by the redesigned NSQ also when they show nothing of it.
        api: the handlers, where they are others than those of a nsqlookupd by itself.
    """
    api = api or HttpApi(database, clock, admin, me, allow_write_without_channels)
    router = Router(_KNOWN)

    def ask(path: str, handler: Handler, takes: tuple[str, ...] = (), words: tuple[str, ...] = ()) -> None:
        form = Style(style, words).negotiated
        router.add("GET", path, handler, takes=(*takes, *words), refuses=(), form=form)

    def either(plain: Handler, redesigned: Handler, words: tuple[str, ...]) -> Handler:
        """Return a handler: ``redesigned`` for requests with one of its parameters, ``plain`` for all others."""
        chosen = Style(style, words)
        return lambda request: redesigned(request) if chosen.is_youzans(request) else plain(request)

    router.add("GET", "/ping", api.ping, plain=True)
    ask("/info", api.info)
    ask("/lookup", either(api.lookup, api.lookup_partitions, _LOOKUP), ("topic",), _LOOKUP)
    router.add("GET", "/listlookup", api.members, takes=(), refuses=(), form=enveloped)
    ask("/topics", either(api.topics, api.topics_with_meta, ("metaInfo",)), (), ("metaInfo",))
    ask("/channels", either(api.channels, api.channels_of_partition, ("partition",)), ("topic",), ("partition",))
    ask("/nodes", api.nodes)
    ask("/debug", api.debug)
    creation = ("topic", *CREATION_WORDS, "dry_run")
    channel = ("topic", "channel")
    change = ("topic", *CHANGE_WORDS, *CLUSTER_CHANGE_WORDS, "dry_run")
    changes: tuple[tuple[str, str, Handler, tuple[str, ...], tuple[str, ...]], ...] = (
        ("POST", "/topic/create", api.create_topic, creation, ("partition", *CLUSTER_CHANGE_WORDS)),
        ("PUT", "/topic/create", api.create_topic, creation, ("partition", *CLUSTER_CHANGE_WORDS)),
        ("POST", "/topic/delete", api.delete_topic, ("topic", "partition", "dry_run"), ("force",)),
        ("POST", "/topic/tombstone", api.tombstone, ("topic", "node", "restore"), _NO_PART),
        ("POST", "/topic/meta/update", api.change_topic, change, _FIXED),
        ("POST", "/channel/create", api.create_channel, channel, _NO_PART),
        ("POST", "/channel/delete", api.delete_channel, channel, _NO_PART),
    )
    for method, path, handler, takes, refuses in changes:
        router.add(method, path, handler, takes=takes, refuses=refuses)
    LogLevelApi(Networks(LOOPBACK), set_log_level).add_routes(router)
    return router


class HttpApi:
    """The handlers. Never keeps state of its own."""

    def __init__(
        self,
        database: RegistrationDatabase,
        clock: Clock,
        admin: TopicAdmin,
        me: Callable[[], LookupdAddress],
        allow_write_without_channels: bool,
    ) -> None:
        self._database = database
        self._clock = clock
        self._admin = admin
        self._me = me
        self._allow_write_without_channels = allow_write_without_channels
        self._info = json_response(info_row())

    # --- questions

    def ping(self, request: Request) -> Response:
        return _PONG

    def info(self, request: Request) -> Response:
        return self._info

    def lookup(self, request: Request) -> Response:
        found = self._nodes_of(argument(request, "topic"))
        if found is None:
            raise HttpError(404, "TOPIC_NOT_FOUND")
        return json_response({"channels": found.channels, "producers": [producer_row(node) for node in found.nodes]})

    def lookup_partitions(self, request: Request) -> Response:
        """Answer ``/lookup`` of the redesigned NSQ; a topic without partitions is answered as by NSQ."""
        topic = argument(request, "topic")
        access = request.query.get("access", "r")
        if access not in ("r", "w"):
            raise HttpError(400, "INVALID_ACCESS_MODE")
        found = self._partitions_of(topic, access == "w", request.query.get("logs") == "true")
        if found is None:
            if access == "w":
                raise HttpError(404, "Key not found")
            return json_response({"channels": [], "producers": []})
        if access == "w" and not found.channels and not self._allow_write_without_channels:
            raise HttpError(404, "Topic has no channel, should init at least one for the new topic")
        if not found.meta.is_partitioned and not found.leaders:
            plain_answer = {"channels": found.channels, "producers": [producer_row(node) for node in found.plain]}
            if request.query.get("metainfo") and found.meta.extend_support:
                plain_answer["meta"] = found.meta.for_clients()
            return json_response(dict(sorted(plain_answer.items())))
        leaders, plain = found.leaders, found.plain
        wanted = request.query.get("partition")
        if wanted is not None:
            number = parse_partition(wanted)
            if number is None:
                raise HttpError(400, "INVALID_ARG_TOPIC_PARTITION")
            leaders, plain = {p: node for p, node in leaders.items() if p == number}, []
        distinct = {node.node_id: node for node in leaders.values()}
        answer: dict[str, Any] = {
            "channels": found.channels,
            "partitions": {
                str(number): peer_row(node, found.log_ids.get(number, "")) for number, node in leaders.items()
            },
            "producers": [
                *map(peer_row, distinct.values()),
                *({**peer_row(node), "distributed_id": ""} for node in plain),
            ],
        }
        if request.query.get("metainfo") and found.meta.is_partitioned:
            answer["meta"] = found.meta.for_clients()
        return json_response(dict(sorted(answer.items())))

    def _nodes_of(self, topic: str) -> Lookup | None:
        return self._database.lookup(topic, self._clock.monotonic_ns())

    def _partitions_of(self, topic: str, is_for_writing: bool, names_logs: bool) -> Partitions | None:
        """Return the places of a topic.

        Args:
            names_logs: who asks counts what it publishes to each log; only a cluster has some that are named.
        """
        return self._database.partitions(topic, self._clock.monotonic_ns(), hides_tombstoned=is_for_writing)

    def members(self, request: Request) -> Response:
        """List every nsqlookupd: this one, which knows no other."""
        me = self._me().row()
        return json_response({"lookupdleader": me, "lookupdnodes": [me]})

    def _topic_names(self) -> list[str]:
        return self._database.topics()

    def _meta(self, topic: str) -> TopicMeta:
        return self._database.meta(topic)

    def topics(self, request: Request) -> Response:
        return json_response({"topics": self._topic_names()})

    def topics_with_meta(self, request: Request) -> Response:
        names = self._topic_names()
        answer: dict[str, Any] = {"topics": names}
        if request.query.get("metaInfo") == "true":
            answer["meta_info"] = [self._meta_row(name) for name in names]
        return json_response(answer)

    def _meta_row(self, topic: str) -> dict[str, Any]:
        meta = self._meta(topic)
        return {
            "topic_name": topic,
            "extend_support": meta.extend_support,
            "ordered": meta.ordered,
            "multi_part": meta.multi_part,
            "disable_channel_auto_create": meta.disable_channel_auto_create,
            "registered_channels": self._database.channels(topic) if meta.disable_channel_auto_create else [],
        }

    def channels(self, request: Request) -> Response:
        return json_response({"channels": self._database.channels(argument(request, "topic"))})

    def channels_of_partition(self, request: Request) -> Response:
        topic = argument(request, "topic")
        if "partition" not in request.query:
            return self.channels(request)
        number = parse_partition(request.query["partition"])
        if number is None:
            raise HttpError(400, "INVALID_ARG_TOPIC_PARTITION")
        return json_response({"channels": self._database.channels_of_partition(topic, number)})

    def nodes(self, request: Request) -> Response:
        return json_response({"producers": self._node_rows()})

    def _node_rows(self) -> list[dict[str, Any]]:
        return [
            {
                **producer_row(found.node),
                "tombstones": found.tombstones,
                "topics": found.topics,
                **({"partitions": found.partitions} if found.partitions else {}),
            }
            for found in self._database.nodes(self._clock.monotonic_ns())
        ]

    def debug(self, request: Request) -> Response:
        """Answer with the database, by ``category:key:subkey``; times are kept monotonic and shown as wall time."""
        wall_offset_ns = self._clock.wall_ns() - self._clock.monotonic_ns()
        listed: dict[str, list[dict[str, Any]]] = {}
        nodes = [Registration(node) for node in self._database.all_nodes()]
        for topic, channel, registrations in (("", "", nodes), *self._database.all_registrations()):
            category = "channel" if channel else "topic" if topic else "client"
            if registrations:
                rows = [_debug_row(registration, wall_offset_ns) for registration in registrations]
                listed[f"{category}:{topic}:{channel}"] = rows
        return json_response(listed)

    # --- changes

    def create_topic(self, request: Request) -> Response | Coroutine[Any, Any, Response]:
        topic = valid_argument(request, "topic")
        _refuse(request, "dry_run")
        if asks_for_partitions(request.query):
            return self._create_partitions(topic, request)
        _log.info("DB: adding topic(%s)", topic)
        self._create(topic)
        return EMPTY

    async def _create_partitions(self, topic: str, request: Request) -> Response:
        try:
            meta = meta_of_query(request.query)
        except BadTopicMeta as error:
            raise HttpError(400, str(error)) from None
        if is_ephemeral(topic):
            raise HttpError(400, "INVALID_ARG_TOPIC")
        await self._admin.create(topic, meta)
        return EMPTY

    async def change_topic(self, request: Request) -> Response:
        _refuse(request, *CLUSTER_CHANGE_WORDS, "dry_run")
        await self._admin.change(valid_argument(request, "topic"), request.query)
        return EMPTY

    def delete_topic(self, request: Request) -> Response | Coroutine[Any, Any, Response]:
        topic = argument(request, "topic")
        _refuse(request, "dry_run")
        if "partition" in request.query:
            return self._delete_partitions(topic, request.query["partition"])
        channels = self._database.delete_topic(topic)
        _log.info("DB: removing topic(%s) and %d channels", topic, len(channels))
        return EMPTY

    async def _delete_partitions(self, topic: str, partition: str) -> Response:
        if partition != "**":
            raise HttpError(400, "REMOVE_SINGLE_PARTITION_NOT_ALLOWED")
        await self._admin.delete(topic)
        return EMPTY

    async def _change_channel(self, action: str, topic: str, channel: str) -> Response:
        await self._admin.change_channel(action, topic, channel)
        return EMPTY

    def create_channel(self, request: Request) -> Response | Coroutine[Any, Any, Response]:
        topic, channel = valid_argument(request, "topic"), valid_argument(request, "channel")
        if self._database.meta(topic).disable_channel_auto_create:
            return self._change_channel("create", topic, channel)
        _log.info("DB: adding channel(%s) in topic(%s)", channel, topic)
        self._create(topic, channel)
        return EMPTY

    def delete_channel(self, request: Request) -> Response | Coroutine[Any, Any, Response]:
        topic, channel = valid_argument(request, "topic"), valid_argument(request, "channel")
        if self._database.meta(topic).disable_channel_auto_create:
            return self._change_channel("delete", topic, channel)
        if not self._database.delete_channel(topic, channel):
            raise HttpError(404, "CHANNEL_NOT_FOUND")
        _log.info("DB: removing channel(%s) from topic(%s)", channel, topic)
        return EMPTY

    def tombstone(self, request: Request) -> Response:
        topic, node = argument(request, "topic"), argument(request, "node")
        restore = request.query.get("restore", "false")
        if restore not in ("true", "false", ""):
            raise HttpError(400, f"INVALID_ARG_RESTORE: restore={restore[:64]}, it must be true or false")
        is_set = restore != "true"
        count = self._database.tombstone(topic, node, self._clock.monotonic_ns() if is_set else None)
        what = "setting" if is_set else "lifting"
        _log.info("DB: %s tombstone for producer@%s of topic(%s), %d matched", what, node, topic, count)
        return EMPTY

    def _create(self, topic: str, channel: str = "") -> None:
        try:
            self._database.create(topic, channel)
        except TooManyRegistrations as error:
            _log.error("DB: topic(%s) channel(%s) refused: %s", topic, channel, error)
            raise HttpError(503, "TOO_MANY_REGISTRATIONS") from error


def _refuse(request: Request, *names: str) -> None:
    """Refuse parameters that only a cluster obeys."""
    for name in names:
        if name in request.query:
            raise HttpError(400, f"INVALID_ARG_{name.upper()}: {name} is for topics of a cluster")


_PONG = plain_response("OK")


def info_row() -> dict[str, Any]:
    """Return what ``/info`` says of every nsqlookupd."""
    return {"version": NSQ_VERSION, "flintmq_version": __version__}


def argument(request: Request, name: str) -> str:
    """Return a parameter that has to be there."""
    value = request.query.get(name)
    if value is None:
        raise HttpError(400, f"MISSING_ARG_{name.upper()}")
    return value


def valid_argument(request: Request, name: str) -> str:
    """Return a parameter that has to be there and a valid name."""
    value = argument(request, name)
    if not is_valid_name(value):
        raise HttpError(400, f"INVALID_ARG_{name.upper()}")
    return value


def producer_row(node: NsqdNode) -> dict[str, Any]:
    """Return a node as NSQ's clients know it."""
    return {
        "remote_address": node.remote_address,
        "hostname": node.hostname,
        "broadcast_address": node.broadcast_address,
        "tcp_port": node.tcp_port,
        "http_port": node.http_port,
        "version": node.version,
        "topology_zone": node.topology_zone,
        "topology_region": node.topology_region,
    }


def peer_row(node: NsqdNode, log_id: str = "") -> dict[str, Any]:
    """Return a node as the redesigned NSQ's clients know it.

    Args:
        log_id: of the partition that it is named for, where that is the same whoever leads.
    """
    return {
        **({"log_id": log_id} if log_id else {}),
        "id": node.node_id,
        "remote_address": node.remote_address,
        "hostname": node.hostname,
        "broadcast_address": node.broadcast_address,
        "tcp_port": node.tcp_port,
        "http_port": node.http_port,
        "version": node.version,
        "distributed_id": node.distributed_id,
    }


def _debug_row(registration: Registration, wall_offset_ns: int) -> dict[str, Any]:
    node = registration.node
    tombstoned_at_ns = registration.tombstoned_at_ns
    return {
        "id": node.node_id,
        "hostname": node.hostname,
        "broadcast_address": node.broadcast_address,
        "tcp_port": node.tcp_port,
        "http_port": node.http_port,
        "version": node.version,
        "topology_zone": node.topology_zone,
        "topology_region": node.topology_region,
        "last_update": node.last_update_ns + wall_offset_ns,
        "tombstoned": tombstoned_at_ns is not None,
        "tombstoned_at": 0 if tombstoned_at_ns is None else tombstoned_at_ns + wall_offset_ns,
    }
