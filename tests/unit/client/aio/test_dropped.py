"""Producers and consumers that the application lets go without closing them. Time is virtual."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from typing import Any

import pytest
from tests.unit.client.world import World, until

from flintmq import Consumer, Message
from flintmq.client.aio.consumer import BulkConsumer
from flintmq.errors import ConnectionFailed, PublishRefused, without_frames

MSG_TIMEOUT_S = 60


def is_left(world: World) -> bool:
    return not world.fake.sessions


async def let_go(held: list[Any]) -> weakref.ref[Any]:
    """Let the last one who refers to something let it go."""
    gone = weakref.ref(held.pop())
    await asyncio.sleep(0)  # what refers to it until the end of the turn
    gc.collect()
    return gone


def test_a_consumer_that_nothing_refers_to_gives_back_what_it_has_and_is_closed(caplog):
    async def scenario():
        world.fake.add(b"1", b"2", b"3")
        held = [world.consumer()]
        await held[0].start()
        await until(lambda: held[0].stats().queued == 3)
        with pytest.warns(ResourceWarning, match=r"the consumer of t/c was dropped without close\(\)"):
            gone = await let_go(held)
            await until(lambda: is_left(world), 5)
        assert gone() is None
        assert sorted(body for body, _ in world.fake.requeued) == [b"1", b"2", b"3"]
        assert "the consumer of t/c was dropped" in caplog.text

    with World() as world:
        world.run(scenario())


def test_a_message_that_the_application_has_may_still_be_answered():
    async def scenario():
        world.fake.add(b"1", b"2")
        held = [world.consumer()]
        await held[0].start()
        await until(lambda: held[0].stats().queued == 2)
        # Not by iterating: the simulation's loop keeps the generator, and that the consumer.
        message = held[0]._consuming.inbox.take(asyncio.get_running_loop().time())
        assert message is not None
        with pytest.warns(ResourceWarning):
            await let_go(held)
            await until(lambda: world.fake.requeued)
            await asyncio.sleep(MSG_TIMEOUT_S / 2)
        assert not is_left(world)
        message.finish()
        await until(lambda: is_left(world), 5)
        assert world.fake.finished == [b"1"]

    with World() as world:
        world.run(scenario())


def test_a_message_that_nobody_answers_keeps_the_connection_no_longer_than_its_time():
    async def scenario():
        world.fake.add(b"1")
        held = [world.consumer()]
        await held[0].start()
        await until(lambda: held[0].stats().queued == 1)
        held[0]._consuming.inbox.take(asyncio.get_running_loop().time())
        with pytest.warns(ResourceWarning):
            await let_go(held)
            await until(lambda: is_left(world), MSG_TIMEOUT_S + 5)

    with World() as world:
        world.run(scenario())


def test_a_consumer_that_is_closed_or_iterated_over_is_left_alone(recwarn):
    async def scenario():
        held = [world.consumer()]
        await held[0].start()
        await held[0].close()
        await let_go(held)
        held = [world.consumer()]
        await held[0].start()
        seen: list[bytes] = []

        async def iterate(consumer: Consumer) -> None:
            async for message in consumer:
                seen.append(message.body)
                message.finish()

        iterating = asyncio.ensure_future(iterate(held[0]))
        await asyncio.sleep(0)
        gone = await let_go(held)
        world.fake.add(b"1")
        await until(lambda: world.fake.finished == [b"1"])
        consumer = gone()
        assert consumer is not None
        consumer.stop()
        await iterating
        await consumer.close()

    with World() as world:
        world.run(scenario())
    assert [each for each in recwarn if each.category is ResourceWarning] == []


async def handle(message: Message) -> None:
    """Finish it."""


@pytest.mark.parametrize("options", [{"handler": handle}, {"handler": lambda message: None, "inline": True}])
def test_a_consumer_with_a_handler_works_on(options, recwarn):
    async def scenario():
        held = [world.consumer(**options)]
        await held[0].start()
        gone = await let_go(held)
        world.fake.add(b"1")
        await until(lambda: world.fake.finished == [b"1"])
        world.fake.sessions[0].hang_up()
        gc.collect()
        world.fake.add(b"2")
        await until(lambda: world.fake.finished == [b"1", b"2"])
        consumer = gone()
        assert consumer is not None
        await consumer.close()

    with World() as world:
        world.run(scenario())
    assert [each for each in recwarn if each.category is ResourceWarning] == []


def test_a_consumer_whose_deliveries_are_taken_works_on():
    async def scenario():
        taken: list[Any] = []
        held = [BulkConsumer("t", "c", nsqd_tcp_addresses=world.addresses, env=world.env)]
        held[0].take_deliveries(taken.append)
        await held[0].start()
        gone = await let_go(held)
        world.fake.add(b"1")
        await until(lambda: taken)
        consumer = gone()
        assert consumer is not None
        await consumer.close()

    with World() as world:
        world.run(scenario())


def test_a_producer_that_nothing_refers_to_is_closed(caplog):
    caplog.set_level(logging.WARNING, "flintmq.client")

    async def scenario():
        held = [world.producer()]
        await held[0].start()
        publishing = asyncio.ensure_future(held[0].pub("t", b"1"))
        await asyncio.sleep(0)
        with pytest.warns(ResourceWarning, match=r"the producer on a:4150 was dropped without close\(\)"):
            gone = await let_go(held)
            await publishing
            del publishing
            await asyncio.sleep(0)
            gc.collect()
            await until(lambda: is_left(world), 5)
        assert gone() is None
        assert world.fake.stored == [b"1"]

    with World() as world:
        world.run(scenario())


def test_an_error_that_is_kept_refers_to_no_frame():
    error = ConnectionFailed("a:4150", "refused")
    try:
        try:
            raise OSError("refused")
        except OSError as cause:
            raise error from cause
    except ConnectionFailed:
        pass
    without_frames(error)
    assert error.__traceback__ is None
    assert error.__cause__ is not None and error.__cause__.__traceback__ is None


@pytest.mark.parametrize("kind", ["producer", "consumer"])
def test_what_cannot_connect_goes_as_well(kind):
    async def scenario():
        world.kill("a")
        held = [getattr(world, kind)()]
        await held[0].start()
        with pytest.warns(ResourceWarning):
            gone = await let_go(held)
            await until(lambda: gone() is None, 60)
            await asyncio.sleep(0.1)

    with World() as world:
        world.run(scenario())


class Failing:
    """An nsqlookupd that does not answer."""

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        raise OSError("nobody there")

    async def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("kind", ["producer", "consumer"])
def test_what_cannot_be_looked_up_does_not_stay_either(kind):
    async def scenario():
        held = [getattr(world, kind)(nsqlookupd_http_addresses="http://l:4161", fetch=Failing())]
        await held[0].start()
        if kind == "producer":
            with pytest.raises(PublishRefused):
                await held[0].pub("t", b"1", timeout=1)
        with pytest.warns(ResourceWarning):
            gone = await let_go(held)
            await until(lambda: gone() is None, 60)
            await asyncio.sleep(0.1)

    with World() as world:
        world.run(scenario())


class Silent:
    """An nsqlookupd that knows no topic."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_closed = False

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        self.asked.append(url)
        return 200, b'{"producers":[]}'

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("kind", ["producer", "consumer"])
def test_the_nsqlookupd_are_asked_no_more(kind):
    async def scenario():
        fetch = Silent()
        held = [getattr(world, kind)(nsqlookupd_http_addresses="http://l:4161", fetch=fetch, lookup_interval=5)]
        await held[0].start()
        await asyncio.sleep(20)
        with pytest.warns(ResourceWarning):
            gone = await let_go(held)
            await until(lambda: gone() is None, 10)
            await until(lambda: fetch.is_closed, 10)
        count = len(fetch.asked)
        await asyncio.sleep(100)
        assert len(fetch.asked) == count

    with World() as world:
        world.run(scenario())
