"""An end to waiting for nsqds in a job that was told to stop, as by a signal.

A pause between two attempts ends at once. An answer that is due gets some time, as whoever reads is about to be done
with a part of it; an nsqd that stands still gives none, and is left.

The rules of this file: a job has its connections to itself, so that nobody else's are left with them; what is left is
told by :class:`Stopped`, whatever the connection failed with, so that nobody tries again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flintmq.errors import FlintError
from flintmq.spark.broker import FAILURES, ConnectionPool, NsqdConnection
from flintmq.spark.options import PLAIN, LinkOptions

PATIENCE_S = 5.0
"""For an answer that is due when the job is to stop; a connection that is being made has ``connectTimeout`` besides."""

LOOKED_EVERY_S = 0.2


class Stopped(FlintError):
    """A job was told to stop while it waited.

    Args:
        awaited: what it waited for.
    """

    def __init__(self, awaited: str) -> None:
        super().__init__(awaited)
        self.awaited = awaited

    def __str__(self) -> str:
        return f"told to stop while it waited for {self.awaited}"


class JobPool(ConnectionPool):
    """The connections of one job, all of which can be left at once by another thread."""

    def __init__(self) -> None:
        super().__init__()
        self._lent: set[NsqdConnection] = set()
        self._lock = threading.Lock()
        self._is_left = False

    @contextmanager
    def lend(
        self, address: str, connect_timeout_s: float, timeout_s: float, link: LinkOptions = PLAIN
    ) -> Iterator[NsqdConnection]:
        """Lend a connection as any pool does.

        Raises:
            Stopped: this pool is left, or was meanwhile.
        """
        self._check(address)
        try:
            with super().lend(address, connect_timeout_s, timeout_s, link) as connection:
                with self._lock:
                    self._lent.add(connection)
                try:
                    self._check(address)
                    yield connection
                finally:
                    with self._lock:
                        self._lent.discard(connection)
        except FAILURES:
            self._check(address)
            raise

    def _check(self, address: str) -> None:
        if self._is_left:
            raise Stopped(f"nsqd {address}")

    def leave(self) -> None:
        """End every wait for an answer, and lend nothing any more."""
        self._is_left = True
        with self._lock:
            for connection in self._lent:
                connection.interrupt()

    def close(self) -> None:
        """Close what is idle."""
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()


class Stopping:
    """Ends the waits of a job, within its ``with`` block, when an event is set.

    Attributes:
        pool: of the connections whose waits end.
    """

    def __init__(self, stop: threading.Event) -> None:
        self.pool = JobPool()
        self._stop = stop
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stopping", daemon=True)

    def __enter__(self) -> Stopping:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.pool.close()

    def pause(self, pause_s: float) -> None:
        """Pause between two attempts; seconds.

        Raises:
            Stopped: the job is to stop.
        """
        if self._stop.wait(pause_s):
            raise Stopped("an nsqd or nsqlookupd to answer")

    def _watch(self) -> None:
        while not self._stop.is_set():
            if self._over.wait(LOOKED_EVERY_S):
                return
        if not self._over.wait(PATIENCE_S):
            self.pool.leave()
