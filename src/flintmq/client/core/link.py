"""A connection to nsqd without its transport: bytes in and out, commands, and what becomes of them.

::

    transport --bytes--> feed() ----> owner: messages, late answers; callbacks: answers
    transport <--bytes-- take_output() <---- commands, FINs, NOPs

Rules of this file:

- What is sent between two calls of :meth:`Link.take_output` is one write; FINs are gathered as ids and become bytes as
  one run, behind everything else, and in front of the RDY that they cause.
- Every command that nsqd answers ends in exactly one call of its ``answered`` callback: with the answer, with nsqd's
  error, or with :class:`AnswerLost` the moment the connection is lost.
- A connection is lost once, whatever the cause; :attr:`Link.lost_because` says why. Nothing is written after that, but
  answers of the application are still counted, because its messages count against ``max_in_flight``.
- Nothing from nsqd for two heartbeat intervals: the connection is lost (NSQ's TCP protocol).
- :meth:`Link.finish` and :meth:`Link.finish_all` may be called in any thread: they append to a list that nobody but
  :meth:`Link.take_output` shortens, and that from the front. Everything else is called by one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from flintmq.client.core.handshake import Handshake, refusal
from flintmq.client.core.timers import Timer, Timers
from flintmq.client.options import MS_PER_S, ConnectionOptions, seconds, split_address
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError, OptionError, TouchFailed
from flintmq.limits import MESSAGE_ID_SIZE
from flintmq.version import __version__
from flintmq.wire.client import (
    BROKEN,
    Broken,
    ClientConnection,
    Features,
    Heartbeat,
    MessageFailed,
    Messages,
    Refused,
    Reply,
)
from flintmq.wire.commands import PUBLISHING
from flintmq.wire.extended import SUB_ORDER
from flintmq.wire.identify import ExtendedIdentifyRequest, OnceIdentifyRequest

HEARTBEATS_MISSED_MAX = 2
NOBODYS_ID = b"0" * MESSAGE_ID_SIZE
"""The id of no message."""


class AnswerLost(ConnectionFailed):
    """The connection was lost before nsqd answered.

    Attributes:
        maybe_executed: False when nsqd certainly did not execute the command.
    """

    def __init__(self, address: str, reason: str, maybe_executed: bool) -> None:
        super().__init__(address, reason)
        self.maybe_executed = maybe_executed


Answered = Callable[[bytes | FlintError], None]
"""Called once with nsqd's answer, a :class:`NsqdError`, or :class:`AnswerLost`."""

Some = TypeVar("Some", bound="Link", contravariant=True)


class LinkOwner(Protocol[Some]):
    """The owner of a connection, who is told what happens on it."""

    def on_messages(self, connection: Some, messages: Messages) -> None: ...
    def on_message_failed(self, connection: Some, failure: MessageFailed) -> None: ...
    def on_settled(self, connection: Some, finished: Sequence[bytes], requeued: int, dropped: int) -> None:
        """Messages were finished, requeued, or dropped without an answer; called before that is written.

        Args:
            finished: their ids.
            requeued, dropped: their number.
        """

    def on_lost(self, connection: Some, error: FlintError) -> None: ...


class Link(ABC):
    """A connection as far as it needs no transport; a shell adds that.

    Args:
        address: ``host:port``.
        time: seconds on the clock of everything here.

    Attributes:
        features: what nsqd granted.
        layers: what its bytes go through, lowest first: ``tls``, ``snappy``, ``deflate``.
        opened_at: when the handshake was over.
        lost_because: why the connection was lost, or None.
        is_write_paused: nsqd takes bytes more slowly than they are sent.
        is_publish_refused: nsqd closed it because of what was published; nsqd itself is well.
        is_extended: nsqd was told that this client reads headers in front of bodies.
        partition: that is subscribed; None: no partition, or nothing.
        is_ordered: the subscription is in order.
        is_located: bodies have their position in front.
    """

    def __init__(
        self, address: str, owner: LinkOwner[Any], options: ConnectionOptions, time: Callable[[], float]
    ) -> None:
        self.address = address
        self.is_extended = False
        self.partition: int | None = None
        self.is_ordered = False
        self.is_located = False
        self.features = Features()
        self.layers: tuple[str, ...] = ()
        self.msg_timeout_s = self.features.msg_timeout / MS_PER_S
        self.max_msg_timeout_s = self.features.max_msg_timeout / MS_PER_S
        self.opened_at = 0.0
        self.is_lost = False
        self.lost_because: FlintError | None = None
        self.is_write_paused = False
        self.is_publish_refused = False
        self._owner = owner
        self._options = options
        self._time = time
        self._wire = ClientConnection(options.frame_size_max)
        self._out: list[bytes] = []
        self._finished: list[bytes] = []
        self._requeued_count = 0
        self._dropped_count = 0
        self._touched: dict[bytes, Callable[[TouchFailed], None]] = {}
        self._probed: deque[Callable[[], object]] = deque()
        self._is_flush_due = False
        self._heard_at = 0.0
        self._silence_s = HEARTBEATS_MISSED_MAX * seconds(options.heartbeat_interval, "heartbeat_interval")
        self._silence_timer: Timer | None = None

    def describe(self) -> str:
        """Say in one line where the connection stands."""
        where = self.address if self.partition is None else f"{self.address}/{self.partition}"
        return f"{where} {self._wire.describe()} layers={'+'.join(self.layers) or '-'} lost={self.is_lost}"

    # --- what the shell does ---

    @abstractmethod
    def flush_soon(self) -> None:
        """Have what was gathered written before long; sets ``_is_flush_due``."""

    @property
    @abstractmethod
    def ends(self) -> tuple[str, str]:
        """IP addresses of this end and of nsqd's; empty when there are none, or none any more."""

    @abstractmethod
    def _disconnect(self, is_polite: bool) -> None:
        """Close the transport: after what was written to it, or at once."""

    # --- opening ---

    def new_handshake(self, env: Env, extended: bool = False, desired_tag: str = "", once: bool = False) -> Handshake:
        """Return what the shell carries out before :meth:`_begin`.

        Args:
            extended: tell nsqd that headers are understood; only for topics that have them.
            desired_tag: with ``extended``: the messages to be given first.
            once: take only an nsqd that knows producer sequences.

        Raises:
            ConnectionFailed: a certificate cannot be used.
        """
        options = self._options
        try:
            tls = options.client_tls(self.address, split_address(self.address)[0]) if options.tls else None
        except OptionError as error:  # a file that was there when the options were made
            raise ConnectionFailed(self.address, str(error)) from error
        request = options.identify_request(env.hostname, __version__)
        self.is_extended = extended
        if extended:
            request = ExtendedIdentifyRequest(**msgspec.structs.asdict(request), desired_tag=desired_tag)
        elif once:
            request = OnceIdentifyRequest(**msgspec.structs.asdict(request))
        return Handshake(
            self.address,
            self._wire,
            request,
            tls,
            has_secret=options.auth_secret is not None,
            can_renew_secret=callable(options.auth_secret),
        )

    def _begin(self, handshake: Handshake) -> None:
        """Go on where a handshake is over."""
        self.features = handshake.features
        self.layers = handshake.layers
        self.msg_timeout_s = self.features.msg_timeout / MS_PER_S
        self.max_msg_timeout_s = self.features.max_msg_timeout / MS_PER_S
        self.opened_at = self._heard_at = self._time()

    @property
    def _is_silent(self) -> bool:
        return self._time() >= self._heard_at + self._silence_s

    def _watch_silence(self, timers: Timers) -> None:
        """Lose the connection when nothing has come for too long."""
        if self.is_lost:
            return
        if self._is_silent:
            self.abort(f"nothing was received for {self._silence_s:g} s")
        else:
            self._silence_timer = timers.call_at(self._heard_at + self._silence_s, self._watch_silence, timers)

    # --- bytes in, bytes out ---

    def feed(self, data: bytes) -> None:
        """Take what was read; what it causes to be sent is for the next :meth:`take_output`."""
        if self.is_lost:
            return
        self._heard_at = self._time()
        for event in self._wire.receive(data):
            if isinstance(event, Messages):
                self._owner.on_messages(self, event)
            elif isinstance(event, Reply):
                answered: Any = event.token
                answered(event.data)
            else:
                self._handle(event)

    def _handle(self, event: Heartbeat | MessageFailed | Refused | Broken) -> None:
        if isinstance(event, Heartbeat):
            self._out.append(self._wire.nop())
        elif isinstance(event, MessageFailed):
            self._message_failed(event)
        elif isinstance(event, Broken):
            self._lose(event.error)
        else:
            error = refusal(event.code, event.detail, self.address, was_let_in=True)
            if event.token is not None:
                answered: Any = event.token
                answered(error)
            if event.is_fatal:
                self.is_publish_refused = event.command in PUBLISHING
                self._lose(error)
            elif not event.command:  # for a FIN, say, because another nsqd leads the partition now
                self._lose(error)

    def _message_failed(self, failure: MessageFailed) -> None:
        if failure.command == "TOUCH":
            failed = self._touched.pop(failure.message_id, None)
            if failed is None and self._probed:  # Youzan's nsqd does not write the id as it was sent
                self._probed.popleft()()
                return
            if failed is not None:
                failed(TouchFailed(failure.code, failure.detail, self.address))
        self._owner.on_message_failed(self, failure)

    @property
    def has_output(self) -> bool:
        """Whether there is something to be sent."""
        return bool(self._out or self._finished)

    def take_output(self) -> bytes:
        """Return what was gathered. FINs come last, a TOUCH may precede them; then RDY, which finds them executed."""
        if self._finished or self._requeued_count or self._dropped_count:
            finished = self._finished[:]
            del self._finished[: len(finished)]  # what another thread appends meanwhile stays
            requeued, self._requeued_count = self._requeued_count, 0
            dropped, self._dropped_count = self._dropped_count, 0
            if finished and self._wire.state != BROKEN:
                self._out.append(self._wire.finish(finished))
            self._is_flush_due = True  # what the owner adds goes with the rest
            try:
                self._owner.on_settled(self, finished, requeued, dropped)
            finally:
                self._is_flush_due = False
        self._is_flush_due = False
        output = b"".join(self._out) if self._wire.state != BROKEN else b""
        self._out.clear()
        if self._finished:  # in another thread, which found this under way
            self.flush_soon()
        return output

    # --- ending ---

    def abort(self, reason: str) -> None:
        """Give the connection up at once."""
        self._lose(ConnectionFailed(self.address, reason))

    def _lose(self, error: FlintError, is_polite: bool = False) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self.lost_because = error
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self._disconnect(is_polite)
        self._out.clear()
        self._touched.clear()
        self._probed.clear()
        reason = error.reason if isinstance(error, ConnectionFailed) else str(error)
        for command in self._wire.close():
            answered: Any = command.token
            answered(AnswerLost(self.address, reason, command.maybe_executed))
        self._owner.on_lost(self, error)

    # --- subscribing ---

    def sub(self, topic: str, channel: str, answered: Answered, partition: int | None = None) -> None:
        """Subscribe to a channel, or to one partition of it; nothing is delivered before :meth:`rdy`."""
        self.partition = partition
        self._out.append(self._wire.sub(topic, channel, answered, partition))

    def sub_order(self, topic: str, channel: str, partition: int, answered: Answered, command: str = SUB_ORDER) -> None:
        """Subscribe to a partition in order: one message at a time.

        Args:
            command: as this nsqd calls it.
        """
        self.partition = partition
        self.is_ordered = self.is_located = True
        self.features = msgspec.structs.replace(self.features, max_rdy_count=1)
        self._out.append(self._wire.sub_order(topic, channel, partition, answered, command))

    def sub_advanced(
        self,
        topic: str,
        channel: str,
        partition: int | None,
        named: int | None,
        start: str | None,
        answered: Answered,
    ) -> None:
        """Subscribe, and say where the channel begins.

        Args:
            named: the partition as nsqd is told it; None: what it has of the topic, which with a start must be all.
            start: None: it goes on where it is.
        """
        self.partition = partition
        self.is_located = True
        self._out.append(self._wire.sub_advanced(topic, channel, answered, named, start))

    def cls(self, answered: Answered) -> None:
        """Ask for no more messages; when that is answered, nsqd has executed everything that was sent before."""
        self._out.append(self._wire.cls(answered))

    def nop(self) -> None:
        """Say that this client is there."""
        self._out.append(self._wire.nop())

    # --- publishing; the connection must not be lost ---

    def publish(
        self,
        topic: str,
        bodies: Sequence[bytes],
        answered: Answered,
        partition: int | None = None,
        defer_ms: int | None = None,
        trace_ids: Sequence[int] | None = None,
        headers: Sequence[bytes] | None = None,
        producer_id: str | None = None,
        sequence: int = 0,
    ) -> None:
        """Send one message, or several as one, with what :meth:`ClientConnection.publish` says of them.

        Raises:
            LocalProtocolError: the topic's name, a body or a field is not acceptable; nothing was sent.
        """
        self._out.append(
            self._wire.publish(topic, bodies, answered, partition, defer_ms, trace_ids, headers, producer_id, sequence)
        )

    # --- consuming ---

    def rdy(self, count: int) -> None:
        """Set how many messages may be in flight."""
        if self._wire.state != BROKEN:
            self._out.append(self._wire.rdy(count))
            if not self._is_flush_due:
                self.flush_soon()

    def finish(self, message_id: bytes) -> None:
        """Finish a message."""
        self._finished.append(message_id)
        if not self._is_flush_due:
            self.flush_soon()

    def finish_all(self, message_ids: list[bytes]) -> None:
        """Finish several messages."""
        self._finished += message_ids
        if not self._is_flush_due:
            self.flush_soon()

    def requeue(self, message_id: bytes, delay_ms: int) -> None:
        """Give a message back, to be delivered again after ``delay_ms``."""
        self._requeued_count += 1
        if self._wire.state != BROKEN:
            self._out.append(self._wire.requeue(message_id, delay_ms))
        self.flush_soon()

    def touch(self, message_id: bytes, failed: Callable[[TouchFailed], None]) -> None:
        """Restart a message's timeout; ``failed`` is called when it was too late."""
        if self._wire.state != BROKEN:
            self._touched[message_id] = failed
            self._out.append(self._wire.touch(message_id))
            self.flush_soon()

    def probe(self, answered: Callable[[], object]) -> None:
        """Have nsqd answer behind everything it has sent; ``answered`` is called then, and never once it is lost.

        Any nsqd answers a TOUCH of a message that is not there, and does nothing else but log it.
        """
        if self._wire.state != BROKEN:
            self._probed.append(answered)
            self._out.append(self._wire.touch(NOBODYS_ID))
            self.flush_soon()

    def forget_touched(self, message_id: bytes) -> None:
        """Forget the ``failed`` callback of a message that is being answered."""
        self._touched.pop(message_id, None)

    def drop(self) -> None:
        """Note that a message is done with and nsqd has taken it back already."""
        self._dropped_count += 1
        self.flush_soon()

    @property
    def unsent_count(self) -> int:
        """Messages the application is done with and the owner has not been told of yet."""
        return len(self._finished) + self._requeued_count + self._dropped_count
