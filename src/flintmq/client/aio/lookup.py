"""Discovery nsqd through nsqlookupd, on asyncio: questions are asked, their answers awaited.

Rules of this file:

- All nsqlookupd are asked at the same time, at most ``CONCURRENT_MAX`` questions at once.
- Every request has a deadline; the slowest nsqlookupd delays a poll by no more.
- What is asked, and what is read out of answers: :mod:`flintmq.client.core.discovery`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable
from typing import Protocol

from flintmq.client.aio.http import HttpFetch
from flintmq.client.core.discovery import CONCURRENT_MAX, LIST_PATH, NODES_PATH, Answers, Directory, topic_path
from flintmq.client.core.topology import Node, Topology


class Fetch(Protocol):
    """Gets a URL: returns status and body, or raises OSError (or a subclass) when there is no answer."""

    def __call__(self, url: str, timeout_s: float) -> Awaitable[tuple[int, bytes]]: ...
    async def close(self) -> None: ...


class Lookup:
    """Several nsqlookupd as one.

    Args:
        seeds: ``http://host:port`` each.
        timeout_s: until an nsqlookupd must have answered.
        fetch: gets a URL; :class:`HttpFetch` if None.
        access, is_counted: as for :func:`topic_path`.
    """

    def __init__(
        self,
        seeds: Iterable[str],
        timeout_s: float,
        fetch: Fetch | None = None,
        access: str = "r",
        is_counted: bool = False,
    ) -> None:
        self._directory = Directory(seeds)
        self._timeout_s = timeout_s
        self._fetch: Fetch = fetch or HttpFetch()
        self._access = access
        self._is_counted = is_counted
        self._answers = Answers(self._directory.addresses)
        self._turns = asyncio.Semaphore(CONCURRENT_MAX)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The nsqlookupd that are asked: the seeds, and those they list."""
        return self._directory.addresses

    async def close(self) -> None:
        """Close the connections."""
        await self._fetch.close()

    async def topic(self, topic: str, distrusted: Collection[tuple[int, str]] = ()) -> Topology:
        """Return where a topic is.

        Args:
            distrusted: (partition, address) that have been found wrong; believed only if nobody says anything else.

        Raises:
            DiscoveryError: no nsqlookupd gave a usable answer.
        """
        path = topic_path(topic, self._access, self._is_counted)
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
        except Exception as error:  # noqa: BLE001 - what is a mistake is told, and concerns this answer alone
            has_answered = self._answers.note_failure(address, error)
        else:
            has_answered = self._answers.note(address, path, status, body)
        self._directory.note(address, has_answered)
        return has_answered

    async def _refresh_lists(self) -> frozenset[str]:
        """Ask which nsqlookupd there are, if it was not asked for long; returns those that gave no answer at all."""
        asked = self._directory.lists_due(asyncio.get_running_loop().time())
        if not asked:
            return frozenset()
        answers = await asyncio.gather(*(self._ask_list(address) for address in asked))
        self._directory.take_lists()
        self._answers.addresses = self._directory.addresses
        return frozenset(address for address, answered in zip(asked, answers, strict=True) if not answered)

    async def _ask_list(self, address: str) -> bool:
        try:
            status, body = await self._fetch(address + LIST_PATH, self._timeout_s)
        except Exception as error:  # noqa: BLE001 - likewise
            self._directory.note(address, self._answers.note_failure(address, error))
            return False
        self._directory.note_list(address, status, body, asyncio.get_running_loop().time())
        return True
