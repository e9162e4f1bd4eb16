"""The frame of a program around a client that runs on asyncio: orders in, runs side by side, events out."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from tests.foreign.clients.task import Handling, Run, Task, publications

ORDER_BYTES_MAX = 16 * 1024 * 1024
ANSWER_WITHIN_S = 15

Doing = Callable[[Run], Awaitable[None]]


async def carry_out(run: Run, doing: Doing) -> None:
    """Do a run; whatever the client raises is told."""
    try:
        await doing(run)
    except Exception as error:  # noqa: BLE001  # somebody else's code
        run.say("failed", error=repr(error))
    else:
        run.say("ended")


async def serve(publish: Doing, consume: Doing) -> None:
    """Take orders until stdin ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(ORDER_BYTES_MAX)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    runs: dict[int, Run] = {}
    tasks = []
    async for line in reader:
        order = json.loads(line)
        number = order["run"]
        if order["order"] != "start":
            runs[number].orders.put_nowait(order)
            continue
        task = Task(**order["task"])
        runs[number] = Run(number, task, asyncio.Queue())
        tasks.append(asyncio.ensure_future(carry_out(runs[number], publish if task.role == "publish" else consume)))


async def publish_as_ordered(run: Run, **commands: Callable[..., Awaitable[tuple[bool, object]]]) -> None:
    """Publish what is ordered, one command after the other, until the run is to end.

    Args:
        commands: ``pub``, ``mpub`` and ``dpub`` of the client; they return whether the answer is OK, and the answer.
            ``dpub`` gets a delay in milliseconds as well.
    """
    run.say("ready")
    while (order := await run.orders.get())["order"] != "end":
        for name, what in publications(order):
            arguments = (what, order["defer_ms"]) if name == "dpub" else (what,)
            ok, answer = False, object()
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    ok, answer = await commands[name](*arguments)
            except Exception as error:  # noqa: BLE001  # somebody else's code
                answer = error
            run.say("published", ok=ok, answer=repr(answer))


async def consume_as_ordered(
    run: Run, handling: Handling, set_max_in_flight: Callable[[int], Any] | None = None
) -> None:
    """Obey until the run is to end."""
    run.say("ready")
    while (order := await run.orders.get())["order"] != "end":
        if order["order"] == "release":
            handling.release()
        elif order["order"] == "max_in_flight" and set_max_in_flight is not None:
            set_max_in_flight(order["value"])
        else:
            raise ValueError(order)
    await asyncio.sleep(0.05)  # the last FIN may still be in a buffer of the client
