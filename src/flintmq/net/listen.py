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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from flintmq.addresses import format_address
from flintmq.net.address import ListenFailed, all_hosts, bind_host, lacks_family, listening_address, split_address

BACKLOG = 4096  # one connection is accepted in a turn; a burst beyond this would wait a second for its next SYN
_FREE_PORT_TRIES = 16
_ACCEPTS_PER_TURN = 1
"""The backlog that an event loop is told. asyncio accepts so many in one turn, and where there is no file for a
connection it goes on failing, and reporting it, as often: with thousands it does nothing else any more."""
PATH_PORT = -1
"""The port that NSQ shows for a unix socket."""

_NewProtocol = Callable[[], asyncio.BaseProtocol]


class _Closable(Protocol):
    def close(self) -> None: ...


_Listening = TypeVar("_Listening", bound=_Closable)


@dataclass(frozen=True, slots=True)
class Listener:
    """One address that is listened on.

    Attributes:
        servers: one, or for all interfaces one of IPv4 and one of IPv6.
        address: the real host and port; None for a unix socket.
        name: the address as people are told: ``ip:port`` or the path.
    """

    servers: tuple[asyncio.AbstractServer, ...]
    address: tuple[str, int] | None
    name: str
    file_id: tuple[int, int] | None = None

    def close(self) -> None:
        """Accept nothing more, and remove the file of a unix socket unless it is somebody else's by now."""
        for server in self.servers:
            server.close()
        if self.address is None and self.file_id == _file_id(self.name):
            with contextlib.suppress(OSError):
                os.unlink(self.name)


async def listen(new_protocol: _NewProtocol, text: str) -> Listener:
    """Listen on ``host:port``, or on a unix socket for anything else.

    All interfaces are those of IPv4 and of IPv6, whichever is written, as with NSQ; of a machine that has one family
    alone, those of that.

    Raises:
        ListenFailed: it cannot be listened on.
    """
    loop = asyncio.get_running_loop()
    address = split_address(text)
    try:
        if address is None:
            if await _is_answered(loop, text):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            on_path = await loop.create_unix_server(new_protocol, text, backlog=_ACCEPTS_PER_TURN)
            _widen(on_path)
            return Listener((on_path,), None, text, _file_id(text))
    except (OSError, OverflowError) as error:
        raise ListenFailed(text, getattr(error, "strerror", None) or str(error)) from error

    async def listen_on(host: str, port: int) -> tuple[asyncio.AbstractServer, tuple[str, int]]:
        server = await loop.create_server(new_protocol, host, port, backlog=_ACCEPTS_PER_TURN)
        _widen(server)
        return server, listening_address(server, host, port)

    servers, bound = await listen_on_all(text, listen_on)
    return Listener(tuple(servers), bound, format_address(*bound))


async def listen_on_all(
    text: str, listen_on: Callable[[str, int], Awaitable[tuple[_Listening, tuple[str, int]]]]
) -> tuple[list[_Listening], tuple[str, int]]:
    """Listen on one port of all hosts that ``host:port`` stands for, but those of a family that the machine lacks.

    Args:
        listen_on: one host and a port, which may be 0; returns what listens, and where that is.

    Returns:
        All that listen, and where the first does.

    Raises:
        ListenFailed: it cannot be listened on.
    """
    address = split_address(text)
    assert address is not None  # a path is no such thing
    try:
        hosts, port = all_hosts(await bind_host(*address)), address[1]
        for tries_left in reversed(range(_FREE_PORT_TRIES)):
            try:
                return await _listen_on(hosts, port, listen_on)
            except OSError as error:  # perhaps a port that was free of one family alone
                if port or error.errno != errno.EADDRINUSE or not tries_left:
                    raise
    except (OSError, OverflowError) as error:
        raise ListenFailed(text, getattr(error, "strerror", None) or str(error)) from error
    raise AssertionError("the last try returns or raises")


async def _listen_on(
    hosts: tuple[str, ...],
    port: int,
    listen_on: Callable[[str, int], Awaitable[tuple[_Listening, tuple[str, int]]]],
) -> tuple[list[_Listening], tuple[str, int]]:
    found: list[_Listening] = []
    bound, failed = (hosts[0], port), None
    try:
        for host in hosts:
            try:
                listening, place = await listen_on(host, bound[1])
            except OSError as error:
                if not lacks_family(error):
                    raise
                failed = failed or error
                continue
            if not found:
                bound = place
            found.append(listening)
    except BaseException:
        for each in found:
            each.close()
        raise
    if failed is not None and not found:
        raise failed
    return found, bound


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


__all__ = ["BACKLOG", "Listener", "PATH_PORT", "listen", "listen_on_all"]
