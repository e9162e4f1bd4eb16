"""Keeps a set of targets connected, without a thread for each: a pool of threads connects.

When which is tried: :mod:`flintmq.client.core.reconnect`.

Rules of this file: all methods are called with the owner's lock held, except what a thread of the pool does: connecting
waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Generic, TypeVar

from flintmq.client.blocking.thread_pool import ThreadPool, no_thread
from flintmq.client.core import reconnect
from flintmq.client.core.reconnect import Key
from flintmq.client.core.timers import Timers
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError

log = logging.getLogger("flintmq.client")

Opened = TypeVar("Opened")


class Reconnector(Generic[Key, Opened]):
    """The targets that should be connected.

    Args:
        open: connects, in a thread of the threads.
        join: takes what was opened in; the target counts as connected until :meth:`lost`.
        tried: told of every attempt: None when it succeeded, otherwise why it failed.
        drop: closes what was opened and is not wanted any more.
        threads: connects.
        lock: the owner's.
    """

    def __init__(
        self,
        open: Callable[[Key], Opened],  # noqa: A002 - what it does
        join: Callable[[Opened], None],
        tried: Callable[[Key, FlintError | None], None],
        drop: Callable[[Opened], None],
        threads: ThreadPool,
        timers: Timers,
        lock: AbstractContextManager[object],
        env: Env,
    ) -> None:
        self._open = open
        self._join = join
        self._tried = tried
        self._drop = drop
        self._threads = threads
        self._lock = lock
        self._attempts: dict[Key, object] = {}  # the one that counts, of those that are under way
        self._reconnector: reconnect.Reconnector[Key] = reconnect.Reconnector(self._begin, env)
        self._reconnector.start(timers)

    @property
    def listed(self) -> tuple[Key, ...]:
        """Return what is wanted now."""
        return self._reconnector.listed

    @property
    def are_all_tried(self) -> bool:
        """Whether every target was tried once."""
        return self._reconnector.are_all_tried

    def keep(self, targets: Iterable[Key]) -> None:
        """Want these targets from now on, and no others."""
        self._reconnector.keep(targets)

    def lost(self, target: Key, lived_s: float, at_once: bool = False) -> None:
        """Note that a connection is gone, as :meth:`flintmq.client.core.reconnect.Reconnector.lost`."""
        self._reconnector.lost(target, lived_s, at_once)

    def stop(self) -> None:
        """Connect no more; connections that are there stay."""
        self._reconnector.stop()
        self._threads.end()

    def _begin(self, target: Key) -> None:
        attempt = object()
        try:
            self._attempts[target] = attempt
            self._threads.run(partial(self._connect, target, attempt))
        except RuntimeError as error:
            self._end(target, attempt, None, ConnectionFailed(str(target), no_thread("connect", error)))
        except BaseException:  # Ctrl-C: it may have begun, and counts no more, for another is to follow
            self._attempts.pop(target, None)
            raise

    def _connect(self, target: Key, attempt: object) -> None:
        """Try to connect once, in a thread of the threads."""
        error: FlintError | None = None
        opened: Opened | None = None
        try:
            opened = self._open(target)
        except FlintError as failure:
            error = failure
        except Exception as failure:
            log.exception("connecting to %s failed by a mistake of ours", target)
            error = ConnectionFailed(str(target), repr(failure))
        with self._lock:
            self._end(target, attempt, opened, error)

    def _end(self, target: Key, attempt: object, opened: Opened | None, error: FlintError | None) -> None:
        if self._reconnector.is_stopped or self._attempts.get(target) is not attempt:
            if opened is not None:
                self._drop(opened)
            return
        del self._attempts[target]
        if opened is not None:
            self._reconnector.opened(target)
            try:
                self._join(opened)
            except Exception as failure:
                log.exception("taking in a connection to %s failed by a mistake of ours", target)
                error = ConnectionFailed(str(target), repr(failure))
        if error is not None:
            self._reconnector.failed(target)
        self._tried(target, error)
