"""The bound on what a consumer has in flight whose handlers were too slow for what it took: what they do in time.

nsqd takes back what is not answered within the message timeout, and delivers it again, here or to another consumer of
the channel, which counts as an attempt. A consumer that goes on to take more than it handles in that time wears out the
attempts of messages that nobody ever had. So when messages waited here for too long, no more are taken than were
handled in the last message timeout; and twice as many again as soon as none of so many waited for a quarter of it, each
time that this was too early of more.

Rules of this file: no clock and no IO; nothing is done for single messages while there is no limit.
"""

from __future__ import annotations

from collections import deque

MARKS = 8
"""Moments within one message timeout as of which it is known how much had been handled."""
SPARE = 0.75
"""Part of what is handled in a message timeout that is taken: what waits longest must be in time as well."""
PATIENCE_MAX = 64
"""Times the limit, at most, are to be handled without a long wait before it is doubled."""
SHORT = 0.25
"""Part of the message timeout; what waited for less shows that more could be taken."""


class Pace:
    """Follows how fast a consumer handles messages.

    Attributes:
        limit: messages in flight over all connections, 1 or more; None: there is none.
    """

    __slots__ = ("limit", "_handled", "_left", "_marks", "_patience", "_too_late_at", "_waited_s")

    def __init__(self) -> None:
        self.limit: int | None = None
        self._handled = 0
        self._marks: deque[tuple[float, int]] = deque()
        self._left = 0  # to be handled without a long wait before more are taken
        self._patience = 1
        self._too_late_at = float("-inf")
        self._waited_s = 0.0

    def read(self, now: float, timeout_s: float) -> None:
        """Note that messages came; ``timeout_s`` is their message timeout."""
        marks = self._marks
        if not marks or now - marks[-1][0] >= timeout_s / MARKS:
            marks.append((now, self._handled))
            while len(marks) > 1 and marks[1][0] <= now - timeout_s:
                marks.popleft()

    def too_late(self, now: float, timeout_s: float, max_in_flight: int) -> None:
        """Messages waited for longer than ``timeout_s``: take no more than is handled in that time."""
        while len(self._marks) > 1 and self._marks[1][0] <= now - timeout_s:
            self._marks.popleft()
        at, handled = self._marks[0] if self._marks else (now, self._handled)
        in_time = (self._handled - handled) * timeout_s / max(timeout_s, now - at)
        most = max_in_flight if self.limit is None else self.limit
        limit = max(1, int(in_time * SPARE))
        if limit < most:
            self.limit = limit
        if now - self._too_late_at >= timeout_s:  # what came together is too late together
            self._too_late_at = now
            self._patience = min(2 * self._patience, PATIENCE_MAX)
        self._begin_anew()

    def began(self, waited_s: float) -> None:
        """A handler has a message that waited here so long; to be told while there is a limit."""
        self._waited_s = max(self._waited_s, waited_s)

    def handled(self, count: int, timeout_s: float, max_in_flight: int) -> bool:
        """Note that messages were answered; return whether the limit has changed."""
        self._handled += count
        if self.limit is None:
            return False
        self._left -= count
        if self._waited_s >= timeout_s * SHORT:
            self._begin_anew()
            return False
        if self._left > 0:
            return False
        self.limit = 2 * self.limit if 2 * self.limit < max_in_flight else None
        if self.limit is None:
            self._patience = 1
        self._begin_anew()
        return True

    def _begin_anew(self) -> None:
        self._left = (self.limit or 0) * self._patience
        self._waited_s = 0.0
