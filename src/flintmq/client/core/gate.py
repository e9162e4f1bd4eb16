"""In order: what comes of a partition waits until what this consumer has handed out of it is done with.

nsqd sends the next message when the one before is finished, and the same one again when its time is over or its
connection is lost. It cannot know that a handler is still at work here; this is where that is known.

::

    connections -- put() --> the partition is free --------------> inbox -- make() --> Message
                         --> something of it is in hand: wait <--------- end() ----------'

Rules of this file:

- Of each partition at most one message is queued or handed out, and at most one waits here: nsqd sends one at a time,
  so a later one means that nsqd has taken the earlier one back, and the earlier one is dropped.
- A message with a handler, or in a ``with`` block, is done with when that ends, however long it takes and whether it
  was answered meanwhile. Any other is when it is answered; when nsqd has taken it back and the loop that was given it
  asks for more, so that a loop that forgets an answer gets the message again as everywhere; when nothing refers to it
  any more; or ``max_msg_timeout`` after it came: nsqd lets nobody have a message for longer.
- What waits is touched, so that nsqd does not send it to another consumer, until ``max_msg_timeout`` is over for it
  too; then it is dropped and comes again.
- A message that was finished is not handed out again because it came again meanwhile over the same connection: nsqd
  knows messages by their id, so the FIN was for both.
- The end of a message that is never answered is found by looking, every ``CHECK_S`` while something waits for it: what
  Python calls when an object goes is called anywhere, with locks held too.
- All methods are called with the lock held, in the thread that the consumer belongs to, but :meth:`Gate.end`, which
  takes the one and finds the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from flintmq.client.core.message import Delivery, Message
from flintmq.client.core.timers import Timer, Timers
from flintmq.errors import TouchFailed
from flintmq.wire.client import Record

if TYPE_CHECKING:
    from flintmq.client.core.inbox import Inbox
    from flintmq.client.core.link import Link

log = logging.getLogger("flintmq.client")

CHECK_S = 0.2


class Turn:
    """One message's time to be the only one of its partition in the hands of the application.

    Attributes:
        delivery: the message.
        hold: what the application's message refers to; None: it is queued.
        waiting: what has come behind it.
        is_told: it was logged that it takes long.
        is_late_told: it was logged that nsqd has taken it back and it is still in hand.
    """

    __slots__ = ("delivery", "hold", "waiting", "is_told", "is_late_told")

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.hold: ref[Hold] | None = None
        self.waiting: Delivery | None = None
        self.is_told = False
        self.is_late_told = False


class Hold:
    """The tie between a message that was handed out, or is queued, and its turn.

    Attributes:
        is_kept: the turn lasts until :meth:`ended`, and is not over with the answer.
        is_passed: the loop that was given it has asked for more.
    """

    __slots__ = ("turn", "is_kept", "is_passed", "_gate", "__weakref__")

    def __init__(self, turn: Turn, gate: Gate, is_kept: bool) -> None:
        self.turn = turn
        self.is_kept = is_kept
        self.is_passed = False
        self._gate = gate

    def answered(self, is_finished: bool) -> None:
        """Note that the message was answered."""
        if not self.is_kept:
            self._gate.end(self.turn, is_finished)

    def ended(self, is_finished: bool) -> None:
        """Note that the handler, or the block, has ended."""
        self._gate.end(self.turn, is_finished)


class Gate:
    """The messages that wait, by partition.

    Args:
        topic: for messages.
        has_handler: a message is done with when its handler has ended.
        lock: gives the one that is held by who touches any state.
        dropped: told of a message that will never be handed out, because nsqd has taken it back, or it is finished.
        wake: called when there may be something to take.
        run: calls a function in the thread that the consumer belongs to.

    Attributes:
        inbox: takes what need not wait.
    """

    inbox: Inbox

    def __init__(
        self,
        topic: str,
        has_handler: bool,
        lock: Callable[[], AbstractContextManager[object]],
        dropped: Callable[[Delivery], object],
        wake: Callable[[], object],
        run: Callable[[Callable[[], object]], object],
    ) -> None:
        self._topic = topic
        self._has_handler = has_handler
        self._lock = lock
        self._dropped = dropped
        self._wake = wake
        self._run = run
        self._timers: Timers | None = None
        self._timer: Timer | None = None
        self._turns: dict[int, Turn] = {}

    def start(self, timers: Timers) -> None:
        """Begin."""
        self._timers = timers

    @property
    def count(self) -> int:
        """Messages that wait."""
        return sum(turn.waiting is not None for turn in self._turns.values())

    # --- in and out ---

    def put(self, delivery: Delivery) -> None:
        """Queue what came of a partition, or have it wait."""
        for record in delivery.records:
            self._put(delivery.with_records((record,)))

    def _put(self, delivery: Delivery) -> None:
        assert delivery.partition is not None
        turn = self._turns.get(delivery.partition)
        if turn is not None and turn.hold is None:
            for each in self.inbox.remove(turn=turn):
                self._dropped(each)
            turn = None
        elif turn is not None and _is_passed(turn, delivery):
            if turn.waiting is not None:
                self._drop_waiting(turn)
            turn = None
        if turn is None:
            turn = self._turns[delivery.partition] = Turn(delivery)
            delivery.hold = Hold(turn, self, self._has_handler)
            self.inbox.put(delivery)
            return
        if turn.waiting is not None:
            self._drop_waiting(turn)
        turn.waiting = delivery
        self._tell_waiting(turn)
        self._check_later()

    def make(self, delivery: Delivery, record: Record) -> Message[Any]:
        """Make the message that is handed out."""
        if delivery.hold is None:
            return Message(delivery, record)
        turn = delivery.hold.turn
        assert isinstance(turn, Turn)
        own = delivery.with_records((record,))  # of this message alone, so that it goes when the message goes
        own.hold = Hold(turn, self, self._has_handler)
        turn.hold = ref(own.hold)
        return Message(own, record)

    def end(self, turn: Turn, is_finished: bool) -> None:
        """End a turn, unless it has ended; what waited for it is queued.

        Args:
            is_finished: its message was finished.
        """
        self._run(partial(self._end, turn, is_finished))

    def _end(self, turn: Turn, is_finished: bool) -> None:
        with self._lock():
            partition = turn.delivery.partition
            assert partition is not None
            if self._turns.get(partition) is not turn:
                return
            del self._turns[partition]
            waiting, turn.waiting = turn.waiting, None
            if waiting is None:
                return
            _untouch(waiting)
            if is_finished and _is_same(waiting, turn.delivery):
                self._dropped(waiting)
                return
            self._put(waiting)
        self._wake()

    def gone(self, delivery: Delivery) -> None:
        """Note that a message was taken out of the inbox without being handed out."""
        if delivery.hold is not None:
            assert isinstance(delivery.hold.turn, Turn)
            self.end(delivery.hold.turn, is_finished=False)

    def stop(self) -> list[Delivery]:
        """Take out everything that waits, for good."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return self.remove()

    def remove(self, link: Link | None = None) -> list[Delivery]:
        """Take out what waits and came over ``link``, or everything."""
        removed: list[Delivery] = []
        for turn in self._turns.values():
            waiting = turn.waiting
            if waiting is not None and (link is None or waiting.link is link):
                _untouch(waiting)
                removed.append(waiting)
                turn.waiting = None
        return removed

    # --- while it waits ---

    def _check_later(self) -> None:
        assert self._timers is not None
        if self._timer is None:
            self._timer = self._timers.call_later(CHECK_S, self._check)

    def _check(self) -> None:
        """Look which turns are over without an answer, and keep what waits from being taken back."""
        assert self._timers is not None
        self._timer = None
        now = self._timers.time()
        for turn in [*self._turns.values()]:
            if turn.waiting is None:
                continue
            if self._is_over(turn, now):
                self.end(turn, is_finished=False)
            else:
                self._keep(turn, turn.waiting, now)
        if self.count:
            self._check_later()

    def _is_over(self, turn: Turn, now: float) -> bool:
        """Whether nobody will ever answer a message; tells of one that takes longer than nsqd ever allows."""
        hold = None if turn.hold is None else turn.hold()
        if hold is None or (turn.waiting is not None and _is_passed(turn, turn.waiting)):
            return True
        delivery = turn.delivery
        age_s, max_s = now - delivery.received_at, delivery.link.max_msg_timeout_s
        if age_s < max_s:
            return False
        if not hold.is_kept:
            log.warning(
                "%s partition %d goes on: message %r was not answered within %g s, for longer nobody has one",
                self._topic, delivery.partition, delivery.records[0][2], max_s,
            )  # fmt: skip
            return True
        if not turn.is_told:
            turn.is_told = True
            log.warning(
                "%s partition %d stands still: the handler of message %r still runs after %.3g s",
                self._topic, delivery.partition, delivery.records[0][2], age_s,
            )  # fmt: skip
        return False

    def _keep(self, turn: Turn, waiting: Delivery, now: float) -> None:
        """Have nsqd wait for what waits here, as long as it does that for anything."""
        link = waiting.link
        if now >= waiting.expires_at:
            self._drop_waiting(turn)
        elif now >= waiting.expires_at - link.msg_timeout_s / 2:
            until = min(now + link.msg_timeout_s, waiting.received_at + link.max_msg_timeout_s)
            if until > waiting.expires_at:
                waiting.expires_at = until
                link.touch(waiting.records[0][2], partial(_touch_failed, waiting))

    def _drop_waiting(self, turn: Turn) -> None:
        waiting, turn.waiting = turn.waiting, None
        assert waiting is not None
        _untouch(waiting)
        self._dropped(waiting)

    def _tell_waiting(self, turn: Turn) -> None:
        """Log that something waits: aloud, once for each turn, when nsqd has taken back what is in hand."""
        delivery, waiting = turn.delivery, turn.waiting
        assert waiting is not None
        is_late = _is_taken_back(delivery, waiting)
        level = logging.WARNING if is_late and not turn.is_late_told else logging.DEBUG
        turn.is_late_told |= is_late
        log.log(
            level,
            "%s partition %d: message %r of %s is held back, message %r is in hand since %.3g s%s",
            self._topic, delivery.partition, waiting.records[0][2], waiting.link.address, delivery.records[0][2],
            waiting.received_at - delivery.received_at,
            " and nsqd has taken it back: the partition goes on when its handler or block ends, or it is answered or "
            "let go" if is_late else "",
        )  # fmt: skip


def _is_taken_back(delivery: Delivery, waiting: Delivery) -> bool:
    """Whether nsqd has taken a message back, as what has come behind it shows."""
    return delivery.link.is_lost or _is_same(waiting, delivery)


def _is_passed(turn: Turn, coming: Delivery) -> bool:
    """Whether a message was left behind by the loop that was given it, and by nsqd."""
    hold = None if turn.hold is None else turn.hold()
    return hold is not None and hold.is_passed and not hold.is_kept and _is_taken_back(turn.delivery, coming)


def _is_same(one: Delivery, other: Delivery) -> bool:
    """Whether two deliveries are of the same message, over the same connection."""
    return one.link is other.link and one.records[0][2] == other.records[0][2]


def _untouch(waiting: Delivery) -> None:
    waiting.link.forget_touched(waiting.records[0][2])


def _touch_failed(waiting: Delivery, _: TouchFailed) -> None:
    waiting.expires_at = waiting.received_at  # dropped when it is looked at
