"""One HTTP request on a connection of its own, with a deadline for all of it.

Rules of this file: the answer's size is bounded; redirects are not followed; ``https://`` is verified as the connection
to an nsqd is (:mod:`flintmq.client.security`). Source: reference/nsq.md 2.2 and 2.3.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from flintmq import __version__
from flintmq.client.blocking.stream import Stream, StreamEnded, Time, connect
from flintmq.client.discovery import ANSWER_SIZE_MAX
from flintmq.client.options import ConnectionOptions, join_address
from flintmq.client.security import explain
from flintmq.errors import ConnectionFailed, FlintError
from flintmq.net.tls_engine import StandardTls, TlsFailed

HEAD_SIZE_MAX = 64 * 1024
PORTS = {"http": 80, "https": 443}


def get(url: str, timeout_s: float, options: ConnectionOptions, time: Time) -> tuple[int, bytes]:
    """Return status and body of the answer to a GET; raises as :func:`ask`."""
    return ask("GET", url, timeout_s, options, time)


def ask(
    method: str, url: str, timeout_s: float, options: ConnectionOptions, time: Time, body: bytes = b""
) -> tuple[int, bytes]:
    """Return status and body of the answer to a request.

    Raises:
        OSError: there is no answer in time, or none that can be read.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    deadline = time() + timeout_s
    stream: Stream | None = None
    try:
        stream = connect(join_address(host, parts.port or PORTS[parts.scheme]), deadline, time)
        if parts.scheme == "https":
            engine = StandardTls(options.tls_context(), server_side=False, server_hostname=host)
            stream.start_tls(engine, b"", deadline)
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        stream.send(_request(method, target, parts.netloc.rpartition("@")[2], options, body), deadline)
        return _read_answer(stream, deadline)
    except TimeoutError as error:
        raise OSError(f"no answer within {timeout_s:g} s") from error
    except ConnectionFailed as error:
        raise OSError(error.reason) from error
    except TlsFailed as error:
        raise OSError(explain(error.reason, host, options.shows_certificate)) from error
    except (FlintError, ValueError) as error:
        raise OSError(str(error)) from error
    finally:
        if stream is not None:
            stream.abort()


def _request(method: str, target: str, host: str, options: ConnectionOptions, body: bytes) -> bytes:
    headers = "".join(f"{name}: {value}\r\n" for name, value in options.lookup_headers().items())
    length = "" if method == "GET" else f"Content-Length: {len(body)}\r\n"
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: flintmq/{__version__}\r\n"
        f"{headers}{length}Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


def _read_answer(stream: Stream, deadline: float) -> tuple[int, bytes]:
    answer = _Answer()
    parser: Any = HttpResponseParser(answer)
    received_bytes = 0
    while not answer.is_complete:
        try:
            data = stream.receive(deadline)
        except StreamEnded as error:
            if not answer.ends_with_connection:
                raise OSError("closed before the answer was complete") from error
            break
        received_bytes += len(data)
        if received_bytes > ANSWER_SIZE_MAX + HEAD_SIZE_MAX:
            raise OSError(f"the answer is larger than {ANSWER_SIZE_MAX} bytes")
        try:
            parser.feed_data(data)
        except HttpParserError as error:
            raise OSError(f"the answer is not HTTP: {error}") from error
    return parser.get_status_code(), bytes(answer.body)


class _Answer:
    """What the parser says.

    Attributes:
        ends_with_connection: its head is complete and does not say where its body ends.
    """

    def __init__(self) -> None:
        self.body = bytearray()
        self.is_complete = False
        self.ends_with_connection = False
        self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.ends_with_connection = not self._has_length

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True
