"""The event loop that a process of ours runs on, and how it ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's where it is installed (``pip install flintmq[fast]``), else None for asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def end_undisturbed() -> None:
    """Take no signal any more; to be called as the last thing on the loop of a process that ends.

    Closing the loop would remove its handlers, and whoever asks a second time, while the interpreter goes away, would
    kill the process that has just ended well.
    """
    loop = asyncio.get_running_loop()
    await loop.shutdown_default_executor()  # a signal may come to any thread
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # between the two lines below they would end it
    for number in numbers:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
