"""ansq (asyncio) in a process of its own. Its reader asks every connection for one message at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import ansq
from ansq.tcp.types import ConnectionFeatures, ConnectionOptions
from tests.foreign.clients.task import Task, received, say, task


def options(task: Task) -> Any:
    return ConnectionOptions(features=ConnectionFeatures(heartbeat_interval=task.heartbeat_s * 1000))


async def publish(task: Task) -> None:
    """ansq returns errors instead of raising them."""
    writer = await ansq.create_writer(nsqd_tcp_addresses=task.nsqd, connection_options=options(task))
    answers = [await writer.pub(task.topic, body) for body in task.single]
    if task.batch:
        answers.append(await writer.mpub(task.topic, *task.batch))
    answers += [await writer.dpub(task.topic, body, task.defer_ms) for body in task.deferred]
    for answer in answers:
        say("published", ok=answer is not None and answer.is_ok, answer=repr(answer))
    await writer.close()


async def consume(task: Task) -> None:
    reader = await ansq.create_reader(
        topic=task.topic,
        channel=task.channel,
        nsqd_tcp_addresses=task.nsqd or None,
        lookupd_http_addresses=task.nsqlookupd or None,
        lookupd_poll_interval=1000,
        connection_options=options(task),
    )
    say("started")
    finished = 0
    async for message in reader.messages():
        what = received(message.body, message.attempts)
        if what == "requeue":
            await message.req(task.requeue_ms)
            continue
        if what == "hold":
            continue
        if what == "slow":
            for _ in range(task.touch_count):
                await asyncio.sleep(task.touch_s)
                await message.touch()
        await message.fin()
        finished += 1
        if finished == task.finish_count:
            break
    await asyncio.sleep(0.05)
    await reader.close()
    say("closed")


async def main() -> None:
    what = task()
    await (publish(what) if what.role == "publish" else consume(what))


asyncio.run(main())
