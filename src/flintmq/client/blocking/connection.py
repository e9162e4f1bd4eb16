"""A subscribed connection: what a consumer's messages come over and their answers go out on.

Rules of this file:

- Everything but :meth:`Connection.finish` is called with the consumer's lock held, or takes it. ``finish`` only appends
  to a list that nobody but :meth:`Connection.flush` shortens, and that from the front: no FIN is lost, no lock taken.
- What is sent between two waits is one write; FINs become bytes as one run.
- A connection is lost once, whatever the cause. Nothing is written after that, but answers of the application are still
  counted, because its messages count against ``max_in_flight``.
- Nothing from nsqd for two heartbeat intervals: the connection is lost (reference/nsq.md 1.8).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from flintmq.client.blocking.line import HEARTBEATS_MISSED_MAX, Line
from flintmq.client.blocking.timers import CallTimer, Timers
from flintmq.client.core.handshake import refusal
from flintmq.client.options import MS_PER_S, ConnectionOptions, seconds
from flintmq.client.routing import Target
from flintmq.errors import ConnectionFailed, FlintError, TouchFailed
from flintmq.wire.client import Broken, Heartbeat, MessageFailed, Messages, Record, Refused, Reply


class ConnectionOwner(Protocol):
    """Who is told what happens on a connection, and pumps it."""

    is_waiting: bool

    def wake(self) -> None:
        """End the wait of whoever waits for the sockets."""

    def watch(self, connection: Connection, is_choked: bool) -> None:
        """Wait for the socket to take more, or no longer."""

    def on_messages(self, connection: Connection, records: list[Record]) -> None: ...
    def on_message_failed(self, connection: Connection, failure: MessageFailed) -> None: ...
    def on_settled(self, connection: Connection, finished: int, requeued: int, let_go: int) -> None:
        """So many messages were finished, requeued, or let go without an answer; called before that is written."""

    def on_lost(self, connection: Connection, error: FlintError) -> None: ...


class Connection:
    """One connection; a :class:`flintmq.client.core.message.Link`.

    Args:
        line: subscribed; it is this object's from now on.
        lock: the owner's.
        target: what is subscribed; the whole nsqd if None.
        is_ordered: the subscription is in order.
        is_extended: nsqd was told that headers are understood.
        is_located: bodies have their position in front.

    Attributes:
        address: ``host:port``.
        features: what nsqd granted.
        layers: what its bytes go through, lowest first.
        lost_because: why it was lost, or None.
        has_left: nsqd has confirmed the end of the subscription.
        partition: that is subscribed; None: no partition.
        has_prefixes: something stands in front of bodies.
    """

    def __init__(
        self,
        line: Line,
        owner: ConnectionOwner,
        options: ConnectionOptions,
        timers: Timers,
        lock: AbstractContextManager[object],
        target: Target | None = None,
        *,
        is_ordered: bool = False,
        is_extended: bool = False,
        is_located: bool = False,
    ) -> None:
        self.address = line.address
        self.target = target or Target(line.address)
        self.partition = self.target.partition
        self.is_ordered = is_ordered
        self.is_extended = is_extended
        self.is_located = is_located or is_ordered
        self.has_prefixes = self.is_located or is_extended
        self.features = msgspec.structs.replace(line.features, max_rdy_count=1) if is_ordered else line.features
        self.layers = line.layers
        self.msg_timeout_s = self.features.msg_timeout / MS_PER_S
        self.max_msg_timeout_s = self.features.max_msg_timeout / MS_PER_S
        self.opened_at = line.opened_at
        self.is_lost = False
        self.lost_because: FlintError | None = None
        self.has_left = False
        self._owner = owner
        self._timers = timers
        self._lock = lock
        self._stream = line.stream
        self._wire = line.wire
        self._can_renew_secret = callable(options.auth_secret)
        self._out: list[bytes] = []
        self._finished: list[bytes] = []
        self._requeued_count = 0
        self._let_go_count = 0
        self._touched: dict[bytes, Callable[[TouchFailed], None]] = {}
        self._is_choked = False
        self._heard_at = timers.time()
        self._silence_s = HEARTBEATS_MISSED_MAX * seconds(options.heartbeat_interval, "heartbeat_interval")
        self._silence_timer: CallTimer = timers.call_later(self._silence_s, self._watch_silence)

    def describe(self) -> str:
        """Say in one line where the connection stands."""
        where = self.address if self.partition is None else f"{self.address}/{self.partition}"
        return f"{where} {self._wire.describe()} layers={'+'.join(self.layers) or '-'} lost={self.is_lost}"

    def fileno(self) -> int:
        """For a selector."""
        return self._stream.fileno()

    @property
    def ends(self) -> tuple[str, str]:
        """IP addresses of this end and of nsqd's."""
        return self._stream.ends

    # --- what messages need (message.Link) ---

    def finish(self, message_id: bytes) -> None:
        """Finish a message; from any thread."""
        self._finished.append(message_id)
        if self._owner.is_waiting:
            self._owner.wake()

    def finish_all(self, message_ids: list[bytes]) -> None:
        """Finish several messages; from any thread."""
        self._finished += message_ids
        if self._owner.is_waiting:
            self._owner.wake()

    def requeue(self, message_id: bytes, delay_ms: int) -> None:
        """Give a message back, to be delivered again after ``delay_ms``; from any thread."""
        with self._lock:
            self._requeued_count += 1
            if not self.is_lost:
                self._out.append(self._wire.requeue(message_id, delay_ms))
        self._owner.wake()

    def touch(self, message_id: bytes, failed: Callable[[TouchFailed], None]) -> None:
        """Restart a message's timeout; ``failed`` is called when it was too late. From any thread."""
        with self._lock:
            if not self.is_lost:
                self._touched[message_id] = failed
                self._out.append(self._wire.touch(message_id))
                self.flush()  # the application may be about to compute for long

    def forget_touched(self, message_id: bytes) -> None:
        """Forget the ``failed`` callback of a message that is being answered; from any thread."""
        with self._lock:
            self._touched.pop(message_id, None)

    def let_go(self) -> None:
        """Note that a message is done with and nsqd has taken it back already; from any thread."""
        with self._lock:
            self._let_go_count += 1
        self._owner.wake()

    # --- what the flow needs (flow.Source) ---

    @property
    def unsent_count(self) -> int:
        """Messages the application is done with and the owner has not been told of yet."""
        return len(self._finished) + self._requeued_count + self._let_go_count

    def rdy(self, count: int) -> None:
        """Set how many messages may be in flight."""
        if not self.is_lost:
            self._out.append(self._wire.rdy(count))

    # --- sending and receiving ---

    @property
    def has_output(self) -> bool:
        """Whether there is something to send that is no FIN."""
        return bool(self._out)

    def flush(self) -> None:
        """Write what was gathered. FINs come last, a TOUCH may precede them; then RDY, which finds them executed."""
        if finished := self._finished[:]:
            del self._finished[: len(finished)]  # what another thread appends meanwhile stays
        requeued, self._requeued_count = self._requeued_count, 0
        let_go, self._let_go_count = self._let_go_count, 0
        if finished or requeued or let_go:
            if finished and not self.is_lost:
                self._out.append(self._wire.finish(finished))
            self._owner.on_settled(self, len(finished), requeued, let_go)
        if self._out:
            data = b"".join(self._out)
            self._out.clear()
            if not self.is_lost:
                self._send(data)

    def _send(self, data: bytes) -> None:
        try:
            self._stream.put(data)
        except FlintError as error:
            self._lose(ConnectionFailed(self.address, str(error)))
        else:
            self._note_choked()

    def _note_choked(self) -> None:
        is_choked = self._stream.unsent_bytes > 0
        if is_choked != self._is_choked:
            self._is_choked = is_choked
            self._owner.watch(self, is_choked)

    def on_writable(self) -> None:
        """Send more of what the kernel did not take."""
        try:
            self._stream.send_unsent()
        except FlintError as error:
            self._lose(ConnectionFailed(self.address, str(error)))
        else:
            self._note_choked()

    def on_readable(self) -> None:
        """Read once and handle what came."""
        try:
            piece = self._stream.read()
            while piece and not self.is_lost:
                self._heard_at = self._timers.time()
                for event in self._wire.receive(piece):
                    if isinstance(event, Messages):
                        self._owner.on_messages(self, event.records)
                    else:
                        self._handle(event)
                piece = self._stream.more()
        except FlintError as error:
            self._lose(ConnectionFailed(self.address, str(error)))

    def _handle(self, event: Heartbeat | MessageFailed | Refused | Broken | Reply) -> None:
        if isinstance(event, Heartbeat):
            self._out.append(self._wire.nop())
        elif isinstance(event, Reply):
            self.has_left = event.command == "CLS"
        elif isinstance(event, MessageFailed):
            self._message_failed(event)
        elif isinstance(event, Broken):
            self._lose(event.error)
        elif event.is_fatal or not event.command:  # the latter for a FIN, say: another nsqd leads the partition now
            self._lose(refusal(event.code, event.detail, self.address, self._can_renew_secret))

    def _message_failed(self, failure: MessageFailed) -> None:
        if failure.command == "TOUCH":
            failed = self._touched.pop(failure.message_id, None)
            if failed is not None:
                failed(TouchFailed(failure.code, failure.detail, self.address))
        self._owner.on_message_failed(self, failure)

    # --- ending ---

    def leave(self) -> None:
        """Ask for no more messages; :attr:`has_left` says when nsqd has executed everything that was sent."""
        self.flush()
        if not self.is_lost:
            self._out.append(self._wire.cls())
            self.flush()

    def close(self) -> None:
        """Send what is gathered and close."""
        self.flush()
        self._lose(ConnectionFailed(self.address, "closed by this client"), is_polite=True)

    def abort(self, reason: str) -> None:
        """Give the connection up at once."""
        self._lose(ConnectionFailed(self.address, reason))

    def abandon(self) -> None:
        """In a forked child: this is the parent's."""
        self.is_lost = True

    def _lose(self, error: FlintError, is_polite: bool = False) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self.lost_because = error
        self._silence_timer.cancel()
        self._out.clear()
        self._touched.clear()
        self._wire.close()
        self._owner.on_lost(self, error)  # while the socket still has its number, for the selector
        if is_polite:
            self._stream.close()
        else:
            self._stream.abort()

    def _watch_silence(self) -> None:
        silent_until = self._heard_at + self._silence_s
        if self._timers.time() >= silent_until:
            self.abort(f"nothing was received for {self._silence_s:g} s")
        elif not self.is_lost:
            self._silence_timer = self._timers.call_at(silent_until, self._watch_silence)
