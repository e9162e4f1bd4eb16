"""The consumer on blocking sockets: one subscription, on every nsqd that has the topic, or on every partition of it.

What it decides: :mod:`flintmq.client.core.consuming`. Rules of this file:

- Whoever iterates *pumps* (:mod:`flintmq.client.blocking.pump`): when nothing is queued, or every ``SLICE_S``.
- State is touched with the lock held, the application's code is called without it. ``Message.finish`` takes none.
- An interrupt (Ctrl-C) while a message was handed out is noticed when iteration goes on: connections are given up, and
  nsqd delivers again what was not answered.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from flintmq.client.blocking.at_exit import call_at_exit
from flintmq.client.blocking.connection import Connection
from flintmq.client.blocking.dead_letters import DeadLetters, LetterProducer
from flintmq.client.blocking.handshake import check_options
from flintmq.client.blocking.http import get
from flintmq.client.blocking.lock import Lock
from flintmq.client.blocking.lookup import DEADLINE_SLACK_S, Lookup
from flintmq.client.blocking.pump import WAIT_S, Pump
from flintmq.client.blocking.subscribing import Subscriptions
from flintmq.client.blocking.thread_pool import ThreadPool
from flintmq.client.blocking.timers import Timers
from flintmq.client.core.cancelling import failure_of
from flintmq.client.core.consuming import CLOSE_WAIT_S, DRAIN_SAID_S, DRAIN_WAITS, ConsumerState, Consuming
from flintmq.client.core.dead_letters import letter_headers
from flintmq.client.core.handlers import check_functions, refuse_unhandled, refuse_unrun
from flintmq.client.core.message import Message, Value, give_back, pass_by, settle
from flintmq.client.core.settings import MAX_IN_FLIGHT_MAX, ConsumerOptions, Settings
from flintmq.client.options import ConnectionOptions, Seconds, seconds, whole
from flintmq.errors import BodyError, FlintError

if TYPE_CHECKING:
    from typing_extensions import TypeForm  # a type, or what is written as one: Model | None

log = logging.getLogger("flintmq.client")

SLICE_S = 0.01
ERROR_COUNT_MAX = 1000

Item = TypeVar("Item")


class Consumer(ConsumerState[Value]):
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
            exception requeues it and makes the consumer back off; :class:`Requeue` and :class:`Discard` steer. They are
            raised: an exception that is returned, or the future of a pool, is a failure. ``False`` finishes.
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
        ordered: consume every partition in order (redesigned NSQ): one message of a partition at a time, until it is
            finished. ``max_attempts`` does not apply; what was requeued comes again at once. After a failure only its
            partition waits, for ``backoff`` at first and twice as long with each attempt.
        options: what holds for each connection.
        more: what few consumers set: :class:`flintmq.ConsumerOptions` has it, with ``backoff``, ``drain_timeout``,
            ``msg_timeout``, ``start``, ``telemetry`` and the rest. ``drain_timeout`` is how long
            :meth:`close`, called in another thread, waits for the handler that :meth:`run` is in.

    Raises:
        OptionError: an argument is out of range, or ``type`` is one that nothing can build.
        LocalProtocolError: a topic or channel cannot have this name.
        TypeError: there is no such argument.
    """

    @overload
    def __init__(
        self: Consumer[bytes],
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: str | Iterable[str] = (),
        nsqlookupd_http_addresses: str | Iterable[str] = (),
        handler: Callable[[Message[bytes]], object] | None = None,
        type: None = None,
        decode: None = None,
        max_in_flight: int = 200,
        max_attempts: int = 5,
        on_giving_up: Callable[[Message[bytes]], object] | None = None,
        dead_letter: str | None = None,
        ordered: bool = False,
        options: ConnectionOptions | None = None,
        **more: Unpack[ConsumerOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: str | Iterable[str] = (),
        nsqlookupd_http_addresses: str | Iterable[str] = (),
        handler: Callable[[Message[Value]], object] | None = None,
        type: type[Value] | None = None,
        decode: Callable[[bytes], Value] | None = None,
        max_in_flight: int = 200,
        max_attempts: int = 5,
        on_giving_up: Callable[[Message[Value]], object] | None = None,
        dead_letter: str | None = None,
        ordered: bool = False,
        options: ConnectionOptions | None = None,
        **more: Unpack[ConsumerOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: str | Iterable[str] = (),
        nsqlookupd_http_addresses: str | Iterable[str] = (),
        handler: Callable[[Message[Value]], object] | None = None,
        type: TypeForm[Value],
        decode: Callable[[bytes], Value] | None = None,
        max_in_flight: int = 200,
        max_attempts: int = 5,
        on_giving_up: Callable[[Message[Value]], object] | None = None,
        dead_letter: str | None = None,
        ordered: bool = False,
        options: ConnectionOptions | None = None,
        **more: Unpack[ConsumerOptions],
    ) -> None: ...
    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: str | Iterable[str] = (),
        nsqlookupd_http_addresses: str | Iterable[str] = (),
        handler: Callable[[Message[Any]], object] | None = None,
        type: TypeForm[Any] | None = None,  # noqa: A002 - the word that says it
        decode: Callable[[bytes], Any] | None = None,
        max_in_flight: int = 200,
        max_attempts: int = 5,
        on_giving_up: Callable[[Message[Any]], object] | None = None,
        dead_letter: str | None = None,
        ordered: bool = False,
        options: ConnectionOptions | None = None,
        **more: Unpack[ConsumerOptions],
    ) -> None:
        check_functions(handler, on_giving_up, more, may_be_async=False)
        settings = self._settings = Settings(
            topic,
            channel,
            nsqd_tcp_addresses,
            nsqlookupd_http_addresses,
            handler=handler,
            type=type,
            decode=decode,
            max_in_flight=max_in_flight,
            max_attempts=max_attempts,
            on_giving_up=on_giving_up,
            dead_letter=dead_letter,
            ordered=ordered,
            options=options,
            more=more,
        )
        check_options(settings.options)
        self._timers = Timers(settings.env.clock)
        self._pump = Pump(self._timers, self._prepare, self._note_lost, self._note_forked)
        self._subscriptions = Subscriptions(settings, self._new_lookup(), self._pump, self._timers)
        self._dead_letters: DeadLetters | None = None
        if dead_letter is not None:
            new_producer = partial(LetterProducer, pool_size=1, **settings.dead_letter_producer())
            self._dead_letters = DeadLetters(dead_letter, new_producer)
        self._given_up: deque[Message[Any]] = deque()  # no more than were queued
        self._errors: deque[FlintError] = deque(maxlen=ERROR_COUNT_MAX)
        self._closing = Lock()
        self._is_started = self._is_stopping = self._is_closed = self._is_foreign = self._has_dropped = False
        self._running: dict[int, None] = {}
        self._run_lock = Lock()
        self._run_ended = threading.Condition(self._run_lock)
        self._consuming = Consuming(
            settings,
            self._subscriptions.reconnector,
            self._subscriptions.ask,
            self._pump.lock,
            wake=self._pump.wake,
            too_many=self._given_up.append,
            settle_given_up=self._settle_given_up,
            tell=self._errors.append,
            stop=self.stop,
            run=_call,
        )

    def _new_lookup(self) -> Lookup | None:
        settings = self._settings
        if not settings.lookups:
            return None
        return Lookup(
            settings.lookups,
            settings.lookup_timeout_s,
            settings.fetch or partial(get, options=settings.options, time=self._timers.time),
            ThreadPool("flintmq-lookup"),
            self._timers,
            self._pump.lock,
            self._pump.wake,
        )

    # --- life ---

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Connect and subscribe.

        Returns when every nsqd known so far was tried once, or :meth:`stop` was called.
        An nsqd or nsqlookupd that cannot be reached is tried again in the background.

        Raises:
            NsqdError: every nsqd refuses us for good (not authorised, say).
            ConnectionFailed: every nsqd refuses our TLS, or we its certificate (TlsRefused).
        """
        with self._pump.lock:
            if self._is_started or self._is_closed:
                raise RuntimeError("a consumer is started once; make another one")
            self._is_started = True
        settings, subscriptions = self._settings, self._subscriptions
        connect_timeout_s = seconds(settings.options.connect_timeout, "connect_timeout")
        try:
            with self._pump.lock:
                self._pump.start()
                call_at_exit(self._end_with_program)
                self._prepare()  # one that was stopped before asks nobody, and connects to none
                subscriptions.start(self._consuming)
            self._pump_to_start(lambda: subscriptions.is_located, settings.lookup_timeout_s + 2 * DEADLINE_SLACK_S)
            self._pump_to_start(lambda: subscriptions.reconnector.are_all_tried, connect_timeout_s + DEADLINE_SLACK_S)
            self._consuming.raise_failure()
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Consume with the handler, in this thread, until :meth:`stop`, then drain and close; starts if need be.

        Several threads may run one consumer; each returns when it is stopped, the first closes it.

        Raises:
            NsqdError: every nsqd refuses us for good.
        """
        if self._settings.handler is None:
            raise RuntimeError("run() needs a handler; without one, iterate over the consumer")
        if not self._is_started:
            self.start()
        key = threading.get_ident()
        self._running[key] = None
        try:
            self._work(self._settings.handler)
        finally:
            with self._run_lock:
                self._running.pop(key, None)
                self._run_ended.notify_all()
            self.close()
        self._consuming.raise_failure()

    def _work(self, handler: Callable[[Message[Value]], object]) -> None:
        for message in self._iterate():
            try:
                if (result := handler(message)) is not None:
                    refuse_unhandled(result, message)
            except BaseException as raised:
                settle(message, error := failure_of(raised))
                if not isinstance(error, Exception):
                    raise
            else:
                settle(message, None)

    def stop(self) -> None:
        """Stop the flow: RDY 0, messages not handed out are given back, iteration and :meth:`run` end.

        Only asks for it, so it may be called in any thread and in a signal handler. One that is starting, or yet to
        start, ends likewise: nobody waits for an nsqd or nsqlookupd that does not answer, nor does the program's end.
        """
        self._is_stopping = True
        self._pump.wake()

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

    def _end_with_program(self, timeout_s: float) -> None:
        """Send what was answered, because the program ends and nobody has closed this consumer."""
        if self._is_closed or self._is_foreign:
            return
        deadline = self._timers.time() + timeout_s
        self.stop()
        if not self._closing.take(timeout_s):
            return  # somebody is closing it
        try:
            self._send_last(deadline)
        finally:
            self._closing.release()

    def _send_last(self, deadline: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        log.warning("%r was not closed before the program ended: use with, or close() it", self)
        try:
            self._drain(max(0.0, deadline - self._timers.time()))
        finally:
            self._close_connections()

    def _await_handlers(self) -> None:
        time, timeout_s = self._timers.time, self._settings.drain_timeout_s
        began = time()
        said_at, deadline = began + DRAIN_SAID_S, began + timeout_s
        own = threading.get_ident()
        with self._run_lock:
            while (busy := sum(key != own for key in self._running)) and (now := time()) < deadline:
                if now >= said_at:
                    log.warning(DRAIN_WAITS, busy, timeout_s)
                    said_at = deadline
                self._run_ended.wait(min(said_at, deadline) - now)
            if any(key != own for key in self._running):
                log.warning("handlers did not end within %g s", timeout_s)

    def _drain(self, timeout_s: float = CLOSE_WAIT_S) -> None:
        """Have every nsqd confirm that it has executed what was sent."""
        with self._pump.lock:
            self._stop_now()
            connections = [link for link in self._consuming.leaving() if isinstance(link, Connection)]
            for connection in connections:
                connection.end_subscription()
        self._pump_until(lambda: all(each.has_left or each.is_lost for each in connections), timeout_s)
        for connection in connections:
            if not connection.has_left:
                log.warning("nsqd %s did not confirm the end of the subscription", connection.address)

    def _close_connections(self) -> None:
        with self._pump.lock:
            self._stop_now()
            for link in self._consuming.flow.connections:
                if isinstance(link, Connection):
                    link.close()
            self._consuming.flow.close()

    def _tear_down(self) -> None:
        self._close_connections()
        self._pump.close()
        self._tell_errors()
        self._consuming.unreadables.tell_rest()
        if self._dead_letters is not None:
            self._dead_letters.close()

    def _note_forked(self) -> None:
        """In a child: let go of everything that is the parent's."""
        if not self._is_started:
            return
        self._is_foreign = self._is_stopping = True
        self._closing = Lock()
        self._run_lock = Lock()
        self._run_ended = threading.Condition(self._run_lock)
        self._consuming.lock = self._pump.lock
        self._consuming.inbox.end()

    def _prepare(self) -> None:
        if self._is_stopping:
            self._stop_now()

    def _stop_now(self) -> None:
        """Ask for no more, and give back what is queued; with the lock held."""
        self._is_stopping = True
        if not self._consuming.is_stopped:
            self._subscriptions.stop()
            self._consuming.stop()

    def _note_lost(self, connection: Connection) -> None:
        self._subscriptions.note_lost(connection)

    def _pump_to_start(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Pump until it is over, or the consumer is stopped, which a failure does as well."""
        self._pump.until(lambda: self._is_stopping or is_over(), timeout_s)

    def _pump_until(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Pump until it is over, or the consumer has failed."""
        self._pump.until(lambda: is_over() or self._consuming.failure is not None, timeout_s)

    # --- pulling ---

    def __iter__(self) -> Iterator[Message[Value]]:
        self._check_pulled()
        return self._iterate()

    def _iterate(self) -> Iterator[Message[Value]]:
        """Yield messages until the consumer has stopped, and pump."""
        self._take_up()
        time, lock, take = self._timers.time, self._pump.lock, self._consuming.inbox.take
        slice_end = time() + SLICE_S
        while not self._is_stopping:
            now = time()
            if now > slice_end:
                self._pump.once()
                now = time()
                slice_end = now + SLICE_S
            try:
                with lock:
                    message = take(now)
            except BaseException:
                self._has_dropped = True
                raise
            if self._given_up:
                self._settle_all_given_up(message)
            if message is not None:
                yield message
                pass_by((message,))
            else:
                self._wait(WAIT_S)
                slice_end = time() + SLICE_S
        self._end_iteration()

    def batches(self, size: int, timeout: Seconds = 1.0) -> Iterator[list[Message[Value]]]:
        """Yield lists of messages.

        A list is complete with ``size`` messages, ``timeout`` after its first, or when no more will come before some
        are answered: an nsqd has delivered all it may (its part of ``max_in_flight``), and the others have nothing.

        Raises:
            NsqdError: every nsqd refuses us for good.
        """
        self._check_pulled()
        whole(size, "size", 1, MAX_IN_FLIGHT_MAX)
        return self._batches(size, seconds(timeout, "timeout", 0.001))

    def _batches(self, size: int, timeout_s: float) -> Iterator[list[Message[Value]]]:
        self._take_up()
        while not self._is_stopping:
            self._pump.once()
            if batch := self._batch(size, timeout_s):
                yield batch
                pass_by(batch)
                del batch
        self._end_iteration()

    def _batch(self, size: int, timeout_s: float) -> list[Message[Value]]:
        batch: list[Message[Value]] = []
        until = self._timers.time() + WAIT_S
        try:
            while len(batch) < size and not self._is_stopping:
                with self._pump.lock:
                    message = self._consuming.inbox.take(now := self._timers.time())
                    ends_in_s = self._consuming.flow.ends_in_s(now) if batch and message is None else None
                if self._given_up:
                    self._settle_all_given_up(message)
                if message is not None:
                    if not batch:
                        until = self._timers.time() + timeout_s
                    batch.append(message)
                elif ends_in_s == 0.0 or (left_s := until - self._timers.time()) <= 0:
                    break
                else:
                    self._wait(left_s if ends_in_s is None else min(left_s, ends_in_s))
        except BaseException:
            self._has_dropped = True
            give_back(batch)
            raise
        return batch

    def _take_up(self) -> None:
        """Begin to iterate, perhaps after an interrupt that came while a message was handed out."""
        if self._has_dropped:
            self._has_dropped = False
            self._pump.interrupted("while a message was handed out")

    def _check_pulled(self) -> None:
        if self._is_foreign:
            raise RuntimeError("this consumer was started before os.fork(); make another one in the child")
        if not self._is_started:
            raise RuntimeError("start the consumer first: with Consumer(...) as consumer")
        if self._settings.handler is not None:
            raise RuntimeError("this consumer has a handler; iterate over one without")

    def _end_iteration(self) -> None:
        self._tell_errors()
        self._consuming.raise_failure()

    def _wait(self, timeout_s: float) -> None:
        """Wait until there may be something to hand out, and pump meanwhile."""
        self._pump.wait(timeout_s, lambda: self._is_stopping or self._consuming.inbox.count > 0)
        self._tell_errors()

    # --- giving up ---

    def _settle_all_given_up(self, in_hand: Message[Any] | None) -> None:
        """Give up on messages that had too many attempts; in a thread that iterates, without the lock."""
        try:
            while (message := _next_of(self._given_up)) is not None:
                self._consuming.give_up(message)
        except BaseException:
            if in_hand is not None:
                give_back((in_hand,))
            raise

    def _settle_given_up(self, message: Message[Any], error: BodyError | None) -> None:
        """Let ``on_giving_up`` and the dead letters have a message, and settle it."""
        callback = self._settings.on_giving_up
        try:
            if callback is not None and (result := callback(message)) is not None:
                refuse_unhandled(result, message)
            if self._dead_letters is not None and not message.is_answered:
                headers = letter_headers(message, self.topic, self.channel, error)
                self._dead_letters.publish(message.body, headers)
        except BaseException as raised:
            settle(message, failure := failure_of(raised), is_given_up=True)
            if not isinstance(failure, Exception):
                raise
        else:
            settle(message, None)

    def _tell_errors(self) -> None:
        """Tell ``on_error`` what happened; in a thread that iterates, without the lock."""
        on_error = self._settings.on_error
        while (error := _next_of(self._errors)) is not None:
            if on_error is None:
                continue
            try:
                refuse_unrun(on_error(error))
            except Exception:
                log.exception("on_error raised")


def _call(function: Callable[[], object]) -> None:
    """Messages may be answered in any thread."""
    function()


def _next_of(queue: deque[Item]) -> Item | None:
    """Take one out, if another thread has not."""
    try:
        return queue.popleft()
    except IndexError:
        return None
