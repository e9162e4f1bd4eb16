"""asyncnsq 1.2.1 (asyncio) in a process of its own; 2.0 needs Python 3.12."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncnsq import create_reader, create_writer
from tests.foreign.clients.asyncio_program import consume_as_ordered, publish_as_ordered, serve
from tests.foreign.clients.task import Handling, Run, Task


def options(task: Task) -> dict[str, Any]:
    """It has no option to verify a certificate or to show one."""
    return {
        "heartbeat_interval": task.heartbeat_s * 1000,
        "sample_rate": task.sample_rate,
        "auth_secret": task.secret or None,
        "tls_v1": bool(task.tls),
        **({task.codec: True} if task.codec else {}),
    }


async def publish(run: Run) -> None:
    task = run.task
    host, _, port = task.nsqd[0].partition(":")
    writer = await create_writer(host=host, port=int(port), **options(task))

    async def answered(method: Any, *arguments: Any) -> tuple[bool, object]:
        answer = await method(task.topic, *arguments)
        return answer == b"OK", answer

    await publish_as_ordered(
        run,
        pub=lambda body: answered(writer.pub, body),
        mpub=lambda bodies: answered(writer.mpub, *bodies),
        dpub=lambda body, defer_ms: answered(writer.dpub, defer_ms, body),
    )
    writer.close()


async def consume(run: Run) -> None:
    """What a message answers with is a coroutine, although nothing is waited for."""
    task = run.task
    kwargs: dict[str, Any] = {"nsqd_tcp_addresses": task.nsqd, **options(task)}
    if task.nsqlookupd:  # takes pairs here, and no options beside them
        pairs = [(host, int(port)) for host, _, port in (address.partition(":") for address in task.nsqlookupd)]
        kwargs = {"lookupd_http_addresses": pairs}
    reader = await create_reader(max_in_flight=task.max_in_flight, **kwargs)
    await reader.subscribe(task.topic, task.channel)
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
    await reader.clean_close()
    handler.cancel()
    run.say("closed")


asyncio.run(serve(publish, consume))
