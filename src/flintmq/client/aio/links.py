"""Keeps a set of nsqd connected: one task per target, which connects again whenever its connection is lost.

A target is an address, or a partition on an address (:class:`flintmq.client.core.routing.Target`): one connection each.

Rules of this file: the first attempt after a loss comes within 1 s, later ones less and less often, with jitter; an
target that is no longer listed stays connected as long as its connection holds, and is not tried again after that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Generic, TypeVar

from flintmq.client.aio.connection import Connection
from flintmq.client.core.backoff import ReconnectDelay
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError, NsqdError, ProtocolError

log = logging.getLogger("flintmq.client")

Key = TypeVar("Key", bound=Hashable)


class Links(Generic[Key]):
    """The targets that should be connected.

    Args:
        connect: makes a usable connection.
        tried: told of every attempt: None when it succeeded, otherwise why it failed.
        broken: told when a task ended by a mistake of ours.

    Attributes:
        listed: what is wanted now.
    """

    def __init__(
        self,
        connect: Callable[[Key], Awaitable[Connection]],
        tried: Callable[[Key, FlintError | None], None],
        broken: Callable[[BaseException], None],
        env: Env,
    ) -> None:
        self.listed: tuple[Key, ...] = ()
        self._connect = connect
        self._tried = tried
        self._broken = broken
        self._env = env
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._first_tries: dict[Key, asyncio.Event] = {}
        self._is_closed = False

    def keep(self, targets: Iterable[Key]) -> None:
        """Want these targets from now on, and no others."""
        self.listed = tuple(dict.fromkeys(targets))
        for target in [target for target, task in self._tasks.items() if task.done()]:
            del self._tasks[target]
        for target in self.listed:
            if target not in self._tasks and not self._is_closed:
                self._first_tries[target] = asyncio.Event()
                task = asyncio.get_running_loop().create_task(self._keep_connected(target))
                task.add_done_callback(self._ended)
                self._tasks[target] = task

    async def all_tried(self) -> None:
        """Wait until every target was tried once."""
        await asyncio.gather(*(event.wait() for event in self._first_tries.values()))

    def stop(self) -> None:
        """Connect no more; connections that are there stay."""
        self._is_closed = True
        self.listed = ()
        for task in self._tasks.values():
            task.cancel()
        for event in self._first_tries.values():
            event.set()

    async def close(self) -> None:
        """Stop and wait until nothing is being connected any more."""
        self.stop()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _is_wanted(self, target: Key) -> bool:
        return target in self.listed

    async def _keep_connected(self, target: Key) -> None:
        loop = asyncio.get_running_loop()
        delay = ReconnectDelay()
        try:
            while self._is_wanted(target):
                lived_s = 0.0
                try:
                    connection = await self._connect(target)
                except (ConnectionFailed, NsqdError, ProtocolError) as error:
                    self._note(target, error)
                else:
                    self._note(target, None)
                    connected_at = loop.time()
                    error_lost = await asyncio.shield(connection.lost)
                    lived_s = loop.time() - connected_at
                    if self._is_wanted(target):
                        log.warning("lost nsqd %s: %s", target, error_lost)
                    if connection.is_publish_refused:
                        continue  # closed as the protocol has it; other publishes should not have to wait
                if self._is_wanted(target):
                    await asyncio.sleep(delay.next_s(self._env.random.random(), lived_s))
        finally:
            self._first_tries.pop(target).set()

    def _note(self, target: Key, error: FlintError | None) -> None:
        self._first_tries[target].set()
        self._tried(target, error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken(error)
