"""Cancellations of asyncio that come out of a handler, without importing asyncio: the blocking client runs without it.

Rules of this file: what asyncio has is looked for where it has been imported already; nobody can raise it elsewhere.
"""

from __future__ import annotations

import sys


def cancelled_within(error: BaseException) -> RuntimeError:
    """Make a failure like any other of a cancellation that nobody meant for the handler."""
    failure = RuntimeError("something that the handler waited for was cancelled, and the handler itself was not")
    failure.__cause__ = error
    return failure


def failure_of(error: BaseException) -> BaseException:
    """Return what is wrong with a message whose handler has raised in a thread, which nobody cancels.

    A cancellation is of something that the handler ran. Where an event loop runs in this thread, it is left as it is:
    the task may be meant.
    """
    cancelled = getattr(sys.modules.get("asyncio.exceptions"), "CancelledError", None)
    if cancelled is None or not isinstance(error, cancelled):
        return error
    running_loop = getattr(sys.modules.get("asyncio.events"), "_get_running_loop", None)
    return error if running_loop is not None and running_loop() is not None else cancelled_within(error)
