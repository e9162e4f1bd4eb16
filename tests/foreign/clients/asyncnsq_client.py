"""asyncnsq 1.2.1 (asyncio) in a process of its own; 2.0 needs Python 3.12."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncnsq import create_reader, create_writer
from tests.foreign.clients.task import Task, received, say, task


async def publish(task: Task) -> None:
    host, _, port = task.nsqd[0].partition(":")
    writer = await create_writer(host=host, port=int(port), heartbeat_interval=task.heartbeat_s * 1000)
    answers = [await writer.pub(task.topic, body) for body in task.single]
    if task.batch:
        answers.append(await writer.mpub(task.topic, *task.batch))
    answers += [await writer.dpub(task.topic, task.defer_ms, body) for body in task.deferred]
    for answer in answers:
        say("published", ok=answer == b"OK", answer=repr(answer))
    writer.close()


async def consume(task: Task) -> None:
    kwargs: dict[str, Any] = {"nsqd_tcp_addresses": task.nsqd, "heartbeat_interval": task.heartbeat_s * 1000}
    if task.nsqlookupd:  # takes pairs here, and no options beside them
        pairs = [(host, int(port)) for host, _, port in (address.partition(":") for address in task.nsqlookupd)]
        kwargs = {"lookupd_http_addresses": pairs}
    reader = await create_reader(max_in_flight=task.max_in_flight, **kwargs)
    await reader.subscribe(task.topic, task.channel)
    say("started")
    done = asyncio.Event()
    finished = 0

    async def finish(message: Any) -> None:
        nonlocal finished
        await message.fin()
        finished += 1
        if finished == task.finish_count:
            done.set()

    async def hold(message: Any) -> None:
        for _ in range(task.touch_count):
            await asyncio.sleep(task.touch_s)
            await message.touch()
        await finish(message)

    async def handle_all() -> None:
        async for message in reader.messages():
            what = received(message.body, message.attempts)
            if what == "finish":
                await finish(message)
            elif what == "requeue":
                await message.req(task.requeue_ms)
            elif what == "slow":
                tasks.append(asyncio.ensure_future(hold(message)))

    tasks = [asyncio.ensure_future(handle_all())]
    await done.wait()
    await asyncio.sleep(0.05)
    await reader.clean_close()
    tasks[0].cancel()
    say("closed")


async def main() -> None:
    what = task()
    await (publish(what) if what.role == "publish" else consume(what))


asyncio.run(main())
