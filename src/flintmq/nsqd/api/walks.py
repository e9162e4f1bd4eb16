"""Requests that may look at all topics: one at a time, each client's address in its turn, equal ones together.

::

    address 1:  /stats  /stats?topic=a  /metrics      the next walk: the first in the line of the next address; it
    address 2:  /stats                                answers everybody who has asked for the same before it began

So a hundred requests of one client keep another's waiting for one of them, and a dashboard that a hundred people look
at costs as much as one does.

Rules of this file: the answer to such a request depends on its path and its query alone; a walk begins after the
requests that it answers; no two large answers are written in one turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from flintmq.net.http_messages import Request
from flintmq.nsqd.in_turns import rest

Question = tuple[bytes, bytes]


@dataclass(slots=True, eq=False)
class _Walk:
    """One look at the topics, and who waits for its answer.

    Attributes:
        begin: a coroutine function that answers ``request``.
        addresses: the hosts in whose lines it stands.
        waiting: of each request that it answers, and that is still there.
    """

    question: Question
    begin: Callable[[Request], Awaitable[Any]]
    request: Request
    addresses: set[str] = field(default_factory=set)
    waiting: dict[asyncio.Future[Any], None] = field(default_factory=dict)


class Walks:
    """The lines of one nsqd."""

    def __init__(self) -> None:
        self._asked: dict[Question, _Walk] = {}  # and not begun
        self._lines: dict[str, deque[_Walk]] = {}  # by address, in the order of their turns
        self._serving: asyncio.Task[None] | None = None

    async def answer(self, begin: Callable[[Request], Awaitable[Any]], request: Request) -> Any:
        """Return what ``begin`` answers to a request like this one, when its turn has come.

        Raises:
            Exception: what ``begin`` raises.
        """
        loop = asyncio.get_running_loop()
        question = request.path_bytes, request.query_bytes
        walk = self._asked.get(question)
        if walk is None:
            walk = self._asked[question] = _Walk(question, begin, request)
            if self._serving is None:
                self._serving = loop.create_task(self._serve())
        address = request.remote_address.rpartition(":")[0]
        if address not in walk.addresses:
            walk.addresses.add(address)
            self._lines.setdefault(address, deque()).append(walk)
        answered = loop.create_future()
        walk.waiting[answered] = None
        try:
            return await answered
        finally:
            del walk.waiting[answered]

    async def _serve(self) -> None:
        try:
            while self._lines:
                address = next(iter(self._lines))
                line = self._lines.pop(address)
                walk = line.popleft()
                if line:
                    self._lines[address] = line  # behind the others
                if self._asked.get(walk.question) is walk:  # it has not begun in the line of another address
                    del self._asked[walk.question]
                    await _answer(walk)
        finally:
            self._serving = None


async def _answer(walk: _Walk) -> None:
    if not walk.waiting:
        return  # they have gone
    answer = failure = None
    try:
        answer = await walk.begin(walk.request)
    except Exception as error:  # noqa: BLE001 - raised where it is waited for
        failure = error
    for number, answered in enumerate(list(walk.waiting)):
        if number:
            await rest()
        if answered.done():
            continue  # cancelled
        if failure is None:
            answered.set_result(answer)
        else:
            answered.set_exception(failure)
