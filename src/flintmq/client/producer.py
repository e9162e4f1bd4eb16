"""The producer: publishes to one nsqd or several.

Rules of this file:

- Every call ends within its deadline: with None once nsqd answered OK, or with an exception. A publish is always in
  exactly one place: gathered, parked (no nsqd is up), sent, or waiting for its next try; its timer runs in all of them.
- What is on its way is bounded in bytes; who wants to publish more waits, first come first served.
- The retry table of reference/youzan.md 1.8: an error in the message is final; "not here, not now" is tried again, up
  to ``max_tries``; without an answer (connection lost) it is sent to another nsqd, which may store it twice
  (``retry_unknown``): at least once, as everything in NSQ.
- When every nsqd of a topic refuses this client for good (its secret, its certificate), a publish fails at once; the
  connections are tried again all the same.
- Nothing is sent again from inside a callback of a connection: that connection is about to be lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias

from flintmq.client.backoff import jittered_s
from flintmq.client.connection import AnswerLost, Connection
from flintmq.client.discovery import Fetch, HttpFetch, Lookup
from flintmq.client.links import Links
from flintmq.client.options import (
    DELAY_MAX_S,
    ConnectionOptions,
    Seconds,
    addresses,
    milliseconds,
    seconds,
    system_env,
    whole,
)
from flintmq.client.publish import (
    Gather,
    Publish,
    check_topic,
    checked_bodies,
    checked_body,
    is_bad_message,
    leaves_open,
    message_cost,
    messages_cost,
)
from flintmq.client.security import Refusals
from flintmq.env import Env
from flintmq.errors import (
    ConnectionFailed,
    DiscoveryError,
    FlintError,
    LocalProtocolError,
    NoNsqd,
    NsqdError,
    PublishRefused,
)
from flintmq.wire.client import MessageFailed, Record

log = logging.getLogger("flintmq.client")

BATCH_COUNT_MAX = 200
BATCH_BYTES_MAX = 1024 * 1024
BYTES_IN_FLIGHT_MAX = 16 * 1024 * 1024
TRIES_MAX = 3
RETRY_BASE_S = 0.02
RETRY_MAX_S = 1.0
RETRY_JITTER = 0.5
TOPIC_COUNT_MAX = 10_000
STALLED_SHARE = 0.9
LOOKUP_JITTER = 0.3

Body: TypeAlias = Any
"""A body: bytes, or a value that msgspec writes as JSON (Struct, dataclass, dict, list, number); not text."""


@dataclass(slots=True)
class ProducerStats:
    """Counters since the producer was made, and where it stands.

    Attributes:
        published: messages that nsqd answered OK.
        failed: messages whose call ended with an exception.
        commands: PUB, MPUB and DPUB sent.
        retries: commands sent again.
        bytes_in_flight: what counts against ``max_bytes_in_flight`` now.
        connections: nsqd that are connected now.
    """

    published: int = 0
    failed: int = 0
    commands: int = 0
    retries: int = 0
    bytes_in_flight: int = 0
    connections: int = 0


@dataclass(slots=True)
class _Turns:
    """The connections that a topic is published over, and whose turn it was last."""

    connections: list[Connection]
    next: int


class Producer:
    """Publishes messages.

    ::

        async with Producer("127.0.0.1:4150") as producer:
            await producer.pub("orders", b"hello")
            await producer.mpub("orders", [b"a", b"b"])
            await producer.dpub("emails", b"remind me", delay=30)

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
        max_tries: how often a publish may be refused with an error that can pass.
        max_bytes_in_flight: bytes on their way, 64 for each message included; more have to wait.
        lookup_interval: until a topic's nsqd are looked up again.
        lookup_timeout: until an nsqlookupd must have answered.
        options: what holds for each connection; the next two override it.
        env: time and chance; the real ones if None.
        fetch: how nsqlookupd are asked; over HTTP if None.

    Raises:
        OptionError: an argument is out of range.
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
        max_tries: int = TRIES_MAX,
        max_bytes_in_flight: int = BYTES_IN_FLIGHT_MAX,
        lookup_interval: Seconds = 60.0,
        lookup_timeout: Seconds = 5.0,
        options: ConnectionOptions | None = None,
        client_id: str | None = None,
        heartbeat_interval: Seconds | None = None,
        env: Env | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        self._env = env or system_env()
        self._options = (options or ConnectionOptions()).with_overrides(
            client_id=client_id, heartbeat_interval=heartbeat_interval
        )
        self._nsqd, lookups = addresses(nsqd_tcp_addresses, nsqlookupd_http_addresses)
        lookup_timeout_s = seconds(lookup_timeout, "lookup_timeout", 0.01, 3600)
        self._lookup = Lookup(lookups, lookup_timeout_s, fetch or HttpFetch(self._options)) if lookups else None
        self._lookup_interval_s = seconds(lookup_interval, "lookup_interval", 0.01)
        self._batches = batch
        self._batch_count_max = whole(batch_count_max, "batch_count_max", 1, 100_000)
        self._batch_bytes_max = whole(batch_bytes_max, "batch_bytes_max", 1, 2**30)
        self._timeout_s = seconds(timeout, "timeout", 0.001)
        self._retries_unknown = retry_unknown
        self._tries_max = whole(max_tries, "max_tries", 1, 1000)
        self._bytes_max = whole(max_bytes_in_flight, "max_bytes_in_flight", 1, 2**40)
        self._links = Links(self._connect, self._note_attempt, self._broke, self._env)
        self._stats = ProducerStats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gather: Gather | None = None
        self._up: dict[str, Connection] = {}
        self._refusals = Refusals()
        self._routes: dict[str, tuple[str, ...]] = {}
        self._turns: dict[str, _Turns] = {}
        self._unfinished: dict[Publish, None] = {}
        self._parked: dict[Publish, None] = {}
        self._unflushed: dict[Connection, None] = {}
        self._admission: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._follower: asyncio.Task[None] | None = None
        self._idle: asyncio.Future[None] | None = None
        self._last_error: FlintError | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Producer on {len(self._up)} nsqd, {self._stats.bytes_in_flight} bytes in flight>"

    def describe(self) -> str:
        """Show connections and what is on its way, a line each."""
        lines = [repr(self), *(connection.describe() for connection in self._up.values())]
        return "\n".join([*lines, *(publish.describe() for publish in self._unfinished)])

    # --- life ---

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect. Returns when every nsqd was tried once; those that cannot be reached are tried again."""
        if self._loop is not None:
            raise RuntimeError("a producer is started once; make another one")
        self._loop = asyncio.get_running_loop()
        if self._batches:
            self._gather = Gather(
                self._loop, self._begin, self._flush_connections, self._batch_count_max, self._batch_bytes_max
            )
        if self._lookup is not None:
            self._follower = self._loop.create_task(self._follow())
        self._links.keep(self._nsqd)
        try:
            await self._links.all_tried()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Take no more, wait until what was taken has ended (each by its own deadline), and close the connections."""
        self._is_closed = True
        if self._loop is None:
            return
        while self._admission:
            _, waiter = self._admission.popleft()
            if not waiter.done():
                waiter.set_exception(_closed())
        try:
            if self._gather is not None:
                self._gather.flush()
            if self._unfinished:
                self._idle = self._loop.create_future()
                await self._idle
        finally:
            await self._shut()

    async def _shut(self) -> None:
        tasks = [*self._lookups.values(), *([self._follower] if self._follower else [])]
        for task in tasks:
            task.cancel()
        self._links.stop()
        for connection in [*self._up.values()]:
            connection.close()
        for publish in [*self._unfinished]:
            self._fail(publish, "CLOSED", "the producer was closed before nsqd answered", retryable=False)
        await asyncio.gather(*tasks, self._links.close(), return_exceptions=True)
        if self._lookup is not None:
            await self._lookup.close()

    # --- publishing ---

    async def pub(self, topic: str, body: Body, *, timeout: Seconds | None = None) -> None:
        """Publish one message; returns when nsqd answered OK.

        Raises:
            LocalProtocolError: the topic's name is not valid or the body is empty; nothing was sent.
            PublishRefused: the message is definitely not stored.
            PublishUnknown: the message may be stored.
        """
        check_topic(topic)
        data = checked_body(body)
        deadline = self._deadline(timeout)
        cost = message_cost(data)
        if self._admission or self._stats.bytes_in_flight + cost > self._bytes_max:
            await self._admit(cost, deadline)
        else:
            self._stats.bytes_in_flight += cost
        if self._gather is not None:
            await self._gather.add(topic, data, deadline, cost)
        else:
            await self._publish(topic, [data], deadline, cost)

    async def mpub(self, topic: str, bodies: Iterable[Body], *, timeout: Seconds | None = None) -> None:
        """Publish several messages as one: all are stored or none; returns when nsqd answered OK.

        Raises:
            LocalProtocolError: the topic's name is not valid, there is no body, one is empty, or together they exceed
                ``max_bytes_in_flight``; nothing was sent.
            PublishRefused: none is stored.
            PublishUnknown: they may be stored.
        """
        check_topic(topic)
        data = checked_bodies(bodies)
        if not data:
            raise LocalProtocolError("E_BAD_MESSAGE", "MPUB of no message; at least one is needed")
        await self._admit_and_publish(topic, data, timeout)

    async def dpub(self, topic: str, body: Body, delay: Seconds, *, timeout: Seconds | None = None) -> None:
        """Publish one message to be delivered not before ``delay`` from now; nsqd sets the maximum (1 h).

        Raises:
            OptionError: the delay is not a duration from 0 to 365 days.
            LocalProtocolError: the topic's name is not valid or the body is empty; nothing was sent.
            PublishRefused: the message is definitely not stored; the delay may be longer than nsqd allows.
            PublishUnknown: the message may be stored.
        """
        check_topic(topic)
        defer_ms = milliseconds(delay, "delay", 0, DELAY_MAX_S)
        await self._admit_and_publish(topic, [checked_body(body)], timeout, defer_ms)

    async def _admit_and_publish(
        self, topic: str, data: list[bytes], timeout: Seconds | None, defer_ms: int | None = None
    ) -> None:
        deadline = self._deadline(timeout)
        cost = messages_cost(data)
        await self._admit(cost, deadline)
        await self._publish(topic, data, deadline, cost, defer_ms)

    async def _publish(
        self, topic: str, data: list[bytes], deadline: float, cost: int, defer_ms: int | None = None
    ) -> None:
        assert self._loop is not None
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._begin(Publish(topic, data, [waiter], deadline, cost, defer_ms=defer_ms))
        await waiter

    def _deadline(self, timeout: Seconds | None) -> float:
        if self._loop is None:
            raise RuntimeError("start the producer first: async with Producer(...) as producer")
        if self._is_closed:
            raise _closed()
        return self._loop.time() + (self._timeout_s if timeout is None else seconds(timeout, "timeout", 0.001))

    def stats(self) -> ProducerStats:
        """Count what was done and say where the producer stands."""
        return replace(self._stats, connections=len(self._up))

    # --- back-pressure ---

    async def _admit(self, cost: int, deadline: float) -> None:
        """Wait until ``cost`` bytes may be sent."""
        if cost > self._bytes_max:
            raise LocalProtocolError(
                "E_BAD_BODY",
                f"{cost} bytes to publish, at most {self._bytes_max}: raise max_bytes_in_flight or send less",
            )
        if not self._admission and self._stats.bytes_in_flight + cost <= self._bytes_max:
            self._stats.bytes_in_flight += cost
            return
        assert self._loop is not None
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._admission.append((cost, waiter))
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            self._withdraw(cost, waiter)
            raise PublishRefused(
                "TIMEOUT", f"not sent: {self._stats.bytes_in_flight} bytes are on their way already", retryable=True
            ) from self._last_error
        except asyncio.CancelledError:
            self._withdraw(cost, waiter)
            raise

    def _withdraw(self, cost: int, waiter: asyncio.Future[None]) -> None:
        """Undo an admission that nobody uses: still waiting, or granted in the moment it was given up."""
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self._release(cost)
        else:
            waiter.cancel()
            self._release(0)  # the next in line may be smaller

    def _release(self, cost: int) -> None:
        stats = self._stats
        stats.bytes_in_flight -= cost
        while self._admission:
            wanted, waiter = self._admission[0]
            if not waiter.done():
                if stats.bytes_in_flight + wanted > self._bytes_max:
                    return
                stats.bytes_in_flight += wanted
                waiter.set_result(None)
            self._admission.popleft()

    # --- sending ---

    def _begin(self, publish: Publish) -> None:
        """Take over a publish: from here on it ends by its deadline at the latest."""
        assert self._loop is not None
        self._unfinished[publish] = None
        self._arm(publish)
        self._dispatch(publish)

    def _arm(self, publish: Publish) -> None:
        """Look again at the deadline, and once before: a stuck nsqd should not use up all the time there is."""
        assert self._loop is not None
        now = self._loop.time()
        early = now + (publish.deadline - now) / 2
        publish.timer = self._loop.call_at(early, self._look_early, publish)

    def _look_early(self, publish: Publish) -> None:
        assert self._loop is not None
        connection = publish.connection
        if connection is not None and self._retries_unknown and len(self._turns_of(publish.topic).connections) > 1:
            waited_s = self._loop.time() - publish.sent_at
            if waited_s >= self._timeout_s / 2 * STALLED_SHARE:
                connection.abort(f"a publish was not answered for {waited_s:.3g} s; another nsqd is tried")
        publish.timer = self._loop.call_at(publish.deadline, self._expire, publish)

    def _dispatch(self, publish: Publish) -> None:
        """Send a publish, or park it until an nsqd is up."""
        if publish.is_done:
            return
        if not publish.drop_cancelled():
            self._end(publish)
            return
        connection = self._pick(publish.topic)
        if connection is None:
            self._parked[publish] = None
            if self._fail_refused(publish):
                return
            if self._lookup is not None and publish.topic not in self._routes:
                self._look_up(publish.topic)
            return
        assert self._loop is not None
        publish.connection = connection
        publish.sent_at = self._loop.time()
        self._stats.commands += 1
        answered = partial(self._answered, publish)
        if publish.defer_ms is None:
            connection.publish(publish.topic, publish.bodies, answered)
        else:
            connection.publish_deferred(publish.topic, publish.defer_ms, publish.bodies[0], answered)
        self._unflushed[connection] = None

    def _flush_connections(self) -> None:
        """Write at the end of the turn in which it was gathered, not one turn later."""
        for connection in self._unflushed:
            connection.flush()
        self._unflushed.clear()

    def _redispatch(self, publish: Publish, delay_s: float = 0.0) -> None:
        assert self._loop is not None
        self._stats.retries += 1
        if delay_s:
            self._loop.call_later(delay_s, self._dispatch, publish)
        else:
            self._loop.call_soon(self._dispatch, publish)

    def _dispatch_parked(self) -> None:
        parked, self._parked = self._parked, {}
        for publish in parked:
            self._dispatch(publish)

    def _turns_of(self, topic: str) -> _Turns:
        """The connections a topic can be published over.

        Each topic takes its own turns: with a common one, two topics published alternately would each meet the same
        nsqd again and again.
        """
        turns = self._turns.get(topic)
        if turns is None:
            if len(self._turns) >= TOPIC_COUNT_MAX:
                self._turns.clear()
            usable = [self._up[address] for address in self._addresses_of(topic) if address in self._up]
            turns = self._turns[topic] = _Turns(usable, self._env.random.randrange(len(usable)) if usable else 0)
        return turns

    def _addresses_of(self, topic: str) -> tuple[str, ...]:
        return self._nsqd if self._lookup is None else self._routes.get(topic, ())

    def _pick(self, topic: str) -> Connection | None:
        """The next connection in turn, one that is not choked if there is a choice."""
        turns = self._turns_of(topic)
        usable = turns.connections
        for _ in usable:
            turns.next = (turns.next + 1) % len(usable)
            if not usable[turns.next].is_write_paused:
                break
        return usable[turns.next] if usable else None

    # --- outcomes ---

    def _answered(self, publish: Publish, outcome: bytes | FlintError) -> None:
        connection = publish.connection
        publish.connection = None
        if publish.is_done:
            return
        if isinstance(outcome, bytes):
            if outcome == b"OK":
                self._stats.published += len(publish.bodies)
                publish.succeed()
                self._end(publish)
            else:
                publish.is_unknown = True
                address = connection.address if connection else ""
                self._fail(publish, "E_INVALID", f"answer {outcome[:32]!r} to a publish", address, retryable=False)
            return
        publish.error = outcome
        if isinstance(outcome, NsqdError):
            self._refused(publish, outcome)
        else:
            self._unanswered(publish, outcome)

    def _refused(self, publish: Publish, error: NsqdError) -> None:
        """Follow the retry table."""
        publish.tries += 1
        if publish.is_gathered and is_bad_message(error, publish.bodies):
            self._split(publish)
            return
        is_open = leaves_open(error)
        publish.is_unknown |= is_open
        if error.retryable and publish.tries < self._tries_max and (self._retries_unknown or not is_open):
            if self._lookup is not None:
                self._look_up(publish.topic)
            delay_s = min(RETRY_MAX_S, RETRY_BASE_S * 2.0**publish.tries)
            self._redispatch(publish, jittered_s(delay_s, RETRY_JITTER, self._env.random.random()))
        else:
            self._fail(publish, error.code, error.detail, error.nsqd, retryable=error.retryable)

    def _fail_refused(self, publish: Publish) -> bool:
        """Fail a publish that no nsqd of its topic will ever take; False when there is hope."""
        error = self._refusals.of_all(self._addresses_of(publish.topic))
        if error is None:
            return False
        publish.error = error
        if isinstance(error, NsqdError):
            self._fail(publish, error.code, error.detail, error.nsqd, retryable=False)
        else:
            assert isinstance(error, ConnectionFailed)
            self._fail(publish, "TLS_REFUSED", error.reason, error.address, retryable=False)
        return True

    def _split(self, publish: Publish) -> None:
        """One message of a gathered MPUB is bad: send each alone, so that only the bad one fails."""
        publish.drop_cancelled()
        for part in publish.split():
            self._unfinished[part] = None
            part.error = publish.error
            self._arm(part)
            self._redispatch(part)
            publish.cost -= part.cost
        self._end(publish)

    def _unanswered(self, publish: Publish, error: FlintError) -> None:
        is_open = not isinstance(error, AnswerLost) or error.maybe_executed
        publish.is_unknown |= is_open
        if is_open and not self._retries_unknown:
            reason = error.reason if isinstance(error, ConnectionFailed) else str(error)
            self._fail(publish, "CONNECTION_LOST", f"nsqd did not answer: {reason}", retryable=True)
        else:
            self._redispatch(publish)

    def _expire(self, publish: Publish) -> None:
        """The deadline has come."""
        assert self._loop is not None
        connection = publish.connection
        if connection is None:
            cause = publish.error or self._last_error
            publish.error = cause or NoNsqd(publish.topic, "nothing is known of any nsqd")
            self._fail(publish, "TIMEOUT", f"no nsqd took it in time: {publish.error}", retryable=True)
            return
        publish.is_unknown = True
        waited_s = self._loop.time() - publish.sent_at
        self._fail(publish, "TIMEOUT", f"no answer within {waited_s:.3g} s", connection.address, retryable=True)
        if waited_s >= self._timeout_s / 2 * STALLED_SHARE:
            connection.abort(f"a publish was not answered for {waited_s:.3g} s")

    def _fail(self, publish: Publish, code: str, detail: str, nsqd: str = "", *, retryable: bool) -> None:
        self._stats.failed += len(publish.bodies)
        publish.fail(publish.outcome(code, detail, nsqd, retryable=retryable))
        self._end(publish)

    def _end(self, publish: Publish) -> None:
        publish.is_done = True
        if publish.timer is not None:
            publish.timer.cancel()
        self._unfinished.pop(publish, None)
        self._parked.pop(publish, None)
        self._release(publish.cost)
        if self._idle is not None and not self._unfinished and not self._idle.done():
            self._idle.set_result(None)

    # --- connecting ---

    async def _connect(self, address: str) -> Connection:
        connection = await Connection.open(address, self, self._options, self._env)
        if not connection.is_lost:
            self._up[address] = connection
            self._turns.clear()
            self._dispatch_parked()
        return connection

    def _note_attempt(self, address: str, error: FlintError | None) -> None:
        self._refusals.note(address, error, self._links.listed)
        if error is None:
            log.info("connected to nsqd %s", address)
            return
        self._last_error = error
        log.warning("cannot publish to nsqd %s: %s", address, error)
        for publish in [*self._parked]:
            self._fail_refused(publish)

    def _broke(self, error: BaseException) -> None:
        log.error("a connection's task failed", exc_info=error)
        self._last_error = error if isinstance(error, FlintError) else ConnectionFailed("nsqd", repr(error))

    # --- discovery ---

    def _look_up(self, topic: str) -> None:
        """Refresh what is known of a topic, once at a time."""
        if topic not in self._lookups and not self._is_closed:
            assert self._loop is not None
            task = self._loop.create_task(self._find(topic))
            self._lookups[topic] = task
            task.add_done_callback(lambda _: self._lookups.pop(topic))

    async def _find(self, topic: str) -> None:
        assert self._lookup is not None
        try:
            nodes = await self._lookup.topic(topic) or await self._lookup.nodes()
        except DiscoveryError as error:
            self._last_error = error
            log.warning("discovery of %s failed: %s", topic, error)
            return
        if not nodes:
            self._last_error = NoNsqd(topic, "the nsqlookupd list no nsqd")
        self._routes.pop(topic, None)
        self._routes[topic] = tuple(node.address for node in nodes)
        while len(self._routes) > TOPIC_COUNT_MAX:
            del self._routes[next(iter(self._routes))]
        self._turns.clear()
        self._links.keep(address for route in self._routes.values() for address in route)
        self._dispatch_parked()

    async def _follow(self) -> None:
        """Refresh every topic again and again, and those for which something is parked every second."""
        assert self._loop is not None
        refresh_at = self._loop.time() + self._lookup_interval_s
        while True:
            await asyncio.sleep(min(1.0, self._lookup_interval_s))
            topics = dict.fromkeys(publish.topic for publish in self._parked)
            if self._loop.time() >= refresh_at:
                topics.update(dict.fromkeys(self._routes))
                chance = self._env.random.random()
                refresh_at = self._loop.time() + jittered_s(self._lookup_interval_s, LOOKUP_JITTER, chance)
            for topic in topics:
                self._look_up(topic)

    # --- what connections tell (connection.ConnectionOwner) ---

    def on_lost(self, connection: Connection, error: FlintError) -> None:
        """Let a connection go; what waited for its answers was told already."""
        self._unflushed.pop(connection, None)
        if self._up.get(connection.address) is connection:
            del self._up[connection.address]
            self._turns.clear()
            self._last_error = error

    def on_messages(self, connection: Connection, records: list[Record]) -> None:
        """Nothing is subscribed, so nsqd sends no messages."""
        connection.abort("it sent messages to a producer")

    def on_message_failed(self, connection: Connection, failure: MessageFailed) -> None:
        """No message was answered, so none can have failed."""
        connection.abort(f"it refused a {failure.command} that was never sent")

    def on_settled(self, connection: Connection, finished: int, requeued: int, let_go: int) -> None:
        """No message is ever answered here."""


def _closed() -> PublishRefused:
    return PublishRefused("CLOSED", "the producer is closed", retryable=False)
