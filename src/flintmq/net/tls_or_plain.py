"""The first bytes at an HTTPS port: TLS, or a request in clear, which is told that TLS is wanted there.

::

    a record of TLS, 16 03 ..   -> the handshake
    "GET /", "POST ", ...       -> 403 {"message": "TLS_REQUIRED", "https_port": this one}, end of stream
    anything else               -> the handshake as well, which fails

nsqd's plain port answers so where TLS is required, and whoever knows NSQ's API asks again at the port that is named. An
nsqd without a plain port registers this one with nsqlookupd, so those who look it up there come here in clear at first.

Rules of this file: nothing of a request in clear is used, and its answer says no more than which port this is; five
bytes decide, in the time that a handshake has; what comes behind them is thrown away, for as long as linger.py allows.

Source: NSQ's HTTP API (``--tls-required``); Go's net/http, which tells requests in clear by their first five bytes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from flintmq.net.address import format_peer
from flintmq.net.http_messages import JSON_TYPE, NSQ_TYPE, Response
from flintmq.net.layers import SecureTransport
from flintmq.net.linger import close_lingering

_log = logging.getLogger(__name__)

_SIZE = 5
_REQUESTS = (b"GET /", b"HEAD ", b"POST ", b"PUT /", b"DELET", b"OPTIO", b"PATCH")
_LAST_LINES = b"Connection: close\r\n\r\n"

assert all(len(each) == _SIZE for each in _REQUESTS)


class TlsOrPlain(SecureTransport):
    """Accepts a connection of an HTTPS port; one that begins with a request in clear never reaches its protocol."""

    _first: bytes | None = b""  # that is not decided on; None: it is TLS, or what else fails in the handshake

    def data_received(self, data: bytes) -> None:
        if self._first is not None:
            first = self._first + data
            begin = first[:_SIZE]
            if begin in _REQUESTS:
                self._refuse(begin.startswith(b"HEAD"))
                return
            if len(begin) < _SIZE and begin.startswith(tuple(each[: len(begin)] for each in _REQUESTS)):
                self._first = first
                return
            self._first, data = None, first
        super().data_received(data)

    def _refuse(self, is_head: bool) -> None:
        """Answer in clear, and leave the connection to one that only waits for its end."""
        below = self._below
        if below is None or below.is_closing():
            return
        _log.info("%s asks in clear at the HTTPS port: TLS_REQUIRED", format_peer(below.get_extra_info("peername")))
        refusal = _Refusal()
        below.set_protocol(refusal)
        self.connection_lost(None)  # for this one it is over, handshake and deadline
        response = tls_required(below.get_extra_info("sockname"))
        below.write(response.head + _LAST_LINES + (b"" if is_head else response.body))
        refusal.timer = close_lingering(below, self._loop)


def tls_required(address: object) -> Response:
    """Return the answer of NSQ's API to a request in clear where TLS is required.

    Args:
        address: of the socket that speaks it, host and port first; the path of a unix socket has no port, told as 0.
    """
    port = cast(int, address[1]) if isinstance(address, tuple) else 0
    return Response(403, b'{"message": "TLS_REQUIRED", "https_port": %d}' % port, (JSON_TYPE, NSQ_TYPE))


class _Refusal(asyncio.Protocol):
    """Throws away what still comes.

    Attributes:
        timer: ends the connection when the peer does not.
    """

    timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
