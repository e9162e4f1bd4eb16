"""One TCP connection to nsqd: the wire core with a transport around it.

Rules of this file:

- What is sent in one loop turn is one write; FINs are gathered as ids and become bytes as one run.
- Every command that nsqd answers ends in exactly one call of its ``answered`` callback: with the answer, with nsqd's
  error, or with :class:`AnswerLost` the moment the connection is lost.
- A connection is lost once, whatever the cause; :attr:`Connection.lost` says why. Nothing is written after that, but
  answers of the application are still counted, because its messages count against ``max_in_flight``.
- Nothing from nsqd for two heartbeat intervals: the connection is lost (reference/nsq.md 1.8).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

import msgspec

from flintmq import __version__
from flintmq.client.aio.opening import Opening
from flintmq.client.core.handshake import Handshake, refusal
from flintmq.client.options import MS_PER_S, ConnectionOptions, seconds, split_address, why_unreachable
from flintmq.client.security import obtain_secret
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError, OptionError, TouchFailed
from flintmq.wire.client import (
    BROKEN,
    Broken,
    ClientConnection,
    Features,
    Heartbeat,
    MessageFailed,
    Messages,
    Record,
    Refused,
    Reply,
)
from flintmq.wire.extended import SUB_ORDER
from flintmq.wire.identify import ExtendedIdentifyRequest, OnceIdentifyRequest

log = logging.getLogger("flintmq.client")

HEARTBEATS_MISSED_MAX = 2
PUBLISH_COMMANDS = ("PUB", "MPUB", "DPUB", "MDPUB", "PUB_TRACE", "MPUB_TRACE", "PUB_EXT", "PUB_ONCE", "MPUB_ONCE")


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


class ConnectionOwner(Protocol):
    """Who is told what happens on a connection."""

    def on_messages(self, connection: Connection, records: list[Record]) -> None: ...
    def on_message_failed(self, connection: Connection, failure: MessageFailed) -> None: ...
    def on_settled(self, connection: Connection, finished: int, requeued: int, let_go: int) -> None:
        """So many messages were finished, requeued, or let go without an answer; called before that is written."""

    def on_lost(self, connection: Connection, error: FlintError) -> None: ...


class Connection(asyncio.Protocol):
    """A connection after its handshake. Make it with :meth:`open`; it belongs to the loop it was made in.

    Attributes:
        address: ``host:port``.
        features: what nsqd granted.
        layers: what its bytes go through, lowest first: ``tls``, ``snappy``, ``deflate``.
        lost: done when the connection is lost; its result says why.
        is_write_paused: nsqd takes bytes more slowly than they are sent.
        is_publish_refused: nsqd closed it because of what was published; nsqd itself is well.
        is_extended: nsqd was told that this client reads headers in front of bodies.
        partition: that is subscribed; None: no partition, or nothing.
        is_ordered: the subscription is in order.
        is_located: bodies have their position in front.
    """

    def __init__(
        self, address: str, owner: ConnectionOwner, options: ConnectionOptions, loop: asyncio.AbstractEventLoop
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
        self.lost: asyncio.Future[FlintError] = loop.create_future()
        self.is_lost = False
        self.is_write_paused = False
        self.is_publish_refused = False
        self._owner = owner
        self._options = options
        self._loop = loop
        self._wire = ClientConnection(options.frame_size_max)
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._finished: list[bytes] = []
        self._requeued_count = 0
        self._let_go_count = 0
        self._touched: dict[bytes, Callable[[TouchFailed], None]] = {}
        self._is_flush_due = False
        self._heard_at = loop.time()
        self._silence_s = HEARTBEATS_MISSED_MAX * seconds(options.heartbeat_interval, "heartbeat_interval")
        self._silence_timer: asyncio.TimerHandle | None = None

    def describe(self) -> str:
        """Say in one line where the connection stands."""
        where = self.address if self.partition is None else f"{self.address}/{self.partition}"
        return f"{where} {self._wire.describe()} layers={'+'.join(self.layers) or '-'} lost={self.is_lost}"

    # --- life ---

    @classmethod
    async def open(
        cls,
        address: str,
        owner: ConnectionOwner,
        options: ConnectionOptions,
        env: Env,
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
        loop = asyncio.get_running_loop()
        host, port = split_address(address)
        timeout_s = seconds(options.connect_timeout, "connect_timeout")
        connection = cls(address, owner, options, loop)
        connection.is_extended = extended
        handshake = connection._handshake(host, env, desired_tag, once)
        opening = Opening(handshake, partial(connection._begin, handshake), loop, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: opening, host, port)
                if await opening.wants_secret():
                    assert options.auth_secret is not None
                    await opening.authorise(await obtain_secret(options.auth_secret, address, env))
        except BaseException as error:
            failure = _not_opened(error, address, handshake.waits_for, timeout_s)
            opening.abort()
            if connection._transport is not None:  # open, and nobody will have it
                connection._lose(failure if isinstance(failure, FlintError) else ConnectionFailed(address, "given up"))
            if failure is error:
                raise
            raise failure from error
        return connection

    def _handshake(self, host: str, env: Env, desired_tag: str, once: bool) -> Handshake:
        options = self._options
        try:
            tls = options.client_tls(self.address, host) if options.tls else None
        except OptionError as error:  # a file that was there when the options were made
            raise ConnectionFailed(self.address, str(error)) from error
        request = options.identify_request(env.hostname, __version__)
        if self.is_extended:
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

    def _begin(self, handshake: Handshake, transport: asyncio.Transport, received: bytes) -> None:
        """Take over from the handshake, in the callback that read its last answer."""
        self.features = handshake.features
        self.layers = handshake.layers
        self.msg_timeout_s = self.features.msg_timeout / MS_PER_S
        self.max_msg_timeout_s = self.features.max_msg_timeout / MS_PER_S
        transport.set_protocol(self)
        self.connection_made(transport)
        if received:
            self.data_received(received)

    async def subscribe(self, topic: str, channel: str, partition: int | None = None) -> None:
        """Subscribe to a channel, or to one partition of it; nothing is delivered before :meth:`rdy`.

        Raises:
            ConnectionFailed: the connection was lost, or nsqd does not answer in time.
            NsqdError: nsqd refuses.
        """
        self.partition = partition
        await self._subscribe(lambda token: self._wire.sub(topic, channel, token, partition))

    async def subscribe_in_order(self, topic: str, channel: str, partition: int, command: str = SUB_ORDER) -> None:
        """Subscribe to a partition in order: one message at a time.

        Args:
            command: as this nsqd calls it.

        Raises:
            ConnectionFailed, NsqdError: as :meth:`subscribe`.
        """
        self.partition = partition
        self.is_ordered = self.is_located = True
        self.features = msgspec.structs.replace(self.features, max_rdy_count=1)
        await self._subscribe(lambda token: self._wire.sub_order(topic, channel, partition, token, command))

    async def subscribe_from(
        self, topic: str, channel: str, partition: int | None, named: int | None, start: str | None
    ) -> None:
        """Subscribe, and say where the channel begins.

        Args:
            named: the partition as nsqd is told it, see :class:`flintmq.client.core.start.Beginning`.
            start: None: it goes on where it is.

        Raises:
            ConnectionFailed, NsqdError: as :meth:`subscribe`.
        """
        self.partition = partition
        self.is_located = True
        await self._subscribe(lambda token: self._wire.sub_advanced(topic, channel, token, named, start))

    async def publish_alone(self, topic: str, headers: bytes, body: bytes) -> None:
        """Publish one message with headers and wait for the answer; nothing else may be under way.

        Raises:
            NsqdError: nsqd refuses it.
            ConnectionFailed: there was no answer in time, or none at all.
        """
        await self._ask("PUB_EXT", lambda answered: self._wire.pub_ext(topic, None, headers, body, answered))

    async def _subscribe(self, build: Callable[[Answered], bytes]) -> None:
        await self._ask("SUB", build)

    async def _ask(self, command: str, build: Callable[[Answered], bytes]) -> None:
        timeout_s = seconds(self._options.connect_timeout, "connect_timeout")
        try:
            async with asyncio.timeout(timeout_s):
                await self._call(build)
        except TimeoutError as error:
            failure = ConnectionFailed(self.address, f"{command} was not answered within {timeout_s:g} s")
            self._lose(failure)
            raise failure from error

    async def end_subscription(self) -> None:
        """Ask for no more messages and wait until nsqd has executed everything that was sent.

        Raises:
            ConnectionFailed: the connection was lost.
            NsqdError: nsqd refuses.
        """
        await self._call(self._wire.cls)

    def close(self) -> None:
        """Send what is gathered and close."""
        self.flush()
        if self._transport is not None and not self.is_lost:
            self._transport.close()
            self._lose(ConnectionFailed(self.address, "closed by this client"))

    async def leave(self) -> FlintError:
        """Send a NOP as the last command and wait until nsqd closes too; not over TLS, which has no half-close.

        Returns:
            Why the connection was lost: nsqd's own error when it refuses even a NOP.
        """
        if self._transport is not None and not self.is_lost:
            self._out.append(self._wire.nop())
            self.flush()
            self._transport.write_eof()
        return await self.lost

    def abort(self, reason: str) -> None:
        """Give the connection up at once."""
        self._lose(ConnectionFailed(self.address, reason))

    def _lose(self, error: FlintError) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()
        self._out.clear()
        self._touched.clear()
        for command in self._wire.close():
            answered = cast(Answered, command.token)
            answered(AnswerLost(self.address, str(error), command.maybe_executed))
        self.lost.set_result(error)
        self._owner.on_lost(self, error)

    # --- commands ---

    async def _call(self, build: Callable[[Answered], bytes]) -> bytes:
        """Send a command and wait for its answer."""
        if self.is_lost:
            raise ConnectionFailed(self.address, "the connection is closed")
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._out.append(build(partial(_resolve, future)))
        self.flush()
        return await future

    def publish(self, topic: str, bodies: Sequence[bytes], answered: Answered, partition: int | None = None) -> None:
        """Send one message as PUB, several as MPUB. The connection must not be lost.

        Raises:
            LocalProtocolError: the topic's name or a body is not acceptable; nothing was sent.
        """
        if len(bodies) == 1:
            self._out.append(self._wire.pub(topic, bodies[0], answered, partition))
        else:
            self._out.append(self._wire.mpub(topic, bodies, answered, partition))

    def publish_deferred(
        self, topic: str, defer_ms: int, bodies: Sequence[bytes], answered: Answered, partition: int | None = None
    ) -> None:
        """Send one message as DPUB, several as MDPUB. The connection must not be lost.

        Raises:
            LocalProtocolError: as :meth:`publish`.
        """
        if len(bodies) == 1:
            self._out.append(self._wire.dpub(topic, defer_ms, bodies[0], answered, partition))
        else:
            self._out.append(self._wire.mdpub(topic, defer_ms, bodies, answered, partition))

    def publish_once(
        self,
        topic: str,
        bodies: Sequence[bytes],
        producer_id: str,
        sequence: int,
        answered: Answered,
        partition: int | None = None,
    ) -> None:
        """Send one message as PUB_ONCE, several as MPUB_ONCE. The connection must not be lost.

        Raises:
            LocalProtocolError: as :meth:`publish`.
        """
        self._out.append(self._wire.pub_once(topic, bodies, producer_id, sequence, answered, partition))

    def publish_traced(
        self, topic: str, partition: int, messages: Sequence[tuple[int, bytes]], answered: Answered
    ) -> None:
        """Send (trace id, body) as PUB_TRACE, or several as MPUB_TRACE. The connection must not be lost.

        Raises:
            LocalProtocolError: as :meth:`publish`.
        """
        self._out.append(self._wire.pub_trace(topic, partition, messages, answered))

    def publish_with_headers(
        self, topic: str, partition: int | None, messages: Sequence[tuple[bytes, bytes]], answered: Answered
    ) -> None:
        """Send (headers, body) as PUB_EXT, or several as MPUB_EXT; headers are a JSON object. It must not be lost.

        Raises:
            LocalProtocolError: as :meth:`publish`.
        """
        if len(messages) == 1:
            self._out.append(self._wire.pub_ext(topic, partition, *messages[0], answered))
        else:
            self._out.append(self._wire.mpub_ext(topic, partition, messages, answered))

    def rdy(self, count: int) -> None:
        """Set how many messages may be in flight."""
        if self._wire.state != BROKEN:
            self._out.append(self._wire.rdy(count))
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

    def forget_touched(self, message_id: bytes) -> None:
        """Forget the ``failed`` callback of a message that is being answered."""
        self._touched.pop(message_id, None)

    def let_go(self) -> None:
        """Note that a message is done with and nsqd has taken it back already."""
        self._let_go_count += 1
        self.flush_soon()

    @property
    def local_ip(self) -> str:
        """The address of this end; empty when it has none, or none any more."""
        return self._ip("sockname")

    @property
    def remote_ip(self) -> str:
        """The address of nsqd's end; likewise."""
        return self._ip("peername")

    def _ip(self, name: str) -> str:
        found = None if self._transport is None else self._transport.get_extra_info(name)
        return str(found[0]) if isinstance(found, tuple) and found else ""

    @property
    def unsent_count(self) -> int:
        """Messages the application is done with and the owner has not been told of yet."""
        return len(self._finished) + self._requeued_count + self._let_go_count

    def flush_soon(self) -> None:
        """Write at the end of the turn."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what was gathered. FINs come last, a TOUCH may precede them; then RDY, which finds them executed."""
        self._is_flush_due = False
        finished, self._finished = self._finished, []
        requeued, self._requeued_count = self._requeued_count, 0
        let_go, self._let_go_count = self._let_go_count, 0
        can_write = self._wire.state != BROKEN and self._transport is not None
        if finished and can_write:
            self._out.append(self._wire.finish(finished))
        if finished or requeued or let_go:
            self._owner.on_settled(self, len(finished), requeued, let_go)
        if self._out:
            if can_write:
                assert self._transport is not None
                self._transport.write(b"".join(self._out))
            self._out.clear()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._heard_at = self._loop.time()
        self._watch_silence()

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(ConnectionFailed(self.address, str(error) if error else "closed by nsqd"))

    def pause_writing(self) -> None:
        self.is_write_paused = True

    def resume_writing(self) -> None:
        self.is_write_paused = False

    def data_received(self, data: bytes) -> None:
        if self.is_lost:
            return
        self._heard_at = self._loop.time()
        for event in self._wire.receive(data):
            if isinstance(event, Messages):
                self._owner.on_messages(self, event.records)
            elif isinstance(event, Reply):
                cast(Answered, event.token)(event.data)
            else:
                self._handle(event)
        if self._finished or self._out:
            self.flush()

    def _handle(self, event: Heartbeat | MessageFailed | Refused | Broken) -> None:
        if isinstance(event, Heartbeat):
            self._out.append(self._wire.nop())
        elif isinstance(event, MessageFailed):
            self._message_failed(event)
        elif isinstance(event, Broken):
            self._lose(event.error)
        else:
            error = refusal(event.code, event.detail, self.address, callable(self._options.auth_secret))
            if event.token is not None:
                cast(Answered, event.token)(error)
            if event.is_fatal:
                self.is_publish_refused = event.command in PUBLISH_COMMANDS
                self._lose(error)
            elif not event.command:  # for a FIN, say, because another nsqd leads the partition now
                self._lose(error)

    def _message_failed(self, failure: MessageFailed) -> None:
        if failure.command == "TOUCH":
            failed = self._touched.pop(failure.message_id, None)
            if failed is not None:
                failed(TouchFailed(failure.code, failure.detail, self.address))
        self._owner.on_message_failed(self, failure)

    def _watch_silence(self) -> None:
        if self.is_lost:
            return
        silent_until = self._heard_at + self._silence_s
        if self._loop.time() >= silent_until:
            self.abort(f"nothing was received for {self._silence_s:g} s")
        else:
            self._silence_timer = self._loop.call_at(silent_until, self._watch_silence)


def _resolve(future: asyncio.Future[bytes], outcome: bytes | FlintError) -> None:
    if future.done():  # whoever asked has gone
        return
    if isinstance(outcome, bytes):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _not_opened(error: BaseException, address: str, waited_for: str, timeout_s: float) -> BaseException:
    """What to raise when a connection could not be opened."""
    if isinstance(error, TimeoutError):
        return ConnectionFailed(address, str(error) or f"no answer within {timeout_s:g} s: waiting for {waited_for}")
    return ConnectionFailed(address, why_unreachable(error)) if isinstance(error, OSError) else error
