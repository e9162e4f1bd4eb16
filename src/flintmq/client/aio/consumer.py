"""The consumer: one subscription, on every nsqd that has the topic, or on every partition of it.

Rules of this file:

- It joins the parts and decides nothing that a policy can decide: :mod:`flintmq.client.aio.connection` (bytes),
  :mod:`flintmq.client.core.flow` (RDY, backoff), :mod:`flintmq.client.core.discovery` (addresses),
  :mod:`flintmq.client.inbox` (what waits to be handed out), :mod:`flintmq.client.aio.handlers` (who is handed it).
- One task per nsqd, or per partition, keeps it connected (:mod:`flintmq.client.aio.subscribing`); one follows the
  nsqlookupd (:mod:`flintmq.client.aio.following`); the handler's workers are the only others.
- In order (:mod:`flintmq.client.core.order`), no message is ever finished or skipped that the application did not
  finish.
- When a connection is lost, its queued messages go with it: nsqd delivers them again.
- Stopping is one way: RDY 0, queued messages given back, handlers end, answers sent, CLS, close.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self

from flintmq.client.aio import handlers
from flintmq.client.aio.connection import Connection
from flintmq.client.aio.dead_letters import DeadLetters
from flintmq.client.aio.http import HttpFetch
from flintmq.client.aio.lookup import Fetch, Lookup
from flintmq.client.aio.producer import Producer
from flintmq.client.aio.subscribing import Subscriptions
from flintmq.client.core import trace as trace_log
from flintmq.client.core.backoff import LEVEL_MAX, Backoff, jittered_s, requeue_delay_s
from flintmq.client.core.bodies import reader
from flintmq.client.core.envelope import open_delivery
from flintmq.client.core.flow import BACKOFF_JITTER, Flow
from flintmq.client.core.message import Delivery, Message, ThreadMessage, Value, is_hex, take_apart
from flintmq.client.core.start import StartAt
from flintmq.client.core.stats import ConsumerStats
from flintmq.client.core.unreadable import BLOCKING, REQUEUED, Unreadable, letter_headers, read_error
from flintmq.client.inbox import Inbox
from flintmq.client.options import (
    ConnectionOptions,
    Seconds,
    addresses,
    seconds,
    system_env,
    whole,
)
from flintmq.client.subscription import (
    CLOSE_WAIT_S,
    DRAIN_SAID_S,
    DRAIN_WAITS,
    FAILURES,
    MAX_IN_FLIGHT_MAX,
    check_names,
    check_ordered,
    checked_tag,
    give_back,
    has_partitions,
    new_beginning,
    new_order,
    new_policy,
    new_times,
)
from flintmq.env import Env
from flintmq.errors import BodyError, FlintError, RemoteProtocolError
from flintmq.limits import ATTEMPTS_MAX
from flintmq.wire.client import MessageFailed, Record

if TYPE_CHECKING:
    from flintmq.client.telemetry import Telemetry

log = logging.getLogger("flintmq.client")

CONCURRENCY_MAX = 10_000


class Consumer(Generic[Value]):
    """Consumes a channel of a topic.

    ::

        async with Consumer("orders", "billing", nsqlookupd_http_addresses="http://127.0.0.1:4161") as consumer:
            async for message in consumer:
                async with message:
                    await bill(message.body)

    Leaving the block stops the flow, lets handlers end, sends what they answered, and closes. All durations are seconds
    or a timedelta. A consumer belongs to the event loop it is started in.

    Args:
        topic: 1 to 64 of ``[.a-zA-Z0-9_-]``, optionally ``#ephemeral``.
        channel: likewise.
        nsqd_tcp_addresses: ``host:port`` of one nsqd or several; or
        nsqlookupd_http_addresses: ``http://host:port`` of one nsqlookupd or several.
        handler: called with each message; without it, iterate. Returning finishes the message, an exception requeues it
            and makes the consumer back off; :class:`Requeue` and :class:`Discard` steer.
        concurrency: how many handlers run at once: tasks for an ``async def``, threads for a plain function.
        inline: call a plain function on the event loop itself; fastest, and it must not block.
        max_in_flight: messages delivered and not answered, over all nsqd. Can be changed while running.
        type: what the bodies are: a type that msgspec reads from JSON (Struct, dataclass, dict, ...), a pydantic model,
            or ``str``; :attr:`Message.value` has them. A message whose body cannot be read goes to ``dead_letter`` at
            once; without that it is requeued like every other that failed, to ``on_giving_up`` in the end, and without
            that again and again: it is never finished unhandled.
        decode: instead of ``type``, a plain function that makes the value from the bytes of a body; called where
            :attr:`Message.value` is first read. Whatever it raises makes the body one that cannot be read.
        max_attempts: a message with more goes to ``on_giving_up`` and ``dead_letter`` and is finished. 0: no limit.
        on_giving_up: called on the event loop (awaited, if it is ``async def``) instead of the handler; if it raises,
            the message is requeued.
        dead_letter: a topic that the bodies of such messages are published to, on the nsqd of this consumer, before
            they are finished; with headers that say why, if that topic has any.
        on_error: told of answers that came too late and of nsqd that cannot be used; called on the event loop.
        requeue_delay: until a failed message comes again, times its attempts.
        max_requeue_delay: the most that becomes.
        backoff: the pause after a first failure; it doubles with each further one.
        max_backoff: the longest pause; 0: never pause.
        drain_timeout: how long handlers may take to end when the consumer is closed.
        low_rdy_idle_timeout: with ``max_in_flight`` lower than the number of nsqd: how long one without messages keeps
            its turn.
        low_rdy_timeout: in the same case: how long a busy one keeps its turn.
        ordered: consume every partition in order (redesigned NSQ): one message of a partition at a time, until it is
            finished. ``max_attempts`` does not apply; what was requeued comes again at once. After a failure only its
            partition waits, for ``backoff`` at first and twice as long with each attempt.
        blocked_warn_attempts, blocked_error_attempts: a message with more attempts is logged as blocking its partition.
        desired_tag: of a topic with headers: the messages with this tag come to the consumers that desire it.
        headers: ask for headers also where no nsqlookupd says that the topic has some, as with ``nsqd_tcp_addresses``:
            nsqd's dead letters say in theirs why they are there. A topic without headers refuses that.
        start: where the channel begins, if it has no other consumer then: a datetime with a time zone, a timedelta (so
            long ago), ``"beginning"``, ``"end"``, :meth:`Start.offset` or :meth:`Start.count`; each time that this
            consumer starts. Only FlintMQ's and Youzan's nsqd; with ``nsqd_tcp_addresses`` only topics without
            partitions.
        trace: log every message to ``flintmq.trace``; :attr:`trace` can be changed while running.
        telemetry: a span of OpenTelemetry around the handler, which continues the producer's trace.
        lookup_interval: between two polls of the nsqlookupd; shorter after the start and after a loss.
        lookup_jitter: by how much that is spread, 0 to 1.
        lookup_timeout: until an nsqlookupd must have answered.
        options: what holds for each connection; the next four override it.
        env: time, chance and threads; the real ones if None.
        fetch: how nsqlookupd are asked; over HTTP if None.

    Raises:
        OptionError: an argument is out of range, or ``type`` is one that nothing can build.
        LocalProtocolError: a topic or channel cannot have this name.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: str | Iterable[str] = (),
        nsqlookupd_http_addresses: str | Iterable[str] = (),
        handler: Callable[[Message[Value]], object] | None = None,
        concurrency: int = 1,
        inline: bool = False,
        type: type[Value] | None = None,  # noqa: A002 - the word that says it
        decode: Callable[[bytes], Value] | None = None,
        max_in_flight: int = 200,
        max_attempts: int = 5,
        on_giving_up: Callable[[Message[Value]], object] | None = None,
        dead_letter: str | None = None,
        on_error: Callable[[FlintError], object] | None = None,
        requeue_delay: Seconds = 90.0,
        max_requeue_delay: Seconds = 900.0,
        backoff: Seconds = 1.0,
        max_backoff: Seconds = 120.0,
        drain_timeout: Seconds = 30.0,
        low_rdy_idle_timeout: Seconds = 10.0,
        low_rdy_timeout: Seconds = 30.0,
        ordered: bool = False,
        blocked_warn_attempts: int = 10,
        blocked_error_attempts: int = 50,
        desired_tag: str = "",
        headers: bool = False,
        start: StartAt | None = None,
        trace: bool = False,
        telemetry: Telemetry | None = None,
        lookup_interval: Seconds = 60.0,
        lookup_jitter: float = 0.3,
        lookup_timeout: Seconds = 5.0,
        options: ConnectionOptions | None = None,
        client_id: str | None = None,
        msg_timeout: Seconds | None = None,
        heartbeat_interval: Seconds | None = None,
        sample_rate: int | None = None,
        env: Env | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        check_names(topic, channel, dead_letter)
        self.topic, self.channel = topic, channel
        self._decode = reader(type, decode)
        self._unreadable = Unreadable(topic, channel)
        self._env = env or system_env()
        self._options = (options or ConnectionOptions()).with_overrides(
            client_id=client_id,
            msg_timeout=msg_timeout,
            heartbeat_interval=heartbeat_interval,
            sample_rate=sample_rate,
        )
        self._nsqd, lookups = addresses(nsqd_tcp_addresses, nsqlookupd_http_addresses)
        times = new_times(lookup_interval, lookup_jitter)
        fetches = fetch or HttpFetch(self._options)
        lookup = Lookup(lookups, seconds(lookup_timeout, "lookup_timeout", 0.01, 3600), fetches) if lookups else None
        self.trace = trace
        self._is_ordered = ordered
        self._order = new_order(topic, blocked_warn_attempts, blocked_error_attempts)
        self._mode = handlers.mode_of(handler, inline)
        self._handler = handler if handler is None or telemetry is None else telemetry.around(handler, topic, channel)
        self._opens_envelopes = telemetry is not None and telemetry.has_envelope
        self._concurrency = whole(concurrency, "concurrency", 1, CONCURRENCY_MAX)
        self._attempts_max = whole(max_attempts, "max_attempts", 0, ATTEMPTS_MAX) or ATTEMPTS_MAX + 1
        if ordered:
            self._attempts_max = ATTEMPTS_MAX + 1
            gives_up = on_giving_up is not None or dead_letter is not None
            check_ordered(has_lookup=bool(lookups), samples=bool(self._options.sample_rate), gives_up=gives_up)
        self._on_giving_up = on_giving_up
        same: dict[str, Any] = {"options": self._options, "lookup_timeout": lookup_timeout, "env": env, "fetch": fetch}
        make = partial(Producer, self._nsqd, nsqlookupd_http_addresses=lookups, **same)
        self._dead_letters = None if dead_letter is None else DeadLetters(dead_letter, make)
        self._on_error = on_error
        self._requeue_delay_s = seconds(requeue_delay, "requeue_delay")
        self._requeue_delay_max_s = seconds(max_requeue_delay, "max_requeue_delay")
        self._drain_timeout_s = seconds(drain_timeout, "drain_timeout")
        self._backoff_s = seconds(backoff, "backoff", 0.001)
        self._backoff_max_s = seconds(max_backoff, "max_backoff")
        policy = new_policy(max_in_flight, low_rdy_idle_timeout, low_rdy_timeout)
        self._flow: Flow[Connection] = Flow(policy, Backoff(self._backoff_s, self._backoff_max_s), self._env)
        self._subscriptions = self._new_subscriptions(desired_tag, headers, start)
        self._following = None if lookup is None else self._subscriptions.follow(lookup, times)
        handed_out = ThreadMessage if self._mode is handlers.Mode.THREADS else Message
        self._inbox = Inbox(handed_out, self._attempts_max, self.give_up, self._expired)
        self._set_up()

    def _set_up(self) -> None:
        """Set up what no argument changes."""
        self._stats = ConsumerStats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._poller: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def _backs_off(self) -> bool:
        return self._backoff_max_s > 0

    def _new_subscriptions(self, desired_tag: str, headers: bool, start: StartAt | None) -> Subscriptions:
        return Subscriptions(
            self.topic,
            self.channel,
            self,
            self._flow,
            self._options,
            self._env,
            is_ordered=self._is_ordered,
            desired_tag=checked_tag(desired_tag),
            wants_headers=headers,
            beginning=new_beginning(start, self._is_ordered, self._env),
            tell=self._tell,
            fail=self._fail,
        )

    def __repr__(self) -> str:
        return f"<Consumer {self.topic}/{self.channel} on {len(self._flow.connections)} nsqd>"

    def describe(self) -> str:
        """Show connections, levels and backoff, a line each."""
        return f"{self!r} queued={self._inbox.count}\n{self._flow.describe()}"

    # --- life ---

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect, subscribe, and start the handler. Returns when every nsqd known so far was tried once.

        An nsqd or nsqlookupd that cannot be reached is tried again in the background.

        Raises:
            NsqdError: every nsqd refuses us for good (not authorised, say).
            ConnectionFailed: every nsqd refuses our TLS, or we its certificate (TlsRefused).
        """
        if self._loop is not None:
            raise RuntimeError("a consumer is started once; make another one")
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._flow.start(self._loop)
        try:
            self._subscriptions.keep(self._nsqd)
            if self._following is not None:
                await self._following.poll()
                self._poller = self._loop.create_task(self._following.run())
                self._poller.add_done_callback(self._ended)
            self._start_workers()
            await self._subscriptions.all_tried()
            if self._failure is not None:
                raise self._failure
        except BaseException:
            await self.close()
            raise

    async def run(self) -> None:
        """Consume with the handler until :meth:`stop` is called, then drain and close; starts the consumer if need be.

        Raises:
            NsqdError: every nsqd refuses us for good.
        """
        if self._handler is None:
            raise RuntimeError("run() needs a handler; without one, iterate over the consumer")
        if self._loop is None:
            await self.start()
        try:
            await self._stopped.wait()
        finally:
            await self.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop the flow: RDY 0, messages not handed out are given back, iteration and :meth:`run` end."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._subscriptions.stop()
        self._flow.stop()
        for delivery in self._inbox.remove():
            give_back(delivery)
        self._inbox.end()

    def cancel_handlers(self) -> None:
        """Cancel the handlers that still run: their messages go back at once. A thread goes on until it returns."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Stop, let handlers end (at most ``drain_timeout``), send their answers, and close the connections."""
        self.stop()
        if self._loop is None:
            return
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._poller is not None:
                self._poller.cancel()
            await self._end_tasks()
            await self._subscriptions.close()
            await asyncio.gather(*map(self._leave_politely, self._flow.connections))
            if self._dead_letters is not None:
                await self._dead_letters.close()
            if self._following is not None:
                await self._following.close()
        finally:
            self._unreadable.tell_rest()
            for connection in self._flow.connections:
                connection.abort("closing was cut short")
            self._flow.close()

    async def _end_tasks(self) -> None:
        """Wait for handlers and callbacks, at most for the drain timeout."""
        if not self._tasks:
            return
        timeout_s = self._drain_timeout_s
        _, late = await asyncio.wait([*self._tasks], timeout=min(DRAIN_SAID_S, timeout_s))
        if late and timeout_s > DRAIN_SAID_S:
            log.warning(DRAIN_WAITS, len(late), timeout_s)
            _, late = await asyncio.wait(late, timeout=timeout_s - DRAIN_SAID_S)
        if not late:
            return
        log.warning("%d handlers did not end within %g s and are cancelled", len(late), self._drain_timeout_s)
        for task in late:
            task.cancel()
        await asyncio.wait(late, timeout=CLOSE_WAIT_S)

    async def _leave_politely(self, connection: Connection) -> None:
        if (held := self._flow.held(connection)) > 0:
            log.warning("closing %s with %d messages not answered; nsqd delivers them again", connection.address, held)
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await connection.end_subscription()
        except (TimeoutError, FlintError) as error:
            log.warning("nsqd %s did not confirm the end of the subscription: %s", connection.address, error)
        connection.close()

    # --- pulling ---

    def __aiter__(self) -> AsyncIterator[Message[Value]]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Message[Value]]:
        self._check_pulled()
        async for message in handlers.iterate(self._inbox):
            yield message
        if self._failure is not None:
            raise self._failure

    async def batches(self, size: int, timeout: Seconds = 1.0) -> AsyncIterator[list[Message[Value]]]:
        """Yield lists of messages.

        A list is complete with ``size`` messages, ``timeout`` after its first, or when no more can come before some are
        answered (:attr:`is_starved`).

        Raises:
            NsqdError: every nsqd refuses us for good.
        """
        self._check_pulled()
        whole(size, "size", 1, MAX_IN_FLIGHT_MAX)
        timeout_s = seconds(timeout, "timeout", 0.001)
        while True:
            await self._inbox.wait()
            await asyncio.sleep(0)  # a body that waits for nothing must not keep the loop from answering heartbeats
            if batch := await self._batch(size, timeout_s):
                yield batch
            elif self._inbox.is_ended:
                break
        if self._failure is not None:
            raise self._failure

    async def _batch(self, size: int, timeout_s: float) -> list[Message[Value]]:
        inbox = self._inbox
        batch: list[Message[Value]] = []
        try:
            async with asyncio.timeout(timeout_s):
                while len(batch) < size:
                    if (message := inbox.take(self.time())) is not None:
                        batch.append(message)
                    elif inbox.is_ended or (batch and self.is_starved):
                        break
                    else:
                        await inbox.wait()
        except TimeoutError:
            pass  # what is there by now is the batch
        except BaseException:
            for message in batch:
                message.requeue(0)
            raise
        return batch

    def _check_pulled(self) -> None:
        if self._loop is None:
            raise RuntimeError("start the consumer first: async with Consumer(...) as consumer")
        if self._handler is not None:
            raise RuntimeError("this consumer has a handler; iterate over one without")

    # --- flow ---

    @property
    def max_in_flight(self) -> int:
        """Messages delivered and not answered, over all nsqd."""
        return self._flow.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        self._flow.max_in_flight = whole(count, "max_in_flight", 1, MAX_IN_FLIGHT_MAX)

    @property
    def is_starved(self) -> bool:
        """Whether some nsqd soon cannot deliver more before messages are answered: the time to work off a batch."""
        return self._flow.is_starved

    @property
    def is_paused(self) -> bool:
        """Whether :meth:`pause` holds."""
        return self._flow.is_paused

    def pause(self) -> None:
        """Ask every nsqd for no more messages until :meth:`unpause`."""
        self._flow.is_paused = True
        self._flow.replan()

    def unpause(self) -> None:
        """End :meth:`pause`."""
        self._flow.is_paused = False
        self._flow.replan()

    @property
    def connections(self) -> tuple[str, ...]:
        """``host:port`` of every nsqd that is subscribed now."""
        return tuple(dict.fromkeys(connection.address for connection in self._flow.connections))

    @property
    def partitions(self) -> dict[int, str]:
        """The partitions that are subscribed now, and ``host:port`` of each one's nsqd; empty if the topic has none."""
        found = {each.partition: each.address for each in self._flow.connections if each.partition is not None}
        return dict(sorted(found.items()))

    def stats(self) -> ConsumerStats:
        """Count what was done and say where the consumer stands."""
        return replace(
            self._stats,
            connections=len(self._flow.connections),
            in_flight=self._flow.in_flight,
            queued=self._inbox.count,
            backoff=self._flow.backoff_state.value,
            blocked=len(self._order.blocked),
        )

    # --- what messages need (message.Owner) ---

    def time(self) -> float:
        """The loop's clock."""
        assert self._loop is not None
        return self._loop.time()

    def requeue_delay_s(self, attempts: int) -> float:
        """How long a message with so many attempts waits by default.

        In order, what waits holds up its partition, and RDY 0 holds it back better: Youzan's nsqd ignores the delay.
        """
        if self._is_ordered and self._backs_off:
            return 0.0
        return requeue_delay_s(attempts, self._requeue_delay_s, self._requeue_delay_max_s)

    def message_failed(self) -> None:
        """Count a failure and back off."""
        self._stats.failed += 1
        self._flow.note_failure()

    def _partition_failed(self, connection: Connection, attempts: int) -> None:
        """Count a failure in order, and let only its partition wait: longer with each attempt."""
        self._stats.failed += 1
        if self._backs_off:
            wait_s = min(self._backoff_max_s, self._backoff_s * 2.0 ** min(attempts - 1, LEVEL_MAX))
            self._flow.hold(connection, jittered_s(wait_s, BACKOFF_JITTER, self._env.random.random()))

    def decode(self, body: bytes) -> Value:
        """A body as this consumer's ``type`` or ``decode``."""
        return self._decode(body)

    def unreadable(self, message: Message[Any], error: BodyError) -> None:
        """Answer a message whose body cannot be read: to the dead letters with it, or back to nsqd."""
        if self._dead_letters is not None:
            self.give_up(message, error)
            return
        self._unreadable.tell(message, error, self.time(), BLOCKING if self._is_ordered else REQUEUED)
        message.requeue_failed()

    def give_up(self, message: Message[Any], error: BodyError | None = None) -> None:
        """Let ``on_giving_up`` and the dead-letter topic have a message that will never be processed; then finish it.

        If there is neither, a message whose body cannot be read is requeued: nobody has ever handled it.

        Args:
            error: what is wrong with its body; None: it had too many attempts.
        """
        has_heir = self._on_giving_up is not None or self._dead_letters is not None
        if not has_heir and error is None and (found := read_error(message)) is not None:
            self.unreadable(message, found)
            return
        self._stats.given_up += 1
        where = "" if self._dead_letters is None else f", it goes to topic {self._dead_letters.topic}"
        if error is None:
            attempts = message.attempts - 1
            log.error("giving up on message %r of %s after %d attempts%s", message.id, message.nsqd, attempts, where)
        else:
            self._unreadable.tell(message, error, self.time(), f"giving up on it{where}")
        try:
            result = None if self._on_giving_up is None else self._on_giving_up(message)
        except Exception as raised:  # noqa: BLE001 - the application's error is answered with a requeue
            message.settle(raised, is_given_up=True)
            return
        if asyncio.iscoroutine(result) or self._dead_letters is not None:
            self._run_task(self._bury(message, error, result if asyncio.iscoroutine(result) else None))
        else:
            message.settle(None)

    async def _bury(
        self, message: Message[Any], error: BodyError | None, callback: Coroutine[Any, Any, object] | None
    ) -> None:
        try:
            if callback is not None:
                await callback
            if self._dead_letters is not None and not message.is_answered:
                headers = letter_headers(message, self.topic, self.channel, error)
                await self._dead_letters.bury(message.body, headers)
        except BaseException as raised:
            message.settle(raised, is_given_up=True)
            if not isinstance(raised, Exception):
                raise
        else:
            message.settle(None)

    def call_in_loop(self, function: Callable[[], object]) -> None:
        """Call ``function`` in the loop's thread: now, if this is it."""
        assert self._loop is not None
        if threading.get_ident() == self._thread_id:
            function()
        else:
            self._loop.call_soon_threadsafe(function)

    # --- what connections tell (connection.ConnectionOwner) ---

    def on_messages(self, connection: Connection, records: list[Record]) -> None:
        """Hand messages on."""
        if self._inbox.count > self._flow.queue_count_max or not self._flow.has_joined(connection):
            connection.abort("it sends messages that were not asked for")
            return
        now = self.time()
        delivery = Delivery(connection, self, now, records)
        if connection.partition is not None or connection.is_extended or connection.is_located:
            delivery.partition = connection.partition
            if connection.is_ordered:
                delivery.failed = partial(self._partition_failed, connection)
            if not self._take_apart(connection, delivery):
                return
        if self._opens_envelopes and not (connection.is_extended or connection.is_ordered):
            open_delivery(delivery)
        if self.trace:
            trace_log.received(self.topic, self.channel, delivery, connection.partition, connection.ends)
        self._stats.received += len(records)
        is_first = self._flow.received(connection, len(records), now)
        if self._stopped.is_set():
            give_back(delivery)
        elif self._mode is handlers.Mode.INLINE:
            assert self._handler is not None
            handlers.call_in_place(self._handler, delivery, self._attempts_max, self.give_up)
        else:
            self._inbox.put(delivery)
        if is_first:
            self._flow.replan()

    def _take_apart(self, connection: Connection, delivery: Delivery) -> bool:
        """Take off bodies what stands in front of them, and check the order; False when nsqd sends nonsense."""
        if not (connection.is_extended or connection.is_located):
            return True
        if connection.is_located and connection.partition is None and not is_hex(delivery.records[0][2]):
            self._fail(has_partitions(self.topic))
            return False
        try:
            records, extensions = take_apart(delivery.records, connection.is_extended, connection.is_located)
        except RemoteProtocolError as error:
            connection.abort(str(error))
            return False
        delivery.records, delivery.extensions = records, extensions
        if connection.is_ordered:
            assert connection.partition is not None
            for violation in self._order.check(connection.address, connection.partition, records, extensions):
                self._stats.order_violations += 1
                log.error("out of order: %s", violation)
                self._tell(violation)
        return True

    def on_settled(self, connection: Connection, finished: int, requeued: int, let_go: int) -> None:
        """Count answers."""
        self._stats.dropped += let_go
        if self._flow.settled(connection, finished, requeued + let_go):
            self._stats.finished += finished
            self._stats.requeued += requeued
        else:
            self._stats.dropped += finished + requeued

    def on_message_failed(self, connection: Connection, failure: MessageFailed) -> None:
        """Tell that an answer came too late."""
        self._stats.late += 1
        error = FAILURES[failure.command](failure.code, failure.detail, connection.address)
        log.warning("%s came too late: %s", failure.command, error)
        self._tell(error)

    def on_lost(self, connection: Connection, error: FlintError) -> None:
        """Let a connection go, and its queued messages with it."""
        dropped = sum(len(delivery.records) for delivery in self._inbox.remove(connection))
        self._stats.dropped += dropped
        self._flow.leave(connection, dropped)
        self._subscriptions.note_lost()

    def _expired(self, delivery: Delivery, count: int) -> None:
        """Messages waited here for longer than nsqd waits for an answer."""
        self._stats.dropped += count
        link = delivery.link
        log.warning(
            "%d messages of %s dropped, not handled within %g s: handlers are too slow for max_in_flight %d",
            count, link.address, link.msg_timeout_s, self.max_in_flight,
        )  # fmt: skip
        if isinstance(link, Connection):
            self._flow.forget(link, count)

    # --- handing out ---

    def _start_workers(self) -> None:
        if self._handler is None or self._mode is handlers.Mode.INLINE:
            return
        for _ in range(self._concurrency):
            self._run_task(handlers.worker(self._mode, self._inbox, self._handler, self._env))

    def _run_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task that :meth:`close` waits for."""
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _tell(self, error: FlintError) -> None:
        if self._on_error is None:
            return
        try:
            self._on_error(error)
        except Exception:
            log.exception("on_error raised")

    def _fail(self, error: BaseException) -> None:
        """End the consumer: iteration and :meth:`run` raise ``error``."""
        if self._failure is None and not self._stopped.is_set():
            self._failure = error
            self.stop()
