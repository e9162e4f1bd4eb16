"""Discovery nsqd through nsqlookupd, on asyncio: questions are asked, their answers awaited.

Rules of this file:

- All nsqlookupd are asked at the same time, at most ``CONCURRENT_MAX`` questions at once.
- A question is over when all have answered or failed; or ``PATIENCE_S`` after the first answer, or with it when only
  those are missing that failed or hung the last time.
- Each request has a deadline, and goes on when its question is over: what comes late is kept for the next question, and
  told. The same thing is never asked twice at a time, and one that answers nothing is not asked more than
  ``UNANSWERED_MAX`` things.
- Now and then each is first asked which nsqlookupd there are (``listlookup``); those that are new are asked as well.
- What is asked, and what is read out of answers: :mod:`flintmq.client.core.discovery`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from functools import partial
from typing import Any, Protocol

from flintmq.client.aio.http import HttpFetch
from flintmq.client.core.discovery import (
    CONCURRENT_MAX,
    LIST_PATH,
    NODES_PATH,
    PATIENCE_S,
    Answers,
    Directory,
    topic_path,
)
from flintmq.client.core.topology import Node, Topology

UNANSWERED_MAX = 2 * CONCURRENT_MAX


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
        access, names_logs: as for :func:`topic_path`.
        came_late: told of a topic when one has answered after the question for it was over: see :meth:`known`.
    """

    def __init__(
        self,
        seeds: Iterable[str],
        timeout_s: float,
        fetch: Fetch | None = None,
        access: str = "r",
        names_logs: bool = False,
        came_late: Callable[[str], object] | None = None,
    ) -> None:
        self._directory = Directory(seeds)
        self._timeout_s = timeout_s
        self._fetch: Fetch = fetch or HttpFetch()
        self._access = access
        self._names_logs = names_logs
        self._came_late = came_late
        self._answers = Answers(self._directory.addresses)
        self._turns = asyncio.Semaphore(CONCURRENT_MAX)
        self._asking: dict[tuple[str, str], asyncio.Task[bool]] = {}  # by address and path
        self._open: dict[_Question, None] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """The nsqlookupd that are asked: the seeds, and those they list."""
        return self._directory.addresses

    @property
    def unanswered(self) -> tuple[str, ...]:
        """The nsqlookupd that are being asked and have not answered yet."""
        return tuple(dict.fromkeys(address for address, _ in self._asking))

    async def close(self) -> None:
        """Ask no more, and close the connections."""
        tasks = [*self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fetch.close()

    async def topic(self, topic: str, distrusted: Collection[tuple[int, str]] = ()) -> Topology:
        """Return where a topic is.

        Args:
            distrusted: (partition, address) that have been found wrong; believed only if nobody says anything else.

        Raises:
            DiscoveryError: no nsqlookupd gave a usable answer.
        """
        await self._ask_all(self._path(topic), topic)
        return self.known(topic, distrusted)

    def known(self, topic: str, distrusted: Collection[tuple[int, str]] = ()) -> Topology:
        """Return where a topic is by what was said last, without asking; ``distrusted`` as for :meth:`topic`."""
        return self._answers.topology(self._path(topic), distrusted)

    async def nodes(self) -> tuple[Node, ...]:
        """All nsqd.

        Raises:
            DiscoveryError: no nsqlookupd gave a usable answer.
        """
        await self._ask_all(NODES_PATH)
        return self._answers.union(NODES_PATH)

    def _path(self, topic: str) -> str:
        return topic_path(topic, self._access, self._names_logs)

    # --- a question ---

    async def _ask_all(self, path: str, topic: str = "") -> None:
        """Ask all of them, until enough have answered."""
        async with self._turns:
            question = _Question(path, topic)
            self._open[question] = None
            try:
                first, last = self._directory.due()
                self._ask_lists()
                for group in (first, last):
                    self._ask_these(question, group)
                    if await self._is_answered(question):
                        return
            finally:
                del self._open[question]
        raise self._answers.no_answer(path)

    async def _is_answered(self, question: _Question) -> bool:
        """Wait until all have answered or failed; once one has answered, not for long. False: none has."""
        loop = asyncio.get_running_loop()
        is_answered = False
        until: float | None = None
        while question.missing and not (is_answered and all(map(self._answers.is_failing, question.missing))):
            left_s = None if until is None else until - loop.time()
            if left_s is not None and left_s <= 0:
                break
            await asyncio.wait(question.missing.values(), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for address, task in [*question.missing.items()]:
                if task.done():
                    del question.missing[address]
                    is_answered |= not task.cancelled() and task.result()
            if is_answered and until is None:
                until = loop.time() + min(PATIENCE_S, self._timeout_s)
        for address in question.missing:
            if not self._answers.is_failing(address):
                self._answers.note_slow(address)
        return is_answered

    def _ask_these(self, question: _Question, addresses: Iterable[str]) -> None:
        for address in addresses:
            key = address, question.path
            if key not in self._asking:
                if sum(asked == address for asked, _ in self._asking) >= UNANSWERED_MAX:
                    continue
                self._ask(key, self._answer(*key), partial(self._tell_late, key, question.topic))
            question.missing[address] = self._asking[key]

    def _ask(
        self, key: tuple[str, str], work: Coroutine[Any, Any, bool], answered: Callable[[asyncio.Task[bool]], object]
    ) -> None:
        """Ask one thing of one nsqlookupd."""
        task = self._asking[key] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._asking.pop(key))
        task.add_done_callback(answered)

    async def _answer(self, address: str, path: str) -> bool:
        """Ask one nsqlookupd and keep its answer; False when it gave none."""
        listing = self._asking.get((address, LIST_PATH))
        if listing is not None and not await asyncio.shield(listing):
            return False
        try:
            status, body = await self._fetch(address + path, self._timeout_s)
        except Exception as error:  # noqa: BLE001 - what is a mistake is told, and concerns this answer alone
            has_answered = self._answers.note_failure(address, error)
        else:
            has_answered = self._answers.note(address, path, status, body)
        self._directory.note(address, has_answered)
        return has_answered

    def _tell_late(self, key: tuple[str, str], topic: str, task: asyncio.Task[bool]) -> None:
        """Tell of an answer for which nobody waits any more."""
        if self._came_late is None or not topic or task.cancelled() or not task.result():
            return
        address, path = key
        if not any(question.path == path and address in question.missing for question in self._open):
            self._came_late(topic)

    # --- which nsqlookupd there are ---

    def _ask_lists(self) -> None:
        """Ask which nsqlookupd there are, if it was not asked for long."""
        for address in self._directory.lists_due(asyncio.get_running_loop().time()):
            key = address, LIST_PATH
            if key not in self._asking:
                self._ask(key, self._answer_list(address), self._take_lists)

    async def _answer_list(self, address: str) -> bool:
        """Ask one which others there are; False when it gave no answer at all."""
        try:
            status, body = await self._fetch(address + LIST_PATH, self._timeout_s)
        except Exception as error:  # noqa: BLE001 - likewise
            self._directory.note(address, self._answers.note_failure(address, error))
            return False
        self._directory.note_list(address, status, body, asyncio.get_running_loop().time())
        return True

    def _take_lists(self, task: asyncio.Task[bool]) -> None:
        """Go by the lists when the last one of them is there; who is new is asked what is open."""
        if task.cancelled() or any(path == LIST_PATH for _, path in self._asking):
            return
        former = self._directory.addresses
        self._directory.take_lists()
        self._answers.addresses = self._directory.addresses
        new = [each for each in self._directory.addresses if each not in former]
        asyncio.get_running_loop().call_soon(self._ask_new, new)  # behind those that have listed them

    def _ask_new(self, addresses: list[str]) -> None:
        for question in self._open:
            self._ask_these(question, addresses)


class _Question:
    """A question to all nsqlookupd.

    Attributes:
        topic: that it is about; empty: none.
        missing: who has neither answered nor failed.
    """

    __slots__ = ("path", "topic", "missing")

    def __init__(self, path: str, topic: str) -> None:
        self.path = path
        self.topic = topic
        self.missing: dict[str, asyncio.Task[bool]] = {}
