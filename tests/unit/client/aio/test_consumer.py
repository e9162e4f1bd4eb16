"""The asyncio consumer: what only it has. What both have: ``tests/unit/client/test_consumer.py``. Time is virtual."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from tests.unit.client.test_consumer import discovering, run
from tests.unit.client.world import until

from flintmq.client import Consumer
from flintmq.client.aio.lookup import Lookup
from flintmq.errors import OptionError


def test_wrong_options():
    """Of this flavour only; those of both are in ``tests/integration/test_consumers.py``."""
    with pytest.raises(OptionError, match="concurrency"):
        Consumer("t", "c", nsqd_tcp_addresses="a:1", concurrency=0)


def test_an_inline_handler_is_a_plain_function():
    async def handler(message):
        pass

    with pytest.raises(OptionError, match="inline"):
        Consumer("t", "c", nsqd_tcp_addresses="a:1", handler=handler, inline=True)


def test_a_batch_that_is_cancelled_gives_its_messages_back():
    async def scenario(world):
        world.fake.add_many(2)
        async with world.consumer(max_in_flight=10) as consumer:
            task = asyncio.create_task(anext(consumer.batches(4, timeout=60)))
            await until(lambda: consumer.stats().received == 2)
            await asyncio.sleep(0.1)
            task.cancel()
            await until(lambda: len(world.fake.requeued) == 2)
            assert world.fake.requeued == [(b"x", 0)] * 2

    run(scenario)


def test_a_handler_that_never_waits_lets_the_loop_have_its_turns():
    async def scenario(world):
        loop = asyncio.get_running_loop()
        ticks = []

        async def handler(message):
            world.sim.loop._now += 0.02  # computing takes no virtual time: pretend that it does

        def tick():
            ticks.append(loop.time())
            loop.call_later(0.05, tick)

        tick()
        world.fake.add_many(101)
        async with world.consumer(handler=handler, max_in_flight=100):
            await until(lambda: len(world.fake.finished) == 101)
        assert max(later - earlier for earlier, later in pairwise(ticks)) < 0.1

    run(scenario)


def test_handlers_that_do_not_end_are_cancelled_and_their_messages_given_back(caplog):
    async def scenario(world):
        async def handler(message):
            await asyncio.sleep(3600)

        world.fake.add_many(2)
        async with world.consumer(handler=handler, concurrency=2, drain_timeout=3) as consumer:
            await until(lambda: consumer.stats().received == 2)
        assert world.now < 10
        assert world.fake.requeued == [(b"x", 0)] * 2
        assert consumer.stats().failed == 0

    run(scenario)
    assert "2 handlers did not end within 3 s" in caplog.text


def test_threads_that_do_not_end_are_left_and_their_messages_given_back():
    async def scenario(world):
        world.sim.driver.freeze_disk(3600)  # a blocking call takes that long
        world.fake.add_many(2)
        async with world.consumer(handler=lambda message: None, concurrency=2, drain_timeout=3) as consumer:
            await until(lambda: consumer.stats().received == 2)
            await asyncio.sleep(1)
            assert world.fake.finished == []
        assert world.now < 10
        assert world.fake.requeued == [(b"x", 0)] * 2

    run(scenario)


def test_what_was_lost_before_a_thread_came_to_it_is_not_handled(caplog):
    async def scenario(world):
        handled: list[bool] = []
        world.sim.driver.freeze_disk(500)  # a blocking call takes that long
        world.fake.add(b"x")
        async with world.consumer(handler=lambda m: handled.append(m.is_lost), msg_timeout=20) as consumer:
            await until(lambda: consumer.stats().dropped == 1)
            world.fake.expire()
            await until(lambda: world.fake.finished)
        assert handled == [False]

    run(scenario)
    assert "its handler was not called within 20 s" in caplog.text


def test_a_cancelled_task_drains_too():
    async def scenario(world):
        async def main():
            async with world.consumer(max_in_flight=5) as consumer:
                async for message in consumer:
                    async with message:
                        await asyncio.sleep(3600)

        world.fake.add_many(5)
        task = asyncio.create_task(main())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert len(world.fake.requeued) >= 5
        await until(lambda: not world.fake.sessions)

    run(scenario)


def test_a_failing_poller_is_no_silent_end(monkeypatch):
    """A mistake of ours that nothing goes on behind ends the consumer, and says so."""

    async def fail(*_):
        raise ZeroDivisionError("a bug")

    class Never:
        async def __call__(self, url, timeout_s):
            raise AssertionError("nobody is asked")

        async def close(self):
            pass

    async def scenario(world):
        monkeypatch.setattr(Lookup, "topic", fail)
        with pytest.raises(ZeroDivisionError):
            async with discovering(world, Never()):
                pass

    run(scenario)


def test_an_nsqd_that_does_not_confirm_the_end_is_told_with_the_reason(caplog):
    async def scenario(world):
        async with world.consumer():
            world.sim.node("a").pause()
        assert "nsqd a:4150 did not confirm the end of the subscription: no answer within 2 s" in caplog.text

    run(scenario)
