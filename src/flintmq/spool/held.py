"""Messages that were delivered and are not finished: they are when they are safe; while they wait, they are touched.

Also which messages come a second time because the FIN of the first was lost with its connection.

The rules of this file: no IO and no clock; one entry for the messages of one read, never one per message; what is
remembered of finished messages is no more than could be in flight.

Source: NSQ's TCP protocol (FIN is not answered; what was in flight comes again when a connection breaks).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from flintmq.errors import TouchFailed

Same = tuple[int, bytes]
"""Timestamp and id: what tells a message from every other, also where two nsqds count alike."""


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


@dataclass(slots=True)
class _Recent:
    """The last messages of one link that were finished."""

    runs: deque[_Run] = field(default_factory=deque)
    count: int = 0


class Held:
    """Messages that wait for being safe.

    Args:
        in_flight_max: so many can be in flight.

    Attributes:
        count: messages that wait.
        late_count: messages that waited for longer than nsqd allows, and come again.
    """

    def __init__(self, in_flight_max: int) -> None:
        self.count = 0
        self.late_count = 0
        self._in_flight_max = in_flight_max
        self._runs: deque[_Run] = deque()  # in the order of their ends
        self._links: dict[Link, _Recent] = {}
        self._stored: dict[Same, None] = {}

    # -- messages that come again ------------------------------------------------------------------------------------

    def see(self, link: Link) -> None:
        """Note a link that delivers; behind a new one may come what a lost one had in flight."""
        if link in self._links:
            return
        for other in [other for other in self._links if other.is_lost]:
            recent = self._links.pop(other)
            runs = chain(recent.runs, (run for run in self._runs if run.link is other))
            self.expect_again(chain.from_iterable(zip(run.timestamps, run.ids, strict=True) for run in runs))
        self._links[link] = _Recent()

    def expect_again(self, messages: Iterable[Same]) -> None:
        """Remember messages that are stored, and may come again."""
        self._stored.update(dict.fromkeys(messages))
        for oldest in list(self._stored)[: max(0, len(self._stored) - 2 * self._in_flight_max)]:
            del self._stored[oldest]

    def are_known(self, timestamps: Sequence[int], attempts: Sequence[int], ids: Sequence[bytes]) -> list[bool] | None:
        """Say which messages are stored already; None: none of them."""
        if not self._stored or max(attempts) < 2:
            return None
        known = [same in self._stored for same in zip(timestamps, ids, strict=True)]
        return known if any(known) else None

    # -- messages that wait --------------------------------------------------------------------------------------------

    def add(self, end: int, link: Link, timestamps: Sequence[int], ids: Sequence[bytes], now: float) -> None:
        """Hold messages that are safe when everything below ``end`` is; ends only grow.

        Args:
            now: they came.
        """
        self._runs.append(_Run(end, link, timestamps, ids, now, now))
        self.count += len(ids)

    def finish_below(self, end: int) -> int:
        """Finish what is safe when everything below ``end`` is; return how many messages that were."""
        runs, before = self._runs, self.count
        while runs and runs[0].end <= end:
            run = runs.popleft()
            self.count -= len(run.ids)
            if run.link.is_lost:
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
        self.count = 0

    def _remember(self, run: _Run) -> None:
        recent = self._links.get(run.link)
        if recent is None:
            return
        recent.runs.append(run)
        recent.count += len(run.ids)
        while recent.count - len(recent.runs[0].ids) >= self._in_flight_max:
            recent.count -= len(recent.runs.popleft().ids)

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
