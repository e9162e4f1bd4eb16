"""The part of nsqd's HTTP API that publishes.

::

    POST /pub?topic=&partition=&defer=&producer_id=&sequence=       one message; also /put
    POST /mpub?topic=&partition=&binary=&producer_id=&sequence=     one message a line, or as MPUB has them; also /mput
    POST /mdpub?defer=&...                                          as /mpub with a delay; /mpub itself takes none
    POST /pubtrace?topic=&partition=&trace_id=5      one message; the answer says where it is stored
    POST /pub_ext?topic=&partition=&ext={...}        one message with headers; so does it, if they have a ##trace_id

    {"status":"OK","id":12,"trace_id":"5","queue_offset":344,"rawsize":39}

Each header ``X-Nsqext-Name: value`` of a /pub_ext is one more header ``name`` of the message, unless ``ext`` has it.

Rules of this file: a row of :data:`ROUTES` names the command that it is over TCP, and the arguments in the order
in which they are looked at, because clients know which error comes first; each puts what it reads into one
:class:`~flintmq.wire.server.Publish`. Topics are not created for trace ids and headers. /pub_ext answers in the
envelope of old NSQ unless the request accepts NSQ 1.0's bare JSON, as it does there.

Source: NSQ's HTTP API, Youzan's HTTP API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TypeAlias

import msgspec

from flintmq.broker.bounds import TopicFull
from flintmq.broker.producers import SequenceGap
from flintmq.errors import UNREADABLE_JSON, FlintError, RemoteProtocolError
from flintmq.limits import PRODUCER_ID_SIZE_MAX
from flintmq.message import HEADERS_SIZE_MAX
from flintmq.net.descriptors import TooFewDescriptors
from flintmq.net.http_envelope import enveloped
from flintmq.net.http_messages import HttpError, PendingResponse, Request, Response, json_response, text_response
from flintmq.net.http_router import Handler
from flintmq.nsqd.api.answers import PendingAnswer, exiting, too_few_files
from flintmq.nsqd.api.arguments import lenient_switch, partition_to_publish, topic_name
from flintmq.nsqd.api.route import TOPIC_PUBLISH, Route
from flintmq.nsqd.extended import BadHeaders, read_headers, trace_id_bytes
from flintmq.nsqd.node import Node
from flintmq.nsqd.pending_reply import Receipt
from flintmq.wire.bodies import HEADERS_SIZE, Kind
from flintmq.wire.commands import COMMANDS, Command
from flintmq.wire.params import is_producer_id, parse_sequence
from flintmq.wire.server import Publish, RefusedBody, ServerLimits, parse_mpub_body

_HEADER_PREFIX = b"x-nsqext-"
_OK = text_response("OK")
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
    if lenient_switch(request, "binary", "binary" in request.query):
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
    publish.topic = topic_name(request, "INVALID_TOPIC")


def _partition(request: Request, publish: Publish, limits: ServerLimits) -> None:
    publish.partition = partition_to_publish(request)


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
    """Read who counts these messages, and from where on; /mpub may have none, and then it only creates a topic."""
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
        read_headers(headers)
        given = _decode(headers)
        more = {
            name.removeprefix(_HEADER_PREFIX).decode(): msgspec.Raw(
                msgspec.json.encode(value.decode("utf-8", "replace"))
            )
            for name, value in request.headers.items()
            if name.startswith(_HEADER_PREFIX)
        }
    except BadHeaders as error:
        raise HttpError(400, f"E_INVALID_JSON_HEADER{f': {error}' if error.is_beyond_limit else ''}") from None
    except UNREADABLE_JSON:
        raise HttpError(400, "E_INVALID_JSON_HEADER") from None
    if more:
        headers = msgspec.json.encode(more | given)
    if len(headers) > HEADERS_SIZE_MAX:
        raise HttpError(400, "E_BAD_EXT")
    publish.bodies = (HEADERS_SIZE.pack(len(headers)) + headers + request.body,)


class PublishingApi:
    """These routes of one nsqd.

    Args:
        publish_nothing: answers a publish without messages, which only creates its topic.
    """

    def __init__(
        self,
        node: Node,
        limits: ServerLimits,
        publish_nothing: Callable[[str, Response], Response | PendingResponse],
    ) -> None:
        self._engine = node.engine
        self._drain = node.drain
        self._publishing = node.publishing
        self._limits = limits
        self._publish_nothing = publish_nothing

    def publish(self, row: Command, arguments: Sequence[Argument], request: Request) -> PendingResponse | Response:
        """Answer when what a request publishes is stored.

        Args:
            row: the command that it is over TCP.
            arguments: what is read, in the order in which it is looked at.
        """
        drain = self._drain
        publish = Publish(row.name, "", (), 1, front=row.body.front)
        for read in arguments:
            read(request, publish, self._limits)
        if not publish.bodies:
            return self._publish_nothing(publish.topic, _OK)
        if drain.is_on and publish.producer_id is None:  # a duplicate is answered all the same
            raise HttpError(503, "DRAINING")
        try:
            reply = self._publishing.publish(publish)
        except FlintError as error:
            raise _refusal(error, drain.is_on) from None
        reply.note_publisher(request.remote_address)
        self._engine.schedule()
        answer = _OK if reply.receipt is None else partial(_answer_of, reply.receipt)
        return PendingAnswer(reply.source, answer, _failure).pending


def _refusal(error: FlintError, is_draining: bool = False) -> HttpError:
    """The answer to a publish that nsqd does not take."""
    if isinstance(error, TopicFull):
        return HttpError(429, "TOPIC_FULL")
    if isinstance(error, SequenceGap):
        return HttpError(409, f"SEQUENCE_GAP: {error}")
    if isinstance(error, RemoteProtocolError):
        return HttpError(404 if error.code == "E_TOPIC_NOT_EXIST" else 400, error.code)
    if isinstance(error, TooFewDescriptors):
        return too_few_files(error)
    return HttpError(503, "DRAINING" if is_draining else "EXITING")


def _failure(error: BaseException) -> HttpError:
    """The answer to a publish that was taken and not stored."""
    return _refusal(error) if isinstance(error, SequenceGap | RemoteProtocolError) else exiting(error)


def _answer_of(receipt: Receipt) -> Response:
    """The answer that says where a message with a trace id is; OK for another one."""
    stored = receipt.stored() if receipt.is_traced else None
    if stored is None:
        return _OK
    answer = {
        "status": "OK",
        "id": stored.internal_id,
        "trace_id": str(stored.trace_id),
        "queue_offset": stored.offset,
        "rawsize": stored.raw_size,
    }
    return json_response(answer)


def _row(
    path: str,
    command: str,
    arguments: Sequence[Argument],
    takes: tuple[str, ...],
    refuses: tuple[str, ...] = (),
    form: Callable[[Handler], Handler] | None = None,
    is_negotiated: bool = True,
) -> Route:
    row = COMMANDS[command]
    is_one = row.body.kind is Kind.MESSAGE
    return Route(
        "POST", path, TOPIC_PUBLISH, lambda api, request: api.publish(row, arguments, request), takes, refuses,
        body_limit=attrgetter("max_msg_size" if is_one else "max_body_size"),
        too_big="MSG_TOO_BIG" if is_one else "BODY_TOO_BIG",
        is_negotiated=is_negotiated, form=form, is_logged=False,
    )  # fmt: skip


_PLACED = (_partition, _counted)
_ONE = (_body, _topic, _delay, *_PLACED)
_SEVERAL = (_topic, _bodies, *_PLACED)
_PLAIN = ("topic", "partition", "binary", "producer_id", "sequence")
_DEFERRING = (*_PLAIN, "defer")
_COUNTS = ("producer_id", "sequence", "defer")
"""Refused by requests of the redesigned NSQ's: the message would be stored twice, or delivered too early."""
ROUTES = (
    _row("/pub", "PUB", _ONE, _DEFERRING),
    _row("/put", "PUB", _ONE, _DEFERRING),  # its name before 1.0
    _row("/mpub", "MPUB", _SEVERAL, _PLAIN),
    _row("/mput", "MPUB", _SEVERAL, _PLAIN),
    _row("/mdpub", "MDPUB", (_needed_delay, *_SEVERAL), _DEFERRING),
    _row("/pubtrace", "PUB_TRACE", (_body_or_406, _topic, _trace_id, _partition), ("topic", "partition", "trace_id"),
         (*_COUNTS, "ext"), is_negotiated=False),
    _row("/pub_ext", "PUB_EXT", (_body_or_406, _topic, _headers, _partition), ("topic", "partition", "ext"),
         _COUNTS, enveloped, is_negotiated=False),
)  # fmt: skip
