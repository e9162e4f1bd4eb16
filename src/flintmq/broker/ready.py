"""The order in which a channel's consumers are served, and when the oldest delivery of each times out.

Both are kept up to date as consumers change, so that a turn costs for those that are served and not for all there are.

Rules of this file: order is the order of joining, never that of a set or of addresses; no clock.

Source: NSQ's TCP protocol, NSQ's topology-aware consumption.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from flintmq.broker.subscription import Locality, Subscription

Line = OrderedDict[Subscription, None]
_SPARE_ENTRIES = 64  # of consumers that are gone, before they are looked for


_LOCALITIES = tuple(Locality)  # enumerating them takes longer than making the lines


class ReadyLines:
    """The consumers that can take a message now: a line for each locality, who waits longest at its front.

    Each is served at the front and goes to the end, so everybody in a line gets a turn. Those of a farther locality
    are served when no nearer one can take anything at that moment; nothing waits for a consumer that is not ready.
    """

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: tuple[OrderedDict[Subscription, None], ...] = tuple(OrderedDict() for _ in _LOCALITIES)

    def add(self, subscription: Subscription) -> None:
        """Let a consumer join and leave its line by itself from now on."""
        subscription.line = self._lines[subscription.locality]
        subscription.find_place()

    def remove(self, subscription: Subscription) -> None:
        """Take a consumer out for good."""
        if subscription.line is not None:
            subscription.line.pop(subscription, None)
            subscription.line = None

    def nearest(self) -> OrderedDict[Subscription, None] | None:
        """The line to be served now; None when nobody can take anything."""
        for line in self._lines:
            if line:
                return line
        return None


class RunDeadlines:
    """Times at which the oldest run of each consumer times out: one entry each, possibly too early, never too late."""

    __slots__ = ("_added_count", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Subscription]] = []
        self._added_count = 0

    @property
    def next_ns(self) -> int | None:
        """Time at which to call :meth:`take_due`; None for never."""
        return self._heap[0][0] if self._heap else None

    def watched_ns(self, subscription: Subscription) -> int | None:
        """Find when a consumer's oldest run is looked at; None when it is not watched. For checks: it looks at all."""
        return min((entry[0] for entry in self._heap if entry[2] is subscription), default=None)

    def watch(self, subscription: Subscription, deadline_ns: int) -> None:
        """Note when the oldest run of a consumer times out that is not watched yet."""
        subscription.is_watched = True
        self._added_count += 1
        heapq.heappush(self._heap, (deadline_ns, self._added_count, subscription))

    def take_due(self, now_ns: int) -> Iterator[Subscription]:
        """The consumers whose time has come, which are watched no more."""
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            subscription = heapq.heappop(heap)[2]
            subscription.is_watched = False
            yield subscription

    def forget_detached(self, attached_count: int) -> None:
        """Drop the entries of consumers without a channel once they outnumber the others."""
        if len(self._heap) <= 2 * attached_count + _SPARE_ENTRIES:
            return
        kept = []
        for entry in self._heap:
            if entry[2].slot:
                kept.append(entry)
            else:
                entry[2].is_watched = False
        heapq.heapify(kept)
        self._heap = kept
