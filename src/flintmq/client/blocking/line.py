"""A connection to nsqd on which one thing is asked at a time, and answered before the next is asked.

Rules of this file:

- :meth:`Line.ask` ends by its deadline. After anything but an answer the line is lost and closed: an answer that comes
  late would be taken for the next one's.
- Heartbeats are answered while an answer is waited for, and by :meth:`Line.attend` in between.
"""

from __future__ import annotations

from typing import NoReturn

from flintmq.client.blocking.opening import open_stream
from flintmq.client.blocking.stream import Time
from flintmq.client.core.handshake import refusal
from flintmq.client.options import ConnectionOptions, seconds
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError, NsqdError
from flintmq.wire.client import Broken, ClientConnection, Event, Features, Heartbeat, Refused, Reply

HEARTBEATS_MISSED_MAX = 2


class Unanswered(ConnectionFailed):
    """The connection was lost, or the deadline passed, before nsqd answered.

    Attributes:
        maybe_executed: False when nsqd cannot have had the whole command.
        is_late: the deadline passed.
    """

    def __init__(self, address: str, reason: str, maybe_executed: bool, is_late: bool) -> None:
        super().__init__(address, reason)
        self.maybe_executed = maybe_executed
        self.is_late = is_late


class Line:
    """One connection.

    Args:
        desired_tag: tell nsqd that headers are understood, and which messages to be given first (empty: any).
        once: take only an nsqd that knows producer sequences.

    Attributes:
        address: ``host:port``.
        features: what nsqd granted.
        layers: what its bytes go through, lowest first.
        wire: builds commands.
        is_lost: it is closed, and ``reason`` says why.
        was_refused: nsqd closed it because of what was asked; nsqd itself is well.
        opened_at, used_at: seconds on the owner's clock.
    """

    __slots__ = (
        "address", "features", "layers", "wire", "stream", "is_lost", "reason", "was_refused", "opened_at",
        "used_at", "_time", "_heard_at", "_silence_s", "_can_renew_secret", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        address: str,
        options: ConnectionOptions,
        env: Env,
        time: Time,
        desired_tag: str | None = None,
        once: bool = False,
    ) -> None:
        self.address = address
        self.wire = ClientConnection(options.frame_size_max)
        self.stream, handshake = open_stream(address, self.wire, options, env, time, desired_tag, once)
        self.features: Features = handshake.features
        self.layers: tuple[str, ...] = handshake.layers
        self.is_lost = False
        self.reason = ""
        self.was_refused = False
        self._time = time
        self.opened_at = self.used_at = self._heard_at = time()
        self._silence_s = HEARTBEATS_MISSED_MAX * seconds(options.heartbeat_interval, "heartbeat_interval")
        self._can_renew_secret = callable(options.auth_secret)

    def describe(self) -> str:
        """Say in one line where the connection stands."""
        return f"{self.address} {self.wire.describe()} layers={'+'.join(self.layers) or '-'} lost={self.is_lost}"

    def ask(self, command: bytes, deadline: float) -> bytes:
        """Send a command that ``wire`` has built and return nsqd's answer.

        Raises:
            NsqdError: nsqd refuses.
            Unanswered: the connection was lost, or nsqd does not answer in time.
        """
        is_sent = False
        try:
            self.stream.send(command, deadline)
            is_sent = True
            while True:
                answer = self._take(self.wire.receive(self.stream.receive(deadline)))
                if answer is not None:
                    self.used_at = self._heard_at = self._time()
                    return answer
        except NsqdError:
            raise
        except TimeoutError as error:
            self.abort("a command was not answered in time")
            raise Unanswered(self.address, "no answer in time", is_sent, is_late=True) from error
        except FlintError as error:
            self.abort(str(error))
            raise Unanswered(self.address, str(error), is_sent, is_late=False) from error
        except BaseException:  # Ctrl-C: the answer may still come
            self.abort("interrupted")
            raise

    def _take(self, events: list[Event]) -> bytes | None:
        """The answer among the events, if it is there."""
        answer: bytes | None = None
        refused: Refused | None = None
        for event in events:
            if isinstance(event, Reply):
                answer = event.data
            elif isinstance(event, Heartbeat):
                self.stream.put(self.wire.nop())
            elif isinstance(event, Refused):
                refused = event
            else:
                self._unexpected(event)
        if refused is not None:
            if refused.is_fatal:
                self.was_refused = True
                self.abort(refused.code)
            raise refusal(refused.code, refused.detail, self.address, self._can_renew_secret)
        return answer

    def _unexpected(self, event: Event) -> NoReturn:
        if isinstance(event, Broken):
            raise event.error
        raise ConnectionFailed(self.address, f"it sent {type(event).__name__} to a connection that only asks")

    def attend(self) -> None:
        """Answer heartbeats that have come, and notice when the connection is over; waits for nothing."""
        try:
            piece = self.stream.more() or self.stream.read()
            while piece:
                self._heard_at = self._time()
                if self._take(self.wire.receive(piece)) is not None:
                    raise ConnectionFailed(self.address, "it answered what was not asked")
                piece = self.stream.more()
            self.stream.send_unsent()
        except FlintError as error:
            self.abort(str(error))
        if self._time() - self._heard_at > self._silence_s:
            self.abort(f"nothing was received for {self._silence_s:g} s")

    def close(self) -> None:
        """Close politely."""
        if not self.is_lost:
            self.is_lost = True
            self.reason = "closed by this client"
            self.stream.close()

    def abort(self, reason: str) -> None:
        """Close at once."""
        if not self.is_lost:
            self.is_lost = True
            self.reason = reason
            self.stream.abort()
