"""Nsqd that would get again what is consumed from them, for ever: two addresses that lead to the same one.

Rules of this file: an address that cannot be resolved is compared as it is written; ``localhost``, ``127.0.0.1``,
``::1`` and an address of this machine are the same place with the same port. A way through a proxy, or over several
hosts that each publish to the next, is not found.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from flintmq.client.options import split_address
from flintmq.errors import FlintError

RESOLVE_S = 5.0
_LOOPBACK = "127.0.0.1"
_OURS = frozenset(("localhost", "", "0.0.0.0", "::", "::1"))
_HTTP_PORTS = {"http": 80, "https": 443}

Place = tuple[str, int]


class LoopFound(FlintError):
    """A destination is where its messages come from."""


def nsqd_place(address: str) -> Place:
    """Return where ``host:port`` is, however it is written.

    Raises:
        OptionError: it is no address.
    """
    host, port = split_address(address)
    return _plain(host), port


def lookup_place(address: str) -> Place:
    """Return where the nsqlookupd at ``host:port`` or a URL is, however it is written."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    return _plain(parts.hostname or ""), parts.port or _HTTP_PORTS.get(parts.scheme, 0)


def _plain(host: str) -> str:
    host = host.lower().removesuffix(".")
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        host = str(getattr(found, "ipv4_mapped", None) or found)
    return _LOOPBACK if host in _OURS else host


class LoopGuard:
    """Compares the nsqd that are consumed from with those that are published to, each pair once."""

    def __init__(self) -> None:
        self._compared: set[tuple[str, str]] = set()
        self._resolved: dict[str, frozenset[Place]] = {}

    async def check(self, sources: Collection[str], destinations: Iterable[str]) -> None:
        """Look whether one of the first is one of the second; both are ``host:port``.

        Raises:
            LoopFound: one is.
        """
        for destination in destinations:
            for source in sources:
                if (source, destination) in self._compared:
                    continue
                if _are_same(await self._places(source), await self._places(destination)):
                    named = source if source == destination else f"{source}, which is {destination},"
                    raise LoopFound(f"nsqd {named} would get again what is consumed from it, for ever")
                self._compared.add((source, destination))

    async def _places(self, address: str) -> frozenset[Place]:
        if address not in self._resolved:
            host, port = nsqd_place(address)
            hosts = [host]
            try:
                async with asyncio.timeout(RESOLVE_S):
                    rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                hosts += [_plain(str(row[4][0])) for row in rows]
            except (OSError, TimeoutError):  # who consumes from it, or publishes there, says so
                pass
            self._resolved[address] = frozenset((each, port) for each in hosts)
        return self._resolved[address]


def _are_same(some: frozenset[Place], others: frozenset[Place]) -> bool:
    if some & others:
        return True
    for these, those in ((some, others), (others, some)):
        for host, port in these:
            if host == _LOOPBACK and any(port == other[1] and _is_here(other[0]) for other in those):
                return True
    return False


def _is_here(host: str) -> bool:
    """Whether it is an address of this machine; others of its loopback are places of their own."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    if found.is_loopback:
        return False
    try:
        with socket.socket(socket.AF_INET if found.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
