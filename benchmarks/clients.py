"""The clients that ``bench_client.py`` compares, one function per client and case; run as a process of its own.

``python -m benchmarks.clients CLIENT CASE HOST PORT TOPIC COUNT`` does the work and prints one line of JSON: seconds,
CPU seconds of this process in that time, and its peak memory.

Rules of this file:

- Only the standard library is imported at the top: the interpreter may be one that has nothing but the client.
- Publishing is measured from the first call to the last answer; consuming from the first message to the last call of
  ``finish``. A handler counts and does nothing else.
- Every client is used as its documentation says; ansq's Reader is fixed at RDY 1, so its lower-level connection is
  used.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

BODY = b"x" * 200
BATCH = 200
WORKERS = 200
CHANNEL = "bench"

Work = Callable[["Run"], Any]


class Run:
    """One measurement: what to do, and the clocks."""

    def __init__(self, case: str, host: str, port: int, topic: str, count: int) -> None:
        self.case = case
        self.host = host
        self.port = port
        self.address = f"{host}:{port}"
        self.topic = topic
        self.count = count
        self.left = count
        self.max_in_flight = int(case.rpartition("-")[2]) if case.startswith("consume") else 0
        self._began = self._cpu = self.seconds = self.cpu_s = 0.0

    def begin(self) -> None:
        """Start the clocks."""
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Stop the clocks."""
        self.seconds, self.cpu_s = time.perf_counter() - self._began, time.process_time() - self._cpu

    def one(self) -> bool:
        """Count a message; True with the last one."""
        if self.left == self.count:
            self.begin()
        self.left -= 1
        if self.left == 0:
            self.end()
            return True
        return False


# -- ours --------------------------------------------------------------------------------------------------------------


def flintmq(style: str, is_uvloop: bool = False) -> Work:
    """Our client; ``style`` is how messages are consumed, or ``no-batch`` for publishing."""

    def work(run: Run) -> None:
        factory = None
        if is_uvloop:
            import uvloop

            factory = uvloop.new_event_loop
        main = _flintmq_consume(run, style) if run.max_in_flight else _flintmq_publish(run, style != "no-batch")
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main)

    return work


async def _flintmq_publish(run: Run, batch: bool) -> None:
    from flintmq import Producer

    async with Producer(run.address, batch=batch) as producer:
        await _publish(
            run,
            lambda: producer.pub(run.topic, BODY),
            lambda: producer.mpub(run.topic, [BODY] * BATCH),
        )


async def _flintmq_consume(run: Run, style: str) -> None:
    from flintmq import Consumer, Message

    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def plain(message: Message) -> None:
        if run.one():
            loop.call_soon_threadsafe(done.set)

    async def coroutine(message: Message) -> None:
        if run.one():
            done.set()

    handler: Any = {"inline": plain, "threads": plain, "handler": coroutine}.get(style)
    async with Consumer(
        run.topic,
        CHANNEL,
        nsqd_tcp_addresses=run.address,
        max_in_flight=run.max_in_flight,
        handler=handler,
        inline=style == "inline",
        concurrency=16 if style == "handler" else 1,
    ) as consumer:
        if handler is not None:
            await done.wait()
            return
        async for message in consumer:
            last = run.one()
            message.finish()
            if last:
                break


def flintmq_sync(style: str) -> Work:
    """Our client on blocking sockets; ``style`` is how messages are consumed."""

    def work(run: Run) -> None:
        from flintmq.sync import Consumer, Message, Producer

        if not run.max_in_flight:
            with Producer(run.address) as producer:
                run.begin()
                if run.case == "pub-single":
                    for _ in range(run.count):
                        producer.pub(run.topic, BODY)
                else:
                    for _ in range(run.count // BATCH):
                        producer.mpub(run.topic, [BODY] * BATCH)
                run.end()
            return

        def handler(message: Message) -> None:
            if run.one():
                consumer.stop()

        consumer = Consumer(
            run.topic,
            CHANNEL,
            nsqd_tcp_addresses=run.address,
            max_in_flight=run.max_in_flight,
            handler=handler if style == "handler" else None,
        )
        if style == "handler":
            consumer.run()
            return
        with consumer:
            for message in consumer:
                last = run.one()
                message.finish()
                if last:
                    break

    return work


async def _publish(
    run: Run, pub: Callable[[], Coroutine[Any, Any, object]], mpub: Callable[[], Coroutine[Any, Any, object]]
) -> None:
    """The three ways to publish, for any client on asyncio."""
    run.begin()
    if run.case == "pub-single":
        for _ in range(run.count):
            await pub()
    elif run.case == "pub-200":

        async def worker() -> None:
            while run.left > 0:
                run.left -= 1
                await pub()

        await asyncio.gather(*(worker() for _ in range(WORKERS)))
    else:
        for _ in range(run.count // BATCH):
            await mpub()
    run.end()


# -- others ------------------------------------------------------------------------------------------------------------


def ansq(run: Run) -> None:
    """ansq 0.3."""
    asyncio.run(_ansq(run))


async def _ansq(run: Run) -> None:
    import ansq

    if not run.max_in_flight:
        writer = await ansq.create_writer(nsqd_tcp_addresses=[run.address])
        await _publish(run, lambda: writer.pub(run.topic, BODY), lambda: writer.mpub(run.topic, *[BODY] * BATCH))
        await writer.close()
        return
    connection = await ansq.open_connection(run.host, run.port)
    await connection.subscribe(run.topic, CHANNEL, run.max_in_flight)
    async for message in connection.messages():
        last = run.one()
        await message.fin()
        if last:
            break
    await connection.close()


def asyncnsq(run: Run) -> None:
    """asyncnsq 1.2 (2.0 needs Python 3.12)."""
    asyncio.run(_asyncnsq(run))


async def _asyncnsq(run: Run) -> None:
    import asyncnsq

    if not run.max_in_flight:
        writer = await asyncnsq.create_writer(host=run.host, port=run.port)
        await _publish(run, lambda: writer.pub(run.topic, BODY), lambda: writer.mpub(run.topic, *[BODY] * BATCH))
        writer.close()
        return
    reader = await asyncnsq.create_reader(nsqd_tcp_addresses=[run.address], max_in_flight=run.max_in_flight)
    await reader.subscribe(run.topic, CHANNEL)
    async for message in reader.messages():
        last = run.one()
        await message.fin()
        if last:
            break
    reader.close()


def gnsq(run: Run) -> None:
    """gnsq 1.0 on gevent."""
    from gevent import monkey

    monkey.patch_all()
    import gevent
    import gnsq

    if run.max_in_flight:
        consumer = gnsq.Consumer(run.topic, CHANNEL, run.address, max_in_flight=run.max_in_flight)

        @consumer.on_message.connect
        def handle(_consumer: object, message: object) -> None:
            if run.one():
                consumer.close()

        consumer.start()
        return
    producer = gnsq.Producer(run.address)
    producer.start()
    run.begin()
    if run.case == "pub-single":
        for _ in range(run.count):
            producer.publish(run.topic, BODY)
    elif run.case == "pub-200":

        def worker() -> None:
            while run.left > 0:
                run.left -= 1
                producer.publish(run.topic, BODY)

        gevent.joinall([gevent.spawn(worker) for _ in range(WORKERS)], raise_error=True)
    else:
        for _ in range(run.count // BATCH):
            producer.multipublish(run.topic, [BODY] * BATCH)
    run.end()
    producer.close()


def pynsq(run: Run) -> None:
    """pynsq 0.9 on Tornado."""
    import nsq

    async def main() -> None:
        done = asyncio.Event()
        if run.max_in_flight:

            def handler(_message: object) -> bool:
                if run.one():
                    done.set()
                return True

            nsq.Reader(
                message_handler=handler,
                nsqd_tcp_addresses=[run.address],
                topic=run.topic,
                channel=CHANNEL,
                max_in_flight=run.max_in_flight,
            )
            await done.wait()
            return
        writer = nsq.Writer([run.address])
        while not writer.conns or not all(conn.state == "CONNECTED" for conn in writer.conns.values()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # IDENTIFY
        _pynsq_publish(run, writer, done.set)
        await done.wait()

    asyncio.run(main())


def _pynsq_publish(run: Run, writer: Any, done: Callable[[], None]) -> None:
    is_batch = run.case == "mpub-200"
    commands = run.count // BATCH if is_batch else run.count
    state = {"left": commands, "answers": commands}

    def send() -> None:
        state["left"] -= 1
        if is_batch:
            writer.mpub(run.topic, [BODY] * BATCH, answered)
        else:
            writer.pub(run.topic, BODY, answered)

    def answered(_connection: object, data: object) -> None:
        if data != b"OK":
            raise SystemExit(f"pynsq: {data!r}")
        state["answers"] -= 1
        if state["left"]:
            send()
        elif not state["answers"]:
            run.end()
            done()

    run.begin()
    for _ in range(WORKERS if run.case == "pub-200" else 1):
        send()


def nsq_py(run: Run) -> None:
    """nsq-py 0.1, which shares its module's name with pynsq and therefore needs an interpreter of its own."""
    topic = run.topic.encode()
    if run.max_in_flight:
        from nsq.reader import Reader

        addresses = [run.address]
        for message in Reader(topic, CHANNEL.encode(), None, addresses, max_in_flight=run.max_in_flight):
            last = run.one()
            message.fin()
            if last:
                message.connection.flush()
                return
    from nsq.client import Client

    client = Client(nsqd_tcp_addresses=[run.address])
    run.begin()
    if run.case == "pub-single":
        for _ in range(run.count):
            client.pub(topic, BODY)
    else:
        for _ in range(run.count // BATCH):
            client.mpub(topic, *[BODY] * BATCH)
    run.end()


CLIENTS: dict[str, Work] = {
    "flintmq": flintmq("iterator"),
    "flintmq handler": flintmq("handler"),
    "flintmq inline": flintmq("inline"),
    "flintmq threads": flintmq("threads"),
    "flintmq uvloop": flintmq("iterator", is_uvloop=True),
    "flintmq no-batch": flintmq("no-batch"),
    "flintmq sync": flintmq_sync("iterator"),
    "flintmq sync handler": flintmq_sync("handler"),
    "pynsq": pynsq,
    "gnsq": gnsq,
    "ansq": ansq,
    "asyncnsq": asyncnsq,
    "nsq-py": nsq_py,
}


def peak_mib() -> float:
    """Peak memory of this process; not ``ru_maxrss``, which a child inherits from its parent."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main() -> None:
    """Do one measurement."""
    client, case, host, port, topic, count = sys.argv[1:]
    run = Run(case, host, int(port), topic, int(count))
    CLIENTS[client](run)
    print(json.dumps({"seconds": run.seconds, "cpu_s": run.cpu_s, "peak_mib": peak_mib()}))


if __name__ == "__main__":
    main()
