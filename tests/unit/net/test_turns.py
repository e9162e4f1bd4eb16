"""Whose turn it is among connections that have more to do."""

import asyncio
from typing import Any

from flintmq.net.turns import ROUND_NS, SLICE_NS, Turns


class Clock:
    def __init__(self):
        self.ns = 0

    def now_ns(self):
        return self.ns


class Member:
    """Works in slices until it is done."""

    def __init__(self, name, slices, turns, clock, log, error=None):
        self.name, self.slices, self.turns, self.clock, self.log, self.error = name, slices, turns, clock, log, error
        self.is_aborted = False

    def go_on(self):
        self.clock.ns += SLICE_NS
        self.log.append(self.name)
        self.slices -= 1
        if self.error is not None:
            raise self.error
        if self.slices:
            self.turns.later(self)

    def abort(self):
        self.is_aborted = True


async def test_everybody_in_line_has_a_slice_before_anybody_has_the_next():
    clock, log = Clock(), list[Any]()
    turns = Turns(asyncio.get_running_loop(), clock.now_ns)
    for name in "ab":
        turns.later(Member(name, 3, turns, clock, log))
    late = Member("c", 1, turns, clock, log)
    turns.later(late)
    turns.later(late)
    for _ in range(4):
        await asyncio.sleep(0)
    assert "".join(log) == "abcabab", "and nobody stands in line twice"
    assert not len(turns)


async def test_a_turn_of_the_loop_serves_some_of_a_long_line():
    clock, log = Clock(), list[Any]()
    turns = Turns(asyncio.get_running_loop(), clock.now_ns)
    for number in range(20):
        turns.later(Member(number, 1, turns, clock, log))
    await asyncio.sleep(0)
    assert log == list(range(ROUND_NS // SLICE_NS))
    for _ in range(10):
        await asyncio.sleep(0)
    assert log == list(range(20))


async def test_one_that_fails_is_closed_and_the_others_have_their_turn():
    clock, log = Clock(), list[Any]()
    loop = asyncio.get_running_loop()
    told: list[Any] = []
    loop.set_exception_handler(lambda _loop, about: told.append(about["exception"]))
    turns = Turns(loop, clock.now_ns)
    error = RuntimeError("cannot")
    bad = Member("bad", 1, turns, clock, log, error)
    turns.later(bad)
    turns.later(Member("good", 1, turns, clock, log))
    await asyncio.sleep(0)
    assert log == ["bad", "good"]
    assert bad.is_aborted
    assert told == [error]


async def test_who_has_gone_is_not_called():
    clock, log = Clock(), list[Any]()
    turns = Turns(asyncio.get_running_loop(), clock.now_ns)
    gone = Member("gone", 1, turns, clock, log)
    turns.later(gone)
    turns.later(Member("there", 1, turns, clock, log))
    turns.leave(gone)
    turns.leave(gone)
    await asyncio.sleep(0)
    assert log == ["there"]
