"""Messages that were delivered and are not finished: they are when they are safe; while they wait, they are touched.

Also which messages come a second time: the FIN of the first was lost with its connection, or came later than nsqd waits
for it, because this process stood still.

The rules of this file: no IO and no clock; one entry for the messages of one read, and one per message only while
messages come again; what is remembered of finished messages is no more than can be on its way.

Source: NSQ's TCP protocol (FIN is answered only when it fails; what was in flight comes again when a connection breaks
or its time is over; nsqd gives up who answers no heartbeat twice).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import ceil
from typing import Protocol

from flintmq.errors import TouchFailed

Same = tuple[int, bytes]
"""Timestamp and id: what tells a message from every other, also where two nsqds count alike."""

SILENCE_S = 60.0
"""So long nsqd bears a client that stands still: two of its heartbeats."""
BUFFERED_MAX = 250_000
"""More messages than that do not lie between nsqd and a client that stands still: the sockets' buffers are full."""


class Link(Protocol):
    """A connection to nsqd, as far as answers need it."""

    is_lost: bool
    msg_timeout_s: float
    max_msg_timeout_s: float

    def finish_all(self, message_ids: list[bytes], /) -> None: ...
    def touch(self, message_id: bytes, failed: Callable[[TouchFailed], None], /) -> None: ...
    def forget_touched(self, message_id: bytes, /) -> None: ...
    def requeue(self, message_id: bytes, delay_ms: int, /) -> None: ...


@dataclass(slots=True, eq=False)
class _Run:
    """Messages of one read; safe when everything below ``end`` is."""

    end: int
    link: Link
    timestamps: Sequence[int]
    ids: Sequence[bytes]
    received_at: float
    touched_at: float
    is_touched: bool = False

    def messages(self) -> Iterator[Same]:
        return zip(self.timestamps, self.ids, strict=True)


@dataclass(slots=True)
class _Recent:
    """The last messages of one link that were finished, and of which of them nsqd has said that it was too late."""

    count_max: int
    runs: deque[_Run] = field(default_factory=deque)
    count: int = 0
    refused: set[bytes] = field(default_factory=set)


class Held:
    """Messages that wait for being safe.

    Args:
        in_flight_max: so many can be in flight.

    Attributes:
        count: messages that wait.
        late_count: messages that waited for longer than nsqd allows, and come again.
        remembered_max: of so many finished messages of one link it is known that they are stored; of what is certain to
            come again, twice as many.
    """

    def __init__(self, in_flight_max: int) -> None:
        self.count = 0
        self.late_count = 0
        self._in_flight_max = in_flight_max
        self._runs: deque[_Run] = deque()  # in the order of their ends
        self._links: dict[Link, _Recent] = {}
        self._stored: dict[Same, bool] = {}  # may come again; whether nsqd has said so
        self._forgotten = 0
        self._index: dict[Same, _Run] | None = None  # of all that is in runs, while messages come again
        self._since_look = 0
        self.remembered_max = in_flight_max

    # -- messages that come again ------------------------------------------------------------------------------------

    def see(self, link: Link) -> None:
        """Note a link that delivers; behind a new one may come what a lost one had in flight."""
        if link in self._links:
            return
        for other in [other for other in self._links if other.is_lost]:
            recent = self._links.pop(other)
            for run in chain(recent.runs, (run for run in self._runs if run.link is other)):
                self._expect(run.messages(), recent.refused)
            for run in recent.runs:
                self._drop_from_index(run)
        again_max = self._in_flight_max * ceil(SILENCE_S / max(link.msg_timeout_s, 0.001))
        recent = self._links[link] = _Recent(self._in_flight_max + min(again_max, BUFFERED_MAX))
        self.remembered_max = max(self.remembered_max, recent.count_max)

    def refuse(self, link: Link, message_id: bytes) -> None:
        """Note that a FIN came too late: nsqd delivers that message again, at any time from now on, or has done it."""
        recent = self._links.get(link)
        if recent is not None:
            recent.refused.add(message_id)
            if len(recent.refused) > recent.count_max:
                self._check_refused(recent)

    def expect_again(self, messages: Iterable[Same]) -> None:
        """Remember messages that are stored, and may come again."""
        self._expect(messages, ())

    def are_known(self, timestamps: Sequence[int], attempts: Sequence[int], ids: Sequence[bytes]) -> list[bool] | None:
        """Say which messages are stored already, or stand further in front; None: none of them."""
        if max(attempts) < 2:
            return None
        self._since_look = 0
        if self._index is None:
            runs = chain(*(recent.runs for recent in self._links.values()), self._runs)
            self._index = {same: run for run in runs for same in run.messages()}
        index, stored = self._index, self._stored
        known: list[bool] = []
        before: set[Same] = set()
        for same in zip(timestamps, ids, strict=True):
            known.append(same in index or same in stored or same in before)
            before.add(same)
        return known if any(known) else None

    def take_forgotten(self) -> int:
        """Return of how many messages, since the last call, it was forgotten that they are stored.

        Those that nsqd has said it delivers again; there were more of them than are remembered.
        """
        for recent in self._links.values():
            if recent.refused:
                self._check_refused(recent)
        forgotten, self._forgotten = self._forgotten, 0
        return forgotten

    def _expect(self, messages: Iterable[Same], refused: Collection[bytes]) -> None:
        stored = self._stored
        for same in messages:
            is_certain = stored.pop(same, False) or same[1] in refused
            stored[same] = is_certain  # behind all others: these are forgotten last
        for oldest in list(islice(stored, max(0, len(stored) - 2 * self.remembered_max))):
            self._forgotten += stored.pop(oldest)

    def _check_refused(self, recent: _Recent) -> None:
        kept = recent.refused.intersection(chain.from_iterable(run.ids for run in recent.runs))
        self._forgotten += len(recent.refused) - len(kept)
        recent.refused = kept

    def _drop_from_index(self, run: _Run) -> None:
        index = self._index
        if index is not None:
            for same in run.messages():
                if index.get(same) is run:
                    del index[same]

    # -- messages that wait --------------------------------------------------------------------------------------------

    def add(
        self,
        end: int,
        link: Link,
        timestamps: Sequence[int],
        ids: Sequence[bytes],
        now: float,
        *,
        is_again: bool = False,
    ) -> None:
        """Hold messages that are safe when everything below ``end`` is; ends only grow.

        Args:
            now: they came.
            is_again: some of them were known.
        """
        run = _Run(end, link, timestamps, ids, now, now)
        self._runs.append(run)
        self.count += len(ids)
        if is_again:
            for same in run.messages():
                self._stored.pop(same, None)  # it has come
        if self._index is not None:
            self._since_look += len(ids)
            if self._since_look > self.remembered_max:
                self._index = None
            else:
                self._index.update(dict.fromkeys(run.messages(), run))

    def finish_below(self, end: int) -> int:
        """Finish what is safe when everything below ``end`` is; return how many messages that were."""
        runs, before = self._runs, self.count
        while runs and runs[0].end <= end:
            run = runs.popleft()
            self.count -= len(run.ids)
            if run.link.is_lost:
                self._remember(run)
                continue
            if run.is_touched:
                for message_id in run.ids:
                    run.link.forget_touched(message_id)
            run.link.finish_all(list(run.ids))
            self._remember(run)
        return before - self.count

    def give_back(self) -> None:
        """Have nsqd deliver at once, to whoever comes, what is not safe and never will be."""
        for run in self._runs:
            if not run.link.is_lost:
                for message_id in run.ids:
                    run.link.requeue(message_id, 0)
        self._runs.clear()
        self._index = None
        self.count = 0

    def _remember(self, run: _Run) -> None:
        recent = self._links.get(run.link)
        if recent is None:  # lost, and what it brought is expected again
            self._drop_from_index(run)
            return
        recent.runs.append(run)
        recent.count += len(run.ids)
        while recent.count - len(recent.runs[0].ids) >= recent.count_max:
            oldest = recent.runs.popleft()
            recent.count -= len(oldest.ids)
            self._drop_from_index(oldest)
            if recent.refused:
                self._expect((same for same in oldest.messages() if same[1] in recent.refused), recent.refused)
                recent.refused.difference_update(oldest.ids)

    def touch_due(self, now: float) -> int:
        """Touch what has waited for half of its time; return how many messages that were.

        What has waited for as long as nsqd allows is not touched any more: it comes again.
        """
        count = 0
        for run in self._runs:
            if now - run.touched_at < run.link.msg_timeout_s / 2 or run.link.is_lost:
                continue
            if now >= run.received_at + run.link.max_msg_timeout_s:
                if run.touched_at < float("inf"):
                    self.late_count += len(run.ids)
                    run.touched_at = float("inf")
                continue
            run.touched_at, run.is_touched = now, True
            for message_id in run.ids:
                run.link.touch(message_id, _too_late)
            count += len(run.ids)
        return count


def _too_late(_error: TouchFailed) -> None:
    """Nothing: the link's owner has counted it, and the message comes again."""
