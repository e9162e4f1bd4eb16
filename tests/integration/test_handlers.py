"""Handlers that do not do what a handler should, and handlers in threads: of both clients, and of App.

Against a whole nsqd in this process, whose counts say what became of each message.
"""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import functools
import gc
import multiprocessing.pool
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integration.daemons import PATIENCE_S, wait_until
from tests.integration.flavours import FLAVOURS, opened, stats_of

import flintmq.sync
from flintmq import App, Consumer, Discard, LocalProtocolError, Message, OptionError, Producer, Requeue
from flintmq.testing import MemoryNsqd

NEVER_S = 3600.0


@pytest.fixture
def nsqd() -> Iterator[MemoryNsqd]:
    with MemoryNsqd() as nsqd:
        nsqd.create("t", "c")
        yield nsqd


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def coroutine(message: Message) -> None: ...


def generator(message: Message) -> Iterator[None]:
    yield


async def async_generator(message: Message) -> AsyncIterator[None]:
    yield


class Generating:
    def __call__(self, message: Message) -> Iterator[None]:
        yield


def behind_a_decorator(function: Callable[..., Any], as_it_is: bool = True) -> Callable[..., Any]:
    """A plain function that calls another one; with the name and annotations of that, if ``as_it_is``."""

    def call(message: Message) -> Any:
        return function(message)

    return functools.wraps(function)(call) if as_it_is else call


# --- what is refused where it is given ---

BOTH = pytest.mark.parametrize("kind", [Consumer, flintmq.sync.Consumer], ids=FLAVOURS)


@BOTH
@pytest.mark.parametrize("option", ["handler", "on_giving_up", "on_error"])
@pytest.mark.parametrize(
    "function", [5, "name", generator, async_generator, functools.partial(generator), Generating()]
)
def test_what_runs_nothing_when_it_is_called_is_refused(kind: Any, option: str, function: Any):
    with pytest.raises(OptionError, match=rf"{option}=.*function"):
        kind("t", "c", nsqd_tcp_addresses="a:1", **{option: function})


@pytest.mark.parametrize("option", ["handler", "on_giving_up", "on_error"])
def test_without_an_event_loop_there_are_plain_functions_only(option: str):
    with pytest.raises(OptionError, match="async def"):
        flintmq.sync.Consumer("t", "c", nsqd_tcp_addresses="a:1", **{option: coroutine})  # type: ignore[call-overload]


def test_nobody_awaits_on_error():
    with pytest.raises(OptionError, match=r"on_error=.*async def"):
        Consumer("t", "c", nsqd_tcp_addresses="a:1", on_error=coroutine)  # type: ignore[arg-type]


@BOTH
@pytest.mark.parametrize("given", ["telemetry=5", "fetch=5", "ordered='no'", "headers=1", "trace='no'"])
def test_what_a_consumer_cannot_use_is_refused(kind: Any, given: str):
    option, _, value = given.partition("=")
    with pytest.raises(OptionError, match=given):
        kind("t", "c", nsqd_tcp_addresses="a:1", handler=lambda message: None, **{option: ast.literal_eval(value)})


@pytest.mark.parametrize("kind", [Producer, flintmq.sync.Producer], ids=FLAVOURS)
@pytest.mark.parametrize("given", ["telemetry=5", "fetch=5", "retry_unknown='no'", "idempotent=None"])
def test_what_a_producer_cannot_use_is_refused(kind: Any, given: str):
    option, _, value = given.partition("=")
    with pytest.raises(OptionError, match=given):
        kind("a:1", **{option: ast.literal_eval(value)})


def test_what_is_neither_on_nor_off_is_refused():
    with pytest.raises(OptionError, match="batch='no'"):
        Producer("a:1", batch="no")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="inline='no'"):
        Consumer("t", "c", nsqd_tcp_addresses="a:1", handler=bool, inline="no")  # type: ignore[call-overload]


def test_app_refuses_what_runs_nothing():
    app = App(nsqd_tcp_addresses="a:1")

    def of_a_body(body: bytes) -> Iterator[None]:
        yield

    for function in (generator, async_generator, of_a_body):
        with pytest.raises(OptionError, match="handler"):
            app.consumer("t", "c")(function)
    with pytest.raises(OptionError, match="on_startup"):
        app.on_startup(generator)
    with pytest.raises(OptionError, match="on_shutdown"):
        app.on_shutdown(async_generator)


# --- what a function returns ---


@pytest.mark.parametrize("hidden", [behind_a_decorator, functools.partial(behind_a_decorator, as_it_is=False)])
async def test_a_coroutine_function_that_looks_like_a_plain_one_is_awaited(nsqd: MemoryNsqd, hidden: Any):
    """In the loop's thread, as many at a time as ``concurrency`` says; what it raises is its message's failure."""
    loops: list[Any] = []
    running = [0, 0]

    async def real(message: Message) -> None:
        loops.append(asyncio.get_running_loop())
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0)
        running[0] -= 1
        if message.body == b"bad":
            raise ValueError("a bad one")

    nsqd.publish("t", b"bad", *[b"good"] * 20)
    async with Consumer(
        "t", "c", nsqd_tcp_addresses=nsqd.tcp_address, handler=hidden(real), concurrency=2, requeue_delay=NEVER_S,
        max_requeue_delay=NEVER_S, backoff=0,
    ) as consumer:  # fmt: skip
        await until(lambda: consumer.stats().finished == 20 and consumer.stats().failed == 1)
    assert loops == [asyncio.get_running_loop()] * 21
    assert running[0] == 0 and running[1] <= 2
    assert nsqd.counts("t", "c").deferred == 1


async def test_app_awaits_what_is_behind_a_decorator(nsqd: MemoryNsqd):
    app = App(nsqd_tcp_addresses=nsqd.tcp_address)
    handled: list[bytes] = []

    @app.consumer("t", "c")
    @behind_a_decorator
    async def of_a_body(body: bytes) -> None:
        await asyncio.sleep(0)
        handled.append(body)

    async with app:
        nsqd.publish("t", b"x")
        await nsqd.drained("t", "c")
    assert handled == [b"x"]


async def test_a_callback_that_returns_a_future_is_waited_for(nsqd: MemoryNsqd):
    rescued = asyncio.get_running_loop().create_future()
    nsqd.publish("t", b"x")
    async with Consumer(
        "t", "c", nsqd_tcp_addresses=nsqd.tcp_address, handler=_fail, max_attempts=1, on_giving_up=lambda _: rescued,
        requeue_delay=0, backoff=0,
    ) as consumer:  # fmt: skip
        await until(lambda: consumer.stats().given_up)
        await asyncio.sleep(0)
        assert nsqd.counts("t", "c").in_flight == 1
        rescued.set_result(None)
        await nsqd.drained("t", "c")


def _fail(message: Message) -> None:
    raise Requeue(0)


STYLES = pytest.mark.parametrize(("name", "may_block"), [("asyncio", False), ("asyncio", True), ("sync", False)])


@STYLES
@pytest.mark.parametrize("what", ["handler", "on_giving_up"])
def test_what_has_yet_to_run_finishes_nothing(
    nsqd: MemoryNsqd, caplog: pytest.LogCaptureFixture, name: str, may_block: bool, what: str
):
    """A generator always; a coroutine where nothing awaits it, which is in place and on blocking sockets."""

    def returns(message: Message) -> object:
        is_awaited = name == "asyncio" and (may_block or what == "on_giving_up")
        return generator(message) if is_awaited or message.body == b"g" else coroutine(message)

    options: dict[str, Any] = {"requeue_delay": NEVER_S, "max_requeue_delay": NEVER_S, "backoff": 0}
    handler: Any = returns
    if what == "on_giving_up":
        handler = _fail
        options |= {"on_giving_up": returns, "max_attempts": 1}
    nsqd.publish("t", b"g", b"c")
    with (
        opened(name) as flavour,
        flavour.consumer("t", "c", handler, may_block, nsqd_tcp_addresses=nsqd.tcp_address, **options) as consumer,
    ):
        wait_until(lambda: stats_of(consumer).failed == 2)
        assert stats_of(consumer).finished == 0
    assert nsqd.counts("t", "c").deferred == 2
    assert "does nothing before somebody runs it" in caplog.text


NOT_HANDLED: dict[str, Callable[[], object]] = {
    "Requeue": lambda: Requeue(delay=30),
    "Discard": Discard,
    "an error": lambda: ValueError("bad"),
    "a class of errors": lambda: ValueError,
    "a pool's future": concurrent.futures.Future,
    "a multiprocessing pool's": lambda: multiprocessing.pool.AsyncResult(SimpleNamespace(_cache={}), None, None),  # type: ignore[arg-type]
}


@STYLES
@pytest.mark.parametrize("what", ["handler", "on_giving_up"])
def test_what_says_that_a_message_is_not_handled_does_not_finish_it(
    nsqd: MemoryNsqd, caplog: pytest.LogCaptureFixture, name: str, may_block: bool, what: str
):
    """A wish or an error that is returned in place of being raised, and what a pool has yet to do."""

    def returns(message: Message) -> object:
        return NOT_HANDLED[message.body.decode()]()

    options: dict[str, Any] = {"requeue_delay": NEVER_S, "max_requeue_delay": NEVER_S, "backoff": 0}
    handler: Any = returns
    if what == "on_giving_up":
        handler = _fail
        options |= {"on_giving_up": returns, "max_attempts": 1}
    nsqd.publish("t", *map(str.encode, NOT_HANDLED))
    with (
        opened(name) as flavour,
        flavour.consumer("t", "c", handler, may_block, nsqd_tcp_addresses=nsqd.tcp_address, **options) as consumer,
    ):
        wait_until(lambda: stats_of(consumer).failed + stats_of(consumer).finished == len(NOT_HANDLED))
        assert stats_of(consumer).finished == 0
    assert nsqd.counts("t", "c").deferred == len(NOT_HANDLED)
    assert "the function returned Requeue(30), which does nothing: raise it instead" in caplog.text
    assert "the function returned the class ValueError" in caplog.text
    assert "the function returned a Future of a pool, for which nobody waits" in caplog.text


async def test_app_finishes_nothing_that_a_coroutine_function_refused_by_returning_it(nsqd: MemoryNsqd):
    app = App(nsqd_tcp_addresses=nsqd.tcp_address)

    @app.consumer("t", "c", requeue_delay=NEVER_S, max_requeue_delay=NEVER_S, backoff=0)
    async def of_a_body(body: bytes) -> object:
        return NOT_HANDLED[body.decode()]()

    nsqd.publish("t", *map(str.encode, NOT_HANDLED))
    async with app:
        stats = app.consumers[0].stats
        await until(lambda: stats().failed + stats().finished == len(NOT_HANDLED))
        assert stats().finished == 0
    assert nsqd.counts("t", "c").deferred == len(NOT_HANDLED)


@STYLES
def test_what_is_answered_may_return_anything(nsqd: MemoryNsqd, name: str, may_block: bool):
    def finishes(message: Message) -> object:
        message.finish()
        return NOT_HANDLED.get(message.body.decode(), bool)()

    nsqd.publish("t", *map(str.encode, NOT_HANDLED), b"False")
    with (
        opened(name) as flavour,
        flavour.consumer("t", "c", finishes, may_block, nsqd_tcp_addresses=nsqd.tcp_address) as consumer,
    ):
        wait_until(lambda: stats_of(consumer).finished == len(NOT_HANDLED) + 1)
        assert stats_of(consumer).failed == 0


@STYLES
def test_false_finishes_and_is_warned_of_once(
    nsqd: MemoryNsqd, caplog: pytest.LogCaptureFixture, name: str, may_block: bool
):
    """A handler of pynsq's means with it that the message has failed."""
    nsqd.publish("t", b"1", b"2", b"3")
    with (
        opened(name) as flavour,
        flavour.consumer("t", "c", lambda _: False, may_block, nsqd_tcp_addresses=nsqd.tcp_address) as consumer,
    ):
        wait_until(lambda: stats_of(consumer).finished == 3)
    assert [record.levelname for record in caplog.records if "of t/c returned False" in record.message] == ["WARNING"]


async def test_a_coroutine_of_a_coroutine_is_awaited_too(nsqd: MemoryNsqd):
    handled: list[bytes] = []

    async def real(message: Message) -> None:
        handled.append(message.body)

    async def handler(message: Message) -> Any:
        return real(message)  # an await is missing

    nsqd.publish("t", b"x")
    async with Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address, handler=handler):
        await nsqd.drained("t", "c")
    assert handled == [b"x"]


# --- cancelled by somebody else ---


@pytest.mark.parametrize("style", ["task", "threads", "inline", "behind a decorator"])
async def test_what_a_handler_waits_for_is_cancelled(nsqd: MemoryNsqd, style: str):
    """That is its message's failure; the worker goes on with the next."""
    token: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    token.cancel()

    async def waits(message: Message) -> None:
        if message.body == b"bad":
            await token

    def plain(message: Message) -> None:
        if message.body == b"bad":
            raise asyncio.CancelledError

    handlers: dict[str, Any] = {"task": waits, "behind a decorator": behind_a_decorator(waits)}
    nsqd.publish("t", b"bad", b"good")
    consumer = Consumer(
        "t", "c", nsqd_tcp_addresses=nsqd.tcp_address, handler=handlers.get(style, plain), inline=style == "inline",
        requeue_delay=NEVER_S, max_requeue_delay=NEVER_S, backoff=0,
    )  # fmt: skip
    running = asyncio.create_task(consumer.run())
    await until(lambda: consumer.stats().finished == consumer.stats().failed == 1)
    consumer.stop()
    await running
    assert nsqd.counts("t", "c").deferred == 1


@pytest.mark.parametrize("style", ["handler", "block", "callback"])
def test_what_is_run_with_asyncio_in_a_thread_is_cancelled(nsqd: MemoryNsqd, style: str):
    """Nobody cancels a thread: it is its message's failure, and the consumer goes on."""

    async def cancelled() -> None:
        task = asyncio.create_task(asyncio.sleep(NEVER_S))
        await asyncio.sleep(0)
        task.cancel()
        await task

    seen: list[bytes] = []

    def handler(message: Message) -> None:
        seen.append(message.body)
        if message.body == b"bad":
            asyncio.run(cancelled())

    nsqd.publish("t", b"bad", b"good")
    options: dict[str, Any] = {"nsqd_tcp_addresses": nsqd.tcp_address, "backoff": 0}
    if style == "callback":
        options |= {"max_attempts": 1, "on_giving_up": handler, "requeue_delay": 0}
    else:
        options |= {"requeue_delay": NEVER_S, "max_requeue_delay": NEVER_S}
    consumer = flintmq.sync.Consumer("t", "c", **options, handler=None if style == "block" else handler)
    with consumer:
        if style == "block":
            for message in consumer:
                with message:
                    handler(message)
                if len(seen) == 2:
                    break
        else:
            threading.Thread(target=consumer.run, daemon=True).start()
        wait_until(lambda: b"good" in seen, "it goes on with the next message")
    assert seen[0] == b"bad"


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_callback_that_is_cancelled_from_within_has_failed(nsqd: MemoryNsqd, is_async: bool):
    def plain(message: Message) -> None:
        raise asyncio.CancelledError

    async def waits(message: Message) -> None:
        plain(message)

    callback = waits if is_async else plain
    nsqd.publish("t", b"x")
    async with Consumer(
        "t", "c", nsqd_tcp_addresses=nsqd.tcp_address, handler=_fail, max_attempts=1, on_giving_up=callback,
        requeue_delay=NEVER_S, max_requeue_delay=NEVER_S,
    ) as consumer:  # fmt: skip
        await until(lambda: consumer.stats().failed)
        await until(lambda: nsqd.counts("t", "c").deferred)


@pytest.mark.parametrize("style", ["task", "run", "with", "thread", "on_giving_up"])
def test_a_handler_that_goes_with_its_event_loop_is_silent(
    nsqd: MemoryNsqd, style: str, monkeypatch: pytest.MonkeyPatch
):
    """An event loop is closed while handlers run in it, as a test or a framework may do."""
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: told.append((found.exc_value, found.object)))
    loop = asyncio.new_event_loop()
    begun: list[asyncio.Future[None]] = []
    tasks: list[asyncio.Task[None]] = []

    async def hang(message: Message) -> None:
        begun.append(loop.create_future())
        await begun[0]

    options: dict[str, Any] = {"handler": behind_a_decorator(hang, as_it_is=False) if style == "thread" else hang}
    if style == "on_giving_up":
        options = {"handler": _fail, "on_giving_up": hang, "max_attempts": 1}

    async def begin() -> Consumer:
        consumer = Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address, **options)
        if style == "run":
            tasks.append(loop.create_task(consumer.run()))
        elif style == "with":
            tasks.append(loop.create_task(use(consumer)))
        else:
            await consumer.start()
        await until(lambda: begun)
        return consumer

    async def use(consumer: Consumer) -> None:
        async with Producer(nsqd.tcp_address), consumer:
            await loop.create_future()

    nsqd.publish("t", b"x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        consumer = loop.run_until_complete(begin())
        loop.close()
        begun.clear()
        tasks.clear()
        del consumer
        gc.collect()
    assert told == []


async def test_a_worker_that_is_cancelled_while_the_consumer_runs_ends_it_aloud(nsqd: MemoryNsqd):
    has_begun = asyncio.Event()

    async def handler(message: Message) -> None:
        has_begun.set()
        await asyncio.sleep(NEVER_S)

    nsqd.publish("t", b"x")
    consumer = Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address, handler=handler)
    running = asyncio.create_task(consumer.run())
    await has_begun.wait()
    consumer.cancel_handlers()
    with pytest.raises(RuntimeError, match="was cancelled, and the consumer was not stopped"):
        await running


# --- threads ---


async def test_concurrency_is_the_number_of_threads(nsqd: MemoryNsqd):
    """More than asyncio has for everybody, and what else runs in those does not wait for handlers."""
    count = 50
    together = threading.Barrier(count + 1)
    names: dict[str, None] = {}

    def handler(message: Message) -> None:
        names[threading.current_thread().name] = None
        together.wait(PATIENCE_S)

    nsqd.publish("t", *[b"x"] * count)
    async with Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address, handler=handler, concurrency=count):
        await until(lambda: together.n_waiting == count)
        await asyncio.wait_for(asyncio.to_thread(together.wait), PATIENCE_S)
        await nsqd.drained("t", "c")
    assert sorted(names) == sorted(f"flintmq-t/c-{number}" for number in range(count))
    await until(lambda: not {thread.name for thread in threading.enumerate()} & {*names})


async def test_a_slow_message_holds_nothing_up_behind_it(nsqd: MemoryNsqd):
    """A thread takes many fast ones at once; those that it has not begun when one is slow are for the others."""
    others = threading.Event()

    def handler(message: Message) -> None:
        if message.body == b"slow":
            others.wait(PATIENCE_S)

    nsqd.publish("t", *[b"fast"] * 1500, b"slow", *[b"fast"] * 500)
    async with Consumer(
        "t", "c", nsqd_tcp_addresses=nsqd.tcp_address, handler=handler, concurrency=2, max_in_flight=2500
    ) as consumer:
        try:
            await until(lambda: consumer.stats().finished == 2000)
            assert nsqd.counts("t", "c").in_flight == 1
        finally:
            others.set()
        await nsqd.drained("t", "c")
        assert consumer.stats().requeued == consumer.stats().dropped == 0


async def test_a_second_answer_raises_in_the_thread(nsqd: MemoryNsqd):
    seen: list[Any] = []

    def handler(message: Message) -> None:
        message.finish()
        seen.append(message.is_answered)
        for answer in (message.finish, message.requeue, message.touch):
            with pytest.raises(LocalProtocolError, match="finished already"):
                answer()
        seen.append("refused")

    nsqd.publish("t", b"x")
    async with Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address, handler=handler) as consumer:
        await nsqd.drained("t", "c")
        await until(lambda: seen == [True, "refused"])
    assert consumer.stats().failed == 0


async def test_a_handler_that_hangs_is_named_and_left(nsqd: MemoryNsqd, caplog: pytest.LogCaptureFixture):
    has_begun, is_over = threading.Event(), threading.Event()

    def handler(message: Message) -> None:
        has_begun.set()
        is_over.wait(PATIENCE_S)

    nsqd.publish("t", b"x", b"y")
    try:
        async with Consumer(
            "t", "c", nsqd_tcp_addresses=nsqd.tcp_address, handler=handler, drain_timeout=0.01
        ) as consumer:
            await until(lambda: consumer.stats().received == 2 and has_begun.is_set())
        assert not is_over.is_set()
        assert nsqd.counts("t", "c").depth == 2, "given back"
        assert "a thread still runs the handler with message b'0000000000000001'" in caplog.text
    finally:
        is_over.set()


# -- slow handlers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLAVOURS)
def test_nothing_is_given_up_that_no_handler_ever_had(name):
    bodies = {b"%d" % number for number in range(8)}  # more than handlers, so that some wait
    handled: set[bytes] = set()
    given_up: set[bytes] = set()
    may_end = threading.Event()

    def handler(message: Message) -> None:
        handled.add(message.body)
        assert may_end.wait(PATIENCE_S)

    def end(message: Message) -> None:
        given_up.add(message.body)

    with MemoryNsqd("--msg-timeout=200ms") as nsqd, opened(name) as flavour:
        nsqd.create("t", "c")
        nsqd.publish("t", *bodies)
        options = {"nsqd_tcp_addresses": nsqd.tcp_address, "max_attempts": 1, "on_giving_up": end}
        with flavour.consumer("t", "c", handler, may_block=True, **options) as consumer:
            wait_until(lambda: stats_of(consumer).dropped >= 2 * len(bodies))
            may_end.set()
            nsqd.wait_drained("t", "c", PATIENCE_S)
    assert given_up <= handled == bodies
