"""pynsq (Tornado) in a process of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import nsq
from tests.foreign.clients.task import Task, received, say, task


async def publish(task: Task) -> None:
    """Publish everything, one command after the other; pynsq answers by callback only."""
    writer = nsq.Writer(task.nsqd, heartbeat_interval=task.heartbeat_s)
    while not any(connection.connected() for connection in writer.conns.values()):
        await asyncio.sleep(0.01)

    async def answered(method: Any, *arguments: Any) -> None:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        method(task.topic, *arguments, callback=lambda _connection, data: answer.set_result(data))
        data = await answer
        say("published", ok=data == b"OK", answer=repr(data))

    for body in task.single:
        await answered(writer.pub, body.encode())
    if task.batch:
        await answered(writer.mpub, [body.encode() for body in task.batch])
    for body in task.deferred:
        await answered(writer.dpub, task.defer_ms, body.encode())


async def consume(task: Task) -> None:
    """Consume until enough is finished; pynsq has no graceful end, ``close`` drops what is in flight."""
    done = asyncio.Event()
    finished = 0

    def finish(message: Any) -> None:
        nonlocal finished
        message.finish()
        finished += 1
        if finished == task.finish_count:
            done.set()

    async def hold(message: Any) -> None:
        for _ in range(task.touch_count):
            await asyncio.sleep(task.touch_s)
            message.touch()
        finish(message)

    def handle(message: Any) -> None:
        message.enable_async()
        what = received(message.body, message.attempts)
        if what == "finish":
            finish(message)
        elif what == "requeue":
            message.requeue(backoff=False, time_ms=task.requeue_ms)
        elif what == "slow":
            tasks.append(asyncio.ensure_future(hold(message)))

    tasks: list[asyncio.Future[None]] = []
    reader = nsq.Reader(
        task.topic,
        task.channel,
        message_handler=handle,
        nsqd_tcp_addresses=task.nsqd,
        lookupd_http_addresses=[f"http://{address}" for address in task.nsqlookupd],
        lookupd_poll_interval=1,
        max_in_flight=task.max_in_flight,
        heartbeat_interval=task.heartbeat_s,
    )
    say("started")
    await done.wait()
    await asyncio.sleep(0.05)  # the last FIN is in the stream's buffer
    reader.close()
    say("closed")


async def main() -> None:
    what = task()
    await (publish(what) if what.role == "publish" else consume(what))


asyncio.run(main())
