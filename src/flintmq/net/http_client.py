"""The asyncio shell of an HTTP request: connections, deadlines and TLS around :mod:`flintmq.net.http_exchange`.

Rules of this file:

- Everything has a deadline; what was begun is aborted when the caller gives up.
- Connections are the running loop's ``create_connection``, so that this runs in a simulation too.
- A connection is kept only where the caller wants that, and without being told so for a GET alone: a server may close
  an idle one just when it is used again, and a GET can be asked once more. Anything else is never asked again here.

Source: NSQ's nsqlookupd (what nsqd asks nsqlookupd); docs/auth.md (1 MB, no redirects).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, cast

from flintmq.addresses import format_address
from flintmq.errors import ConnectionFailed
from flintmq.net.http_exchange import ANSWER_BYTES_MAX, Answer, Endpoint, Exchange, NoAnswer, Request, no_connection

__all__ = ["ANSWER_BYTES_MAX", "HttpClient", "Stream", "ask", "get"]

IDLE_S_MAX = 15.0
UNREAD_BYTES_MAX = 256 * 1024  # of a stream; then nothing more is read from the socket
_STREAM_PIECE_BYTES_MAX = 16 * 1024 * 1024  # far more than one read of the loop brings


class HttpClient:
    """Asks.

    Args:
        idle_max: connections that are kept for ``IDLE_S_MAX``; 0: every request has its own.
    """

    def __init__(self, idle_max: int = 0) -> None:
        self._idle_max = idle_max
        self._idle: dict[_Connection, asyncio.TimerHandle] = {}
        self._round = 0

    async def ask(
        self,
        request: Request,
        *,
        timeout_s: float,
        connect_timeout_s: float | None = None,
        context: ssl.SSLContext | None = None,
        body_bytes_max: int = ANSWER_BYTES_MAX,
        may_keep: bool = False,
    ) -> Answer:
        """Return the answer to a request, whatever its status.

        Args:
            timeout_s: from now to the last byte of the answer.
            connect_timeout_s: for the part of it in which the connection is made; as long as that if None.
            context: for ``https``; whom to trust, what to show.
            body_bytes_max: size of the answer's body.
            may_keep: use and keep a connection for other methods than GET as well: the caller knows what to do when a
                request may have arrived on one that its server was just closing.

        Raises:
            NoAnswer: there is none in time, or none that can be used.
        """
        address = request.endpoint.address
        is_repeatable = request.method == "GET"
        may_keep = bool(self._idle_max) and (may_keep or is_repeatable)
        begin = partial(
            _Connection.begin, data=request.encode(may_keep), new=partial(Exchange, address, body_bytes_max)
        )
        begun_in = self._round
        exchange: Exchange | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    kept = self._take(request.endpoint, context) if may_keep else None
                    if kept is not None:
                        begin(kept)
                    connection = kept or await _connect(request.endpoint, context, timeout_s, connect_timeout_s, begin)
                    exchange = connection.exchange
                    try:
                        while not exchange.is_complete:
                            await connection.progress()
                    except NoAnswer:
                        if kept is not None and is_repeatable and not exchange.has_begun:
                            continue  # the server closed it while it was idle
                        raise
                    finally:
                        self._leave(connection, may_keep and exchange.is_reusable and begun_in == self._round)
                    return exchange.answer()
        except TimeoutError as error:
            status = 0 if exchange is None else exchange.status
            raise NoAnswer(address, f"no answer within {timeout_s:g} s", status=status) from error

    @asynccontextmanager
    async def stream(
        self,
        request: Request,
        *,
        timeout_s: float,
        connect_timeout_s: float | None = None,
        context: ssl.SSLContext | None = None,
    ) -> AsyncIterator[Stream]:
        """Ask, and read the body of the answer piece by piece while it comes; leaving the block ends it.

        Args:
            timeout_s: from now until status and headers have come. The body may take any time: whoever reads it
                waits as long as it wants to.

        Raises:
            NoAnswer: as :meth:`ask`; also while the body is read.
        """
        address = request.endpoint.address
        connection: _Connection | None = None
        new = partial(Exchange, address, _STREAM_PIECE_BYTES_MAX)
        begin = partial(_Connection.begin, data=request.encode(), new=new, is_stream=True)
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    connection = await _connect(request.endpoint, context, timeout_s, connect_timeout_s, begin)
                    while not connection.exchange.has_head:
                        await connection.progress()
            except TimeoutError as error:
                raise NoAnswer(address, f"no answer within {timeout_s:g} s") from error
            yield Stream(connection)
        finally:
            if connection is not None:
                connection.abort()

    async def close(self) -> None:
        """Close the connections that are kept; the client can be used again."""
        self._round += 1
        for connection in list(self._idle):
            self._drop(connection)

    def _take(self, endpoint: Endpoint, context: ssl.SSLContext | None) -> _Connection | None:
        key = _Key(endpoint, context)
        loop = asyncio.get_running_loop()
        for connection, timer in list(self._idle.items()):
            if connection.is_over or connection.loop is not loop:
                self._drop(connection)
            elif connection.key == key:
                timer.cancel()
                del self._idle[connection]
                return connection
        return None

    def _leave(self, connection: _Connection, is_reusable: bool) -> None:
        """Keep a connection, or end it."""
        if not is_reusable or connection.is_over:
            connection.abort()
            return
        while len(self._idle) >= self._idle_max:
            self._drop(next(iter(self._idle)))
        connection.rest()
        self._idle[connection] = connection.loop.call_later(IDLE_S_MAX, self._drop, connection)

    def _drop(self, connection: _Connection) -> None:
        timer = self._idle.pop(connection, None)
        if timer is not None:
            timer.cancel()
        if not connection.loop.is_closed():
            connection.abort()


class _Key(NamedTuple):
    """Connections of one key can take each other's place."""

    endpoint: Endpoint
    context: ssl.SSLContext | None


class Stream:
    """The body of an answer that comes piece by piece: ``async for piece in stream``.

    Attributes:
        status, headers: of the answer.
    """

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._exchange = connection.exchange
        self.status, self.headers, self._first = self._exchange.answer()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        piece, self._first = self._first, b""
        while True:
            if piece:
                yield piece
            piece = self._exchange.take_body()
            self._connection.read_on()
            if not piece:
                if self._exchange.is_complete:
                    return
                await self._connection.progress()


class _Connection(asyncio.Protocol):
    """One connection, which carries one exchange at a time.

    Args:
        begin: called when it is made: whoever speaks first is heard, and whoever leaves at once is noticed.

    Attributes:
        exchange: the present one, or the last.
        is_over: nothing can be sent any more.
    """

    exchange: Exchange

    def __init__(self, key: _Key, loop: asyncio.AbstractEventLoop, begin: Callable[[_Connection], None]) -> None:
        self.key = key
        self.loop = loop
        self.is_over = False
        self._begin = begin
        self._is_resting = False
        self._transport: asyncio.Transport | None = None
        self._is_stream = False
        self._failure: NoAnswer | None = None
        self._waiter: asyncio.Future[None] | None = None

    def begin(self, data: bytes, new: Callable[[], Exchange], is_stream: bool = False) -> None:
        """Send a request; with a stream every piece of the answer is progress."""
        assert self._transport is not None
        self.exchange = new()
        self._is_stream = is_stream
        self._is_resting = False
        self._transport.write(data)

    async def progress(self) -> None:
        """Wait until something has come; raises NoAnswer when nothing will."""
        if self._failure is None:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._failure is not None:
            raise self._failure

    def read_on(self) -> None:
        """Read again after a stream's reader was too slow."""
        if self._transport is not None and not self.is_over:
            self._transport.resume_reading()

    def rest(self) -> None:
        """Expect nothing; the connection is kept."""
        self._is_resting = True

    def abort(self) -> None:
        """End it at once."""
        self.is_over = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._begin(self)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if self._is_resting:  # it says something that it was not asked for
            self.abort()
            return
        try:
            exchange.receive(data)
        except NoAnswer as failure:
            self._fail(failure)
            self.abort()
            return
        if self._is_stream and exchange.unread_bytes > UNREAD_BYTES_MAX and self._transport is not None:
            self._transport.pause_reading()
        if exchange.is_complete or self._is_stream:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True
        if self._is_resting:
            return
        try:
            if isinstance(exc, ssl.SSLError):
                raise no_connection(self.key.endpoint, exc, self.exchange.status)
            self.exchange.end(exc if isinstance(exc, OSError) else None)
        except NoAnswer as failure:
            self._fail(failure)
        self._wake()

    def _fail(self, failure: NoAnswer) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def _connect(
    endpoint: Endpoint,
    context: ssl.SSLContext | None,
    timeout_s: float,
    connect_timeout_s: float | None,
    begin: Callable[[_Connection], None],
) -> _Connection:
    """Connect and send; every address of the host is tried and has its share of the time."""
    loop = asyncio.get_running_loop()
    make = partial(_Connection, _Key(endpoint, context), loop, begin)
    limit_s = timeout_s if connect_timeout_s is None else min(timeout_s, connect_timeout_s)
    late = f"no {'answer' if connect_timeout_s is None else 'connection'} within {limit_s:g} s"
    deadline = loop.time() + limit_s
    error: OSError | None = None
    try:
        async with asyncio.timeout_at(deadline):
            hosts = await _addresses(endpoint)
            for number, host in enumerate(hosts):
                now = loop.time()
                try:
                    async with asyncio.timeout_at(now + (deadline - now) / (len(hosts) - number)):
                        return await _connect_to(host, endpoint, context, make)
                except TimeoutError:
                    continue
                except ssl.SSLError:
                    raise
                except OSError as failed:
                    error = failed
    except TimeoutError as failed:
        raise NoAnswer(endpoint.address, late) from failed
    except OSError as failed:
        raise no_connection(endpoint, failed) from failed
    if error is None:
        raise NoAnswer(endpoint.address, late)
    raise no_connection(endpoint, error) from error


async def _addresses(endpoint: Endpoint) -> list[str]:
    if endpoint.unix_path:
        return [endpoint.unix_path]
    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        pass
    else:
        return [endpoint.host]
    found = await asyncio.get_running_loop().getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


async def _connect_to(
    host: str, endpoint: Endpoint, context: ssl.SSLContext | None, make: Callable[[], _Connection]
) -> _Connection:
    loop = asyncio.get_running_loop()
    secured: dict[str, Any] = {}
    if endpoint.is_secured:
        secured = {"ssl": context or ssl.create_default_context(), "server_hostname": endpoint.server_name}
    if endpoint.unix_path:
        _, connection = await loop.create_unix_connection(make, host, **secured)
    else:
        _, connection = await loop.create_connection(make, host, endpoint.port, **secured)
    return connection


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
    """Return status and body of one daemon's answer to another's request without a body.

    Args:
        target: path and query, quoted already.
        connect_timeout_s: for the connection.
        request_timeout_s: for all of it, to the last byte of the answer.
        token: shown as bearer token when not empty.

    Raises:
        NoAnswer: there is none in time; its text says why.
    """
    headers = {"Accept": "application/vnd.nsq; version=1.0", "User-Agent": "nsqd"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = Request(method, Endpoint("http", host, port), target, headers)
    answer = await HttpClient().ask(request, timeout_s=request_timeout_s, connect_timeout_s=connect_timeout_s)
    return answer.status, answer.body
