"""One TCP connection to nsqd on a blocking socket: :class:`flintmq.client.core.link.Link` with a stream around it.

It has two lives: first it belongs to one thread, which opens it, asks and waits for answers; a consumer then takes it
in (:meth:`Connection.begin_pumping`) and pumps it together with others.

Rules of this file:

- A pumped connection is touched with the owner's lock held, or takes it; only :meth:`finish` and :meth:`finish_all`
  need none.
- An answer that does not come in time is the end of a connection: a late one would be taken for the next one's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf
from typing import Protocol

from flintmq.client.blocking.handshake import open_stream
from flintmq.client.blocking.stream import Stream, Time
from flintmq.client.core.link import Answered, AnswerLost, Link, LinkOwner
from flintmq.client.core.timers import Timers
from flintmq.client.options import ConnectionOptions, seconds
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError, TouchFailed


class Pump(Protocol):
    """The one that waits for the sockets.

    Attributes:
        is_waiting: somebody does now.
    """

    is_waiting: bool

    def wake(self) -> None:
        """End the wait."""

    def watch(self, connection: Connection, is_choked: bool) -> None:
        """Wait for the socket to be readable; also until it takes more, if it is choked."""

    def unwatch(self, connection: Connection) -> None:
        """Wait for the socket no longer; it still has its number."""


ConnectionOwner = LinkOwner["Connection"]


class Connection(Link):
    """A connection after its handshake. Make it with :meth:`open`.

    Args:
        lock: the owner's.
        pump: that it belongs to later.

    Attributes:
        has_left: nsqd has confirmed the end of the subscription.
    """

    _stream: Stream

    def __init__(
        self,
        address: str,
        owner: ConnectionOwner,
        options: ConnectionOptions,
        time: Time,
        lock: AbstractContextManager[object],
        pump: Pump,
    ) -> None:
        super().__init__(address, owner, options, time)
        self.has_left = False
        self._pump = pump
        self._lock = lock
        self._is_pumped = False

    # --- life ---

    @classmethod
    def open(
        cls,
        address: str,
        owner: ConnectionOwner,
        options: ConnectionOptions,
        env: Env,
        time: Time,
        lock: AbstractContextManager[object],
        pump: Pump,
        *,
        extended: bool = False,
        desired_tag: str = "",
        once: bool = False,
    ) -> Connection:
        """Connect, identify, put in TLS and compression, authorise.

        Args:
            extended: tell nsqd that headers are understood; only for topics that have them.
            desired_tag: with ``extended``: the messages to be given first.
            once: take only an nsqd that knows producer sequences.

        Raises:
            ConnectionFailed: nsqd cannot be reached, does not answer in time, or cannot be secured (TlsRefused).
            NsqdError: nsqd refuses what was asked for.
            RemoteProtocolError: it is not an nsqd.
        """
        connection = cls(address, owner, options, time, lock, pump)
        connection._open(env, extended, desired_tag, once)
        return connection

    def _open(self, env: Env, extended: bool, desired_tag: str, once: bool) -> None:
        handshake = self.new_handshake(env, extended, desired_tag, once)
        self._stream = open_stream(handshake, self._options, self._time)
        self._begin(handshake)

    def request(self, command: str, send: Callable[[Answered], None]) -> None:
        """Send a command and wait for its answer, at most for the connect timeout; not when the connection is pumped.

        Args:
            send: calls a command of this connection.

        Raises:
            NsqdError: nsqd refuses.
            ConnectionFailed: the connection was lost, or nsqd does not answer in time.
        """
        timeout_s = seconds(self._options.connect_timeout, "connect_timeout")
        late = f"{command} was not answered within {timeout_s:g} s"
        self.answer_to(send, self._time() + timeout_s, late)

    def answer_to(
        self,
        send: Callable[[Answered], None],
        deadline: float,
        late: str = "a command was not answered in time",
        look_at: float = inf,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> bytes:
        """Send a command and wait for its answer; not when the connection is pumped.

        Args:
            send: calls a command of this connection.
            deadline: seconds on its clock.
            late: why the connection is lost when there is no answer by then.
            look_at: when to ask ``gives_up`` once whether to wait no longer.

        Raises:
            NsqdError: nsqd refuses.
            ConnectionFailed: the connection was lost; AnswerLost if it was while waiting.
        """
        if self.is_lost:
            raise ConnectionFailed(self.address, "the connection is closed")
        outcomes: list[bytes | FlintError] = []
        send(outcomes.append)
        is_sent = False
        try:
            self._stream.send(self.take_output(), deadline)
            is_sent = True
            until = min(look_at, deadline)
            while not outcomes:
                try:
                    self.feed(self._stream.receive(until))
                except TimeoutError:
                    if until == deadline or gives_up():
                        raise
                    until = deadline
                    continue
                if self._out:
                    self._stream.put(self.take_output())
        except TimeoutError:
            self.abort(late)
        except FlintError as error:
            self.abort(str(error))
        except BaseException:  # Ctrl-C: the answer may still come
            self.abort("interrupted")
            raise
        outcome = outcomes[0]
        if isinstance(outcome, bytes):
            return outcome
        if isinstance(outcome, AnswerLost):
            outcome.maybe_executed &= is_sent
        raise outcome

    def begin_pumping(self, timers: Timers) -> None:
        """Belong to the pump from now on."""
        self._is_pumped = True
        self._pump.watch(self, is_choked=False)
        self._watch_silence(timers)

    def end_subscription(self) -> None:
        """Ask for no more messages; :attr:`has_left` says when nsqd has executed everything that was sent."""
        self.flush()
        if not self.is_lost:
            self.cls(self._note_left)
            self.flush()

    def _note_left(self, outcome: bytes | FlintError) -> None:
        self.has_left = isinstance(outcome, bytes)

    def close(self) -> None:
        """Send what is gathered and close."""
        self.flush()
        self._lose(ConnectionFailed(self.address, "closed by this client"), is_polite=True)

    def abandon(self) -> None:
        """In a forked child: this is the parent's."""
        self.is_lost = True

    def fileno(self) -> int:
        """For a selector."""
        return self._stream.fileno()

    @property
    def ends(self) -> tuple[str, str]:
        """IP addresses of this end and of nsqd's; empty when there are none, or none any more."""
        return self._stream.ends

    # --- Link ---

    def flush_soon(self) -> None:
        """Have it written by whoever pumps, who looks at the connection before waiting."""
        self._is_flush_due = True
        if self._pump.is_waiting:
            self._pump.wake()

    def flush(self) -> None:
        """Write what was gathered."""
        if output := self.take_output():
            self._while_open(lambda: self._stream.put(output))

    def _lose(self, error: FlintError, is_polite: bool = False) -> None:
        was_lost = self.is_lost
        try:
            super()._lose(error, is_polite)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: who is not told of the loss would neither connect again nor free what was held
            if not was_lost:
                self.is_lost = True
                self.lost_because = error
                try:
                    self._disconnect(is_polite=False)
                finally:
                    self._owner.on_lost(self, error)
            raise

    def _disconnect(self, is_polite: bool) -> None:
        if self._is_pumped:
            self._pump.unwatch(self)
        if is_polite:
            self._stream.close()
        else:
            self._stream.abort()

    def requeue(self, message_id: bytes, delay_ms: int) -> None:
        """Give a message back, to be delivered again after ``delay_ms``; from any thread."""
        with self._lock:
            super().requeue(message_id, delay_ms)

    def touch(self, message_id: bytes, failed: Callable[[TouchFailed], None]) -> None:
        """Restart a message's timeout; ``failed`` is called when it was too late. From any thread."""
        with self._lock:
            super().touch(message_id, failed)
            self.flush()  # the application may be about to compute for long

    def forget_touched(self, message_id: bytes) -> None:
        """Forget the ``failed`` callback of a message that is being answered; from any thread."""
        with self._lock:
            super().forget_touched(message_id)

    def drop(self) -> None:
        """Note that a message is done with and nsqd has taken it back already; from any thread."""
        with self._lock:
            super().drop()

    # --- pumping ---

    def on_readable(self) -> None:
        """Read once and handle what came."""
        self._while_open(self._read)

    def _read(self) -> None:
        piece = self._stream.more() or self._stream.read()
        while piece and not self.is_lost:
            self.feed(piece)
            piece = self._stream.more()

    def on_writable(self) -> None:
        """Send more of what the kernel did not take."""
        self._while_open(self._stream.send_unsent)

    def _while_open(self, transfer: Callable[[], object]) -> None:
        """Read or write, and lose the connection when that is not possible any more."""
        try:
            transfer()
        except FlintError as error:
            self._lose(ConnectionFailed(self.address, str(error)))
        else:
            is_choked = self._stream.unsent_bytes > 0
            if is_choked != self.is_write_paused and not self.is_lost:
                self.is_write_paused = is_choked
                self._pump.watch(self, is_choked)
