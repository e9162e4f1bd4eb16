"""One HTTP/1.1 request and its answer: the bytes of the one, and what the bytes of the other mean. Pure.

Two shells carry it out: :mod:`flintmq.net.http_client` on asyncio, :mod:`flintmq.net.http_blocking` on a blocking
socket. Whoever asks something over HTTP in this program goes through one of them.

Rules of this file:

- Everything has a bound: the body, what surrounds it, and (in the shells) the time from the call to the last byte.
- Redirects are not followed, proxies of the environment are not used, nothing is compressed, no cookie is kept: an
  answer comes from whom it was asked of, or there is none.
- No error shows what was in the request: a URL, a header and a body may hold a secret.
- What a peer or a user put into an address or a header can start no second request: characters that HTTP does not
  allow are refused.

Source: RFC 9112 (framing), RFC 9110 (fields); docs/auth.md (bounds, no redirects).
"""

from __future__ import annotations

import base64
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from flintmq.addresses import format_address
from flintmq.errors import UNREADABLE_JSON, ConnectionFailed
from flintmq.net.tls_engine import reason_of
from flintmq.version import __version__

ANSWER_BYTES_MAX = 1024 * 1024
"""Size of a body, unless the caller says otherwise."""

OVERHEAD_BYTES_MAX = 64 * 1024
"""Size of all that is not body: status line, fields, trailers."""

_NSQ = "it is of NSQ's TCP protocol: name the HTTP port, 4161 of nsqlookupd or 4151 of nsqd where nothing else is set"
_FRAMING_RATIO_MAX = 5  # a chunk of one byte has five around it
_FINAL_MIN = 200  # of a status; behind 1xx another answer comes
_PORTS = {"http": 80, "https": 443}
_TARGET = re.compile(r"/[!-~]*")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HOST = re.compile(r"[!-~]+")
_VALUE = re.compile(r"[\t -~\x80-\xff]*")
_NOT_IN_HOST = frozenset('/?#@\\<>"^`{|}')
_LEFT_IN_URLS = "!#$%&'()*+,-./:;=?@[]_~"


class NoAnswer(ConnectionFailed):
    """A request got no answer that can be used.

    Args:
        address: who was asked: ``host:port``, or the path of a unix socket.
        reason: why; shows nothing that was in the request.
        error: what the operating system said, if no connection could be made.
        tls_name: whose certificate was expected, if TLS is the reason: what it has against the server, or the server
            against us.
        status: of the answer that came and is not whole, 200 or more, for who asks for no more than that; 0: none
            was received.
    """

    def __init__(
        self,
        address: str,
        reason: str,
        error: OSError | None = None,
        tls_name: str | None = None,
        status: int = 0,
    ) -> None:
        super().__init__(address, reason)
        self.error = error
        self.tls_name = tls_name
        self.status = status


def no_connection(endpoint: Endpoint, error: OSError, status: int = 0) -> NoAnswer:
    """Return the failure that an error of the operating system or of TLS means for a connection.

    Args:
        status: of the answer that had begun to come; 0: none.
    """
    if isinstance(error, ssl.SSLError):
        return NoAnswer(endpoint.address, reason_of(error), tls_name=endpoint.server_name, status=status)
    number = error.errno or 0  # resolvers have negative ones, and words
    reason = os.strerror(number) if number > 0 else error.strerror or str(error)
    return NoAnswer(endpoint.address, reason, error, status=status)


class Endpoint(NamedTuple):
    """The address of a server.

    Attributes:
        scheme: ``http`` or ``https``.
        host: name or IP address, without brackets.
        unix_path: path of the unix socket to connect to in place of host and port; empty: none.
        tls_name: name that the certificate has to be for; empty: the host.
    """

    scheme: str
    host: str
    port: int
    unix_path: str = ""
    tls_name: str = ""

    @property
    def address(self) -> str:
        """The same for people, ``host:port`` or a path."""
        return self.unix_path or format_address(self.host, self.port)

    @property
    def is_secured(self) -> bool:
        """Whether TLS is spoken there."""
        return self.scheme == "https"

    @property
    def server_name(self) -> str:
        """The name that is expected in the certificate."""
        return self.tls_name or self.host


@dataclass(frozen=True, slots=True)
class Request:
    """A request to send.

    Attributes:
        method: ``GET``, ``POST``, ``PUT`` or ``DELETE``.
        target: path and query, quoted already.
        headers: beside ``Host``, ``Content-Length`` and ``Connection``; they take the place of the usual ``Accept``
            and ``User-Agent``.
    """

    method: str
    endpoint: Endpoint
    target: str = field(default="/", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes = field(default=b"", repr=False)

    @classmethod
    def to(cls, method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Request:
        """Return the request for ``http(s)://host:port/path?query``; user and password in it are shown as ``Basic``.

        Raises:
            NoAnswer: it is no such URL.
        """
        endpoint, target, authorization = _read_url(url)
        fields = dict(headers or {})
        if authorization and not any(name.lower() == "authorization" for name in fields):
            fields["Authorization"] = authorization
        return cls(method, endpoint, target, fields, body)

    def encode(self, keeps_connection: bool = False) -> bytes:
        """Return the bytes on the wire.

        Raises:
            NoAnswer: something in it is not allowed in HTTP.
        """
        headers = {"Accept": "*/*", "User-Agent": f"flintmq/{__version__}", "Accept-Encoding": "identity"}
        headers.update(self.headers)
        if self.method != "GET" or self.body:
            headers["Content-Length"] = str(len(self.body))
        if not keeps_connection:
            headers["Connection"] = "close"
        lines = [f"{self.method} {self.target} HTTP/1.1\r\nHost: {self._authority()}\r\n"]
        if not _TOKEN.fullmatch(self.method) or not _TARGET.fullmatch(self.target):
            raise self._unusable("its method or path has a character that HTTP does not allow")
        for name, value in headers.items():
            if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
                raise self._unusable(f"its field {name!r} has a character that HTTP does not allow")
            lines.append(f"{name}: {value}\r\n")
        return "".join((*lines, "\r\n")).encode("latin-1") + self.body

    def _authority(self) -> str:
        host, port = self.endpoint.host, self.endpoint.port
        try:
            host = host if host.isascii() else host.encode("idna").decode()
        except UnicodeError:
            host = ""
        has_labels = all(0 < len(label) < 64 for label in host.removesuffix(".").split("."))
        if not has_labels or not _HOST.fullmatch(host) or _NOT_IN_HOST & set(host):
            raise self._unusable("its host is neither a name nor an IP address")
        if not 0 < port < 65536:
            raise self._unusable(f"there is no port {port}")
        return format_address(host, port)

    def _unusable(self, what: str) -> NoAnswer:
        return NoAnswer(self.endpoint.address, f"the request cannot be sent: {what}")


def _read_url(url: str) -> tuple[Endpoint, str, str]:
    """Return endpoint, target and the value of ``Authorization`` for the user in a URL, if there is one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text has parts of the URL
        raise NoAnswer("", "the URL cannot be read: its host or port is malformed") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise NoAnswer("", "the URL cannot be used: it must be http://host:port/path or https://host:port/path")
    endpoint = Endpoint(parts.scheme, parts.hostname, _PORTS[parts.scheme] if port is None else port)
    target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    if not _TARGET.fullmatch(target):
        target = quote(target, safe=_LEFT_IN_URLS)
    if parts.username is None:
        return endpoint, target, ""
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return endpoint, target, f"Basic {base64.b64encode(user.encode()).decode()}"


class Answer(NamedTuple):
    """An answer, whatever its status.

    Attributes:
        headers: names in small letters; what stands there several times is joined with commas.
        body: as it was sent; empty when it is read piece by piece.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


def tls_port(body: bytes) -> int:
    """Return the port that an nsqd names which wants TLS, in the body of its 403; 0 for any other refusal."""
    try:
        found = msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE_JSON:
        return 0
    port = found.get("https_port")
    return port if found.get("message") == "TLS_REQUIRED" and isinstance(port, int) and 0 < port < 65536 else 0


class Exchange:
    """Reads the answer to one request.

    Args:
        address: for errors.
        body_bytes_max: size of the body that is not taken yet; what exceeds it is an error.

    Attributes:
        has_begun: some of the answer was received.
        has_head: status and headers are known; those of interim answers (1xx) are passed over.
        is_complete: all of it was received.
        is_reusable: and the connection can carry another request.
    """

    def __init__(self, address: str, body_bytes_max: int = ANSWER_BYTES_MAX) -> None:
        self.has_begun = False
        self.has_head = False
        self.is_complete = False
        self.is_reusable = False
        self._address = address
        self._body_bytes_max = body_bytes_max
        self._parser: Any = HttpResponseParser(self)
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._body_bytes = 0
        self._received_bytes = 0

    @property
    def unread_bytes(self) -> int:
        """Size of the body that was received and not taken."""
        return len(self._body)

    @property
    def status(self) -> int:
        """Status of the answer, known before the rest of the head and whatever is wrong with that; 0: not yet."""
        return self._status

    def receive(self, data: bytes) -> None:
        """Take what was received.

        Raises:
            NoAnswer: it is not HTTP, or too large.
        """
        if self.is_complete:
            self.is_reusable = False  # it sends what nobody asked for
            return
        self.has_begun = True
        self._received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._refuse("it changes to another protocol")
        except HttpParserError as error:
            is_nsq = data.startswith(b"\0") and self._received_bytes == len(data)  # the size of a small frame
            self._refuse(_NSQ if is_nsq else str(error))
        if len(self._body) > self._body_bytes_max:
            raise self._no_answer(f"the answer is larger than {self._body_bytes_max} bytes")
        if self._received_bytes - self._body_bytes > OVERHEAD_BYTES_MAX + _FRAMING_RATIO_MAX * self._body_bytes:
            raise self._no_answer(f"the head of the answer is larger than {OVERHEAD_BYTES_MAX} bytes")

    def _refuse(self, what: str) -> None:
        """Take note of what the parser cannot read."""
        if not self.is_complete:
            raise self._no_answer(f"the answer is not HTTP: {what}")
        self.is_reusable = False  # it stands behind the answer

    def _no_answer(self, reason: str) -> NoAnswer:
        return NoAnswer(self._address, reason, status=self._status)

    def end(self, cause: OSError | None = None) -> None:
        """Take note that the connection is over, which is where some bodies end.

        Raises:
            NoAnswer: there should have come more.
        """
        self.is_reusable = False
        framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        if not self.is_complete and (cause is not None or not self.has_head or framed):
            why = f": {cause.strerror or cause}" if cause is not None else ""
            raise self._no_answer(f"closed before the answer was complete{why}")
        self.is_complete = True

    def take_body(self) -> bytes:
        """Return the part of the body that has come since the last call."""
        body = bytes(self._body)
        self._body.clear()
        return body

    def answer(self) -> Answer:
        """Return the answer, with what there is of its body."""
        return Answer(self._status, self._headers, self.take_body())

    # what the parser calls

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.is_reusable = False

    def on_status(self, reason: bytes) -> None:
        self._note_status()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._note_status()  # there may be no reason behind it
        if not self.has_head and not self.is_complete:  # what comes later are trailers
            key, text = name.decode("latin-1").lower(), value.decode("latin-1")
            self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        if self.is_complete:
            return
        status = int(self._parser.get_status_code())
        if 100 <= status < _FINAL_MIN:
            self._headers.clear()
        else:
            self._status = status
            self.has_head = True

    def _note_status(self) -> None:
        """Take note of the status, unless it is that of an interim answer, or of one behind this one."""
        status = int(self._parser.get_status_code())
        if status >= _FINAL_MIN and not self.is_complete:
            self._status = status

    def on_body(self, data: bytes) -> None:
        if not self.is_complete:
            self._body += data
            self._body_bytes += len(data)

    def on_message_complete(self) -> None:
        if self.has_head and not self.is_complete:
            self.is_complete = True
            self.is_reusable = bool(self._parser.should_keep_alive())
