"""The decisions of a consumer, on asyncio and on blocking sockets alike: the shells wait, and call handlers.

::

    connections -- on_messages() --> inbox --> Message --> handler
         ^  ^------ FIN, REQ, TOUCH ---------------'          |
         '--------- RDY ---- flow <---- failures, successes --'

Rules of this file:

- It joins the parts: :mod:`.link` (bytes), :mod:`.flow` (RDY, backoff), :mod:`.following` and :mod:`.subscribing`
  (where the topic is, and how it is asked for), :mod:`.inbox` (what waits to be handed out).
- In order (:mod:`.order`, :mod:`.gate`), no message is ever finished or skipped that the application did not finish,
  and none is handed out while another of its partition is in hand.
- When a connection is lost, its queued messages go with it: nsqd delivers them again.
- Stopping is one way: RDY 0, queued messages given back, handlers end, answers sent, CLS, close.
- State is touched with the lock held. Connections tell what happens with it held; everything else here takes it, for
  messages may be answered in any thread. An event loop has one thread, and a lock that does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Generic

from flintmq.client.core import trace as trace_log
from flintmq.client.core.attempts import Attempts
from flintmq.client.core.backoff import LEVEL_MAX, Backoff, jittered_s, requeue_delay_s
from flintmq.client.core.envelope import open_delivery
from flintmq.client.core.flow import BACKOFF_JITTER, Flow
from flintmq.client.core.following import Following, Wrong
from flintmq.client.core.gate import Gate
from flintmq.client.core.inbox import Inbox
from flintmq.client.core.link import Link
from flintmq.client.core.message import Delivery, Message, Value, is_hex, requeue_failed, take_apart
from flintmq.client.core.of_one_process import Client
from flintmq.client.core.pace import Pace
from flintmq.client.core.settings import MAX_IN_FLIGHT_MAX, Settings
from flintmq.client.core.stats import ConsumerStats
from flintmq.client.core.subscribing import Subscribing, Targets, has_partitions, with_address
from flintmq.client.core.timers import Timers
from flintmq.client.core.topology import Topology
from flintmq.client.core.unreadable import BLOCKING, REQUEUED, Unreadable, read_error
from flintmq.client.options import whole
from flintmq.errors import (
    BodyError,
    FinFailed,
    FlintError,
    ProtocolError,
    RemoteProtocolError,
    ReqFailed,
    TouchFailed,
)
from flintmq.wire.client import MessageFailed, Messages, Record

log = logging.getLogger("flintmq.client")

CLOSE_WAIT_S = 2.0
DRAIN_SAID_S = 0.5  # handlers that take longer to end are waited for aloud
DRAIN_WAITS = "%d handlers still run: waiting for at most %g s (drain_timeout)"
FAILURES = {"FIN": FinFailed, "REQ": ReqFailed, "TOUCH": TouchFailed}

GiveUp = Callable[[Message[Any]], None]


class Consuming:
    """The consumer without its shell; owns the connections (:class:`.link.LinkOwner`) and the messages.

    Args:
        targets: keeps connected what :attr:`subscribing` wants.
        ask: asks the nsqlookupd where the topic is; ``following.answered`` is to follow.
        lock: held by who touches any state.
        wake: called when there is something to be sent that no connection knows of.
        too_many: takes a message with too many attempts, and calls :meth:`give_up` when it can; None: at once.
        settle_given_up: lets ``on_giving_up`` and the dead letters have a message, and then settles it; told what is
            wrong with its body (None: it had too many attempts).
        tell: tells the application what went wrong.
        stop: stops the consumer, because :attr:`failure` is set.
        run: calls a function in the thread that the consumer belongs to: now, if this is it.

    Attributes:
        failure: why the consumer has ended by itself.
        is_stopped: nothing is wanted any more.
        lock: held by who touches any state.
        take_in: what becomes of the messages of one read: the inbox has them, or a handler at once.
        attempts: what is no attempt although nsqd counts it.
        tells_late: each answer that came too late is logged, not only counted.
        fin_refused: called with each message whose FIN came too late.
        keeps_frames: deliveries have their messages as they came as well.
        trace: log every message.
        user: kept alive as long as there are connections: a consumer that works on when nothing else refers to it.
    """

    def __init__(
        self,
        settings: Settings,
        targets: Targets,
        ask: Callable[[Wrong], object],
        lock: AbstractContextManager[object],
        *,
        wake: Callable[[], object],
        too_many: GiveUp | None,
        settle_given_up: Callable[[Message[Any], BodyError | None], None],
        tell: Callable[[FlintError], object],
        stop: Callable[[], object],
        run: Callable[[Callable[[], object]], object],
    ) -> None:
        self.settings = settings
        self.failure: BaseException | None = None
        self.is_stopped = False
        self.user: object = None
        self.trace = settings.trace
        self.flow: Flow[Link] = Flow(settings.policy, Backoff(settings.backoff_s, settings.backoff_max_s), settings.env)
        has_handler = settings.handler is not None
        self.gate = Gate(settings.topic, has_handler, lambda: self.lock, self._dropped, wake, run)
        make_next = self.gate.make if settings.is_ordered else Message
        self.attempts = Attempts(settings.attempts_max)
        self._pace = Pace()
        self.inbox = self.gate.inbox = Inbox(
            make_next, self.attempts, self._pace, too_many or self.give_up, self._expired
        )
        self.take_in: Callable[[Delivery], None] = self.gate.put if settings.is_ordered else self.inbox.put
        self.tells_late = True
        self.fin_refused: Callable[[Link, bytes], None] | None = None
        self.keeps_frames = False
        self.unreadables = Unreadable(settings.topic, settings.channel)
        following = None
        if settings.lookups:
            following = Following(settings.topic, settings.times, settings.env, ask, self._found, tell)
        self.subscribing = Subscribing(settings, self.flow, following, targets, lock, tell, self.fail)
        self.decode = settings.decode
        self.call_in_loop = run
        self.lock = lock
        self._wake = wake
        self._settle_given_up = settle_given_up
        self._tell = tell
        self._stop = stop
        self._stats = ConsumerStats()
        self._timers: Timers | None = None
        self._has_warned_of_false = False

    def _found(self, topology: Topology) -> None:
        self.subscribing.found(topology)

    # --- life ---

    def start(self, timers: Timers) -> None:
        """Begin to subscribe; with the lock held, as for the next two."""
        self._timers = timers
        self.flow.start(timers)
        self.gate.start(timers)
        self.subscribing.start(timers)

    def stop(self) -> None:
        """Ask for no more, and give back what is queued."""
        if self.is_stopped:
            return
        self.is_stopped = True
        self.subscribing.stop()
        self.flow.stop()
        for delivery in (*self.gate.stop(), *self.inbox.remove()):
            _give_back(delivery)
        self.inbox.end()

    def leaving(self) -> tuple[Link, ...]:
        """The connections whose subscription is to be ended, after a word on what is not answered."""
        for link in self.flow.connections:
            if (held := self.flow.held(link)) > 0:
                log.warning("closing %s with %d messages not answered; nsqd delivers them again", link.address, held)
        return self.flow.connections

    def fail(self, error: BaseException) -> None:
        """End the consumer: iteration and ``run()`` raise ``error``."""
        if self.failure is None and not self.is_stopped:
            self.failure = error
            self._stop()

    def raise_failure(self) -> None:
        """Raise why the consumer has ended by itself, if it has."""
        if self.failure is not None:
            raise self.failure

    # --- what messages need (message.Owner) ---

    def time(self) -> float:
        """Seconds on this consumer's clock."""
        assert self._timers is not None
        return self._timers.time()

    def requeue_delay_s(self, attempts: int) -> float:
        """Return how long a message with so many attempts waits by default.

        In order, what waits holds up its partition, and RDY 0 holds it back better: Youzan's nsqd ignores the delay.
        """
        settings = self.settings
        if settings.is_ordered and settings.backs_off:
            return 0.0
        return requeue_delay_s(attempts, settings.requeue_delay_s, settings.requeue_delay_max_s)

    def not_handled(self, records: Sequence[Record]) -> None:
        """Note that messages were delivered for nothing: no handler had them."""
        with self.lock:
            self.attempts.note_dropped(records)

    def note_returned_false(self) -> None:
        """Warn, once, that the handler returned False and its message is finished all the same; in any thread."""
        if self._has_warned_of_false:
            return
        self._has_warned_of_false = True
        log.warning(
            "the handler (or on_giving_up) of %s/%s returned False, which finishes the message as well: raise an "
            "exception, or Requeue, to have it delivered again (said once)",
            self.settings.topic, self.settings.channel,
        )  # fmt: skip

    def message_failed(self) -> None:
        """Count a failure and back off."""
        with self.lock:
            self._stats.failed += 1
            self.flow.note_failure()
        self._wake()

    def _partition_failed(self, link: Link, attempts: int) -> None:
        """Count a failure in order, and let only its partition wait: longer with each attempt."""
        settings = self.settings
        with self.lock:
            self._stats.failed += 1
            if settings.backs_off:
                wait_s = min(settings.backoff_max_s, settings.backoff_s * 2.0 ** min(attempts - 1, LEVEL_MAX))
                self.flow.hold(link, jittered_s(wait_s, BACKOFF_JITTER, settings.env.random.random()))
        self._wake()

    def unreadable(self, message: Message[Any], error: BodyError) -> None:
        """Answer a message whose body cannot be read: to the dead letters with it, or back to nsqd."""
        if self.settings.dead_letter is not None:
            self.give_up(message, error)
            return
        self.unreadables.tell(message, error, self.time(), BLOCKING if self.settings.is_ordered else REQUEUED)
        requeue_failed(message)

    def give_up(self, message: Message[Any], error: BodyError | None = None) -> None:
        """Let ``on_giving_up`` and the dead-letter topic have a message that will never be processed; then finish it.

        If there is neither, a message whose body cannot be read is requeued: nobody has ever handled it.

        Args:
            error: what is wrong with its body; None: it had too many attempts.
        """
        settings = self.settings
        if not settings.takes_given_up and error is None and (found := read_error(message)) is not None:
            self.unreadable(message, found)
            return
        with self.lock:
            self._stats.given_up += 1
            attempts = self.attempts.of(message.id, message.attempts - 1)
        where = "" if settings.dead_letter is None else f", it goes to topic {settings.dead_letter}"
        if error is None:
            log.error("giving up on message %r of %s after %d attempts%s", message.id, message.nsqd, attempts, where)
        else:
            self.unreadables.tell(message, error, self.time(), f"giving up on it{where}")
        self._settle_given_up(message, error)

    # --- what connections tell (link.LinkOwner) ---

    def on_messages(self, connection: Link, messages: Messages) -> None:
        """Hand messages on."""
        records = messages.records
        if self.inbox.count > self.flow.queue_count_max or not self.flow.has_joined(connection):
            connection.abort("it sends messages that were not asked for")
            return
        now = self.time()
        delivery = Delivery(connection, self, now, records)
        if self.keeps_frames:
            delivery.frames = messages.frames
        if connection.partition is not None or connection.is_extended or connection.is_located:
            delivery.partition = connection.partition
            if connection.is_ordered:
                delivery.failed = partial(self._partition_failed, connection)
            if not self._take_apart(connection, delivery):
                return
        if self.settings.opens_envelopes:
            open_delivery(delivery)
        if self.trace:
            where = self.settings.topic, self.settings.channel
            trace_log.received(*where, delivery, connection.partition, connection.ends)
        self._stats.received += len(records)
        self._pace.read(now, connection.msg_timeout_s)
        is_first = self.flow.received(connection, len(records), now)
        if self.is_stopped:
            _give_back(delivery)
        else:
            self.take_in(delivery)
        if is_first:
            self.flow.replan()

    def _take_apart(self, link: Link, delivery: Delivery) -> bool:
        """Take off bodies what stands in front of them, and check the order; False when nsqd sends nonsense."""
        if not (link.is_extended or link.is_located):
            return True
        if link.is_located and link.partition is None and not is_hex(delivery.records[0][2]):
            self.fail(has_partitions(self.settings.topic))
            return False
        try:
            records, extensions = take_apart(delivery.records, link.is_extended, link.is_located)
        except RemoteProtocolError as error:
            link.abort(str(error))
            return False
        delivery.records, delivery.extensions = records, extensions
        if link.is_ordered:
            assert link.partition is not None
            for violation in self.settings.order.check(link.address, link.partition, records, extensions):
                self._stats.order_violations += 1
                log.error("out of order: %s", violation)
                self._tell(violation)
        return True

    def on_settled(self, connection: Link, finished: Sequence[bytes], requeued: int, dropped: int) -> None:
        """Count answers."""
        finished_count = len(finished)
        self._stats.dropped += dropped
        self.attempts.note_finished(finished)
        if self._pace.handled(finished_count + requeued, connection.msg_timeout_s, self.flow.max_in_flight):
            self.flow.set_pace(self._pace.limit)
        if self.flow.settled(connection, finished_count, requeued + dropped):
            self._stats.finished += finished_count
            self._stats.requeued += requeued
        else:
            self._stats.dropped += finished_count + requeued

    def on_message_failed(self, connection: Link, failure: MessageFailed) -> None:
        """Count an answer that came too late, and tell of it where each is told of."""
        self._stats.late += 1
        if failure.command == "FIN":
            if self._pace.limit is not None:  # what waited for less than its time was not handled in the rest of it
                self._too_late(connection)
            if self.fin_refused is not None:
                self.fin_refused(connection, failure.message_id)
        if not self.tells_late:
            return
        error = FAILURES[failure.command](failure.code, failure.detail, connection.address)
        log.warning("%s came too late: %s", failure.command, error)
        self._tell(error)

    def on_lost(self, connection: Link, error: FlintError) -> None:
        """Let a connection go, and its queued messages with it."""
        with self.lock:  # one that was never subscribed is lost in the thread that opened it
            waiting, queued = self.gate.remove(connection), self.inbox.remove(connection)
            for delivery in queued:
                self.attempts.note_dropped(delivery.records)
                self.gate.gone(delivery)
            dropped = sum(len(delivery.records) for delivery in (*waiting, *queued))
            self._stats.dropped += dropped
            if self.flow.has_joined(connection) and isinstance(error, ProtocolError):
                self._tell(with_address(error, connection.address))
            self.flow.leave(connection, dropped)
            self.subscribing.note_lost()

    def _expired(self, delivery: Delivery, count: int) -> None:
        """Messages waited here for longer than nsqd waits for an answer."""
        self._stats.dropped += count
        self.attempts.note_dropped(delivery.records)
        link, more = delivery.link, ""
        self._too_late(link)
        if self._pace.limit is not None:
            more = f", so {self._pace.limit} are taken until they keep up"
        log.warning(
            "%d messages of %s dropped, not handled within %g s: handlers are too slow for max_in_flight %d%s",
            count, link.address, link.msg_timeout_s, self.flow.max_in_flight, more,
        )  # fmt: skip
        self.flow.forget(link, count)
        self.gate.gone(delivery)

    def _too_late(self, link: Link) -> None:
        """Take no more than is handled in time."""
        if not self.settings.is_ordered:  # else each partition has one at a time, whatever the others do
            self._pace.too_late(self.time(), link.msg_timeout_s, self.flow.max_in_flight)
            self.flow.set_pace(self._pace.limit)

    def _dropped(self, delivery: Delivery) -> None:
        """Count what never will be handed out: nsqd has taken it back, or it is finished."""
        self._stats.dropped += len(delivery.records)
        self.flow.forget(delivery.link, len(delivery.records))

    # --- what the application asks ---

    @property
    def max_in_flight(self) -> int:
        """Messages delivered and not answered, over all nsqd."""
        return self.flow.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        with self.lock:
            self.flow.max_in_flight = whole(count, "max_in_flight", 1, MAX_IN_FLIGHT_MAX)
        self._wake()

    def set_paused(self, is_paused: bool) -> None:
        """Want nothing for now, or go on."""
        with self.lock:
            self.flow.is_paused = is_paused
            self.flow.replan()
        self._wake()

    @property
    def is_starved(self) -> bool:
        """Whether some nsqd soon cannot deliver more before messages are answered."""
        with self.lock:
            return self.flow.is_starved

    def connections(self) -> tuple[Link, ...]:
        """The connections that are subscribed now."""
        with self.lock:
            return self.flow.connections

    def stats(self) -> ConsumerStats:
        """Count what was done and say where the consumer stands."""
        with self.lock:
            return replace(
                self._stats,
                connections=len(self.flow.connections),
                in_flight=self.flow.in_flight,
                queued=self.inbox.count + self.gate.count,
                backoff=self.flow.backoff_state.value,
                blocked=len(self.settings.order.blocked),
            )

    def describe(self) -> str:
        """Show connections, levels and backoff, a line each."""
        with self.lock:
            return f"queued={self.inbox.count + self.gate.count}\n{self.flow.describe()}"


class ConsumerState(Client, Generic[Value]):
    """The part of both consumers that can be asked and told at any time.

    Attributes:
        topic, channel: that are consumed.
    """

    _consuming: Consuming

    def __repr__(self) -> str:
        return f"<Consumer {self.topic}/{self.channel} on {len(self._consuming.connections())} nsqd>"

    def describe(self) -> str:
        """Show connections, levels and backoff, a line each."""
        return f"{self!r} {self._consuming.describe()}"

    @property
    def topic(self) -> str:
        """The topic that is consumed."""
        return self._consuming.settings.topic

    @property
    def channel(self) -> str:
        """The channel that is consumed."""
        return self._consuming.settings.channel

    @property
    def trace(self) -> bool:
        """Whether every message is logged to ``flintmq.trace``; can be changed while running."""
        return self._consuming.trace

    @trace.setter
    def trace(self, is_wanted: bool) -> None:
        self._consuming.trace = is_wanted

    @property
    def max_in_flight(self) -> int:
        """Messages delivered and not answered, over all nsqd; can be changed while running."""
        return self._consuming.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        self._consuming.max_in_flight = count

    @property
    def is_starved(self) -> bool:
        """Whether some nsqd soon cannot deliver more before messages are answered: the time to work off a batch."""
        return self._consuming.is_starved

    @property
    def is_paused(self) -> bool:
        """Whether :meth:`pause` holds."""
        return self._consuming.flow.is_paused

    def pause(self) -> None:
        """Ask every nsqd for no more messages until :meth:`unpause`."""
        self._consuming.set_paused(True)

    def unpause(self) -> None:
        """End :meth:`pause`."""
        self._consuming.set_paused(False)

    @property
    def connections(self) -> tuple[str, ...]:
        """``host:port`` of every nsqd that is subscribed now."""
        return tuple(dict.fromkeys(link.address for link in self._consuming.connections()))

    @property
    def partitions(self) -> dict[int, str]:
        """The partitions that are subscribed now, and ``host:port`` of each one's nsqd.

        Empty if the topic has none; with ``start`` those that a cluster keeps of such a topic are named, too.
        """
        found = {link.partition: link.address for link in self._consuming.connections() if link.partition is not None}
        return dict(sorted(found.items()))

    def stats(self) -> ConsumerStats:
        """Count what was done and say where the consumer stands."""
        return self._consuming.stats()


def _give_back(delivery: Delivery) -> None:
    """Requeue messages that were never handed out."""
    for _, _, message_id, _ in delivery.records:
        delivery.link.requeue(message_id, 0)
