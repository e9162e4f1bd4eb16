"""The event loop that a process of ours runs on, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's where it is installed (``pip install flintmq[fast]``), else None for asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None

    def new_loop() -> asyncio.AbstractEventLoop:
        loop = uvloop.new_event_loop()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
        try:
            _start_threads(loop)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return loop

    return new_loop


def _start_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Have libuv start its threads now, which it keeps: with signals blocked, so that they are the main thread's alone.

    It starts them for the first name that is looked up; nobody has to be asked to know that this one is no address.
    """
    with contextlib.suppress(OSError):
        loop.run_until_complete(loop.getaddrinfo("localhost", 0, flags=socket.AI_NUMERICHOST))


async def end_undisturbed() -> None:
    """Take no signal any more; to be called as the last thing on the loop of a process that ends.

    Closing the loop would remove its handlers, and whoever asks a second time, while the interpreter goes away, would
    kill the process that has just ended well.
    """
    loop = asyncio.get_running_loop()
    await loop.shutdown_default_executor()  # a signal may come to any thread
    signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)  # between the two lines below they would end it
    for number in _NUMBERS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
