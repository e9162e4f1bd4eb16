"""The producer on blocking sockets: any number of threads publish to one nsqd or several.

Rules of this file:

- A call takes a connection out of a pool, asks, and puts it back; it waits for a connection, for an answer and between
  tries, never beyond its deadline, and never with the lock held.
- What becomes of a publish, :mod:`flintmq.client.core.retry` says, as in the asyncio client; this file carries that out
  in the thread of the call.
- Connections are opened by a thread of their own, so that neither a name that does not resolve nor an nsqd that is gone
  holds up a call beyond its deadline. A ticker answers heartbeats on free connections and replaces those that are lost.
- Calls that keep an order stand in a queue of their partition (:mod:`flintmq.client.blocking.queues`) and go there or
  nowhere, until their deadline.
- Back-pressure is the pool: as many calls are on their way as there are connections.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final, NoReturn, Self, Unpack, overload

from flintmq.client.blocking.discovery import LOOK_AGAIN_S, Discovery
from flintmq.client.blocking.fork import call_in_child
from flintmq.client.blocking.handshake import check_options
from flintmq.client.blocking.http import get
from flintmq.client.blocking.lock import Condition, Lock
from flintmq.client.blocking.lookup import Fetch, Lookup
from flintmq.client.blocking.pool import Pool
from flintmq.client.blocking.queues import Queues
from flintmq.client.blocking.request_connection import RequestConnection
from flintmq.client.blocking.thread_pool import ThreadPool, no_thread
from flintmq.client.blocking.ticker import Ticker
from flintmq.client.blocking.timers import Timers
from flintmq.client.blocking.turns import Place, Turns
from flintmq.client.core import trace as trace_log
from flintmq.client.core.link import AnswerLost
from flintmq.client.core.of_one_process import Client
from flintmq.client.core.once import WriterKey, new_writers
from flintmq.client.core.producer_settings import ProducerOptions, ProducerSettings
from flintmq.client.core.publish import (
    TOPIC_COUNT_MAX,
    Body,
    Failure,
    Publish,
    Published,
    check_topic,
    checked_body,
    closed_error,
    message_cost,
)
from flintmq.client.core.reconnect import FailureLog
from flintmq.client.core.retry import Retry, RetryRules, Verdict
from flintmq.client.core.routing import Routes
from flintmq.client.core.sharding import ShardingId
from flintmq.client.core.stats import ProducerStats
from flintmq.client.options import (
    DELAY_MAX_S,
    ConnectionOptions,
    Seconds,
    milliseconds,
    seconds,
    whole,
)
from flintmq.client.security import Refusals
from flintmq.errors import ConnectionFailed, FlintError, NsqdError, PublishError, RemoteProtocolError

log = logging.getLogger("flintmq.client")

POOL_SIZE = 4
POOL_SIZE_MAX = 1000
TICK_S = 0.2
STALE_S = 0.05
NEVER = float("-inf")
CLOSE_SLACK_S = 1.0


class _NotYet:
    """Another try is due."""


_NOT_YET: Final = _NotYet()


class Producer(Client):
    """Publishes messages, from any number of threads.

    ::

        with Producer("127.0.0.1:4150") as producer:
            producer.pub("orders", b"hello")
            producer.mpub("orders", [b"a", b"b"])
            producer.dpub("emails", b"remind me", delay=30)
            producer.mpub("emails", [b"me", b"too"], delay=30)  # FlintMQ's nsqd only
            producer.pub("payments", b"hello", sharding_id=customer)  # in order, to the customer's partition

    It may also live as long as its process, without ``with``: it starts with the first call. In a child made by
    ``os.fork()`` it starts over with connections of its own. All durations are seconds or a timedelta.

    Args:
        nsqd_tcp_addresses: ``host:port`` of one nsqd, or of several that are used in turn; or
        nsqlookupd_http_addresses: ``http://host:port`` of one nsqlookupd or several: every nsqd that has the topic is
            used in turn, every nsqd there is when none has it yet.
        pool_size: connections to one nsqd at most; more threads than that wait for each other.
        timeout: until a call must have ended.
        retry_unknown: send again what was not answered because the connection was lost; it may then be stored twice.
            False: such a call ends with :class:`PublishUnknown`.
        idempotent: what was not answered is sent again until the deadline, to the nsqd that has the log then, which
            does not store it twice; only FlintMQ's can, also for messages with a delay, a trace id or headers.
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
        pool_size: int = POOL_SIZE,
        timeout: Seconds = 5.0,
        retry_unknown: bool = True,
        idempotent: bool = False,
        options: ConnectionOptions | None = None,
        **more: Unpack[ProducerOptions],
    ) -> None:
        settings = self._settings = ProducerSettings(
            nsqd_tcp_addresses,
            nsqlookupd_http_addresses,
            timeout=timeout,
            retry_unknown=retry_unknown,
            idempotent=idempotent,
            batch_count_max=1,
            batch_bytes_max=1,
            options=options,
            more=more,
        )
        check_options(settings.options)
        self._env, self._policy = settings.env, settings.policy
        self._pool_size = whole(pool_size, "pool_size", 1, POOL_SIZE_MAX)
        self._timeout_s = settings.policy.timeout_s
        self._stats = ProducerStats()
        self._is_closed = False
        self._new_process()
        self._intake = settings.new_intake(self._writers, is_gathered=False)
        self._time = self._timers.time
        self._fetch: Fetch = settings.fetch or partial(get, options=settings.options, time=self._time)
        call_in_child(self._new_process)  # which starts over with its next call

    def _new_process(self) -> None:
        """Set up what no two processes may share."""
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._timers = Timers(self._env.clock)
        self._threads = ThreadPool("flintmq-connect")
        self._discovery: Discovery | None = None
        self._ticker: Ticker | None = None
        self._pools: dict[str, Pool] = {}
        self._turns: dict[str, Turns] = {}
        self._routes = Routes(self._settings.nsqd)
        self._writers = new_writers(self._settings.producer_id, self._env, self._pool_size)
        self._queues = Queues()
        self._waiting: dict[str, int] = {}
        self._refusals = Refusals()
        self._rules = RetryRules(
            self._policy,
            self._env,
            self._routes,
            self._refusals,
            self._forget_turns,
            self._writers,
            self._silent_lookups,
        )
        self._failure_log = FailureLog()
        self._calls: dict[Publish, RequestConnection | None] = {}  # and the connection that each has
        self._stats.bytes_in_flight = 0
        self._last_error: FlintError | None = None

    def __repr__(self) -> str:
        up = sum(pool.is_up for pool in self._pools.values())
        return f"<Producer on {up} nsqd, {self._stats.bytes_in_flight} bytes in flight>"

    def describe(self) -> str:
        """Show connections, a line each."""
        with self._lock:
            return "\n".join([repr(self), *(pool.describe() for pool in self._pools.values())])

    # --- life ---

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Connect. Returns when every nsqd was tried once; those that cannot be reached are tried again."""
        self._begin()
        deadline = self._time() + seconds(self._settings.options.connect_timeout, "connect_timeout")
        with self._lock:
            while any(not pool.is_tried for pool in self._pools.values()) and (left_s := deadline - self._time()) > 0:
                self._changed.wait(left_s)

    def _begin(self) -> None:
        """Start what is needed in this process, once."""
        with self._lock:
            if self._is_closed:
                raise closed_error()
            if self._ticker is not None:
                return
            if self._settings.lookups and self._discovery is None:
                self._discovery = self._new_discovery()
            self._keep([*self._settings.nsqd, *self._routes.addresses()])
            self._start_ticker()

    def _start_ticker(self) -> None:
        """Have it looked after what nobody uses; whoever publishes tries again if there is no thread for that now."""
        try:
            self._ticker = Ticker(self._tick, TICK_S, "flintmq-producer")
        except RuntimeError as error:
            why = no_thread("look after connections", error)
            if self._failure_log.is_new("", FlintError(why), self._time()):
                log.warning("%s; it is tried again", why)

    def _new_discovery(self) -> Discovery:
        settings, timers = self._settings, self._timers
        lookup = Lookup(
            settings.lookups, settings.lookup_timeout_s, self._fetch, ThreadPool("flintmq-lookup"), timers, self._lock,
            self._changed.notify_all,
        )  # fmt: skip
        return Discovery(
            lookup, self._routes, settings.lookup_interval_s, timers, self._env, self._waiting, self._learned,
            self._note_error, settings.producer_id is not None,
        )  # fmt: skip

    def close(self) -> None:
        """Take no more, wait until what was taken has ended (each by its own deadline), and close the connections."""
        with self._lock:
            self._is_closed = True
            while self._calls:
                left_s = max(call.deadline for call in self._calls) + CLOSE_SLACK_S - self._time()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            ticker, self._ticker = self._ticker, None
            pools, self._pools = self._pools, {}
            self._threads.end()
            if self._discovery is not None:
                self._discovery.end()
        if ticker is not None:
            ticker.end()
        for pool in pools.values():
            pool.close()

    # --- publishing ---

    @overload
    def pub(
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
    def pub(
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
    def pub(
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
        """
        check_topic(topic)
        data = checked_body(body)
        deadline = self._deadline(timeout)
        if self._intake.telemetry is None:
            is_plain = sharding_id is None and partition is None and trace_id is None and headers is None
            if is_plain and topic not in self._intake.traced:
                return self._publish(Publish(topic, [data], [], deadline, message_cost(data)))
            return self._publish(self._intake.one(topic, data, deadline, sharding_id, partition, trace_id, headers))
        with self._intake.carried(self._routes, topic, data, headers) as (data, headers, undecided):
            return self._publish(
                self._intake.one(topic, data, deadline, sharding_id, partition, trace_id, headers, undecided)
            )

    @overload
    def mpub(
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
    def mpub(
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
    def mpub(
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
            LocalProtocolError: the topic's name is not valid, there is no body or one is empty; nothing was sent.
            OptionError: an argument is out of range, or two exclude each other.
            PublishRefused: none is stored.
            PublishUnknown: they may be stored.
        """
        deadline = self._deadline(timeout)
        with self._intake.several(
            self._routes, topic, bodies, deadline, delay, sharding_id, partition, trace_id, headers
        ) as publish:
            return self._publish(publish)

    def dpub(self, topic: str, body: Body, delay: Seconds, *, timeout: Seconds | None = None) -> None:
        """Publish one message to be delivered not before ``delay`` from now; nsqd sets the maximum (1 h).

        Raises:
            OptionError: the delay is not a duration from 0 to 365 days.
            LocalProtocolError: the topic's name is not valid or the body is empty; nothing was sent.
            PublishRefused: the message is definitely not stored; the delay may be longer than nsqd allows, or the topic
                in order, which needs :meth:`mpub` with ``delay`` and ``sharding_id``.
            PublishUnknown: the message may be stored.
        """
        milliseconds(delay, "delay", 0, DELAY_MAX_S)  # None would be no delay
        self.mpub(topic, [body], delay=delay, timeout=timeout)

    def _deadline(self, timeout: Seconds | None) -> float:
        return self._time() + (self._timeout_s if timeout is None else seconds(timeout, "timeout", 0.001))

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
        with self._lock:
            return tuple(address for address, pool in self._pools.items() if pool.is_up)

    def stats(self) -> ProducerStats:
        """Count what was done and say where the producer stands."""
        with self._lock:
            return replace(self._stats, connections=sum(pool.is_up for pool in self._pools.values()))

    # --- a call, in its thread ---

    def _publish(self, call: Publish) -> Published | None:
        """Publish, and wait for the end of it.

        Raises:
            PublishRefused: nothing of it is stored.
            PublishUnknown: it may be stored.
        """
        if self._ticker is None:
            self._begin()
        connection: RequestConnection | None = None
        outcome: Published | _NotYet | None = _NOT_YET
        try:
            with self._lock:
                if self._is_closed:
                    raise closed_error()
                self._calls[call] = None
                self._stats.bytes_in_flight += call.cost
                if not call.needs_partition:
                    self._calls[call] = connection = self._take(call)
            while True:
                if connection is None:
                    connection = self._wait_for_connection(call)
                outcome = self._try(call, connection)
                if not isinstance(outcome, _NotYet):
                    return outcome
                self._put_back(call)
                connection = None
        except PublishError as error:
            self._leave_queue(call, error.code)
            raise
        finally:
            try:
                self._end(call, outcome is not _NOT_YET)
            except KeyboardInterrupt:
                self._end(call, outcome is not _NOT_YET)  # Ctrl-C came before the end of it, or right after
                raise

    def _end(self, call: Publish, is_done: bool) -> None:
        with self._lock:
            if call not in self._calls:
                return
            self._put_back(call)
            if call.keys is not None:
                self._leave_queue(call)
            count = len(call.bodies)
            if call.writer is not None:
                self._rules.free_writer(call, count if is_done else 0)
            if self._is_closed:
                self._changed.notify_all()
            # Nothing is called from here on: Ctrl-C comes before all of it, or after.
            stats = self._stats
            stats.bytes_in_flight -= call.cost
            if is_done:
                stats.published += count
            else:
                stats.failed += count
            del self._calls[call]

    def _try(self, call: Publish, connection: RequestConnection) -> Published | _NotYet | None:
        """Ask one nsqd once; where another try is due, return when it is."""
        call.sent_at = began = self._time()
        if call.context is not None:
            with self._lock:
                call.settle_context(self._routes.is_extended(call.topic))
        try:
            send = partial(call.send, connection, call.partition)
            if len(self._pools) < 2 and call.writer is None and call.keys is None:  # it could go nowhere else
                answer = connection.answer_to(send, call.deadline)
            else:
                half_s = (call.deadline - began) / 2
                look_at = call.deadline if half_s < self._policy.stalled_s else began + half_s
                answer = connection.answer_to(
                    send, call.deadline, look_at=look_at, gives_up=partial(self._gives_up, call)
                )
        except NsqdError as error:
            call.connection = None
            connection.used_at = NEVER  # nsqd closes behind many errors
            with self._lock:
                verdict = self._rules.refused(call, error, connection.address, self._time())
            self._carry_out(call, verdict)
        except ConnectionFailed as error:
            call.connection = None
            self._unanswered(call, error, began)
        else:
            call.connection = None
            connection.used_at = began
            return (
                None if answer == b"OK" and call.trace_ids is None else self._stored(call, answer, connection.address)
            )
        with self._lock:
            self._stats.retries += 1
        return _NOT_YET

    def _gives_up(self, call: Publish) -> bool:
        """Whether to leave an nsqd that has not answered when half of the time is over."""
        return self._rules.leaves_early(call, partial(self._has_choice, call))

    def _has_choice(self, call: Publish) -> bool:
        """Whether a call could be sent somewhere else than where it waits for an answer."""
        with self._lock:
            if call.keys is None:
                return sum(place.pool.is_up for place in self._turns_of(call.topic).places) > 1
            assert call.connection is not None
            leader = None if call.partition is None else self._routes.leader(call.topic, call.partition)
            return leader not in (None, call.connection.address)

    def _stored(self, call: Publish, answer: bytes, address: str) -> Published | None:
        """Read where nsqd says that a message is stored."""
        try:
            stored = call.read_answer(answer)
        except RemoteProtocolError as error:
            self._fail(call, self._rules.senseless(call, error, address))
        if call.trace_ids is not None and call.topic in self._intake.traced:
            trace_log.published(call.topic, address, call.partition, stored, call.trace_ids)
        return call.published(address, stored)

    def _unanswered(self, call: Publish, error: ConnectionFailed, began: float) -> None:
        if not isinstance(error, AnswerLost):  # it was lost before it was asked
            error = AnswerLost(error.address, error.reason, maybe_executed=False)
        verdict = self._rules.unanswered(call, error)
        now = self._time()
        if now >= call.deadline and call.is_unknown:
            verdict = self._rules.late(call, error.address, now - began)
        self._carry_out(call, verdict)

    def _carry_out(self, call: Publish, verdict: Verdict) -> None:
        """Return when another try is due."""
        if call.writer is not None and not call.is_unknown:
            with self._lock:
                self._rules.free_writer(call)
        if isinstance(verdict, Failure):
            self._fail(call, verdict)
        assert isinstance(verdict, Retry), "nothing is gathered here"
        if verdict.refreshes:
            with self._lock:
                self._look_up(call.topic, at_once=True)
        if verdict.delay_s:
            threading.Event().wait(max(0.0, min(verdict.delay_s, call.deadline - self._time())))

    def _fail(self, call: Publish, failure: Failure) -> NoReturn:
        raise call.exception(failure)

    # --- connections ---

    def _take(self, call: Publish) -> RequestConnection | None:
        """A free connection in turn, or None; with the lock held."""
        if call.writer is not None:
            pinned = self._leader_of(call)
            return None if pinned is None else self._take_from(pinned)
        turns = self._turns_of(call.topic)
        places = turns.places
        for _ in places:
            turns.next = (turns.next + 1) % len(places)
            pool, partition = places[turns.next]
            if partition is None and call.needs_partition:
                continue  # these are all nsqd there are: no nsqlookupd knows the topic yet
            if pool.idle and (connection := self._take_with_writer(call, pool, partition)) is not None:
                if partition != call.partition:
                    call.partition = partition
                return connection
        return None

    def _take_with_writer(self, call: Publish, pool: Pool, partition: int | None) -> RequestConnection | None:
        """A free connection, and a writer if the call needs one."""
        if self._writers is None or call.writer is not None:
            return self._take_from(pool)
        call.writer = self._writers.take(
            WriterKey(self._routes.home(call.topic, partition, pool.address), call.keys is not None)
        )
        connection = None if call.writer is None else self._take_from(pool)
        if connection is None:
            self._rules.free_writer(call)
        return connection

    def _take_from(self, pool: Pool) -> RequestConnection | None:
        while (connection := pool.take()) is not None:
            if self._time() - connection.used_at > STALE_S:
                connection.attend()  # it may have been closed while nobody looked
            if not connection.is_lost:
                self._stats.commands += 1
                return connection
            self._lost(pool, connection)
        return None

    def _take_in_order(self, call: Publish) -> RequestConnection | None:
        """A free connection to the leader of a call's partition, if it is its turn; with the lock held."""
        if earlier := self._queues.overtook(call):
            self._fail(call, self._rules.overtaken(call, earlier))
        if call.partition is None:
            if not self._queues.place(call, self._rules.place, self._time()):
                self._look_up(call.topic)
                return None
            self._fail_impossible(call)
        if not self._queues.enter(call, self._time()):
            return None
        pool = self._leader_of(call)
        if pool is None:
            self._look_up(call.topic)
            return None
        return self._take_with_writer(call, pool, call.partition)

    def _leader_of(self, call: Publish) -> Pool | None:
        if call.writer is not None:
            leader = self._routes.nsqd_of(call.writer.key.home)
        else:
            leader = None if call.partition is None else self._routes.leader(call.topic, call.partition)
        return None if leader is None else self._pools.get(leader)

    def _leave_queue(self, call: Publish, failed: str = "") -> None:
        """Let the next one publish to the partition of a call that has ended."""
        with self._lock:
            if call.keys is not None and self._queues.leave(call, failed):
                self._changed.notify_all()

    def _put_back(self, call: Publish) -> None:
        """Let others have the connection of a call, if it has one."""
        with self._lock:
            connection = self._calls[call]
            if connection is None:
                return
            pool = self._pools.get(connection.address)
            if pool is None or connection not in pool.connections:
                connection.close()
            elif connection.is_lost:
                self._lost(pool, connection)
            else:
                if self._queues or len(self._waiting) > 1:
                    self._changed.notify_all()  # not everybody who waits can use this one
                elif self._waiting:
                    self._changed.notify()
                # Nothing is called in between, or Ctrl-C could have it put back twice, for two threads at once.
                pool.idle += (connection,)
            self._calls[call] = None

    def _lost(self, pool: Pool, connection: RequestConnection) -> None:
        self._last_error = ConnectionFailed(connection.address, connection.reason)
        log.warning("lost nsqd %s: %s", connection.address, connection.reason)
        pool.lose(connection, self._time(), self._env.random.random())

    def _wait_for_connection(self, call: Publish) -> RequestConnection:
        """Wait until there is a free connection.

        Raises:
            PublishError: there was none in time, or every nsqd refuses this client for good.
        """
        topic = call.topic
        with self._lock:
            self._waiting[topic] = self._waiting.get(topic, 0) + 1
            try:
                while True:
                    if call.needs_partition or call.defer_ms is not None:
                        self._fail_impossible(call)
                    if (left_s := call.deadline - self._time()) <= 0:
                        self._fail_waiting(call)
                    connection = self._take_in_order(call) if call.keys is not None else self._take(call)
                    self._calls[call] = connection
                    if connection is not None:
                        break
                    self._fail_refused(call)
                    if not self._routes.knows(topic):
                        self._look_up(topic)
                    if self._ticker is None and not self._is_closed:
                        self._start_ticker()
                        self._timers.run_due()  # which the ticker would do
                    again_s = self._open_one(self._pools_of(call))
                    self._changed.wait(min(left_s, again_s))
            finally:
                self._waiting[topic] -= 1
                if not self._waiting[topic]:
                    del self._waiting[topic]
        return connection

    def _pools_of(self, call: Publish) -> list[Pool]:
        """Return where a connection for a call could be opened."""
        if call.keys is None and call.writer is None:
            return [place.pool for place in self._turns_of(call.topic).places]
        leader = self._leader_of(call)
        is_next = call.keys is None  # or it stands in no queue
        if call.keys is not None and call.partition is not None:
            is_next = self._queues.enter(call, self._time())
        return [leader] if leader is not None and is_next else []

    def _fail_impossible(self, call: Publish) -> None:
        """Fail a call that its topic will never take."""
        if failure := self._rules.impossible(call):
            self._fail(call, failure)

    def _fail_waiting(self, call: Publish) -> NoReturn:
        """Fail a call whose deadline has come while it waited for a connection."""
        leader = self._leader_of(call) if call.keys is not None else None
        is_behind = leader is not None and call.partition is not None and not self._queues.enter(call, self._time())
        pools = self._pools_of(call)
        if not is_behind and call.error is None and any(pool.is_up for pool in pools):
            count = sum(len(pool.connections) for pool in pools)
            why = "see pool_size" if count >= self._pool_size * len(pools) else _why_no_more(pools)
            self._fail(call, Failure("TIMEOUT", f"not sent: all {count} connections are busy, {why}"))
        up = [pool.address for pool in pools if pool.is_up]
        self._fail(call, self._rules.unsent(call, is_behind, self._last_error, up))

    def _fail_refused(self, call: Publish) -> None:
        """Fail a call that no nsqd of its topic will ever take."""
        if any(pool.is_up for pool in self._pools_of(call)):
            return
        if failure := self._rules.refused_by_all(call):
            self._fail(call, failure)

    def _forget_turns(self, topic: str) -> None:
        self._turns.pop(topic, None)

    def _turns_of(self, topic: str) -> Turns:
        """The places a topic can be published at; each topic takes its own turns."""
        turns = self._turns.get(topic)
        if turns is None:
            if len(self._turns) >= TOPIC_COUNT_MAX:
                self._turns.clear()
            places = [
                Place(self._pools[address], partition)
                for address, partition in self._routes.targets(topic)
                if address in self._pools
            ]
            turns = self._turns[topic] = Turns(places, self._env.random.randrange(len(places)) if places else 0)
        return turns

    # --- connecting, with the lock held unless said otherwise ---

    def _look_up(self, topic: str, at_once: bool = False) -> None:
        """Have it found out where a topic is, unless the nsqd are given; see :meth:`Discovery.look_up`."""
        if self._discovery is not None:
            self._discovery.look_up(topic, at_once)

    def _learned(self) -> None:
        self._keep(self._routes.addresses())
        self._changed.notify_all()

    def _silent_lookups(self) -> tuple[str, ...]:
        return () if self._discovery is None else self._discovery.unanswered

    def _note_error(self, error: FlintError) -> None:
        self._last_error = error

    def _keep(self, wanted: Iterable[str]) -> None:
        """Have these nsqd connected, and no others."""
        listed = dict.fromkeys(wanted)
        for address in [address for address in self._pools if address not in listed]:
            self._pools.pop(address).close()
        for address in listed:
            if address not in self._pools:
                pool = self._pools[address] = Pool(address)
                self._open(pool)
        self._turns.clear()

    def _open_one(self, pools: list[Pool]) -> float:
        """Open a connection where there are the fewest, unless enough are being opened.

        Returns:
            Seconds until it should be looked at again, whatever happens.
        """
        if sum(len(pool.openings) for pool in pools) >= sum(self._waiting.values()):
            return LOOK_AGAIN_S
        now = self._time()
        is_wanted = not any(pool.is_up for pool in pools)
        if able := [pool for pool in pools if pool.may_open(self._pool_size, now, is_wanted)]:
            self._open(min(able, key=lambda pool: len(pool.connections) + len(pool.openings)))
            return LOOK_AGAIN_S
        due = [pool.wanted_at if is_wanted else pool.retry_at for pool in pools]
        return min([LOOK_AGAIN_S, *(due_at - now for due_at in due if due_at > now)])

    def _open(self, pool: Pool) -> None:
        opening = object()
        try:
            pool.openings[opening] = None
            self._threads.run(partial(self._open_connection, pool, opening))
        except RuntimeError as error:
            self._opened(pool, opening, None, ConnectionFailed(pool.address, no_thread("connect", error)))
        except BaseException:
            pool.openings.pop(opening, None)
            raise

    def _open_connection(self, pool: Pool, opening: object) -> None:
        """Open a connection, in a thread of its own, without the lock."""
        connection: RequestConnection | None = None
        error: FlintError | None = None
        try:
            connection = RequestConnection(
                pool.address, self._settings.options, self._env, self._time, once=self._writers is not None
            )
        except FlintError as failure:
            error = failure
        except Exception as failure:
            log.exception("connecting to %s failed by a mistake of ours", pool.address)
            error = ConnectionFailed(pool.address, repr(failure))
        with self._lock:
            self._opened(pool, opening, connection, error)

    def _opened(
        self, pool: Pool, opening: object, connection: RequestConnection | None, error: FlintError | None
    ) -> None:
        is_wanted = opening in pool.openings and self._pools.get(pool.address) is pool
        pool.openings.pop(opening, None)
        pool.is_tried = True
        self._refusals.note(pool.address, error, self._pools)
        if error is not None:
            self._last_error = pool.error = error
            if self._failure_log.is_new(pool.address, error, self._time()):
                log.warning("cannot publish to nsqd %s: %s", pool.address, error)
            pool.wait(self._time(), self._env.random.random())
        elif connection is not None:
            if is_wanted:
                log.info("connected to nsqd %s", pool.address)
                self._failure_log.clear(pool.address)
                pool.add(connection)
            else:
                connection.close()
        self._changed.notify_all()

    def _tick(self) -> None:
        """Look after free connections, lost nsqd and lookups; called by the ticker, without the lock."""
        with self._lock:
            if self._ticker is None:
                return
            now = self._time()
            self._timers.run_due()
            for pool in self._pools.values():
                for connection in [*pool.idle]:
                    connection.attend()
                    if connection.is_lost:
                        pool.idle.remove(connection)
                        self._lost(pool, connection)
                if not pool.is_up and not pool.openings and now >= pool.retry_at:
                    self._open(pool)
            if self._discovery is not None:
                self._discovery.follow()


def _why_no_more(pools: Iterable[Pool]) -> str:
    """Say why there are fewer connections than ``pool_size`` allows, while each that there is waits for an answer."""
    for pool in pools:
        if pool.error is not None:
            return f"and no more could be opened: {pool.error}"
    for pool in pools:
        if pool.openings:
            return f"and opening more takes long: nsqd {pool.address} does not answer"
    return "and no more could be opened in time"
