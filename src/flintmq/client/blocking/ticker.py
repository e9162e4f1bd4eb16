"""A thread that looks after something while nobody else does.

Rules of this file: it keeps nothing alive: when its owner has been dropped without being closed, it ends by itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flintmq.client.core.weak_call import WeakCall

log = logging.getLogger("flintmq.client")


class Ticker:
    """Calls a method again and again, in a thread of its own.

    Args:
        tick: a bound method; its object is held weakly.
        interval_s: between two calls.
        name: of the thread.

    Raises:
        RuntimeError: no thread could be started.
    """

    def __init__(self, tick: Callable[[], object], interval_s: float, name: str) -> None:
        self._tick = WeakCall(tick)
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._ended.set()  # Ctrl-C may come when it runs already
            raise

    def end(self) -> None:
        """Call no more."""
        self._ended.set()

    def _keep(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                if not self._tick():
                    return
            except Exception:
                log.exception("%s failed", self._thread.name)
