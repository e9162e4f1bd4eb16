"""Telling systemd that a daemon is ready, and that it ends: ``Type=notify`` of its units.

Rules of this file: who is not started by systemd notices nothing; a supervisor that cannot be told is a line in the
log, and no reason to stop.

Source: https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html, docs/decisions/0022.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator

from flintmq.net import tasks

READY = "READY=1"
"""It listens."""
STOPPING = "STOPPING=1"
"""It was asked to end, and does."""

log = logging.getLogger(__name__)

_VARIABLE = "NOTIFY_SOCKET"


def tell(state: str) -> None:
    """Tell the supervisor that started this process, if it asked for it, what state it is in."""
    address = os.environ.get(_VARIABLE, "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
            to.setblocking(False)
            to.connect("\0" + address[1:] if address.startswith("@") else address)  # an abstract address
            to.send(state.encode())
    except OSError as error:
        log.warning("cannot tell %s at %s=%s: %s", state, _VARIABLE, address, error.strerror or error)


@contextlib.asynccontextmanager
async def told_of_end(stop: asyncio.Event) -> AsyncIterator[None]:
    """Tell the supervisor as soon as ``stop`` is set, by whomever."""

    async def wait() -> None:
        await stop.wait()
        tell(STOPPING)

    waiting = asyncio.get_running_loop().create_task(wait())
    waiting.add_done_callback(tasks.tell("telling the supervisor of the end"))
    try:
        yield
    finally:
        waiting.cancel()
