"""nsqlookupd's HTTP API: what clients and operators ask the registration database.

Rules of this file: one function per endpoint, thin; status codes and texts are NSQ's. ``*`` is an ordinary, invalid
name: upstream takes it for a wildcard, so that ``POST /topic/delete?topic=*`` deletes everything.
Source: reference/nsq.md 2.0 and 2.3. ``access`` and ``metainfo`` of ``/lookup`` (reference/youzan.md 1.1) are ignored.
"""

from __future__ import annotations

import logging
from typing import Any

from flintmq import __version__
from flintmq.clock import Clock
from flintmq.cluster.registration import NsqdNode, Registration, RegistrationDatabase, TooManyRegistrations
from flintmq.names import is_valid_name
from flintmq.net.http_server import EMPTY, HttpError, Request, Response, Router, json_response, plain_response
from flintmq.wire.identify import NSQ_VERSION

_log = logging.getLogger(__name__)


def build_router(database: RegistrationDatabase, clock: Clock) -> Router:
    """All routes of nsqlookupd."""
    api = HttpApi(database, clock)
    router = Router()
    router.add("GET", "/ping", api.ping, plain=True)
    router.add("GET", "/info", api.info)
    router.add("GET", "/lookup", api.lookup)
    router.add("GET", "/topics", api.topics)
    router.add("GET", "/channels", api.channels)
    router.add("GET", "/nodes", api.nodes)
    router.add("GET", "/debug", api.debug)
    router.add("POST", "/topic/create", api.create_topic)
    router.add("POST", "/topic/delete", api.delete_topic)
    router.add("POST", "/topic/tombstone", api.tombstone)
    router.add("POST", "/channel/create", api.create_channel)
    router.add("POST", "/channel/delete", api.delete_channel)
    return router


class HttpApi:
    """The handlers. Never waits, never keeps state of its own."""

    def __init__(self, database: RegistrationDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._info = json_response({"version": NSQ_VERSION, "flintmq_version": __version__})

    # --- questions

    def ping(self, request: Request) -> Response:
        return _PONG

    def info(self, request: Request) -> Response:
        return self._info

    def lookup(self, request: Request) -> Response:
        found = self._database.lookup(_argument(request, "topic"), self._clock.monotonic_ns())
        if found is None:
            raise HttpError(404, "TOPIC_NOT_FOUND")
        return json_response({"channels": found.channels, "producers": [_producer(node) for node in found.nodes]})

    def topics(self, request: Request) -> Response:
        return json_response({"topics": self._database.topics()})

    def channels(self, request: Request) -> Response:
        return json_response({"channels": self._database.channels(_argument(request, "topic"))})

    def nodes(self, request: Request) -> Response:
        listed = self._database.nodes(self._clock.monotonic_ns())
        return json_response(
            {
                "producers": [
                    {**_producer(found.node), "tombstones": found.tombstones, "topics": found.topics}
                    for found in listed
                ]
            }
        )

    def debug(self, request: Request) -> Response:
        """Everything in the database, by ``category:key:subkey``; times are kept monotonic and shown as wall time."""
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

    def create_topic(self, request: Request) -> Response:
        topic = _valid_argument(request, "topic")
        _log.info("DB: adding topic(%s)", topic)
        self._create(topic)
        return EMPTY

    def delete_topic(self, request: Request) -> Response:
        topic = _argument(request, "topic")
        channels = self._database.delete_topic(topic)
        _log.info("DB: removing topic(%s) and %d channels", topic, len(channels))
        return EMPTY

    def create_channel(self, request: Request) -> Response:
        topic, channel = _valid_argument(request, "topic"), _valid_argument(request, "channel")
        _log.info("DB: adding channel(%s) in topic(%s)", channel, topic)
        self._create(topic, channel)
        return EMPTY

    def delete_channel(self, request: Request) -> Response:
        topic, channel = _valid_argument(request, "topic"), _valid_argument(request, "channel")
        if not self._database.delete_channel(topic, channel):
            raise HttpError(404, "CHANNEL_NOT_FOUND")
        _log.info("DB: removing channel(%s) from topic(%s)", channel, topic)
        return EMPTY

    def tombstone(self, request: Request) -> Response:
        topic, node = _argument(request, "topic"), _argument(request, "node")
        count = self._database.tombstone(topic, node, self._clock.monotonic_ns())
        _log.info("DB: setting tombstone for producer@%s of topic(%s), %d matched", node, topic, count)
        return EMPTY

    def _create(self, topic: str, channel: str = "") -> None:
        try:
            self._database.create(topic, channel)
        except TooManyRegistrations as error:
            _log.error("DB: topic(%s) channel(%s) refused: %s", topic, channel, error)
            raise HttpError(503, "TOO_MANY_REGISTRATIONS") from error


_PONG = plain_response("OK")


def _argument(request: Request, name: str) -> str:
    value = request.query.get(name)
    if value is None:
        raise HttpError(400, f"MISSING_ARG_{name.upper()}")
    return value


def _valid_argument(request: Request, name: str) -> str:
    value = _argument(request, name)
    if not is_valid_name(value):
        raise HttpError(400, f"INVALID_ARG_{name.upper()}")
    return value


def _producer(node: NsqdNode) -> dict[str, Any]:
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
