"""The event loop that a client belongs to: how to get there from other threads, and who is told that it is elsewhere.

Rules of this file: nothing is waited for.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable


class Home:
    """A loop, and its thread.

    Attributes:
        loop: None: there is none yet.
    """

    __slots__ = ("loop", "_thread_id", "_due")

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._due: deque[Callable[[], object]] = deque()  # what is called soon; it may be filled in any thread

    def move_in(self, what: str, instead: str = "") -> asyncio.AbstractEventLoop:
        """Take the loop that is running.

        Args:
            what, instead: as for :func:`running_loop`.

        Raises:
            RuntimeError: there is none.
        """
        self.loop = running_loop(what, instead)
        self._thread_id = threading.get_ident()
        return self.loop

    def run(self, function: Callable[[], object]) -> None:
        """Call a function in the loop's thread: now, if this is it, or if no loop turns there.

        It comes behind what is to be called soon: what is given back behind ``stop()`` is so behind RDY 0, which nsqd
        has to find before it can deliver that again.
        """
        if not self._due and threading.get_ident() == self._thread_id:
            function()
        else:
            self.run_soon(function)

    def run_soon(self, function: Callable[[], object]) -> None:
        """The same in a turn of its own: a signal handler interrupts whatever is done in the loop's thread."""
        loop = self.loop
        if loop is None or loop.is_closed():
            function()
        else:
            self._due.append(function)
            loop.call_soon_threadsafe(self._run_next)

    def _run_next(self) -> None:
        self._due.popleft()()


def running_loop(what: str, instead: str = "") -> asyncio.AbstractEventLoop:
    """Return the loop that is running.

    Args:
        what: the class that needs it, ``Producer`` say.
        instead: the class of :mod:`flintmq.sync` that needs none; the same name when empty.

    Raises:
        RuntimeError: there is none: Trio runs here, say, or a coroutine is driven by hand.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            f"flintmq.{what} runs on asyncio, and no event loop of asyncio runs here: "
            f"use flintmq.sync.{instead or what}, which needs none and serves any thread"
        ) from None


def check_loop(what: str, loop: asyncio.AbstractEventLoop | None) -> None:
    """See that a client was started, and in the loop that is running.

    Args:
        what: ``producer`` or ``consumer``.

    Raises:
        RuntimeError: it was not.
    """
    kind = what.capitalize()
    running = running_loop(kind)
    if loop is None:
        raise RuntimeError(f"start the {what} first: async with {kind}(...) as {what}")
    if running is not loop:
        state = "has ended (each asyncio.run makes a new one)" if loop.is_closed() else "is not this one"
        raise RuntimeError(
            f"the {what} belongs to the event loop it was started in, which {state}: start and close a {what} in each "
            f"loop, or use flintmq.sync.{kind}, which needs none and serves any thread"
        )


def is_of_closed_loop(error: BaseException | None, loop: asyncio.AbstractEventLoop | None) -> bool:
    """Whether a coroutine is destroyed because its event loop was closed: nothing can be done there any more."""
    return isinstance(error, GeneratorExit) and loop is not None and loop.is_closed()
