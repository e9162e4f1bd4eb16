"""The consumers of both clients: flow, backoff, handlers, draining, discovery, lost connections. Time is virtual."""

from __future__ import annotations

import asyncio
import logging
import re
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from tests.unit.client.blocking_client import ASYNCIO, seeds_of_both
from tests.unit.client.test_producer import ListedNodes
from tests.unit.client.world import World, until

from flintmq.client import ConnectionOptions, Consumer, Discard, Requeue
from flintmq.errors import DiscoveryError, FinFailed, NsqdError, OptionError, TouchFailed
from flintmq.message import MESSAGE_HEADER
from flintmq.wire.identify import ServerFeatures


def run(scenario, *names, **options):
    with World(*names, **options) as world:
        world.run(scenario(world))


def message_frame(body: bytes) -> bytes:
    return MESSAGE_HEADER.pack(30 + len(body), 2, 1, 1, b"f" * 16) + body


async def take(consumer: Consumer, count: int) -> list:
    """The next messages, not answered."""
    taken: list = []
    async for message in consumer:
        taken.append(message)
        if len(taken) == count:
            break
    return taken


# --- what it is told ---


def test_nsqd_is_told(client):
    async def scenario(world):
        options = {"client_id": "me", "msg_timeout": timedelta(seconds=9), "heartbeat_interval": 3, "sample_rate": 5}
        async with world.consumer("orders", "billing", **options) as consumer:
            assert world.fake.sessions[0].subscription == ("orders", "billing")
            assert consumer.connections == ("a:4150",)
            assert "orders/billing on 1 nsqd" in repr(consumer)
        (request,) = world.fake.identified
        assert (request.client_id, request.msg_timeout, request.sample_rate) == ("me", 9000, 5)
        assert request.heartbeat_interval == 3000

    run(scenario, client=client)


def test_how_it_is_used(client):
    async def scenario(world):
        consumer = world.consumer()
        with pytest.raises(RuntimeError, match="start the consumer"):
            await take(consumer, 1)
        with pytest.raises(RuntimeError, match="needs a handler"):
            await consumer.run()
        async with consumer:
            with pytest.raises(RuntimeError, match="once"):
                await consumer.start()
        async with world.consumer(handler=print) as consumer:
            with pytest.raises(RuntimeError, match="has a handler"):
                await take(consumer, 1)

    run(scenario, client=client)


# --- starting ---


class SilentLookup:
    """An nsqlookupd that does not answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        self.asked.append(url)
        await asyncio.sleep(timeout_s)
        raise TimeoutError

    async def close(self) -> None: ...


def silent(world: World, who: str, lookup: SilentLookup) -> dict[str, Any]:
    """How a consumer is made that waits for a minute for an nsqd, or an nsqlookupd, that does not answer."""
    world.kill("a", power_loss=True)
    if who == "nsqd":
        return {"options": ConnectionOptions(connect_timeout=60)}
    return {"nsqlookupd_http_addresses": "http://l:4161", "fetch": lookup, "lookup_timeout": 60}


@pytest.mark.parametrize("how", ["stop", "close"])
@pytest.mark.parametrize("who", ["nsqd", "nsqlookupd"])
def test_a_consumer_that_starts_is_stopped_at_once(client, who, how, caplog):
    async def scenario(world):
        lookup = SilentLookup()
        consumer = world.consumer(handler=print, **silent(world, who, lookup))
        running = asyncio.create_task(consumer.run())
        await asyncio.sleep(1)
        assert not running.done()
        began = world.now
        consumer.stop()
        if how == "stop":
            consumer.stop()  # a second one changes nothing
        else:
            await consumer.close()
        await running
        assert world.now - began < 1
        assert consumer.connections == ()
        await asyncio.sleep(120)
        assert "is skipped" not in caplog.text, "nobody waits for an answer any more"

    run(scenario, client=client)


@pytest.mark.parametrize("who", ["nsqd", "nsqlookupd"])
def test_a_consumer_that_is_stopped_before_it_starts(client, who):
    async def scenario(world):
        lookup = SilentLookup()
        consumer = world.consumer(**silent(world, who, lookup))
        consumer.stop()
        began = world.now
        async with consumer:
            assert await take(consumer, 1) == []
        assert world.now - began < 1
        assert (lookup.asked, world.fake.session_count) == ([], 0), "nobody was asked"

    run(scenario, client=client)


# --- iterating ---


def test_messages_are_iterated_and_finished(client):
    async def scenario(world):
        world.fake.add(b"1", b"2", b"3")
        bodies = []
        async with world.consumer(max_in_flight=10) as consumer:
            async for message in consumer:
                async with message:
                    bodies.append(message.body)
                if len(bodies) == 3:
                    break
        assert bodies == world.fake.finished == [b"1", b"2", b"3"]
        stats = consumer.stats()
        assert (stats.received, stats.finished, stats.in_flight, stats.connections) == (3, 3, 0, 0)
        await until(lambda: not world.fake.sessions)

    run(scenario, client=client)


def test_two_loops_share_the_messages(client):
    async def scenario(world):
        world.fake.add_many(20)
        async with world.consumer(max_in_flight=4) as consumer:

            async def loop():
                count = 0
                async for message in consumer:
                    async with message:
                        await asyncio.sleep(0.1)
                    count += 1
                return count

            loops = [asyncio.create_task(loop()) for _ in range(2)]
            await until(lambda: len(world.fake.finished) == 20)
            consumer.stop()
            assert await asyncio.gather(*loops) == [10, 10]

    run(scenario, client=client)


def test_batches_are_full_or_in_time(client):
    async def scenario(world):
        world.fake.add_many(30)
        sizes: list[int] = []
        async with world.consumer(max_in_flight=10) as consumer:
            async for batch in consumer.batches(4, timeout=5):
                sizes.append(len(batch))
                for message in batch:
                    message.finish()
                if len(sizes) == 6:
                    assert world.now < 1, "never waits for the timeout while messages come"
                if sum(sizes) == 30:
                    break
            assert max(sizes) == 4
            assert sizes.count(4) >= 5
            world.fake.add_many(2)
            began = world.now
            async for batch in consumer.batches(4, timeout=5):
                assert len(batch) == 2
                assert 4.9 < world.now - began < 6
                for message in batch:
                    message.finish()
                break

    run(scenario, client=client)


def test_a_batch_larger_than_max_in_flight_ends_when_starved(client):
    async def scenario(world):
        world.fake.add_many(60)
        async with world.consumer(max_in_flight=10) as consumer:
            total = 0
            async for batch in consumer.batches(1000, timeout=60):
                assert len(batch) <= 10
                total += len(batch)
                for message in batch:
                    message.finish()
                if total >= 40:
                    break
        assert world.now < 5

    run(scenario, client=client)


# --- flow ---


def test_rdy_starts_at_one_and_follows_the_25_percent_rule(client):
    async def scenario(world):
        async with world.consumer(max_in_flight=8) as consumer:
            assert world.fake.rdy_history in ([], [1])
            world.fake.add_many(30)
            for message in await take(consumer, 1):
                message.finish()
            await until(lambda: world.fake.rdy_history[-1] == 8)
            assert world.fake.rdy_history == [1, 8]
            count = 1
            async for message in consumer:
                message.finish()
                count += 1
                if count == 30:
                    break
            await until(lambda: len(world.fake.finished) == 30)
            assert set(world.fake.rdy_history[1:]) == {8}
            assert 3 <= world.fake.rdy_history.count(8) <= 8
        assert world.fake.rdy_history[-1] == 0
        assert world.ledger.in_flight_max <= 8

    run(scenario, client=client)


def test_max_rdy_count_of_nsqd(client):
    async def scenario(world):
        async with world.consumer(max_in_flight=1000) as consumer:
            world.fake.add_many(50)
            await take(consumer, 20)
            await asyncio.sleep(1)
            assert max(world.fake.rdy_history) == 20
            assert consumer.stats().received == 20

    run(scenario, features=ServerFeatures(version="1", max_rdy_count=20), client=client)


def test_max_in_flight_changes_while_running(client):
    async def scenario(world):
        async with world.consumer(max_in_flight=2) as consumer:
            world.fake.add_many(100)
            taken = await take(consumer, 2)
            assert consumer.stats().in_flight == 2
            consumer.max_in_flight = 10
            taken += await take(consumer, 8)
            assert consumer.max_in_flight == 10
            with pytest.raises(OptionError):
                consumer.max_in_flight = 0
            consumer.max_in_flight = 3
            for message in taken:
                message.finish()
            await asyncio.sleep(1)
            assert consumer.stats().in_flight <= 3

    run(scenario, client=client)


def test_pause(client):
    async def scenario(world):
        async with world.consumer(max_in_flight=5, handler=lambda message: None, inline=True) as consumer:
            world.fake.add_many(10)
            await until(lambda: len(world.fake.finished) == 10)
            consumer.pause()
            assert consumer.is_paused
            await asyncio.sleep(1)
            world.fake.add_many(10)
            await asyncio.sleep(60)
            assert len(world.fake.finished) == 10
            consumer.unpause()
            await until(lambda: len(world.fake.finished) == 20)

    run(scenario, client=client)


def test_batches_are_whole_over_several_nsqd(client):
    async def scenario(world):
        for fake in world.fakes.values():
            fake.add_many(400)
        sizes = []
        async with world.consumer(max_in_flight=100) as consumer:
            async for batch in consumer.batches(100, timeout=60):
                sizes.append(len(batch))
                for message in batch:
                    message.finish()
                if len(sizes) == 12:
                    break
                await asyncio.sleep(0.2)
        assert sizes[-5:] == [100] * 5, sizes  # once each nsqd has its share

    run(scenario, *"abcde", client=client)


def test_a_batch_waits_for_no_nsqd_that_has_nothing(client):
    async def scenario(world):
        busy, *_ = world.fakes.values()
        async with world.consumer(max_in_flight=100) as consumer:
            await asyncio.sleep(2)
            busy.add_many(200)
            began = asyncio.get_running_loop().time()
            count = 0
            async for batch in consumer.batches(100, timeout=60):
                assert len(batch) <= 20
                count += len(batch)
                for message in batch:
                    message.finish()
                if count == 200:
                    break
            assert asyncio.get_running_loop().time() - began < 5

    run(scenario, *"abcde", client=client)


def test_is_starved(client):
    async def scenario(world):
        async with world.consumer(max_in_flight=10) as consumer:
            assert not consumer.is_starved
            world.fake.add_many(12)
            taken = await take(consumer, 10)
            assert consumer.is_starved
            for message in taken:
                message.finish()
            assert not consumer.is_starved, "the answers are on their way"

    run(scenario, client=client)


def test_two_nsqd_share_max_in_flight_evenly(client):
    async def scenario(world):
        async with world.consumer(max_in_flight=10) as consumer:
            for fake in world.fakes.values():
                fake.add_many(20)
            taken = await take(consumer, 10)
            await asyncio.sleep(2)
            assert [len(fake.sessions[0].in_flight) for fake in world.fakes.values()] == [5, 5]
            assert world.ledger.in_flight_max == 10
            for message in taken:
                message.finish()

    run(scenario, "a", "b", client=client)


def test_fewer_permits_than_nsqd_move_around_until_they_find_messages(client):
    async def scenario(world):
        world.fakes["c"].add_many(5)
        seen = 0
        async with world.consumer(max_in_flight=1, low_rdy_idle_timeout=2) as consumer:
            async for message in consumer:
                message.finish()
                seen += 1
                if seen == 5:
                    break
        assert world.ledger.in_flight_max == 1
        assert world.ledger.rdy_max <= 3

    run(scenario, "a", "b", "c", client=client)


@pytest.mark.slow
@pytest.mark.parametrize(("client", "seed"), seeds_of_both(12))
def test_never_more_than_max_in_flight_while_nsqd_come_and_go(client, seed):
    with World("a", "b", "c", seed=seed, client=client) as world:
        random = world.sim.random
        max_in_flight = random.choice([1, 2, 5, 30])

        async def scenario():
            held: list = []
            async with world.consumer(max_in_flight=max_in_flight, low_rdy_idle_timeout=0.5) as consumer:

                async def receive():
                    async for message in consumer:
                        held.append(message)  # noqa: PERF401 - not all at the end, but each as it comes

                receiver = asyncio.create_task(receive())
                for _ in range(60):
                    name = random.choice("abc")
                    world.fakes[name].add_many(random.randint(1, 20))
                    action = random.random()
                    if action < 0.1 and world.sim.node(name).is_running:
                        world.kill(name)
                    elif not world.sim.node(name).is_running:
                        world.start(name)
                    elif action < 0.2:
                        world.fakes[name].drop_all()
                    await asyncio.sleep(random.uniform(0.0, 0.5))
                    in_hand = sum(not message.is_answered for message in held)
                    assert in_hand <= max_in_flight, consumer.describe()
                    for message in random.sample(held, k=random.randint(0, len(held))):
                        held.remove(message)
                        message.finish()
                for name in "abc":
                    if not world.sim.node(name).is_running:
                        world.start(name)
                for message in held:
                    message.finish()
                held.clear()

                def settle():
                    for message in held:
                        message.finish()
                    held.clear()
                    return not any(
                        fake.backlog or fake.sessions[0].in_flight for fake in world.fakes.values() if fake.sessions
                    )

                await until(settle)
                receiver.cancel()

        world.run(scenario())


# --- handlers ---


def test_async_handlers_run_side_by_side_up_to_the_limit(client):
    async def scenario(world):
        running = [0, 0]

        async def handler(message):
            running[0] += 1
            running[1] = max(running)
            await asyncio.sleep(1)
            running[0] -= 1

        world.fake.add_many(20)
        async with world.consumer(handler=handler, concurrency=5, max_in_flight=20):
            await until(lambda: len(world.fake.finished) == 20)
        assert running == [0, 5]
        assert 4 < world.now < 6

    run(scenario, client=client)


@pytest.mark.parametrize("style", ["async", "thread", "inline"])
def test_how_a_handler_ends_decides(style, client):
    def plain(message):
        if message.body == b"requeue":
            raise Requeue(7)
        if message.body == b"discard":
            raise Discard("no use")
        if message.body == b"group":
            raise ExceptionGroup("of a TaskGroup", [Discard("no use"), Requeue(8)])
        if message.body == b"fail":
            raise ValueError("broken")
        if message.body == b"own":
            message.requeue(3)

    async def coroutine(message):
        plain(message)

    async def scenario(world):
        world.fake.add(b"ok", b"requeue", b"discard", b"group", b"own", b"fail")
        options = {"handler": coroutine if style == "async" else plain, "inline": style == "inline"}
        async with world.consumer(max_in_flight=10, requeue_delay=2, **options) as consumer:
            await until(lambda: len(world.fake.finished) + len(world.fake.requeued) == 6)
            assert world.fake.finished == [b"ok", b"discard"]
            requeued = [(b"fail", 2000), (b"group", 8000), (b"own", 3000), (b"requeue", 7000)]
            assert sorted(world.fake.requeued) == requeued
            assert consumer.stats().failed == 1
            assert consumer.stats().backoff == "waiting"

    run(scenario, client=client)


@pytest.mark.parametrize("call", ["finish", "requeue", "touch"])
def test_threads_answer_through_the_loop(call, client):
    def handler(message):
        getattr(message, call)()

    async def scenario(world):
        world.fake.add_many(50)
        async with world.consumer(handler=handler, concurrency=3, max_in_flight=10, requeue_delay=1):
            answered = {"finish": world.fake.finished, "requeue": world.fake.requeued, "touch": world.fake.touched}
            await until(lambda: len(answered[call]) == 50)

    run(scenario, client=client)


def test_a_handler_that_ends_the_world_ends_the_consumer(client):
    class EndOfTheWorld(BaseException):
        pass

    async def scenario(world):
        async def handler(message):
            raise EndOfTheWorld

        world.fake.add(b"x")
        consumer = world.consumer(handler=handler)
        with pytest.raises(EndOfTheWorld):
            await consumer.run()
        assert world.fake.requeued == [(b"x", 0)]

    run(scenario, client=client)


def test_run_and_stop(client):
    async def scenario(world):
        world.fake.add_many(10)
        consumer = world.consumer(handler=lambda message: None, inline=True)
        running = asyncio.create_task(consumer.run())
        await until(lambda: len(world.fake.finished) == 10)
        consumer.stop()
        await running
        assert consumer.connections == ()

    run(scenario, client=client)


# --- attempts ---


@pytest.mark.parametrize("style", ["pull", "inline", "async"])
def test_giving_up(style, caplog, client):
    async def coroutine(message):
        handled.append(message.body)

    handled: list[bytes] = []

    async def scenario(world):
        options = {"pull": {}, "inline": {"handler": lambda m: handled.append(m.body), "inline": True}}
        world.fake.add(b"old", attempts=5)
        world.fake.add(b"fresh", attempts=4)
        async with world.consumer(max_attempts=5, **options.get(style, {"handler": coroutine})) as consumer:
            if style == "pull":
                (message,) = await take(consumer, 1)
                handled.append(message.body)
                message.finish()
            await until(lambda: len(world.fake.finished) == 2)
            assert handled == [b"fresh"]
            assert consumer.stats().given_up == 1

    run(scenario, client=client)
    assert "giving up on message" in caplog.text


@pytest.mark.parametrize("style", ["pull", "batches", "handler"])
def test_what_waited_here_for_too_long_was_not_tried(style, caplog, client):
    """Each is delivered eight times and tried three times: it is not given up before the application had it."""

    async def scenario(world):
        handled: list[bytes] = []
        given_up: list[bytes] = []

        async def handler(message):
            handled.append(message.body)
            if message.body == b"slow" and len(handled) == 1:
                while waiting.stats().dropped < 7 * 3:
                    await asyncio.sleep(1)
            if message.body != b"slow":
                raise Requeue(0)

        async def pull(consumer):
            async for message in consumer:
                async with message:
                    await handler(message)

        async def pull_batches(consumer):
            async for messages in consumer.batches(1):
                for message in messages:
                    async with message:
                        await handler(message)

        def end(message):
            given_up.append(message.body)

        async def expire():
            while waiting.stats().dropped < 7 * 3:
                await asyncio.sleep(20)
                world.fake.expire()

        world.fake.add(b"slow", b"a", b"b")
        options: dict[str, Any] = {"handler": handler} if style == "handler" else {}
        options |= {"max_in_flight": 10, "msg_timeout": 20, "max_attempts": 3, "on_giving_up": end}
        async with world.consumer(**options) as waiting:
            if style != "handler":
                task = asyncio.create_task((pull if style == "pull" else pull_batches)(waiting))
            await expire()
            await until(lambda: len(given_up) == 2)
            assert sorted(given_up) == [b"a", b"b"]
            assert handled.count(b"a") == handled.count(b"b") == 3
            if style != "handler":
                task.cancel()

    run(scenario, client=client)
    assert "after 3 attempts" in caplog.text


def test_giving_up_with_a_callback(client):
    async def scenario(world):
        saved = []

        async def save(message):
            if message.body == b"cannot save":
                raise OSError("disk full")
            await asyncio.sleep(1)
            saved.append(message.body)

        world.fake.add(b"bad", b"cannot save", attempts=9)
        async with world.consumer(max_attempts=5, on_giving_up=save, requeue_delay=1) as consumer:
            task = asyncio.create_task(take(consumer, 1))
            await until(lambda: world.fake.finished and world.fake.requeued)
            task.cancel()
        assert saved == world.fake.finished == [b"bad"]
        assert world.fake.requeued == [(b"cannot save", 10_000)], "not finished: it would be lost"

    run(scenario, client=client)


def test_no_limit(client):
    async def scenario(world):
        world.fake.add(b"x", attempts=65000)
        async with world.consumer(max_attempts=0) as consumer:
            (message,) = await take(consumer, 1)
            assert message.attempts == 65001
            message.finish()

    run(scenario, client=client)


# --- backoff ---


def test_backoff_stops_probes_and_comes_back(client):
    async def scenario(world):
        failing = [True]

        def handler(message):
            times.append(world.now)
            if failing[0]:
                raise ValueError("downstream is down")

        times: list[float] = []
        world.fake.add_many(200)
        async with world.consumer(
            handler=handler, inline=True, max_in_flight=10, backoff=1, requeue_delay=3600
        ) as consumer:
            await until(lambda: times)
            first = len(times)
            assert consumer.stats().backoff == "waiting"
            await asyncio.sleep(60)
            assert len(times) - first <= 8, "one probe for each waiting time, and those double"
            probes = times[first:]
            gaps = [later - earlier for earlier, later in pairwise(probes)]
            assert all(later > 1.2 * earlier for earlier, later in pairwise(gaps)), gaps
            failing[0] = False
            await until(lambda: not world.fake.backlog)
            assert consumer.stats().backoff == "normal"

    run(scenario, client=client)


@pytest.mark.parametrize("off", ["max_backoff", "backoff"])
def test_backoff_can_be_switched_off(client, off):
    async def scenario(world):
        def handler(message):
            raise ValueError("always")

        world.fake.add_many(50)
        async with world.consumer(handler=handler, inline=True, max_in_flight=5, **{off: 0}):
            began = world.now
            await until(lambda: len(world.fake.requeued) == 50)
            assert world.now - began < 2

    run(scenario, client=client)


# --- lost connections, late answers ---


def test_a_killed_nsqd_is_back_soon_and_its_messages_come_again(client):
    async def scenario(world):
        async with world.consumer(max_in_flight=10) as consumer:
            await asyncio.sleep(10)
            world.fake.add_many(5)
            taken = await take(consumer, 2)
            await until(lambda: consumer.stats().in_flight >= 5)
            world.kill("a")
            world.start("a")
            began = world.now
            await until(lambda: taken[0].is_lost)
            await until(lambda: consumer.connections)
            assert world.now - began < 1.0, "the first attempt comes within a second"
            for message in taken:
                message.finish()  # nothing is sent, nothing raises
            for message in await take(consumer, 5):
                assert message.attempts == 2
                message.finish()
            await until(lambda: len(world.fake.finished) == 5)
            assert consumer.stats().dropped == 5

    run(scenario, client=client)


def test_queued_messages_of_a_lost_connection_hold_nothing_back(client):
    async def scenario(world):
        async with world.consumer(max_in_flight=10) as consumer:
            world.fake.add_many(10)
            await until(lambda: consumer.stats().queued == 10)
            world.fake.drop_all()
            began = world.now
            await until(lambda: not consumer.connections)
            assert consumer.stats().dropped == 10
            for message in await take(consumer, 10):
                message.finish()
            assert world.now - began < 2
            await until(lambda: consumer.stats().in_flight == 0)
            assert world.now - began < 2

    run(scenario, client=client)


def test_forgotten_messages_of_a_lost_connection_hold_nothing_back_for_ever(client):
    async def scenario(world):
        async with world.consumer(max_in_flight=2, msg_timeout=20) as consumer:
            world.fake.add_many(4)
            await take(consumer, 2)  # and never answered
            world.fake.drop_all()
            began = world.now
            for message in await take(consumer, 2):
                message.finish()
            assert 19 < world.now - began < 25

    run(scenario, client=client)


def test_no_more_is_taken_than_is_handled_in_time(caplog, client):
    """What waits in vain would wear out its attempts, also where other consumers of the channel have it next."""

    async def scenario(world):
        each_s = [1.0]

        async def handler(_message):
            await asyncio.sleep(each_s[0])

        world.fake.add_many(2000)
        async with world.consumer(handler=handler, max_in_flight=100, msg_timeout=20) as consumer:
            await until(lambda: consumer.stats().dropped > 0)
            await until(lambda: 10 <= world.fake.rdy_history[-1] <= 16)
            for _ in range(2):  # what came before that waits in vain as well
                world.fake.expire()
                await asyncio.sleep(25)
            dropped = consumer.stats().dropped
            await asyncio.sleep(300)
            assert consumer.stats().dropped == dropped
            each_s[0] = 0.01
            await until(lambda: world.fake.rdy_history[-1] == 100)

    run(scenario, client=client)
    assert re.search("so 1[45] are taken until they keep up", caplog.text)


def test_messages_that_wait_for_too_long_are_not_handled_twice(caplog, client):
    async def scenario(world):
        handled: list[bytes] = []

        async def handler(message):
            handled.append(message.body)
            await asyncio.sleep(45)

        world.fake.add(*[b"%d" % number for number in range(10)])
        async with world.consumer(handler=handler, max_in_flight=10, msg_timeout=20, drain_timeout=60) as consumer:
            await until(lambda: consumer.stats().received == 10)
            await asyncio.sleep(21)
            world.fake.expire()
            await until(lambda: consumer.stats().received == 20)
            await until(lambda: consumer.stats().dropped == 19)  # 9 of the first ten, all of the second
            assert consumer.stats().queued == 0
            world.fake.expire()
            await until(lambda: len(handled) == 2)

    run(scenario, client=client)
    assert "handlers are too slow for max_in_flight 10" in caplog.text


def test_an_nsqd_that_sends_what_nobody_asked_for(client):
    async def scenario(world):
        async with world.consumer(max_in_flight=10) as consumer:
            await asyncio.sleep(1)
            frame = message_frame(b"unasked")
            for _ in range(3):
                world.fake.deliver_unasked(frame * 600)
                await asyncio.sleep(1)
            assert consumer.stats().queued <= 1200
            await until(lambda: world.fake.session_count == 2)

    run(scenario, client=client)


def test_late_answers_are_told(client):
    async def scenario(world):
        errors: list = []
        async with world.consumer(max_in_flight=5, on_error=errors.append) as consumer:
            world.fake.add(b"x")
            (message,) = await take(consumer, 1)
            world.fake.late = "yes"
            message.touch()
            await until(lambda: message.is_lost)
            message.finish()
            waiting = asyncio.create_task(take(consumer, 1))  # a thread that iterates calls on_error
            await until(lambda: len(errors) == 2)
            assert not waiting.done()
            assert [type(error) for error in errors] == [TouchFailed, FinFailed]
            assert consumer.stats().late == 2
            assert consumer.connections

    run(scenario, client=client)


def test_an_error_callback_that_fails_harms_nobody(caplog, client):
    async def scenario(world):
        def callback(error):
            raise ZeroDivisionError

        world.fake.late = "yes"
        world.fake.add(b"x")
        async with world.consumer(on_error=callback) as consumer:
            for message in await take(consumer, 1):
                message.finish()
            await until(lambda: consumer.stats().late)
            assert consumer.connections

    run(scenario, client=client)
    assert "on_error raised" in caplog.text


def test_touch_gives_more_time(client):
    async def scenario(world):
        async with world.consumer(msg_timeout=10) as consumer:
            world.fake.add(b"x")
            (message,) = await take(consumer, 1)
            await asyncio.sleep(8)
            assert 1.9 < message.time_left < 2.1
            message.touch()
            assert 9.9 < message.time_left < 10.1
            await until(lambda: world.fake.touched)
            message.finish()

    run(scenario, client=client)


# --- connecting ---


def test_an_nsqd_that_is_down_at_the_start_is_found_later(client):
    async def scenario(world):
        world.kill("a")
        async with world.consumer() as consumer:
            assert consumer.connections == ()
            await asyncio.sleep(5)
            world.start("a")
            world.fake.add(b"x")
            for message in await take(consumer, 1):
                message.finish()

    run(scenario, client=client)


def test_a_refusal_for_good_is_raised(client):
    async def scenario(world):
        world.fake.refuse_sub = "E_UNAUTHORIZED AUTH failed"
        with pytest.raises(NsqdError, match="E_UNAUTHORIZED"):
            async with world.consumer():
                pass
        assert world.fake.sessions == []

    run(scenario, client=client)


def test_a_refusal_that_comes_later_ends_the_iteration(client):
    async def scenario(world):
        async with world.consumer() as consumer:
            world.fake.refuse_sub = "E_UNAUTHORIZED AUTH failed"
            world.fake.drop_all()
            with pytest.raises(NsqdError, match="E_UNAUTHORIZED"):
                await take(consumer, 1)

    run(scenario, client=client)


def test_a_refusal_that_can_pass_is_tried_again(client):
    async def scenario(world):
        errors: list = []
        world.fake.refuse_sub = "E_SUB_FAILED consumers exceed the limit"
        async with world.consumer(on_error=errors.append) as consumer:
            await asyncio.sleep(3)
            world.fake.refuse_sub = ""
            await until(lambda: consumer.connections)
        assert {error.code for error in errors} == {"E_SUB_FAILED"}

    run(scenario, client=client)


@pytest.mark.slow
def test_heartbeats_go_on_for_hours(client):
    async def scenario(world):
        async with world.consumer(heartbeat_interval=30) as consumer:
            await asyncio.sleep(3000)
            assert world.fake.session_count == 1
            world.kill("a", power_loss=True)
            world.fake.is_mute = True
            began = world.now
            await until(lambda: not consumer.connections)
            assert 30 <= world.now - began <= 61

    run(scenario, client=client)


# --- draining ---


def test_leaving_gives_back_what_was_not_handed_out(client):
    async def scenario(world):
        world.fake.add(*[b"%d" % number for number in range(10)])
        async with world.consumer(max_in_flight=10) as consumer:
            first, second = await take(consumer, 2)
            await until(lambda: consumer.stats().received == 10)
            first.finish()
            second.requeue(5)
        assert world.fake.finished == [b"0"]
        assert (b"1", 5000) in world.fake.requeued
        assert sorted(world.fake.requeued)[0] == (b"1", 5000)
        assert sorted(body for body, delay in world.fake.requeued if delay == 0) == [b"%d" % n for n in range(2, 10)]

    run(scenario, client=client)


def test_leaving_waits_for_handlers(client):
    async def scenario(world):
        started = []

        async def handler(message):
            started.append(message)
            await asyncio.sleep(5)

        world.fake.add_many(10)
        async with world.consumer(handler=handler, concurrency=3, max_in_flight=10):
            await until(lambda: len(started) == 3)
        assert world.fake.finished == [b"x"] * 3
        assert len(started) == 3
        assert 4.9 < world.now < 6

    run(scenario, client=client)


def test_leaving_tells_what_was_never_answered(caplog, client):
    async def scenario(world):
        world.fake.add_many(2)
        async with world.consumer() as consumer:
            await take(consumer, 2)
        assert world.now < 5

    run(scenario, client=client)
    assert "2 messages not answered" in caplog.text


def test_leaving_a_machine_that_does_not_answer_takes_seconds(client):
    async def scenario(world):
        async with world.consumer():
            world.sim.node("a").pause()
            began = world.now
        assert world.now - began < 3
        world.sim.node("a").resume()

    run(scenario, client=client)


def test_an_exception_in_the_block_drains_too(client):
    async def scenario(world):
        world.fake.add_many(5)
        with pytest.raises(ZeroDivisionError):
            async with world.consumer() as consumer:
                for message in await take(consumer, 1):
                    message.finish()
                raise ZeroDivisionError
        assert world.fake.finished == [b"x"]
        assert not any(session.in_flight for session in world.fake.sessions)

    run(scenario, client=client)


def test_closing_without_a_start_and_twice(client):
    async def scenario(world):
        consumer = world.consumer()
        await consumer.close()
        async with world.consumer() as consumer:
            pass
        await consumer.close()

    run(scenario, client=client)


# --- discovery ---


def discovering(world, listed, **options):
    return world.consumer(nsqlookupd_http_addresses="l:4161", fetch=listed, **options)


def test_all_listed_nsqd_are_consumed_and_new_ones_found(client):
    async def scenario(world):
        listed = ListedNodes()
        listed.topics["t"] = ["a", "b"]
        async with discovering(world, listed) as consumer:
            assert consumer.connections in (("a:4150", "b:4150"), ("b:4150", "a:4150"))
            listed.topics["t"] = ["a", "b", "c"]
            await until(lambda: len(consumer.connections) == 3)
            assert world.now < 10, "polls are frequent after the start"
        if client == ASYNCIO:
            assert listed.asked[-1] == "closed"

    run(scenario, "a", "b", "c", client=client)


def test_a_listed_nsqd_is_kept_when_it_leaves_the_lists(client):
    async def scenario(world):
        listed = ListedNodes()
        listed.topics["t"] = ["a"]
        async with discovering(world, listed) as consumer:
            listed.topics["t"] = []
            await asyncio.sleep(300)
            assert consumer.connections == ("a:4150",)
            world.fake.drop_all()
            await asyncio.sleep(300)
            assert consumer.connections == (), "lost, and listed nowhere"
            listed.topics["t"] = ["a"]
            await until(lambda: consumer.connections)

    run(scenario, client=client)


def test_an_nsqd_that_is_restarted_is_found_again_soon(client):
    async def scenario(world):
        listed = ListedNodes()
        listed.topics["t"] = ["a"]
        async with discovering(world, listed) as consumer:
            await asyncio.sleep(600)
            world.kill("a")
            listed.topics["t"] = []
            polls = len(listed.asked)
            await asyncio.sleep(10)
            assert len(listed.asked) - polls >= 2, "polls are frequent after a loss"
            world.start("a")
            listed.topics["t"] = ["a"]
            began = world.now
            await until(lambda: consumer.connections)
            assert world.now - began < 15, "not an interval of 60 s"

    run(scenario, client=client)


def test_nsqlookupd_that_fail_take_nothing_away(caplog, client):
    async def scenario(world):
        listed = ListedNodes()
        listed.is_down = True
        errors: list = []
        async with discovering(world, listed, on_error=errors.append) as consumer:
            assert consumer.connections == ()
            waiting = asyncio.create_task(take(consumer, 1))  # a thread that iterates calls on_error
            await until(lambda: errors)
            assert {type(error) for error in errors} == {DiscoveryError}
            await asyncio.sleep(10)
            listed.topics["t"] = ["a"]
            listed.is_down = False
            await until(lambda: consumer.connections)
            listed.is_down = True
            polls = len(listed.asked)
            await asyncio.sleep(300)
            assert len(listed.asked) - polls < 15, "what is down is not asked every two seconds"
            world.fake.drop_all()
            began = world.now
            await until(lambda: consumer.connections)
            assert world.now - began < 2
            assert not waiting.done()
            waiting.cancel()

    with caplog.at_level(logging.WARNING):
        run(scenario, client=client)
    assert "discovery of t failed" in caplog.text


def test_describe_shows_it_all(client):
    async def scenario(world):
        async with world.consumer(max_in_flight=10) as consumer:
            text = consumer.describe()
        assert "backoff: normal" in text
        assert "max_in_flight=10" in text
        assert "a:4150 rdy=1" in text
        assert "subscribed" in text

    run(scenario, client=client)
