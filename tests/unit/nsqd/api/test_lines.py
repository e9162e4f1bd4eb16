"""Requests that look at much: one at a time, each address in its turn, equal ones together, none without memory."""

from __future__ import annotations

from asyncio import Event, create_task, sleep
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from flintmq.budget import Budget
from flintmq.net.http_auth import OPEN
from flintmq.net.http_messages import HttpError, Request, Response, plain_response
from flintmq.net.http_router import Router
from flintmq.nsqd.api.arguments import KNOWN, NotHere, style_of
from flintmq.nsqd.api.lines import Lines
from flintmq.nsqd.api.route import LARGE, Route, add_routes
from flintmq.nsqd.in_turns import PER_TURN, in_turns
from flintmq.wire.server import ServerLimits


class Walker:
    """A room whose requests look at many things."""

    def __init__(self, things: int) -> None:
        self.things = things
        self.looked_at = 0
        self.running = self.most_running = 0
        self.begun: list[bytes] = []
        self.budget = Budget(1600)
        self.may_end = Event()
        self.may_end.set()

    async def walk(self, request: Request) -> Response:
        self.begun.append(request.query_bytes)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            async for _ in in_turns(range(self.things)):
                self.looked_at += 1
            await self.may_end.wait()
        finally:
            self.running -= 1
        if request.query_bytes == b"topic=none":
            raise NotHere("none", None, "TOPIC_NOT_FOUND")
        return plain_response(f"walked for {request.query_bytes.decode()}")


def walk_router(room: Walker) -> Router:
    router = Router(KNOWN)
    row = Route("GET", "/walk", OPEN, Walker.walk, ("topic",), line=LARGE)
    add_routes(
        router,
        room,
        [row],
        ServerLimits(),
        style_of("nsq"),
        lambda missing: HttpError(404, f"{missing.topic} is led elsewhere"),
        {LARGE: Lines(room.budget, lambda: None)},
    )
    return router


def ask(router: Router, query: bytes = b"", address: str = "192.0.2.1:1") -> Coroutine[Any, Any, Response]:
    handler = router.exact[b"GET", b"/walk"].handler
    return cast(Coroutine[Any, Any, Response], handler(Request(b"GET", b"/walk", query, {}, address)))


async def test_others_wait_for_one_request_that_looks_at_everything_and_not_for_all():
    room = Walker(10 * PER_TURN)
    router = walk_router(room)
    walks = [create_task(ask(router, b"topic=%d" % number)) for number in range(20)]
    most = 0
    while not all(walk.done() for walk in walks):
        before = room.looked_at
        await sleep(0)
        most = max(most, room.looked_at - before)
    assert [walk.result().body for walk in walks] == [b"walked for topic=%d" % number for number in range(20)]
    assert room.most_running == 1
    assert most <= PER_TURN


async def test_a_request_that_fails_or_is_cancelled_holds_up_nobody():
    room = Walker(3 * PER_TURN)
    router = walk_router(room)
    queries = (b"topic=first", b"topic=second", b"topic=none", b"topic=last")
    first, second, failing, last = (create_task(ask(router, query)) for query in queries)
    await sleep(0)
    second.cancel()  # in line
    await sleep(0)
    first.cancel()  # while it looks
    assert (await last).body == b"walked for topic=last"
    with pytest.raises(HttpError, match="none is led elsewhere"):
        await failing
    assert first.cancelled() and second.cancelled()
    assert room.running == 0
    assert b"topic=second" not in room.begun, "nobody waits for it"


async def test_those_who_ask_for_the_same_are_answered_together_by_a_walk_that_begins_behind_them():
    room = Walker(3 * PER_TURN)
    router = walk_router(room)
    first = create_task(ask(router))
    while not room.begun:
        await sleep(0)
    others = [create_task(ask(router, address=f"192.0.2.{number}:1")) for number in range(50)]
    failing = [create_task(ask(router, b"topic=none")) for _ in range(3)]
    await sleep(0)
    others.pop(0).cancel()
    assert [(await each).body for each in (first, *others)] == [b"walked for "] * 50
    for each in failing:
        with pytest.raises(HttpError, match="none is led elsewhere"):
            await each
    assert room.begun == [b"", b"", b"topic=none"]


async def test_who_asks_for_much_keeps_others_waiting_for_one_request():
    room = Walker(PER_TURN)
    router = walk_router(room)
    many = [create_task(ask(router, b"topic=%d" % number, f"192.0.2.1:{number}")) for number in range(30)]
    while not room.begun:
        await sleep(0)
    one = [create_task(ask(router, b"topic=one%d" % number, "192.0.2.2:7")) for number in range(2)]
    also = create_task(ask(router, b"topic=5", "[2001:db8::1]:7"))  # that somebody else waits for, too
    for each in (*many, *one, also):
        await each
    assert room.begun[:5] == [b"topic=0", b"topic=1", b"topic=one0", b"topic=5", b"topic=2"]
    assert len(room.begun) == len(set(room.begun)) == 32


async def test_nobody_is_answered_while_what_others_do_not_read_takes_all_memory():
    room = Walker(PER_TURN)
    router = walk_router(room)
    room.may_end.clear()
    room.budget.output_bytes = room.budget.output_max_bytes
    asking = [create_task(ask(router)) for _ in range(2)]
    while not room.budget.newcomers:
        await sleep(0)
    assert room.begun == [], "and those who do not read are closed, because somebody waits"
    room.budget.output_bytes -= 1
    while not room.begun:
        await sleep(0)
    assert not room.budget.has_waiting
    room.budget.output_bytes += 1
    room.may_end.set()
    while not room.budget.newcomers:
        await sleep(0)
    assert not any(each.done() for each in asking)
    room.budget.output_bytes = 0
    assert [(await each).body for each in asking] == [b"walked for "] * 2
    while room.budget.has_waiting:
        await sleep(0)
