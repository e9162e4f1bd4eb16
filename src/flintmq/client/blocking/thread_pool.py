"""Threads for what may block longer than anybody wants to wait: name resolution, connecting, a user's secret.

Rules of this file:

- A pool has a few threads at a time, each of which ends when there is no more work; they are daemons, so that a
  resolver that hangs keeps no program from ending.
- A thread is started before its job is kept, and the job is kept by a statement that calls nothing: where
  :meth:`ThreadPool.run` raises, an interrupt (Ctrl-C) included, no thread is counted that is not there.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from flintmq.client.blocking.lock import Lock

log = logging.getLogger("flintmq.client")

THREAD_COUNT_MAX = 16


def no_thread(purpose: str, error: RuntimeError) -> str:
    """Say what could not be begun: the machine, or the process, has as many threads as it may."""
    return f"no thread could be started to {purpose}: {error}"


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
        self._workers: dict[object, None] = {}  # a mark for each thread
        self._is_ended = False

    def run(self, job: Callable[[], object]) -> None:
        """Run a job soon; it must not raise.

        An interrupt may be raised when the job is kept already: whoever undoes something then does it so that the job
        may come nevertheless.

        Raises:
            RuntimeError: no thread could be started, and there is none; the job is not run.
        """
        with self._lock:
            if self._is_ended:
                return
            if len(self._workers) < self._size:
                self._start_worker()
            self._jobs += (job,)

    def _start_worker(self) -> None:
        """Start a thread, which waits for the lock before it looks for a job."""
        worker = object()
        try:
            self._workers[worker] = None
            threading.Thread(target=partial(self._work, worker), name=self._name, daemon=True).start()
        except BaseException as error:
            self._workers.pop(worker, None)  # it may run nevertheless, and ends when it finds that out
            if not isinstance(error, RuntimeError) or not self._workers:
                raise

    def end(self) -> None:
        """Drop what has not begun; what has runs to its end, and nobody waits for it."""
        with self._lock:
            self._is_ended = True
            self._jobs.clear()

    def _work(self, worker: object) -> None:
        while True:
            with self._lock:
                if not self._jobs or worker not in self._workers:
                    self._workers.pop(worker, None)
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                log.exception("a job of %s failed", self._name)
