"""The producer on blocking sockets: any number of threads publish to one nsqd or several.

Rules of this file:

- A call takes a line out of a pool, asks, and puts it back; it waits for a line, for an answer and between tries, never
  beyond its deadline, and never with the lock held.
- The outcomes and the retry table are those of :mod:`flintmq.client.producer`: an error in the message is final; "not
  here, not now" is tried again, up to ``max_tries``; without an answer it is sent to another nsqd (``retry_unknown``).
- Lines are opened by a crew, so that neither a name that does not resolve nor an nsqd that is gone holds up a call
  beyond its deadline. A keeper answers heartbeats on free lines and replaces those that are lost.
- Back-pressure is the pool: as many calls are on their way as there are lines.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import NoReturn, Self

from flintmq.client.backoff import jittered_s
from flintmq.client.blocking.crew import Crew
from flintmq.client.blocking.forking import watch
from flintmq.client.blocking.http import get
from flintmq.client.blocking.keeper import Keeper
from flintmq.client.blocking.line import Line, Unanswered
from flintmq.client.blocking.lookup import Fetch, Lookup
from flintmq.client.blocking.opening import check_options
from flintmq.client.blocking.pool import Pool
from flintmq.client.blocking.timers import Timers
from flintmq.client.discovery import NODES_PATH, Node, topic_path
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
    LOOKUP_JITTER,
    STALLED_SHARE,
    TOPIC_COUNT_MAX,
    TRIES_MAX,
    Body,
    check_topic,
    checked_bodies,
    checked_body,
    closed_error,
    is_draining,
    leaves_open,
    message_cost,
    messages_cost,
    retry_delay_s,
)
from flintmq.client.security import Refusals
from flintmq.client.stats import ProducerStats
from flintmq.env import Env
from flintmq.errors import (
    ConnectionFailed,
    DiscoveryError,
    FlintError,
    LocalProtocolError,
    NoNsqd,
    NsqdError,
    PublishRefused,
    PublishUnknown,
)
from flintmq.wire.client import ClientConnection

log = logging.getLogger("flintmq.client")

POOL_SIZE = 4
POOL_SIZE_MAX = 1000
KEEPER_S = 0.2
STALE_S = 0.05
CLOSE_SLACK_S = 1.0
LOOK_AGAIN_S = 1.0

Build = Callable[[ClientConnection], bytes]


@dataclass(slots=True)
class _Attempt:
    """A call on its way.

    Attributes:
        tries: how often nsqd refused it.
        is_unknown: it may have been stored by a try that was not answered.
        error: why the last try failed.
    """

    topic: str
    deadline: float
    count: int
    cost: int
    tries: int = 0
    is_unknown: bool = False
    error: FlintError | None = None


@dataclass(slots=True)
class _Turns:
    """The pools that a topic is published over, and whose turn it was last."""

    pools: list[Pool]
    next: int


class Producer:
    """Publishes messages, from any number of threads.

    ::

        with Producer("127.0.0.1:4150") as producer:
            producer.pub("orders", b"hello")
            producer.mpub("orders", [b"a", b"b"])
            producer.dpub("emails", b"remind me", delay=30)

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
        max_tries: how often a publish may be refused with an error that can pass.
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
        max_tries: int = TRIES_MAX,
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
        self._stats = ProducerStats()
        self._is_closed = False
        self._new_process()
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
        self._turns: dict[str, _Turns] = {}
        self._routes: dict[str, tuple[str, ...]] = {}
        self._asked: dict[str, None] = {}
        self._waiting: dict[str, int] = {}
        self._refusals = Refusals()
        self._calls: dict[int, _Attempt] = {}
        self._stats.bytes_in_flight = 0
        self._last_error: FlintError | None = None
        self._refresh_at = 0.0

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

    def pub(self, topic: str, body: Body, *, timeout: Seconds | None = None) -> None:
        """Publish one message; returns when nsqd answered OK.

        Raises:
            LocalProtocolError: the topic's name is not valid or the body is empty; nothing was sent.
            PublishRefused: the message is definitely not stored.
            PublishUnknown: the message may be stored.
        """
        check_topic(topic)
        data = checked_body(body)
        self._publish(topic, lambda wire: wire.pub(topic, data), 1, message_cost(data), timeout)

    def mpub(self, topic: str, bodies: Iterable[Body], *, timeout: Seconds | None = None) -> None:
        """Publish several messages as one: all are stored or none; returns when nsqd answered OK.

        Raises:
            LocalProtocolError: the topic's name is not valid, there is no body or one is empty; nothing was sent.
            PublishRefused: none is stored.
            PublishUnknown: they may be stored.
        """
        check_topic(topic)
        data = checked_bodies(bodies)
        if not data:
            raise LocalProtocolError("E_BAD_MESSAGE", "MPUB of no message; at least one is needed")
        self._publish(topic, lambda wire: wire.mpub(topic, data), len(data), messages_cost(data), timeout)

    def dpub(self, topic: str, body: Body, delay: Seconds, *, timeout: Seconds | None = None) -> None:
        """Publish one message to be delivered not before ``delay`` from now; nsqd sets the maximum (1 h).

        Raises:
            OptionError: the delay is not a duration from 0 to 365 days.
            LocalProtocolError: the topic's name is not valid or the body is empty; nothing was sent.
            PublishRefused: the message is definitely not stored; the delay may be longer than nsqd allows.
            PublishUnknown: the message may be stored.
        """
        check_topic(topic)
        defer_ms = milliseconds(delay, "delay", 0, DELAY_MAX_S)
        data = checked_body(body)
        self._publish(topic, lambda wire: wire.dpub(topic, defer_ms, data), 1, message_cost(data), timeout)

    def stats(self) -> ProducerStats:
        """Count what was done and say where the producer stands."""
        with self._lock:
            return replace(self._stats, connections=sum(pool.is_up for pool in self._pools.values()))

    def _publish(self, topic: str, build: Build, count: int, cost: int, timeout: Seconds | None) -> None:
        if self._keeper is None:
            self._begin()
        timeout_s = self._timeout_s if timeout is None else seconds(timeout, "timeout", 0.001)
        call = _Attempt(topic, self._time() + timeout_s, count, cost)
        key = id(call)
        line: Line | None = None
        is_done = False
        try:
            with self._lock:
                if self._is_closed:
                    raise closed_error()
                self._calls[key] = call
                self._stats.bytes_in_flight += cost
                line = self._take(topic)
            while not is_done:
                if line is None:
                    line = self._wait_for_line(call)
                is_done = self._try(call, line, build)
                if not is_done:
                    self._put_back(line)
                    line = None
        finally:
            self._end(key, call, line, is_done)

    def _end(self, key: int, call: _Attempt, line: Line | None, is_done: bool) -> None:
        with self._lock:
            if line is not None:
                self._put_back(line)
            if self._calls.pop(key, None) is None:
                return
            stats = self._stats
            stats.bytes_in_flight -= call.cost
            if is_done:
                stats.published += call.count
            else:
                stats.failed += call.count
            if self._is_closed:
                self._changed.notify_all()

    def _try(self, call: _Attempt, line: Line, build: Build) -> bool:
        """Ask one nsqd; False when another try is due."""
        command = build(line.wire)
        began = self._time()
        try:
            answer = line.ask(command, self._patience(call, began))
        except NsqdError as error:
            self._refused(call, error)
        except Unanswered as error:
            self._unanswered(call, error, began)
        else:
            if answer == b"OK":
                return True
            call.is_unknown = True
            self._fail(call, "E_INVALID", f"answer {answer[:32]!r} to a publish", line.address, retryable=False)
        with self._lock:
            self._stats.retries += 1
        return False

    def _patience(self, call: _Attempt, now: float) -> float:
        """Until when to wait for an answer: a stuck nsqd should not use up all the time if there is another one."""
        half_s = (call.deadline - now) / 2
        if len(self._pools) < 2 or not self._retries_unknown or half_s < self._timeout_s / 2 * STALLED_SHARE:
            return call.deadline
        with self._lock:
            is_choice = sum(pool.is_up for pool in self._turns_of(call.topic).pools) > 1
        return now + half_s if is_choice else call.deadline

    # --- outcomes ---

    def _refused(self, call: _Attempt, error: NsqdError) -> None:
        """Follow the retry table: return when the next try is due."""
        call.error = error
        call.tries += 1
        is_open = leaves_open(error)
        call.is_unknown |= is_open
        is_last = call.tries >= self._tries_max and not is_draining(error)
        if not error.retryable or is_last or (is_open and not self._retries_unknown):
            self._fail(call, error.code, error.detail, error.nsqd, retryable=error.retryable)
        with self._lock:
            self._look_up(call.topic)
            delay_s = retry_delay_s(call.tries, self._env.random.random())
        threading.Event().wait(max(0.0, min(delay_s, call.deadline - self._time())))

    def _unanswered(self, call: _Attempt, error: Unanswered, began: float) -> None:
        now = self._time()
        call.error = error
        call.is_unknown |= error.maybe_executed
        if now >= call.deadline:
            self._fail(call, "TIMEOUT", f"no answer within {now - began:.3g} s", error.address, retryable=True)
        if error.maybe_executed and not self._retries_unknown:
            self._fail(call, "CONNECTION_LOST", f"nsqd did not answer: {error.reason}", retryable=True)

    def _fail(self, call: _Attempt, code: str, detail: str, nsqd: str = "", *, retryable: bool) -> NoReturn:
        kind = PublishUnknown if call.is_unknown else PublishRefused
        raise kind(code, detail, nsqd, retryable) from call.error

    # --- lines ---

    def _take(self, topic: str) -> Line | None:
        """A free line in turn, or None; with the lock held."""
        turns = self._turns_of(topic)
        pools = turns.pools
        for _ in pools:
            turns.next = (turns.next + 1) % len(pools)
            pool = pools[turns.next]
            while (line := pool.take()) is not None:
                if self._time() - line.used_at > STALE_S:
                    line.attend()  # it may have been closed while nobody looked
                if not line.is_lost:
                    self._stats.commands += 1
                    return line
                self._lost(pool, line)
        return None

    def _put_back(self, line: Line) -> None:
        with self._lock:
            pool = self._pools.get(line.address)
            if pool is None or line not in pool.lines:
                line.close()
            elif line.is_lost:
                self._lost(pool, line)
            else:
                pool.idle.append(line)
                if self._waiting:
                    self._changed.notify()

    def _lost(self, pool: Pool, line: Line) -> None:
        self._last_error = ConnectionFailed(line.address, line.reason)
        log.warning("lost nsqd %s: %s", line.address, line.reason)
        pool.lose(line, self._time(), self._env.random.random())

    def _wait_for_line(self, call: _Attempt) -> Line:
        """Wait until there is a free line.

        Raises:
            PublishError: there was none in time, or every nsqd refuses this client for good.
        """
        topic = call.topic
        with self._lock:
            self._waiting[topic] = self._waiting.get(topic, 0) + 1
            try:
                while (line := self._take(topic)) is None:
                    self._fail_refused(call)
                    if (left_s := call.deadline - self._time()) <= 0:
                        self._fail_waiting(call)
                    if self._lookup is not None and topic not in self._routes:
                        self._look_up(topic)
                    again_s = self._open_one(self._turns_of(topic).pools)
                    self._changed.wait(min(left_s, again_s))
            finally:
                self._waiting[topic] -= 1
                if not self._waiting[topic]:
                    del self._waiting[topic]
        return line

    def _fail_waiting(self, call: _Attempt) -> NoReturn:
        pools = self._turns_of(call.topic).pools
        if any(pool.is_up for pool in pools):
            count = sum(len(pool.lines) for pool in pools)
            self._fail(call, "TIMEOUT", f"not sent: all {count} connections are busy, see pool_size", retryable=True)
        call.error = call.error or self._last_error or NoNsqd(call.topic, "nothing is known of any nsqd")
        self._fail(call, "TIMEOUT", f"no nsqd took it in time: {call.error}", retryable=True)

    def _fail_refused(self, call: _Attempt) -> None:
        """Fail a call that no nsqd of its topic will ever take."""
        error = self._refusals.of_all(self._addresses_of(call.topic))
        if error is None or any(pool.is_up for pool in self._turns_of(call.topic).pools):
            return
        call.error = error
        if isinstance(error, NsqdError):
            self._fail(call, error.code, error.detail, error.nsqd, retryable=False)
        assert isinstance(error, ConnectionFailed)
        self._fail(call, "TLS_REFUSED", error.reason, error.address, retryable=False)

    def _turns_of(self, topic: str) -> _Turns:
        """The pools a topic can be published over; each topic takes its own turns."""
        turns = self._turns.get(topic)
        if turns is None:
            if len(self._turns) >= TOPIC_COUNT_MAX:
                self._turns.clear()
            pools = [self._pools[address] for address in self._addresses_of(topic) if address in self._pools]
            turns = self._turns[topic] = _Turns(pools, self._env.random.randrange(len(pools)) if pools else 0)
        return turns

    def _addresses_of(self, topic: str) -> tuple[str, ...]:
        return self._nsqd if self._lookup is None else self._routes.get(topic, ())

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
            line = Line(pool.address, self._options, self._env, self._time)
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

    # --- discovery, with the lock held ---

    def _follow(self, now: float) -> None:
        """Refresh every topic again and again, and those that calls wait for more often."""
        topics = dict.fromkeys(self._waiting)
        if now >= self._refresh_at:
            topics.update(dict.fromkeys(self._routes))
            self._refresh_at = now + jittered_s(self._lookup_interval_s, LOOKUP_JITTER, self._env.random.random())
        for topic in topics:
            self._look_up(topic)

    def _look_up(self, topic: str) -> None:
        """Refresh what is known of a topic, once at a time and at most once a second."""
        if self._lookup is not None and topic not in self._asked:
            self._asked[topic] = None
            self._lookup.ask(topic_path(topic), partial(self._found, topic))

    def _found(self, topic: str, outcome: tuple[Node, ...] | DiscoveryError) -> None:
        assert self._lookup is not None
        if outcome == ():
            self._lookup.ask(NODES_PATH, partial(self._found_any, topic))  # nobody has the topic yet
        else:
            self._found_any(topic, outcome)

    def _found_any(self, topic: str, outcome: tuple[Node, ...] | DiscoveryError) -> None:
        self._timers.call_later(min(LOOK_AGAIN_S, self._lookup_interval_s), self._asked.pop, topic, None)
        if isinstance(outcome, DiscoveryError):
            self._last_error = outcome
            log.warning("discovery of %s failed: %s", topic, outcome)
            return
        if not outcome:
            self._last_error = NoNsqd(topic, "the nsqlookupd list no nsqd")
            if self._routes.get(topic):
                return  # they have just started, and nsqd register one by one: what was known stands
        self._routes.pop(topic, None)
        self._routes[topic] = tuple(node.address for node in outcome)
        while len(self._routes) > TOPIC_COUNT_MAX:
            del self._routes[next(iter(self._routes))]
        self._keep(address for route in self._routes.values() for address in route)
        self._changed.notify_all()
