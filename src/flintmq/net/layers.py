"""A connection whose bytes go through TLS, compression or both.

::

    socket <-> transport of the loop <-> LayeredTransport: [TLS] [codec] <-> protocol
               calls it like a protocol                  looks like a transport

Rules of this file:

- Bytes belong to the layers that stand when they are read: whoever puts a layer in hands over, with it, what was
  received behind the agreement and not used, and nothing of that is read without the layer.
- Work per turn of the loop is bounded in both directions. Input is pulled out of the layers piece by piece; when it
  swells, the rest waits for the next turn and the socket is not read meanwhile. Output to be compressed waits in a
  queue that counts as write buffer.
- A protocol above sees an ordinary transport: pauses in both directions, half-close, one connection_lost, which is
  told when a layer's damage was the cause.
- A handshake that fails takes its layer away again, so that the failure can be reported in clear.

It is used instead of the loop's own TLS because it knows what arrived first, can answer after a failed handshake, takes
any engine (docs/decisions/0007), and behaves alike on every event loop. Source: NSQ's TCP protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from flintmq.errors import FlintError
from flintmq.limits import WRITE_BUFFER_HIGH_BYTES
from flintmq.net.address import format_peer
from flintmq.net.tls_engine import TlsEngine, TlsFailed, TlsInterrupted
from flintmq.wire.codec import Codec, CorruptStream

log = logging.getLogger(__name__)

HANDSHAKE_DEADLINE_S = 5.0
PULL_BYTES_MAX = 256 * 1024  # handed to the protocol, in however many reads, before others have their turn
ENCODE_BYTES_MAX = 64 * 1024  # compressed in one turn: a few milliseconds at deflate's slowest level

Done = Callable[[TlsFailed | None], None]


class LayeredTransport(asyncio.Transport, asyncio.Protocol):
    """Stands between a transport of the loop and a protocol.

    Args:
        protocol: above; it has been connected already, or is by the owner.
        loop: for timers and later turns.
        peer_kind: what the other side is, for the log.
    """

    def __init__(self, protocol: asyncio.Protocol, loop: asyncio.AbstractEventLoop, peer_kind: str = "client") -> None:
        super().__init__()
        self._protocol = protocol
        self._loop = loop
        self._peer_kind = peer_kind
        self._below: asyncio.Transport | None = None
        self._tls: TlsEngine | None = None
        self._codec: Codec | None = None
        self._done: Done | None = None  # there is a handshake while it is set
        self._deadline: asyncio.TimerHandle | None = None
        self._has_failed = False
        self._damage: FlintError | None = None
        self._is_closing = False
        # reading
        self._is_read_paused = False
        self._is_below_paused = False
        self._has_pull = False  # a pull is due in a later turn
        self._left_bytes = PULL_BYTES_MAX  # to be handed over before others have their turn
        self._has_told_eof = False
        # writing
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._has_encode = False
        self._is_below_full = False
        self._is_full = False
        self._last: Callable[[asyncio.Transport], None] | None = None  # to be called when the queue is empty

    def __repr__(self) -> str:
        layers = [*(["tls"] if self.tls is not None else []), *([self._codec.name] if self._codec is not None else [])]
        flags = {
            "handshake": self._done is not None,
            "failed": self._has_failed,
            "closing": self._is_closing,
            "read-paused": self._is_read_paused,
            "pull-due": self._has_pull,
            "full": self._is_full,
        }
        states = "".join(f" {name}" for name, is_set in flags.items() if is_set)
        return f"<{'+'.join(layers) or 'clear'} queued={self._queued_bytes}{states}>"

    # -- layers ----------------------------------------------------------------------------------------------------

    def take_over(self, transport: asyncio.Transport) -> None:
        """Stand between ``transport`` and the protocol that had it until now."""
        self._below = transport
        transport.set_protocol(self)

    @property
    def tls(self) -> TlsEngine | None:
        """The TLS layer once its handshake is over."""
        return self._tls if self._done is None else None

    @property
    def codec(self) -> Codec | None:
        """The compression in use."""
        return self._codec

    def start_tls(self, tls: TlsEngine, received: bytes, done: Done, deadline_s: float = HANDSHAKE_DEADLINE_S) -> None:
        """Begin a handshake.

        Args:
            received: what came from the peer already and belongs to the handshake.
            done: called once, with None or why it failed; before any byte inside TLS reaches the protocol. Not called
                when the connection is lost first.
        """
        assert self._tls is None and self._codec is None, "TLS is the lowest layer"
        self._tls = tls
        self._done = done
        self._deadline = self._loop.call_later(deadline_s, self._handshake_timed_out)
        if received:
            tls.receive(received)
        self._pull()

    def start_codec(self, codec: Codec, received: bytes = b"") -> None:
        """Compress from here on; to be called before what it concerns is written or read.

        Args:
            received: as in :meth:`start_tls`.
        """
        assert self._codec is None, "compressed already"
        self._codec = codec
        if received:
            codec.receive(received)
            self._pull_soon()

    # -- from below ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._below = None
        self._done = None
        if self._deadline is not None:
            self._deadline.cancel()
        self._queue.clear()
        self._queued_bytes = 0
        self._protocol.connection_lost(exc or self._damage)

    def data_received(self, data: bytes) -> None:
        if self._is_closing or self._has_failed:
            return
        if self._tls is not None:
            self._tls.receive(data)
        elif self._codec is not None:
            self._codec.receive(data)
        else:
            self._protocol.data_received(data)
            return
        if not self._has_pull:
            self._pull()

    def eof_received(self) -> bool:
        if self._done is not None:
            self._handshake_ended(TlsInterrupted("the peer closed the connection"))
            return False
        return self._tell_eof()

    def pause_writing(self) -> None:
        self._is_below_full = True
        self._update_pressure()

    def resume_writing(self) -> None:
        self._is_below_full = False
        if self._queue:
            self._encode_soon()
        self._update_pressure()

    # -- handshake -------------------------------------------------------------------------------------------------

    def _handshake(self, tls: TlsEngine) -> None:
        try:
            is_complete = tls.handshake()
        except TlsFailed as failure:
            self._send_tls_output()
            self._handshake_ended(failure)
            return
        self._send_tls_output()
        if is_complete:
            self._handshake_ended(None)

    def _handshake_timed_out(self) -> None:
        self._deadline = None
        self._handshake_ended(TlsInterrupted("the handshake took too long"))

    def _handshake_ended(self, failure: TlsFailed | None) -> None:
        done, self._done = self._done, None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if failure is not None:
            self._tls = None
            self._has_failed = True
        if done is not None:
            done(failure)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _pull_soon(self) -> None:
        if not self._has_pull and not self._is_read_paused:
            self._has_pull = True
            self._loop.call_soon(self._pull)

    def _pull(self) -> None:
        """Hand over what was received until nothing is left, the protocol pauses us, or others have their turn."""
        if self._has_pull:
            self._has_pull = False
            self._left_bytes = PULL_BYTES_MAX
        if self._done is not None and self._tls is not None:
            self._handshake(self._tls)
        if self._done is not None or self._has_failed:
            return
        try:
            while not self._is_read_paused and not self._is_closing:
                data = self._next()
                if not data:
                    break
                self._left_bytes -= len(data)
                self._protocol.data_received(data)
                if self._left_bytes <= 0:
                    self._pull_soon()
                    break
        except (TlsFailed, CorruptStream) as failure:
            self._give_up(failure)
            return
        self._send_tls_output()  # reading can make TLS write: tickets, answers to key updates
        self._update_reading()
        if self._is_input_ended() and not self._has_pull and not self._is_read_paused and not self._tell_eof():
            self.close()

    def _next(self) -> bytes:
        """Return the next piece for the protocol, empty when there is none yet."""
        tls, codec = self._tls, self._codec
        if codec is None:
            return tls.read() if tls is not None else b""
        while True:
            data = codec.read()
            if data or tls is None:
                return data
            inner = tls.read()
            if not inner:
                return b""
            codec.receive(inner)

    def _give_up(self, failure: FlintError) -> None:
        log.info("%s %s: %s: closing", self._peer_kind, format_peer(self.get_extra_info("peername")), failure)
        self._damage = failure
        self._send_tls_output()
        self.abort()

    def _is_input_ended(self) -> bool:
        """Whether a layer of the peer has said its end."""
        return (self._tls is not None and self._tls.is_ended) or (self._codec is not None and self._codec.is_ended)

    def _tell_eof(self) -> bool:
        """Tell the protocol once; whether it wants to go on writing."""
        if self._has_told_eof:
            return True
        self._has_told_eof = True
        return bool(self._protocol.eof_received())

    def _update_reading(self) -> None:
        below = self._below
        if below is None or below.is_closing():
            return
        wants_pause = self._is_read_paused or self._has_pull
        if wants_pause and not self._is_below_paused:
            self._is_below_paused = True
            below.pause_reading()
        elif self._is_below_paused and not wants_pause:
            self._is_below_paused = False
            below.resume_reading()

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write_below(self, data: bytes) -> None:
        below = self._below
        if below is None:
            return
        if self._tls is None:
            below.write(data)
            return
        try:
            self._tls.write(data)
        except TlsFailed as failure:
            self._give_up(failure)
        else:
            self._send_tls_output()

    def _send_tls_output(self) -> None:
        if self._tls is not None and self._below is not None:
            data = self._tls.take_output()
            if data:
                self._below.write(data)

    def _encode_soon(self) -> None:
        if not self._has_encode:
            self._has_encode = True
            self._loop.call_soon(self._encode_next)

    def _encode_next(self) -> None:
        self._has_encode = False
        if self._below is None or self._is_below_full or self._done is not None or not self._queue:
            return
        piece = self._queue.popleft()
        self._queued_bytes -= len(piece)
        self._write_below(self._codec.write(piece) if self._codec is not None else piece)
        if self._queue:
            self._encode_soon()
        elif self._last is not None:
            self._last(self._below)
        self._update_pressure()

    def _update_pressure(self) -> None:
        buffered = self.get_write_buffer_size()
        if not self._is_full and (self._is_below_full or buffered > WRITE_BUFFER_HIGH_BYTES):
            self._is_full = True
            self._protocol.pause_writing()
        elif self._is_full and not self._is_below_full and not self._queue:
            self._is_full = False
            self._protocol.resume_writing()

    def _when_written(self, last: Callable[[asyncio.Transport], None]) -> None:
        self._last = last
        if not self._queue and self._below is not None:
            last(self._below)

    def _end_tls(self) -> None:
        if self.tls is None:
            return
        try:
            self.tls.close()
        except TlsFailed as failure:
            peer = format_peer(self.get_extra_info("peername"))
            log.debug("%s %s: closing: %s", self._peer_kind, peer, failure)
        self._send_tls_output()

    def _end_output(self, below: asyncio.Transport) -> None:
        self._end_tls()
        if not below.is_closing():
            below.write_eof()

    def _end(self, below: asyncio.Transport) -> None:
        self._end_tls()
        below.close()

    # -- transport, for the protocol above -------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default if self._below is None else self._below.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._is_closing or self._below is None or self._below.is_closing()

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)

    def is_reading(self) -> bool:
        return not self._is_read_paused and not self.is_closing()

    def pause_reading(self) -> None:
        self._is_read_paused = True
        self._update_reading()

    def resume_reading(self) -> None:
        if self._is_read_paused:
            self._is_read_paused = False
            self._pull_soon()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._below is not None:
            self._below.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        below_bytes = self._below.get_write_buffer_size() if self._below is not None else 0
        return below_bytes + self._queued_bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._below is None or self._last is not None or not data:
            return
        plain = data if isinstance(data, bytes) else bytes(data)
        if self._done is None and not self._queue:
            if self._codec is None:
                self._write_below(plain)
                return
            if len(plain) <= ENCODE_BYTES_MAX:
                self._write_below(self._codec.write(plain))
                return
        self._queue.extend(plain[at : at + ENCODE_BYTES_MAX] for at in range(0, len(plain), ENCODE_BYTES_MAX))
        self._queued_bytes += len(plain)
        self._encode_soon()
        self._update_pressure()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._when_written(self._end_output)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._when_written(self._end)

    def abort(self) -> None:
        self._is_closing = True
        if self._below is not None:
            self._below.abort()


class SecureTransport(LayeredTransport):
    """Accepts a connection of a listener whose clients begin with TLS.

    Args:
        protocol: connected when the handshake is over; never, when it fails.
        tls: the server's side of the handshake.
    """

    def __init__(self, protocol: asyncio.Protocol, tls: TlsEngine, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(protocol, loop)
        self._engine = tls
        self._is_connected = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.start_tls(self._engine, b"", self._secured)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_connected:
            self._protocol = asyncio.Protocol()
        super().connection_lost(exc)

    def _secured(self, failure: TlsFailed | None) -> None:
        if failure is None:
            self._is_connected = True
            self._protocol.connection_made(self)
        else:
            log.info("TLS handshake with %s failed: %s", format_peer(self.get_extra_info("peername")), failure)
            self.close()
