"""The part of nsqd's HTTP API that publishes with a trace id or with headers.

::

    POST /pubtrace?topic=&partition=&trace_id=5      one message; the answer says where it is stored
    POST /pub_ext?topic=&partition=&ext={...}        one message with headers; so does it, if they have a ##trace_id

    {"status":"OK","id":12,"trace_id":"5","queue_offset":344,"rawsize":35}

Each header ``X-Nsqext-Name: value`` of a /pub_ext is one more header ``name`` of the message, unless ``ext`` has it.

Rules of this file: the order of the checks is the redesigned NSQ's; topics are not created. /pub_ext answers in the
envelope of old NSQ unless the request accepts NSQ 1.0's bare JSON, as it does there.

Source: reference/youzan.md 1.4.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from flintmq.errors import UNREADABLE_JSON, FlintError, RemoteProtocolError
from flintmq.message import HEADERS_SIZE_MAX
from flintmq.net.http_envelope import enveloped
from flintmq.net.http_messages import HttpError, PendingResponse, Request, json_response, text_response
from flintmq.net.http_router import Router
from flintmq.nsqd.drain import Drain
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.extended import trace_id_bytes
from flintmq.nsqd.http_names import partition_of, publish_refusal, topic_name_of
from flintmq.nsqd.slots import Slot, StoredSlot
from flintmq.wire.extended import HEADERS_SIZE
from flintmq.wire.server import PublishExtended

_HEADER_PREFIX = b"x-nsqext-"
_OK = text_response("OK")
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Answer:
    """Answers one request when its message is stored."""

    __slots__ = ("_slot", "pending")

    def __init__(self, slot: StoredSlot) -> None:
        self.pending = PendingResponse()
        self._slot = slot
        slot.source.waiters.append(self)
        if slot.source.ended:
            self.publish_ended()

    def publish_ended(self) -> None:
        if self._slot.source.error is not None:
            self.pending.fail(HttpError(503, "EXITING"))  # as for every failed publish
            return
        stored = self._slot.stored() if self._slot.is_traced else None
        if stored is None:
            self.pending.complete(_OK)
            return
        answer = {
            "status": "OK",
            "id": stored.internal_id,
            "trace_id": str(stored.trace_id),
            "queue_offset": stored.offset,
            "rawsize": stored.raw_size,
        }
        self.pending.complete(json_response(answer))


class ExtendedApi:
    """These routes of one nsqd.

    Args:
        publish: publishes one message; what it returns makes the answer.
    """

    def __init__(
        self, engine: Engine, drain: Drain, publish: Callable[[PublishExtended], Slot], max_msg_size: int
    ) -> None:
        self._engine = engine
        self._drain = drain
        self._publish_message = publish
        self._max_msg_size = max_msg_size

    def add_routes(self, router: Router) -> None:
        """Add every route of this part."""
        limit = self._max_msg_size
        for path, handler, word, form in (
            ("/pubtrace", self._pub_trace, "trace_id", None),
            ("/pub_ext", self._pub_ext, "ext", enveloped),
        ):
            takes, too_big = ("topic", "partition", word), "MSG_TOO_BIG"
            router.add(
                "POST", path, handler, body_limit_bytes=limit, too_big=too_big, is_logged=False, takes=takes, form=form
            )

    def _pub_trace(self, request: Request) -> PendingResponse:
        topic = _topic(request)
        try:
            trace_id = trace_id_bytes("PUB_TRACE", request.query.get("trace_id"))
        except RemoteProtocolError as error:
            raise HttpError(400, error.code) from None
        return self._publish(request, "PUB_TRACE", topic, trace_id + request.body)

    def _pub_ext(self, request: Request) -> PendingResponse:
        topic = _topic(request)
        headers = _headers(request)
        if len(headers) > HEADERS_SIZE_MAX:
            raise HttpError(400, "E_BAD_EXT")
        return self._publish(request, "PUB_EXT", topic, HEADERS_SIZE.pack(len(headers)) + headers + request.body)

    def _publish(self, request: Request, command: str, topic: str, body: bytes) -> PendingResponse:
        if self._drain.is_on:
            raise HttpError(503, "DRAINING")
        try:
            slot = self._publish_message(PublishExtended(command, topic, [body], 1, partition_of(request)))
        except FlintError as error:
            raise publish_refusal(error) from None
        self._engine.schedule()
        assert isinstance(slot, StoredSlot), "one message is answered with where it is"
        events = slot.source.partition.events
        if events is not None:
            events.publisher(slot.source, request.remote_address)
        return _Answer(slot).pending


def _topic(request: Request) -> str:
    if not request.body:
        raise HttpError(406, "MSG_EMPTY")
    return topic_name_of(request, "INVALID_TOPIC")


def _headers(request: Request) -> bytes:
    """The headers of the message; those in ``ext`` as they came.

    Raises:
        HttpError: ``ext`` is missing, or not a JSON object.
    """
    ext = request.query.get("ext", "").encode()
    try:
        given = _decode(ext)
        more = {
            name.removeprefix(_HEADER_PREFIX).decode(): msgspec.Raw(
                msgspec.json.encode(value.decode("utf-8", "replace"))
            )
            for name, value in request.headers.items()
            if name.startswith(_HEADER_PREFIX)
        }
    except UNREADABLE_JSON:
        raise HttpError(400, "E_INVALID_JSON_HEADER") from None
    return msgspec.json.encode(more | given) if more else ext
