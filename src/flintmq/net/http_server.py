"""One small HTTP/1.1 server for all daemons.

Rules of this file

- The path of a plain request is short: parser callbacks, one dictionary look-up, the handler, one write for all answers
  of one ``data_received``. No task unless the handler is a coroutine, no timer per request.
- Answers of a connection leave in the order of its requests; requests of one connection run one after the other.
- Everything a peer can make grow is bounded: request line, headers, body, chunk overhead, queue of pipelined requests,
  answers it does not read, time to send a request, idle time, connections. One piece that the parser was fed may exceed
  a bound, nothing after it: the parser cannot be stopped in the middle of a piece and resumed.
- Parsing and answering are timed: a connection that has used its slice reads nothing more, keeps what is left in
  ``_left``, and stands in line for its next turn (turns.py).
- Deadlines are counted in ticks of one timer of the server; a connection only notes the tick of its last step.

Source: NSQ's HTTP API; limits: net/http of Go where it has one, otherwise stated at the constant.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from flintmq.budget import COUNTED_BYTES, Budget, InputMeter, OutputMeter
from flintmq.clock import Clock, SystemClock
from flintmq.limits import WRITE_BUFFER_HIGH_BYTES
from flintmq.net.address import format_peer
from flintmq.net.descriptors import is_scarce
from flintmq.net.http_messages import (
    EMPTY,
    NO_PARAMETERS,
    HttpError,
    PendingResponse,
    Request,
    Response,
    StreamingResponse,
    error_response,
    http_date,
    json_response,
    plain_response,
    text_response,
)
from flintmq.net.http_router import NOT_FOUND_RESPONSE, Handler, Route, Router, always
from flintmq.net.isolation import for_each
from flintmq.net.layers import SecureTransport
from flintmq.net.linger import close_lingering
from flintmq.net.listen import Listener, listen
from flintmq.net.origin import Origins, is_loopback_address
from flintmq.net.tasks import tell
from flintmq.net.tls_engine import NewEngine
from flintmq.net.tls_or_plain import TlsOrPlain
from flintmq.net.turns import SLICE_NS, Turns

__all__ = [
    "EMPTY",
    "Handler",
    "HttpError",
    "HttpServer",
    "PendingResponse",
    "Request",
    "Response",
    "Router",
    "StreamingResponse",
    "error_response",
    "json_response",
    "plain_response",
    "text_response",
]

URL_SIZE_MAX = 8 * 1024
HEADER_SIZE_MAX = 8 * 1024
HEADER_COUNT_MAX = 100
HEAD_SIZE_MAX = 64 * 1024
CHUNK_OVERHEAD_FACTOR = 8  # "1\r\nx\r\n": a body sent in chunks of one byte costs six bytes per byte
CHUNK_SLACK_BYTES = 512 * 1024  # more than one data_received, whose earlier requests are counted too
QUEUE_COUNT_MAX = 16
QUEUE_BYTES_MAX = 1024 * 1024  # of bodies; one more request may exceed it
SMALL_READ_BYTES = 1024  # holds a few requests at most and is not timed
PIECE_BYTES = 4096  # fed to the parser before the time is looked at; a body's rest is one piece
CHUNKED_PIECE_BYTES = 16 * 1024
OUT_FLUSH_BYTES = 64 * 1024
CONNECTIONS_MAX = 10_000
REQUEST_DEADLINE_S = 60.0
IDLE_DEADLINE_S = 300.0
WRITE_DEADLINE_S = 30.0
CLOSE_DEADLINE_S = 5.0
TICK_S = 1.0

assert HEADER_SIZE_MAX < HEAD_SIZE_MAX

_INTERNAL_ERROR = error_response(500, "INTERNAL_ERROR")
_PLAIN_INTERNAL_ERROR = error_response(500, "INTERNAL_ERROR", plain=True)
_BAD_REQUEST = plain_response("400 Bad Request", 400)
_NO_HOST = plain_response("400 Bad Request: missing required Host header", 400)
_URL_TOO_LONG = plain_response(f"414 URI Too Long: more than {URL_SIZE_MAX} bytes", 414)
_HEADER_TOO_LONG = plain_response(
    f"431 Request Header Fields Too Large: a line of more than {HEADER_SIZE_MAX} bytes", 431
)
_TOO_MANY_HEADERS = plain_response(f"431 Request Header Fields Too Large: more than {HEADER_COUNT_MAX} headers", 431)
_HEAD_TOO_LONG = plain_response(f"431 Request Header Fields Too Large: more than {HEAD_SIZE_MAX} bytes", 431)
_TIMED_OUT = plain_response("408 Request Timeout", 408)
_BAD_EXPECTATION = plain_response("417 Expectation Failed", 417)
_BAD_TRANSFER_ENCODING = error_response(501, "UNSUPPORTED_TRANSFER_ENCODING: only chunked is understood")
_KEPT_SHARE = 0.5  # whoever looks after a daemon that is full of clients gets in
_TOO_MANY_CONNECTIONS = error_response(503, "TOO_MANY_CONNECTIONS")
_NO_STREAMS = error_response(505, "HTTP_VERSION_NOT_SUPPORTED: this answer comes in chunks, which HTTP/1.1 has")
_PREFLIGHT = Response()
_LAST_CHUNK = b"0\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_HOP_HEADERS = (b"connection", b"upgrade", b"http2-settings")

_log = logging.getLogger(__name__)

Before = Callable[[Request], Response | None]


class _Refused(Exception):
    """Stops the parser; the connection has noted what to answer."""


class HttpServer:
    """Listens, owns the connections and their deadlines.

    Args:
        router: the complete routes.
        clock: for the ``Date`` header and the times in the log.
        before: sees every request before its body is read, known path or not; a response it returns is the answer.
        origins: which pages of the web may ask; by default only those that this server itself answers with.
        budget: unwritten answers count in it, and what has come of bodies that are not complete.
        connections_max: further connections are answered 503 and closed.
        request_deadline_s: from the first byte of a request to its last.
        idle_deadline_s: between two requests of a connection.
    """

    def __init__(
        self,
        router: Router,
        *,
        clock: Clock | None = None,
        before: Before | None = None,
        origins: Origins | None = None,
        budget: Budget | None = None,
        connections_max: int = CONNECTIONS_MAX,
        request_deadline_s: float = REQUEST_DEADLINE_S,
        idle_deadline_s: float = IDLE_DEADLINE_S,
    ) -> None:
        self.router = router
        self.before = before
        self.origins = Origins() if origins is None else origins
        self.budget = budget if budget is not None else Budget()
        self.connections_max = connections_max
        self.request_ticks = math.ceil(request_deadline_s / TICK_S)
        self.idle_ticks = math.ceil(idle_deadline_s / TICK_S)
        self.write_ticks = math.ceil(WRITE_DEADLINE_S / TICK_S)
        self.tick = 0
        self.is_closing = False
        self.connections: dict[_Connection, None] = {}
        self.tail = self.tail_keep_alive = self.tail_close = b""
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.turns: Turns | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._listeners: list[Listener] = []
        self._timer: asyncio.TimerHandle | None = None
        self._all_gone: asyncio.Future[None] | None = None
        self._refresh_date()

    async def start(self, address: str, new_tls: NewEngine | None = None) -> Listener:
        """Listen on ``host:port`` or on the path of a unix socket.

        Args:
            new_tls: for HTTPS: makes the server's side of TLS for each connection. Who asks there in clear is told so.

        Raises:
            ListenFailed: it cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        listener = await listen(lambda: self._accept(loop, new_tls), address)
        self._listeners.append(listener)
        if self._timer is None:
            self._timer = loop.call_later(TICK_S, self._tick_again, loop)
        return listener

    async def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Stop accepting, let what is being answered end, then close every connection.

        Args:
            deadline_s: how long running handlers and unread answers are waited for; then they are cut off.
        """
        self.is_closing = True
        for listener in self._listeners:
            listener.close()
        for_each(self.connections, _Connection.close_if_idle, "closing")
        for_each(self.connections, _Connection.end_stream, "ending the answer of")
        if self.connections or self._tasks:
            self._all_gone = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._all_gone,), timeout=deadline_s)
        for task in list(self._tasks):
            task.cancel()
        for_each(self.connections, _Connection.abort, "aborting")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def describe(self) -> str:
        """Return one line per connection, for ``/debug`` and failing tests."""
        lines = [f"HttpServer tick={self.tick} connections={len(self.connections)} tasks={len(self._tasks)}"]
        lines.extend("  " + connection.describe() for connection in self.connections)
        return "\n".join(lines)

    # --- for connections, and for whoever drives one without a socket

    def new_connection(self, loop: asyncio.AbstractEventLoop) -> asyncio.Protocol:
        """Return the protocol for a connection just accepted."""
        if self.turns is None:
            self.turns = Turns(loop, self.clock.monotonic_ns)
        return _Connection(self, self.turns, loop)

    def on_tick(self) -> None:
        """Check all deadlines; called every ``TICK_S`` seconds."""
        self.tick += 1
        self._refresh_date()
        for_each(self.connections, _Connection.check_deadlines, "checking the deadlines of")

    def spawn(self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
        """Run a coroutine handler; the task is held here so that it is neither lost nor left behind."""
        task = loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._forget_task)
        task.add_done_callback(tell("answering an HTTP request"))
        return task

    def forget(self, connection: _Connection) -> None:
        """Forget a connection that is gone."""
        self.connections.pop(connection, None)
        self._notice_all_gone()

    # --- inside

    def _accept(self, loop: asyncio.AbstractEventLoop, new_tls: NewEngine | None) -> asyncio.Protocol:
        connection = self.new_connection(loop)
        return connection if new_tls is None else TlsOrPlain(connection, new_tls(), loop)

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._notice_all_gone()

    def _notice_all_gone(self) -> None:
        if not self.connections and not self._tasks and self._all_gone is not None and not self._all_gone.done():
            self._all_gone.set_result(None)

    def _tick_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(TICK_S, self._tick_again, loop)
        self.on_tick()

    def _refresh_date(self) -> None:
        date = b"Date: " + http_date(self.clock.wall_ns() // 1_000_000_000).encode() + b"\r\n"
        self.tail = date + b"\r\n"
        self.tail_keep_alive = date + b"Connection: keep-alive\r\n\r\n"
        self.tail_close = date + b"Connection: close\r\n\r\n"


class _Connection(asyncio.Protocol):
    """One HTTP connection: parses requests, runs their handlers in order, writes the answers.

    ``_request`` is being received, ``_queue`` was received and waits, ``_running`` has a handler that is not done,
    ``_left`` has not been parsed. ``_stream`` is the answer to ``_running`` while its pieces come.
    """

    def __init__(self, server: HttpServer, turns: Turns, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._turns = turns
        self._loop = loop
        self._now_ns = server.clock.monotonic_ns
        self._exact = server.router.exact
        self._transport: asyncio.Transport | None = None
        self.peer = "@"
        self.meter = OutputMeter(server.budget, self)
        self.input_meter = InputMeter(server.budget, self)
        self.has_published = False
        self._common_name = ""
        self._is_at_loopback = False
        self._known_host = b""  # of the last request that was not refused
        self._parser: Any = HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_count = 0
        self._head_bytes = 0
        self._request: Request | None = None
        self._body: bytes | bytearray = b""
        self._is_chunked = False
        self._chunked_bytes_left = 0
        self._is_receiving = True  # a fresh connection owes us a request
        self._is_upgrading = False
        self._expects_continue = False
        self._refusal: Response | None = None
        self._is_input_done = False
        self._body_bytes = -1  # of the request that is received; -1: not known before its end
        self._left = b""
        self._slice_left_ns = SLICE_NS
        self._is_waiting = False  # for its next turn
        self._queue: deque[Request] = deque()
        self._queue_bytes = 0
        self._running: Request | None = None
        self._for_client: asyncio.Task[None] | None = None  # runs as long as somebody waits for its answer
        self._stream: StreamingResponse | None = None
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._is_closing = False
        self._is_read_paused = False
        self._is_write_paused = False
        self._since_tick = server.tick
        self._stalled_tick = 0
        self._linger: asyncio.TimerHandle | None = None

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.peer = format_peer(transport.get_extra_info("peername"))
        self._is_at_loopback = is_loopback_address(transport.get_extra_info("sockname"))
        if isinstance(transport, SecureTransport) and transport.tls is not None:
            self._common_name = transport.tls.session().common_name
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_HIGH_BYTES)
        server = self._server
        is_full = len(server.connections) >= server.connections_max or is_scarce(transport, _KEPT_SHARE)
        server.connections[self] = None
        if is_full:
            self._refuse_now(_TOO_MANY_CONNECTIONS)
        elif server.is_closing:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_input_done:
            return
        if self._left or self._is_waiting:
            self._left += data
            return
        if len(data) <= SMALL_READ_BYTES:
            self._feed(data)
            self._flush()
            if self._body or self.input_meter.held_bytes:
                self._count_input()
            return
        began_ns = self._now_ns()
        self._left = data
        self._feed_left(began_ns)
        self._flush()
        self._count_time(began_ns)
        self._count_input()

    def _count_input(self) -> None:
        """Count what has come of requests that are not complete, or wait for those before them."""
        held_bytes, meter = len(self._body) + len(self._left) + self._queue_bytes, self.input_meter
        if held_bytes >= COUNTED_BYTES or meter.held_bytes:
            meter.hold(held_bytes)

    @property
    def is_awaited(self) -> bool:
        """Whether nothing but bytes of the peer is missing for it to go on."""
        return not (self._left or self._queue or self._is_waiting or self._is_write_paused) and self._running is None

    def pause_input(self) -> None:
        """Read no more until there is memory for what is coming."""
        self._update_reading()

    def resume_input(self) -> None:
        """Read again: there is memory for what is coming."""
        self._since_tick = self._server.tick
        self._update_reading()

    def refuse_input(self, reason: str) -> None:
        """Forget what is not complete, say why, and close."""
        self.input_meter.close()
        if not self._is_input_done:
            self._left = b""
            self._refuse_now(error_response(503, f"TOO_MUCH_WAITING: {reason}"))

    def _feed_left(self, began_ns: int) -> None:
        """Parse what was received until the slice is over, or something has to be answered first."""
        data, self._left = self._left, b""
        position = 0
        while position < len(data) and not self._is_input_done:
            if position and (self._is_crowded() or self._now_ns() - began_ns >= self._slice_left_ns):
                self._left = data[position:]
                return
            end = position + self._piece_bytes()
            self._feed(data[position:end])
            position = end

    def _piece_bytes(self) -> int:
        if self._request is None:
            return PIECE_BYTES
        if self._is_chunked:
            return CHUNKED_PIECE_BYTES
        return max(PIECE_BYTES, self._body_bytes - len(self._body))

    def _is_crowded(self) -> bool:
        """Whether something has to be answered, or read by the peer, before more is parsed."""
        queue = self._queue
        return self._is_write_paused or len(queue) > QUEUE_COUNT_MAX or self._queue_bytes > QUEUE_BYTES_MAX

    def _count_time(self, began_ns: int) -> None:
        """Stand in line for the next turn when this one's slice is over."""
        self._slice_left_ns -= self._now_ns() - began_ns
        if self._transport is None or self._is_waiting:
            return
        is_parsing_left = bool(self._left) and self._running is None and not self._is_crowded()
        if self._slice_left_ns <= 0 or is_parsing_left:
            self._is_waiting = True
            self._turns.later(self)
        if self._left or self._is_waiting:
            self._update_reading()

    def go_on(self) -> None:
        """Have the next turn."""
        self._is_waiting = False
        self._slice_left_ns = SLICE_NS
        if self._stream is not None:
            self._send_pieces()
        if self._transport is not None:
            self._advance()
            self._flush()
            self._count_input()

    def _feed(self, data: bytes) -> None:
        self._head_bytes += len(data)
        try:
            try:
                self._parser.feed_data(data)
            except HttpParserUpgrade as upgrade:
                self._feed_upgrades(data[upgrade.args[0] :])
        except HttpParserError as error:
            self._parsing_stopped(error)
        else:
            self._check_bounds(len(data))

    def eof_received(self) -> bool:
        self._is_input_done = True
        if self._running is None and not self._queue:
            return False
        if self._stream is not None:
            return False  # whoever reads an answer that need not end says so by leaving
        return self._transport is not None  # half-closed after its requests: answer them, then close

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._stalled_tick = self._server.tick
        self._update_reading()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        if self._stream is not None:
            self._send_pieces()
        self._advance()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._linger is not None:
            self._linger.cancel()
        self._is_input_done = True
        self._is_closing = True
        self._transport = None
        self._parser = None  # it holds our bound methods: a cycle
        self._left = b""
        if self._for_client is not None:
            self._for_client.cancel()
        self.meter.close()
        self.input_meter.close()
        self._turns.leave(self)
        self._queue.clear()
        self._out.clear()
        self._leave_stream()
        self._server.forget(self)

    # --- parser callbacks

    def on_url(self, url: bytes) -> None:
        if not self._is_receiving:
            self._is_receiving = True
            self._since_tick = self._server.tick
        self._url = self._url + url if self._url else url
        if len(self._url) > URL_SIZE_MAX:
            self._refuse(_URL_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        if self._header_count > HEADER_COUNT_MAX:
            self._refuse(_TOO_MANY_HEADERS)
        if len(name) + len(value) > HEADER_SIZE_MAX:
            self._refuse(_HEADER_TOO_LONG)
        if self._request is None:  # else: the trailer of a chunked body, which nobody asked for
            name = name.lower()
            if name not in self._headers:
                self._headers[name] = value
            elif name == b"transfer-encoding":
                self._headers[name] += b"," + value

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        method = self._parser.get_method()
        headers = self._headers
        path, _, query = self._url.partition(b"?")
        route = self._exact.get((method, path))
        parameters = NO_PARAMETERS
        if route is None:
            if not path.startswith(b"/"):
                path = _path_of_absolute(path)
            route, parameters = self._server.router.resolve_slowly(method.decode(), path, query)
        request = Request(method, path, query, headers, self.peer, route, parameters)
        self._request = request
        if (b"upgrade" in headers or method == b"CONNECT") and self._decline_upgrade(method):
            return
        tells_origin = b"origin" in headers or b"sec-fetch-site" in headers
        tells_origin = tells_origin or (self._is_at_loopback and headers.get(b"host") != self._known_host)
        if not (tells_origin and self._ask_origins(request)) and self._server.before is not None:
            self._ask_before(request, self._server.before)
        length = headers.get(b"content-length")
        if length is not None:
            self._body_bytes = int(length)
            if self._body_bytes > request.route.body_limit_bytes:
                self._refuse(request.route.too_big)
        elif b"transfer-encoding" in headers:
            if headers[b"transfer-encoding"].lower() != b"chunked":
                self._refuse(_BAD_TRANSFER_ENCODING)
            self._is_chunked = True
            self._chunked_bytes_left = CHUNK_OVERHEAD_FACTOR * request.route.body_limit_bytes + CHUNK_SLACK_BYTES
        if b"host" not in headers and self._parser.get_http_version() != "1.0":  # HTTP/0.9 is refused as well
            self._refuse(_NO_HOST)
        if b"expect" in headers:
            self._expect(headers[b"expect"])

    def on_body(self, piece: bytes) -> None:
        body = self._body
        if not body:
            self._body = piece  # nearly always the whole body: no copy
        elif isinstance(body, bytearray):
            body += piece
        else:
            self._body = bytearray(body) + piece
        if self._is_chunked:
            route: Route = cast(Request, self._request).route
            if len(self._body) > route.body_limit_bytes:
                self._refuse(route.too_big)

    def on_message_complete(self) -> None:
        if self._is_upgrading:
            return
        request = cast(Request, self._request)
        body = self._body
        request.body = body if type(body) is bytes else bytes(body)
        request.keep_alive = self._parser.should_keep_alive()
        self._forget_request()
        self._is_receiving = False
        self._since_tick = self._server.tick
        self.has_published = self.has_published or bool(body)
        if self._is_closing:
            return
        if self._running is None and not self._queue and not self._is_write_paused:
            self._handle(request)
        else:
            self._queue.append(request)
            self._queue_bytes += len(request.body)

    # --- receiving

    def _forget_request(self) -> None:
        self._request = None
        self._url = b""
        self._headers = {}
        self._header_count = 0
        self._head_bytes = 0
        self._body = b""
        self._body_bytes = -1
        self._is_chunked = False
        self._expects_continue = False

    def _ask_origins(self, request: Request) -> bool:
        """Whether a request of a browser is answered already, for where it comes from."""
        headers = request.headers
        verdict = self._server.origins.judge(request.method_bytes, request.path_bytes, headers, self._is_at_loopback)
        if verdict.refusal:
            _log.info("HTTP %s: %s %s: %s", self.peer, request.method, request.path, verdict.refusal)
            refusal = error_response(403, verdict.refusal, request.route.plain)
            request.route = always(refusal, too_big=refusal)
            return True
        self._known_host = headers.get(b"host", b"")
        request.answer_headers = verdict.headers
        if verdict.is_preflight:
            request.route = always(_PREFLIGHT)
        return verdict.is_preflight

    def _ask_before(self, request: Request, before: Before) -> None:
        request.common_name = self._common_name
        try:
            response = before(request)
        except Exception as error:  # noqa: BLE001 - _response_to logs it
            response = self._response_to(request, error)
        if response is not None:
            request.route = always(response, too_big=response)

    def _expect(self, expectation: bytes) -> None:
        if expectation.lower() != b"100-continue":
            self._refuse(_BAD_EXPECTATION)
        self._expects_continue = True
        self._continue_if_idle()

    def _continue_if_idle(self) -> None:
        """Invite the body, but not before the answers to earlier requests."""
        if self._expects_continue and self._running is None and not self._queue and not self._is_closing:
            self._expects_continue = False
            self._out.append(_CONTINUE)

    def _decline_upgrade(self, method: bytes) -> bool:
        """Whether the parser now takes what follows the head for another protocol's bytes."""
        if method == b"CONNECT":
            self._refuse(NOT_FOUND_RESPONSE)
        # Java's HTTP client offers h2c with every request; the offer is declined by answering in HTTP/1.1.
        self._is_upgrading = self._parser.should_upgrade()
        return self._is_upgrading

    def _feed_upgrades(self, rest: bytes) -> None:
        """Go on after a declined upgrade: a fresh parser gets the head without the offer, then what follows it."""
        while True:
            request = cast(Request, self._request)
            head = [b"%b %b HTTP/1.1" % (self._parser.get_method(), self._url)]
            head.extend(b"%b: %b" % item for item in request.headers.items() if item[0] not in _HOP_HEADERS)
            if b"close" in request.headers.get(b"connection", b"").lower():
                head.append(b"connection: close")
            self._forget_request()
            self._is_upgrading = False
            self._parser = HttpRequestParser(self)
            try:
                self._parser.feed_data(b"\r\n".join(head) + b"\r\n\r\n" + rest)
                return
            except HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] - len(b"\r\n".join(head)) - 4 :]

    def _check_bounds(self, size_bytes: int) -> None:
        if self._request is None:
            if self._head_bytes > HEAD_SIZE_MAX:
                self._refuse_now(_HEAD_TOO_LONG)
        elif self._is_chunked:
            self._chunked_bytes_left -= size_bytes
            if self._chunked_bytes_left < 0:
                self._refuse_now(self._request.route.too_big)
        if self._queue:
            self._update_reading()

    # --- refusing

    def _refuse(self, response: Response) -> None:
        """Stop parsing, inside a callback of the parser; answer in turn, close."""
        self._refusal = response
        raise _Refused

    def _parsing_stopped(self, error: HttpParserError) -> None:
        if self._is_input_done or self._is_closing:
            return  # bytes after a request that asked to close
        response = self._refusal
        if response is None and isinstance(error, HttpParserCallbackError):
            _log.error("HTTP %s: internal error while parsing", self.peer, exc_info=error)
            response = _INTERNAL_ERROR
        if response is None:
            _log.debug("HTTP %s: %s", self.peer, error)
            response = _BAD_REQUEST
        self._refuse_now(response)

    def _refuse_now(self, response: Response) -> None:
        """Read no more; answer ``response`` after what came before, then close."""
        self._is_input_done = True
        self._refusal = response
        request = self._request or Request(b"-", self._url or b"-", b"", {}, self.peer)
        is_logged = self._request is not None
        request.route = always(response, is_logged=is_logged)
        request.keep_alive = False
        self._forget_request()
        if self._running is None and not self._queue and not self._is_write_paused:
            self._handle(request)
            self._flush()
        else:
            self._queue.append(request)

    # --- answering

    def _handle(self, request: Request) -> None:
        route: Route = request.route
        if route.is_logged:
            request.received_at_ns = self._server.clock.monotonic_ns()
        try:
            result: object = route.handler(request)
        except Exception as error:  # noqa: BLE001 - _response_to logs it
            self._respond(request, self._response_to(request, error))
            return
        if type(result) is Response:
            self._respond(request, result)
        elif isinstance(result, PendingResponse) and result.outcome is not None:
            self._respond(request, self._response_to(request, result.outcome))
        elif isinstance(result, PendingResponse):
            self._running = request
            result.attach(self._settle)
        elif isinstance(result, StreamingResponse):
            self._begin_stream(request, result)
        elif inspect.iscoroutine(result):
            self._running = request
            task = self._server.spawn(self._wait(result), self._loop)
            self._for_client = task if route.ends_with_client else None
        else:
            self._respond(request, self._response_to(request, result))

    async def _wait(self, answer: Coroutine[Any, Any, Response]) -> None:
        try:
            outcome: object = await answer
        except Exception as error:  # noqa: BLE001 - _response_to logs it
            outcome = error
        self._settle(outcome)

    def _settle(self, outcome: object) -> None:
        """Answer with what the handler that ran came to."""
        request = cast(Request, self._running)
        self._running = self._for_client = None
        if isinstance(outcome, StreamingResponse):
            self._since_tick = self._server.tick
            self._begin_stream(request, outcome)
            self._flush()
            return
        response = self._response_to(request, outcome)
        self._since_tick = self._server.tick
        if self._transport is not None:
            self._respond(request, response)
            if self._queue or self._left or self._is_input_done or self._expects_continue or self._is_read_paused:
                self._advance()
            self._flush()
            if self.input_meter.held_bytes:
                self._count_input()

    def _begin_stream(self, request: Request, stream: StreamingResponse) -> None:
        """Answer piece by piece; nothing else is answered meanwhile."""
        if self._transport is None or self._server.is_closing:
            self._close_stream(stream)
            self._is_closing = True
        elif self._parser.get_http_version() == "1.0":
            self._close_stream(stream)
            request.keep_alive = False
            self._respond(request, _NO_STREAMS)
        else:
            self._running, self._stream = request, stream
            self._out.append(stream.head + request.answer_headers + self._server.tail_close)
            if request.route.is_logged:
                args = (stream.status, request.method, request.target, request.remote_address)
                _log.info("%d %s %s (%s) begun", *args)
            stream.attach(self._send_pieces)
            self._send_pieces()

    def _send_pieces(self) -> None:
        """Send what there is of a stream: as much as its reader takes, and as a turn allows."""
        stream = self._stream
        if stream is None or self._is_waiting:
            return
        began_ns = self._now_ns()
        while not self._is_write_paused and self._stream is stream:
            try:
                piece = stream.next_piece()
            except Exception as error:  # noqa: BLE001 - it is logged, and concerns this answer alone
                _log.error("HTTP %s: an answer is cut off", self.peer, exc_info=error)
                self.abort()
                return
            if piece is None:
                self.end_stream()
                return
            if not piece:
                break
            self._out.append(b"%x\r\n%b\r\n" % (len(piece), piece))
            self._flush()
            if self._now_ns() - began_ns >= self._slice_left_ns:
                break
        self._count_time(began_ns)
        self._flush()

    def end_stream(self) -> None:
        """End an answer that comes in pieces, and the connection; nothing when there is none."""
        if self._stream is not None and self._transport is not None:
            self._out.append(_LAST_CHUNK)
            self._running = None
            self._is_closing = True
            self._leave_stream()
            self._flush()

    def _leave_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._close_stream(stream)

    def _close_stream(self, stream: StreamingResponse) -> None:
        stream.attach(None)
        try:
            stream.closed()
        except Exception as error:  # noqa: BLE001 - it is logged; the connection has to go in any case
            _log.error("HTTP %s: leaving an answer failed", self.peer, exc_info=error)

    def _response_to(self, request: Request, outcome: object) -> Response:
        """Return the answer to what a handler returned or raised."""
        plain = request.route.plain
        if isinstance(outcome, Response):
            return outcome
        if isinstance(outcome, HttpError):
            return error_response(outcome.status, outcome.message, plain)
        if isinstance(outcome, BaseException):
            _log.error("HTTP handler of %s %s failed", request.method, request.target, exc_info=outcome)
        else:
            _log.error("HTTP handler of %s %s returned %r", request.method, request.target, outcome)
        return _PLAIN_INTERNAL_ERROR if plain else _INTERNAL_ERROR

    def _respond(self, request: Request, response: Response) -> None:
        server = self._server
        is_last = not request.keep_alive or server.is_closing
        if is_last:
            tail = server.tail_close
            self._is_closing = True
        elif b"connection" in request.headers:
            tail = server.tail_keep_alive  # HTTP/1.0 clients must be told
        else:
            tail = server.tail
        if request.answer_headers:
            tail = request.answer_headers + tail
        answer = response.head + tail + response.body
        if request.method_bytes == b"HEAD":
            answer = response.head + tail
        self._out.append(answer)
        self._out_bytes += len(answer)
        if request.route.is_logged and _log.isEnabledFor(logging.INFO):
            elapsed_ms = (server.clock.monotonic_ns() - request.received_at_ns) / 1e6
            args = (response.status, request.method, request.target, request.remote_address, elapsed_ms)
            _log.info("%d %s %s (%s) %.3fms", *args)
        if self._out_bytes > OUT_FLUSH_BYTES:
            self._flush()

    def _advance(self) -> None:
        """Run what was received while a handler ran or the peer did not read."""
        began_ns = self._now_ns()
        while not self._is_waiting and self._running is None and not self._is_write_paused and not self._is_closing:
            if self._queue:
                request = self._queue.popleft()
                self._queue_bytes -= len(request.body)
                self._handle(request)
            elif self._left:
                self._feed_left(began_ns)
            else:
                break
            if self._now_ns() - began_ns >= self._slice_left_ns:
                break
        if self._is_input_done and self._running is None and not self._queue:
            self._is_closing = True
        self._count_time(began_ns)
        self._continue_if_idle()
        self._update_reading()

    def _flush(self) -> None:
        transport = self._transport
        if transport is None:
            return
        out = self._out
        if out:
            data = out[0] if len(out) == 1 else b"".join(out)
            self._out = []
            self._out_bytes = 0
            transport.write(data)
            if len(data) >= COUNTED_BYTES or self.meter.held_bytes:
                self.meter.wrote(len(data), transport.get_write_buffer_size())
        if self._is_closing and self._linger is None and not transport.is_closing():
            self._is_input_done = True
            if self._refusal is not None:
                self._linger = close_lingering(transport, self._loop)
            else:
                transport.close()

    def _update_reading(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        wants_pause = self._is_crowded() or self._is_waiting or bool(self._left) or self.input_meter.is_paused
        if wants_pause and not self._is_read_paused:
            self._is_read_paused = True
            transport.pause_reading()
        elif self._is_read_paused and not wants_pause:
            self._is_read_paused = False
            transport.resume_reading()

    # --- for the server

    def check_deadlines(self) -> None:
        """Close what has waited too long; called once per tick."""
        server = self._server
        if self._transport is None:
            return
        waited_ticks = server.tick - self._since_tick
        if self._is_write_paused or self._transport.is_closing():
            if server.tick - max(self._stalled_tick, self._since_tick) > server.write_ticks:
                _log.info("HTTP %s: does not read its answers, closing", self.peer)
                self._transport.abort()
        elif self._running is not None or self._queue or self._is_closing or self._left:
            return  # handlers have their own deadlines, a lingering close has its timer, what is left has its turn
        elif self.input_meter.is_paused:
            return  # it is we who do not read
        elif self._is_receiving and self._url:
            if waited_ticks > server.request_ticks:
                self._refuse_now(_TIMED_OUT)
        elif waited_ticks > (server.request_ticks if self._is_receiving else server.idle_ticks):
            self._since_tick = server.tick
            self._transport.close()

    def close_if_idle(self) -> None:
        """Close at shutdown, unless a request is being received or answered."""
        is_idle = self._running is None and not self._queue and not self._url and not self._left
        if is_idle and self._transport is not None:
            self._transport.close()

    def look_at_output(self, now_s: float) -> None:
        """Count again what the peer has not read."""
        if self._transport is not None:
            self.meter.look(self._transport.get_write_buffer_size(), now_s)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def __repr__(self) -> str:
        return f"<HTTP {self.peer}>"

    def describe(self) -> str:
        running = f" running={self._running!r}" if self._running is not None else ""
        flags = [
            name
            for name, is_set in (
                ("receiving", self._is_receiving),
                ("input-done", self._is_input_done),
                ("write-paused", self._is_write_paused),
                ("closing", self._is_closing),
            )
            if is_set
        ]
        return f"{self.peer} queue={len(self._queue)} since={self._since_tick}{running} {' '.join(flags)}"


def _path_of_absolute(url: bytes) -> bytes:
    """Return the path of ``http://host/path``; other forms (``*``, an authority) as they are."""
    _, scheme_end, rest = url.partition(b"://")
    if not scheme_end:
        return url
    _, slash, path = rest.partition(b"/")
    return slash + path or b"/"
