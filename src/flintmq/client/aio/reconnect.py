"""Keeps a set of nsqd connected on an event loop: a task for each that is being connected.

When which is tried: :mod:`flintmq.client.core.reconnect`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Generic

from flintmq.client.aio.connection import Connection
from flintmq.client.core import reconnect
from flintmq.client.core.reconnect import Key
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError, NsqdError, ProtocolError

log = logging.getLogger("flintmq.client")


class Reconnector(Generic[Key]):
    """The targets that should be connected.

    Args:
        connect: makes a usable connection.
        tried: told of every attempt: None when it succeeded, otherwise why it failed.
        broken: told when a task ended by a mistake of ours.
        is_wanted: whether something waits for a connection now.
    """

    def __init__(
        self,
        connect: Callable[[Key], Awaitable[Connection]],
        tried: Callable[[Key, FlintError | None], None],
        broken: Callable[[BaseException], None],
        env: Env,
        is_wanted: Callable[[], bool] = bool,
    ) -> None:
        self._connect = connect
        self._tried = tried
        self._broken = broken
        self._reconnector: reconnect.Reconnector[Key] = reconnect.Reconnector(self._begin, env, is_wanted)
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._first_tries: dict[Key, asyncio.Event] = {}

    @property
    def listed(self) -> tuple[Key, ...]:
        """Return what is wanted now."""
        return self._reconnector.listed

    def keep(self, targets: Iterable[Key]) -> None:
        """Want these targets from now on, and no others."""
        self._reconnector.start(asyncio.get_running_loop())
        self._reconnector.keep(targets)

    def hasten(self) -> None:
        """Note that something waits for a connection from now on."""
        self._reconnector.hasten()

    async def all_tried(self) -> None:
        """Wait until every target was tried once."""
        await asyncio.gather(*(event.wait() for event in self._first_tries.values()))

    def stop(self) -> None:
        """Connect no more; connections that are there stay."""
        self._reconnector.stop()
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        """Stop and wait until nothing is being connected any more."""
        self.stop()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _begin(self, target: Key) -> None:
        self._first_tries.setdefault(target, asyncio.Event())
        task = asyncio.get_running_loop().create_task(self._open(target))
        task.add_done_callback(partial(self._ended, target))
        self._tasks[target] = task

    async def _open(self, target: Key) -> None:
        try:
            connection = await self._connect(target)
        except (ConnectionFailed, NsqdError, ProtocolError) as error:
            self._tried(target, error)
            self._reconnector.failed(target)
            return
        self._tried(target, None)
        self._reconnector.opened(target)
        opened_at = asyncio.get_running_loop().time()
        connection.lost.add_done_callback(partial(self._lost, target, connection, opened_at))

    def _lost(self, target: Key, connection: Connection, opened_at: float, lost: asyncio.Future[FlintError]) -> None:
        if target in self._reconnector.listed:
            log.warning("lost nsqd %s: %s", target, lost.result())
        lived_s = asyncio.get_running_loop().time() - opened_at
        # Closed because of what was published, as the protocol has it: other publishes should not have to wait.
        self._reconnector.lost(target, lived_s, at_once=connection.is_publish_refused)

    def _ended(self, target: Key, task: asyncio.Task[None]) -> None:
        if self._tasks.get(target) is task:
            del self._tasks[target]
        if (event := self._first_tries.pop(target, None)) is not None:
            event.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._reconnector.forget(target)
            self._broken(error)
