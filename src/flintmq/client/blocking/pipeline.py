"""A connection to nsqd on which requests are sent ahead of their answers, and answers go where the caller wants them.

Rules of this file:

- Up to the end of the handshake it is a :class:`flintmq.client.blocking.request_connection.RequestConnection`, so TLS,
  compression and AUTH are as everywhere; from then on frames are read here, because a large answer is received straight
  into the caller's memory.
- Every wait ends after ``timeout_s``. A connection that failed in any way is closed and never used again.
- Answers come in the order of the requests; nsqd is asked for no heartbeats, as nobody would answer them while the
  connection lies idle. Those of an nsqd that sends some nevertheless are answered while an answer is waited for.

Source: NSQ's TCP protocol.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

from flintmq.client.blocking.request_connection import RequestConnection
from flintmq.client.blocking.stream import Time
from flintmq.client.core.handshake import refusal
from flintmq.client.options import ConnectionOptions
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError, NsqdError, RemoteProtocolError
from flintmq.message import FRAME_HEADER, SIZE_FIELD_BYTES
from flintmq.wire.commands import NOP
from flintmq.wire.frames import ERROR, HEARTBEAT, RESPONSE
from flintmq.wire.identify import IdentifyRequest

ANSWER_SIZE_MAX = 16 << 20


class SilentOptions(ConnectionOptions):
    """Options of a connection on which nsqd sends no heartbeats."""

    __slots__ = ()

    def identify_request(self, hostname: str, version: str) -> IdentifyRequest:
        """Return what the client says about itself."""
        request = ConnectionOptions.identify_request(self, hostname, version)
        return msgspec.structs.replace(request, heartbeat_interval=-1)


class Pipeline:
    """One connection.

    Every method but :meth:`close`, :meth:`interrupt` and :meth:`is_usable` raises ``ConnectionFailed`` when the
    connection breaks or a wait is too long, ``NsqdError`` when nsqd answers an error, ``RemoteProtocolError`` when it
    answers nonsense.

    Args:
        timeout_s: until nsqd must have taken a request, or sent the rest of an answer.

    Attributes:
        layers: what its bytes go through, lowest first.

    Raises:
        ConnectionFailed: nsqd cannot be reached, does not answer in time, or cannot be secured (TlsRefused).
        NsqdError: nsqd refuses this client.
        RemoteProtocolError: it is not an nsqd.
    """

    def __init__(self, address: str, options: SilentOptions, env: Env, time: Time, timeout_s: float) -> None:
        self.address = address
        self._connection = RequestConnection(address, options, env, time)
        self.layers = self._connection.layers
        self._stream = self._connection.stream
        self._time = time
        self._timeout_s = timeout_s
        self._head = memoryview(bytearray(FRAME_HEADER.size))

    def close(self) -> None:
        """Close the connection; harmless when it is closed."""
        self._connection.close()

    def interrupt(self) -> None:
        """Have whoever waits for an answer fail at once; another thread than theirs may call this, and only this."""
        self._stream.interrupt()

    def is_usable(self) -> bool:
        """Whether an idle connection still stands: nothing has arrived on it, not even its end."""
        try:
            return not (self._stream.more() or self._stream.read())
        except FlintError:
            return False

    def send(self, data: bytes) -> None:
        """Send all of ``data``."""
        try:
            self._stream.send(data, self._time() + self._timeout_s)
        except (TimeoutError, FlintError) as error:
            self._fail(error)

    def receive(self, size_max: int = ANSWER_SIZE_MAX) -> bytes:
        """Wait for the answer to the oldest request that has none.

        Args:
            size_max: a longer answer is a broken one.
        """
        while True:
            answer = self.receive_bytes(self.receive_head(size_max))
            if answer != HEARTBEAT:
                return answer
            self.send(NOP)

    def receive_head(self, size_max: int) -> int:
        """Wait for the head of an answer, or of a heartbeat, and return how many bytes follow."""
        self.receive_into(self._head)
        size, frame_type = FRAME_HEADER.unpack(self._head)
        size -= FRAME_HEADER.size - SIZE_FIELD_BYTES
        if not 0 <= size <= size_max:
            raise self.broken(f"a frame of {size} bytes; at most {size_max} were due")
        if frame_type == ERROR:
            code, _, detail = self.receive_bytes(size).decode("utf-8", "backslashreplace").partition(" ")
            raise self.refused(code, detail)
        if frame_type != RESPONSE:
            raise self.broken(f"a frame of type {frame_type} where a response was due")
        return int(size)

    def receive_bytes(self, size: int) -> bytes:
        """Wait for the next ``size`` bytes."""
        if not size:
            return b""
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_into(self, view: memoryview) -> None:
        """Wait for the next bytes, as many as ``view`` has room for."""
        try:
            self._stream.receive_into(view, self._time() + self._timeout_s)
        except (TimeoutError, FlintError) as error:
            self._fail(error)

    def refused(self, code: str, detail: str) -> NsqdError:
        """The exception for an error that nsqd answered."""
        return refusal(code, detail, self.address, was_let_in=True)

    def broken(self, detail: str) -> RemoteProtocolError:
        """Close, and return the exception for an answer that no nsqd gives."""
        self._connection.abort(detail)
        return RemoteProtocolError("E_INVALID", f"nsqd {self.address} sent {detail}")

    def _fail(self, error: Exception) -> NoReturn:
        reason = str(error).replace("the peer", "nsqd")
        if isinstance(error, TimeoutError):
            reason = f"no answer within {self._timeout_s:g} s"
        self._connection.abort(reason)
        raise ConnectionFailed(self.address, reason) from error
