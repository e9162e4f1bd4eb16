"""Waits for the sockets of a consumer, and moves their bytes: in the thread of whoever has nothing else to do.

Rules of this file:

- One thread pumps at a time. A background thread does the same, without waiting, when nobody has for a while: a handler
  may take as long as it likes, heartbeats are answered and FINs go out.
- Two locks: the *turn* is held by who waits for the sockets, the *lock* by who touches any state, never across a wait
  and never while the application's code runs.
- An interrupt (Ctrl-C) in the middle of sending or reading leaves connections that nobody could trust: they are given
  up, and nsqd delivers again what was not answered. An interrupt while waiting costs nothing.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable
from contextlib import ExitStack

from flintmq.client.blocking.connection import Connection
from flintmq.client.blocking.fork import watch as fork_watch
from flintmq.client.blocking.gone import close_with
from flintmq.client.blocking.lock import Lock
from flintmq.client.blocking.thread_pool import no_thread
from flintmq.client.blocking.ticker import Ticker
from flintmq.client.blocking.timers import Timers

log = logging.getLogger("flintmq.client")

TICK_S = 0.05
WAIT_S = 1.0


class Pump:
    """The connections of one consumer, and who waits for them.

    Args:
        prepare: called with the lock held before anything is sent.
        lost: told of connections that are not waited for any more.
        forked: called in a child made by ``os.fork()``, which must not use what is its parent's.

    Attributes:
        lock: held by who touches any state.
        is_waiting: somebody waits for the sockets.
    """

    def __init__(
        self,
        timers: Timers,
        prepare: Callable[[], object],
        lost: Callable[[Connection], object],
        forked: Callable[[], object],
    ) -> None:
        self.lock = Lock()
        self.is_waiting = False
        self._timers = timers
        self._prepare = prepare
        self._lost = lost
        self._forked = forked
        self._turn_lock = Lock()
        self._selector: selectors.BaseSelector
        self._wakeup: socket.socket | None = None
        self._waker: socket.socket | None = None
        self._is_woken = False
        self._watched: dict[Connection, None] = {}
        self._orphaned: dict[Connection, None] = {}
        self._ticker: Ticker | None = None
        self._ticker_at = 0.0
        self._pumped_at = 0.0
        self._is_closed = False
        fork_watch(self)

    # --- life ---

    def start(self) -> None:
        """Begin."""
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._waker = socket.socketpair()
        for end in (self._wakeup, self._waker):
            end.setblocking(False)
            close_with(self, end.close)  # but not the selector, which refers to connections, and they to this
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._start_ticker()

    def _start_ticker(self) -> None:
        """Have somebody pump when nobody else does; whoever pumps tries again if there is no thread for that now."""
        self._ticker_at = self._timers.time() + WAIT_S
        try:
            self._ticker = Ticker(self._keep, TICK_S, "flintmq-consumer")
        except RuntimeError as error:
            log.warning("%s; it is tried again", no_thread("answer heartbeats while a message is handled", error))

    def close(self) -> None:
        """Wait for nothing any more."""
        if self._ticker is not None:
            self._ticker.end()
        self.wake()
        with self._turn_lock:  # nobody waits for the sockets any more
            self._is_closed = True
            self._close_descriptors()

    def after_fork(self) -> None:
        """In a child: let go of everything that is the parent's."""
        self.lock = Lock()
        self._turn_lock = Lock()
        for connection in self._watched:
            connection.abandon()
        self._close_descriptors()
        self._forked()

    def _close_descriptors(self) -> None:
        if self._wakeup is not None and self._waker is not None:
            self._selector.close()
            self._wakeup.close()
            self._waker.close()

    # --- connections ---

    def wake(self) -> None:
        """End the wait of whoever waits for the sockets; in any thread, and in a signal handler."""
        if self._is_woken or self._waker is None:
            return
        self._is_woken = True
        try:
            self._waker.send(b"\0")
        except OSError:
            pass  # closed: nobody waits; full: whoever waits is being woken

    def watch(self, connection: Connection, is_choked: bool) -> None:
        """Wait for a connection's socket to be readable; also until it takes more, if it is choked."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_choked else 0)
        if connection in self._watched:
            self._selector.modify(connection, events, connection)
        else:
            self._watched[connection] = None
            self._selector.register(connection, events, connection)

    def unwatch(self, connection: Connection) -> None:
        """Wait for a connection's socket no longer; what the application still holds of it is counted when answered."""
        self._watched.pop(connection, None)
        try:
            self._selector.unregister(connection)
        except (KeyError, ValueError):  # of a socket that is closed already it is a ValueError
            pass  # an interrupt came before it was registered, or after this
        self._orphaned[connection] = None
        self._timers.call_later(connection.msg_timeout_s, self._orphaned.pop, connection, None)
        self._lost(connection)

    def interrupted(self, when: str) -> None:
        """Give all connections up: nobody knows what was sent, read, or handed out."""
        with self.lock:
            self._is_woken = False  # it may have come between reading what wakes and noting that
            with ExitStack() as given_up:  # whatever one of them raises, as Ctrl-C once more
                for connection in [*self._watched]:
                    given_up.callback(connection.abort, f"interrupted {when}")

    # --- pumping ---

    def wait(self, timeout_s: float, is_over: Callable[[], bool]) -> None:
        """Pump, and wait for the sockets if it is not over when it is this thread's turn."""
        if self._turn_lock.take(timeout_s):
            try:
                if not is_over():
                    self._turn(timeout_s)
            finally:
                self._turn_lock.release()

    def once(self) -> None:
        """Send and read what can be without waiting, unless somebody is at it."""
        if self._turn_lock.take(0.0):
            try:
                self._turn(0.0)
            finally:
                self._turn_lock.release()

    def until(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Pump until it is over, at most so long."""
        deadline = self._timers.time() + timeout_s
        while not is_over() and (left_s := deadline - self._timers.time()) > 0:
            if self._turn_lock.take(left_s):
                try:
                    self._turn(min(left_s, WAIT_S))
                finally:
                    self._turn_lock.release()

    def _keep(self) -> None:
        """Pump when nobody else does; called by the ticker."""
        if self._timers.time() - self._pumped_at > TICK_S:
            self.once()

    def _turn(self, timeout_s: float) -> None:
        """Send, run what is due, wait, read; by who has the turn."""
        if self._is_closed:
            return
        self.is_waiting = timeout_s > 0  # before the flush: a FIN that comes after it ends the wait
        try:
            with self.lock:
                wait_s = self._send(timeout_s)
            ready = self._selector.select(wait_s)
        finally:
            self.is_waiting = False
        if ready:
            with self.lock:
                self._serve(ready)

    def _send(self, timeout_s: float) -> float:
        """Do everything there is to do but reading; say how long there is nothing else to do."""
        try:
            self._prepare()
            self._timers.run_due()
            for connection in [*self._watched, *self._orphaned]:
                connection.flush()
        except BaseException:
            self.interrupted("while sending")
            raise
        now = self._pumped_at = self._timers.time()
        if self._ticker is None and now >= self._ticker_at:
            self._start_ticker()
        next_at = self._timers.next_at()
        return timeout_s if next_at is None else max(0.0, min(timeout_s, next_at - now))

    def _serve(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Read from, and write to, the sockets that are ready."""
        try:
            for key, events in ready:
                connection: Connection | None = key.data
                if connection is None:
                    assert self._wakeup is not None
                    self._wakeup.recv(4096)
                    self._is_woken = False  # after it: who finds it True has changed something that is looked at below
                    continue
                if events & selectors.EVENT_READ:
                    connection.on_readable()
                if events & selectors.EVENT_WRITE and not connection.is_lost:
                    connection.on_writable()
                if connection.has_output:
                    connection.flush()
        except BaseException:
            self.interrupted("while reading")
            raise
