"""A thread for the plain-function handler of one worker.

Rules of this file: it is started with the first call, and a daemon, so that a handler that never returns keeps no
program from ending. asyncio's own threads would: it waits for them, and it has a few for everybody, of which name
resolution needs some.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any


class HandlerThread:
    """Calls functions one after the other, off the event loop.

    Args:
        name: of the thread, for who looks at stacks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._is_started = False

    async def run(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Call ``function(*args)``; returns its result or raises its exception.

        Raises:
            RuntimeError: the thread could not be started.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if not self._is_started:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._is_started = True  # or the next call tries again
        self._calls.put(partial(_call, loop, future, function, args))
        return await future

    def end(self) -> None:
        """Call no more; a call that is under way is not waited for."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # the thread may wait for long, and is not to keep what it was called with


def _call(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    resolve: Callable[[], object]
    try:
        resolve = partial(future.set_result, function(*args))
    except BaseException as error:  # noqa: BLE001 - it goes to who waits
        resolve = partial(future.set_exception, error)
    try:
        loop.call_soon_threadsafe(_resolve, future, resolve)
    except RuntimeError:
        pass  # the loop is closed: nobody waits any more


def _resolve(future: asyncio.Future[Any], resolve: Callable[[], object]) -> None:
    if not future.done():  # else whoever waited has gone
        resolve()
