"""Finding nsqd through nsqlookupd.

Rules of this file:

- All nsqlookupd are asked at the same time and their answers are united by ``broadcast_address:tcp_port`` (seed 002).
- Every request has a deadline and a limit on the answer's size; the slowest nsqlookupd delays a poll by no more.
- What an nsqlookupd said last stands while it fails: its outage takes no nsqd away from us.
- An nsqlookupd at ``https://`` is verified as an nsqd is (:mod:`flintmq.client.security`).
- aiohttp is imported when the first lookup is made, not with this module; a simulation hands in its own ``fetch``.

Both answers are read: ``{"producers": [...]}`` and, from before NSQ 1.0, ``{"status_code": 200, "data": {...}}``.

Source: seed 002 "Discovery", reference/nsq.md 2.3, reference/youzan.md 1.1.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, urlsplit

import msgspec

from flintmq.client.options import ConnectionOptions, join_address
from flintmq.client.security import explain
from flintmq.errors import DiscoveryError, OptionError
from flintmq.net.tls_engine import reason_of

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("flintmq.client")

ANSWER_SIZE_MAX = 16 * 1024 * 1024
NODE_COUNT_MAX = 10_000
CONCURRENT_MAX = 16  # questions at a time; a producer may have thousands of topics to refresh
ANSWER_COUNT_MAX = 10_000  # remembered: one per nsqlookupd and topic; the one asked for longest ago goes first


class Node(msgspec.Struct, frozen=True):
    """An nsqd as nsqlookupd lists it."""

    broadcast_address: str
    tcp_port: int
    hostname: str = ""
    http_port: int = 0
    version: str = ""

    @property
    def address(self) -> str:
        """``host:port`` to connect to; the key of the union."""
        return join_address(self.broadcast_address, self.tcp_port)


class _Answer(msgspec.Struct):
    producers: list[Node] | None = None


class _Wrapped(msgspec.Struct):
    data: _Answer | None


class Fetch(Protocol):
    """Gets a URL: returns status and body, or raises OSError (or a subclass) when there is no answer."""

    def __call__(self, url: str, timeout_s: float) -> Awaitable[tuple[int, bytes]]: ...
    async def close(self) -> None: ...


class HttpFetch:
    """A :class:`Fetch` on aiohttp.

    Args:
        options: how ``https://`` is verified; the system's authorities and no client certificate if None.
    """

    def __init__(self, options: ConnectionOptions | None = None) -> None:
        self._options = options or ConnectionOptions()
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        import aiohttp  # 135 ms that only discovery has to pay for

        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"Accept": "application/vnd.nsq; version=1.0"})
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            tls = self._options.tls_context() if url.startswith("https://") else True
            async with self._session.get(url, timeout=timeout, ssl=tls) as response:
                body = await response.content.read(ANSWER_SIZE_MAX + 1)
                while len(body) <= ANSWER_SIZE_MAX and (more := await response.content.read(ANSWER_SIZE_MAX)):
                    body += more
                if len(body) > ANSWER_SIZE_MAX:
                    raise OSError(f"the answer is larger than {ANSWER_SIZE_MAX} bytes")
                return response.status, body
        except TimeoutError as error:
            raise OSError(f"no answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise OSError(self._tls_reason(url, error) or str(error) or type(error).__name__) from error
        except OptionError as error:  # a certificate's file that was there when the options were made
            raise OSError(str(error)) from error

    def _tls_reason(self, url: str, error: BaseException) -> str:
        """What TLS has against the server, or the server against us; empty when the error is another one."""
        # aiohttp's own are SSLErrors too, but without what OpenSSL said; that one is their cause
        found: BaseException | None = error
        while not (isinstance(found, ssl.SSLError) and getattr(found, "reason", None)):
            if found is None:
                return ""
            found = found.__cause__
        return explain(reason_of(found), urlsplit(url).hostname or "", self._options.shows_certificate)

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def parse_nodes(body: bytes) -> tuple[Node, ...]:
    """Read an answer of /lookup or /nodes in either form.

    Raises:
        DiscoveryError: it is neither.
    """
    try:
        wrapped = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if "data" in wrapped and "producers" not in wrapped:
            answer = msgspec.json.decode(body, type=_Wrapped).data or _Answer()
        else:
            answer = msgspec.json.decode(body, type=_Answer)
    except msgspec.MsgspecError as error:
        raise DiscoveryError(f"the answer cannot be read: {error}") from error
    return tuple(node for node in (answer.producers or [])[:NODE_COUNT_MAX] if node.broadcast_address and node.tcp_port)


class Lookup:
    """Several nsqlookupd as one.

    Args:
        addresses: ``http://host:port`` each.
        timeout_s: until an nsqlookupd must have answered.
        fetch: gets a URL; :class:`HttpFetch` if None.
    """

    def __init__(self, addresses: Iterable[str], timeout_s: float, fetch: Fetch | None = None) -> None:
        self.addresses = tuple(addresses)
        self._timeout_s = timeout_s
        self._fetch: Fetch = fetch or HttpFetch()
        self._known: dict[tuple[str, str], tuple[Node, ...]] = {}
        self._failing: dict[str, str] = {}
        self._turns = asyncio.Semaphore(CONCURRENT_MAX)

    async def close(self) -> None:
        """Close the connections."""
        await self._fetch.close()

    async def topic(self, topic: str) -> tuple[Node, ...]:
        """The nsqd that have a topic; empty when no nsqlookupd knows the topic.

        Raises:
            DiscoveryError: no nsqlookupd gave a usable answer.
        """
        return await self._ask_all(f"/lookup?topic={quote(topic, safe='')}")

    async def nodes(self) -> tuple[Node, ...]:
        """All nsqd.

        Raises:
            DiscoveryError: no nsqlookupd gave a usable answer.
        """
        return await self._ask_all("/nodes")

    async def _ask_all(self, path: str) -> tuple[Node, ...]:
        async with self._turns:
            answers = await asyncio.gather(*(self._ask(address, path) for address in self.addresses))
        if not any(answers):
            reasons = "; ".join(f"{address}: {self._failing.get(address)}" for address in self.addresses)
            raise DiscoveryError(f"no nsqlookupd answered {path}: {reasons}")
        union: dict[str, Node] = {}
        for address in self.addresses:
            for node in self._known.get((address, path), ()):
                union.setdefault(node.address, node)
        return tuple(union.values())

    async def _ask(self, address: str, path: str) -> bool:
        """Ask one nsqlookupd and keep its answer; False when it gave none."""
        try:
            status, body = await self._fetch(address + path, self._timeout_s)
            if status == 404 and path != "/nodes":
                nodes: tuple[Node, ...] = ()  # TOPIC_NOT_FOUND is an answer
            elif status == 200:
                nodes = parse_nodes(body)
            else:
                raise DiscoveryError(f"status {status}: {body[:100]!r}")
        except (OSError, DiscoveryError) as error:
            if address not in self._failing:
                log.warning("nsqlookupd %s is skipped: %s", address, error)
            self._failing[address] = str(error)
            return False
        if self._failing.pop(address, None) is not None:
            log.info("nsqlookupd %s answers again", address)
        self._known.pop((address, path), None)
        self._known[address, path] = nodes
        while len(self._known) > ANSWER_COUNT_MAX:
            del self._known[next(iter(self._known))]
        return True


class PollTimes:
    """When to ask the nsqlookupd again: every ``interval_s``, but soon and then less and less often after a loss.

    Pure. An nsqd that is lost and then leaves the lists would otherwise be found again an interval after its return.
    """

    def __init__(self, interval_s: float, jitter: float, soon_s: float = 2.0) -> None:
        self._interval_s = interval_s
        self._jitter = jitter
        self._soon_s = min(soon_s, interval_s)
        self._next_s = self._soon_s
        self._waiting_s = 0.0

    def hurry(self) -> bool:
        """Note that an nsqd was lost or a poll failed; True when the present wait should be cut short."""
        self._next_s = self._soon_s
        return self._waiting_s > self._soon_s

    def next_s(self, jittered: Callable[[float, float], float]) -> float:
        """Seconds until the next poll; ``jittered(interval_s, jitter)`` spreads them."""
        self._waiting_s = self._next_s
        self._next_s = min(self._interval_s, 2 * self._next_s)
        return jittered(self._waiting_s, self._jitter)
