"""Turns of connections that have more to do than fits into one.

::

    data_received --> works until its slice is over --> reading paused, in line --> go_on(), a new slice ...
                                                        |                           in the order of the line,
                                                        others are read meanwhile   ROUND_NS of them in one turn

Event loops read a connection as long as it has something, one of them up to 32 times before anybody else has a turn, so
the share of each has to be counted here. A connection counts the time in which it parses and executes; whoever used its
slice up stops its reading, keeps what is left, and stands in line. A connection with little to do never gets there.

Rules of this file: nobody stands in line twice; the line is served in its order; a connection that fails in its turn is
closed, and the next one has its turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

SLICE_NS = 1_000_000  # of one connection, then others go first
ROUND_NS = 4_000_000  # of all that stand in line in one turn of the loop


class Member(Protocol):
    """A connection that has more to do."""

    def go_on(self) -> None:
        """Work for at most one slice more, and stand in line again when that was not enough."""

    def abort(self) -> None:
        """Close at once."""


class Turns:
    """The line of one daemon, or of one of its ports.

    Args:
        now_ns: reads the monotonic clock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, now_ns: Callable[[], int]) -> None:
        self._loop = loop
        self._now_ns = now_ns
        self._line: OrderedDict[Member, None] = OrderedDict()
        self._is_scheduled = False

    def __len__(self) -> int:
        return len(self._line)

    def later(self, member: Member) -> None:
        """Let a connection go on when those before it in line have had their turn; nothing when it stands there."""
        self._line[member] = None
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._serve)

    def leave(self, member: Member) -> None:
        """Forget a connection that is gone."""
        self._line.pop(member, None)

    def _serve(self) -> None:
        line = self._line
        until_ns = self._now_ns() + ROUND_NS
        for _ in range(len(line)):  # who comes again meanwhile has had its turn
            if not line:
                break
            member, _none = line.popitem(last=False)
            try:
                member.go_on()
            except Exception as error:  # noqa: BLE001 - the loop's handler tells it; the others have their turn
                about = {"message": f"{member!r} failed in its turn and is closed", "exception": error}
                self._loop.call_exception_handler(about)
                member.abort()
            if self._now_ns() >= until_ns:
                break
        self._is_scheduled = bool(line)
        if line:
            self._loop.call_soon(self._serve)
