"""Keeps a set of targets connected, without a thread for each.

A target is an address, or a partition on an address (:class:`flintmq.client.core.routing.Target`): one connection each.

Rules of this file:

- All methods are called with the owner's lock held, except what a crew's thread does: connecting waits.
- The first attempt after a loss comes within 1 s, later ones less and less often, with jitter; a target that is no
  longer listed stays connected as long as its connection holds, and is not tried again after that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Generic, TypeVar

from flintmq.client.blocking.crew import Crew
from flintmq.client.blocking.timers import Timers
from flintmq.client.core.backoff import ReconnectDelay
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError

log = logging.getLogger("flintmq.client")

Key = TypeVar("Key", bound=Hashable)
Opened = TypeVar("Opened")


class Links(Generic[Key, Opened]):
    """The targets that should be connected.

    Args:
        open: connects, in a thread of the crew.
        join: takes what was opened in; the target counts as connected until :meth:`lost`.
        tried: told of every attempt: None when it succeeded, otherwise why it failed.
        drop: closes what was opened and is not wanted any more.
        crew: connects.
        lock: the owner's.

    Attributes:
        listed: what is wanted now.
    """

    def __init__(
        self,
        open: Callable[[Key], Opened],  # noqa: A002 - what it does
        join: Callable[[Opened], None],
        tried: Callable[[Key, FlintError | None], None],
        drop: Callable[[Opened], None],
        crew: Crew,
        timers: Timers,
        lock: AbstractContextManager[object],
        env: Env,
    ) -> None:
        self.listed: tuple[Key, ...] = ()
        self._open = open
        self._join = join
        self._tried = tried
        self._drop = drop
        self._timers = timers
        self._lock = lock
        self._env = env
        self._crew = crew
        self._links: dict[Key, _Link[Key]] = {}
        self._is_stopped = False

    @property
    def are_all_tried(self) -> bool:
        """Whether every target was tried once."""
        return all(link.was_tried for link in self._links.values())

    def keep(self, targets: Iterable[Key]) -> None:
        """Want these targets from now on, and no others."""
        if self._is_stopped:
            return
        self.listed = tuple(dict.fromkeys(targets))
        for target in [target for target, link in self._links.items() if not link.is_busy]:
            if target not in self.listed:
                del self._links[target]
        for target in self.listed:
            if target not in self._links:
                link = self._links[target] = _Link(target)
                self._try(link)

    def lost(self, target: Key, lived_s: float) -> None:
        """Note that a connection is gone."""
        link = self._links.get(target)
        if link is not None:
            link.is_busy = False
            self._try_later(link, lived_s)

    def stop(self) -> None:
        """Connect no more; connections that are there stay."""
        self._is_stopped = True
        self.listed = ()
        self._crew.end()

    def _try_later(self, link: _Link[Key], lived_s: float = 0.0) -> None:
        delay_s = link.delay.next_s(self._env.random.random(), lived_s)
        self._timers.call_later(delay_s, self._try, link)

    def _try(self, link: _Link[Key]) -> None:
        if self._links.get(link.target) is not link or link.is_busy:
            return
        if link.target not in self.listed:
            del self._links[link.target]
            return
        link.is_busy = True
        self._crew.run(partial(self._connect, link))

    def _connect(self, link: _Link[Key]) -> None:
        """Try to connect once, in a thread of the crew."""
        error: FlintError | None = None
        opened: Opened | None = None
        try:
            opened = self._open(link.target)
        except FlintError as failure:
            error = failure
        except Exception as failure:
            log.exception("connecting to %s failed by a mistake of ours", link.target)
            error = ConnectionFailed(str(link.target), repr(failure))
        with self._lock:
            link.was_tried = True
            if self._is_stopped:
                if opened is not None:
                    self._drop(opened)
                return
            if opened is not None:
                self._join(opened)
            else:
                link.is_busy = False
                self._try_later(link)
            self._tried(link.target, error)


class _Link(Generic[Key]):
    """One target.

    Attributes:
        is_busy: it is being connected, or is connected.
    """

    __slots__ = ("target", "delay", "is_busy", "was_tried")

    def __init__(self, target: Key) -> None:
        self.target = target
        self.delay = ReconnectDelay()
        self.is_busy = False
        self.was_tried = False
