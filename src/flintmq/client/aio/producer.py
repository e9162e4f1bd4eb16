"""The producer: publishes to one nsqd or several.

Rules of this file:

- Every call ends within its deadline: with a result once nsqd answered OK, or with an exception
  (:mod:`flintmq.client.core.sending`).
- What is on its way is bounded in bytes; who wants to publish more waits, first come first served
  (:mod:`flintmq.client.core.admission`).
- This file checks what is asked for and keeps connections and routes; it sends nothing itself.
- When every nsqd of a topic refuses this client for good (its secret, its certificate), a publish fails at once; the
  connections are tried again all the same.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self, Unpack, overload
from weakref import ref

from flintmq.addresses import shown_url
from flintmq.client.aio.connection import Connection
from flintmq.client.aio.dropped import finish, watch
from flintmq.client.aio.home import check_loop, is_of_closed_loop, running_loop
from flintmq.client.aio.http import HttpFetch
from flintmq.client.aio.lookup import Lookup
from flintmq.client.aio.reconnect import Reconnector
from flintmq.client.core.admission import Admission
from flintmq.client.core.backoff import jittered_s
from flintmq.client.core.of_one_process import Client
from flintmq.client.core.once import Writers
from flintmq.client.core.producer_settings import ProducerOptions, ProducerSettings
from flintmq.client.core.publish import (
    LOOKUP_JITTER,
    Body,
    Carrier,
    Gather,
    Publish,
    Published,
    check_topic,
    checked_body,
    closed_error,
    message_cost,
)
from flintmq.client.core.reconnect import FailureLog
from flintmq.client.core.routing import Routes
from flintmq.client.core.sending import BATCH_BYTES_MAX, BATCH_COUNT_MAX, BYTES_IN_FLIGHT_MAX, Sender
from flintmq.client.core.sharding import ShardingId
from flintmq.client.core.stats import ProducerStats
from flintmq.client.core.topology import Topology
from flintmq.client.core.weak_call import weakly
from flintmq.client.options import (
    DELAY_MAX_S,
    ConnectionOptions,
    Seconds,
    milliseconds,
    seconds,
    switch,
    whole,
)
from flintmq.client.security import Refusals
from flintmq.errors import (
    ConnectionFailed,
    DiscoveryError,
    FlintError,
    NoNsqd,
    PublishRefused,
    without_frames,
)
from flintmq.net.tasks import kept_up, tell
from flintmq.wire.client import MessageFailed, Messages

log = logging.getLogger("flintmq.client")

GAPS_EVERY = 5  # rounds of the follower in which topics with a partition that takes nothing are not looked up


class Producer(Client):
    """Publishes messages.

    ::

        async with Producer("127.0.0.1:4150") as producer:
            await producer.pub("orders", b"hello")
            await producer.mpub("orders", [b"a", b"b"])
            await producer.dpub("emails", b"remind me", delay=30)
            await producer.mpub("emails", [b"me", b"too"], delay=30)  # FlintMQ's nsqd only
            await producer.pub("payments", b"hello", sharding_id=customer)  # in order, to the customer's partition

    Calls may be made concurrently. The ``pub`` calls of one loop turn to one topic travel as one MPUB. All durations
    are seconds or a timedelta. A producer belongs to the event loop it is started in.

    Args:
        nsqd_tcp_addresses: ``host:port`` of one nsqd, or of several that are used in turn; or
        nsqlookupd_http_addresses: ``http://host:port`` of one nsqlookupd or several: every nsqd that has the topic is
            used in turn, every nsqd there is when none has it yet.
        batch: send the ``pub`` calls of one loop turn as one MPUB; False: as one PUB each.
        batch_count_max: messages of such an MPUB.
        batch_bytes_max: bytes of such an MPUB.
        timeout: until a call must have ended.
        retry_unknown: send again what was not answered because the connection was lost; it may then be stored twice.
            False: such a call ends with :class:`PublishUnknown`.
        idempotent: what was not answered is sent again until the deadline, to the nsqd that has the log then, which
            does not store it twice; only FlintMQ's can, also for messages with a delay, a trace id or headers.
        max_bytes_in_flight: bytes on their way, 64 for each message included; more have to wait.
        options: what holds for each connection.
        more: what few producers set: :class:`flintmq.ProducerOptions` has it, with ``max_tries``, ``sharding``,
            ``trace``, ``telemetry``, ``lookup_interval`` and the rest.

    Raises:
        OptionError: an argument is out of range.
        TypeError: there is no such argument.
    """

    def __init__(
        self,
        nsqd_tcp_addresses: str | Iterable[str] = (),
        *,
        nsqlookupd_http_addresses: str | Iterable[str] = (),
        batch: bool = True,
        batch_count_max: int = BATCH_COUNT_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        timeout: Seconds = 5.0,
        retry_unknown: bool = True,
        idempotent: bool = False,
        max_bytes_in_flight: int = BYTES_IN_FLIGHT_MAX,
        options: ConnectionOptions | None = None,
        **more: Unpack[ProducerOptions],
    ) -> None:
        settings = self._settings = ProducerSettings(
            nsqd_tcp_addresses,
            nsqlookupd_http_addresses,
            timeout=timeout,
            retry_unknown=retry_unknown,
            idempotent=idempotent,
            batch_count_max=batch_count_max,
            batch_bytes_max=batch_bytes_max,
            options=options,
            more=more,
        )
        self._lookup: Lookup | None = None
        if settings.lookups:
            fetch = settings.fetch or HttpFetch(settings.options)
            is_counted = settings.producer_id is not None
            came_late = weakly(self._came_late, None)
            self._lookup = Lookup(settings.lookups, settings.lookup_timeout_s, fetch, "w", is_counted, came_late)
        self._batches = switch(batch, "batch")
        self._timeout_s = settings.policy.timeout_s
        self._bytes_max = whole(max_bytes_in_flight, "max_bytes_in_flight", 1, 2**40)
        self._writers = None if settings.producer_id is None else Writers(settings.producer_id, settings.env)
        self._intake = settings.new_intake(self._writers, is_gathered=batch)
        self._reconnector: Reconnector[str] = Reconnector(
            partial(_connect, ref(self)),
            weakly(self._note_attempt, None),
            weakly(self._broke, None),
            settings.env,
            weakly(self._is_anything_waiting, False),
        )
        self._failure_log = FailureLog()
        self._stats = ProducerStats()
        self._admission = Admission(self._bytes_max, self._stats, weakly(self._cause, None))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gather: Gather | None = None
        self._sender: Sender | None = None
        self._refusals = Refusals()
        self._routes = Routes(settings.nsqd)
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._follower: asyncio.Task[None] | None = None
        self._is_closed = False
        self._unwatch: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"<Producer on {len(self._connections)} nsqd, {self._stats.bytes_in_flight} bytes in flight>"

    @property
    def _connections(self) -> tuple[Carrier, ...]:
        return () if self._sender is None else self._sender.connections

    def _cause(self) -> FlintError | None:
        return None if self._sender is None else self._sender.last_error

    def describe(self) -> str:
        """Show connections and what is on its way, a line each."""
        lines = [repr(self), *(connection.describe() for connection in self._connections)]
        unfinished = () if self._sender is None else self._sender.unfinished
        return "\n".join([*lines, *(publish.describe() for publish in unfinished)])

    # --- life ---

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not is_of_closed_loop(error, self._loop):
            await self.close()

    async def start(self) -> None:
        """Connect. Returns when every nsqd was tried once; those that cannot be reached are tried again."""
        if self._loop is not None:
            raise RuntimeError("a producer is started once; make another one")
        self._loop = running_loop("Producer")
        settings, policy = self._settings, self._settings.policy
        sender = self._sender = Sender(
            self._loop,
            self._loop.call_soon,
            settings.env,
            policy,
            self._routes,
            self._refusals,
            self._admission,
            self._stats,
            weakly(self._look_up, None),
            self._intake.traced.__contains__,
            self._writers,
            weakly(self._silent_lookups, ()),
            self._reconnector.hasten,
        )
        if self._batches:
            take = partial(sender.take, will_flush=True)
            self._gather = Gather(self._loop.call_soon, take, sender.flush, policy.count_max, policy.bytes_max)
        if self._lookup is not None:
            follow = partial(_follow, sender, self._routes, settings, weakly(self._look_up, None))
            self._follower = self._loop.create_task(kept_up(follow, "following the topics of a producer"))
        shut = partial(_let_go, self._loop, self._lookups, self._follower, self._reconnector, sender, self._lookup)
        self._unwatch = watch(self, self._loop, f"the producer on {_where(settings)}", shut)
        self._reconnector.keep(settings.nsqd)
        try:
            await self._reconnector.all_tried()
        except BaseException as error:
            if not is_of_closed_loop(error, self._loop):
                await self.close()
            raise

    async def close(self) -> None:
        """Take no more, wait until what was taken has ended (each by its own deadline), and close the connections.

        Raises:
            RuntimeError: it was started in another event loop, so it can only be closed there; nothing was changed.
        """
        if self._sender is None:
            self._is_closed = True
            return
        check_loop("producer", self._loop)
        self._is_closed = True
        self._admission.close()
        try:
            if self._gather is not None:
                self._gather.flush()
            idle = asyncio.Event()
            self._sender.when_idle(idle.set)
            await idle.wait()
        finally:
            await self._shut(self._sender)

    async def _shut(self, sender: Sender) -> None:
        if self._unwatch is not None:
            self._unwatch()
        await _shut(_stop(self._lookups, self._follower, self._reconnector, sender), self._reconnector, self._lookup)

    # --- publishing ---

    @overload
    async def pub(
        self,
        topic: str,
        body: Body,
        *,
        timeout: Seconds | None = None,
        sharding_id: ShardingId | None = None,
        partition: int | None = None,
        trace_id: int,
        headers: Mapping[str, object] | None = None,
    ) -> Published: ...
    @overload
    async def pub(
        self,
        topic: str,
        body: Body,
        *,
        timeout: Seconds | None = None,
        sharding_id: ShardingId | None = None,
        partition: int | None = None,
        trace_id: None = None,
        headers: Mapping[str, object] | None = None,
    ) -> None: ...
    async def pub(
        self,
        topic: str,
        body: Body,
        *,
        timeout: Seconds | None = None,
        sharding_id: ShardingId | None = None,
        partition: int | None = None,
        trace_id: int | None = None,
        headers: Mapping[str, object] | None = None,
    ) -> Published | None:
        """Publish one message; returns when nsqd answered OK.

        The last four are for topics with partitions (redesigned NSQ); headers also for one without that has them.

        Args:
            sharding_id: messages with the same one go to the same partition and stay in the order of the calls.
            partition: the same with the partition itself.
            trace_id: 64 bits that go with the message, which is traced; the call then returns where it is stored, of an
                idempotent producer nsqd and partition alone.
            headers: names and values, for a topic that has them.

        Raises:
            LocalProtocolError: the topic's name is not valid, the body is empty or the headers are too large; nothing
                was sent.
            OptionError: an argument is out of range, or two exclude each other.
            PublishRefused: the message is definitely not stored.
            PublishUnknown: the message may be stored.
            RuntimeError: the producer was not started, or in another event loop; nothing was sent.
        """
        check_topic(topic)
        data = checked_body(body)
        deadline = self._deadline(timeout)
        if self._intake.telemetry is None:
            return await self._pub(topic, data, deadline, sharding_id, partition, trace_id, headers)
        with self._intake.carried(self._routes, topic, data, headers) as (data, headers, undecided):
            return await self._pub(topic, data, deadline, sharding_id, partition, trace_id, headers, undecided)

    async def _pub(
        self,
        topic: str,
        data: bytes,
        deadline: float,
        sharding_id: ShardingId | None,
        partition: int | None,
        trace_id: int | None,
        headers: Mapping[str, object] | None,
        undecided: Mapping[str, str] | None = None,
    ) -> Published | None:
        assert self._loop is not None
        cost = message_cost(data)
        is_plain = sharding_id is None and partition is None and trace_id is None and headers is None
        if is_plain and undecided is None and topic not in self._intake.traced:
            if self._admission.waiting or self._stats.bytes_in_flight + cost > self._bytes_max:
                await self._admit(cost, deadline, 1)
            else:
                self._stats.bytes_in_flight += cost
            if self._gather is not None:
                waiter: asyncio.Future[Published | None] = self._loop.create_future()
                self._gather.add(topic, data, waiter, deadline, cost)
                try:
                    return await waiter
                except asyncio.CancelledError:
                    assert self._sender is not None
                    self._sender.forsaken()
                    raise
            return await self._publish(Publish(topic, [data], [], deadline, cost))
        publish = self._intake.one(topic, data, deadline, sharding_id, partition, trace_id, headers, undecided)
        await self._admit(publish.cost, deadline, 1)
        return await self._publish(publish)

    @overload
    async def mpub(
        self,
        topic: str,
        bodies: Iterable[Body],
        *,
        delay: Seconds | None = None,
        timeout: Seconds | None = None,
        sharding_id: ShardingId | None = None,
        partition: int | None = None,
        trace_id: int | Sequence[int],
        headers: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
    ) -> Published: ...
    @overload
    async def mpub(
        self,
        topic: str,
        bodies: Iterable[Body],
        *,
        delay: Seconds | None = None,
        timeout: Seconds | None = None,
        sharding_id: ShardingId | None = None,
        partition: int | None = None,
        trace_id: None = None,
        headers: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
    ) -> None: ...
    async def mpub(
        self,
        topic: str,
        bodies: Iterable[Body],
        *,
        delay: Seconds | None = None,
        timeout: Seconds | None = None,
        sharding_id: ShardingId | None = None,
        partition: int | None = None,
        trace_id: int | Sequence[int] | None = None,
        headers: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
    ) -> Published | None:
        """Publish several messages as one: all are stored or none; returns when nsqd answered OK.

        Args:
            delay: deliver them not before so long from now, as with :meth:`dpub`; only FlintMQ's nsqd can, without
                headers and trace ids.
            sharding_id, partition: as for :meth:`pub`, for all of them.
            trace_id: as for :meth:`pub`: one for all of them, or a list with one for each. The call then returns where
                the first is stored; with headers nsqd says nothing of that.
            headers: as for :meth:`pub`: names and values for all of them, or a list of such, one for each.

        Raises:
            LocalProtocolError: the topic's name is not valid, there is no body, one is empty, or together they exceed
                ``max_bytes_in_flight``; nothing was sent.
            OptionError: an argument is out of range, or two exclude each other.
            PublishRefused: none is stored.
            PublishUnknown: they may be stored.
            RuntimeError: as of :meth:`pub`.
        """
        deadline = self._deadline(timeout)
        with self._intake.several(
            self._routes, topic, bodies, deadline, delay, sharding_id, partition, trace_id, headers
        ) as publish:
            await self._admit(publish.cost, deadline, len(publish.bodies))
            return await self._publish(publish)

    async def dpub(self, topic: str, body: Body, delay: Seconds, *, timeout: Seconds | None = None) -> None:
        """Publish one message to be delivered not before ``delay`` from now; nsqd sets the maximum (1 h).

        Raises:
            OptionError: the delay is not a duration from 0 to 365 days.
            LocalProtocolError: the topic's name is not valid or the body is empty; nothing was sent.
            PublishRefused: the message is definitely not stored; the delay may be longer than nsqd allows, or the topic
                in order, which needs :meth:`mpub` with ``delay`` and ``sharding_id``.
            PublishUnknown: the message may be stored.
            RuntimeError: as of :meth:`pub`.
        """
        milliseconds(delay, "delay", 0, DELAY_MAX_S)  # None would be no delay
        await self.mpub(topic, [body], delay=delay, timeout=timeout)

    async def _publish(self, publish: Publish) -> Published | None:
        assert self._loop is not None
        assert self._sender is not None
        waiter: asyncio.Future[Published | None] = self._loop.create_future()
        publish.waiters.append(waiter)
        self._sender.take(publish)
        try:
            return await waiter
        except asyncio.CancelledError:
            self._sender.forsaken()
            raise

    async def _admit(self, cost: int, deadline: float, count: int) -> None:
        """Wait until ``cost`` bytes may be sent.

        Args:
            count: messages that have failed if they may not.

        Raises:
            LocalProtocolError: they never may.
            PublishRefused: there was no room in time, or the producer is closed.
        """
        assert self._loop is not None
        if self._admission.admit(cost):
            return
        room: asyncio.Future[None] = self._loop.create_future()
        self._admission.wait(cost, room)
        try:
            async with asyncio.timeout_at(deadline):
                await room
        except TimeoutError:
            self._withdraw(cost, room)
            self._stats.failed += count
            raise self._admission.late() from self._cause()
        except PublishRefused:
            self._stats.failed += count
            raise
        except asyncio.CancelledError:
            self._withdraw(cost, room)
            raise

    def _withdraw(self, cost: int, room: asyncio.Future[None]) -> None:
        was_granted = room.done() and not room.cancelled() and room.exception() is None
        room.cancel()
        self._admission.withdraw(cost, was_granted)

    def _deadline(self, timeout: Seconds | None) -> float:
        """Return when a call must have ended; asked before anything of it is queued, maybe in the wrong loop."""
        loop = running_loop("Producer")
        if loop is not self._loop:
            check_loop("producer", self._loop)
        if self._is_closed:
            raise closed_error()
        return loop.time() + (self._timeout_s if timeout is None else seconds(timeout, "timeout", 0.001))

    def trace(self, topic: str, on: bool = True) -> None:
        """Trace a topic from now on, or no more: each message is sent traced and logged to ``flintmq.trace``.

        Raises:
            LocalProtocolError: no topic can have this name.
            OptionError: the producer is idempotent.
        """
        self._intake.trace(topic, on)

    @property
    def traced(self) -> tuple[str, ...]:
        """The topics that are traced now."""
        return tuple(sorted(self._intake.traced))

    @property
    def connections(self) -> tuple[str, ...]:
        """``host:port`` of every nsqd that is connected now."""
        return tuple(dict.fromkeys(each.address for each in self._connections))

    def stats(self) -> ProducerStats:
        """Count what was done and say where the producer stands."""
        return replace(self._stats, connections=len(self._connections))

    # --- connecting ---

    async def _connect(self, address: str) -> Connection:
        assert self._sender is not None
        connection = await self._open(address)
        if not connection.is_lost:
            self._sender.join(connection)
        return connection

    async def _open(self, address: str) -> Connection:
        assert self._sender is not None
        is_once = self._writers is not None
        settings = self._settings
        return await Connection.open(address, _Owner(self._sender), settings.options, settings.env, once=is_once)

    def _note_attempt(self, address: str, error: FlintError | None) -> None:
        if error is not None:
            without_frames(error)  # it is kept, and they would keep the producer
        self._refusals.note(address, error, self._reconnector.listed)
        if error is None:
            log.info("connected to nsqd %s", address)
            self._failure_log.clear(address)
            return
        assert self._loop is not None
        if self._failure_log.is_new(address, error, self._loop.time()):
            log.warning("cannot publish to nsqd %s: %s", address, error)
        if self._sender is not None:
            self._sender.note_failure(error)

    def _is_anything_waiting(self) -> bool:
        return self._sender is not None and self._sender.is_anything_waiting

    def _broke(self, error: BaseException) -> None:
        log.error("a connection's task failed", exc_info=error)
        self._note_error(error if isinstance(error, FlintError) else ConnectionFailed("nsqd", repr(error)))

    def _note_error(self, error: FlintError) -> None:
        without_frames(error)  # likewise
        if self._sender is not None:
            self._sender.last_error = error

    # --- discovery ---

    def _look_up(self, topic: str) -> None:
        """Refresh what is known of a topic, once at a time."""
        if self._lookup is not None and topic not in self._lookups and not self._is_closed:
            assert self._loop is not None
            task = self._loop.create_task(self._find(topic))
            self._lookups[topic] = task
            task.add_done_callback(lambda _: self._lookups.pop(topic))
            task.add_done_callback(tell(f"looking up topic {topic}"))

    async def _find(self, topic: str) -> None:
        assert self._lookup is not None
        assert self._loop is not None
        try:
            topology = await self._lookup.topic(topic, self._routes.distrusted(topic, self._loop.time()))
            is_guess = not topology.nodes and not topology.is_partitioned
            if is_guess and not topology.is_refused:
                topology = replace(topology, nodes=await self._lookup.nodes())
        except DiscoveryError as error:
            self._note_error(error)
            if self._failure_log.is_new(topic, error, self._loop.time()):
                log.warning("discovery of %s failed: %s", topic, error)
            return
        self._failure_log.clear(topic)
        if not topology.nodes:
            reason = topology.reason if topology.is_refused else "the nsqlookupd list no nsqd"
            self._note_error(NoNsqd(topic, reason))
        self._learn(topic, topology, is_guess)

    def _silent_lookups(self) -> tuple[str, ...]:
        return () if self._lookup is None else self._lookup.unanswered

    def _came_late(self, topic: str) -> None:
        """Go by what an nsqlookupd said of a topic after the others were enough, if that is anything."""
        assert self._lookup is not None
        assert self._loop is not None
        topology = self._lookup.known(topic, self._routes.distrusted(topic, self._loop.time()))
        if not self._is_closed and (topology.nodes or topology.is_partitioned):
            self._learn(topic, topology, is_guess=False)

    def _learn(self, topic: str, topology: Topology, is_guess: bool) -> None:
        self._routes.learn(topic, topology, is_guess)
        self._reconnector.keep(self._routes.addresses())
        if self._sender is not None:
            self._sender.routes_changed(topic)


async def _connect(producer: ref[Producer], address: str) -> Connection:
    """Connect for a producer, if it is there still."""
    found = producer()
    if found is None:
        raise ConnectionFailed(address, "the producer is gone")
    return await found._connect(address)


async def _follow(sender: Sender, routes: Routes, settings: ProducerSettings, look_up: Callable[[str], object]) -> None:
    """Refresh every topic again and again; those for which something waits every second."""
    time = asyncio.get_running_loop().time
    interval_s = settings.lookup_interval_s
    refresh_at = time() + interval_s
    for count in itertools.count(1):
        await asyncio.sleep(min(1.0, interval_s))
        topics = dict.fromkeys(sender.waiting_topics)
        if count % GAPS_EVERY == 0:
            topics.update(dict.fromkeys(routes.gaps))
        if time() >= refresh_at:
            topics.update(dict.fromkeys(routes.topics))
            chance = settings.env.random.random()
            refresh_at = time() + jittered_s(interval_s, LOOKUP_JITTER, chance)
        for topic in topics:
            look_up(topic)


def _where(settings: ProducerSettings) -> str:
    return ", ".join(settings.nsqd or map(shown_url, settings.lookups))


def _stop(
    lookups: Mapping[str, asyncio.Task[None]],
    follower: asyncio.Task[None] | None,
    reconnector: Reconnector[str],
    sender: Sender,
) -> list[asyncio.Task[None]]:
    """Close the connections; returns the tasks that end now."""
    tasks = [*lookups.values(), *([follower] if follower else [])]
    for task in tasks:
        task.cancel()
    reconnector.stop()
    sender.close()
    return tasks


async def _shut(tasks: list[asyncio.Task[None]], reconnector: Reconnector[str], lookup: Lookup | None) -> None:
    await asyncio.gather(*tasks, reconnector.close(), return_exceptions=True)
    if lookup is not None:
        await lookup.close()


def _let_go(
    loop: asyncio.AbstractEventLoop,
    lookups: Mapping[str, asyncio.Task[None]],
    follower: asyncio.Task[None] | None,
    reconnector: Reconnector[str],
    sender: Sender,
    lookup: Lookup | None,
) -> None:
    """Close what belonged to a producer that nothing refers to any more; nobody waits for a publish of it."""
    tasks = _stop(lookups, follower, reconnector, sender)
    if lookup is not None:
        finish(_shut(tasks, reconnector, lookup), loop)


class _Owner:
    """The owner that a producer's connections tell; a :class:`flintmq.client.aio.connection.ConnectionOwner`."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def on_lost(self, connection: Connection, error: FlintError) -> None:
        """Let a connection go; what waited for its answers was told already."""
        self._sender.leave(connection, error)

    def on_messages(self, connection: Connection, messages: Messages) -> None:
        """Nothing is subscribed, so nsqd sends no messages."""
        connection.abort("it sent messages to a producer")

    def on_message_failed(self, connection: Connection, failure: MessageFailed) -> None:
        """No message was answered, so none can have failed."""
        connection.abort(f"it refused a {failure.command} that was never sent")

    def on_settled(self, connection: Connection, finished: Sequence[bytes], requeued: int, dropped: int) -> None:
        """No message is ever answered here."""
