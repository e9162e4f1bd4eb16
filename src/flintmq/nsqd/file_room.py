"""Whether there is room for what keeps files open as long as it is there: topics, partitions, replicas.

Rules of this file: nothing is counted, as other things open files, too; what was found holds for a moment, because many
may come at once.

Source: docs/operations.md, "Open files"; :mod:`flintmq.net.descriptors`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from flintmq.clock import Clock
from flintmq.net.descriptors import TooFewDescriptors, descriptor_limit, room
from flintmq.net.problems import Problems

_PASSING_FILES = 2  # that are open for a moment while those of a topic are made
_AHEAD = 64
_HOLDS_NS = 10_000_000


class FileRoom:
    """Gives out room for files.

    Args:
        new_count: returns how many files are about to be opened by what was given room before.
    """

    def __init__(self, clock: Clock, new_count: Callable[[], int]) -> None:
        self._clock = clock
        self._new_count = new_count
        self._problems = Problems(clock)
        self._left = 0  # until then
        self._until_ns = 0

    def take(self, kind: str, name: str, count: int) -> None:
        """Give room for ``count`` files.

        Args:
            kind: such as ``topic``, for the log.
            name: of the topic, or of whatever gets it.

        Raises:
            TooFewDescriptors: there is none.
        """
        now_ns = self._clock.monotonic_ns()
        if count > self._left or now_ns >= self._until_ns:
            taken = self._new_count() + _PASSING_FILES
            self._left = room(taken + count + _AHEAD) - taken
            self._until_ns = now_ns + _HOLDS_NS
        if count > self._left:
            error = TooFewDescriptors(f"{kind} {name}", descriptor_limit())
            text = f"{kind} not created: too few of {error.limit} files are left, and each takes one (see ulimit -n)"
            self._problems.tell(text, logging.WARNING, name)
            raise error
        self._left -= count
