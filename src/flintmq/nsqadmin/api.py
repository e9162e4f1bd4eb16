"""The JSON API of NSQ's nsqadmin, below ``/api``, and ``/ping``, ``/config`` and Graphite's ``/render``.

Rules of this file: routes, fields, statuses and words are NSQ's; an answer that some daemons are missing from is 200
with a ``message`` that begins with ``WARNING``, one that all are missing from is 502. Differences, all of them where
NSQ's nsqadmin fails: an unknown topic or channel is 404, and a topic is created where there are only nsqd.

Source: nsqadmin of NSQ 1.3 (``/api``); NSQ's options.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from flintmq.errors import UNREADABLE_JSON, OptionError
from flintmq.names import is_valid_name
from flintmq.net.log import LEVELS
from flintmq.net.log_level import set_log_level
from flintmq.net.networks import Networks
from flintmq.nsqadmin import daemons, official
from flintmq.nsqadmin.admin import Admin
from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.graphite import picture, rate
from flintmq.nsqadmin.guard import api_response
from flintmq.nsqadmin.options import NsqadminOptions
from flintmq.nsqadmin.snapshots import FRESH_S, Known
from flintmq.nsqadmin.views import DoneView, Missing
from flintmq.options import SECOND, rows

CHANNELS_ASKED_MAX = 1000
_LOOKUPDS = "nsqlookupd_http_addresses"
_LOG_LEVEL = "log_level"
_OBJECT = msgspec.json.Decoder(dict[str, Any] | None)
_VALUES = json.JSONDecoder()
_log = logging.getLogger(__name__)


class Api:
    """These routes."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._gather = admin.gather
        self._actions = admin.actions
        self._upstream = admin.upstream
        cidr = admin.options.allow_config_from_cidr
        self._config_networks = Networks((cidr,) if cidr else ())
        self._rows = {row.key: row for row in rows(NsqadminOptions) if not row.deprecated}

    def routes(self) -> list[Route]:
        """Return them."""
        return [
            Route("/ping", self._ping),
            Route("/api/topics", self._topics),
            Route("/api/topics", self._create, methods=["POST"]),
            Route("/api/topics/{topic}", self._topic),
            Route("/api/topics/{topic}", self._act, methods=["POST"]),
            Route("/api/topics/{topic}", self._delete, methods=["DELETE"]),
            Route("/api/topics/{topic}/{channel}", self._channel),
            Route("/api/topics/{topic}/{channel}", self._act, methods=["POST"]),
            Route("/api/topics/{topic}/{channel}", self._delete, methods=["DELETE"]),
            Route("/api/nodes", self._nodes),
            Route("/api/nodes/{node}", self._node),
            Route("/api/nodes/{node}", self._tombstone, methods=["DELETE"]),
            Route("/api/counter", self._counter),
            Route("/api/graphite", self._graphite),
            Route("/render", self._render),
            Route("/config/{name}", self._config, methods=["GET", "PUT"]),
        ]

    # -- looking ------------------------------------------------------------------------------------------------------

    async def _ping(self, request: Request) -> Response:
        return PlainTextResponse("OK")

    async def _topics(self, request: Request) -> Response:
        lookupds = self._gather.snapshots.lookupds
        if lookupds:
            answers = await self._upstream.look_all("nsqlookupd", lookupds, daemons.topics())
            names = {name for found in answers.found.values() for name in found}
        else:
            stats = await self._upstream.look_all("nsqd", self._gather.snapshots.sources, daemons.stats())
            answers = stats  # type: ignore[assignment]
            names = {each.topic_name for found in stats.found.values() for each in found.topics or ()}
        _require_some(bool(answers.found), answers.missing)
        if request.query_params.get("inactive") != "true":
            return _told({"topics": sorted(names) or None}, answers.missing)
        inactive: dict[str, list[str]] = {}
        if lookupds:
            known = await self._gather.snapshots.discover()
            active = {each.topic for node in known.nodes.values() for each in node.topics}
            asked = sorted(names - active)
            channels = await self._gather.channels_of(asked[:CHANNELS_ASKED_MAX])
            inactive = {name: channels.get(name, []) for name in asked}
        return _told({"topics": inactive}, answers.missing)

    async def _topic(self, request: Request) -> Response:
        name = request.path_params["topic"]
        found, missing = await self._stats_of(name, "", has_clients=False)
        if not found:
            raise Refused(404, "TOPIC_NOT_FOUND")
        return _told(official.sum_topic(name, found), missing)

    async def _channel(self, request: Request) -> Response:
        topic, name = request.path_params["topic"], request.path_params["channel"]
        found, missing = await self._stats_of(topic, name, has_clients=True)
        channels = [each for row in found for each in row["channels"] if each["channel_name"] == name]
        if not channels:
            is_topic = found or (await self._stats_of(topic, "", has_clients=False))[0]
            raise Refused(404, "CHANNEL_NOT_FOUND" if is_topic else "TOPIC_NOT_FOUND")
        return _told(official.sum_channel(topic, name, channels), missing)

    async def _stats_of(
        self, topic: str, channel: str, has_clients: bool
    ) -> tuple[list[dict[str, Any]], list[Missing]]:
        """Return a topic on each node that has it, and who is missing."""
        if not is_valid_name(topic):
            raise Refused(404, "TOPIC_NOT_FOUND")
        if channel and not is_valid_name(channel):
            raise Refused(404, "CHANNEL_NOT_FOUND")
        known = await self._gather.snapshots.discover()
        _require_some(bool(known.nodes) or not known.missing, known.missing)
        asked = [
            address
            for address, node in known.nodes.items()
            if not self._gather.snapshots.lookupds or any(each.topic == topic for each in node.topics)
        ]
        question = daemons.stats(topic, channel or None, clients=has_clients)
        answers, _ = await asyncio.gather(
            self._upstream.look_all("nsqd", asked, question), self._gather.snapshots.identify(known.nodes)
        )
        missing = [*known.missing, *answers.missing]
        _require_some(bool(answers.found) or not asked, missing)
        now_s = self._admin.env.clock.wall_ns() // SECOND
        found = [
            official.topic_stats(each, known.nodes[address], now_s, has_clients)
            for address, stats in answers.found.items()
            for each in stats.topics or ()
            if each.topic_name == topic
        ]
        return found, missing

    async def _nodes(self, request: Request) -> Response:
        known = await self._known()
        return _told({"nodes": [official.node_row(node) for node in known.nodes.values()] or None}, known.missing)

    async def _known(self) -> Known:
        """Return the nodes with what they say of themselves, where nsqlookupd does not."""
        if not self._gather.snapshots.lookupds:
            found = await self._gather.snapshots.get(FRESH_S)
            known = Known(found.nodes, [], found.missing)
            alive = {address: node for address, node in found.nodes.items() if node.problem is None}
            _require_some(bool(alive), found.missing)
            return Known(alive, [], known.missing)
        known = await self._gather.snapshots.discover()
        _require_some(known.is_listed_now, known.missing)
        newest = max((daemons.version_key(node.version) for node in known.nodes.values()), default=())
        for node in known.nodes.values():
            node.is_out_of_date = daemons.version_key(node.version) < newest
        return known

    async def _node(self, request: Request) -> Response:
        address = request.path_params["node"]
        known = await self._known()
        node = known.nodes.get(address)
        if node is None:
            raise Refused(404, "NODE_NOT_FOUND")
        answers = await self._upstream.look_all("nsqd", [address], daemons.stats(clients=True))
        _require_some(bool(answers.found), answers.missing)
        now_s = self._admin.env.clock.wall_ns() // SECOND
        topics = [official.topic_stats(each, node, now_s, True) for each in answers.found[address].topics or ()]
        clients = sum(len(channel["clients"] or ()) for topic in topics for channel in topic["channels"])
        content = {
            "node": address,
            "topics": topics or None,
            "total_messages": sum(topic["message_count"] for topic in topics),
            "total_clients": clients,
        }
        return _told(content, known.missing)

    async def _counter(self, request: Request) -> Response:
        found = await self._gather.snapshots.get(FRESH_S)
        _require_some(bool(found.on_node) or not found.missing, found.missing)
        stats: dict[str, dict[str, Any]] = {}
        for address, topics in found.on_node.items():
            for topic, channels in topics.items():
                for channel, count in channels.items():
                    stats[f"{topic}:{channel}:{address}"] = {
                        "node": address,
                        "topic_name": topic,
                        "channel_name": channel,
                        "message_count": count,
                    }
        return _told({"stats": stats}, found.missing)

    # -- changing -----------------------------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        visitor = request.state.visitor
        self._require(request, "operate", "create_topic", "")
        body = _json(request, "INVALID_BODY")
        topic, channel = _text(body, "topic"), _text(body, "channel")
        return _done(await self._actions.create_topic(visitor, topic, channel))

    async def _act(self, request: Request) -> Response:
        visitor = request.state.visitor
        topic, channel = request.path_params["topic"], request.path_params.get("channel", "")
        noun = "channel" if channel else "topic"
        self._require(request, "operate", f"{_action_of(request)}_{noun}", f"{topic}/{channel}".rstrip("/"))
        word = _text(_json(request, "INVALID_BODY"), "action")
        acts: dict[str, Callable[..., Awaitable[DoneView]]]
        if channel:
            acts = {
                "pause": self._actions.pause_channel,
                "unpause": self._actions.unpause_channel,
                "empty": self._actions.empty_channel,
            }
        else:
            acts = {
                "pause": self._actions.pause_topic,
                "unpause": self._actions.unpause_topic,
                "empty": self._actions.empty_topic,
            }
        act = acts.get(word)
        if act is None:
            raise Refused(400, "INVALID_ACTION")
        return _done(await act(visitor, topic, *((channel,) if channel else ())))

    async def _delete(self, request: Request) -> Response:
        visitor = request.state.visitor
        topic, channel = request.path_params["topic"], request.path_params.get("channel", "")
        action = "delete_channel" if channel else "delete_topic"
        self._require(request, "admin", action, f"{topic}/{channel}".rstrip("/"))
        if channel:
            return _done(await self._actions.delete_channel(visitor, topic, channel))
        return _done(await self._actions.delete_topic(visitor, topic))

    async def _tombstone(self, request: Request) -> Response:
        node = request.path_params["node"]
        self._require(request, "admin", "tombstone_topic_producer", node)
        topic = _text(_json(request, "INVALID_BODY"), "topic")
        return _done(await self._actions.tombstone(request.state.visitor, node, topic))

    def _require(self, request: Request, role: str, action: str, subject: str) -> None:
        visitor = request.state.visitor
        if not visitor.may(role):
            self._admin.audit.note(visitor, action, subject, "refused", [f"the role {visitor.role} is not {role}"])
            raise Refused(403, "FORBIDDEN")

    # -- Graphite and options -----------------------------------------------------------------------------------------

    async def _graphite(self, request: Request) -> Response:
        query = request.query_params
        if query.get("metric") != "rate":
            raise Refused(400, "INVALID_ARG_METRIC")
        if "target" not in query:
            raise Refused(400, "INVALID_ARG_TARGET")
        return api_response({"rate": await rate(self._upstream, self._admin.options, query["target"])})

    async def _render(self, request: Request) -> Response:
        if not self._admin.options.proxy_graphite:
            raise Refused(404, "NOT_FOUND")
        return await picture(self._upstream, self._admin.options, request.url.query)

    async def _config(self, request: Request) -> Response:
        visitor, name = request.state.visitor, request.path_params["name"]
        is_change = request.method == "PUT"
        if not self._config_networks.allows(visitor.address):
            _log.warning("%s may not use /config, see --allow-config-from-cidr", visitor.address)
            if is_change:
                why = "--allow-config-from-cidr does not name this address"
                self._admin.audit.note(visitor, "set_config", name, "refused", [why])
            raise Refused(403, "FORBIDDEN")
        if is_change:
            if self._admin.options.users_file:
                self._require(request, "admin", "set_config", name)
            try:
                value = self._set_option(name, request.state.body)
            except Refused as refused:  # without the value: nobody knows what it is
                self._admin.audit.note(visitor, "set_config", name, "refused", [refused.text])
                raise
            self._admin.audit.note(visitor, "set_config", f"{name}={value}", "done")
        row = self._rows.get(name)
        if row is None:
            raise Refused(400, "INVALID_OPTION")
        if name == _LOOKUPDS:
            return api_response(list(self._gather.snapshots.lookupds))
        value = getattr(self._admin.options, row.attribute)
        if name == _LOG_LEVEL:
            return api_response(list(LEVELS).index(value) + 1)
        if isinstance(value, str):
            return PlainTextResponse(value, headers={"X-NSQ-Content-Type": "nsq; version=1.0"})
        return api_response(list(value) if isinstance(value, tuple) else value)

    def _set_option(self, name: str, body: bytes) -> str:
        """Set an option; return its value as it is said on a command line."""
        if not body:
            raise Refused(413, "INVALID_VALUE")
        options = self._admin.options
        try:
            if name == _LOOKUPDS:
                addresses = tuple(dict.fromkeys(msgspec.json.decode(body, type=list[str])))
                if not addresses or options.nsqd_http_address:
                    raise ValueError("either nsqlookupd or nsqd are looked at, as at the start")
                self._admin.options = options.replace(lookupd_http_address=addresses)
                self._gather.snapshots.lookupds = addresses
                self._gather.snapshots.forget()
                return ",".join(addresses)
            if name == _LOG_LEVEL:
                word = body.decode().lower()
                self._admin.options = options.replace(log_level=word)
                set_log_level(word)
                return word
            raise Refused(400, "INVALID_OPTION")
        except (OptionError, *UNREADABLE_JSON):
            raise Refused(400, "INVALID_VALUE") from None


def _told(content: dict[str, Any], missing: Iterable[Missing]) -> Response:
    return api_response(content | {"message": _warning(missing)})


def _done(done: DoneView) -> Response:
    return _told({}, done.failures)


def _warning(missing: Iterable[Missing]) -> str:
    words = "; ".join(f"{each.daemon} {each.address}: {each.text}" for each in missing)
    return f"WARNING: {words}" if words else ""


def _require_some(is_some: bool, missing: Iterable[Missing]) -> None:
    """Refuse with 502 where nobody has answered."""
    if not is_some:
        words = "; ".join(f"{each.daemon} {each.address}: {each.text}" for each in missing)
        raise Refused(502, f"UPSTREAM_ERROR: {words}")


def _json(request: Request, word: str) -> dict[str, Any]:
    """Return the fields of a body as NSQ's reads it: what stands behind its first value is ignored, null has none."""
    body: bytes = request.state.body
    try:
        return _OBJECT.decode(body) or {}
    except UNREADABLE_JSON:
        pass
    try:
        return _OBJECT.decode(_first_value(body)) or {}
    except UNREADABLE_JSON:
        raise Refused(400, word) from None


def _first_value(body: bytes) -> bytes:
    """Return the beginning of a body that is one value of JSON, as far as Python's looser reader can tell.

    Raises:
        ValueError, RecursionError: there is none.
    """
    text = body.decode("latin-1").lstrip(" \t\r\n")  # a character is a byte, whatever the encoding is
    _, end = _VALUES.raw_decode(text)
    return text[:end].encode("latin-1")


def _action_of(request: Request) -> str:
    """Return the action that somebody asks for who may not, for the audit log."""
    try:
        word = _json(request, "").get("action")
    except Refused:
        word = None
    return word if word in ("pause", "unpause", "empty") else "change"


def _text(body: dict[str, Any], name: str) -> str:
    """Return a field, in whatever case its name is written, empty where it is null: so NSQ's reads JSON."""
    value = body.get(name)
    if value is None:
        value = next((body[each] for each in body if each.lower() == name and body[each] is not None), "")
    if not isinstance(value, str):
        raise Refused(400, f"INVALID_BODY: {name} must be text")
    return value


__all__ = ["Api"]
