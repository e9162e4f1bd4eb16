"""Typed consuming in both clients: models reach the handler, and what cannot be read is never finished unhandled."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import Any

import pydantic
import pytest
from tests.integration.daemons import PATIENCE_S, wait_until
from tests.integration.flavours import Asyncio, Blocking, Flavour

import flintmq.sync
from flintmq import App, Consumer, Message, OptionError
from flintmq.testing import MemoryNsqd

COUNT = 500


class Order(pydantic.BaseModel):
    id: int
    shop: str = "main"


class OrderOfTomorrow(pydantic.BaseModel):
    """The next deployment has one more field that is required."""

    id: int
    customer: str


class Plain:
    """A class that nothing knows how to build."""


@pytest.fixture
def nsqd() -> Iterator[MemoryNsqd]:
    with MemoryNsqd() as nsqd:
        yield nsqd


@pytest.fixture(params=[Asyncio, Blocking])
def flavour(request: pytest.FixtureRequest) -> Iterator[Flavour]:
    flavour = request.param()
    yield flavour
    flavour.close()


def orders(count: int) -> list[bytes]:
    return [b'{"id":%d}' % number for number in range(count)]


# -- what can be read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("may_block", [False, True])
def test_a_thousand_models_reach_the_handler(nsqd: MemoryNsqd, flavour: Flavour, may_block: bool):
    """1,000 of 1,000 were finished without a call of the handler."""
    nsqd.publish("orders", *orders(1000))
    seen: list[Order] = []
    with flavour.consumer(
        "orders", "c", lambda message: seen.append(message.value), may_block, nsqd_tcp_addresses=nsqd.tcp_address,
        type=Order,
    ):  # fmt: skip
        nsqd.wait_drained("orders", "c", PATIENCE_S)
    assert sorted(order.id for order in seen) == list(range(1000))
    assert all(type(order) is Order for order in seen)


def test_models_go_through_a_producer_and_back(nsqd: MemoryNsqd, flavour: Flavour):
    seen: list[Order] = []
    with (
        flavour.producer(nsqd.tcp_address) as producer,
        flavour.consumer(
            "orders", "c", lambda message: seen.append(message.value), nsqd_tcp_addresses=nsqd.tcp_address, type=Order
        ),
    ):
        producer.call(lambda producer: producer.mpub("orders", [Order(id=1), Order(id=2, shop="east")]))
        nsqd.wait_drained("orders", "c", PATIENCE_S)
    assert sorted(seen, key=lambda order: order.id) == [Order(id=1), Order(id=2, shop="east")]


def test_what_json_cannot_say_is_told_and_not_published(nsqd: MemoryNsqd, flavour: Flavour):
    with flavour.producer(nsqd.tcp_address) as producer:
        for body in ({"price": float("nan")}, [float("inf")]):
            with pytest.raises(TypeError, match="JSON has no NaN and no infinity; None is its null"):
                producer.call(methodcaller("pub", "t", body))
            with pytest.raises(TypeError, match="JSON has no NaN"):
                producer.call(methodcaller("mpub", "t", [b"x", body]))
        for headers, said in (
            ({"a": Plain()}, "objects of type Plain cannot"),
            ({"a": float("nan")}, "JSON has no NaN"),
        ):
            with pytest.raises(TypeError, match=f"^headers are names and values for JSON: {said}"):
                producer.call(methodcaller("pub", "t", b"x", headers=headers))
        producer.call(lambda producer: producer.pub("t", {"price": None}))
    assert nsqd.published("t") == [b'{"price":null}']


def test_decode_makes_what_no_type_says(nsqd: MemoryNsqd, flavour: Flavour):
    nsqd.publish("t", b"1;a", b"2;b")
    seen: list[Any] = []
    with flavour.consumer(
        "t", "c", lambda message: seen.append(message.value), nsqd_tcp_addresses=nsqd.tcp_address,
        decode=lambda body: body.decode().split(";"),
    ):  # fmt: skip
        nsqd.wait_drained("t", "c", PATIENCE_S)
    assert sorted(seen) == [["1", "a"], ["2", "b"]]


async def test_an_app_takes_models_and_decode(nsqd: MemoryNsqd):
    nsqd.create("orders", "models")
    nsqd.create("orders", "decoded")
    nsqd.publish("orders", *orders(1000))
    app = App(nsqd_tcp_addresses=nsqd.tcp_address)
    seen: list[Order] = []
    split: list[Plain] = []

    @app.consumer("orders", "models")
    async def take(order: Order) -> None:
        seen.append(order)

    @app.consumer("orders", "decoded", decode=lambda body: Plain())
    def take_decoded(made: Plain, message: Message[Plain]) -> None:
        assert made is message.value
        split.append(made)

    with pytest.raises(OptionError, match="cannot build Plain"):

        @app.consumer("orders", "refused")
        async def never(made: Plain) -> None: ...

    async with app:
        await nsqd.drained("orders", "models", PATIENCE_S)
        await nsqd.drained("orders", "decoded", PATIENCE_S)
    assert sorted(order.id for order in seen) == list(range(1000))
    assert len(split) == 1000


# -- what cannot be read -----------------------------------------------------------------------------------------------

ENDLESS: dict[str, Any] = {"type": OrderOfTomorrow, "requeue_delay": 0, "max_backoff": 0, "max_attempts": 2}


async def stop_when(consumer: Consumer[Any], is_enough: Callable[[], bool]) -> None:
    while not is_enough():
        await asyncio.sleep(0.01)
    consumer.stop()


async def in_tasks(consumer: Consumer[Any], is_enough: Callable[[], bool]) -> None:
    async with consumer:
        await stop_when(consumer, is_enough)


async def iterating(consumer: Consumer[Any], is_enough: Callable[[], bool]) -> None:
    async with consumer, asyncio.TaskGroup() as tasks:
        tasks.create_task(stop_when(consumer, is_enough))
        async for message in consumer:
            async with message:
                message.value  # noqa: B018


async def in_batches(consumer: Consumer[Any], is_enough: Callable[[], bool]) -> None:
    async with consumer, asyncio.TaskGroup() as tasks:
        tasks.create_task(stop_when(consumer, is_enough))
        async for batch in consumer.batches(100, timeout=0.1):
            for message in batch:
                async with message:
                    message.value  # noqa: B018


def iterating_blocking(consumer: flintmq.sync.Consumer[Any]) -> None:
    with consumer:
        for message in consumer:
            with message:
                message.value  # noqa: B018


def in_batches_blocking(consumer: flintmq.sync.Consumer[Any]) -> None:
    with consumer:
        for batch in consumer.batches(100, timeout=0.1):
            for message in batch:
                with message:
                    message.value  # noqa: B018


def drive(way: str, consumer: Any, is_enough: Callable[[], bool]) -> None:
    """Consume until it is enough."""
    consume = WAYS[way][2]
    if inspect.iscoroutinefunction(consume):
        asyncio.run(asyncio.wait_for(consume(consumer, is_enough), PATIENCE_S * 2))
        return
    thread = threading.Thread(target=consume, args=(consumer,))
    thread.start()
    try:
        wait_until(is_enough, way, PATIENCE_S * 2)
    finally:
        consumer.stop()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


async def read_in_a_task(message: Message[Any]) -> None:
    message.value  # noqa: B018


def read(message: Any) -> None:
    message.value  # noqa: B018


WAYS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "tasks": (Consumer, {"handler": read_in_a_task}, in_tasks),
    "threads": (Consumer, {"handler": read, "concurrency": 2}, in_tasks),
    "inline": (Consumer, {"handler": read, "inline": True}, in_tasks),
    "iterated": (Consumer, {}, iterating),
    "batches": (Consumer, {}, in_batches),
    "sync run": (flintmq.sync.Consumer, {"handler": read}, flintmq.sync.Consumer.run),
    "sync iterated": (flintmq.sync.Consumer, {}, iterating_blocking),
    "sync batches": (flintmq.sync.Consumer, {}, in_batches_blocking),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_deployment_that_cannot_read_finishes_nothing(nsqd: MemoryNsqd, way: str):
    """One more required field: 500 of 500 were gone. Not one is, however often they come: nobody has handled them."""
    nsqd.publish("orders", *orders(COUNT))
    make, how, _ = WAYS[way]
    consumer = make("orders", "c", nsqd_tcp_addresses=nsqd.tcp_address, **ENDLESS, **how)
    drive(way, consumer, lambda: consumer.stats().failed >= 4 * COUNT)
    assert consumer.stats().finished == consumer.stats().given_up == 0
    assert nsqd.counts("orders", "c").unfinished == COUNT


@pytest.mark.parametrize("way", WAYS)
def test_dead_letters_have_all_of_it_and_say_why(nsqd: MemoryNsqd, way: str):
    """With a dead-letter topic that has headers: all 500 are there, unchanged and at once, with the reason."""
    asyncio.run(create_with_headers(nsqd, "orders.dead"))
    nsqd.publish("orders", *orders(COUNT))
    make, how, _ = WAYS[way]
    consumer = make(
        "orders", "c", nsqd_tcp_addresses=nsqd.tcp_address, type=OrderOfTomorrow, dead_letter="orders.dead", **how
    )
    drive(way, consumer, lambda: nsqd.is_drained("orders", "c"))
    nsqd.wait_drained("orders", "c", PATIENCE_S)
    assert consumer.stats().backoff == "normal"
    found: dict[bytes, dict[str, Any]] = {}

    def keep(message: Message[Any]) -> None:
        found[message.body] = message.headers

    with Blocking().consumer("orders.dead", "c", keep, nsqd_tcp_addresses=nsqd.tcp_address, headers=True):
        wait_until(lambda: len(found) == COUNT)
    assert sorted(found) == sorted(orders(COUNT))
    for headers in found.values():
        assert headers["##dead_letter_reason"] == "unreadable_body"
        assert headers["##dead_letter_error"].endswith("OrderOfTomorrow: Field required - at `$.customer`")
        assert headers["##dead_letter_topic"], headers["##dead_letter_channel"] == ("orders", "c")
        assert headers["##dead_letter_attempts"] == "1"
        assert len(headers["##dead_letter_id"]) == 16


async def create_with_headers(nsqd: MemoryNsqd, topic: str) -> None:
    """Create a plain topic whose messages have headers."""
    host, _, port = nsqd.http_address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST /topic/create?topic={topic}&extend=true HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert b" 200 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)
    writer.close()


def test_dead_letters_without_headers_are_the_bodies_alone(nsqd: MemoryNsqd, flavour: Flavour):
    nsqd.create("orders.dead")
    nsqd.publish("orders", *orders(COUNT))
    with flavour.consumer(
        "orders", "c", read, nsqd_tcp_addresses=nsqd.tcp_address, type=OrderOfTomorrow, dead_letter="orders.dead"
    ) as consumer:
        nsqd.wait_drained("orders", "c", PATIENCE_S)
        wait_until(lambda: consumer.call(lambda consumer: consumer.stats()).finished == COUNT)
    assert sorted(nsqd.published("orders.dead")) == sorted(orders(COUNT))


def test_dead_letters_found_by_nsqlookupd_have_headers_where_they_can(nsqd: MemoryNsqd, flavour: Flavour):
    asyncio.run(create_with_headers(nsqd, "with"))
    nsqd.publish("without", b"here already")
    for channel in ("with", "without"):
        nsqd.create("orders", channel)
    nsqd.publish("orders", b"{}")
    for topic in ("with", "without"):
        with flavour.consumer(
            "orders", topic, read, nsqlookupd_http_addresses=nsqd.nsqlookupd_http_address, type=Order, dead_letter=topic
        ):
            nsqd.wait_drained("orders", topic, PATIENCE_S)
    assert nsqd.published("without") == [b"here already", b"{}"]
    found: list[Message[Any]] = []
    with flavour.consumer("with", "c", found.append, nsqd_tcp_addresses=nsqd.tcp_address, headers=True):
        nsqd.wait_drained("with", "c", PATIENCE_S)
    (letter,) = found
    assert letter.body == b"{}"
    assert letter.headers["##dead_letter_channel"] == "with"


def test_it_backs_off(nsqd: MemoryNsqd, flavour: Flavour):
    """By default a body that cannot be read does what a handler that raises does: a delay for it, a pause for all."""
    nsqd.publish("orders", *orders(10))
    with flavour.consumer("orders", "c", read, nsqd_tcp_addresses=nsqd.tcp_address, type=OrderOfTomorrow) as consumer:
        wait_until(lambda: nsqd.counts("orders", "c").deferred >= 1)
        stats = consumer.call(lambda consumer: consumer.stats())
    assert stats.backoff != "normal"
    assert stats.finished == 0
    assert nsqd.counts("orders", "c").unfinished == 10


def test_the_log_says_what_came(nsqd: MemoryNsqd, flavour: Flavour, caplog: pytest.LogCaptureFixture):
    """A few lines, not one for each, that say which message, what is in it, what is wrong and what becomes of it."""
    nsqd.publish("orders", *(b'{"id":%d,"pad":"%s"}' % (number, b"x" * 200) for number in range(100)))
    with (
        caplog.at_level(logging.ERROR, "flintmq.client"),
        flavour.consumer("orders", "c", read, nsqd_tcp_addresses=nsqd.tcp_address, type=OrderOfTomorrow, max_backoff=0),
    ):
        wait_until(lambda: nsqd.counts("orders", "c").deferred == 100)
    lines = [record.getMessage() for record in caplog.records if record.name == "flintmq.client"]
    first, *_, last = lines
    assert first.startswith("cannot read message 0000000000000001 of orders/c from 127.0.0.1:")
    assert "attempts 1: the body is not JSON of type OrderOfTomorrow: Field required - at `$.customer`; " in first
    assert """body of 217 bytes: b'{"id":0,"pad":"xxx""" in first
    assert "xxx'...; it is requeued; a dead_letter topic would take such messages" in first
    assert " more messages of orders/c" in last
    rounds = sum("more messages" in line for line in lines)
    assert len(lines) <= 6 * rounds


def test_a_callback_has_it_after_the_last_attempt(nsqd: MemoryNsqd, flavour: Flavour):
    """``on_giving_up`` is asked as for a handler that raises; one that cannot read it either finishes nothing."""
    nsqd.publish("orders", b"{}", b"{")
    told: list[tuple[bytes, int]] = []

    def giving_up(message: Message[Any]) -> None:
        told.append((message.body, message.attempts))
        if message.body == b"{" and message.attempts < 6:
            message.value  # noqa: B018

    with flavour.consumer("orders", "c", read, nsqd_tcp_addresses=nsqd.tcp_address, on_giving_up=giving_up, **ENDLESS):
        nsqd.wait_drained("orders", "c", PATIENCE_S)
    assert sorted(told) == [(b"{", 3), (b"{", 4), (b"{", 5), (b"{", 6), (b"{}", 3)]


def test_a_handler_that_raises_is_given_up_as_ever(nsqd: MemoryNsqd, flavour: Flavour):
    """What was handed to a handler that could read it has been handled: ``max_attempts`` finishes it."""
    nsqd.publish("orders", b'{"id":1}')
    tries: list[int] = []

    def fail(message: Message[Order]) -> None:
        tries.append(message.value.id)
        raise ValueError("no")

    options: dict[str, Any] = {**ENDLESS, "type": Order}
    with flavour.consumer("orders", "c", fail, nsqd_tcp_addresses=nsqd.tcp_address, **options):
        nsqd.wait_drained("orders", "c", PATIENCE_S)
    assert tries == [1, 1]
