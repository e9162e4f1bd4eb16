"""Close what belonged to a producer or a consumer that nothing refers to any more.

Rules of this file:

- The event loop refers to connections and timers, and these to everything but the object that the application has: it
  goes when the application lets it go, and what is called here then refers to it no more than they do.
- An object goes in any thread, and between any two instructions: the loop is told, and does the work in its turn.
- At the end of a program nothing is done: connections end with it.
- A task is made for the nsqlookupd and dead letters alone: ``asyncio.run`` that ends does not know of one so late.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

log = logging.getLogger("flintmq.client")

_closing: set[asyncio.Task[None]] = set()  # the loop itself refers to no task


def watch(
    owner: object, loop: asyncio.AbstractEventLoop, name: str, close: Callable[[], object]
) -> Callable[[], object]:
    """Have ``close`` called in the loop when the owner is gone without having been closed, and a ResourceWarning given.

    Args:
        name: of the owner, for the warning.
        close: refers to the owner neither itself nor by what it refers to.

    Returns:
        Call it when the owner is closed.
    """
    finalizer = weakref.finalize(owner, _gone, loop, name, close)
    finalizer.atexit = False
    return finalizer.detach


def _gone(loop: asyncio.AbstractEventLoop, name: str, close: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(partial(_close, name, close))
    except RuntimeError:
        pass  # the loop is closed, and nothing can be done in it


def _close(name: str, close: Callable[[], object]) -> None:
    close()
    text = f"{name} was dropped without close(): use async with, or close() it; its connections are closed now"
    log.warning("%s", text)
    warnings.warn(text, ResourceWarning, stacklevel=1)


def finish(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    """Run the rest of closing in a task that nobody waits for."""
    task = loop.create_task(work)
    _closing.add(task)
    task.add_done_callback(_closing.discard)
