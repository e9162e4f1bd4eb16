"""A lock that no interrupt (Ctrl-C) leaves held.

CPython runs the handlers of signals behind the call of a function written in C, and at the beginning of one in Python.
What a handler raises behind ``acquire`` comes when the lock is held and no ``try`` lets it go again; since 3.14 that is
so behind the ``__enter__`` of ``with``, too. Here a lock is taken in a function in Python, behind whose return no
handler runs. A condition gives up its lock by a function in C, too: what is raised behind that comes when the lock is
not held, and the end of a ``with`` would release what another thread may have by now.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

_RLock: Any = type(threading.RLock())


class Lock(_RLock):  # type: ignore[misc] # the class has no public name
    """A re-entrant lock: a handler of a signal may take what the thread that it interrupts holds."""

    def take(self, timeout_s: float = -1.0) -> bool:
        """Acquire it, and return whether that was possible in so many seconds; -1: wait for it; 0: do not wait."""
        held = self._recursion_count()
        try:
            return bool(self.acquire(timeout=timeout_s))
        except BaseException:
            if self._recursion_count() > held:
                self.release()
            raise

    if sys.version_info >= (3, 14):

        def __enter__(self) -> bool:
            return self.take()


class Condition(threading.Condition):
    """A condition of such a lock."""

    def __init__(self, lock: Lock) -> None:
        super().__init__(lock)
        self._held = lock

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is notified; False when that does not come in so many seconds."""
        held = self._held._recursion_count()
        try:
            return super().wait(timeout)
        except BaseException:
            while self._held._recursion_count() < held:
                self._held.acquire()
            raise
