"""Messages that came and were not handed out yet.

Rules of this file:

- What is queued is what came: one :class:`Delivery` per read. A :class:`Message` is made when it is handed out.
- Several takers share one inbox, message by message, so that a slow one holds back nothing but its own.
- Taking never waits; who finds nothing and waits elsewhere leaves a callback, and is called in the order of waiting.
- A message that waited here for longer than its timeout is dropped: nsqd has given it to somebody else, or sent it here
  a second time. So what is queued is bounded by RDY also when nobody takes anything for hours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from flintmq.client.core.attempts import Attempts
from flintmq.client.core.message import Delivery, Message, taken_apart
from flintmq.client.core.pace import Pace
from flintmq.wire.client import Record

if TYPE_CHECKING:
    from flintmq.client.core.link import Link


class Inbox:
    """The queue between the connections of a consumer and whoever takes its messages.

    Args:
        make: what is handed out.
        attempts: a message that had all of them goes to ``give_up`` instead.
        pace: is told how long messages waited here, while it limits what comes.
        expired: told of messages that were dropped because their time was over.

    Attributes:
        count: messages queued.
        is_ended: nothing more will come.
        is_closing: nothing more is handed out, as it is about to end. It may be set in any thread, and in a signal
            handler.
    """

    __slots__ = (
        "count", "is_ended", "is_closing", "_make", "_attempts", "_pace", "_give_up", "_expired", "_deliveries",
        "_delivery", "_records", "_expires_at", "_waiters",
    )  # fmt: skip

    def __init__(
        self,
        make: Callable[[Delivery, Record], Message[Any]],
        attempts: Attempts,
        pace: Pace,
        give_up: Callable[[Message[Any]], None],
        expired: Callable[[Delivery, int], None],
    ) -> None:
        self.count = 0
        self.is_ended = False
        self.is_closing = False
        self._make = make
        self._attempts = attempts
        self._pace = pace
        self._give_up = give_up
        self._expired = expired
        self._expires_at = 0.0
        self._deliveries: deque[Delivery] = deque()
        self._delivery: Delivery | None = None
        self._records: Iterator[Record] = iter(())
        self._waiters: deque[Callable[[], bool]] = deque()

    def put(self, delivery: Delivery) -> None:
        """Queue what came in one read."""
        while self._deliveries and self._deliveries[0].expires_at <= delivery.received_at:
            self._drop(self._deliveries.popleft())
        self._deliveries.append(delivery)
        self.count += len(delivery.records)
        if self._waiters:
            self._wake(len(delivery.records))

    def take(self, now: float) -> Message[Any] | None:
        """Hand out the oldest message, or None if there is none."""
        while not self.is_closing:
            if now >= self._expires_at:
                self._drop_rest()
            for record in self._records:
                self.count -= 1
                assert self._delivery is not None
                if self._pace.limit is not None:
                    self._pace.began(now - self._delivery.received_at)
                message = self._make(self._delivery, record)
                if record[1] <= self._attempts.maximum or not self._attempts.are_over(record):
                    return message
                self._give_up(message)
            if not self._deliveries:
                return None
            self._delivery = self._deliveries.popleft()
            self._records = iter(self._delivery.records)
            self._expires_at = self._delivery.expires_at
        return None

    def take_many(self, count: int, now: float) -> list[Message[Any]]:
        """Hand out the oldest messages, at most so many; they cost less together than one by one."""
        taken: list[Message[Any]] = []
        make, attempts, maximum = self._make, self._attempts, self._attempts.maximum
        while len(taken) < count and not self.is_closing:
            if now >= self._expires_at:
                self._drop_rest()
            delivery = self._delivery
            if delivery is not None and (records := list(islice(self._records, count - len(taken)))):
                self.count -= len(records)
                if self._pace.limit is not None:
                    self._pace.began(now - delivery.received_at)
                for record in records:
                    message = make(delivery, record)
                    if record[1] <= maximum or not attempts.are_over(record):
                        taken.append(message)
                    else:
                        self._give_up(message)
            elif self._deliveries:
                self._delivery = self._deliveries.popleft()
                self._records = iter(self._delivery.records)
                self._expires_at = self._delivery.expires_at
            else:
                break
        return taken

    def put_back(self, messages: Sequence[Message[Any]]) -> None:
        """Queue messages in front of all others that were handed out and that nobody has begun with."""
        if not messages:
            return
        self._close_current()
        self._deliveries.extendleft(reversed(taken_apart(messages)))
        self.count += len(messages)
        self._wake(len(messages))

    def _close_current(self) -> None:
        """Queue what is left of the delivery that is being handed out."""
        current, self._delivery = self._delivery, None
        rest, self._records = list(self._records), iter(())
        if current is not None and rest:
            self._deliveries.appendleft(current.with_records(rest))

    def _drop_rest(self) -> None:
        delivery, self._delivery = self._delivery, None
        rest, self._records = list(self._records), iter(())
        if delivery is not None and rest:
            self._drop(delivery.with_records(rest))

    def _drop(self, delivery: Delivery) -> None:
        count = len(delivery.records)
        self.count -= count
        self._expired(delivery, count)

    def remove(self, link: Link | None = None, turn: object = None) -> list[Delivery]:
        """Take out what came over ``link``, or what a turn is of, or everything, without handing it out."""
        self._close_current()
        if turn is not None:
            removed = [each for each in self._deliveries if each.hold is not None and each.hold.turn is turn]
        else:
            removed = [each for each in self._deliveries if link is None or each.link is link]
        self._deliveries = deque(delivery for delivery in self._deliveries if delivery not in removed)
        self.count = sum(len(delivery.records) for delivery in self._deliveries)
        return removed

    def end(self) -> None:
        """Say that nothing more will come and wake everybody."""
        self.is_ended = True
        self._wake(len(self._waiters))

    def add_waiter(self, wake: Callable[[], bool]) -> None:
        """Have ``wake`` called once, when there may be something to take or the inbox has ended.

        Args:
            wake: returns False when nobody waits there any more, so that the next is woken.
        """
        self._waiters.append(wake)

    def pass_on(self) -> None:
        """Wake the next instead of one that was woken and has gone."""
        self._wake(min(1, self.count))

    def _wake(self, count: int) -> None:
        while count and self._waiters:
            if self._waiters.popleft()():
                count -= 1
