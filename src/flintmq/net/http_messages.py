"""Requests, responses and errors of the HTTP server, as handlers see them.

Rules of this file: a response is bytes as soon as it exists, so that a constant answer is built once; nothing from a
request goes into a header unquoted; query parameters are read as Go reads them (first value wins, ``;`` and bad escapes
are refused), and only when a handler asks, because the order of checks is part of NSQ's behaviour.
Source: NSQ's HTTP API.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote_plus

import msgspec

from flintmq.errors import FlintError

JSON_TYPE = ("Content-Type", "application/json; charset=utf-8")
TEXT_TYPE = ("Content-Type", "text/plain; charset=utf-8")
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
HTML_TYPE = ("Content-Type", "text/html; charset=utf-8")
NSQ_TYPE = ("X-NSQ-Content-Type", "nsq; version=1.0")

NO_PARAMETERS: Mapping[str, str] = MappingProxyType({})

_QUERY_CACHED_SIZE_MAX = 256
_QUERY_CACHE_COUNT = 1024
BAD_ESCAPE = re.compile("%(?![0-9a-fA-F]{2})")
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class HttpError(FlintError):
    """Answer this request with an error.

    Args:
        status: 400 to 599.
        message: the error's text; a JSON route sends ``{"message": ...}``, a plain-text route the bare text.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return f"{self.status} {self.message}"


class Response:
    """One answer. Immutable; the head is encoded at once, so keep constant answers and reuse them.

    Args:
        status: the status code.
        body: sent as it is; its length becomes ``Content-Length``.
        headers: beside ``Content-Length``, ``Date`` and ``Connection``, which the server adds.
    """

    __slots__ = ("body", "head", "status")

    def __init__(self, status: int = 200, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()) -> None:
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}"]
        for name, value in headers:
            assert "\r" not in value and "\n" not in value, f"line break in header {name}"
            lines.append(f"{name}: {value}")
        lines.append(f"Content-Length: {len(body)}\r\n")
        self.status = status
        self.body = body
        self.head = "\r\n".join(lines).encode("latin-1")

    def __repr__(self) -> str:
        return f"<Response {self.status} {self.body[:80]!r}>"


def http_date(unix_s: int) -> str:
    """Return a moment as it stands in a header: ``Sun, 06 Nov 1994 08:49:37 GMT`` (RFC 9110 5.6.7)."""
    at = time.gmtime(unix_s)
    day, month = _DAYS[at.tm_wday], _MONTHS[at.tm_mon - 1]
    return f"{day}, {at.tm_mday:02d} {month} {at.tm_year:04d} {at.tm_hour:02d}:{at.tm_min:02d}:{at.tm_sec:02d} GMT"


def json_response(value: Any, status: int = 200) -> Response:
    """Return a JSON answer of NSQ's API."""
    return Response(status, msgspec.json.encode(value), (JSON_TYPE, NSQ_TYPE))


def text_response(text: str, status: int = 200) -> Response:
    """Return a bare string answered by NSQ's API, such as the ``OK`` of ``/pub``."""
    return Response(status, text.encode("utf-8", "backslashreplace"), (TEXT_TYPE, NSQ_TYPE))


def plain_response(text: str, status: int = 200) -> Response:
    """Return the text of an endpoint outside the API (``/ping``, ``/debug/...``), without NSQ's header."""
    return Response(status, text.encode("utf-8", "backslashreplace"), (TEXT_TYPE,))


def error_response(status: int, message: str, plain: bool = False) -> Response:
    """Return the answer to a failed request: JSON ``{"message": ...}``, or the bare text for plain-text endpoints."""
    return plain_response(message, status) if plain else json_response({"message": message}, status)


def redirect_response(location: str, method: str) -> Response:
    """Return a permanent redirect: 301 for GET, 308 for others because their body must be sent again."""
    status = 301 if method == "GET" else 308
    if method not in ("GET", "HEAD"):
        return Response(status, b"", (("Location", location),))
    import html  # for the rare answer

    body = f'<a href="{html.escape(location)}">{_REASONS[status]}</a>.\n\n'.encode() if method == "GET" else b""
    return Response(status, body, (HTML_TYPE, ("Location", location)))


EMPTY = Response(headers=(NSQ_TYPE,))
"""Success without data."""


class PendingResponse:
    """The answer of a handler that becomes known later in the loop, without a coroutine and its task.

    A handler returns it and keeps it; whoever knows the answer calls :meth:`complete` or :meth:`fail`, exactly once, on
    the event loop. Until then the connection answers nothing else.
    """

    __slots__ = ("_deliver", "outcome")

    def __init__(self) -> None:
        self._deliver: Callable[[Response | BaseException], None] | None = None
        self.outcome: Response | BaseException | None = None

    def complete(self, response: Response) -> None:
        """Send the answer; without effect when the connection is gone."""
        self._settle(response)

    def fail(self, error: Exception) -> None:
        """Send an error: an :class:`HttpError` as it says, any other exception as 500 INTERNAL_ERROR."""
        self._settle(error)

    def attach(self, deliver: Callable[[Response | BaseException], None]) -> None:
        """For the server: where the outcome goes."""
        self._deliver = deliver

    def _settle(self, outcome: Response | BaseException) -> None:
        assert self.outcome is None, "answered twice"
        self.outcome = outcome
        if self._deliver is not None:
            self._deliver(outcome)


class StreamingResponse:
    """An answer whose body comes into being piece by piece, for as long as it takes; the connection ends with it.

    It is asked for pieces only while its reader takes them, so that nothing gathers for one that does not: such a one
    is closed after a while like any other.

    Args:
        next_piece: returns what is to be sent next, a part of what there is if that is much; ``b""``: nothing now, it
            says :meth:`wake` when there is; None: that was all. What it raises is logged and cuts the answer off.
        closed: called once, when nobody reads any more or all was sent.
        headers: as for :class:`Response`.
    """

    __slots__ = ("_wake", "closed", "head", "next_piece", "status")

    def __init__(
        self,
        next_piece: Callable[[], bytes | None],
        closed: Callable[[], None],
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        lines = [f"HTTP/1.1 200 {_REASONS[200]}", *(f"{name}: {value}" for name, value in headers)]
        self.head = "\r\n".join((*lines, "Transfer-Encoding: chunked\r\n")).encode("latin-1")
        self.status = 200
        self.next_piece = next_piece
        self.closed = closed
        self._wake: Callable[[], None] | None = None

    def wake(self) -> None:
        """Say that there is a next piece; on the event loop."""
        if self._wake is not None:
            self._wake()

    def attach(self, wake: Callable[[], None] | None) -> None:
        """For the server: whom to tell."""
        self._wake = wake


def _parse_query(raw: bytes) -> Mapping[str, str]:
    values: dict[str, str] = {}
    for field in raw.decode("utf-8", "replace").split("&"):
        if not field:
            continue
        if ";" in field or BAD_ESCAPE.search(field):
            raise HttpError(400, "INVALID_REQUEST")
        name, _, value = field.partition("=")
        values.setdefault(unquote_plus(name), unquote_plus(value))
    return MappingProxyType(values)


_parse_query_cached = lru_cache(_QUERY_CACHE_COUNT)(_parse_query)


def parse_query(raw: bytes) -> Mapping[str, str]:
    """Read a query string as Go's ``url.ParseQuery`` does; of several values of a name the first is kept.

    Raises:
        HttpError: 400 INVALID_REQUEST for a ``;`` or a bad %-escape.
    """
    # Publishers repeat one query for ever; long ones are not worth the cache's memory.
    return _parse_query_cached(raw) if len(raw) <= _QUERY_CACHED_SIZE_MAX else _parse_query(raw)


class Request:
    """One request with its whole body.

    Attributes:
        headers: names in lower case; the first value of a repeated name.
        body: empty until the handler is called.
        remote_address: ``ip:port`` of the peer, ``@`` for a unix socket.
        common_name: of the peer's certificate, verified or not, for the ``before`` of a server; empty without one.
        parameters: the values of ``{name}`` segments of the route.
        answer_headers: further lines of whatever is answered, each with its line break.
    """

    __slots__ = (
        "_path",
        "_query",
        "_values",
        "answer_headers",
        "body",
        "common_name",
        "headers",
        "keep_alive",
        "method_bytes",
        "parameters",
        "received_at_ns",
        "remote_address",
        "route",
    )

    def __init__(
        self,
        method: bytes,
        path: bytes,
        query: bytes,
        headers: dict[bytes, bytes],
        remote_address: str,
        route: Any = None,
        parameters: Mapping[str, str] = NO_PARAMETERS,
    ) -> None:
        self.method_bytes = method
        self._path = path
        self._query = query
        self._values: Mapping[str, str] | None = None
        self.headers = headers
        self.remote_address = remote_address
        self.route = route
        self.parameters = parameters
        self.body = b""
        self.common_name = ""
        self.answer_headers = b""
        self.keep_alive = True
        self.received_at_ns = 0

    @property
    def method(self) -> str:
        return self.method_bytes.decode("ascii")

    @property
    def path(self) -> str:
        """As sent, without the query; %-escapes are not decoded."""
        return self._path.decode("latin-1")

    @property
    def path_bytes(self) -> bytes:
        """The path as it arrived."""
        return self._path

    @property
    def target(self) -> str:
        """Path and query as sent, for logs."""
        target = self._path + b"?" + self._query if self._query else self._path
        return target.decode("utf-8", "surrogateescape")

    @property
    def query(self) -> Mapping[str, str]:
        """Parameters of the query string.

        Raises:
            HttpError: 400 INVALID_REQUEST when it cannot be read.
        """
        values = self._values
        if values is None:
            values = self._values = parse_query(self._query)
        return values

    @property
    def query_bytes(self) -> bytes:
        """The query string as it arrived."""
        return self._query

    @property
    def names(self) -> Iterable[str]:
        """Names of the parameters; none of a query that cannot be read, which is for the handler to say in its turn."""
        try:
            return self._values or self.query
        except HttpError:
            return ()

    def header(self, name: str) -> str:
        """Return the value of a header, empty when absent."""
        return self.headers.get(name.lower().encode("latin-1"), b"").decode("latin-1")

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.target} of {self.remote_address}>"
