"""ansq (asyncio) in a process of its own. Its reader asks every connection for one message at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import ansq
from ansq.tcp.types import ConnectionFeatures, ConnectionOptions
from tests.foreign.clients.asyncio_program import consume_as_ordered, publish_as_ordered, serve
from tests.foreign.clients.task import Handling, Run, Task


def options(task: Task) -> Any:
    return ConnectionOptions(
        features=ConnectionFeatures(
            heartbeat_interval=task.heartbeat_s * 1000,
            sample_rate=task.sample_rate,
            msg_timeout=task.msg_timeout_ms or 60_000,
        )
    )


async def authorized(task: Task) -> Any:
    """A connection with AUTH; reader and writer have no option for it."""
    host, _, port = task.nsqd[0].partition(":")
    connection = await ansq.open_connection(host, int(port), connection_options=options(task))
    answer = await connection.auth(task.secret)
    if answer is None or answer.is_error:
        raise PermissionError(answer)
    return connection


async def publish(run: Run) -> None:
    """ansq returns errors instead of raising them."""
    task = run.task
    if task.secret:
        writer = await authorized(task)
    else:
        writer = await ansq.create_writer(nsqd_tcp_addresses=task.nsqd, connection_options=options(task))

    async def answered(method: Any, *arguments: Any) -> tuple[bool, object]:
        answer = await method(task.topic, *arguments)
        return answer is not None and answer.is_ok, answer

    await publish_as_ordered(
        run,
        pub=lambda body: answered(writer.pub, body),
        mpub=lambda bodies: answered(writer.mpub, *bodies),
        dpub=lambda body, defer_ms: answered(writer.dpub, body, defer_ms),
    )
    await writer.close()


async def consume(run: Run) -> None:
    """What a message answers with is a coroutine, although nothing is waited for."""
    task = run.task
    if task.secret:
        reader = await authorized(task)
        await reader.subscribe(task.topic, task.channel, task.max_in_flight)
    else:
        reader = await ansq.create_reader(
            topic=task.topic,
            channel=task.channel,
            nsqd_tcp_addresses=task.nsqd or None,
            lookupd_http_addresses=task.nsqlookupd or None,
            lookupd_poll_interval=1000,
            connection_options=options(task),
        )
    handling = Handling(
        run,
        finish=lambda message: asyncio.ensure_future(message.fin()),
        requeue=lambda message, delay_ms, _backoff: asyncio.ensure_future(message.req(delay_ms)),
        touch=lambda message: asyncio.ensure_future(message.touch()),
        later=asyncio.get_running_loop().call_later,
    )

    async def handle_all() -> None:
        async for message in reader.messages():
            handling.handle(message, message.body, message.attempts)

    handler = asyncio.ensure_future(handle_all())
    await consume_as_ordered(run, handling)
    await reader.close()
    handler.cancel()
    run.say("closed")


asyncio.run(serve(publish, consume))
