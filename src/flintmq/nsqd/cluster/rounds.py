"""Things that have to be looked at when the turn has ended: each once, however often that was noted.

Rules of this file: what fails is told, looked at again a little later, and is not felt by the others; so many at a time
that others of the loop have their turn between. A failure that stays the same is told now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

AGAIN_S = 0.2
"""After looking at something failed."""
SLICE_COUNT = 128
"""Things that are looked at before others of the loop have their turn: some 20 ms."""

TOLD_EVERY_S = 60.0
"""Before a failure that stays the same is told again."""
TOLD_MAX = 10_000
"""Failures that are remembered; of more than these the oldest are told again sooner."""

Item = TypeVar("Item", bound=Hashable)


class Failures:
    """Says which failures are worth a line in the log: new ones, and those that last every ``TOLD_EVERY_S``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._told: dict[Hashable, tuple[Hashable, float]] = {}

    def is_new(self, what: Hashable, kind: Hashable) -> bool:
        """Whether a failure is to be told.

        Args:
            what: has failed.
            kind: of failure. It is no text where that has numbers which change while the reason stays, as free bytes.
        """
        now = self._loop.time()
        told_kind, told_at = self._told.get(what, (None, now))
        if told_kind == kind and now < told_at + TOLD_EVERY_S:
            return False
        self._told.pop(what, None)
        self._told[what] = kind, now
        if len(self._told) > TOLD_MAX:
            del self._told[next(iter(self._told))]
        return True

    def clear(self, what: Hashable) -> None:
        """Note that it is well again."""
        self._told.pop(what, None)


class Rounds(Generic[Item]):
    """Has things looked at.

    Args:
        look: at one of them.
        name: of one, for the log.
        may_look: whether anything is to be looked at now; what was noted until then is forgotten otherwise.
        looked: called after each slice.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        look: Callable[[Item], None],
        name: Callable[[Item], str],
        may_look: Callable[[], bool] = lambda: True,
        looked: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._look = look
        self._name = name
        self._may_look = may_look
        self._looked = looked
        self._noted: dict[Item, None] = {}
        self._is_coming = False
        self._look_failures = Failures(loop)

    def note(self, item: Item) -> None:
        """Look at something when the turn has ended; may be called in the middle of things."""
        self._noted[item] = None
        self._come()

    def note_all(self, items: Iterable[Item]) -> None:
        """As :meth:`note`."""
        self._noted |= dict.fromkeys(items)
        self._come()

    def note_later(self, item: Item, after_s: float = AGAIN_S) -> None:
        """Look at something when ``after_s`` seconds have passed."""
        self._loop.call_later(after_s, self.note, item)

    def forget(self, item: Item) -> None:
        """Do not look at it."""
        self._noted.pop(item, None)

    def _come(self) -> None:
        if not self._is_coming:
            self._is_coming = True
            self._loop.call_soon(self._go)

    def _go(self) -> None:
        self._is_coming = False
        if not self._may_look():
            self._noted.clear()
            return
        for item in list(islice(self._noted, SLICE_COUNT)):
            self._noted.pop(item, None)
            try:
                self._look(item)
            except Exception as error:
                if self._look_failures.is_new(item, type(error).__name__):
                    log.error("CLUSTER: %s: %r", self._name(item), error, exc_info=error)
                self.note_later(item)
            else:
                self._look_failures.clear(item)
        if self._noted:
            self._come()
        self._looked()
