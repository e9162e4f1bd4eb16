"""The consumer: one subscription, on every nsqd that has the topic.

Rules of this file:

- It joins the parts and decides nothing that a policy can decide: :mod:`flintmq.client.connection` (bytes),
  :mod:`flintmq.client.flow` (RDY, backoff), :mod:`flintmq.client.discovery` (addresses), :mod:`flintmq.client.inbox`
  (what waits to be handed out), :mod:`flintmq.client.handlers` (who is handed it).
- One task per nsqd keeps it connected (:mod:`flintmq.client.links`); one follows the nsqlookupd; the handler's workers
  are the only others.
- When a connection is lost, its queued messages go with it: nsqd delivers them again.
- Stopping is one way: RDY 0, queued messages given back, handlers end, answers sent, CLS, close.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, cast

from flintmq.client import handlers
from flintmq.client.backoff import Backoff, jittered_s, requeue_delay_s
from flintmq.client.bodies import decoder
from flintmq.client.connection import Connection
from flintmq.client.dead_letters import DeadLetters
from flintmq.client.discovery import Fetch, HttpFetch, Lookup, PollTimes
from flintmq.client.flow import Flow
from flintmq.client.inbox import Inbox
from flintmq.client.links import Links
from flintmq.client.message import Delivery, Message, ThreadMessage, Value
from flintmq.client.options import (
    SOURCE,
    ConnectionOptions,
    Seconds,
    addresses,
    seconds,
    system_env,
    whole,
)
from flintmq.client.producer import Producer
from flintmq.client.rdy import RdyPolicy
from flintmq.client.security import Refusals
from flintmq.env import Env
from flintmq.errors import (
    BodyError,
    DiscoveryError,
    FinFailed,
    FlintError,
    LocalProtocolError,
    OptionError,
    ReqFailed,
    TouchFailed,
)
from flintmq.limits import ATTEMPTS_MAX
from flintmq.names import is_valid_name
from flintmq.wire.client import MessageFailed, Record

log = logging.getLogger("flintmq.client")

MAX_IN_FLIGHT_MAX = 1_000_000
CONCURRENCY_MAX = 10_000
CLOSE_WAIT_S = 2.0
_FAILURES = {"FIN": FinFailed, "REQ": ReqFailed, "TOUCH": TouchFailed}


@dataclass(slots=True)
class ConsumerStats:
    """Counters since the consumer was made, and where it stands.

    Attributes:
        received: messages delivered.
        finished: FINs sent.
        requeued: REQs sent.
        dropped: messages whose connection was lost, or whose time was over, before they were handed out or answered;
            nsqd delivers them again.
        failed: messages whose handler raised.
        given_up: messages with more attempts than ``max_attempts``.
        late: FIN, REQ and TOUCH that nsqd refused because the message was not ours any more.
        connections: nsqd that are subscribed now.
        in_flight: delivered and not answered, over all connections.
        queued: delivered and not handed out.
        backoff: ``normal``, ``waiting`` or ``probing``.
    """

    received: int = 0
    finished: int = 0
    requeued: int = 0
    dropped: int = 0
    failed: int = 0
    given_up: int = 0
    late: int = 0
    connections: int = 0
    in_flight: int = 0
    queued: int = 0
    backoff: str = "normal"


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
        type: what the bodies are: a type that msgspec reads from JSON (Struct, dataclass, dict, ...) or ``str``;
            :attr:`Message.value` has them. A body that is something else is given up at once.
        max_attempts: a message with more goes to ``on_giving_up`` and ``dead_letter`` and is finished. 0: no limit.
        on_giving_up: called on the event loop (awaited, if it is ``async def``) instead of the handler; if it raises,
            the message is requeued.
        dead_letter: a topic that the bodies of such messages are published to, on the nsqd of this consumer, before
            they are finished.
        on_error: told of answers that came too late and of nsqd that cannot be used; called on the event loop.
        requeue_delay: until a failed message comes again, times its attempts.
        max_requeue_delay: the most that becomes.
        backoff: the pause after a first failure; it doubles with each further one.
        max_backoff: the longest pause; 0: never pause.
        drain_timeout: how long handlers may take to end when the consumer is closed.
        low_rdy_idle_timeout: with ``max_in_flight`` lower than the number of nsqd: how long one without messages keeps
            its turn.
        low_rdy_timeout: in the same case: how long a busy one keeps its turn.
        lookup_interval: between two polls of the nsqlookupd; shorter after the start and after a loss.
        lookup_jitter: by how much that is spread, 0 to 1.
        lookup_timeout: until an nsqlookupd must have answered.
        options: what holds for each connection; the next four override it.
        env: time, chance and threads; the real ones if None.
        fetch: how nsqlookupd are asked; over HTTP if None.

    Raises:
        OptionError: an argument is out of range.
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
        _check_names(topic, channel, dead_letter)
        self.topic = topic
        self.channel = channel
        self._decode = decoder(type or bytes)
        self._env = env or system_env()
        self._options = (options or ConnectionOptions()).with_overrides(
            client_id=client_id,
            msg_timeout=msg_timeout,
            heartbeat_interval=heartbeat_interval,
            sample_rate=sample_rate,
        )
        self._nsqd, lookups = addresses(nsqd_tcp_addresses, nsqlookupd_http_addresses)
        self._links = Links(self._connect, self._note_attempt, self._fail, self._env)
        lookup_timeout_s = seconds(lookup_timeout, "lookup_timeout", 0.01, 3600)
        self._lookup = Lookup(lookups, lookup_timeout_s, fetch or HttpFetch(self._options)) if lookups else None
        self._poll_times = PollTimes(
            seconds(lookup_interval, "lookup_interval", 0.01), seconds(lookup_jitter, "lookup_jitter", 0, 1)
        )
        self._mode = handlers.mode_of(handler, inline)
        self._handler = handler
        self._concurrency = whole(concurrency, "concurrency", 1, CONCURRENCY_MAX)
        self._attempts_max = whole(max_attempts, "max_attempts", 0, ATTEMPTS_MAX) or ATTEMPTS_MAX + 1
        self._on_giving_up = on_giving_up
        same: dict[str, Any] = {"options": self._options, "lookup_timeout": lookup_timeout, "env": env, "fetch": fetch}
        make = partial(Producer, self._nsqd, nsqlookupd_http_addresses=lookups, **same)
        self._dead_letters = None if dead_letter is None else DeadLetters(dead_letter, make)
        self._on_error = on_error
        self._requeue_delay_s = seconds(requeue_delay, "requeue_delay")
        self._requeue_delay_max_s = seconds(max_requeue_delay, "max_requeue_delay")
        self._drain_timeout_s = seconds(drain_timeout, "drain_timeout")
        policy = RdyPolicy(
            whole(max_in_flight, "max_in_flight", 1, MAX_IN_FLIGHT_MAX),
            seconds(low_rdy_idle_timeout, "low_rdy_idle_timeout", 0.001),
            seconds(low_rdy_timeout, "low_rdy_timeout", 0.001),
        )
        pause = Backoff(seconds(backoff, "backoff", 0.001), seconds(max_backoff, "max_backoff"))
        self._flow = Flow(policy, pause, self._env)
        handed_out = ThreadMessage if self._mode is handlers.Mode.THREADS else Message
        self._inbox = Inbox(handed_out, self._attempts_max, self.give_up, self._expired)
        self._stats = ConsumerStats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._poller: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._lost_one = asyncio.Event()
        self._is_blind = False
        self._refusals = Refusals()
        self._failure: BaseException | None = None

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
            self._links.keep(self._nsqd)
            if self._lookup is not None:
                await self._poll(self._lookup)
                self._poller = self._loop.create_task(self._follow(self._lookup))
                self._poller.add_done_callback(self._ended)
            self._start_workers()
            await self._links.all_tried()
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
        self._links.stop()
        self._flow.stop()
        for delivery in self._inbox.remove():
            _give_back(delivery)
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
            await self._links.close()
            await asyncio.gather(*map(self._leave_politely, self._flow.connections))
            if self._dead_letters is not None:
                await self._dead_letters.close()
            if self._lookup is not None:
                await self._lookup.close()
        finally:
            for connection in self._flow.connections:
                connection.abort("closing was cut short")
            self._flow.close()

    async def _end_tasks(self) -> None:
        """Wait for handlers and callbacks, at most for the drain timeout."""
        if not self._tasks:
            return
        _, late = await asyncio.wait([*self._tasks], timeout=self._drain_timeout_s)
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
        return tuple(connection.address for connection in self._flow.connections)

    def stats(self) -> ConsumerStats:
        """Count what was done and say where the consumer stands."""
        return replace(
            self._stats,
            connections=len(self._flow.connections),
            in_flight=self._flow.in_flight,
            queued=self._inbox.count,
            backoff=self._flow.backoff_state.value,
        )

    # --- what messages need (message.Owner) ---

    def time(self) -> float:
        """The loop's clock."""
        assert self._loop is not None
        return self._loop.time()

    def requeue_delay_s(self, attempts: int) -> float:
        """How long a message with so many attempts waits by default."""
        return requeue_delay_s(attempts, self._requeue_delay_s, self._requeue_delay_max_s)

    def message_failed(self) -> None:
        """Count a failure and back off."""
        self._stats.failed += 1
        self._flow.note_failure()

    def decode(self, body: bytes) -> Value:
        """A body as this consumer's ``type``."""
        return cast(Value, self._decode(body))

    def give_up(self, message: Message[Any], error: BodyError | None = None) -> None:
        """Let ``on_giving_up`` and the dead-letter topic have a message that will never be processed; then finish it.

        Args:
            error: what is wrong with its body; None: it had too many attempts.
        """
        self._stats.given_up += 1
        why = f"after {message.attempts - 1} attempts" if error is None else f"because {error}"
        where = "" if self._dead_letters is None else f", it goes to topic {self._dead_letters.topic}"
        log.error("giving up on message %r of %s %s%s", message.id, message.nsqd, why, where)
        try:
            result = None if self._on_giving_up is None else self._on_giving_up(message)
        except Exception as raised:  # noqa: BLE001 - the application's error is answered with a requeue
            message.settle(raised)
            return
        if asyncio.iscoroutine(result) or self._dead_letters is not None:
            self._run_task(self._bury(message, result if asyncio.iscoroutine(result) else None))
        else:
            message.settle(None)

    async def _bury(self, message: Message[Any], callback: Coroutine[Any, Any, object] | None) -> None:
        async with message:
            if callback is not None:
                await callback
            if self._dead_letters is not None and not message.is_answered:
                await self._dead_letters.bury(message.body)

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
        self._stats.received += len(records)
        is_first = self._flow.received(connection, len(records), now)
        delivery = Delivery(connection, self, now, records)
        if self._stopped.is_set():
            _give_back(delivery)
        elif self._mode is handlers.Mode.INLINE:
            assert self._handler is not None
            handlers.call_in_place(self._handler, delivery, self._attempts_max, self.give_up)
        else:
            self._inbox.put(delivery)
        if is_first:
            self._flow.replan()

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
        error = _FAILURES[failure.command](failure.code, failure.detail, connection.address)
        log.warning("%s came too late: %s", failure.command, error)
        self._tell(error)

    def on_lost(self, connection: Connection, error: FlintError) -> None:
        """Let a connection go, and its queued messages with it."""
        dropped = sum(len(delivery.records) for delivery in self._inbox.remove(connection))
        self._stats.dropped += dropped
        self._flow.leave(connection, dropped)
        if self._poll_times.hurry():
            self._lost_one.set()

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

    # --- connecting ---

    async def _connect(self, address: str) -> Connection:
        connection = await Connection.open(address, self, self._options, self._env)
        try:
            await connection.subscribe(self.topic, self.channel)
        except BaseException:
            connection.abort("not subscribed")
            raise
        if not connection.is_lost:
            log.info("subscribed to %s/%s on %s", self.topic, self.channel, address)
            self._flow.join(connection)
        return connection

    def _note_attempt(self, address: str, error: FlintError | None) -> None:
        self._refusals.note(address, error, self._links.listed)
        if error is None:
            return
        log.warning("cannot consume from nsqd %s: %s", address, error)
        self._tell(error)
        refusal = self._refusals.of_all(self._links.listed)
        if refusal is not None and not self._flow.connections:
            self._fail(refusal)

    async def _follow(self, lookup: Lookup) -> None:
        while True:
            self._lost_one.clear()
            try:
                async with asyncio.timeout(self._poll_times.next_s(self._jittered)):
                    await self._lost_one.wait()
            except TimeoutError:
                await self._poll(lookup)

    async def _poll(self, lookup: Lookup) -> None:
        try:
            nodes = await lookup.topic(self.topic)
        except DiscoveryError as error:
            log.warning("discovery of %s failed: %s", self.topic, error)
            if not self._is_blind:
                self._poll_times.hurry()
            self._is_blind = True
        else:
            self._is_blind = False
            self._links.keep(node.address for node in nodes)

    def _jittered(self, interval_s: float, jitter: float) -> float:
        return jittered_s(interval_s, jitter, self._env.random.random())

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


def _check_names(topic: str, channel: str, dead_letter: str | None) -> None:
    names = [("E_BAD_TOPIC", "topic", topic), ("E_BAD_CHANNEL", "channel", channel)]
    if dead_letter is not None:
        names.append(("E_BAD_TOPIC", "dead-letter topic", dead_letter))
    for code, what, name in names:
        if not is_valid_name(name):
            raise LocalProtocolError(
                code, f"{what} name {name!r} is not valid: 1 to 64 of [.a-zA-Z0-9_-], optionally #ephemeral"
            )
    if dead_letter == topic:
        raise OptionError("dead_letter", dead_letter, "another topic than the one that is consumed", SOURCE)


def _give_back(delivery: Delivery) -> None:
    for _, _, message_id, _ in delivery.records:
        delivery.link.requeue(message_id, 0)
