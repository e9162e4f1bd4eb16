"""What the usual mistakes of a newcomer show: what is wrong, where, and what to do; not how it was found out."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import PATIENCE_S
from tests.integration.flavours import Asyncio, Blocking, Flavour

import flintmq
from flintmq import (
    App,
    Consumer,
    LocalProtocolError,
    LookupdAdmin,
    Message,
    NsqdAdmin,
    OptionError,
    Producer,
    PublishRefused,
)
from flintmq.testing import MemoryNsqd

SOURCES = Path(__file__).resolve().parents[2] / "src"
NOBODY = "127.0.0.1:1"


@pytest.fixture(params=[Asyncio, Blocking])
def flavour(request: pytest.FixtureRequest) -> Iterator[Flavour]:
    flavour = request.param()
    yield flavour
    flavour.close()


def failed_pub(flavour: Flavour, *args: Any, body: bytes = b"x", **options: Any) -> tuple[str, list[str]]:
    """The last line that Python prints of a publish that failed, and those of what it was caused by.

    It is given time enough to hear of the cause, which a busy machine needs more of.
    """
    for timeout_s in (0.5, 2, PATIENCE_S / 3):
        with flavour.producer(*args, timeout=timeout_s, **options) as producer, pytest.raises(PublishRefused) as caught:
            producer.call(lambda producer: producer.pub("t", body))
        if caught.value.__cause__ is not None:
            break
    cause = caught.value.__cause__
    lines = [] if cause is None else "".join(traceback.format_exception(cause)).splitlines()
    return "".join(traceback.format_exception_only(caught.value)), lines


def test_nobody_listens(flavour: Flavour):
    """Forty lines of asyncio stood in front of the one that says it."""
    last, cause = failed_pub(flavour, NOBODY)
    assert (
        "TIMEOUT no nsqd took it in time: connection to 127.0.0.1:1 failed: Connection refused: nothing listens" in last
    )
    assert "is the daemon running, and is this its address?" in last
    assert "Errno" not in last
    assert len(cause) == 1


CALLS = [methodcaller("pub", "t", b"x"), methodcaller("mpub", "t", [b"x"]), methodcaller("dpub", "t", b"x", 0)]


async def refused_in_this_loop(producer: Producer, why: str) -> None:
    said = f"^the producer belongs to the event loop it was started in, which {why}.*: .* or use flintmq.sync.Producer"
    for call in (*CALLS, methodcaller("close")):
        with pytest.raises(RuntimeError, match=said):
            await call(producer)


def test_a_producer_in_another_event_loop_publishes_nothing():
    """Else it publishes, and raises that a task is attached to a different loop: a retry publishes once more."""

    async def main(nsqd: MemoryNsqd) -> None:
        async with Producer(nsqd.tcp_address) as producer:
            await asyncio.to_thread(asyncio.run, refused_in_this_loop(producer, "is not this one"))
            await producer.pub("t", b"in its own")  # nothing was closed
            assert producer.stats().published == 1
        assert nsqd.published("t") == [b"in its own"]

    with MemoryNsqd() as nsqd:
        asyncio.run(main(nsqd))


def test_a_producer_of_a_loop_that_has_ended():
    """As a module has one that calls ``asyncio.run`` twice."""
    producer = Producer(NOBODY)
    asyncio.run(producer.start())
    asyncio.run(refused_in_this_loop(producer, "has ended"))


async def refused_consumer(consumer: Consumer, why: str) -> None:
    said = f"^the consumer belongs to the event loop it was started in, which {why}.*: .* or use flintmq.sync.Consumer"
    for call in (anext(aiter(consumer)), anext(consumer.batches(1)), consumer.close()):
        with pytest.raises(RuntimeError, match=said):
            await call


def test_a_consumer_in_another_event_loop_consumes_nothing():
    """Else it waits without end, and what comes is dropped when its time is over."""

    async def main(nsqd: MemoryNsqd) -> None:
        nsqd.publish("t", b"x")
        async with Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
            await asyncio.to_thread(asyncio.run, refused_consumer(consumer, "is not this one"))
            async for message in consumer:  # nothing was closed
                message.finish()
                break

    with MemoryNsqd() as nsqd:
        asyncio.run(main(nsqd))


def test_a_consumer_of_a_loop_that_has_ended():
    consumer = Consumer("t", "c", nsqd_tcp_addresses=NOBODY)
    asyncio.run(consumer.start())
    asyncio.run(refused_consumer(consumer, "has ended"))


def test_without_an_event_loop_of_asyncio():
    """As under Trio, whose loop asyncio does not know."""
    app = App(nsqd_tcp_addresses=NOBODY)
    app.consumer("t", "c")(lambda message: None)
    producer, consumer = Producer(NOBODY), Consumer("t", "c", nsqd_tcp_addresses=NOBODY, handler=print)
    pulled = Consumer("t", "c", nsqd_tcp_addresses=NOBODY)
    nsqd, nsqlookupd = NsqdAdmin(NOBODY), LookupdAdmin(NOBODY)
    calls: list[tuple[str, str, Callable[[], Any]]] = [
        *(("Producer", "Producer", partial(call, producer)) for call in (methodcaller("start"), *CALLS)),
        *(("Consumer", "Consumer", partial(methodcaller(name), consumer)) for name in ("start", "run")),
        ("Consumer", "Consumer", lambda: anext(aiter(pulled))),
        ("Consumer", "Consumer", lambda: anext(pulled.batches(1))),
        ("App", "Consumer", app.serve),
        ("App", "Consumer", app.__aenter__),
        ("NsqdAdmin", "NsqdAdmin", nsqd.ping),
        ("LookupdAdmin", "LookupdAdmin", nsqlookupd.ping),
    ]
    for name, instead, call in calls:
        said = f"flintmq.{name} runs on asyncio, and no event loop of asyncio runs here: use flintmq.sync.{instead}, "
        with pytest.raises(RuntimeError, match=f"^{re.escape(said)}") as caught:
            call().__await__().send(None)
        assert caught.value.__suppress_context__
    asyncio.run(started_after_all(producer, consumer))


async def started_after_all(producer: Producer, consumer: Consumer) -> None:
    """What was refused without a loop can be started in one."""
    async with producer, consumer:
        pass


def test_an_answer_when_the_loop_has_ended():
    """Of a consumer that was closed it is one that comes too late, as any other; else it says what was left out."""

    async def main(nsqd: MemoryNsqd, closes: bool) -> Message:
        consumer = Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address)
        await consumer.start()
        message = await anext(aiter(consumer))
        if closes:
            await consumer.close()
        return message

    with MemoryNsqd() as nsqd:
        nsqd.publish("t", b"x")
        late = asyncio.run(main(nsqd, closes=True))
        assert late.is_lost
        late.finish()
        lost = asyncio.run(main(nsqd, closes=False))
        with pytest.raises(RuntimeError, match=r"the event loop of this client has ended, .* close\(\) it first"):
            lost.requeue()


def test_a_producer_that_was_not_started():
    async def main() -> None:
        producer = Producer(NOBODY)
        for call in CALLS:
            with pytest.raises(RuntimeError, match="start the producer first"):
                await call(producer)
        await producer.close()

    asyncio.run(main())


@pytest.mark.parametrize("topic", [None, b"t", 5])
def test_a_topic_that_is_no_text(flavour: Flavour, topic: Any):
    said = re.escape(f"topic name {topic!r} is not valid: it is text, not {type(topic).__name__}")
    with flavour.producer(NOBODY) as producer:
        for call in (methodcaller("pub", topic, b"x"), methodcaller("mpub", topic, [b"x"])):
            with pytest.raises(LocalProtocolError, match=said):
                producer.call(call)
        with pytest.raises(OptionError, match=r"^argument: delay=None is not allowed; seconds or a timedelta"):
            producer.call(methodcaller("dpub", "t", b"x", None))


def test_no_nsqlookupd_listens(flavour: Flavour):
    last, cause = failed_pub(flavour, nsqlookupd_http_addresses=NOBODY)
    assert "no nsqlookupd answered" in last
    assert "http://127.0.0.1:1: " in last
    assert "Connection refused: nothing listens there" in last
    assert len(cause) == 1


def test_a_name_that_is_none(flavour: Flavour):
    """``Producer("host")``: the port is nsqd's own, the name has to be one."""
    last, cause = failed_pub(flavour, "no-such-host.invalid")
    assert "connection to no-such-host.invalid:4150 failed: " in last
    assert "no such host; check the name" in last
    assert len(cause) == 1


def test_a_refusal_of_nsqd(flavour: Flavour):
    with MemoryNsqd("--max-msg-size=10") as nsqd:
        last, cause = failed_pub(flavour, nsqd.tcp_address, body=b"x" * 100)
    assert "E_BAD_MESSAGE PUB message too big 100 > 10" in last
    assert len(cause) == 1


def test_several_addresses_of_one_name(flavour: Flavour):
    """asyncio says "Multiple exceptions" of a name with an IPv6 address and an IPv4 address."""
    last, _ = failed_pub(flavour, "localhost:1")
    assert "connection to localhost:1 failed: Connection refused: nothing listens there" in last


MAKERS: list[Callable[..., Any]] = [
    Producer,
    App,
    lambda **options: Consumer("t", "c", **options),
    flintmq.sync.Producer,
    lambda **options: flintmq.sync.Consumer("t", "c", **options),
]


@pytest.mark.parametrize("make", MAKERS)
def test_no_address(make: Callable[..., Any]):
    with pytest.raises(OptionError, match=r'give "127\.0\.0\.1:4150", say, or nsqlookupd_http_addresses="http://'):
        make()
    with pytest.raises(OptionError, match="either nsqd_tcp_addresses or nsqlookupd_http_addresses, not both"):
        make(nsqd_tcp_addresses=NOBODY, nsqlookupd_http_addresses=NOBODY)


def test_an_app_without_consumers_does_not_run():
    """It ran, for ever, and did nothing."""
    app = App(nsqd_tcp_addresses=NOBODY)
    with pytest.raises(OptionError, match=r"declare at least one before it runs: @app\.consumer\(topic, channel\)"):
        app.run()
    with pytest.raises(OptionError, match="declare at least one"):
        asyncio.run(asyncio.wait_for(app.serve(), PATIENCE_S))


def run(program: str) -> str:
    """Run a program in a process of its own; what it prints."""
    environment = {"PYTHONPATH": str(SOURCES), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=PATIENCE_S * 2
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_telemetry_without_its_library():
    """The text of the error needed what the error kept from being set."""
    said = run(
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import flintmq\n"
        "try: flintmq.Telemetry()\n"
        "except flintmq.OptionError as error: print(error)"
    )
    assert "opentelemetry-api is missing: pip install 'flintmq[otel]'" in said


@pytest.mark.parametrize("name", ["sync.Producer", "testing.MemoryNsqd", "errors.FlintError"])
def test_modules_are_there_after_import(name: str):
    assert name.partition(".")[2] in run(f"import flintmq; print(flintmq.{name})")
    assert {"sync", "testing", "errors"} <= set(dir(flintmq))
