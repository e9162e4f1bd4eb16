"""gnsq (gevent) in a process of its own."""

from __future__ import annotations

import json
import ssl
import sys
from typing import Any

import gevent
import gnsq
from gevent.fileobject import FileObject
from gevent.queue import Queue
from tests.foreign.clients.task import Handling, Run, Task, publications

ANSWER_WITHIN_S = 15


def options(task: Task) -> dict[str, Any]:
    found: dict[str, Any] = {"heartbeat_interval": task.heartbeat_s, "sample_rate": task.sample_rate}
    if task.codec:
        found[task.codec] = True
    if task.secret:
        found["auth_secret"] = task.secret.encode()
    if task.tls:
        tls: dict[str, Any] = {"cert_reqs": ssl.CERT_NONE}
        if task.tls == "verified":
            tls = {"cert_reqs": ssl.CERT_REQUIRED, "ca_certs": task.ca}
        if task.cert:
            tls |= {"certfile": task.cert, "keyfile": task.key}
        found |= {"tls_v1": True, "tls_options": tls}
    return found


def publish(run: Run) -> None:
    task = run.task
    producer = gnsq.Producer(task.nsqd, max_backoff_duration=1, **options(task))
    producer.start()
    commands = {
        "pub": lambda body, _: producer.publish(task.topic, body, timeout=1, raise_error=False),
        "mpub": lambda bodies, _: producer.multipublish(task.topic, bodies, timeout=1, raise_error=False),
        "dpub": lambda body, defer_ms: producer.publish(task.topic, body, defer=defer_ms, timeout=1, raise_error=False),
    }
    run.say("ready")
    while (order := run.orders.get())["order"] != "end":
        for name, what in publications(order):
            try:
                answer = commands[name](what, order["defer_ms"]).get(timeout=ANSWER_WITHIN_S)
            except (Exception, gevent.Timeout) as error:  # noqa: BLE001  # somebody else's code
                answer = error
            run.say("published", ok=answer == b"OK", answer=repr(answer))
    producer.close()
    producer.join(5)


def consume(run: Run) -> None:
    """``close`` ends the connections at once."""
    task = run.task
    consumer = gnsq.Consumer(
        task.topic,
        task.channel,
        nsqd_tcp_addresses=task.nsqd,
        lookupd_http_addresses=task.nsqlookupd,
        lookupd_poll_interval=1,
        max_in_flight=task.max_in_flight,
        max_backoff_duration=task.max_backoff_s or 128,
        **options(task),
    )
    handling = Handling(
        run,
        finish=lambda message: message.finish(),
        requeue=lambda message, delay_ms, backoff: message.requeue(delay_ms, backoff=backoff),
        touch=lambda message: message.touch(),
        later=gevent.spawn_later,
    )

    def handle(_consumer: Any, message: Any) -> None:
        message.enable_async()
        handling.handle(message, message.body, message.attempts)

    consumer.on_message.connect(handle, weak=False)
    consumer.start(block=False)
    run.say("ready")
    while (order := run.orders.get())["order"] != "end":
        if order["order"] != "release":
            raise ValueError(order)
        handling.release()
    consumer.close()
    consumer.join(5)
    run.say("closed")


def carry_out(run: Run) -> None:
    """Do a run; whatever the client raises is told."""
    try:
        (publish if run.task.role == "publish" else consume)(run)
    except Exception as error:  # noqa: BLE001  # somebody else's code
        run.say("failed", error=repr(error))
    else:
        run.say("ended")


def serve() -> None:
    """Take orders until stdin ends."""
    runs: dict[int, Run] = {}
    for line in FileObject(sys.stdin.buffer, "rb", close=False):
        order = json.loads(line)
        number = order["run"]
        if order["order"] == "start":
            runs[number] = Run(number, Task(**order["task"]), Queue())
            gevent.spawn(carry_out, runs[number])
        else:
            runs[number].orders.put_nowait(order)


serve()
