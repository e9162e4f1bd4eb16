"""A TCP connection with its layers (TLS, compression) on a socket that never blocks.

::

    plain bytes  <->  compression  <->  TLS  <->  socket

Rules of this file:

- Waiting happens only in methods that take a deadline: seconds on the owner's clock.
- Reading is pulled: one piece at a time comes out of the layers, so a small input that swells is no danger here.
- What the kernel does not take at once is kept and sent when the socket is ready; ``unsent_bytes`` bounds nothing by
  itself, callers wait (:meth:`Stream.send`) or write no more than they were asked for (a consumer's answers).

Source: NSQ's TCP protocol.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from flintmq.client.blocking.fork import watch
from flintmq.client.blocking.gone import close_with
from flintmq.client.options import split_address, why_unreachable
from flintmq.errors import ConnectionFailed, FlintError
from flintmq.net.tls_engine import StandardTls, TlsFailed, TlsInterrupted

if TYPE_CHECKING:
    from flintmq.wire.codec import Codec

READ_SIZE = 128 * 1024
LAYERED_READ_SIZE = 64 * 1024

Time = Callable[[], float]


class StreamEnded(FlintError):
    """The connection is over: closed by the peer, or broken."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Stream:
    """One connection.

    Args:
        connected: a socket.
        time: the clock of all deadlines.
    """

    __slots__ = ("unsent_bytes", "_socket", "_time", "_poll", "_tls", "_codec", "_unsent", "_read", "__weakref__")

    def __init__(self, connected: socket.socket, time: Time) -> None:
        connected.setblocking(False)
        self.unsent_bytes = 0
        self._socket = connected
        self._time = time
        self._poll: select.poll | None = None
        self._tls: StandardTls | None = None
        self._codec: Codec | None = None
        self._unsent = bytearray()
        self._read = b""
        watch(self)
        close_with(self, connected.close)

    def after_fork(self) -> None:
        """In a child: the connection is the parent's, which would otherwise not be rid of it when it closes it."""
        self._socket.close()

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    @property
    def ends(self) -> tuple[str, str]:
        """IP addresses of this end and of the peer's; empty when there are none, or none any more."""
        return _ip_of(self._socket.getsockname), _ip_of(self._socket.getpeername)

    # --- layers ---

    def start_tls(self, engine: StandardTls, received: bytes, deadline: float) -> None:
        """Put TLS in; ``received`` was read already and belongs to it.

        Raises:
            TlsFailed: the handshake failed; an alert may have been sent.
            TimeoutError: it was not over in time.
        """
        engine.receive(received)
        while True:
            try:
                is_over = engine.handshake()
            finally:
                self._send_raw(engine.take_output())
            if is_over:
                break
            self._wait(select.POLLIN, deadline)
            try:
                engine.receive(self._read_raw())
            except StreamEnded as error:
                raise TlsInterrupted(error.reason) from error
        self._tls = engine

    def start_codec(self, codec: Codec, received: bytes) -> None:
        """Put compression in, above TLS."""
        codec.receive(received)
        self._codec = codec

    # --- reading ---

    def give_back(self, piece: bytes) -> None:
        """Have ``piece`` read again, before anything else."""
        assert not self._read
        self._read = piece

    def read(self) -> bytes:
        """Read once from the socket and return the first piece; empty when there is none yet.

        Raises:
            StreamEnded, TlsFailed, CorruptStream: nothing more will come.
        """
        data = self._read_raw()
        if self._tls is None and self._codec is None:
            return data
        if data:
            (self._tls or self._codec).receive(data)  # type: ignore[union-attr] # one of them is there
        return self.more()

    def more(self) -> bytes:
        """The next piece of what was read already; empty when there is none.

        Raises:
            StreamEnded, TlsFailed, CorruptStream: nothing more will come.
        """
        if self._read:
            piece, self._read = self._read, b""
            return piece
        codec = self._codec
        if codec is None:
            return b"" if self._tls is None else self._read_tls(self._tls)
        while not (piece := codec.read()):
            if codec.is_ended:
                raise StreamEnded("closed by the peer")
            if self._tls is None or not (plain := self._read_tls(self._tls)):
                return b""
            codec.receive(plain)
        return piece

    def receive(self, deadline: float) -> bytes:
        """Wait for the next piece.

        Raises:
            TimeoutError: nothing came in time.
            StreamEnded, TlsFailed, CorruptStream: nothing more will come.
        """
        if piece := self.more():
            return piece
        while True:
            self._wait(select.POLLIN, deadline)
            if piece := self.read():
                return piece

    def receive_into(self, view: memoryview, deadline: float) -> None:
        """Wait until ``view`` is filled; what comes behind stays for the next read.

        Raises:
            TimeoutError: not all of it came in time.
            StreamEnded, TlsFailed, CorruptStream: nothing more will come.
        """
        if view and self._tls is None and self._codec is None and not self._read:  # straight from the kernel
            while (size := self._read_raw_into(view)) < len(view):
                view = view[size:]
                self._wait(select.POLLIN, deadline)
            return
        while view:
            piece = self.receive(deadline)
            size = min(len(piece), len(view))
            view[:size] = piece[:size]
            if size < len(piece):
                self.give_back(piece[size:])
            view = view[size:]

    def _read_tls(self, tls: StandardTls) -> bytes:
        plain = tls.read()
        if output := tls.take_output():  # an answer to the peer's new keys
            self._send_raw(output)
        if not plain and tls.is_ended:
            raise StreamEnded("closed by the peer")
        return plain

    def _read_raw(self) -> bytes:
        try:
            data = self._socket.recv(READ_SIZE if self._tls is None and self._codec is None else LAYERED_READ_SIZE)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise StreamEnded(error.strerror or str(error)) from error
        if not data:
            raise StreamEnded("closed by the peer")
        return data

    def _read_raw_into(self, view: memoryview) -> int:
        try:
            size = self._socket.recv_into(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise StreamEnded(error.strerror or str(error)) from error
        if not size:
            raise StreamEnded("closed by the peer")
        return size

    # --- writing ---

    def put(self, data: bytes) -> None:
        """Send as much as the kernel takes at once, and keep the rest.

        Raises:
            StreamEnded, TlsFailed: the connection is over.
        """
        if self._codec is not None:
            data = self._codec.write(data)
        if self._tls is not None:
            self._tls.write(data)
            data = self._tls.take_output()
        self._send_raw(data)

    def send(self, data: bytes, deadline: float) -> None:
        """Send all of it.

        Raises:
            TimeoutError: the peer did not take it in time.
            StreamEnded, TlsFailed: the connection is over.
        """
        self.put(data)
        while self.unsent_bytes:
            self._wait(select.POLLOUT, deadline)
            self.send_unsent()

    def send_unsent(self) -> None:
        """Go on with what was kept.

        Raises:
            StreamEnded: the connection is over.
        """
        if self._unsent:
            del self._unsent[: self._send_some(self._unsent)]
            self.unsent_bytes = len(self._unsent)

    def _send_raw(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            self.send_unsent()
        elif data and (sent := self._send_some(data)) < len(data):
            self._unsent += memoryview(data)[sent:]
            self.unsent_bytes = len(self._unsent)

    def _send_some(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise StreamEnded(error.strerror or str(error)) from error

    # --- waiting and ending ---

    def _wait(self, mask: int, deadline: float) -> None:
        left_s = deadline - self._time()
        if self._poll is None:
            self._poll = select.poll()
        self._poll.register(self._socket, mask)
        if left_s <= 0 or not self._poll.poll(left_s * 1000):
            raise TimeoutError

    def close(self) -> None:
        """Say goodbye as far as that needs no waiting, and close."""
        if self._tls is not None and not self._unsent:
            try:
                self._tls.close()
                self._send_raw(self._tls.take_output())
            except (StreamEnded, TlsFailed):
                pass  # it was over already: there is nobody to say goodbye to
        self.abort()

    def interrupt(self) -> None:
        """Have whoever waits, in another thread, find that the connection is over; it is theirs to close."""
        with suppress(OSError):  # it was over already
            self._socket.shutdown(socket.SHUT_RDWR)

    def abort(self) -> None:
        """Close at once."""
        self._socket.close()


def _ip_of(name: Callable[[], object]) -> str:
    try:
        found = name()
    except OSError:
        return ""
    return str(found[0]) if isinstance(found, tuple) and found else ""


def connect(address: str, deadline: float, time: Time) -> Stream:
    """Connect to ``host:port``; every address of the host is tried. Resolving a name may take longer than the deadline.

    Raises:
        ConnectionFailed: none can be reached.
        TimeoutError: none could be in time.
    """
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectionFailed(address, why_unreachable(error)) from error
    reason = "no address"
    for number, (family, kind, protocol, _, target) in enumerate(found):
        now = time()
        try:
            until = now + (deadline - now) / (len(found) - number)
            return Stream(_connected(socket.socket(family, kind, protocol), target, until, time), time)
        except TimeoutError:
            reason = ""
        except OSError as error:
            reason = why_unreachable(error)
    if not reason:
        raise TimeoutError
    raise ConnectionFailed(address, reason)


def _connected(made: socket.socket, target: object, deadline: float, time: Time) -> socket.socket:
    """Connect a fresh socket, or close it."""
    try:
        left_s = deadline - time()
        if left_s <= 0:
            raise TimeoutError
        made.settimeout(left_s)
        made.connect(target)  # type: ignore[arg-type] # what getaddrinfo gave for this family
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        made.close()
        raise
    return made
