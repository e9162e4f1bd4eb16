"""The blocking shell of an HTTP request: a socket, a deadline and TLS around :mod:`flintmq.net.http_exchange`.

Rules of this file: no event loop and no thread; nothing is kept between two requests, so any number of threads may
ask at the same time; the deadline is for all of it, so a server that sends a byte now and then gains nothing by it.

Source: docs/auth.md (1 MB, no redirects).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Protocol

from flintmq.net.http_exchange import ANSWER_BYTES_MAX, Answer, Endpoint, Exchange, NoAnswer, Request, no_connection

_READ_BYTES = 64 * 1024


class Forkable(Protocol):
    """Is told in a child made by ``os.fork()``."""

    def after_fork(self) -> None:
        """Let go of what is the parent's."""


def ask(
    request: Request,
    *,
    timeout_s: float,
    time: Callable[[], float],
    context: ssl.SSLContext | None = None,
    body_bytes_max: int = ANSWER_BYTES_MAX,
    watch: Callable[[Forkable], None] | None = None,
) -> Answer:
    """Return the answer to a request, whatever its status.

    Args:
        timeout_s: from now to the last byte of the answer; only resolving a name may take longer.
        time: a clock in seconds.
        context: for ``https``; whom to trust, what to show.
        body_bytes_max: size of the answer's body.
        watch: is given the connection, to tell it of a fork.

    Raises:
        NoAnswer: there is none in time, or none that can be used.
    """
    endpoint = request.endpoint
    data = request.encode()
    exchange = Exchange(endpoint.address, body_bytes_max)
    connection = _Connection(time() + timeout_s, time)
    if watch is not None:
        watch(connection)
    try:
        connection.open(endpoint, context)
        connection.send(data)
        while not exchange.is_complete:
            if received := connection.receive():
                exchange.receive(received)
            else:
                exchange.end()
    except TimeoutError as error:
        raise NoAnswer(endpoint.address, f"no answer within {timeout_s:g} s", status=exchange.status) from error
    except ssl.SSLEOFError as error:
        if connection.is_open:
            exchange.end(ConnectionAbortedError("without TLS's word for the end"))
        raise no_connection(endpoint, error) from error
    except ssl.SSLError as error:
        raise no_connection(endpoint, error, exchange.status) from error
    except OSError as error:
        if connection.is_open:
            exchange.end(error)
        raise no_connection(endpoint, error) from error
    finally:
        connection.close()
    return exchange.answer()


class _Connection:
    """A socket with a deadline.

    Attributes:
        is_open: it is connected, with TLS where that is spoken.
    """

    __slots__ = ("is_open", "_deadline", "_time", "_socket", "__weakref__")

    def __init__(self, deadline: float, time: Callable[[], float]) -> None:
        self.is_open = False
        self._deadline = deadline
        self._time = time
        self._socket: socket.socket | None = None

    def after_fork(self) -> None:
        """Close the connection in a child: it is the parent's, whose peer would otherwise wait for both to do so."""
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def open(self, endpoint: Endpoint, context: ssl.SSLContext | None) -> None:
        """Connect; every address of the host is tried and has its share of the time.

        Raises:
            TimeoutError, OSError: it cannot be connected to.
        """
        if endpoint.unix_path:
            self._connect(socket.AF_UNIX, endpoint.unix_path, self._deadline)
        else:
            self._connect_to_any(endpoint)
        assert self._socket is not None
        if endpoint.is_secured:
            self._socket.settimeout(self._left_s(self._deadline))
            # an end without TLS's own word for it may be somebody's who wants the answer to look shorter
            self._socket = (context or ssl.create_default_context()).wrap_socket(
                self._socket, server_hostname=endpoint.server_name, suppress_ragged_eofs=False
            )
        self.is_open = True

    def _connect_to_any(self, endpoint: Endpoint) -> None:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        refused: OSError | None = None
        for number, (family, _, _, _, address) in enumerate(found):
            now = self._time()
            try:
                self._connect(family, address, now + (self._deadline - now) / (len(found) - number))
                return
            except TimeoutError:
                continue
            except OSError as error:
                refused = error
        raise refused or TimeoutError

    def _connect(self, family: int, address: object, deadline: float) -> None:
        self.close()
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.settimeout(self._left_s(deadline))
        self._socket.connect(address)  # type: ignore[arg-type] # what this family has

    def send(self, data: bytes) -> None:
        """Send all of it."""
        assert self._socket is not None
        left = memoryview(data)
        while left:
            self._socket.settimeout(self._left_s(self._deadline))
            left = left[self._socket.send(left) :]

    def receive(self) -> bytes:
        """Wait for what comes next; empty when the peer has ended."""
        assert self._socket is not None
        self._socket.settimeout(self._left_s(self._deadline))
        try:
            return self._socket.recv(_READ_BYTES)
        except ssl.SSLZeroReturnError:
            return b""

    def _left_s(self, deadline: float) -> float:
        left_s = deadline - self._time()
        if left_s <= 0:
            raise TimeoutError
        return left_s
