"""pynsq (Tornado) in a process of its own."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import nsq
from tests.foreign.clients.asyncio_program import consume_as_ordered, publish_as_ordered, serve
from tests.foreign.clients.task import Handling, Run, Task


def options(task: Task) -> dict[str, Any]:
    found: dict[str, Any] = {"heartbeat_interval": task.heartbeat_s, "sample_rate": task.sample_rate}
    if task.msg_timeout_ms:
        found["msg_timeout"] = task.msg_timeout_ms / 1000
    if task.codec:
        found[task.codec] = True
    if task.secret:
        found["auth_secret"] = task.secret
    if task.tls:
        tls: dict[str, Any] = {"cert_reqs": ssl.CERT_NONE}
        if task.tls == "verified":
            tls = {"cert_reqs": ssl.CERT_REQUIRED, "ca_certs": task.ca}
        if task.cert:
            tls |= {"certfile": task.cert, "keyfile": task.key}
        found |= {"tls_v1": True, "tls_options": tls}
    return found


async def publish(run: Run) -> None:
    """pynsq answers by callback only."""
    task = run.task
    writer = nsq.Writer(task.nsqd, reconnect_interval=0.5, **options(task))
    while not any(connection.connected() for connection in writer.conns.values()):
        await asyncio.sleep(0.01)

    async def answered(method: Any, *arguments: Any) -> tuple[bool, object]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done = answer.set_result
        method(task.topic, *arguments, callback=lambda _connection, data: answer.done() or done(data))
        data = await answer
        return data == b"OK", data

    await publish_as_ordered(
        run,
        pub=lambda body: answered(writer.pub, body),
        mpub=lambda bodies: answered(writer.mpub, bodies),
        dpub=lambda body, defer_ms: answered(writer.dpub, defer_ms, body),
    )
    writer.reconnect_interval = 1e6  # there is no close
    for connection in list(writer.conns.values()):
        connection.close()


async def consume(run: Run) -> None:
    """There is no graceful end; ``close`` drops what is in flight."""
    task = run.task
    handling = Handling(
        run,
        finish=lambda message: message.finish(),
        requeue=lambda message, delay_ms, backoff: message.requeue(backoff=backoff, time_ms=delay_ms),
        touch=lambda message: message.touch(),
        later=asyncio.get_running_loop().call_later,
    )

    def handle(message: Any) -> None:
        message.enable_async()
        handling.handle(message, message.body, message.attempts)

    reader = nsq.Reader(
        task.topic,
        task.channel,
        message_handler=handle,
        nsqd_tcp_addresses=task.nsqd,
        lookupd_http_addresses=[f"http://{address}" for address in task.nsqlookupd],
        lookupd_poll_interval=1,
        max_in_flight=task.max_in_flight,
        max_backoff_duration=task.max_backoff_s or 128,
        **options(task),
    )
    await consume_as_ordered(run, handling, reader.set_max_in_flight)
    reader.close()
    run.say("closed")


asyncio.run(serve(publish, consume))
