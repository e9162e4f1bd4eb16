"""The consumer: one subscription, on every nsqd that has the topic.

Rules of this file:

- It owns what joins the parts: :mod:`flintmq.client.connection` (bytes), :mod:`flintmq.client.rdy` and
  :mod:`flintmq.client.backoff` (decisions), :mod:`flintmq.client.discovery` (addresses) and
  :mod:`flintmq.client.inbox` (what waits to be handed out). It decides nothing that a policy can decide.
- One task per nsqd keeps it connected; one follows the nsqlookupd; the handler's workers are the only others.
- A connection *joins* when it is subscribed and *leaves* when it is lost. Its queued messages go with it (nsqd delivers
  them again); those in the application's hands stay counted until they are answered.
- Stopping is one way: RDY 0, queued messages given back, handlers end, answers sent, CLS, close.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from flintmq.client import handlers
from flintmq.client.backoff import Backoff, BackoffState, jittered_s, requeue_delay_s
from flintmq.client.connection import Connection, keep_connected
from flintmq.client.discovery import Fetch, Lookup, PollTimes
from flintmq.client.handlers import Handler
from flintmq.client.inbox import Inbox
from flintmq.client.message import Delivery, Message, ThreadMessage
from flintmq.client.options import (
    SOURCE,
    ConnectionOptions,
    Seconds,
    http_addresses,
    seconds,
    system_env,
    tcp_addresses,
    whole,
)
from flintmq.client.rdy import RdyPolicy, Share
from flintmq.env import Env
from flintmq.errors import (
    DiscoveryError,
    FinFailed,
    FlintError,
    LocalProtocolError,
    NsqdError,
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
BACKOFF_JITTER = 0.2
_FAILURES = {"FIN": FinFailed, "REQ": ReqFailed, "TOUCH": TouchFailed}

GivingUp = Callable[[Message], object]
ErrorCallback = Callable[[FlintError], object]


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """Counters since the consumer was made, and where it stands.

    Attributes:
        dropped: queued messages of lost connections; nsqd delivers them again.
        failed: messages whose handler raised.
        given_up: messages with more attempts than ``max_attempts``.
        late: FIN, REQ and TOUCH that nsqd refused because the message was not ours any more.
        in_flight: delivered and not answered, over all connections.
        queued: delivered and not handed out.
        backoff: ``normal``, ``waiting`` or ``probing``.
    """

    received: int
    finished: int
    requeued: int
    dropped: int
    failed: int
    given_up: int
    late: int
    connections: int
    in_flight: int
    queued: int
    backoff: str


class Consumer:
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
        max_attempts: a message with more goes to ``on_giving_up`` and is finished. 0: no limit.
        on_giving_up: called (awaited, if it is ``async def``) instead of the handler; an exception requeues the message.
        on_error: told of answers that came too late and of nsqd that refuse us; called on the event loop.
        requeue_delay: until a failed message comes again, times its attempts.
        max_requeue_delay: the most that becomes.
        backoff: the pause after a first failure; it doubles with each further one.
        max_backoff: the longest pause; 0: never pause.
        drain_timeout: how long handlers may take to end when the consumer is closed.
        low_rdy_idle_timeout: with ``max_in_flight`` lower than the number of nsqd: how long one without messages keeps
            its turn.
        low_rdy_timeout: in the same case: how long a busy one keeps its turn.
        lookup_interval: between two polls of the nsqlookupd.
        lookup_jitter: by how much that is spread, 0 to 1.
        lookup_timeout: until an nsqlookupd must have answered.
        options: what holds for each connection; the next four override it.
        env: time, chance and threads; the real ones if None.
        fetch: how nsqlookupd are asked; over HTTP if None.

    Raises:
        OptionError: an argument is out of range.
        LocalProtocolError: the topic or channel cannot be named so.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: str | Iterable[str] = (),
        nsqlookupd_http_addresses: str | Iterable[str] = (),
        handler: Handler | None = None,
        concurrency: int = 1,
        inline: bool = False,
        max_in_flight: int = 200,
        max_attempts: int = 5,
        on_giving_up: GivingUp | None = None,
        on_error: ErrorCallback | None = None,
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
        _check_names(topic, channel)
        self.topic = topic
        self.channel = channel
        self._env = env or system_env()
        self._options = (options or ConnectionOptions()).with_overrides(
            client_id=client_id,
            msg_timeout=msg_timeout,
            heartbeat_interval=heartbeat_interval,
            sample_rate=sample_rate,
        )
        self._nsqd = tcp_addresses(nsqd_tcp_addresses)
        lookups = http_addresses(nsqlookupd_http_addresses)
        if bool(self._nsqd) == bool(lookups):
            raise OptionError(
                "nsqd_tcp_addresses", self._nsqd, "either nsqd_tcp_addresses or nsqlookupd_http_addresses", SOURCE
            )
        self._lookup = Lookup(lookups, seconds(lookup_timeout, "lookup_timeout", 0.01, 3600), fetch) if lookups else None
        self._listed: dict[str, None] = dict.fromkeys(self._nsqd)
        self._poll_times = PollTimes(
            seconds(lookup_interval, "lookup_interval", 0.01), seconds(lookup_jitter, "lookup_jitter", 0, 1)
        )
        self._handler = handler
        self._is_inline = inline and handler is not None
        if self._is_inline and handler is not None and handlers.is_async(handler):
            raise OptionError("inline", True, "a plain function as the handler; this one is async def", SOURCE)
        self._concurrency = whole(concurrency, "concurrency", 1, CONCURRENCY_MAX)
        self._attempts_max = whole(max_attempts, "max_attempts", 0, ATTEMPTS_MAX) or ATTEMPTS_MAX + 1
        self._on_giving_up = on_giving_up or _log_giving_up
        self._on_error = on_error
        self._requeue_delay_s = seconds(requeue_delay, "requeue_delay")
        self._requeue_delay_max_s = seconds(max_requeue_delay, "max_requeue_delay")
        self._drain_timeout_s = seconds(drain_timeout, "drain_timeout")
        self._backoff = Backoff(seconds(backoff, "backoff", 0.001), seconds(max_backoff, "max_backoff"))
        self._rdy = RdyPolicy(
            whole(max_in_flight, "max_in_flight", 1, MAX_IN_FLIGHT_MAX),
            seconds(low_rdy_idle_timeout, "low_rdy_idle_timeout", 0.001),
            seconds(low_rdy_timeout, "low_rdy_timeout", 0.001),
        )
        in_threads = handler is not None and not self._is_inline and not handlers.is_async(handler)
        self._inbox = Inbox(ThreadMessage if in_threads else Message, self._attempts_max, self._give_up)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._joined: dict[Connection, Share] = {}
        self._orphaned: dict[Connection, Share] = {}
        self._links: dict[str, asyncio.Task[None]] = {}
        self._tried: dict[str, asyncio.Event] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._side_tasks: dict[asyncio.Task[None], None] = {}
        self._poller: asyncio.Task[None] | None = None
        self._plan_timer: asyncio.TimerHandle | None = None
        self._backoff_timer: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None
        self._is_paused = False
        self._is_stopping = False
        self._closing: asyncio.Task[None] | None = None
        self._received = self._finished = self._requeued = 0
        self._dropped = self._failed = self._given_up = self._late = 0

    def __repr__(self) -> str:
        return f"<Consumer {self.topic}/{self.channel} on {len(self._joined)} nsqd>"

    def describe(self) -> str:
        """Show connections, levels and backoff, a line each."""
        lines = [f"{self!r} backoff: {self._backoff.describe()}, queued={self._inbox.count}", self._rdy.describe()]
        lines += [connection.describe() for connection in self._joined]
        return "\n".join(lines)

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
        """
        if self._loop is not None:
            raise RuntimeError("a consumer is started once")
        self._loop = asyncio.get_running_loop()
        try:
            if self._lookup is not None:
                await self._poll_once(self._lookup)
                self._poller = self._loop.create_task(self._follow(self._lookup))
            for address in self._listed:
                self._keep(address)
            self._start_workers()
            await asyncio.gather(*(event.wait() for event in self._tried.values()))
            if self._failure is not None:
                raise self._failure
        except BaseException:
            await self.close()
            raise

    async def run(self) -> None:
        """Consume until :meth:`stop` is called, then drain and close; starts the consumer if need be.

        Raises:
            NsqdError: every nsqd refuses us for good.
        """
        if self._loop is None:
            await self.start()
        try:
            await asyncio.gather(*self._workers)
            while not self._inbox.is_ended:
                await self._inbox.wait()
                await asyncio.sleep(0)
            if self._failure is not None:
                raise self._failure
        finally:
            await self.close()

    def stop(self) -> None:
        """Stop the flow: RDY 0, messages not handed out are given back, iteration and :meth:`run` end."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._loop is not None:
            self._replan()
            for delivery in self._inbox.remove():
                self._give_back(delivery)
        self._inbox.end()

    async def close(self) -> None:
        """Stop, let handlers end (at most ``drain_timeout``), send their answers, and close the connections."""
        self.stop()
        if self._loop is None:
            return
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
        working = [task for task in (*self._workers, *self._side_tasks) if not task.done()]
        if working:
            _, late = await asyncio.wait(working, timeout=self._drain_timeout_s)
            for task in late:
                log.warning("a handler did not end within %g s and is cancelled", self._drain_timeout_s)
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=CLOSE_WAIT_S)
        for link in self._links.values():
            link.cancel()
        await asyncio.gather(*self._links.values(), return_exceptions=True)
        await asyncio.gather(*(self._leave_politely(connection) for connection in [*self._joined]))
        for timer in (self._plan_timer, self._backoff_timer):
            if timer is not None:
                timer.cancel()
        if self._lookup is not None:
            await self._lookup.close()

    async def _leave_politely(self, connection: Connection) -> None:
        held = self._joined[connection].in_flight - connection.unsent_count
        if held > 0:
            log.warning("closing %s with %d messages not answered; nsqd delivers them again", connection.address, held)
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await connection.end_subscription()
        except (TimeoutError, FlintError) as error:
            log.warning("nsqd %s did not confirm the end of the subscription: %s", connection.address, error)
        connection.close()

    # --- pulling ---

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Message]:
        self._check_pulled()
        async for message in handlers.iterate(self._inbox):
            yield message
        if self._failure is not None:
            raise self._failure

    async def batches(self, size: int, timeout: Seconds = 1.0) -> AsyncIterator[list[Message]]:
        """Yield lists of messages: when ``size`` are there, when no more can come before some are answered
        (:attr:`is_starved`), or ``timeout`` after the first.

        Raises:
            NsqdError: every nsqd refuses us for good.
        """
        self._check_pulled()
        whole(size, "size", 1, MAX_IN_FLIGHT_MAX)
        timeout_s = seconds(timeout, "timeout", 0.001)
        inbox = self._inbox
        while True:
            await inbox.wait()
            batch: list[Message] = []
            deadline = asyncio.get_running_loop().time() + timeout_s
            while len(batch) < size:
                if (message := inbox.take()) is not None:
                    batch.append(message)
                elif inbox.is_ended or self.is_starved or not await _something_until(inbox, deadline):
                    break
            if batch:
                yield batch
            elif inbox.is_ended:
                break
        if self._failure is not None:
            raise self._failure

    def _check_pulled(self) -> None:
        if self._loop is None:
            raise RuntimeError("start the consumer first: async with Consumer(...) as consumer")
        if self._handler is not None:
            raise RuntimeError("this consumer has a handler; iterate over one without")

    # --- flow ---

    @property
    def max_in_flight(self) -> int:
        """Messages delivered and not answered, over all nsqd."""
        return self._rdy.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        self._rdy.max_in_flight = whole(count, "max_in_flight", 1, MAX_IN_FLIGHT_MAX)
        self._replan()

    @property
    def is_starved(self) -> bool:
        """Whether some nsqd soon cannot deliver more before messages are answered: the time to work off a batch."""
        return any(share.is_starved(connection.unsent_count) for connection, share in self._joined.items())

    @property
    def is_paused(self) -> bool:
        """Whether :meth:`pause` holds."""
        return self._is_paused

    def pause(self) -> None:
        """Ask every nsqd for no more messages until :meth:`unpause`."""
        self._is_paused = True
        self._replan()

    def unpause(self) -> None:
        """End :meth:`pause`."""
        self._is_paused = False
        self._replan()

    @property
    def connections(self) -> tuple[str, ...]:
        """``host:port`` of every nsqd that is subscribed now."""
        return tuple(connection.address for connection in self._joined)

    def stats(self) -> ConsumerStats:
        """Count what was done."""
        shares = (*self._joined.values(), *self._orphaned.values())
        return ConsumerStats(
            received=self._received,
            finished=self._finished,
            requeued=self._requeued,
            dropped=self._dropped,
            failed=self._failed,
            given_up=self._given_up,
            late=self._late,
            connections=len(self._joined),
            in_flight=sum(share.in_flight for share in shares),
            queued=self._inbox.count,
            backoff=self._backoff.state.value,
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
        self._failed += 1
        self._back_off(self._backoff.failure())

    def call_in_loop(self, function: Callable[[], object]) -> None:
        """Call ``function`` in the loop's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)

    # --- what connections tell (connection.ConnectionOwner) ---

    def on_messages(self, connection: Connection, records: list[Record]) -> None:
        """Hand messages on."""
        now = self.time()
        self._received += len(records)
        self._joined[connection].received(len(records), now)
        delivery = Delivery(connection, self, now, records)
        if self._is_stopping:
            self._give_back(delivery)
        elif self._is_inline:
            assert self._handler is not None
            handlers.call_in_place(self._handler, delivery, self._attempts_max, self._give_up)
        else:
            self._inbox.put(delivery)

    def on_settled(self, connection: Connection, finished: int, requeued: int) -> None:
        """Count answers and adapt levels."""
        self._finished += finished
        self._requeued += requeued
        if finished and self._backoff.state is BackoffState.PROBING:
            self._back_off(self._backoff.success())
        share = self._joined.get(connection)
        if share is None:
            self._settle_orphans(connection, finished + requeued)
            return
        is_first = not share.remaining  # keep: the level may be sent again although nothing else changes
        share.settled(finished + requeued)
        if self._rdy.is_short or share.rdy_count == 0 or (is_first and share.rdy_count == 1):
            self._replan()
        if share.needs_refresh() and not self._is_stopping:
            self._send_rdy(connection, share, share.rdy_count)

    def on_message_failed(self, connection: Connection, failure: MessageFailed) -> None:
        """Tell that an answer came too late."""
        self._late += 1
        error = _FAILURES[failure.command](failure.code, failure.detail, connection.address)
        log.warning("%s came too late: %s", failure.command, error)
        self._tell(error)

    def on_lost(self, connection: Connection, error: FlintError) -> None:
        """Let a connection leave."""
        share = self._joined.pop(connection, None)
        if share is None:
            return
        self._rdy.shares.remove(share)
        for delivery in self._inbox.remove(connection):
            share.in_flight -= len(delivery.records)
            self._dropped += len(delivery.records)
        if share.in_flight > 0:
            self._orphaned[connection] = share
            self._rdy.orphan_count += share.in_flight
            # Messages that the application forgot must not hold back the others for longer than nsqd would wait.
            self._loop_call_later(connection.msg_timeout_s, lambda: self._settle_orphans(connection, share.in_flight))
        if not self._is_stopping:
            self._poll_times.hurry()
            self._replan()

    def _settle_orphans(self, connection: Connection, count: int) -> None:
        share = self._orphaned.get(connection)
        if share is None:
            return
        share.in_flight -= count
        self._rdy.orphan_count -= count
        if share.in_flight <= 0:
            del self._orphaned[connection]
        self._replan()

    # --- connecting ---

    def _keep(self, address: str) -> None:
        assert self._loop is not None
        task = self._links.get(address)
        if task is None or task.done():
            self._tried.setdefault(address, asyncio.Event())
            self._links[address] = self._loop.create_task(
                keep_connected(address, self._connect, self._is_wanted, self._note_attempt, self._env)
            )

    def _is_wanted(self, address: str) -> bool:
        return not self._is_stopping and address in self._listed

    async def _connect(self, address: str) -> Connection:
        connection = await Connection.open(address, self, self._options, self._env)
        share = Share(address, connection.features.max_rdy_count, connection.msg_timeout_s)
        self._joined[connection] = share
        try:
            await connection.subscribe(self.topic, self.channel)
        except BaseException:
            connection.abort("not subscribed")
            raise
        if not connection.is_lost:
            log.info("subscribed to %s/%s on %s", self.topic, self.channel, address)
            self._rdy.shares.append(share)
            self._replan()
        return connection

    def _note_attempt(self, address: str, error: FlintError | None) -> None:
        self._tried[address].set()
        if error is None:
            return
        log.warning("cannot consume from nsqd %s: %s", address, error)
        self._tell(error)
        if isinstance(error, NsqdError) and not error.retryable and not self._joined:
            self._fail(error)

    async def _follow(self, lookup: Lookup) -> None:
        while True:
            await asyncio.sleep(self._poll_times.next_s(self._jittered))
            await self._poll_once(lookup)
            for address in self._listed:
                self._keep(address)

    async def _poll_once(self, lookup: Lookup) -> None:
        try:
            nodes = await lookup.topic(self.topic)
        except DiscoveryError as error:
            log.warning("discovery of %s failed: %s", self.topic, error)
            self._poll_times.hurry()
        else:
            self._listed = {node.address: None for node in nodes}

    # --- deciding ---

    def _replan(self) -> None:
        """Let the policy decide and send what it says."""
        if self._loop is None:
            return
        stopped = self._is_stopping or self._is_paused
        self._rdy.limit = 0 if stopped else self._backoff.limit
        now = self._loop.time()
        order = self._rdy.shares.copy()
        self._env.random.shuffle(order)
        changes = self._rdy.plan(now, order)
        if changes:
            connections = {id(share): connection for connection, share in self._joined.items()}
            for share, count in changes:
                connections[id(share)].rdy(count)
        if self._plan_timer is not None:
            self._plan_timer.cancel()
        next_at = None if self._is_stopping else self._rdy.next_at(now)
        self._plan_timer = None if next_at is None else self._loop.call_at(next_at, self._replan)

    def _send_rdy(self, connection: Connection, share: Share, count: int) -> None:
        share.sent(count, self.time())
        connection.rdy(count)

    def _back_off(self, wait_s: float | None) -> None:
        """Follow the backoff policy after a result."""
        if wait_s is not None:
            log.info("%r backs off for %.3g s", self, wait_s)
            self._backoff_timer = self._loop_call_later(
                jittered_s(wait_s, BACKOFF_JITTER, self._env.random.random()), self._probe
            )
        self._replan()

    def _probe(self) -> None:
        self._backoff.elapsed()
        self._replan()

    def _jittered(self, interval_s: float, jitter: float) -> float:
        return jittered_s(interval_s, jitter, self._env.random.random())

    def _loop_call_later(self, delay_s: float, function: Callable[[], object]) -> asyncio.TimerHandle:
        assert self._loop is not None
        return self._loop.call_later(delay_s, function)

    # --- handing out ---

    def _start_workers(self) -> None:
        if self._handler is None or self._is_inline:
            return
        for _ in range(self._concurrency):
            if handlers.is_async(self._handler):
                coroutine = handlers.work(self._inbox, self._handler)
            else:
                coroutine = handlers.work_in_thread(self._inbox, self._handler, self._env)
            assert self._loop is not None
            worker = self._loop.create_task(coroutine)
            worker.add_done_callback(self._worker_ended)
            self._workers.append(worker)

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self._fail(error)

    def _give_back(self, delivery: Delivery) -> None:
        for _, _, message_id, _ in delivery.records:
            delivery.link.requeue(message_id, 0)

    def _give_up(self, message: Message) -> None:
        """Let ``on_giving_up`` have a message that failed too often, then finish it."""
        self._given_up += 1
        try:
            result = self._on_giving_up(message)
        except Exception as error:  # noqa: BLE001 - the application's error is answered with a requeue
            message.settle(error)
            return
        if asyncio.iscoroutine(result):
            self._run_aside(_settle_after(message, result))
        else:
            message.settle(None)

    def _run_aside(self, coroutine: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        self._side_tasks[task] = None
        task.add_done_callback(self._side_tasks.pop)

    def _tell(self, error: FlintError) -> None:
        if self._on_error is not None:
            self._on_error(error)

    def _fail(self, error: BaseException) -> None:
        """End the consumer: iteration and :meth:`run` raise ``error``."""
        if self._failure is None and not self._is_stopping:
            self._failure = error
            self.stop()


def _check_names(topic: str, channel: str) -> None:
    for code, what, name in (("E_BAD_TOPIC", "topic", topic), ("E_BAD_CHANNEL", "channel", channel)):
        if not isinstance(name, str) or not is_valid_name(name):
            raise LocalProtocolError(
                code, f"{what} name {name!r} is not valid: 1 to 64 of [.a-zA-Z0-9_-], optionally #ephemeral"
            )


def _log_giving_up(message: Message) -> None:
    log.error("giving up on message %r of %s after %d attempts", message.id, message.nsqd, message.attempts - 1)


async def _settle_after(message: Message, callback: Coroutine[Any, Any, object]) -> None:
    async with message:
        await callback


async def _something_until(inbox: Inbox, deadline: float) -> bool:
    try:
        async with asyncio.timeout_at(deadline):
            await inbox.wait()
    except TimeoutError:
        return False
    return True
