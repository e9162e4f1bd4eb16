"""Work in the background that nobody awaits: what fails there is told, and begun again where it has to go on.

Rules of this file: an exception is logged once with its traceback, not again while it stays the same; a cancelled task
has nothing to tell.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

RESTART_S = 5.0

_log = logging.getLogger(__name__)


async def kept_up(
    work: Callable[[], Coroutine[Any, Any, None]],
    what: str,
    failed: Callable[[Exception], None] | None = None,
    pause_s: float = RESTART_S,
) -> None:
    """Run a coroutine function until it returns; whenever it raises, say so and run it again after a pause.

    Args:
        what: it does, for the log: "registering with ...".
        failed: called each time before the pause.
    """
    told = ""
    while True:
        try:
            await work()
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, the work has to go on
            if repr(error) != told:
                told = repr(error)
                _log.error("%s ended unexpectedly, it goes on in %g s: %r", what, pause_s, error, exc_info=error)
            if failed is not None:
                failed(error)
        await asyncio.sleep(pause_s)


def tell(what: str) -> Callable[[asyncio.Task[Any]], None]:
    """Return a done callback for a task that is not expected to fail, and is not run again if it does."""

    def ended(task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("%s ended unexpectedly: %r", what, error, exc_info=error)

    return ended


class Tasks:
    """Work in the background of one owner, which ends with it.

    Args:
        loop: in which it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Run something until it ends, or :meth:`close` ends it.

        Args:
            what: it does, for the log: "registering with ...".
        """
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(tell(what))

    async def close(self) -> None:
        """End all of it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


__all__ = ["Tasks", "kept_up", "tell"]
