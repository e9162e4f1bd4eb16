"""Threads for what may block longer than anybody wants to wait: name resolution, connecting, a user's secret.

Rules of this file: a pool has a few threads at a time, each of which ends when there is no more work; they are daemons,
so that a resolver that hangs keeps no program from ending.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from flintmq.client.blocking.lock import Lock

log = logging.getLogger("flintmq.client")

THREAD_COUNT_MAX = 16


class ThreadPool:
    """Runs jobs in short-lived threads.

    Args:
        name: of the threads.
        size: threads at a time; more jobs wait, first come first served. Whoever hands in jobs bounds their number.
    """

    def __init__(self, name: str, size: int = THREAD_COUNT_MAX) -> None:
        self._name = name
        self._size = size
        self._lock = Lock()
        self._jobs: deque[Callable[[], object]] = deque()
        self._thread_count = 0
        self._is_ended = False

    def run(self, job: Callable[[], object]) -> None:
        """Run a job soon; it must not raise."""
        with self._lock:
            if self._is_ended:
                return
            self._jobs.append(job)
            if self._thread_count == self._size:
                return
            self._thread_count += 1
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def end(self) -> None:
        """Drop what has not begun; what has runs to its end, and nobody waits for it."""
        with self._lock:
            self._is_ended = True
            self._jobs.clear()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread_count -= 1
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                log.exception("a job of %s failed", self._name)
