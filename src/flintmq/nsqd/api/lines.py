"""Requests that cost much: one of a kind at a time, each client's address in its turn.

::

    address 1:  /stats  /stats?topic=a  /metrics    the next look: the first in the line of the next address; it
    address 2:  /stats                              answers everybody who has asked for the same before it began

So a hundred requests of one client keep another's waiting for one of them, and a dashboard that a hundred people look
at costs as much as one does.

Those that may look at all topics stand in one line. Those for messages, whose answers may be large, stand in another,
where none is answered while the output that clients have not read takes all of its share of memory: those who do not
read are closed for it in the end (:mod:`flintmq.budget`).

Rules of this file: the answer to such a request depends on its path and its query alone; a look begins after the
requests that it answers; no two answers are written in one turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import iscoroutine
from typing import Any

from flintmq.budget import Budget
from flintmq.net.http_messages import Request
from flintmq.net.tasks import tell
from flintmq.nsqd.in_turns import rest

Question = tuple[bytes, bytes]

_LOOK_AGAIN_S = 0.02  # for memory


@dataclass(slots=True, eq=False)
class _Look:
    """One answer that is to be made, and who waits for it.

    Attributes:
        begin: answers ``request``; or a coroutine function that does.
        addresses: the hosts in whose lines it stands.
        waiting: of each request that it answers, and that is still there.
    """

    question: Question
    begin: Callable[[Request], Any]
    request: Request
    addresses: set[str] = field(default_factory=set)
    waiting: dict[asyncio.Future[Any], None] = field(default_factory=dict)


class Lines:
    """The lines of one kind of them.

    Args:
        budget: counts the output that clients have not read; None: nobody waits for memory.
        schedule: ends the turn soon, so that those who do not read are looked at.
    """

    def __init__(self, budget: Budget | None = None, schedule: Callable[[], None] = lambda: None) -> None:
        self._budget = Budget() if budget is None else budget
        self._schedule = schedule
        self._asked: dict[Question, _Look] = {}  # and not begun
        self._lines: dict[str, deque[_Look]] = {}  # by address, in the order of their turns
        self._serving: asyncio.Task[None] | None = None

    async def answer(self, begin: Callable[[Request], Any], request: Request) -> Any:
        """Return what ``begin`` answers to a request like this one, when its turn has come.

        Raises:
            Exception: what ``begin`` raises.
        """
        loop = asyncio.get_running_loop()
        question = request.path_bytes, request.query_bytes
        look = self._asked.get(question)
        if look is None:
            look = self._asked[question] = _Look(question, begin, request)
        address = request.remote_address.rpartition(":")[0]
        if address not in look.addresses:
            look.addresses.add(address)
            self._lines.setdefault(address, deque()).append(look)
        answered = loop.create_future()
        look.waiting[answered] = None
        if self._serving is None:
            self._serving = loop.create_task(self._serve())
            self._serving.add_done_callback(tell("answering those who stand in line"))
        try:
            return await answered
        finally:
            del look.waiting[answered]

    def look_at_output(self, _now_s: float) -> None:
        """Do nothing: the line looks for memory by itself."""

    async def _serve(self) -> None:
        try:
            while self._lines:
                address = next(iter(self._lines))
                line = self._lines.pop(address)
                look = line.popleft()
                if line:
                    self._lines[address] = line  # behind the others
                if self._asked.get(look.question) is not look:
                    continue  # it has begun in the line of another address
                await self._memory()
                del self._asked[look.question]
                if look.waiting:  # they may have gone
                    await self._answer(look)
        finally:
            self._serving = None

    async def _answer(self, look: _Look) -> None:
        answer = failure = None
        try:
            answer = look.begin(look.request)
            if iscoroutine(answer):
                answer = await answer
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            failure = error
        for answered in list(look.waiting):
            await self._memory()
            if answered.done():
                continue  # cancelled
            if failure is None:
                answered.set_result(answer)
            else:
                answered.set_exception(failure)
            await rest()

    async def _memory(self) -> None:
        """Wait until there is memory for an answer."""
        while self._budget.is_full:
            self._budget.newcomers[self] = None  # it waits and reads, so that others are closed that do not read
            self._schedule()
            await asyncio.sleep(_LOOK_AGAIN_S)
        self._budget.forget(self)
