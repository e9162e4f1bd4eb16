"""Our client against real nsqd and nsqlookupd processes: kills, restarts, timeouts, discovery, draining."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sized
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import PATIENCE_S, SOON_S, Nsqd, a_few_times, wait_until

from flintmq import (
    ConnectionOptions,
    Consumer,
    FinFailed,
    FlintError,
    Message,
    Producer,
    PublishError,
    PublishRefused,
    PublishUnknown,
)
from flintmq.client.aio import handlers

ROOT = Path(__file__).resolve().parents[2]


def address_of(nsqd: Nsqd) -> str:
    return f"{nsqd.tcp[0]}:{nsqd.tcp[1]}"


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def take(consumer: Consumer, count: int) -> list[Message]:
    taken: list[Message] = []
    async with asyncio.timeout(PATIENCE_S):
        async for message in consumer:
            taken.append(message)
            if len(taken) == count:
                break
    return taken


def has_grown(found: Sized, count: int) -> bool:
    return len(found) > count


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine, on each event loop."""
    factory = None if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop

    def run(main):
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(main)

    return run


# --- the main road ---


def test_publish_and_consume(nsqd, run):
    async def main():
        nsqd_address = address_of(nsqd)
        async with Producer(nsqd_address) as producer:
            await producer.pub("t", b"1")
            await producer.mpub("t", [b"2", b"3"])
            began = time.monotonic()
            await producer.dpub("t", b"4", delay=0.3)
            await asyncio.gather(*(producer.pub("t", b"%d" % number) for number in range(5, 1000)))
        bodies = []
        async with Consumer("t", "c", nsqd_tcp_addresses=nsqd_address, max_in_flight=100) as consumer:
            async for message in consumer:
                async with message:
                    bodies.append(message.body)
                    if message.body == b"4":
                        assert time.monotonic() - began > 0.29
                    assert message.attempts == 1
                    assert 60 - SOON_S < message.time_left <= 60.001
                if len(bodies) == 999:
                    break
        assert sorted(map(int, bodies)) == list(range(1, 1000))

    run(main())
    assert nsqd.unfinished("t", "c") == 0


@pytest.mark.parametrize("style", ["inline", "async", "threads", "batches"])
def test_every_style_of_consuming_sees_every_message(nsqd, run, style):
    count = 5000
    seen: list[bytes] = []

    async def coroutine(message: Message) -> None:
        seen.append(message.body)

    def function(message: Message) -> None:
        seen.append(message.body)

    async def main():
        handler = {"inline": function, "async": coroutine, "threads": function}.get(style)
        options: dict[str, Any] = {"handler": handler, "inline": style == "inline", "concurrency": 3 if handler else 1}
        async with (
            Producer(address_of(nsqd)) as producer,
            Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), max_in_flight=500, **options) as consumer,
        ):
            for start in range(0, count, 100):
                await producer.mpub("t", [b"%d" % number for number in range(start, start + 100)])
            if style == "batches":
                async for batch in consumer.batches(300, timeout=0.1):
                    seen.extend(message.body for message in batch)
                    for message in batch:
                        message.finish()
                    if len(seen) == count:
                        break
            await until(lambda: len(seen) == count)

    run(main())
    assert sorted(map(int, seen)) == list(range(count))
    assert nsqd.unfinished("t", "c") == 0


# --- time ---


def test_requeue_touch_and_timeouts(nsqd):
    async def main():
        late: list[FlintError] = []
        nsqd.publish("t", b"requeued", b"touched", b"forgotten")
        options: dict[str, Any] = {"msg_timeout": 3, "max_in_flight": 10, "on_error": late.append}
        async with Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), **options) as consumer:
            began = time.monotonic()
            first = {message.body: message for message in await take(consumer, 3)}
            requeued_at = time.monotonic()
            first[b"requeued"].requeue(0.3)
            (requeued,) = await take(consumer, 1)
            assert (requeued.body, requeued.attempts) == (b"requeued", 2), "before the others are over"
            assert time.monotonic() - requeued_at > 0.29
            requeued.finish()
            await asyncio.sleep(began + 1.5 - time.monotonic())
            first[b"touched"].touch()
            (forgotten,) = await take(consumer, 1)
            assert (forgotten.body, forgotten.attempts) == (b"forgotten", 2), "the one that was not touched"
            first[b"touched"].finish()
            await asyncio.sleep(first[b"forgotten"].time_left)  # its time began at nsqd a moment before it arrived
            assert first[b"forgotten"].is_lost
            forgotten.finish()
            await until(lambda: nsqd.unfinished("t", "c") == 0)
            assert late == []
            first[b"forgotten"].finish()
            await until(lambda: late)
            assert isinstance(late[0], FinFailed)
            assert consumer.connections, "and the connection lives on"

    asyncio.run(main())


def test_heartbeats_go_on_while_a_plain_function_blocks(nsqd):
    async def main(topic: str) -> None:
        def handler(message: Message) -> None:
            time.sleep(4)

        nsqd.publish(topic, b"slow")
        options: dict[str, Any] = {"handler": handler, "heartbeat_interval": 1}
        async with Consumer(topic, "c", nsqd_tcp_addresses=address_of(nsqd), **options) as consumer:
            await until(lambda: consumer.stats().finished == 1)
            assert consumer.stats().received == 1
        assert nsqd.unfinished(topic, "c") == 0

    a_few_times(lambda number: asyncio.run(main(f"t{number}")))


# --- kill -9 ---


def test_messages_of_a_loop_are_answered_in_any_thread(nsqd, run):
    """Else such an answer is sent when something else wakes the loop; where it is in debug mode that is an error."""

    def finish(message: Message) -> None:
        message.finish()

    def requeue(message: Message) -> None:
        message.touch()
        message.requeue(0)

    def fail(message: Message) -> None:
        with message:
            raise ValueError("to be seen in the log")

    def succeed(message: Message) -> None:
        with message:
            pass

    async def main() -> None:
        asyncio.get_running_loop().set_debug(True)
        async with Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), requeue_delay=0, backoff=0) as consumer:
            attempts = []
            for answer in (requeue, fail, finish, succeed):
                if answer is succeed:
                    await asyncio.to_thread(nsqd.publish, "t", b"1")
                (message,) = await take(consumer, 1)
                attempts.append((message.body, message.attempts))
                thread = threading.Thread(target=answer, args=(message,))
                thread.start()
                thread.join()
            assert attempts == [(b"0", 1), (b"0", 2), (b"0", 3), (b"1", 1)]
            await asyncio.to_thread(wait_until, lambda: nsqd.unfinished("t", "c") == 0)
            assert consumer.stats().finished == 2

    nsqd.publish("t", b"0")
    run(main())


@pytest.mark.parametrize("how", ["in a thread", "in a signal handler"])
def test_a_consumer_is_stopped_from_anywhere(nsqd, run, how):
    """At once, also while the loop waits for sockets: heartbeats come once a minute."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_debug(how == "in a thread")
        options = ConnectionOptions(heartbeat_interval=60)
        consumer = Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), handler=print, options=options)
        await consumer.start()
        running = asyncio.create_task(consumer.run())
        if how == "in a thread":
            threading.Timer(0.2, consumer.stop).start()
        else:
            before = signal.signal(signal.SIGUSR1, lambda *_: consumer.stop())
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        async with asyncio.timeout(SOON_S):
            await running
        if how != "in a thread":
            signal.signal(signal.SIGUSR1, before)

    run(main())


def test_a_signal_handler_stops_a_consumer_wherever_it_interrupts_it(nsqd, monkeypatch):
    """Here between the look into an empty inbox and the wait for what comes, which ended with the next message."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        create_future = loop.create_future
        signals: list[int] = []

        def interrupted() -> asyncio.Future[Any]:
            future = create_future()
            if sys._getframe(1).f_code is handlers.wait.__code__ and not signals:
                signals.append(signal.SIGUSR1)
                signal.raise_signal(signal.SIGUSR1)
            return future

        async with Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd)) as consumer:
            before = signal.signal(signal.SIGUSR1, lambda *_: consumer.stop())
            monkeypatch.setattr(loop, "create_future", interrupted)
            async with asyncio.timeout(SOON_S):
                async for _ in consumer:
                    raise AssertionError
            monkeypatch.undo()
            signal.signal(signal.SIGUSR1, before)
        assert signals

    asyncio.run(main())


def test_kill_9_under_load_loses_nothing_that_was_acknowledged(nsqd, run):
    """The producer, its MPUBs gathered, and a consumer go through three kills, and are back each time."""
    acknowledged: set[bytes] = set()
    seen: set[bytes] = set()
    unknown = 0
    outages: list[float] = []

    async def publish(producer: Producer, worker: int, is_over: list[bool]) -> None:
        nonlocal unknown
        number = 0
        while not is_over:
            number += 1
            body = b"%d-%d" % (worker, number)
            try:
                await producer.pub("t", body, timeout=PATIENCE_S)
            except PublishUnknown:
                unknown += 1
            else:
                acknowledged.add(body)

    async def main():
        def handler(message: Message) -> None:
            seen.add(message.body)

        is_over: list[bool] = []
        address = address_of(nsqd)
        async with (
            Producer(address) as producer,
            Consumer("t", "c", nsqd_tcp_addresses=address, handler=handler, inline=True, max_in_flight=500) as consumer,
        ):
            publishers = [asyncio.create_task(publish(producer, worker, is_over)) for worker in range(20)]
            for _ in range(3):
                await until(partial(has_grown, acknowledged, len(acknowledged) + 400))
                await asyncio.sleep(1.2)  # a connection that breaks sooner does not count as a good one
                await asyncio.to_thread(nsqd.kill)
                await asyncio.to_thread(nsqd.start)
                started = time.monotonic()
                await until(lambda: consumer.connections)
                await until(partial(has_grown, acknowledged, len(acknowledged) + 20))
                outages.append(time.monotonic() - started)
            is_over.append(True)
            await asyncio.gather(*publishers)
            await until(lambda: acknowledged <= seen)

    run(main())
    assert len(acknowledged) > 1000
    assert acknowledged <= seen, f"{len(acknowledged - seen)} lost"
    assert max(outages) < SOON_S, f"after a restart it took {outages} s"
    assert unknown == 0, "retry_unknown sends again"


def test_a_publish_during_an_outage_ends_within_its_deadline(nsqd):
    async def main():
        async with Producer(address_of(nsqd), timeout=1) as producer:
            await producer.pub("t", b"x", timeout=PATIENCE_S)
            await asyncio.to_thread(nsqd.kill)
            began = time.monotonic()
            results = await asyncio.gather(*(producer.pub("t", b"x") for _ in range(50)), return_exceptions=True)
            assert time.monotonic() - began < 1 + SOON_S
            assert all(isinstance(result, PublishError) for result in results), results

    asyncio.run(main())


def test_a_stopped_nsqd_is_noticed(nsqd):
    async def main():
        async with Producer(address_of(nsqd), timeout=1) as producer:
            await producer.pub("t", b"x", timeout=PATIENCE_S)
            nsqd.send_signal(signal.SIGSTOP)
            with pytest.raises(PublishUnknown):
                await producer.pub("t", b"y")
            nsqd.send_signal(signal.SIGCONT)
            await producer.pub("t", b"z", timeout=PATIENCE_S)

    asyncio.run(main())


# --- errors of nsqd ---


def test_a_message_too_big_fails_alone(daemons):
    nsqd = daemons.nsqd("--durability=os", "--max-msg-size=100")

    async def main():
        async with Producer(address_of(nsqd)) as producer:
            bodies = [bytes([65 + number]) * (200 if number == 5 else 50) for number in range(10)]
            results = await asyncio.gather(*(producer.pub("t", body) for body in bodies), return_exceptions=True)
            assert [type(result) for number, result in enumerate(results) if number != 5] == [type(None)] * 9
            assert isinstance(results[5], PublishRefused)
            assert results[5].code == "E_BAD_MESSAGE"
            with pytest.raises(PublishRefused, match="out of range"):
                await producer.dpub("t", b"x", delay=7200)

    asyncio.run(main())
    assert nsqd.stats("t")["message_count"] == 9


# --- several nsqd, discovery ---


def test_discovery_by_two_nsqlookupd(daemons):
    lookups = [daemons.nsqlookupd(), daemons.nsqlookupd()]
    urls = [f"http://{lookup.http[0]}:{lookup.http[1]}" for lookup in lookups]

    def nsqd_of(lookup) -> Nsqd:
        return daemons.nsqd("--durability=os", f"--lookupd-tcp-address={lookup.tcp[0]}:{lookup.tcp[1]}")

    nsqds = [nsqd_of(lookups[0]), nsqd_of(lookups[1])]
    for number, nsqd in enumerate(nsqds):
        nsqd.publish("t", b"%d" % number)
        wait_until(partial(lookups[number].producers, "t"))
    seen: list[bytes] = []

    async def main():
        options: dict[str, Any] = {
            "lookup_interval": 0.5,
            "handler": lambda message: seen.append(message.body),
            "inline": True,
        }
        async with (
            Consumer("t", "c", nsqlookupd_http_addresses=urls, **options) as consumer,
            Producer(nsqlookupd_http_addresses=urls) as producer,
        ):
            assert len(consumer.connections) == 2, "each is known to another nsqlookupd"
            await until(lambda: len(seen) == 2)
            third = await asyncio.to_thread(nsqd_of, lookups[1])
            third.publish("t", b"third")
            await until(lambda: len(consumer.connections) == 3)
            await producer.pub("t", b"known topic")
            await producer.pub("new-topic", b"unknown topic")
            await until(lambda: len(seen) == 4)
            lookups[0].kill()
            lookups[1].kill()
            await producer.pub("t", b"without nsqlookupd")
            await until(lambda: len(seen) == 5)

    asyncio.run(main())


# --- leaving ---


def test_leaving_leaves_nothing_in_flight(nsqd):
    async def main():
        nsqd.publish("t", *[b"%d" % number for number in range(100)])
        async with Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), max_in_flight=50) as consumer:
            for message in await take(consumer, 10):
                message.finish()

    asyncio.run(main())
    row = nsqd.left("t", "c")
    assert (row["in_flight_count"], row["depth"], row["deferred_count"]) == (0, 90, 0)


def test_the_examples_work(nsqd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    nsqd.publish("orders", b"not JSON")
    published = subprocess.run(
        [sys.executable, str(ROOT / "examples/publish.py"), address_of(nsqd)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert "published 104 messages, 0 failed" in published.stdout
    with subprocess.Popen(
        [sys.executable, str(ROOT / "examples/consume.py"), address_of(nsqd)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as consuming:
        try:
            wait_until(lambda: nsqd.stats("orders")["channels"] and not nsqd.unfinished("orders", "billing"))
            consuming.send_signal(signal.SIGINT)
            out, errors = consuming.communicate(timeout=PATIENCE_S)
        finally:
            consuming.kill()
    assert out.count("billed order") == 104
    assert "billed order 10, attempt 2" in out
    assert out.endswith("bye\n")
    assert "not JSON" in errors
    assert "Traceback" not in errors


def test_the_examples_of_replay_and_of_tags_work(nsqd):
    def run(name: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / name), address_of(nsqd), str(nsqd.http[1])],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()

    for _ in range(2):
        lines = run("replay.py")
        assert lines[:5] == ["first time:", "  21.0", "  21.5", "  -273.2", "  22.0"]
        assert lines[5].startswith("again, without 1 of ") and "  -273.2" not in lines[6:]
        assert [line for line in lines if line.startswith("cancelling 'tomorrow 1', due in ")]
        nsqd.post("/topic/delete?topic=readings")
    lines = sorted(run("tags.py"))
    assert [line.partition(":")[0] for line in lines] == ["canary"] * 4 + ["ordinary"] * 6
    assert lines[0] == "canary: order 0 of customer test" and lines[4] == "ordinary: order 1 of customer 0001"


def test_the_examples_of_a_service_and_of_blocking_code_work(nsqd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    nsqd.publish("orders", b"not JSON", *(b'{"id": %d}' % number for number in range(1, 21)))
    with subprocess.Popen(
        [sys.executable, str(ROOT / "examples/service.py"), address_of(nsqd)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as service:
        try:
            wait_until(lambda: nsqd.stats("orders")["channels"] and not nsqd.unfinished("orders", "invoicing"))
            service.send_signal(signal.SIGTERM)
            out, errors = service.communicate(timeout=PATIENCE_S)
        finally:
            service.kill()
    assert service.returncode == 0, errors
    assert out.count("invoice for order") == 20 and "invoice for order 20, attempt 2" in out
    assert (nsqd.stats("invoices")["depth"], nsqd.stats("orders.dead")["depth"]) == (20, 1)
    worked = subprocess.run(
        [sys.executable, str(ROOT / "examples/blocking.py"), address_of(nsqd)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert sorted(worked.stdout.splitlines()) == sorted(f"job {number}" for number in range(10))
    assert nsqd.unfinished("jobs", "workers") == 0


def test_importing_and_publishing_needs_no_http_library(nsqd):
    """Such a library alone costs more than 100 ms; nobody has to pay for it, and discovery least of all."""
    code = """
import asyncio, sys
import flintmq
assert "asyncio" not in flintmq.__dict__ and "flintmq.client" not in sys.modules
from flintmq import Consumer, Producer
async def main():
    async with Producer(sys.argv[1]) as producer, Consumer("t", "c", nsqd_tcp_addresses=sys.argv[1]) as consumer:
        await producer.pub("t", b"x")
        async for message in consumer:
            message.finish()
            break
asyncio.run(main())
assert not {"aiohttp", "anyio", "http.client", "httpx2", "urllib.request"} & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-c", code, address_of(nsqd)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=PATIENCE_S,
        check=True,
    )


def test_memory_of_a_consumer_stays_small(nsqd):
    """A process that publishes and consumes 200,000 messages stays below 40 MiB."""
    code = """
import asyncio, sys
from flintmq import Consumer, Producer
async def main():
    seen = 0
    options = {"nsqd_tcp_addresses": sys.argv[1], "max_in_flight": 2500}
    async with Producer(sys.argv[1]) as producer, Consumer("t", "c", **options) as consumer:
        for _ in range(1000):
            await producer.mpub("t", [bytes([120]) * 200] * 200)
        async for message in consumer:
            message.finish()
            seen += 1
            if seen == 200_000:
                break
asyncio.run(main())
print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, address_of(nsqd)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) < 40 * 1024, f"{done.stdout} KiB"
