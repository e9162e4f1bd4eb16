"""Nsqd that would get again what is consumed from them, for ever: two ways that lead to the same one.

Rules of this file: an address that is the same when written plainly is the same nsqd. Otherwise FlintMQ's nsqd are
told apart by what each answers to IDENTIFY, whatever lies between. Where neither of two says who it is (NSQ's), their
addresses are compared: as names are resolved now and again, and an address of this machine is its loopback with the
same port. Nobody waits for the name server but for the first answer about a name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection
from time import monotonic
from urllib.parse import urlsplit

from flintmq.client.aio.peers import Peer
from flintmq.client.options import split_address
from flintmq.errors import FlintError

RESOLVE_S = 5.0
KNOWN_S = 60.0
"""An answer of the name server, or that there was none, holds so long."""
_LOOPBACK = "127.0.0.1"
_OURS = frozenset(("localhost", "", "0.0.0.0", "::", "::1"))
_HTTP_PORTS = {"http": 80, "https": 443}
_PAIRS_MAX = 10_000

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


def lookup_place(address: str) -> tuple[str, int, str]:
    """Return where the nsqlookupd at ``host:port`` or a URL is, and at which path, however it is written."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    path = parts.path.rstrip("/").removesuffix("/lookup")  # as the client cuts it
    return _plain(parts.hostname or ""), parts.port or _HTTP_PORTS.get(parts.scheme, 0), path


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
    """Compares the nsqd that are consumed from with those that are published to, each pair now and again."""

    def __init__(self) -> None:
        self._compared: dict[tuple[Peer, Peer], float] = {}  # until when that holds
        self._resolved: dict[str, tuple[frozenset[Place], float]] = {}  # likewise
        self._resolving: dict[str, asyncio.Task[None]] = {}

    async def check(self, sources: Collection[Peer], destinations: Collection[Peer]) -> None:
        """Look whether one of the first is one of the second.

        Raises:
            LoopFound: one is.
        """
        now = monotonic()
        for destination in destinations:
            for source in sources:
                if self._compared.get((source, destination), 0.0) > now:
                    continue
                if await self._is_one(source, destination):
                    named = source.address
                    if named != destination.address:
                        named = f"{named}, which is {destination.address},"
                    raise LoopFound(f"nsqd {named} would get again what is consumed from it, for ever")
                if len(self._compared) > _PAIRS_MAX:  # nsqd that have gone, or were started again
                    self._compared.clear()
                self._compared[source, destination] = now + KNOWN_S

    async def _is_one(self, source: Peer, destination: Peer) -> bool:
        if nsqd_place(source.address) == nsqd_place(destination.address):
            return True
        if source.run_id or destination.run_id:
            return source.run_id == destination.run_id
        return _are_same(await self._places(source.address), await self._places(destination.address))

    async def _places(self, address: str) -> frozenset[Place]:
        if address not in self._resolved:
            await self._resolve(address)
        places, until = self._resolved[address]
        if until <= monotonic() and address not in self._resolving:
            task = asyncio.get_running_loop().create_task(self._resolve(address))
            self._resolving[address] = task
            task.add_done_callback(lambda _: self._resolving.pop(address))
        return places

    async def _resolve(self, address: str) -> None:
        host, port = nsqd_place(address)
        before, _ = self._resolved.get(address, (frozenset(), 0.0))
        places = before | {(host, port)}
        try:
            async with asyncio.timeout(RESOLVE_S):
                rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            places = frozenset([(host, port), *((_plain(str(row[4][0])), port) for row in rows)])
        except (OSError, TimeoutError, UnicodeError):  # who consumes from it, or publishes there, says so
            pass
        self._resolved[address] = places, monotonic() + KNOWN_S
        if places != before:
            self._compared = {pair: until for pair, until in self._compared.items() if not _names(pair, address)}


def _names(pair: tuple[Peer, Peer], address: str) -> bool:
    return any(peer.address == address for peer in pair)


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
