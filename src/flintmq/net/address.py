"""Addresses to listen on, as flags spell them, and how they are shown to people and peers.

The spelling is Go's: ``host:port``, ``:port`` for all interfaces, ``[v6]:port``; anything that is not ``host:port`` is
the path of a unix socket. Source: NSQ's TCP protocol, NSQ's HTTP API.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flintmq.addresses import format_address
from flintmq.errors import FlintError

if TYPE_CHECKING:
    import asyncio

ALL_INTERFACES = "0.0.0.0"
_ALL_IPV6 = "::"


class ListenFailed(FlintError):
    """A daemon could not listen on the address it was told to.

    Args:
        address: as given in the option.
        reason: what the operating system said.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        return f"listen ({self.address}) failed - {self.reason}"


def split_address(text: str) -> tuple[str, int] | None:
    """Split ``host:port``; None when ``text`` is not of that form, hence the path of a unix socket."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or "/" in host:
        return None
    return host, int(port)


async def bind_host(host: str, port: int) -> str:
    """Choose the one address to listen on, so that port 0 means one port and a listener has one name.

    A name may stand for several addresses; the first IPv4 one is taken, as Go does.
    """
    if not host:
        return ALL_INTERFACES
    try:
        ipaddress.ip_address(host)
        return host
    except ValueError:
        pass
    import asyncio  # blocking clients, which format addresses too, do without an event loop

    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ipv4 = [info for info in found if info[0] == socket.AF_INET]
    return str((ipv4 or found)[0][4][0])


def all_hosts(host: str) -> tuple[str, ...]:
    """Return what is listened on for a host: where that is all interfaces of one family, those of the other as well.

    As Go does for ``:port``, ``0.0.0.0:port`` and ``[::]:port``.
    """
    if host == ALL_INTERFACES:
        return ALL_INTERFACES, _ALL_IPV6
    return (_ALL_IPV6, ALL_INTERFACES) if host == _ALL_IPV6 else (host,)


def lacks_family(error: OSError) -> bool:
    """Whether a listener failed because the machine has no addresses of that family."""
    return error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


async def connect(factory: Callable[[], asyncio.Protocol], host: str, port: int, timeout_s: float) -> None:
    """Connect to the first address of a name that takes a connection; each has its share of the time.

    The name is looked up here and not by ``create_connection``: uvloop's, when it is given up meanwhile, leaves an
    error behind that is logged as nobody's.

    Args:
        factory: makes the protocol; called for each address that takes the connection, which is one.
        timeout_s: for all of it, so that an address that swallows what it is sent leaves time for the next one.

    Raises:
        OSError: there is no such name, or none of its addresses takes it: why the first one that says so does not. It
            is a ConnectionRefusedError only where all of them refuse, so that nobody can be there.
        TimeoutError: nothing was heard of any of them in time.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    async with asyncio.timeout_at(deadline):
        try:
            ipaddress.ip_address(host)
        except ValueError:
            found = [info[4][:2] for info in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        else:
            found = [(host, port)]
    failures: list[OSError] = []
    for number, address in enumerate(found):
        now = loop.time()
        try:
            async with asyncio.timeout_at(now + (deadline - now) / (len(found) - number)):
                await loop.create_connection(factory, str(address[0]), int(address[1]))
        except OSError as error:  # a TimeoutError as well
            failures.append(error)
        else:
            return
    said = [error for error in failures if not isinstance(error, TimeoutError)]
    failed = said[0] if said else failures[0] if failures else OSError(f"{host} has no address")
    if isinstance(failed, ConnectionRefusedError) and not all(isinstance(each, type(failed)) for each in failures):
        raise OSError(failed.strerror or str(failed)) from failed
    raise failed


def listening_address(server: asyncio.AbstractServer, host: str, port: int) -> tuple[str, int]:
    """Return the real host and port of a listener; what was asked for where the loop has no sockets (simulations)."""
    sockets = getattr(server, "sockets", ())
    if not sockets:
        return host, port
    name = sockets[0].getsockname()
    return str(name[0]), int(name[1])


def format_peer(peername: Any) -> str:
    """Return the peer of a connection as ``ip:port``; ``@`` for a unix socket, which has no name."""
    if isinstance(peername, tuple) and len(peername) >= 2:
        return format_address(str(peername[0]), int(peername[1]))
    return "@"
