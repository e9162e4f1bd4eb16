"""The part of nsqd's HTTP API that publishes.

::

    POST /pub?topic=&partition=&defer=&producer_id=&sequence=       one message; also /put
    POST /mpub?topic=&partition=&binary=&producer_id=&sequence=     one message a line, or as MPUB has them; also /mput
    POST /mdpub?defer=&...                                          as /mpub with a delay; /mpub itself takes none
    POST /pubtrace?topic=&partition=&trace_id=5      one message; the answer says where it is stored
    POST /pub_ext?topic=&partition=&ext={...}        one message with headers; so does it, if they have a ##trace_id

    {"status":"OK","id":12,"trace_id":"5","queue_offset":344,"rawsize":35}

Each header ``X-Nsqext-Name: value`` of a /pub_ext is one more header ``name`` of the message, unless ``ext`` has it.

Rules of this file: a route is a row of :data:`ROUTES`: the command that it is over TCP, and the arguments in the order
in which they are looked at, because clients know which error comes first; each puts what it reads into one
:class:`~flintmq.wire.server.Publish`. Topics are not created for trace ids and headers. /pub_ext answers in the
envelope of old NSQ unless the request accepts NSQ 1.0's bare JSON, as it does there.

Source: reference/nsq.md 2.1, reference/youzan.md 1.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import msgspec

from flintmq.errors import UNREADABLE_JSON, FlintError, RemoteProtocolError
from flintmq.limits import PRODUCER_ID_SIZE_MAX
from flintmq.message import HEADERS_SIZE_MAX
from flintmq.net.http_envelope import enveloped
from flintmq.net.http_messages import HttpError, PendingResponse, Request, Response, text_response
from flintmq.net.http_router import Handler, Router
from flintmq.nsqd.drain import Drain
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.extended import trace_id_bytes
from flintmq.nsqd.http_answer import PendingAnswer
from flintmq.nsqd.http_names import partition_of, publish_refusal, topic_name_of
from flintmq.nsqd.http_parameters import NSQ_WORDS
from flintmq.nsqd.pending_reply import PendingReply
from flintmq.wire.bodies import HEADERS_SIZE, Kind
from flintmq.wire.commands import COMMANDS
from flintmq.wire.server import Publish, RefusedBody, ServerLimits, parse_mpub_body
from flintmq.wire.words import is_producer_id, parse_sequence

_HEADER_PREFIX = b"x-nsqext-"
_OK = text_response("OK")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

Argument: TypeAlias = Callable[[Request, Publish, ServerLimits], None]
"""Reads a part of a request into a publish; raises :class:`HttpError` for one that is missing or cannot be."""


def _integer(text: str) -> int:
    """A number as Go's ``ParseInt`` reads it, a sign included; -1 for anything else, huge numbers too."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 20 else -1


def _body(request: Request, publish: Publish, limits: ServerLimits) -> None:
    if not request.body:
        raise HttpError(400, "MSG_EMPTY")
    publish.bodies = (request.body,)


def _body_or_406(request: Request, publish: Publish, limits: ServerLimits) -> None:
    if not request.body:
        raise HttpError(406, "MSG_EMPTY")
    publish.bodies = (request.body,)


def _bodies(request: Request, publish: Publish, limits: ServerLimits) -> None:
    """As MPUB has them behind its size, or one a line."""
    binary = request.query.get("binary")
    if binary is not None and _BOOLEANS.get(binary, True):
        try:
            publish.bodies = parse_mpub_body(request.body, limits)
        except RefusedBody as refused:
            raise HttpError(413, refused.args[0].removeprefix("E_")) from None
        return
    bodies = [line for line in request.body.split(b"\n") if line]
    if any(len(body) > limits.max_msg_size for body in bodies):
        raise HttpError(413, "MSG_TOO_BIG")
    publish.bodies = bodies


def _topic(request: Request, publish: Publish, limits: ServerLimits) -> None:
    publish.topic = topic_name_of(request, "INVALID_TOPIC")


def _partition(request: Request, publish: Publish, limits: ServerLimits) -> None:
    publish.partition = partition_of(request)


def _delay(request: Request, publish: Publish, limits: ServerLimits) -> None:
    text = request.query.get("defer")
    if text is None:
        return
    publish.defer_ms = _integer(text)
    if not 0 <= publish.defer_ms <= limits.max_req_timeout_ms:
        raise HttpError(400, "INVALID_DEFER")


def _needed_delay(request: Request, publish: Publish, limits: ServerLimits) -> None:
    if "defer" not in request.query:
        raise HttpError(400, "MISSING_ARG_DEFER")
    _delay(request, publish, limits)


def _counted(request: Request, publish: Publish, limits: ServerLimits) -> None:
    """Who counts these messages, and from where on; /mpub may have none, and then it only creates a topic."""
    query = request.query
    if not publish.bodies or not ("producer_id" in query or "sequence" in query):
        return
    for name in ("producer_id", "sequence"):
        if name not in query:
            raise HttpError(400, f"MISSING_ARG_{name.upper()}")
    if "defer" in query:
        raise HttpError(400, "INVALID_DEFER: a publish with a sequence cannot be deferred")
    producer_id, text = query["producer_id"].encode("utf-8", "replace"), query["sequence"].encode("utf-8", "replace")
    if not is_producer_id(producer_id):
        raise HttpError(400, f"INVALID_ARG_PRODUCER_ID: 1 to {PRODUCER_ID_SIZE_MAX} of [A-Za-z0-9._:-]")
    sequence = parse_sequence(text, len(publish.bodies))
    if sequence is None:
        raise HttpError(400, "INVALID_ARG_SEQUENCE: a number from 1 to 2^63-1")
    publish.command, publish.producer_id, publish.sequence = f"{publish.command}_ONCE", producer_id, sequence


def _trace_id(request: Request, publish: Publish, limits: ServerLimits) -> None:
    try:
        trace_id = trace_id_bytes(publish.command, request.query.get("trace_id"))
    except RemoteProtocolError as error:
        raise HttpError(400, error.code) from None
    publish.bodies = (trace_id + request.body,)


def _headers(request: Request, publish: Publish, limits: ServerLimits) -> None:
    """The headers of the message; those in ``ext`` as they came."""
    headers = request.query.get("ext", "").encode()
    try:
        given = _decode(headers)
        more = {
            name.removeprefix(_HEADER_PREFIX).decode(): msgspec.Raw(
                msgspec.json.encode(value.decode("utf-8", "replace"))
            )
            for name, value in request.headers.items()
            if name.startswith(_HEADER_PREFIX)
        }
    except UNREADABLE_JSON:
        raise HttpError(400, "E_INVALID_JSON_HEADER") from None
    if more:
        headers = msgspec.json.encode(more | given)
    if len(headers) > HEADERS_SIZE_MAX:
        raise HttpError(400, "E_BAD_EXT")
    publish.bodies = (HEADERS_SIZE.pack(len(headers)) + headers + request.body,)


@dataclass(frozen=True, slots=True)
class Route:
    """How one request publishes.

    Attributes:
        paths: its names.
        command: what it is over TCP.
        arguments: what is read, in the order in which it is looked at.
        takes: the parameters that it obeys.
        ignores: those of NSQ that mean nothing here.
        form: that its answers have; None for NSQ's.
        is_negotiated: a request says which.
    """

    paths: tuple[str, ...]
    command: str
    arguments: tuple[Argument, ...]
    takes: tuple[str, ...]
    ignores: tuple[str, ...] = NSQ_WORDS
    form: Callable[[Handler], Handler] | None = None
    is_negotiated: bool = True


_PLAIN = ("topic", "partition", "binary", "producer_id", "sequence")
_DEFERRING = (*_PLAIN, "defer")
_PLACED = (_partition, _counted)
ROUTES = (
    Route(("/pub", "/put"), "PUB", (_body, _topic, _delay, *_PLACED), _DEFERRING),  # /put: its name before 1.0
    Route(("/mpub", "/mput"), "MPUB", (_topic, _bodies, *_PLACED), _PLAIN),
    Route(("/mdpub",), "MDPUB", (_needed_delay, _topic, _bodies, *_PLACED), _DEFERRING),
    Route(("/pubtrace",), "PUB_TRACE", (_body_or_406, _topic, _trace_id, _partition),
          ("topic", "partition", "trace_id"), (), is_negotiated=False),
    Route(("/pub_ext",), "PUB_EXT", (_body_or_406, _topic, _headers, _partition),
          ("topic", "partition", "ext"), (), enveloped, is_negotiated=False),
)  # fmt: skip


class PublishingApi:
    """These routes of one nsqd.

    Args:
        publish: takes a publish.
        publish_nothing: answers one without messages, which only creates its topic.
        negotiated: gives answers the form that a request asks for.
    """

    def __init__(
        self,
        engine: Engine,
        drain: Drain,
        limits: ServerLimits,
        publish: Callable[[Publish], PendingReply],
        publish_nothing: Callable[[str, Response], Response | PendingResponse],
        negotiated: Callable[[Handler], Handler],
    ) -> None:
        self._engine = engine
        self._drain = drain
        self._limits = limits
        self._take = publish
        self._publish_nothing = publish_nothing
        self._negotiated = negotiated

    def add_routes(self, router: Router) -> None:
        """Add every route of this part."""
        limits = self._limits
        for route in ROUTES:
            is_one = COMMANDS[route.command].body.kind is Kind.MESSAGE
            limit, too_big = (limits.max_msg_size, "MSG_TOO_BIG") if is_one else (limits.max_body_size, "BODY_TOO_BIG")
            for path in route.paths:
                router.add(
                    "POST", path, partial(self._publish, route), body_limit_bytes=limit, too_big=too_big,
                    is_logged=False, takes=route.takes, ignores=route.ignores,
                    form=self._negotiated if route.is_negotiated else route.form,
                )  # fmt: skip

    def _publish(self, route: Route, request: Request) -> PendingResponse | Response:
        row, drain = COMMANDS[route.command], self._drain
        publish = Publish(row.name, "", (), 1, front=row.body.front)
        for read in route.arguments:
            read(request, publish, self._limits)
        if not publish.bodies:
            return self._publish_nothing(publish.topic, _OK)
        if drain.is_on and publish.producer_id is None:  # a duplicate is answered all the same
            raise HttpError(503, "DRAINING")
        try:
            reply = self._take(publish)
        except FlintError as error:
            raise publish_refusal(error, drain.is_on) from None
        reply.note_publisher(request.remote_address)
        self._engine.schedule()
        return PendingAnswer(reply.source, _OK, reply.place).pending
