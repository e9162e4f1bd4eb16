"""The consumer on blocking sockets: one subscription, on every nsqd that has the topic.

Rules of this file:

- Whoever iterates *pumps*: when nothing is queued, or every ``SLICE_S``, it sends answers, runs what is due, waits for
  the sockets and reads. One thread pumps at a time. A keeper does the same, without waiting, when nobody has for a
  while: a handler may take as long as it likes, heartbeats are answered and FINs go out.
- Two locks: the *pump* is held by who waits for the sockets, the *lock* by who touches any state, never across a wait
  and never while the application's code runs. ``finish`` takes neither.
- An interrupt (Ctrl-C) in the middle of sending or reading leaves connections that nobody could trust: they are
  given up, and nsqd delivers again what was not answered. So are they when iteration goes on after an interrupt that
  came while a message was handed out. An interrupt while waiting costs nothing.
- When a connection is lost, its queued messages go with it: nsqd delivers them again.
- A partition has a connection of its own; in order, each partition backs off for itself.
- Stopping is one way: RDY 0, queued messages given back, answers sent, CLS, close.

What decides is shared with :mod:`flintmq.client.aio.consumer`: flow, RDY, backoff, inbox, messages, discovery's
answers.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from flintmq.client.blocking.connection import Connection
from flintmq.client.blocking.crew import Crew
from flintmq.client.blocking.forking import watch
from flintmq.client.blocking.http import get
from flintmq.client.blocking.keeper import Keeper
from flintmq.client.blocking.lookup import DEADLINE_SLACK_S, Fetch, Lookup
from flintmq.client.blocking.opening import check_options
from flintmq.client.blocking.producer import Producer
from flintmq.client.blocking.subscribing import Subscriptions
from flintmq.client.blocking.timers import Timers
from flintmq.client.core import trace as trace_log
from flintmq.client.core.backoff import LEVEL_MAX, Backoff, jittered_s, requeue_delay_s
from flintmq.client.core.bodies import reader
from flintmq.client.core.discovery import PollTimes
from flintmq.client.core.envelope import open_delivery
from flintmq.client.core.flow import BACKOFF_JITTER, Flow
from flintmq.client.core.message import Delivery, Message, Value, is_hex, take_apart
from flintmq.client.core.routing import Target
from flintmq.client.core.start import StartAt
from flintmq.client.core.stats import ConsumerStats
from flintmq.client.core.topology import Topology
from flintmq.client.core.unreadable import BLOCKING, REQUEUED, Letters, Unreadable, letter_headers, read_error
from flintmq.client.inbox import Inbox
from flintmq.client.options import ConnectionOptions, Seconds, addresses, seconds, system_env, whole
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
from flintmq.errors import BodyError, FlintError, LocalProtocolError, PublishRefused, RemoteProtocolError
from flintmq.limits import ATTEMPTS_MAX
from flintmq.wire.client import MessageFailed, Record

if TYPE_CHECKING:
    from flintmq.client.telemetry import Telemetry

log = logging.getLogger("flintmq.client")

SLICE_S = 0.01
KEEPER_S = 0.05
WAIT_S = 1.0
ERROR_COUNT_MAX = 1000

Item = TypeVar("Item")


class Consumer(Generic[Value]):
    """Consumes a channel of a topic.

    ::

        with Consumer("orders", "billing", nsqlookupd_http_addresses="http://127.0.0.1:4161") as consumer:
            for message in consumer:
                with message:
                    bill(message.body)

    Leaving the block stops the flow, sends what was answered, and closes. Several threads may iterate over one
    consumer, and messages may be answered in any thread. ``on_giving_up``, ``on_error`` and ``handler`` are called in a
    thread that iterates. All durations are seconds or a timedelta. A consumer that was started cannot be used in a
    child made by ``os.fork()``.

    Args:
        topic: 1 to 64 of ``[.a-zA-Z0-9_-]``, optionally ``#ephemeral``.
        channel: likewise.
        nsqd_tcp_addresses: ``host:port`` of one nsqd or several; or
        nsqlookupd_http_addresses: ``http://host:port`` of one nsqlookupd or several.
        handler: :meth:`run` calls it with each message; without it, iterate. Returning finishes the message, an
            exception requeues it and makes the consumer back off; :class:`Requeue` and :class:`Discard` steer.
        max_in_flight: messages delivered and not answered, over all nsqd. Can be changed while running.
        type: what the bodies are: a type that msgspec reads from JSON (Struct, dataclass, dict, ...), a pydantic model,
            or ``str``; :attr:`Message.value` has them. A message whose body cannot be read goes to ``dead_letter`` at
            once; without that it is requeued like every other that failed, to ``on_giving_up`` in the end, and without
            that again and again: it is never finished unhandled.
        decode: instead of ``type``, a plain function that makes the value from the bytes of a body; called where
            :attr:`Message.value` is first read. Whatever it raises makes the body one that cannot be read.
        max_attempts: a message with more goes to ``on_giving_up`` and ``dead_letter`` and is finished. 0: no limit.
        on_giving_up: called instead of the handler; if it raises, the message is requeued.
        dead_letter: a topic that the bodies of such messages are published to, on the nsqd of this consumer, before
            they are finished; with headers that say why, if that topic has any.
        on_error: told of answers that came too late and of nsqd that cannot be used.
        requeue_delay: until a failed message comes again, times its attempts.
        max_requeue_delay: the most that becomes.
        backoff: the pause after a first failure; it doubles with each further one.
        max_backoff: the longest pause; 0: never pause.
        drain_timeout: how long :meth:`close`, called in another thread, waits for the handler that :meth:`run` is in.
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
        env: time and chance; the real ones if None.
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
        self._set_up(env or system_env())
        self.topic, self.channel = topic, channel
        self._decode = reader(type, decode)
        self._unreadable = Unreadable(topic, channel)
        self._options = (options or ConnectionOptions()).with_overrides(
            client_id=client_id,
            msg_timeout=msg_timeout,
            heartbeat_interval=heartbeat_interval,
            sample_rate=sample_rate,
        )
        check_options(self._options)
        self._connect_timeout_s = seconds(self._options.connect_timeout, "connect_timeout")
        self._nsqd, lookups = addresses(nsqd_tcp_addresses, nsqlookupd_http_addresses)
        self._handler = handler if handler is None or telemetry is None else telemetry.around(handler, topic, channel)
        self._opens_envelopes = telemetry is not None and telemetry.has_envelope
        self.trace = trace
        self._is_ordered = ordered
        if ordered:
            gives_up = on_giving_up is not None or dead_letter is not None
            check_ordered(has_lookup=bool(lookups), samples=bool(self._options.sample_rate), gives_up=gives_up)
        self._order = new_order(topic, blocked_warn_attempts, blocked_error_attempts)
        self._on_giving_up = on_giving_up
        self._on_error = on_error
        self._requeue_delay_s = seconds(requeue_delay, "requeue_delay")
        self._requeue_delay_max_s = seconds(max_requeue_delay, "max_requeue_delay")
        self._drain_timeout_s = seconds(drain_timeout, "drain_timeout")
        self._lookup_timeout_s = seconds(lookup_timeout, "lookup_timeout", 0.01, 3600)
        self._has_lookup = bool(lookups)
        times = new_times(lookup_interval, lookup_jitter)
        begins = new_beginning(start, ordered, self._env)
        how = {"desired_tag": checked_tag(desired_tag), "wants_headers": headers, "beginning": begins}
        self._subscriptions = self._new_subscriptions(self._new_lookup(lookups, fetch), times, how)
        self._dead_letter = dead_letter
        self._graveyard: Producer | None = None
        self._letters = Letters()
        same: dict[str, Any] = {"options": self._options, "lookup_timeout": lookup_timeout, "env": env, "fetch": fetch}
        self._new_graveyard = partial(Producer, self._nsqd, nsqlookupd_http_addresses=lookups, pool_size=1, **same)
        policy = new_policy(max_in_flight, low_rdy_idle_timeout, low_rdy_timeout)
        self._backoff_s = seconds(backoff, "backoff", 0.001)
        self._backoff_max_s = seconds(max_backoff, "max_backoff")
        self._flow: Flow[Connection] = Flow(policy, Backoff(self._backoff_s, self._backoff_max_s), self._env)
        limit = whole(max_attempts, "max_attempts", 0, ATTEMPTS_MAX)
        attempts_max = limit if limit and not ordered else ATTEMPTS_MAX + 1
        self._inbox = Inbox(Message, attempts_max, self._given_up.append, self._expired)
        watch(self)

    def _set_up(self, env: Env) -> None:
        """Set up what no argument changes."""
        self.is_waiting = False
        self._env = env
        self._timers = Timers(self._env.clock)
        self._lock = threading.RLock()
        self._pump = threading.RLock()
        self._closing = threading.RLock()
        self._burying = threading.Lock()  # held while the first dead letter tries its headers
        self._selector: selectors.BaseSelector
        self._wakeup: socket.socket | None = None
        self._waker: socket.socket | None = None
        self._is_woken = False
        self._given_up: deque[Message[Any]] = deque()  # no more than were queued
        self._errors: deque[FlintError] = deque(maxlen=ERROR_COUNT_MAX)
        self._stats = ConsumerStats()
        self._orphaned: dict[Connection, None] = {}
        self._keeper: Keeper | None = None
        self._pumped_at = 0.0
        self._is_started = self._is_stopping = self._is_stopped = self._is_closed = self._is_torn_down = False
        self._is_foreign = self._has_dropped = False
        self._failure: BaseException | None = None
        self._running: dict[int, None] = {}
        self._run_ended = threading.Condition()

    def _new_subscriptions(self, lookup: Lookup | None, times: PollTimes, how: dict[str, Any]) -> Subscriptions:
        about = self.topic, self.channel, self, self._options, self._env, self._timers, self._lock
        return Subscriptions(*about, lookup, times, is_ordered=self._is_ordered, **how)

    def _new_lookup(self, lookups: tuple[str, ...], fetch: Fetch | None) -> Lookup | None:
        if not lookups:
            return None
        return Lookup(
            lookups,
            self._lookup_timeout_s,
            fetch or partial(get, options=self._options, time=self.time),
            Crew("flintmq-lookup"),
            self._timers,
            self._lock,
            self.wake,
        )

    def __repr__(self) -> str:
        return f"<Consumer {self.topic}/{self.channel} on {len(self._flow.connections)} nsqd>"

    def describe(self) -> str:
        """Show connections, levels and backoff, a line each."""
        with self._lock:
            return f"{self!r} queued={self._inbox.count}\n{self._flow.describe()}"

    # --- life ---

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Connect and subscribe. Returns when every nsqd known so far was tried once.

        An nsqd or nsqlookupd that cannot be reached is tried again in the background.

        Raises:
            NsqdError: every nsqd refuses us for good (not authorised, say).
            ConnectionFailed: every nsqd refuses our TLS, or we its certificate (TlsRefused).
        """
        with self._lock:
            if self._is_started or self._is_closed:
                raise RuntimeError("a consumer is started once; make another one")
            self._is_started = True
            self._wakeup, self._waker = socket.socketpair()
            for end in (self._wakeup, self._waker):
                end.setblocking(False)
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._wakeup, selectors.EVENT_READ)
            self._flow.start(self._timers)
            self._keeper = Keeper(self._keep, KEEPER_S, "flintmq-consumer")
        try:
            with self._lock:
                self._subscriptions.keep(self._nsqd)
                self._subscriptions.poll()
            if self._has_lookup:
                self._pump_until(lambda: self._subscriptions.is_polled, self._lookup_timeout_s + 2 * DEADLINE_SLACK_S)
            self._pump_until(lambda: self._subscriptions.are_all_tried, self._connect_timeout_s + DEADLINE_SLACK_S)
            if self._failure is not None:
                raise self._failure
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Consume with the handler, in this thread, until :meth:`stop`, then drain and close; starts if need be.

        Several threads may run one consumer; each returns when it is stopped, the first closes it.

        Raises:
            NsqdError: every nsqd refuses us for good.
        """
        if self._handler is None:
            raise RuntimeError("run() needs a handler; without one, iterate over the consumer")
        if not self._is_started:
            self.start()
        key = threading.get_ident()
        self._running[key] = None
        try:
            self._work(self._handler)
        finally:
            with self._run_ended:
                self._running.pop(key, None)
                self._run_ended.notify_all()
            self.close()
        if self._failure is not None:
            raise self._failure

    def _work(self, handler: Callable[[Message[Value]], object]) -> None:
        for message in self._iterate():
            try:
                handler(message)
            except BaseException as error:
                message.settle(error)
                if not isinstance(error, Exception):
                    raise
            else:
                if not message.is_answered:
                    message.finish()

    def stop(self) -> None:
        """Stop the flow: RDY 0, messages not handed out are given back, iteration and :meth:`run` end.

        Only asks for it, so it may be called in any thread and in a signal handler.
        """
        self._is_stopping = True
        self.wake()

    def close(self) -> None:
        """Stop, send what was answered, and close the connections.

        Waits for nsqd to confirm, at most 2 s; and first, when :meth:`run` is in a handler in another thread, for that,
        at most ``drain_timeout``.
        """
        self.stop()
        with self._closing:
            if self._is_closed or self._is_foreign:
                return
            self._is_closed = True
            try:
                if self._is_started:
                    self._await_handlers()
                    self._drain()
            finally:
                self._tear_down()

    def _await_handlers(self) -> None:
        began = self.time()
        said_at, deadline = began + DRAIN_SAID_S, began + self._drain_timeout_s
        own = threading.get_ident()
        with self._run_ended:
            while (busy := sum(key != own for key in self._running)) and (now := self.time()) < deadline:
                if now >= said_at:
                    log.warning(DRAIN_WAITS, busy, self._drain_timeout_s)
                    said_at = deadline
                self._run_ended.wait(min(said_at, deadline) - now)
            if any(key != own for key in self._running):
                log.warning("handlers did not end within %g s", self._drain_timeout_s)

    def _drain(self) -> None:
        """Have every nsqd confirm that it has executed what was sent."""
        with self._lock:
            self._stop_now()
            connections = self._flow.connections
            for connection in connections:
                if (held := self._flow.held(connection)) > 0:
                    log.warning(
                        "closing %s with %d messages not answered; nsqd delivers them again", connection.address, held
                    )
                connection.end_subscription()
        self._pump_until(lambda: all(each.has_left or each.is_lost for each in connections), CLOSE_WAIT_S)
        for connection in connections:
            if not connection.has_left:
                log.warning("nsqd %s did not confirm the end of the subscription", connection.address)

    def _tear_down(self) -> None:
        with self._lock:
            self._stop_now()
            for connection in self._flow.connections:
                connection.close()
            self._flow.close()
            self._subscriptions.end()
            if self._keeper is not None:
                self._keeper.end()
        self.wake()
        with self._pump:  # nobody waits for the sockets any more
            self._is_torn_down = True
            self._close_descriptors()
        self._tell()
        self._unreadable.tell_rest()
        if self._graveyard is not None:
            self._graveyard.close()

    def after_fork(self) -> None:
        """In a child: let go of everything that is the parent's."""
        if not self._is_started:
            return
        self._is_foreign = self._is_stopping = True
        self._lock = threading.RLock()
        self._pump = threading.RLock()
        self._closing = threading.RLock()
        self._run_ended = threading.Condition()
        for connection in self._flow.connections:
            connection.abandon()
        self._inbox.end()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        if self._wakeup is not None and self._waker is not None:
            self._selector.close()
            self._wakeup.close()
            self._waker.close()

    # --- pulling ---

    def __iter__(self) -> Iterator[Message[Value]]:
        self._check_pulled()
        return self._iterate()

    def _iterate(self) -> Iterator[Message[Value]]:
        """Yield messages until the consumer has stopped, and pump."""
        self._take_up()
        time, lock, take = self._timers.time, self._lock, self._inbox.take
        slice_end = time() + SLICE_S
        while not self._is_stopping:
            now = time()
            if now > slice_end:
                self._pump_once()
                now = time()
                slice_end = now + SLICE_S
            try:
                with lock:
                    message = take(now)
            except BaseException:
                self._has_dropped = True
                raise
            if self._given_up:
                self._bury_all(message)
            if message is not None:
                yield message
            else:
                self._wait(WAIT_S)
                slice_end = time() + SLICE_S
        self._end_iteration()

    def batches(self, size: int, timeout: Seconds = 1.0) -> Iterator[list[Message[Value]]]:
        """Yield lists of messages.

        A list is complete with ``size`` messages, ``timeout`` after its first, or when no more can come before some are
        answered (:attr:`is_starved`).

        Raises:
            NsqdError: every nsqd refuses us for good.
        """
        self._check_pulled()
        whole(size, "size", 1, MAX_IN_FLIGHT_MAX)
        return self._batches(size, seconds(timeout, "timeout", 0.001))

    def _batches(self, size: int, timeout_s: float) -> Iterator[list[Message[Value]]]:
        self._take_up()
        while not self._is_stopping:
            self._pump_once()
            if batch := self._batch(size, timeout_s):
                yield batch
        self._end_iteration()

    def _batch(self, size: int, timeout_s: float) -> list[Message[Value]]:
        batch: list[Message[Value]] = []
        until = self.time() + WAIT_S
        try:
            while len(batch) < size and not self._is_stopping:
                with self._lock:
                    message = self._inbox.take(self.time())
                    is_enough = message is None and bool(batch) and self._flow.is_starved
                if self._given_up:
                    self._bury_all(message)
                if message is not None:
                    if not batch:
                        until = self.time() + timeout_s
                    batch.append(message)
                elif is_enough or (left_s := until - self.time()) <= 0:
                    break
                else:
                    self._wait(left_s)
        except BaseException:
            self._has_dropped = True
            for message in batch:
                message.requeue(0)
            raise
        return batch

    def _take_up(self) -> None:
        """Begin to iterate, perhaps after an interrupt that came while a message was handed out."""
        if self._has_dropped:
            self._has_dropped = False
            self._interrupted("while a message was handed out")

    def _check_pulled(self) -> None:
        if self._is_foreign:
            raise RuntimeError("this consumer was started before os.fork(); make another one in the child")
        if not self._is_started:
            raise RuntimeError("start the consumer first: with Consumer(...) as consumer")
        if self._handler is not None:
            raise RuntimeError("this consumer has a handler; iterate over one without")

    def _end_iteration(self) -> None:
        self._tell()
        if self._failure is not None:
            raise self._failure

    # --- pumping ---

    def wake(self) -> None:
        """End the wait of whoever waits for the sockets; in any thread, and in a signal handler."""
        if self._is_woken or self._waker is None:
            return
        self._is_woken = True
        try:
            self._waker.send(b"\0")
        except OSError:
            pass  # closed: nobody waits; full: whoever waits is being woken

    def watch(self, connection: Connection, is_choked: bool) -> None:
        """Wait for a connection's socket to be readable; also until it takes more, if it is choked."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_choked else 0)
        if self._flow.has_joined(connection):
            self._selector.modify(connection, events, connection)
        else:
            self._selector.register(connection, events, connection)

    def unwatch(self, connection: Connection) -> None:
        """Wait for a connection's socket no longer."""
        self._selector.unregister(connection)

    def _wait(self, timeout_s: float) -> None:
        """Wait until there may be something to hand out, and pump meanwhile."""
        if self._pump.acquire(timeout=timeout_s):
            try:
                if not self._inbox.count and not self._is_stopping:
                    self._turn(timeout_s)
            finally:
                self._pump.release()
        self._tell()

    def _pump_once(self) -> None:
        """Send and read what can be without waiting, unless somebody is at it."""
        if self._pump.acquire(blocking=False):
            try:
                self._turn(0.0)
            finally:
                self._pump.release()

    def _pump_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Pump until ``condition``, or the consumer has failed."""
        deadline = self.time() + timeout_s
        while not condition() and self._failure is None and (left_s := deadline - self.time()) > 0:
            if self._pump.acquire(timeout=left_s):
                try:
                    self._turn(min(left_s, WAIT_S))
                finally:
                    self._pump.release()

    def _keep(self) -> None:
        """Pump when nobody else does; called by the keeper."""
        if self.time() - self._pumped_at > KEEPER_S:
            self._pump_once()

    def _turn(self, timeout_s: float) -> None:
        """Send, run what is due, wait, read; by who holds the pump."""
        if self._is_torn_down:
            return
        self.is_waiting = timeout_s > 0  # before the flush: a FIN that comes after it ends the wait
        try:
            with self._lock:
                wait_s = self._prepare(timeout_s)
            ready = self._selector.select(wait_s)
        finally:
            self.is_waiting = False
        if ready:
            with self._lock:
                self._serve(ready)

    def _prepare(self, timeout_s: float) -> float:
        """Do everything there is to do but reading; say how long there is nothing else to do."""
        try:
            if self._is_stopping:
                self._stop_now()
            self._timers.run_due()
            for connection in self._flow.connections:
                connection.flush()
            for connection in [*self._orphaned]:
                connection.flush()
        except BaseException:
            self._interrupted("while sending")
            raise
        now = self._pumped_at = self.time()
        next_at = self._timers.next_at()
        return timeout_s if next_at is None else max(0.0, min(timeout_s, next_at - now))

    def _serve(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Read from, and write to, the sockets that are ready."""
        try:
            for key, events in ready:
                connection: Connection | None = key.data
                if connection is None:
                    assert self._wakeup is not None
                    self._wakeup.recv(4096)
                    self._is_woken = False  # after it: who finds it True has changed something that is looked at below
                    continue
                if events & selectors.EVENT_READ:
                    connection.on_readable()
                if events & selectors.EVENT_WRITE and not connection.is_lost:
                    connection.on_writable()
                if connection.has_output:
                    connection.flush()
        except BaseException:
            self._interrupted("while reading")
            raise

    def _interrupted(self, when: str) -> None:
        """Give all connections up: nobody knows what was sent, read, or handed out."""
        with self._lock:
            for connection in self._flow.connections:
                connection.abort(f"interrupted {when}")

    def _stop_now(self) -> None:
        """Ask for no more, and give back what is queued; with the lock held."""
        self._is_stopping = True
        if self._is_stopped:
            return
        self._is_stopped = True
        self._subscriptions.stop()
        self._flow.stop()
        for delivery in self._inbox.remove():
            give_back(delivery)
        self._inbox.end()

    # --- flow ---

    @property
    def max_in_flight(self) -> int:
        """Messages delivered and not answered, over all nsqd."""
        return self._flow.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        with self._lock:
            self._flow.max_in_flight = whole(count, "max_in_flight", 1, MAX_IN_FLIGHT_MAX)
        self.wake()

    @property
    def is_starved(self) -> bool:
        """Whether some nsqd soon cannot deliver more before messages are answered: the time to work off a batch."""
        with self._lock:
            return self._flow.is_starved

    @property
    def is_paused(self) -> bool:
        """Whether :meth:`pause` holds."""
        return self._flow.is_paused

    def pause(self) -> None:
        """Ask every nsqd for no more messages until :meth:`unpause`."""
        self._set_paused(True)

    def unpause(self) -> None:
        """End :meth:`pause`."""
        self._set_paused(False)

    def _set_paused(self, is_paused: bool) -> None:
        with self._lock:
            self._flow.is_paused = is_paused
            self._flow.replan()
        self.wake()

    @property
    def connections(self) -> tuple[str, ...]:
        """``host:port`` of every nsqd that is subscribed now."""
        with self._lock:
            return tuple(dict.fromkeys(connection.address for connection in self._flow.connections))

    @property
    def partitions(self) -> dict[int, str]:
        """The partitions that are subscribed now, and ``host:port`` of each one's nsqd; empty if the topic has none."""
        with self._lock:
            found = {each.partition: each.address for each in self._flow.connections if each.partition is not None}
        return dict(sorted(found.items()))

    def stats(self) -> ConsumerStats:
        """Count what was done and say where the consumer stands."""
        with self._lock:
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
        """Seconds on this consumer's clock."""
        return self._timers.time()

    def requeue_delay_s(self, attempts: int) -> float:
        """How long a message with so many attempts waits by default.

        In order, what waits holds up its partition, and RDY 0 holds it back better: Youzan's nsqd ignores the delay.
        """
        if self._is_ordered and self._backoff_max_s > 0:
            return 0.0
        return requeue_delay_s(attempts, self._requeue_delay_s, self._requeue_delay_max_s)

    def message_failed(self) -> None:
        """Count a failure and back off."""
        with self._lock:
            self._stats.failed += 1
            self._flow.note_failure()
        self.wake()

    def _partition_failed(self, connection: Connection, attempts: int) -> None:
        """Count a failure in order, and let only its partition wait: longer with each attempt."""
        with self._lock:
            self._stats.failed += 1
            if self._backoff_max_s > 0:
                wait_s = min(self._backoff_max_s, self._backoff_s * 2.0 ** min(attempts - 1, LEVEL_MAX))
                self._flow.hold(connection, jittered_s(wait_s, BACKOFF_JITTER, self._env.random.random()))
        self.wake()

    def decode(self, body: bytes) -> Value:
        """A body as this consumer's ``type`` or ``decode``."""
        return self._decode(body)

    def unreadable(self, message: Message[Any], error: BodyError) -> None:
        """Answer a message whose body cannot be read: to the dead letters with it, or back to nsqd."""
        if self._dead_letter is not None:
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
        has_heir = self._on_giving_up is not None or self._dead_letter is not None
        if not has_heir and error is None and (found := read_error(message)) is not None:
            self.unreadable(message, found)
            return
        with self._lock:
            self._stats.given_up += 1
        where = "" if self._dead_letter is None else f", it goes to topic {self._dead_letter}"
        if error is None:
            attempts = message.attempts - 1
            log.error("giving up on message %r of %s after %d attempts%s", message.id, message.nsqd, attempts, where)
        else:
            self._unreadable.tell(message, error, self.time(), f"giving up on it{where}")
        try:
            if self._on_giving_up is not None:
                self._on_giving_up(message)
            if self._dead_letter is not None and not message.is_answered:
                self._bury(message, self._dead_letter, letter_headers(message, self.topic, self.channel, error))
        except BaseException as raised:
            message.settle(raised, is_given_up=True)
            if not isinstance(raised, Exception):
                raise
        else:
            message.settle(None)

    def _bury(self, message: Message[Any], topic: str, headers: dict[str, object]) -> None:
        """Publish a dead letter; with headers, if the topic has room for them."""
        with self._burying:
            if self._graveyard is None:
                self._graveyard = self._new_graveyard()
        producer, letters = self._graveyard, self._letters
        takes_headers = producer.takes_headers(topic)
        if takes_headers is None:
            with self._burying:
                if letters.can_have_headers is None:
                    letters.can_have_headers = producer.try_headers(topic, message.body, headers)
                    if letters.can_have_headers:
                        return
            takes_headers = letters.can_have_headers
        if takes_headers:
            try:
                producer.pub(topic, message.body, headers=headers)
            except (PublishRefused, LocalProtocolError) as error:
                letters.note_refusal(error)
            else:
                return
        producer.pub(topic, message.body)

    def call_in_loop(self, function: Callable[[], object]) -> None:
        """Call ``function``: messages may be answered in any thread."""
        function()

    def _bury_all(self, in_hand: Message[Any] | None) -> None:
        """Give up on messages that had too many attempts; in a thread that iterates, without the lock."""
        try:
            while (message := _next_of(self._given_up)) is not None:
                self.give_up(message)
        except BaseException:
            if in_hand is not None:
                in_hand.requeue(0)
            raise

    def _tell(self) -> None:
        """Tell ``on_error`` what happened; in a thread that iterates, without the lock."""
        while (error := _next_of(self._errors)) is not None:
            if self._on_error is None:
                continue
            try:
                self._on_error(error)
            except Exception:
                log.exception("on_error raised")

    # --- what connections tell (connection.ConnectionOwner), with the lock held ---

    def on_messages(self, connection: Connection, records: list[Record]) -> None:
        """Queue messages."""
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
        if self._is_stopped:
            give_back(delivery)
        else:
            self._inbox.put(delivery)
        if is_first:
            self._flow.replan()

    def _take_apart(self, connection: Connection, delivery: Delivery) -> bool:
        """Take off bodies what stands in front of them, and check the order; False when nsqd sends nonsense."""
        if not (connection.is_extended or connection.is_located):
            return True
        if connection.is_located and connection.partition is None and not is_hex(delivery.records[0][2]):
            self.fail(has_partitions(self.topic))
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
                self._errors.append(violation)
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
        """Note that an answer came too late."""
        self._stats.late += 1
        error = FAILURES[failure.command](failure.code, failure.detail, connection.address)
        log.warning("%s came too late: %s", failure.command, error)
        self._errors.append(error)

    def on_lost(self, connection: Connection, error: FlintError) -> None:
        """Let a connection go, and its queued messages with it."""
        if not self._flow.has_joined(connection):
            return
        target = Target(connection.address, connection.partition)
        if not self._is_stopped:
            log.warning("lost nsqd %s: %s", target, error)
        dropped = sum(len(delivery.records) for delivery in self._inbox.remove(connection))
        self._stats.dropped += dropped
        self._orphaned[connection] = None  # what the application still holds of it is counted when it is answered
        self._timers.call_later(connection.msg_timeout_s, self._orphaned.pop, connection, None)
        self._flow.leave(connection, dropped)
        self._subscriptions.note_lost(target, self.time() - connection.opened_at)

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

    # --- what subscriptions tell (subscribing.SubscriptionOwner), with the lock held ---

    @property
    def has_connections(self) -> bool:
        """Whether something is subscribed now."""
        return bool(self._flow.connections)

    def join(self, connection: Connection) -> None:
        """Take in a connection that is subscribed; in a thread of the crew."""
        target = Target(connection.address, connection.partition)
        log.info("subscribed to %s/%s on %s", self.topic, self.channel, target)
        connection.begin_pumping(self._timers)
        self._flow.join(connection)
        if not self._subscriptions.leads(target):
            connection.abort("another nsqd leads the partition by now")

    def give_up_wrong(self, topology: Topology) -> None:
        """Give up the connections to nsqd that do not lead their partition any more."""
        for connection in self._flow.connections:
            if connection.partition is None:
                continue
            leader = topology.leaders.get(connection.partition, connection.address)
            if leader != connection.address:
                connection.abort(f"partition {connection.partition} is led by {leader} now")

    def note_error(self, error: FlintError) -> None:
        """Note what ``on_error`` is to be told."""
        self._errors.append(error)

    def fail(self, error: FlintError) -> None:
        """End the consumer: iteration and :meth:`run` raise ``error``."""
        if self._failure is None and not self._is_stopped:
            self._failure = error
            self._is_stopping = True


def _next_of(queue: deque[Item]) -> Item | None:
    """Take one out, if another thread has not."""
    try:
        return queue.popleft()
    except IndexError:
        return None
