"""Publishes MPUBs to one of several nsqds, several ahead of their answers.

The rules of this file: an MPUB counts as stored when nsqd answered OK, not before; what has no answer when a connection
breaks is sent again, so it may be stored twice; no more than ``maxInFlight`` MPUBs wait for an answer; order holds as
long as nothing fails.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct

from flintmq.errors import NsqdError, PublishRefused, RemoteProtocolError
from flintmq.spark.broker import FAILURES, NsqdConnection, is_final
from flintmq.spark.options import SinkOptions
from flintmq.spark.retry import Retries

COUNT_FIELD_BYTES = 4
_SIZE_AND_COUNT = Struct(">II")

# what nsqd says about a request that will never do, and the option that knows its limit
_LIMITS = {
    "E_BAD_MESSAGE": "a message is empty or longer than nsqd's --max-msg-size; maxMessageSize={0.max_message_size}",
    "E_BAD_BODY": "the MPUB is longer than nsqd's --max-body-size; batchBytes={0.batch_bytes}",
}


class Publisher:
    """Sends the MPUBs of one task; owns its connection.

    Args:
        addresses: nsqds in order of preference; the next one is taken when one fails.
        sleep: how to pause between attempts; seconds.
    """

    def __init__(
        self, addresses: Sequence[str], options: SinkOptions, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._addresses = addresses
        self._options = options
        self._link = options.link
        self._retries = Retries(options.retries, sleep)
        self._pending: deque[bytes] = deque()
        self._unsent = 0  # how many of the last pending ones this connection has not been given
        self._turn = 0
        self._refused_by: set[str] = set()
        self._connection: NsqdConnection | None = None

    def publish(self, topic: str, count: int, messages: memoryview) -> None:
        """Send one MPUB; returns before it is answered, unless too many are unanswered.

        Args:
            messages: ``count`` times size and body.

        Raises:
            PublishRefused: nsqd refuses this or an earlier MPUB for good.
            FlintError: no nsqd took it as often as the retries allow.
        """
        head = f"MPUB {topic}\n".encode() + _SIZE_AND_COUNT.pack(len(messages) + COUNT_FIELD_BYTES, count)
        self._pending.append(b"".join((head, messages)))
        self._unsent += 1
        self._pump(self._options.max_in_flight - 1)

    def finish(self) -> None:
        """Wait until every MPUB is answered, and close the connection.

        Raises:
            FlintError: as :meth:`publish`.
        """
        self._pump(0)
        self.close()

    def close(self) -> None:
        """Close the connection; what is not answered may or may not be stored."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _pump(self, in_flight_max: int) -> None:
        """Send what is unsent and take answers until at most ``in_flight_max`` MPUBs have none."""
        while self._unsent or len(self._pending) > in_flight_max:
            try:
                self._send_unsent()
                while len(self._pending) > in_flight_max:
                    self._take_answer()
            except FAILURES as error:
                was_connected = self._connection is not None
                self.close()
                self._unsent = len(self._pending)
                if is_final(error, self._address, self._link):
                    # what one nsqd has against this client another may not have; what it has against a message it has
                    self._refused_by.add(self._address)
                    if was_connected or self._refused_by.issuperset(self._addresses):
                        if isinstance(error, NsqdError):
                            raise self._refused(error) from error
                        raise
                self._turn += 1
                self._retries.failed(error, f"publishing to nsqd {self._address}")

    @property
    def _address(self) -> str:
        return self._addresses[self._turn % len(self._addresses)]

    def _send_unsent(self) -> None:
        options = self._options
        if self._connection is None:
            self._connection = NsqdConnection(self._address, options.connect_timeout, options.pub_timeout, self._link)
        while self._unsent:
            # after a failure there may be more to send again than may be unanswered; a window's worth at most
            self._connection.send(self._pending[len(self._pending) - self._unsent])
            self._unsent -= 1

    def _take_answer(self) -> None:
        assert self._connection is not None
        answer = self._connection.receive()
        if answer != b"OK":
            raise RemoteProtocolError("E_INVALID", f"nsqd {self._address} answered MPUB with {answer[:80]!r}")
        self._pending.popleft()
        self._retries.succeeded()

    def _refused(self, error: NsqdError) -> PublishRefused:
        hint = _LIMITS.get(error.code, "")
        detail = f"{error.detail} ({hint.format(self._options)})" if hint else error.detail
        return PublishRefused(error.code, detail, error.nsqd)
