"""The attempts that a message had: what nsqd counts, less the deliveries that no handler ever had.

nsqd counts deliveries. Those that a consumer drops unhandled, because they waited here for too long or their connection
was lost, are no attempts: else a backlog in front of slow handlers would be given up message by message, and finished,
although nobody ever tried.
"""

from __future__ import annotations

from collections.abc import Iterable

from flintmq.limits import ATTEMPTS_MAX
from flintmq.wire.client import Record

DROPPED_COUNT_MAX = 20_000


class Attempts:
    """Counts, for each message, the deliveries that this consumer dropped unhandled, until the message is finished.

    It knows the ``count_max`` messages that were dropped last, a few MB, and as many finished since, for a FIN may come
    too late. Once it had to forget one, a message that it does not know has all its attempts anew when nsqd
    counts too many: it is handed out, and not given up.

    Args:
        maximum: attempts after which a message is given up; above 65535: never, and nothing is counted.
        count_max: messages that are known at a time, finished or not.
    """

    __slots__ = ("maximum", "_count_max", "_dropped", "_finished", "_has_forgotten")

    def __init__(self, maximum: int, count_max: int = DROPPED_COUNT_MAX) -> None:
        self.maximum = maximum
        self._count_max = count_max
        self._dropped: dict[bytes, int] = {}
        self._finished: dict[bytes, int] = {}
        self._has_forgotten = False

    def __len__(self) -> int:
        """Messages that are known and not finished."""
        return len(self._dropped)

    def are_over(self, record: Record) -> bool:
        """Whether a message had all its attempts before this delivery."""
        maximum = self.maximum
        if record[1] <= maximum:
            return False
        if self._has_forgotten and record[2] not in self._dropped and record[2] not in self._finished:
            self._note(record[2], record[1] - 1)
        return self.of(record[2], record[1]) > maximum

    def of(self, message_id: bytes, deliveries: int) -> int:
        """Of so many deliveries, return how many were not dropped here."""
        return deliveries - (self._dropped.get(message_id) or self._finished.get(message_id, 0))

    def note_dropped(self, records: Iterable[Record]) -> None:
        """Note that messages were delivered for nothing: no handler had them."""
        if self.maximum <= ATTEMPTS_MAX:
            for record in records:
                self._note(record[2], 1)

    def note_finished(self, message_ids: Iterable[bytes]) -> None:
        """Note that messages will not come again, unless nsqd has taken them back before it hears that."""
        if not self._dropped:
            return
        finished = self._finished
        for message_id in message_ids:
            if count := self._dropped.pop(message_id, 0):
                finished[message_id] = count
                if len(finished) > self._count_max:
                    del finished[next(iter(finished))]

    def _note(self, message_id: bytes, count: int) -> None:
        dropped = self._dropped
        dropped[message_id] = (dropped.pop(message_id, 0) or self._finished.pop(message_id, 0)) + count
        if len(dropped) > self._count_max:
            del dropped[next(iter(dropped))]
            self._has_forgotten = True
