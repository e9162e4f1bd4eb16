"""The producer on blocking sockets: any number of threads publish to one nsqd or several.

Rules of this file:

- A call takes a line out of a pool, asks, and puts it back; it waits for a line, for an answer and between tries, never
  beyond its deadline, and never with the lock held.
- The outcomes and the retry table are those of :mod:`flintmq.client.aio.producer`: an error in the message is final;
  "not here, not now" is tried again, up to ``max_tries``; without an answer it is sent to another nsqd
  (``retry_unknown``).
- Lines are opened by a crew, so that neither a name that does not resolve nor an nsqd that is gone holds up a call
  beyond its deadline. A keeper answers heartbeats on free lines and replaces those that are lost.
- Calls that keep an order stand in a queue of their partition (:mod:`flintmq.client.blocking.queues`) and go there or
  nowhere, until their deadline.
- Back-pressure is the pool: as many calls are on their way as there are lines.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, overload

from flintmq.client import trace as trace_log
from flintmq.client.blocking.calls import Build, Call, Place, Turns, mpub_command, once_command, pub_command
from flintmq.client.blocking.crew import Crew
from flintmq.client.blocking.finding import LOOK_AGAIN_S, Finding
from flintmq.client.blocking.forking import watch
from flintmq.client.blocking.http import get
from flintmq.client.blocking.keeper import Keeper
from flintmq.client.blocking.line import Line, Unanswered
from flintmq.client.blocking.lookup import Fetch, Lookup
from flintmq.client.blocking.opening import check_options
from flintmq.client.blocking.pool import Pool
from flintmq.client.blocking.queues import Queues
from flintmq.client.blocking.timers import Timers
from flintmq.client.core.envelope import wrap
from flintmq.client.core.once import GAP_CODE, Spot, check_not_delayed, check_not_once, new_writers
from flintmq.client.core.sharding import ShardingId, partition_of
from flintmq.client.core.stats import ProducerStats
from flintmq.client.core.unreadable import HEADERS_REFUSED_CODES
from flintmq.client.options import (
    DELAY_MAX_S,
    SOURCE,
    ConnectionOptions,
    Seconds,
    addresses,
    milliseconds,
    seconds,
    system_env,
    whole,
)
from flintmq.client.publish import (
    CONGESTED_CODE,
    CONGESTED_FACTOR,
    MOVED_CODES,
    STALLED_SHARE,
    TOPIC_COUNT_MAX,
    TRIES_MAX,
    Body,
    Published,
    bare,
    check_topic,
    checked_bodies,
    checked_body,
    checked_headers,
    checked_trace_ids,
    closed_error,
    headers_of_all,
    is_draining,
    leaves_open,
    message_cost,
    messages_cost,
    retry_delay_s,
    with_carried,
)
from flintmq.client.routing import Routes, check_place
from flintmq.client.security import Refusals
from flintmq.env import Env
from flintmq.errors import (
    ConnectionFailed,
    FlintError,
    LocalProtocolError,
    NoNsqd,
    NsqdError,
    OptionError,
    PublishError,
    PublishRefused,
    PublishUnknown,
    RemoteProtocolError,
)
from flintmq.wire.extended import Stored, parse_stored

if TYPE_CHECKING:
    from flintmq.client.telemetry import Telemetry

log = logging.getLogger("flintmq.client")

POOL_SIZE = 4
POOL_SIZE_MAX = 1000
KEEPER_S = 0.2
STALE_S = 0.05
CLOSE_SLACK_S = 1.0


class Producer(Finding):
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
        idempotent: what was not answered is sent again to the same nsqd until the deadline, which does not store it
            twice; only FlintMQ's nsqd can do that, and not for messages with a delay, a trace id or headers.
        producer_id: what nsqd knows this producer by begins with it.
        max_tries: how often a publish may be refused with an error that can pass; where a partition's leader has only
            moved, it is tried until its deadline.
        sharding: from a sharding id to a partition: ``murmur3`` as Youzan's Go client, ``java``, or ``mod``. All
            producers of a topic must agree.
        trace: topics to trace from the start, see :meth:`trace`.
        telemetry: a span of OpenTelemetry for every publish, its context carried with the message.
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
        pool_size: int = POOL_SIZE,
        timeout: Seconds = 5.0,
        retry_unknown: bool = True,
        idempotent: bool = False,
        producer_id: str = "",
        max_tries: int = TRIES_MAX,
        sharding: str = "murmur3",
        trace: Iterable[str] = (),
        telemetry: Telemetry | None = None,
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
        check_options(self._options)
        self._nsqd, self._lookup_addresses = addresses(nsqd_tcp_addresses, nsqlookupd_http_addresses)
        self._lookup_timeout_s = seconds(lookup_timeout, "lookup_timeout", 0.01, 3600)
        self._lookup_interval_s = seconds(lookup_interval, "lookup_interval", 0.01)
        self._pool_size = whole(pool_size, "pool_size", 1, POOL_SIZE_MAX)
        self._timeout_s = seconds(timeout, "timeout", 0.001)
        self._retries_unknown = retry_unknown
        self._tries_max = whole(max_tries, "max_tries", 1, 1000)
        partition_of(0, 1, sharding)
        self._sharding = sharding
        self._producer_id = producer_id if idempotent else None
        self._telemetry = telemetry
        self._traced: set[str] = set()
        self._stats = ProducerStats()
        self._is_closed = False
        self._new_process()
        for topic in trace:
            self.trace(topic)
        self._time = self._timers.time
        self._fetch: Fetch = fetch or partial(get, options=self._options, time=self._time)
        watch(self)

    def _new_process(self) -> None:
        """Set up what no two processes may share."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._timers = Timers(self._env.clock)
        self._crew = Crew("flintmq-connect")
        self._lookup: Lookup | None = None
        self._keeper: Keeper | None = None
        self._pools: dict[str, Pool] = {}
        self._turns: dict[str, Turns] = {}
        self._routes = Routes(self._nsqd)
        self._writers = new_writers(self._producer_id, self._env, self._pool_size)
        self._queues: Queues[Call] = Queues()
        self._asked: dict[str, None] = {}
        self._waiting: dict[str, int] = {}
        self._refusals = Refusals()
        self._calls: dict[int, Call] = {}
        self._stats.bytes_in_flight = 0
        self._last_error: FlintError | None = None
        self._refresh_at = 0.0
        self._gaps_at = 0.0

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
        deadline = self._time() + seconds(self._options.connect_timeout, "connect_timeout")
        with self._lock:
            while any(not pool.is_tried for pool in self._pools.values()) and (left_s := deadline - self._time()) > 0:
                self._changed.wait(left_s)

    def _begin(self) -> None:
        """Start what is needed in this process, once."""
        with self._lock:
            if self._is_closed:
                raise closed_error()
            if self._keeper is not None:
                return
            if self._lookup_addresses:
                crew = Crew("flintmq-lookup")
                self._lookup = Lookup(
                    self._lookup_addresses, self._lookup_timeout_s, self._fetch, crew, self._timers, self._lock,
                    self._changed.notify_all,
                )  # fmt: skip
                self._refresh_at = self._time() + self._lookup_interval_s
            self._keep(self._nsqd)
            self._keeper = Keeper(self._tick, KEEPER_S, "flintmq-producer")

    def close(self) -> None:
        """Take no more, wait until what was taken has ended (each by its own deadline), and close the connections."""
        with self._lock:
            self._is_closed = True
            while self._calls:
                left_s = max(call.deadline for call in self._calls.values()) + CLOSE_SLACK_S - self._time()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            keeper, self._keeper = self._keeper, None
            pools, self._pools = self._pools, {}
            self._crew.end()
            if self._lookup is not None:
                self._lookup.end()
        if keeper is not None:
            keeper.end()
        for pool in pools.values():
            pool.close()

    def after_fork(self) -> None:
        """In a child: start over with the next call."""
        self._new_process()

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
            trace_id: 64 bits that go with the message, which is traced; the call then returns where it is stored.
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
        check_not_once(self._writers, trace_id=trace_id, headers=headers)
        if self._telemetry is None:
            is_plain = sharding_id is None and partition is None and trace_id is None and headers is None
            if is_plain and topic not in self._traced:
                call = self._new_call(topic, [data], message_cost(data), timeout)
                self._publish(call, lambda wire, number: wire.pub(topic, data, None, number))
                return None
            return self._pub(topic, data, timeout, sharding_id, partition, trace_id, headers)
        with self._telemetry.publishing(topic, 1, len(data)) as carried:
            if self._routes.is_extended(topic) and self._writers is None:
                headers = {**(headers or {}), **carried}
            elif self._telemetry.has_envelope:
                data = wrap(carried, data)
            return self._pub(topic, data, timeout, sharding_id, partition, trace_id, headers)

    def _pub(
        self,
        topic: str,
        data: bytes,
        timeout: Seconds | None,
        sharding_id: ShardingId | None,
        partition: int | None,
        trace_id: int | None,
        headers: Mapping[str, object] | None,
    ) -> Published | None:
        call = self._new_call(topic, [data], message_cost(data), timeout)
        self._place(call, sharding_id, partition)
        self._add(call, None if trace_id is None else [trace_id], None if headers is None else [headers])
        self._publish(call, partial(pub_command, call, data))
        return call.published

    def _add(
        self,
        call: Call,
        trace_id: int | Sequence[int] | None,
        headers: Mapping[str, object] | Sequence[Mapping[str, object]] | None,
    ) -> None:
        """Note what goes with the messages of a call."""
        call.trace_ids = checked_trace_ids(trace_id, call.count)
        call.is_trace_asked = trace_id is not None
        if trace_id is None and call.topic in self._traced:
            call.trace_ids = [self._new_trace_id() for _ in call.bodies]
        if headers is not None:
            call.headers = headers_of_all(headers, call.count, call.trace_ids)
            call.cost += sum(map(len, call.headers))
        call.needs_partition |= call.is_trace_asked or (headers is not None and bool(self._lookup_addresses))
        if call.needs_partition and not call.is_ordered and not self._lookup_addresses:
            raise OptionError("partition", None, "needed here, or nsqlookupd_http_addresses to learn it from", SOURCE)

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
        check_topic(topic)
        data = checked_bodies(bodies)
        if not data:
            raise LocalProtocolError("E_BAD_MESSAGE", "MPUB of no message; at least one is needed")
        defer_ms = None if delay is None else milliseconds(delay, "delay", 0, DELAY_MAX_S)
        check_not_once(self._writers, delay=delay, trace_id=trace_id, headers=headers)
        check_not_delayed(delay, trace_id=trace_id, headers=headers)
        with self._span(topic, data) as (enveloped, carried):
            call = self._new_call(topic, enveloped, messages_cost(enveloped), timeout)
            self._place(call, sharding_id, partition)
            if defer_ms is None:
                self._add(call, trace_id, with_carried(headers, carried) if carried else headers)
            self._publish(call, partial(mpub_command, call, enveloped, defer_ms))
            return call.published

    def dpub(self, topic: str, body: Body, delay: Seconds, *, timeout: Seconds | None = None) -> None:
        """Publish one message to be delivered not before ``delay`` from now; nsqd sets the maximum (1 h).

        Raises:
            OptionError: the delay is not a duration from 0 to 365 days.
            LocalProtocolError: the topic's name is not valid or the body is empty; nothing was sent.
            PublishRefused: the message is definitely not stored; the delay may be longer than nsqd allows.
            PublishUnknown: the message may be stored.
        """
        milliseconds(delay, "delay", 0, DELAY_MAX_S)  # None would be no delay
        self.mpub(topic, [body], delay=delay, timeout=timeout)

    @contextmanager
    def _span(self, topic: str, bodies: list[bytes]) -> Iterator[tuple[list[bytes], dict[str, str]]]:
        """A span around a publish, if that is wanted; yields bodies and headers that carry its context, if they can."""
        if self._telemetry is None:
            yield bodies, {}
            return
        with self._telemetry.publishing(topic, len(bodies), sum(map(len, bodies))) as carried:
            if self._routes.is_extended(topic):  # an envelope would be taken for the body there
                yield bodies, carried if self._writers is None else {}
            else:
                yield [wrap(carried, body) for body in bodies] if self._telemetry.has_envelope else bodies, {}

    def _new_call(self, topic: str, bodies: list[bytes], cost: int, timeout: Seconds | None) -> Call:
        timeout_s = self._timeout_s if timeout is None else seconds(timeout, "timeout", 0.001)
        return Call(topic, self._time() + timeout_s, bodies, cost)

    def _place(self, call: Call, sharding_id: ShardingId | None, partition: int | None) -> None:
        """Note where a publish must go, if that is not all the same."""
        check_place(sharding_id, partition, bool(self._lookup_addresses), self._sharding)
        call.sharding_id = call.key = sharding_id
        call.partition = partition
        call.needs_partition = call.is_ordered = sharding_id is not None or partition is not None

    def trace(self, topic: str, on: bool = True) -> None:
        """Trace a topic from now on, or no more: each message is sent traced and logged to ``flintmq.trace``.

        Raises:
            LocalProtocolError: no topic can have this name.
        """
        check_topic(topic)
        if on:
            check_not_once(self._writers, trace=topic)
            self._traced.add(topic)
        else:
            self._traced.discard(topic)

    @property
    def traced(self) -> tuple[str, ...]:
        """The topics that are traced now."""
        return tuple(sorted(self._traced))

    def takes_headers(self, topic: str) -> bool | None:
        """Whether messages of a topic may carry headers; None: only :meth:`try_headers` can tell.

        Waits for the nsqlookupd, at most for ``lookup_timeout``, if they were not asked yet.
        """
        if not self._lookup_addresses:
            return None if len(self._nsqd) == 1 else False
        self._begin()
        with self._lock:
            if not self._routes.knows(topic):
                self._look_up(topic)
                self._changed.wait_for(lambda: self._routes.knows(topic), self._lookup_timeout_s)
            return self._routes.is_extended(topic)

    def try_headers(self, topic: str, body: bytes, headers: Mapping[str, object]) -> bool:
        """Publish one message with headers over a connection of its own; False if nsqd refuses it because of them.

        For the only nsqd there is. It closes a connection over headers that it does not know, or that are for a topic
        which it does not have; publishes under way elsewhere should not suffer from that.

        Raises:
            ConnectionFailed: there was no answer, so it may be stored.
            NsqdError: it is refused for another reason.
        """
        (address,) = self._nsqd
        line = Line(address, self._options, self._env, self._time)
        try:
            command = line.wire.pub_ext(topic, None, checked_headers(headers, None), body, None)
            line.ask(command, self._time() + self._timeout_s)
        except NsqdError as error:
            if error.code not in HEADERS_REFUSED_CODES:
                raise
            return False
        finally:
            line.close()
        return True

    def _new_trace_id(self) -> int:
        return self._env.random.getrandbits(63) or 1

    def stats(self) -> ProducerStats:
        """Count what was done and say where the producer stands."""
        with self._lock:
            return replace(self._stats, connections=sum(pool.is_up for pool in self._pools.values()))

    def _publish(self, call: Call, build: Build) -> None:
        if self._keeper is None:
            self._begin()
        if self._writers is not None:
            build = partial(once_command, call)
        key = id(call)
        line: Line | None = None
        is_done = False
        try:
            with self._lock:
                if self._is_closed:
                    raise closed_error()
                self._calls[key] = call
                self._stats.bytes_in_flight += call.cost
                if not call.needs_partition:
                    line = self._take(call)
            while not is_done:
                if line is None:
                    line = self._wait_for_line(call)
                is_done = self._try(call, line, build)
                if not is_done:
                    self._put_back(line)
                    line = None
        except PublishError as error:
            self._leave_queue(call, error.code)
            raise
        finally:
            self._end(key, call, line, is_done)

    def _end(self, key: int, call: Call, line: Line | None, is_done: bool) -> None:
        with self._lock:
            if line is not None:
                self._put_back(line)
            if self._calls.pop(key, None) is None:
                return
            if call.is_ordered:
                self._leave_queue(call)
            self._free_writer(call, is_done)
            stats = self._stats
            stats.bytes_in_flight -= call.cost
            if is_done:
                stats.published += call.count
            else:
                stats.failed += call.count
            if self._is_closed:
                self._changed.notify_all()

    def _try(self, call: Call, line: Line, build: Build) -> bool:
        """Ask one nsqd; False when another try is due."""
        command = build(line.wire, call.partition)
        began = self._time()
        call.is_in_doubt = True
        try:
            answer = line.ask(command, self._patience(call, began))
        except NsqdError as error:
            self._refused(call, error)
        except Unanswered as error:
            self._unanswered(call, error, began)
        else:
            if answer == b"OK" and call.trace_ids is None:
                return True
            self._stored(call, answer, line.address)
            return True
        with self._lock:
            self._stats.retries += 1
        return False

    def _patience(self, call: Call, now: float) -> float:
        """Until when to wait for an answer: a stuck nsqd should not use up all the time if there is another one."""
        half_s = (call.deadline - now) / 2
        if call.writer is not None:
            return now + half_s if half_s >= self._timeout_s / 2 * STALLED_SHARE else call.deadline
        if (
            len(self._pools) < 2
            or call.is_ordered
            or not self._retries_unknown
            or half_s < self._timeout_s / 2 * STALLED_SHARE
        ):
            return call.deadline
        with self._lock:
            is_choice = sum(place.pool.is_up for place in self._turns_of(call.topic).places) > 1
        return now + half_s if is_choice else call.deadline

    # --- outcomes ---

    def _stored(self, call: Call, answer: bytes, address: str) -> None:
        """Read where nsqd says that a message is stored."""
        stored: Stored | None = None
        try:
            if call.trace_ids is None or call.partition is None:
                if answer != b"OK":
                    raise RemoteProtocolError("E_INVALID", f"answer {answer[:32]!r} to a publish")
            else:
                stored = parse_stored(answer)
        except RemoteProtocolError as error:
            call.is_unknown = True
            self._fail(call, error.code, error.detail, address, retryable=False)
        if call.trace_ids is None:
            return
        if call.topic in self._traced:
            trace_log.published(call.topic, address, call.partition, stored, call.trace_ids)
        if call.is_trace_asked:
            assert call.partition is not None
            where = (None, None, None) if stored is None else (stored.internal_id, stored.offset, stored.raw_size)
            call.published = Published(address, call.partition, where[0], call.trace_ids[0], *where[1:])

    def _refused(self, call: Call, error: NsqdError) -> None:
        """Follow the retry table: return when the next try is due."""
        call.error = error
        call.tries += 1
        is_open = leaves_open(error)
        call.is_unknown |= is_open
        is_gap = call.writer is not None and error.code == GAP_CODE
        if call.writer is not None and (is_gap or is_draining(error)):
            call.is_unknown = False  # it would have been answered as a duplicate
        is_safe = self._retries_unknown or not is_open or call.writer is not None
        call.is_in_doubt = call.is_unknown or is_gap
        if not call.is_unknown:
            self._free_writer(call)
        has_moved = call.partition is not None and error.code in MOVED_CODES
        with self._lock:
            if call.partition is not None and has_moved:
                self._routes.drop(call.topic, call.partition, error.nsqd, self._time())
                self._turns.pop(call.topic, None)
        may_try = has_moved or is_draining(error) or call.tries < self._tries_max
        if not (error.retryable or is_gap) or not may_try or not is_safe:
            self._fail(call, error.code, error.detail, error.nsqd, retryable=error.retryable)
        with self._lock:
            self._look_up(call.topic)
            delay_s = retry_delay_s(call.tries, self._env.random.random())
        if error.code == CONGESTED_CODE:
            delay_s *= CONGESTED_FACTOR
        threading.Event().wait(max(0.0, min(delay_s, call.deadline - self._time())))

    def _unanswered(self, call: Call, error: Unanswered, began: float) -> None:
        now = self._time()
        call.error = error
        call.is_unknown |= error.maybe_executed
        call.is_in_doubt = call.is_unknown
        if not call.is_unknown:
            self._free_writer(call)
        if now >= call.deadline:
            self._fail(call, "TIMEOUT", f"no answer within {now - began:.3g} s", error.address, retryable=True)
        if error.maybe_executed and not self._retries_unknown and call.writer is None:
            self._fail(call, "CONNECTION_LOST", f"nsqd did not answer: {error.reason}", retryable=True)

    def _fail(self, call: Call, code: str, detail: str, nsqd: str = "", *, retryable: bool) -> NoReturn:
        kind = PublishUnknown if call.is_unknown else PublishRefused
        raise kind(code, detail, nsqd, retryable) from bare(call.error)

    # --- lines ---

    def _take(self, call: Call) -> Line | None:
        """A free line in turn, or None; with the lock held."""
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
            if pool.idle and (line := self._take_with_writer(call, pool, partition)) is not None:
                if partition != call.partition:
                    call.partition = partition
                return line
        return None

    def _take_with_writer(self, call: Call, pool: Pool, partition: int | None) -> Line | None:
        """A free line, and a writer if the call needs one."""
        if self._writers is None or call.writer is not None:
            return self._take_from(pool)
        call.writer = self._writers.take(Spot(pool.address, call.topic, partition, call.is_ordered))
        line = None if call.writer is None else self._take_from(pool)
        if line is None:
            self._free_writer(call)
        return line

    def _free_writer(self, call: Call, is_stored: bool = False) -> None:
        """Let others have the writer of a call, unless nobody knows what became of its messages."""
        writer, call.writer = call.writer, None
        if writer is not None and self._writers is not None:
            with self._lock:
                self._writers.let_go(writer, call.count if is_stored else 0, call.is_in_doubt and not is_stored)

    def _take_from(self, pool: Pool) -> Line | None:
        while (line := pool.take()) is not None:
            if self._time() - line.used_at > STALE_S:
                line.attend()  # it may have been closed while nobody looked
            if not line.is_lost:
                self._stats.commands += 1
                return line
            self._lost(pool, line)
        return None

    def _take_in_order(self, call: Call) -> Line | None:
        """A free line to the leader of a call's partition, if it is its turn; with the lock held."""
        if call.overtook:
            which = "partition" if call.sharding_id is None else "sharding id"
            detail = f"not sent: an earlier publish of the same {which} failed, and it must not be overtaken"
            self._fail(call, "E_ORDER", f"{detail} ({call.overtook})", retryable=True)
        if call.partition is None:
            count = self._routes.partition_count(call.topic)
            if not count:
                self._look_up(call.topic)
                return None
            assert call.sharding_id is not None
            call.partition = partition_of(call.sharding_id, count, self._sharding)
            self._fail_impossible(call)
        if not self._queues.enter(call.topic, call.partition, call, self._time()):
            return None
        pool = self._leader_of(call)
        if pool is None:
            self._look_up(call.topic)
            return None
        return self._take_with_writer(call, pool, call.partition)

    def _leader_of(self, call: Call) -> Pool | None:
        if call.writer is not None:
            return self._pools.get(call.writer.spot.address)
        leader = None if call.partition is None else self._routes.leader(call.topic, call.partition)
        return None if leader is None else self._pools.get(leader)

    def _leave_queue(self, call: Call, failed: str = "") -> None:
        """Let the next one publish to the partition of a call that has ended."""
        with self._lock:
            if call.is_ordered and call.partition is not None:
                if self._queues.leave(call.topic, call.partition, call, failed):
                    self._changed.notify_all()

    def _put_back(self, line: Line) -> None:
        with self._lock:
            pool = self._pools.get(line.address)
            if pool is None or line not in pool.lines:
                line.close()
            elif line.is_lost:
                self._lost(pool, line)
            else:
                pool.idle.append(line)
                if self._queues or len(self._waiting) > 1:
                    self._changed.notify_all()  # not everybody who waits can use this one
                elif self._waiting:
                    self._changed.notify()

    def _lost(self, pool: Pool, line: Line) -> None:
        self._last_error = ConnectionFailed(line.address, line.reason)
        log.warning("lost nsqd %s: %s", line.address, line.reason)
        pool.lose(line, self._time(), self._env.random.random())

    def _wait_for_line(self, call: Call) -> Line:
        """Wait until there is a free line.

        Raises:
            PublishError: there was none in time, or every nsqd refuses this client for good.
        """
        topic = call.topic
        with self._lock:
            self._waiting[topic] = self._waiting.get(topic, 0) + 1
            try:
                while True:
                    if call.needs_partition:
                        self._fail_impossible(call)
                    if (left_s := call.deadline - self._time()) <= 0:
                        self._fail_waiting(call)
                    line = self._take_in_order(call) if call.is_ordered else self._take(call)
                    if line is not None:
                        break
                    self._fail_refused(call)
                    if not self._routes.knows(topic):
                        self._look_up(topic)
                    again_s = self._open_one(self._pools_of(call))
                    self._changed.wait(min(left_s, again_s))
            finally:
                self._waiting[topic] -= 1
                if not self._waiting[topic]:
                    del self._waiting[topic]
        return line

    def _pools_of(self, call: Call) -> list[Pool]:
        """Where a line for a call could be opened."""
        if not call.is_ordered and call.writer is None:
            return [place.pool for place in self._turns_of(call.topic).places]
        leader = self._leader_of(call)
        is_next = not call.is_ordered  # or it stands in no queue
        if call.is_ordered and call.partition is not None:
            is_next = self._queues.enter(call.topic, call.partition, call, self._time())
        return [leader] if leader is not None and is_next else []

    def _fail_impossible(self, call: Call) -> None:
        """Fail a call that its topic will never take."""
        partition = call.partition if call.is_ordered else None
        needs_only_headers = call.headers is not None and not (call.is_ordered or call.is_trace_asked)
        if needs_only_headers and self._routes.takes_headers_alone(call.topic):
            call.needs_partition = False
        elif refusal := self._routes.refusal(call.topic, partition, call.headers is not None):
            self._fail(call, *refusal, retryable=False)

    def _fail_waiting(self, call: Call) -> NoReturn:
        leader = self._leader_of(call) if call.is_ordered else None
        if leader is not None and call.partition is not None:
            if not self._queues.enter(call.topic, call.partition, call, self._time()):
                detail = f"it waited behind earlier ones to partition {call.partition}, which were not answered"
                self._fail(call, "TIMEOUT", detail, retryable=True)
        elif call.needs_partition and self._lookup is not None:
            call.error = call.error or self._last_error
            detail = self._routes.why_not(call.topic, call.partition if call.is_ordered else None)
            self._fail(call, "PARTITION_UNAVAILABLE", detail, retryable=True)
        pools = self._pools_of(call)
        if call.error is None and any(pool.is_up for pool in pools):
            count = sum(len(pool.lines) for pool in pools)
            self._fail(call, "TIMEOUT", f"not sent: all {count} connections are busy, see pool_size", retryable=True)
        call.error = call.error or self._last_error or NoNsqd(call.topic, "nothing is known of any nsqd")
        self._fail(call, "TIMEOUT", f"no nsqd took it in time: {call.error}", retryable=True)

    def _fail_refused(self, call: Call) -> None:
        """Fail a call that no nsqd of its topic will ever take."""
        error = self._refusals.of_all(self._addresses_of(call))
        if error is None or any(pool.is_up for pool in self._pools_of(call)):
            return
        call.error = error
        if isinstance(error, NsqdError):
            self._fail(call, error.code, error.detail, error.nsqd, retryable=False)
        assert isinstance(error, ConnectionFailed)
        self._fail(call, "TLS_REFUSED", error.reason, error.address, retryable=False)

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

    def _addresses_of(self, call: Call) -> list[str]:
        if not call.is_ordered:
            return [address for address, _ in self._routes.targets(call.topic)]
        leader = None if call.partition is None else self._routes.leader(call.topic, call.partition)
        return [] if leader is None else [leader]

    # --- connecting, with the lock held unless said otherwise ---

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
        """Open a line where there are the fewest, unless enough are being opened.

        Returns:
            Seconds until it should be looked at again, whatever happens.
        """
        if sum(pool.opening_count for pool in pools) >= sum(self._waiting.values()):
            return LOOK_AGAIN_S
        now = self._time()
        if able := [pool for pool in pools if pool.may_open(self._pool_size, now)]:
            self._open(min(able, key=lambda pool: len(pool.lines) + pool.opening_count))
            return LOOK_AGAIN_S
        return min([LOOK_AGAIN_S, *(pool.retry_at - now for pool in pools if pool.retry_at > now)])

    def _open(self, pool: Pool) -> None:
        pool.opening_count += 1
        self._crew.run(partial(self._open_line, pool))

    def _open_line(self, pool: Pool) -> None:
        """Open a line, in a thread of the crew, without the lock."""
        line: Line | None = None
        error: FlintError | None = None
        try:
            line = Line(pool.address, self._options, self._env, self._time, once=self._writers is not None)
        except FlintError as failure:
            error = failure
        except Exception as failure:
            log.exception("connecting to %s failed by a mistake of ours", pool.address)
            error = ConnectionFailed(pool.address, repr(failure))
        with self._lock:
            pool.opening_count -= 1
            pool.is_tried = True
            self._refusals.note(pool.address, error, self._pools)
            if error is not None:
                self._last_error = error
                log.warning("cannot publish to nsqd %s: %s", pool.address, error)
                pool.wait(self._time(), self._env.random.random())
            elif line is not None:
                if self._pools.get(pool.address) is pool:
                    log.info("connected to nsqd %s", pool.address)
                    pool.add(line)
                else:
                    line.close()
            self._changed.notify_all()

    def _tick(self) -> None:
        """Look after free lines, lost nsqd and lookups; called by the keeper, without the lock."""
        with self._lock:
            if self._keeper is None:
                return
            now = self._time()
            self._timers.run_due()
            for pool in self._pools.values():
                for line in [*pool.idle]:
                    line.attend()
                    if line.is_lost:
                        pool.idle.remove(line)
                        self._lost(pool, line)
                if not pool.is_up and not pool.opening_count and now >= pool.retry_at:
                    self._open(pool)
            if self._lookup is not None:
                self._follow(now)
