"""Garbage collection that does not stop everybody.

A full collection of Python's looks at every object there is: it takes 0.1 s where there are thousands of topics and
connections, and comes again each time they have become a quarter more. Here full collections are made early, while
there is little to look at, and what survived one is not looked at by the next (``gc.freeze``). What becomes a garbage
cycle after that, which is rare, is found by one that looks at everything, ten minutes after the last of that kind.

Rules of this file: it is for a process that is an nsqd and nothing else, because collection is the process's.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_INTERVAL_S = 0.05
_YOUNGER_COLLECTIONS_MAX = 3  # each is for up to 7,000 new objects, as Python is set
_WHOLE_INTERVAL_S = 600.0
_FULL_GENERATION = 2


class Collector:
    """Collects in this process from the running loop, until :meth:`stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._whole_at = self._loop.time() + _WHOLE_INTERVAL_S
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin."""
        gc.callbacks.append(self._collected)
        self._look()

    def stop(self) -> None:
        """Leave collecting to Python again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.callbacks.remove(self._collected)
            gc.unfreeze()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make very many objects that stay: to look for garbage among them again and again takes half of the time."""
        gc.disable()
        try:
            yield
        finally:
            gc.freeze()
            gc.enable()

    def _look(self) -> None:
        self._timer = self._loop.call_later(_INTERVAL_S, self._look)
        if self._loop.time() >= self._whole_at:
            self._whole_at = self._loop.time() + _WHOLE_INTERVAL_S
            gc.unfreeze()
            gc.collect()
        elif gc.get_count()[_FULL_GENERATION] >= _YOUNGER_COLLECTIONS_MAX:
            gc.collect()

    def _collected(self, phase: str, about: dict[str, int]) -> None:
        if phase == "stop" and about["generation"] == _FULL_GENERATION:
            gc.freeze()
