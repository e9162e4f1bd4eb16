"""gnsq (gevent) in a process of its own."""

from __future__ import annotations

from typing import Any

import gevent
import gnsq
from tests.foreign.clients.task import Task, received, say, task


def publish(task: Task) -> None:
    producer = gnsq.Producer(task.nsqd, heartbeat_interval=task.heartbeat_s)
    producer.start()
    for body in task.single:
        say("published", ok=producer.publish(task.topic, body.encode(), timeout=5) == b"OK")
    if task.batch:
        answer = producer.multipublish(task.topic, [body.encode() for body in task.batch], timeout=5)
        say("published", ok=answer == b"OK")
    for body in task.deferred:
        answer = producer.publish(task.topic, body.encode(), defer=task.defer_ms, timeout=5)
        say("published", ok=answer == b"OK")
    producer.close()
    producer.join(5)


def consume(task: Task) -> None:
    """Consume until enough is finished; ``close`` ends the connections at once."""
    consumer = gnsq.Consumer(
        task.topic,
        task.channel,
        nsqd_tcp_addresses=task.nsqd,
        lookupd_http_addresses=task.nsqlookupd,
        lookupd_poll_interval=1,
        max_in_flight=task.max_in_flight,
        heartbeat_interval=task.heartbeat_s,
        max_tries=100,
    )
    done = gevent.event.Event()
    finished = 0

    def finish(message: Any) -> None:
        nonlocal finished
        message.finish()
        finished += 1
        if finished == task.finish_count:
            done.set()

    def hold(message: Any) -> None:
        for _ in range(task.touch_count):
            gevent.sleep(task.touch_s)
            message.touch()
        finish(message)

    def handle(_consumer: Any, message: Any) -> None:
        message.enable_async()
        what = received(message.body, message.attempts)
        if what == "finish":
            finish(message)
        elif what == "requeue":
            message.requeue(task.requeue_ms, backoff=False)
        elif what == "slow":
            gevent.spawn(hold, message)

    consumer.on_message.connect(handle, weak=False)
    consumer.start(block=False)
    say("started")
    done.wait()
    consumer.close()
    consumer.join(5)
    say("closed")


what = task()
publish(what) if what.role == "publish" else consume(what)
