"""Services made with App, typed bodies and dead letters, against a whole nsqd in this process."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import pytest
from tests.integration.daemons import PATIENCE_S, SOON_S
from typing_extensions import TypeAliasType

from flintmq import App, BodyError, Consumer, LocalProtocolError, Message, OptionError, Producer, Requeue
from flintmq.client.app import ONE_SIGNAL_S
from flintmq.testing import MemoryNsqd

SOURCES = Path(__file__).resolve().parents[2] / "src"


class Order(msgspec.Struct):
    id: int
    total: float = 0.0


@dataclass
class Point:
    x: int
    y: int


@pytest.fixture
def nsqd() -> Iterator[MemoryNsqd]:
    with MemoryNsqd() as nsqd:
        yield nsqd


# -- what handlers are handed ------------------------------------------------------------------------------------------


async def test_a_handler_is_handed_what_its_annotations_say(nsqd: MemoryNsqd):
    app = App(nsqd_tcp_addresses=nsqd.tcp_address)
    seen: dict[str, Any] = {}

    @app.consumer("orders", "both")
    async def both(order: Order, message: Message[Order]) -> None:
        seen["both"] = (order, message.value, message.body)

    @app.consumer("orders", "value")
    async def value(order: Order) -> None:
        seen["value"] = order

    @app.consumer("orders", "message")
    async def message(message: Message) -> None:
        seen["message"] = (message.value, message.body)

    @app.consumer("orders", "typed-message")
    async def typed(message: Message[Order]) -> None:
        seen["typed"] = message.value

    @app.consumer("orders", "plain")
    def plain(body: bytes, extra: int = 3) -> None:
        seen["plain"] = (body, threading.current_thread() is threading.main_thread())

    @app.consumer("orders", "described")
    async def described(it: Annotated[Message[Order], "the order"]) -> None:
        seen["described"] = it.value

    @app.consumer("orders", "text")
    async def text(body: str) -> None:
        seen["text"] = body

    @app.consumer("orders", "unannotated")
    async def unannotated(message) -> None:
        seen["unannotated"] = message.body

    @app.consumer("orders", "dict")
    async def as_dict(fields: dict[str, Any]) -> None:
        seen["dict"] = fields

    body = b'{"id":1,"total":2.5}'
    async with app:
        nsqd.publish("orders", body)
        for consumer in app.consumers:
            await nsqd.drained("orders", consumer.channel)
    order = Order(1, 2.5)
    assert seen == {
        "both": (order, order, body),
        "value": order,
        "message": (body, body),
        "typed": order,
        "plain": (body, False),
        "described": order,
        "text": body.decode(),
        "unannotated": body,
        "dict": {"id": 1, "total": 2.5},
    }


class Callables:
    """Handlers that are no functions; the annotation of a field has nothing to do with those of the call."""

    order: Point

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    async def __call__(self, order: Order, message: Message[Order]) -> None:
        self.seen["object"] = (order, message.value)


async def test_handlers_that_are_no_functions(nsqd: MemoryNsqd):
    app = App(nsqd_tcp_addresses=nsqd.tcp_address)
    handler = Callables()

    async def note(name: str, order: Order, *, into: dict[str, Any]) -> None:
        into[name] = order

    def in_a_thread(message: Message, into: dict[str, Any]) -> None:
        into["thread"] = message.body

    assert app.consumer("orders", "object")(handler) is handler
    app.consumer("orders", "partial")(functools.partial(note, "partial", into=handler.seen))
    app.consumer("orders", "twice")(functools.partial(functools.partial(note, into=handler.seen), "twice"))
    app.consumer("orders", "thread")(functools.partial(in_a_thread, into=handler.seen))
    async with app:
        await app.producer.pub("orders", Order(1, 2.5))
        for channel in ("object", "partial", "twice", "thread"):
            await nsqd.drained("orders", channel)
    order = Order(1, 2.5)
    assert handler.seen == {
        "object": (order, order),
        "partial": order,
        "twice": order,
        "thread": msgspec.json.encode(order),
    }


async def test_running_where_a_loop_runs_says_what_to_call_instead(recwarn: pytest.WarningsRecorder):
    app = App(nsqd_tcp_addresses="127.0.0.1:4150")
    with pytest.raises(RuntimeError, match=r"await app.serve\(\) instead"):
        app.run()
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == [], "no coroutine was left behind"


@pytest.mark.parametrize(
    "handler",
    [
        functools.partial(lambda db, message: None, db=1),
        functools.partial(lambda message: None, b"x"),
        lambda: None,
        lambda first, second: None,
        lambda *, keyword: None,
    ],
)
def test_what_cannot_be_called_is_told_at_once(handler: Any):
    app = App(nsqd_tcp_addresses="127.0.0.1:4150")
    with pytest.raises(OptionError, match="a function of a message"):
        app.consumer("t", "c")(handler)


def test_annotations_that_contradict_or_cannot_be_read():
    app = App(nsqd_tcp_addresses="127.0.0.1:4150")

    def two_types(order: Order, message: Message[Point]) -> None: ...
    def two_bodies(order: Order, point: Point) -> None: ...
    def unknown(order: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for handler in (two_types, two_bodies, unknown):
        with pytest.raises(OptionError, match="a function of a message"):
            app.consumer("t", "c")(handler)


def test_mistakes_in_options_are_told_at_once():
    app = App(nsqd_tcp_addresses="127.0.0.1:4150")

    def handler(message: Message) -> None: ...

    with pytest.raises(OptionError, match="max_in_flight"):
        app.consumer("t", "c", max_in_flight=0)(handler)
    with pytest.raises(LocalProtocolError, match="channel name"):
        app.consumer("t", "?")(handler)
    with pytest.raises(OptionError, match="argument of App"):
        app.consumer("t", "c", nsqd_tcp_addresses="127.0.0.1:1")(handler)
    with pytest.raises(OptionError, match="another topic"):
        app.consumer("t", "c", dead_letter="t")(handler)
    with pytest.raises(OptionError):
        App()
    with pytest.raises(RuntimeError, match="runs"):
        app.producer  # noqa: B018


# -- life --------------------------------------------------------------------------------------------------------------


async def test_hooks_producer_and_consumers_start_and_end_in_order(nsqd: MemoryNsqd):
    app = App(nsqlookupd_http_addresses=nsqd.nsqlookupd_http_address)
    steps: list[str] = []

    @app.on_startup
    async def startup() -> None:
        steps.append("startup")

    @app.on_shutdown
    def shutdown() -> None:
        steps.append("shutdown")

    @app.consumer("in", "c")
    async def work(body: bytes) -> None:
        steps.append("handler begins")
        app.stop()
        await asyncio.sleep(0.05)
        await app.producer.pub("out", {"was": body.decode()})
        steps.append("handler ends")

    nsqd.publish("in", b"x")
    for _ in range(2):  # an App can be run again
        await asyncio.wait_for(app.serve(), 20)
        assert steps == ["startup", "handler begins", "handler ends", "shutdown"]
        assert nsqd.is_drained("in", "c")
        steps.clear()
        nsqd.publish("in", b"x")
    assert nsqd.published("out") == [b'{"was":"x"}', b'{"was":"x"}']


def test_one_that_is_stopped_before_it_starts_ends_then(nsqd: MemoryNsqd):
    app = App(nsqd_tcp_addresses=nsqd.tcp_address)
    seen: list[Message] = []
    app.consumer("orders", "c")(seen.append)

    async def serve() -> None:
        async with asyncio.timeout(SOON_S):
            await app.serve()

    app.stop()
    asyncio.run(serve())

    async def serve_again() -> None:
        serving = asyncio.create_task(serve())
        nsqd.publish("orders", b"x")
        while not seen:
            await asyncio.sleep(0.01)
        app.stop()
        await serving

    asyncio.run(serve_again())


async def test_every_hook_is_called_whichever_fails(nsqd: MemoryNsqd, caplog: pytest.LogCaptureFixture):
    app = App(nsqd_tcp_addresses=nsqd.tcp_address)
    called: list[str] = []

    @app.consumer("in", "c")
    async def work(body: bytes) -> None: ...

    @app.on_shutdown
    def first() -> None:
        raise ValueError("the first")

    @app.on_shutdown
    async def second() -> None:
        called.append("second")
        await app.producer.pub("out", b"the producer is there for all of them")
        raise KeyError("the second")

    @app.on_shutdown
    def third() -> None:
        called.append("third")

    with pytest.raises(ValueError, match="the first"):
        async with app:
            pass
    assert called == ["second", "third"]
    assert len(nsqd.published("out")) == 1
    assert "second" in caplog.text and "failed too" in caplog.text
    with pytest.raises(RuntimeError):
        app.producer  # noqa: B018


async def test_a_service_that_cannot_start_ends_what_was_started(nsqd: MemoryNsqd):
    app = App(nsqd_tcp_addresses=nsqd.tcp_address)
    ended: list[bool] = []
    app.on_shutdown(lambda: ended.append(True))

    @app.on_startup
    def startup() -> None:
        raise ValueError("no database")

    @app.consumer("in", "c")
    async def work(body: bytes) -> None: ...

    with pytest.raises(ValueError, match="no database"):
        await app.serve()
    assert ended == []
    with pytest.raises(RuntimeError):
        app.producer  # noqa: B018


SERVICE = """
import asyncio, logging, sys, time
from flintmq import App
logging.basicConfig(level=logging.INFO)
app = App(nsqd_tcp_addresses=sys.argv[1])

@app.consumer("in", "c", drain_timeout=float(sys.argv[2]))
async def work(body: bytes) -> None:
    print("begun", flush=True)
    await asyncio.sleep(float(body))
    print("done", flush=True)

app.run()
"""

SERVICE_IN_A_THREAD = SERVICE.replace("async def", "def").replace("await asyncio", "time")


def service(nsqd: MemoryNsqd, drain_timeout_s: float, code: str = SERVICE) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, nsqd.tcp_address, str(drain_timeout_s)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(nsqd: MemoryNsqd, number: signal.Signals):
    nsqd.publish("in", b"0.3")
    with service(nsqd, 30) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "done\n"), err
    assert "draining" in err
    assert nsqd.is_drained("in", "c")


STARTING = """
import asyncio, sys
from flintmq import App

app = App(nsqd_tcp_addresses=sys.argv[1])

@app.on_startup
async def slow() -> None:
    print("begun", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("given up", flush=True)

@app.consumer("in", "c")
async def handle(message) -> None: ...

app.run()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_starts_ends_it(nsqd: MemoryNsqd, number: signal.Signals):
    with service(nsqd, 30, STARTING) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "given up\n"), err
    assert "Traceback" not in err


def test_a_signal_while_it_starts_drains_what_handles_already(nsqd: MemoryNsqd):
    nsqd.publish("in", b"0.3")
    code = SERVICE.replace("sys.argv[1]", "sys.argv[1].split(',')")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        silent.listen()
        host, port = silent.getsockname()
        command = [sys.executable, "-c", code, f"{nsqd.tcp_address},{host}:{port}", "30"]
        environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "done\n"), err
    assert nsqd.is_drained("in", "c")


def test_a_second_signal_does_not_wait(nsqd: MemoryNsqd):
    nsqd.publish("in", b"60")
    with service(nsqd, 30) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        while "draining" not in process.stderr.readline():
            pass
        time.sleep(ONE_SIGNAL_S)  # what comes sooner is the same signal
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SOON_S)  # before the time for draining is over
    assert process.returncode == 128 + signal.SIGTERM
    assert nsqd.counts("in", "c").unfinished == 1


def test_a_handler_in_a_thread_that_hangs_does_not_keep_the_process(nsqd: MemoryNsqd):
    nsqd.publish("in", b"3600")
    with service(nsqd, 0.1, SERVICE_IN_A_THREAD) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, ""), err
    assert "a thread still runs the handler with message" in err
    assert nsqd.counts("in", "c").unfinished == 1


def test_ctrl_c_that_comes_twice_at_once_is_one(nsqd: MemoryNsqd):
    """From the terminal, and from a wrapper that passes it on."""
    nsqd.publish("in", b"2")
    with service(nsqd, 30) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "done\n"), err
    assert "again" not in err
    assert "1 handlers still run: waiting for at most 30 s (drain_timeout)" in err
    assert nsqd.is_drained("in", "c")


# -- typed bodies and dead letters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["tasks", "threads", "inline", "iterated"])
async def test_a_bad_body_is_a_dead_letter_and_no_retry_loop(nsqd: MemoryNsqd, mode: str):
    """Whatever runs the handler: published unchanged, finished, and the good ones around it are handled."""
    nsqd.publish("t", b'{"x":1,"y":2}', b"{nonsense", b'{"x":"a","y":2}', b'{"x":3,"y":4}')
    seen: list[Point] = []

    def plain(message: Message[Point]) -> None:
        seen.append(message.value)

    async def task(message: Message[Point]) -> None:
        seen.append(message.value)

    handler: Any = {"tasks": task, "threads": plain, "inline": plain, "iterated": None}[mode]
    async with Consumer(
        "t", "c", type=Point, nsqd_tcp_addresses=nsqd.tcp_address, handler=handler, inline=mode == "inline",
        dead_letter="t.dead",
    ) as consumer:  # fmt: skip
        if mode == "iterated":
            async for message in consumer:
                async with message:
                    seen.append(message.value)
                if len(seen) == 2:
                    break
        await nsqd.drained("t", "c")
        assert consumer.stats().given_up == 2
        assert consumer.stats().requeued == 0
        assert consumer.stats().backoff == "normal"
    assert sorted(seen, key=lambda point: point.x) == [Point(1, 2), Point(3, 4)]
    assert sorted(nsqd.published("t.dead")) == [b'{"x":"a","y":2}', b"{nonsense"]


async def test_a_message_that_fails_too_often_is_a_dead_letter(nsqd: MemoryNsqd):
    nsqd.publish("t", b"bad", b"good")
    tries: list[bytes] = []

    async def handler(message: Message) -> None:
        tries.append(message.body)
        if message.body == b"bad":
            raise Requeue(0)

    async with Consumer(
        "t", "c", nsqd_tcp_addresses=nsqd.tcp_address, handler=handler, max_attempts=3, dead_letter="dead"
    ):
        await nsqd.drained("t", "c")
    assert sorted(tries) == [b"bad"] * 3 + [b"good"]
    assert nsqd.published("dead") == [b"bad"]


async def test_nothing_is_finished_before_its_copy_is_stored(nsqd: MemoryNsqd):
    """The dead-letter topic cannot be written: the message stays."""
    nsqd.create("t", "c")
    nsqd.publish("t", b"bad")
    nsqd.disk.fail("write", times=1000, path="topics/t-dead/")
    errors: list[BaseException] = []

    async def handler(message: Message) -> None:
        raise Requeue(0)

    async with Consumer(
        "t", "c", nsqd_tcp_addresses=nsqd.tcp_address, handler=handler, max_attempts=1, dead_letter="dead",
        requeue_delay=0.01, max_backoff=0, on_error=errors.append, drain_timeout=0.1,
    ) as consumer:  # fmt: skip
        async with asyncio.timeout(20):
            while consumer.stats().failed < 1:
                await asyncio.sleep(0.01)
    assert nsqd.counts("t", "c").unfinished == 1
    assert nsqd.published("dead") == []


async def test_a_callback_may_answer_before_the_dead_letter(nsqd: MemoryNsqd):
    nsqd.publish("t", b"not a number", b"1")

    async def rescue(message: Message[int]) -> None:
        if message.body.startswith(b"not"):
            message.finish()

    async with Consumer(
        "t", "c", type=int, nsqd_tcp_addresses=nsqd.tcp_address, handler=lambda message: message.value,
        on_giving_up=rescue, dead_letter="dead",
    ):  # fmt: skip
        await nsqd.drained("t", "c")
    assert nsqd.published("dead") == []


async def test_values_are_published_as_json(nsqd: MemoryNsqd):
    async with Producer(nsqd.tcp_address) as producer:
        await producer.pub("t", Order(1, 2.0))
        await producer.pub("t", {"a": [1, None]})
        await producer.mpub("t", [Point(1, 2), b"raw", bytearray(b"too")])
        await producer.dpub("t", [1], delay=0)
        with pytest.raises(TypeError, match="encode it first"):
            await producer.pub("t", "text")
        with pytest.raises(TypeError, match="object"):
            await producer.pub("t", object())
    assert nsqd.published("t") == [
        b'{"id":1,"total":2.0}', b'{"a":[1,null]}', b'{"x":1,"y":2}', b"raw", b"too", b"[1]",
    ]  # fmt: skip


async def test_a_body_error_says_what_is_wrong(nsqd: MemoryNsqd):
    nsqd.publish("t", b'{"id":"one"}')
    async with Consumer("t", "c", type=Order, nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
        message = await anext(aiter(consumer))
        with pytest.raises(BodyError, match=r"not JSON of type Order: Expected `int`, got `str` - at `\$.id`"):
            message.value  # noqa: B018
        message.finish()
    with pytest.raises(OptionError, match="msgspec"):
        Consumer("t", "c", type=complex | bytes, nsqd_tcp_addresses=nsqd.tcp_address)


Item = TypeVar("Item")
Other = TypeVar("Other")
Orders = TypeAliasType("Orders", Message[Order])
OrderBody = TypeAliasType("OrderBody", Order)
Of = TypeAliasType("Of", Message[Item], type_params=(Item,))
Same = TypeAliasType("Same", Item, type_params=(Item,))
Second = TypeAliasType("Second", Message[Other], type_params=(Item, Other))


@pytest.mark.parametrize(
    "hint",
    [
        Orders, TypeAliasType("Again", Orders), Annotated[Orders, "the order"], Of[Order], Same[Message[Order]],
        Second[int, Order], Message[OrderBody], TypeAliasType("Described", Annotated[Message[Order], "the order"]),
    ],
)  # fmt: skip
async def test_a_handler_may_be_annotated_with_another_name_of_the_type(nsqd: MemoryNsqd, hint: Any):
    app = App(nsqd_tcp_addresses=nsqd.tcp_address)
    seen: list[object] = []

    async def handle(order: Any, message: Any) -> None:
        seen.extend((order, message.value))

    handle.__annotations__ = {"order": OrderBody, "message": hint}
    app.consumer("orders", "both")(handle)
    async with app:
        nsqd.publish("orders", b'{"id":1}')
        await nsqd.drained("orders", "both")
    assert seen == [Order(1), Order(1)]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there is no statement `type` yet")
@pytest.mark.parametrize(("hint", "why"), [("Loop", "stands for itself"), ("Unknown", "'Nothing' is not defined")])
def test_a_handler_annotated_with_a_name_that_stands_for_nothing_is_refused(hint: str, why: str):
    names: dict[str, Any] = {"Message": Message}
    exec("type Loop = Loop\ntype Unknown = Message[Nothing]", names)  # no syntax of Python 3.11

    async def handle(message: Any) -> None:
        pass

    handle.__annotations__ = {"message": names[hint]}
    with pytest.raises(OptionError, match=why):
        App(nsqd_tcp_addresses="127.0.0.1:1").consumer("orders", "c")(handle)
