"""A connection to nsqd on which one thing is asked at a time, and answered before the next is asked.

Rules of this file:

- :meth:`RequestConnection.answer_to` ends by its deadline. After anything but an answer the connection is lost and
  closed: an answer that comes late would be taken for the next one's.
- Heartbeats are answered while an answer is waited for, and by :meth:`RequestConnection.attend` in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from flintmq.client.blocking.connection import Connection
from flintmq.client.blocking.stream import Stream, Time
from flintmq.client.options import ConnectionOptions
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError, NsqdError
from flintmq.wire.client import MessageFailed, Messages


class _Nobody:
    """Owns a connection that only asks, and does not pump it."""

    is_waiting = False

    def wake(self) -> None: ...
    def watch(self, connection: Connection, is_choked: bool) -> None: ...
    def unwatch(self, connection: Connection) -> None: ...
    def on_settled(self, connection: Connection, finished: Sequence[bytes], requeued: int, dropped: int) -> None: ...
    def on_lost(self, connection: Connection, error: FlintError) -> None: ...

    def on_messages(self, connection: Connection, messages: Messages) -> None:
        connection.abort("it sent messages to a connection that only asks")

    def on_message_failed(self, connection: Connection, failure: MessageFailed) -> None:
        connection.abort(f"it refused a {failure.command} that was never sent")


_NOBODY = _Nobody()


class RequestConnection(Connection):
    """One connection, opened.

    Args:
        desired_tag: tell nsqd that headers are understood, and which messages to be given first (empty: any).
        once: take only an nsqd that knows producer sequences.

    Attributes:
        used_at: when it was asked last, seconds on the owner's clock.

    Raises:
        ConnectionFailed, NsqdError, RemoteProtocolError: as :meth:`Connection.open`.
    """

    def __init__(
        self,
        address: str,
        options: ConnectionOptions,
        env: Env,
        time: Time,
        desired_tag: str | None = None,
        once: bool = False,
    ) -> None:
        super().__init__(address, _NOBODY, options, time, nullcontext(), _NOBODY)
        self._open(env, desired_tag is not None, desired_tag or "", once)
        self.used_at = self.opened_at

    @property
    def stream(self) -> Stream:
        """The socket with its layers."""
        return self._stream

    @property
    def was_refused(self) -> bool:
        """Whether nsqd closed it because of what was asked; nsqd itself is well then."""
        return isinstance(self.lost_because, NsqdError)

    @property
    def reason(self) -> str:
        """Return why it was lost, in words."""
        error = self.lost_because
        return error.reason if isinstance(error, ConnectionFailed) else str(error or "")

    def attend(self) -> None:
        """Answer heartbeats that have come, and notice when the connection is over; waits for nothing."""
        if self.is_lost:
            return
        self.on_readable()
        self.flush()
        self.on_writable()
        if self._is_silent:
            self.abort(f"nothing was received for {self._silence_s:g} s")
