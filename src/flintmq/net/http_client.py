"""One HTTP request on a connection of its own, for daemons that ask each other.

Rules of this file: everything has a deadline and a bound; redirects are not followed; the connection is the running
loop's ``create_connection``, so that it also runs in a simulation.

Source: reference/nsq.md 2.2 (what nsqd asks nsqlookupd); design/reliability.md section 6 (1 MB, no redirects).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

from httptools import HttpParserError, HttpResponseParser

from flintmq.errors import ConnectionFailed
from flintmq.net.address import format_address

ANSWER_BYTES_MAX = 1024 * 1024
_HEAD_BYTES_MAX = 64 * 1024


async def get(
    host: str, port: int, target: str, *, connect_timeout_s: float, request_timeout_s: float, token: str = ""
) -> bytes:
    """Return the body of the answer to ``GET target``.

    Args:
        token: shown as bearer token when not empty.

    Raises:
        ConnectionFailed: there is no answer with status 200 in time; its text says why.
    """
    timeouts = {"connect_timeout_s": connect_timeout_s, "request_timeout_s": request_timeout_s}
    status, body = await ask("GET", host, port, target, **timeouts, token=token)
    if status != 200:
        raise ConnectionFailed(format_address(host, port), f"GET {target} was answered with status {status}")
    return body


async def ask(
    method: str,
    host: str,
    port: int,
    target: str,
    *,
    connect_timeout_s: float,
    request_timeout_s: float,
    token: str = "",
) -> tuple[int, bytes]:
    """Return status and body of the answer to a request without a body.

    Args:
        target: path and query, quoted already.
        request_timeout_s: from the connection to the last byte of the answer.
        token: shown as bearer token when not empty.

    Raises:
        ConnectionFailed: there is no answer in time; its text says why.
    """
    address = format_address(host, port)
    loop = asyncio.get_running_loop()
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(connect_timeout_s):
            exchanges = partial(_Exchange, address, method, target, token)
            transport, exchange = await loop.create_connection(exchanges, host, port)
        async with asyncio.timeout(request_timeout_s):
            return await exchange.answer
    except TimeoutError as error:
        waited_s = connect_timeout_s if transport is None else request_timeout_s
        what = "connection" if transport is None else "answer"
        raise ConnectionFailed(address, f"no {what} within {waited_s:g} s") from error
    except OSError as error:
        raise ConnectionFailed(address, error.strerror or str(error)) from error
    finally:
        if transport is not None:
            cast(asyncio.Transport, transport).abort()


class _Exchange(asyncio.Protocol):
    """Sends the request and reads its answer.

    Attributes:
        answer: status and body.
    """

    def __init__(self, address: str, method: str, target: str, token: str) -> None:
        self.answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._address = address
        length = "" if method == "GET" else "Content-Length: 0\r\n"
        authorization = f"Authorization: Bearer {token}\r\n" if token else ""
        self._request = (
            f"{method} {target} HTTP/1.1\r\nHost: {address}\r\nUser-Agent: nsqd\r\n"
            f"{length}{authorization}Accept: application/vnd.nsq; version=1.0\r\nConnection: close\r\n\r\n"
        ).encode("ascii")
        self._parser: Any = HttpResponseParser(self)
        self._body = bytearray()
        self._received_bytes = 0

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.answer.done():
            return
        self._received_bytes += len(data)
        if self._received_bytes > ANSWER_BYTES_MAX + _HEAD_BYTES_MAX:
            self._fail(f"the answer has more than {ANSWER_BYTES_MAX} bytes")
            return
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("closed before the answer was complete")

    # parser

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self.answer.done():
            self.answer.set_result((self._parser.get_status_code(), bytes(self._body)))

    def _fail(self, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectionFailed(self._address, reason))
            self.answer.exception()  # nobody may be waiting any more
