"""Listening on what an option says: TCP, or a unix socket where it is a path; one way for every daemon.

Rules of this file: one option is one listener with one name; a path is taken from nobody who still listens there, and
what a killed daemon left behind is in nobody's way; nothing but a socket is ever removed.

Source: NSQ's TCP protocol, NSQ's HTTP API; Go's package net for when the file of a unix socket goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from flintmq.addresses import format_address
from flintmq.net.address import ListenFailed, bind_host, listening_address, split_address

BACKLOG = 4096  # one connection is accepted in a turn; a burst beyond this would wait a second for its next SYN
_ACCEPTS_PER_TURN = 1
"""The backlog that an event loop is told. asyncio accepts so many in one turn, and where there is no file for a
connection it goes on failing, and reporting it, as often: with thousands it does nothing else any more."""
PATH_PORT = -1
"""The port that NSQ shows for a unix socket."""

_NewProtocol = Callable[[], asyncio.BaseProtocol]


@dataclass(frozen=True, slots=True)
class Listener:
    """One address that is listened on.

    Attributes:
        address: the real host and port; None for a unix socket.
        name: the address as people are told: ``ip:port`` or the path.
    """

    server: asyncio.AbstractServer
    address: tuple[str, int] | None
    name: str
    file_id: tuple[int, int] | None = None

    def close(self) -> None:
        """Accept nothing more, and remove the file of a unix socket unless it is somebody else's by now."""
        self.server.close()
        if self.address is None and self.file_id == _file_id(self.name):
            with contextlib.suppress(OSError):
                os.unlink(self.name)


async def listen(new_protocol: _NewProtocol, text: str) -> Listener:
    """Listen on ``host:port``, or on a unix socket for anything else.

    Raises:
        ListenFailed: it cannot be listened on.
    """
    loop = asyncio.get_running_loop()
    address = split_address(text)
    try:
        if address is None:
            if await _is_answered(loop, text):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            server: asyncio.AbstractServer = await loop.create_unix_server(
                new_protocol, text, backlog=_ACCEPTS_PER_TURN
            )
            _widen(server)
            return Listener(server, None, text, _file_id(text))
        host = await bind_host(*address)
        server = await loop.create_server(new_protocol, host, address[1], backlog=_ACCEPTS_PER_TURN)
        _widen(server)
    except (OSError, OverflowError) as error:
        raise ListenFailed(text, getattr(error, "strerror", None) or str(error)) from error
    bound = listening_address(server, host, address[1])
    return Listener(server, bound, format_address(*bound))


def _widen(server: asyncio.AbstractServer) -> None:
    """Let so many connections wait in the kernel as it should, whatever the event loop was told."""
    for listening in getattr(server, "sockets", ()):
        if listening.fileno() >= 0:  # of a simulated loop it is not
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(BACKLOG)


async def _is_answered(loop: asyncio.AbstractEventLoop, path: str) -> bool:
    """Whether somebody listens on a unix socket: an event loop would remove the file all the same."""
    try:
        transport, _ = await loop.create_unix_connection(asyncio.Protocol, path)
    except BlockingIOError:
        return True  # its backlog is full
    except OSError:
        return False
    transport.abort()
    return True


def _file_id(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


__all__ = ["BACKLOG", "Listener", "PATH_PORT", "listen"]
