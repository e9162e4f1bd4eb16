"""Finding nsqd through nsqlookupd.

Rules of this file:

- Which nsqlookupd there are is asked first (``listlookup``); the configured ones stay whatever they say. NSQ's own
  answers 404 and is asked that rarely.
- All nsqlookupd are asked at the same time and their answers are united (:mod:`flintmq.client.core.topology`).
- Every request has a deadline and a limit on the answer's size; the slowest nsqlookupd delays a poll by no more.
- One that fails again and again is asked last (:class:`Directory`).
- What an nsqlookupd said last stands while it fails: its outage takes no nsqd away from us.
- An nsqlookupd at ``https://`` is verified as an nsqd is (:mod:`flintmq.client.security`).
- aiohttp is imported when the first lookup is made, not with this module; a simulation hands in its own ``fetch``.

Source: seed 002 "Discovery", seed 000 "Nsqd discovery service", reference/nsq.md 2.3, reference/youzan.md 1.1 and 1.8.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, urlsplit

from flintmq.client.core.topology import Node, Remembered, Topology, parse_answer, parse_members, parse_nodes, unite
from flintmq.client.options import NSQLOOKUPD_COUNT_MAX, ConnectionOptions, why_unreachable
from flintmq.client.security import explain
from flintmq.errors import DiscoveryError, OptionError
from flintmq.net.tls_engine import reason_of

if TYPE_CHECKING:
    import aiohttp

__all__ = [
    "Answers", "Directory", "Fetch", "HttpFetch", "Lookup", "Node", "PollTimes", "Topology", "parse_nodes",
    "topic_path",
]  # fmt: skip

log = logging.getLogger("flintmq.client")

ANSWER_SIZE_MAX = 16 * 1024 * 1024
CONCURRENT_MAX = 16  # questions at a time; a producer may have thousands of topics to refresh
NODES_PATH = "/nodes"
LIST_PATH = "/listlookup"
LISTS_INTERVAL_S = 60.0
NO_LIST_S = 600.0  # until one that knows no listlookup is asked for it again: it may have been replaced
DEMOTED_AFTER = 4
DEMOTED_EVERY = 4
ANSWER_COUNT_MAX = 10_000  # remembered: one per nsqlookupd and topic; the one asked for longest ago goes first


class Fetch(Protocol):
    """Gets a URL: returns status and body, or raises OSError (or a subclass) when there is no answer."""

    def __call__(self, url: str, timeout_s: float) -> Awaitable[tuple[int, bytes]]: ...
    async def close(self) -> None: ...


class HttpFetch:
    """A :class:`Fetch` on aiohttp.

    Args:
        options: how ``https://`` is verified; the system's authorities and no client certificate if None.
        keeps_connections: False: each request has its own, so that none meets one that the server has just closed.
    """

    def __init__(self, options: ConnectionOptions | None = None, keeps_connections: bool = True) -> None:
        self._options = options or ConnectionOptions()
        self._keeps_connections = keeps_connections
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        return await self.ask("GET", url, timeout_s)

    async def ask(self, method: str, url: str, timeout_s: float, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and body of the answer to a request.

        Raises:
            OSError: there is none in time, or none that can be read.
        """
        import aiohttp  # 135 ms that only discovery has to pay for

        if self._session is None:
            connector = aiohttp.TCPConnector(force_close=not self._keeps_connections)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._options.lookup_headers())
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            tls = self._options.tls_context() if url.startswith("https://") else True
            async with self._session.request(
                method, url, data=body or None, timeout=timeout, ssl=tls, allow_redirects=False
            ) as response:
                answer = await response.content.read(ANSWER_SIZE_MAX + 1)
                while len(answer) <= ANSWER_SIZE_MAX and (more := await response.content.read(ANSWER_SIZE_MAX)):
                    answer += more
                if len(answer) > ANSWER_SIZE_MAX:
                    raise OSError(f"the answer is larger than {ANSWER_SIZE_MAX} bytes")
                return response.status, answer
        except TimeoutError as error:
            raise OSError(f"no answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            reason = self._tls_reason(url, error)
            if not reason and isinstance(error, aiohttp.ClientConnectorError):
                reason = f"cannot connect to {error.host}:{error.port}: {why_unreachable(error.os_error)}"
            raise OSError(reason or str(error) or type(error).__name__) from error
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


class Answers:
    """What several nsqlookupd said last. Pure: whoever asks them does the IO and the waiting.

    Args:
        addresses: ``http://host:port`` each; may be replaced by others at any time.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self.addresses = tuple(addresses)
        self._known: dict[tuple[str, str], Remembered] = {}
        self._failing: dict[str, str] = {}
        self._count = 0

    def note(self, address: str, path: str, status: int, body: bytes) -> bool:
        """Keep an answer; False when it is none that can be used."""
        try:
            answer = parse_answer(status, body, is_topic=path != NODES_PATH)
        except DiscoveryError as error:
            return self.note_failure(address, error)
        if self._failing.pop(address, None) is not None:
            log.info("nsqlookupd %s answers again", address)
        self._count += 1
        remembered = self._known.pop((address, path), None)
        if remembered is None:
            remembered = Remembered(answer)
        else:
            remembered.follow(answer, self._count)
        self._known[address, path] = remembered
        while len(self._known) > ANSWER_COUNT_MAX:
            del self._known[next(iter(self._known))]
        return True

    def note_failure(self, address: str, error: Exception) -> bool:
        """Note that there was no answer; False. What was said before stands."""
        if address not in self._failing:
            log.warning("nsqlookupd %s is skipped: %s", address, error)
        while len(self._failing) > ANSWER_COUNT_MAX:
            del self._failing[next(iter(self._failing))]
        self._failing[address] = str(error)
        return False

    def is_failing(self, address: str) -> bool:
        """Whether there was no answer the last time."""
        return address in self._failing

    def union(self, path: str) -> tuple[Node, ...]:
        """What all of them list together."""
        return self.topology(path).nodes

    def topology(self, path: str, distrusted: Collection[tuple[int, str]] = ()) -> Topology:
        """One picture from what all of them said; ``distrusted`` as for :func:`unite`."""
        known = []
        for address in self.addresses:
            if (remembered := self._known.get((address, path))) is not None:
                remembered.is_fresh = address not in self._failing
                known.append(remembered)
        return unite(known, distrusted)

    def no_answer(self, path: str) -> DiscoveryError:
        """The exception for a question that none of them answered."""
        reasons = "; ".join(f"{address}: {self._failing.get(address)}" for address in self.addresses)
        return DiscoveryError(f"no nsqlookupd answered {path}: {reasons}")


class Directory:
    """Which nsqlookupd there are, and which of them are asked next. Pure.

    One that failed ``DEMOTED_AFTER`` times on end is asked last: every ``DEMOTED_EVERY``-th time, or when no other
    answers. Its first answer gives it its place back.

    Args:
        seeds: the configured ones, which stay whatever others say.
    """

    def __init__(self, seeds: Iterable[str]) -> None:
        self._seeds = tuple(seeds)
        self._lists: dict[str, tuple[str, ...]] = {}
        self._fresh_lists: dict[str, tuple[str, ...]] = {}
        self._failures: dict[str, int] = {}
        self._count = 0
        self.addresses = self._seeds

    def note(self, address: str, has_answered: bool) -> None:
        """Note whether one answered."""
        if has_answered:
            self._failures.pop(address, None)
        else:
            self._failures[address] = self._failures.get(address, 0) + 1

    def note_list(self, address: str, members: tuple[str, ...]) -> None:
        """Note what one answered to listlookup; nothing: it knows of no others."""
        if members:
            self._fresh_lists[address] = members

    def take_lists(self) -> None:
        """Go by the lists that came since the last time; without any, the former ones stand."""
        if self._fresh_lists:
            self._lists, self._fresh_lists = self._fresh_lists, {}
        listed = (member for members in self._lists.values() for member in members)
        self.addresses = tuple(dict.fromkeys((*self._seeds, *listed)))[:NSQLOOKUPD_COUNT_MAX]
        self._failures = {address: self._failures[address] for address in self.addresses if address in self._failures}

    def due(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Whom to ask now, and whom only if none of those answers."""
        self._count += 1
        first = [each for each in self.addresses if self._failures.get(each, 0) < DEMOTED_AFTER]
        last = tuple(each for each in self.addresses if each not in first)
        if not first or self._count % DEMOTED_EVERY == 0:
            return (*first, *last), ()
        return tuple(first), last


def topic_path(topic: str, access: str = "") -> str:
    """What is asked for a topic's nsqd.

    Args:
        access: ``r`` for those that can be read from, ``w`` for those that can be written to; with the topic's
            metadata. NSQ's own nsqlookupd looks at neither.
    """
    path = f"/lookup?topic={quote(topic, safe='')}"
    return f"{path}&access={access}&metainfo=true" if access else path


class Lookup:
    """Several nsqlookupd as one.

    Args:
        seeds: ``http://host:port`` each.
        timeout_s: until an nsqlookupd must have answered.
        fetch: gets a URL; :class:`HttpFetch` if None.
        access: as for :func:`topic_path`.
    """

    def __init__(self, seeds: Iterable[str], timeout_s: float, fetch: Fetch | None = None, access: str = "r") -> None:
        import asyncio  # the blocking clients use only what stands above

        self._directory = Directory(seeds)
        self._timeout_s = timeout_s
        self._fetch: Fetch = fetch or HttpFetch()
        self._access = access
        self._answers = Answers(self._directory.addresses)
        self._turns = asyncio.Semaphore(CONCURRENT_MAX)
        self._lists_at = 0.0
        self._without_list_until: dict[str, float] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """The nsqlookupd that are asked: the seeds, and those they list."""
        return self._directory.addresses

    async def close(self) -> None:
        """Close the connections."""
        await self._fetch.close()

    async def topic(self, topic: str, distrusted: Collection[tuple[int, str]] = ()) -> Topology:
        """Where a topic is.

        Args:
            distrusted: (partition, address) that have been found wrong; believed only if nobody says anything else.

        Raises:
            DiscoveryError: no nsqlookupd gave a usable answer.
        """
        path = topic_path(topic, self._access)
        await self._ask_all(path)
        return self._answers.topology(path, distrusted)

    async def nodes(self) -> tuple[Node, ...]:
        """All nsqd.

        Raises:
            DiscoveryError: no nsqlookupd gave a usable answer.
        """
        await self._ask_all(NODES_PATH)
        return self._answers.union(NODES_PATH)

    async def _ask_all(self, path: str) -> None:
        import asyncio

        async with self._turns:
            silent = await self._refresh_lists()
            for group in self._directory.due():
                asked = [address for address in group if address not in silent]
                if any(await asyncio.gather(*(self._ask(address, path) for address in asked))):
                    return
        raise self._answers.no_answer(path)

    async def _ask(self, address: str, path: str) -> bool:
        """Ask one nsqlookupd and keep its answer; False when it gave none."""
        try:
            status, body = await self._fetch(address + path, self._timeout_s)
        except OSError as error:
            has_answered = self._answers.note_failure(address, error)
        else:
            has_answered = self._answers.note(address, path, status, body)
        self._directory.note(address, has_answered)
        return has_answered

    async def _refresh_lists(self) -> frozenset[str]:
        """Ask which nsqlookupd there are, if it was not asked for long; returns those that gave no answer at all."""
        import asyncio

        now = asyncio.get_running_loop().time()
        if now < self._lists_at:
            return frozenset()
        self._lists_at = now + LISTS_INTERVAL_S
        asked = [each for each in self._directory.addresses if self._without_list_until.get(each, now) <= now]
        answers = await asyncio.gather(*(self._ask_list(address) for address in asked))
        self._directory.take_lists()
        known = self._directory.addresses
        self._without_list_until = {each: at for each, at in self._without_list_until.items() if each in known}
        self._answers.addresses = self._directory.addresses
        return frozenset(address for address, answered in zip(asked, answers, strict=True) if not answered)

    async def _ask_list(self, address: str) -> bool:
        try:
            status, body = await self._fetch(address + LIST_PATH, self._timeout_s)
        except OSError as error:
            self._directory.note(address, self._answers.note_failure(address, error))
            return False
        members = parse_members(body, urlsplit(address).scheme) if status == 200 else ()
        self._directory.note_list(address, members)
        if not members:  # NSQ's own, which answers 404
            import asyncio

            self._without_list_until[address] = asyncio.get_running_loop().time() + NO_LIST_S
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

    def limit(self, interval_s: float, soon_s: float) -> None:
        """Wait no longer than this from now on: between two polls, and after a loss."""
        self._interval_s = min(self._interval_s, interval_s)
        self._soon_s = min(self._soon_s, soon_s)
        self._next_s = min(self._next_s, self._interval_s)

    def hurry(self) -> bool:
        """Note that an nsqd was lost or a poll failed; True when the present wait should be cut short."""
        self._next_s = self._soon_s
        return self._waiting_s > self._soon_s

    def next_s(self, jittered: Callable[[float, float], float]) -> float:
        """Seconds until the next poll; ``jittered(interval_s, jitter)`` spreads them."""
        self._waiting_s = self._next_s
        self._next_s = min(self._interval_s, 2 * self._next_s)
        return jittered(self._waiting_s, self._jitter)
