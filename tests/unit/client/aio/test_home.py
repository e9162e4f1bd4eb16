"""The event loop of a client: what is called in it, and in which order."""

from __future__ import annotations

import asyncio

from flintmq.client.aio.home import Home


async def test_what_is_called_behind_what_is_to_be_called_soon_comes_behind_it():
    home, called = Home(), list[str]()
    home.move_in("Consumer")
    home.run(lambda: called.append("now"))
    home.run_soon(lambda: called.append("soon"))
    home.run(lambda: called.append("behind"))
    await asyncio.to_thread(home.run, lambda: called.append("from a thread"))
    assert called[0] == "now"
    while len(called) < 4:
        await asyncio.sleep(0)
    assert called == ["now", "soon", "behind", "from a thread"]
    home.run(lambda: called.append("now again"))
    assert called[-1] == "now again"


def test_without_a_loop_that_turns_it_is_called_at_once():
    home, called = Home(), list[str]()
    home.run(lambda: called.append("before"))
    home.run_soon(lambda: called.append("soon"))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(_moved_in(home))
    loop.close()
    home.run(lambda: called.append("behind"))
    home.run_soon(lambda: called.append("soon behind"))
    assert called == ["before", "soon", "behind", "soon behind"]


async def _moved_in(home: Home) -> None:
    home.move_in("Consumer")
