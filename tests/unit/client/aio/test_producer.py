"""What only the asyncio producer does: gathering, back-pressure in bytes, cancelled calls. Time is virtual."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from tests.unit.client.fake_nsqd import OK, SILENCE
from tests.unit.client.world import World, until

from flintmq.client import Producer
from flintmq.errors import LocalProtocolError, OptionError, PublishError, PublishRefused, PublishUnknown


def run(scenario, *names, **options):
    with World(*names, **options) as world:
        world.run(scenario(world))


def commands(world, name="a"):
    return world.fakes[name].commands


# --- what is sent ---


def test_the_pubs_of_one_turn_are_one_mpub_per_topic():
    async def scenario(world):
        async with world.producer() as producer:
            await asyncio.gather(
                *(producer.pub("t", b"%d" % number) for number in range(5)), producer.pub("other", b"x")
            )
        assert commands(world) == [("MPUB", [b"0", b"1", b"2", b"3", b"4"]), ("PUB", [b"x"])]

    run(scenario)


def test_gathering_can_be_switched_off():
    async def scenario(world):
        async with world.producer(batch=False) as producer:
            await asyncio.gather(*(producer.pub("t", b"%d" % number) for number in range(3)))
        assert commands(world) == [("PUB", [b"0"]), ("PUB", [b"1"]), ("PUB", [b"2"])]

    run(scenario)


def test_an_mpub_is_capped_in_count_and_bytes():
    async def scenario(world):
        async with world.producer(batch_count_max=3) as producer:
            await asyncio.gather(*(producer.pub("t", b"x") for _ in range(7)))
        assert [len(bodies) for _, bodies in commands(world)] == [3, 3, 1]
        commands(world).clear()
        async with world.producer(batch_bytes_max=1000) as producer:
            await asyncio.gather(*(producer.pub("t", bytes(400)) for _ in range(5)))
        assert [len(bodies) for _, bodies in commands(world)] == [2, 2, 1]

    run(scenario)


def test_different_deadlines_are_not_mixed():
    async def scenario(world):
        async with world.producer() as producer:
            await asyncio.gather(
                producer.pub("t", b"1", timeout=1), producer.pub("t", b"2", timeout=1.01), producer.pub("t", b"3")
            )
        assert commands(world) == [("MPUB", [b"1", b"2"]), ("PUB", [b"3"])]

    run(scenario)


def test_of_deadlines_that_are_gathered_the_earlier_holds():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: SILENCE
        async with world.producer() as producer:
            began = world.now
            calls = [producer.pub("t", b"1", timeout=1.04), producer.pub("t", b"2", timeout=1)]
            await asyncio.gather(*calls, return_exceptions=True)
            assert len(commands(world)) == 1
            assert world.now - began == pytest.approx(1.0, abs=1e-3)

    run(scenario)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda producer: producer.pub("bad topic", b"x"), LocalProtocolError),
        (lambda producer: producer.pub("t", b""), LocalProtocolError),
        (lambda producer: producer.pub("t", "text"), TypeError),
        (lambda producer: producer.pub("t", object()), TypeError),
        (lambda producer: producer.pub("t", None), TypeError),
        (lambda producer: producer.pub("t", b"x", timeout=-1), OptionError),
        (lambda producer: producer.mpub("t", []), LocalProtocolError),
        (lambda producer: producer.mpub("t", [b"a", b""]), LocalProtocolError),
        (lambda producer: producer.mpub("t", [bytes(2000)]), LocalProtocolError),
        (lambda producer: producer.dpub("t", b"x", -1), OptionError),
        (lambda producer: producer.dpub("bad topic", b"x", 1), LocalProtocolError),
    ],
)
def test_what_cannot_be_published_is_refused_before_it_is_sent(call, error):
    async def scenario(world):
        async with world.producer(max_bytes_in_flight=1500) as producer:
            with pytest.raises(error):
                await call(producer)
            await producer.pub("t", b"good")
            assert producer.stats().bytes_in_flight == 0
        assert commands(world) == [("PUB", [b"good"])]

    run(scenario)


def test_a_producer_is_started_once_and_before_it_is_used():
    async def scenario(world):
        producer = world.producer()
        with pytest.raises(RuntimeError, match="start the producer"):
            await producer.pub("t", b"x")
        async with producer:
            with pytest.raises(RuntimeError, match="once"):
                await producer.start()
        with pytest.raises(PublishRefused, match="CLOSED"):
            await producer.pub("t", b"x")

    run(scenario)


def test_wrong_options():
    with pytest.raises(OptionError):
        Producer()
    with pytest.raises(OptionError, match="timeout"):
        Producer("a:1", timeout=0)
    with pytest.raises(OptionError, match="max_tries"):
        Producer("a:1", max_tries=0)


# --- the retry table ---


@pytest.mark.parametrize("code", ["E_BAD_MESSAGE MPUB message too big 9 > 8", "E_BAD_BODY MPUB body too big 9 > 8"])
def test_a_bad_message_among_gathered_ones_fails_alone(code):
    def answer(command, bodies):
        return code if b"bad" in bodies else OK

    async def scenario(world):
        world.fake.answer = answer
        async with world.producer() as producer:
            bodies = [b"1", b"bad", b"2", b"bad", b"3"]
            results = await asyncio.gather(*(producer.pub("t", body) for body in bodies), return_exceptions=True)
            assert producer.stats().bytes_in_flight == 0
        assert [type(result) for result in results] == [type(None), PublishRefused] * 2 + [type(None)]
        assert sorted(world.fake.stored) == [b"1", b"2", b"3"], "and none of them twice"

    run(scenario)


# --- deadlines ---


def test_a_short_deadline_of_one_call_does_not_break_the_connection():
    async def scenario(world):
        answers = [SILENCE, OK]
        world.fake.answer = lambda command, bodies: answers.pop(0)
        async with world.producer(timeout=5) as producer:
            with pytest.raises(PublishUnknown):
                await producer.pub("t", b"x", timeout=0.1)
            assert world.fake.session_count == 1

    run(scenario)


# --- back-pressure ---


def test_bytes_in_flight_are_bounded_and_who_waits_comes_first():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: SILENCE
        async with world.producer(max_bytes_in_flight=1000, batch=False, timeout=2) as producer:
            tasks = [asyncio.create_task(producer.pub("t", bytes(336))) for _ in range(2)]
            await asyncio.sleep(0.5)
            assert producer.stats().bytes_in_flight == 800
            waiting = asyncio.create_task(producer.pub("t", bytes(300)))
            small = asyncio.create_task(producer.pub("t", b"s", timeout=1))
            await asyncio.sleep(0.5)
            assert len(commands(world)) == 2, "the small one would fit, but it is not its turn"
            with pytest.raises(PublishRefused, match="on their way"):
                await small
            world.fake.answer = lambda command, bodies: OK
            results = await asyncio.gather(*tasks, waiting, return_exceptions=True)
            assert [type(result) for result in results[:2]] == [PublishUnknown, PublishUnknown]
            assert producer.stats().bytes_in_flight == 0
            await producer.pub("t", b"s")

    run(scenario)


def test_calls_that_are_turned_away_have_failed():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: SILENCE
        async with world.producer(max_bytes_in_flight=1000, batch=False, timeout=5) as producer:
            filler = asyncio.create_task(producer.pub("t", bytes(900)))
            await asyncio.sleep(0.1)
            calls = [producer.pub("t", b"x", timeout=0.5), producer.pub("t", b"x", timeout=0.5, partition=0)]
            calls.append(producer.mpub("t", [b"x", b"y", b"z"], timeout=0.5))
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(result) for result in results] == [PublishRefused] * 3
            assert producer.stats().failed == 5
            with pytest.raises(LocalProtocolError):
                await producer.mpub("t", [bytes(2000)])
            assert producer.stats().failed == 5, "that one was never to be sent"
            waiting = asyncio.create_task(producer.pub("t", b"x"))
            await asyncio.sleep(0)
            filler.cancel()
        with pytest.raises(PublishRefused, match="closed"):
            await waiting
        assert producer.stats().failed == 7, "the one that was cut off, and the one that closing turned away"

    run(scenario)


def test_room_is_handed_on_when_a_waiting_call_is_cancelled():
    async def scenario(world):
        async with world.producer(max_bytes_in_flight=1000, batch=False, timeout=5) as producer:
            world.sim.node("a").pause()
            first = asyncio.create_task(producer.pub("t", bytes(800)))
            await asyncio.sleep(0.1)
            big = asyncio.create_task(producer.pub("t", bytes(800)))
            small = asyncio.create_task(producer.pub("t", b"s"))
            await asyncio.sleep(0.1)
            assert producer.stats().commands == 1
            big.cancel()
            await asyncio.sleep(0.1)
            assert producer.stats().commands == 2, "the small one fits beside the first"
            world.sim.node("a").resume()
            await asyncio.gather(first, small)
            assert producer.stats().bytes_in_flight == 0

    run(scenario)


def test_a_cancelled_call_is_not_sent_once_it_waits():
    async def scenario(world):
        world.kill("a")
        async with world.producer(timeout=30) as producer:
            tasks = [asyncio.create_task(producer.pub("t", b"%d" % number)) for number in range(3)]
            await asyncio.sleep(1)
            tasks[1].cancel()
            lonely = asyncio.create_task(producer.mpub("t", [b"a", b"b"]))
            await asyncio.sleep(0.1)
            lonely.cancel()
            world.start("a")
            await asyncio.gather(tasks[0], tasks[2])
            assert producer.stats().bytes_in_flight == 0
        assert world.fake.stored == [b"0", b"2"]

    run(scenario)


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_a_cancelled_call_that_was_not_sent_takes_no_room_and_holds_up_no_close(batch, count):
    async def scenario(world):
        world.kill("a")
        began = 0.0
        async with world.producer(timeout=30, max_bytes_in_flight=1000, batch=batch) as producer:
            bodies = [bytes(800 // count)] * count
            publish = partial(producer.pub, "t", bodies[0]) if count == 1 else partial(producer.mpub, "t", bodies)
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1):
                        await publish()
                await asyncio.sleep(0.01)
                assert producer.stats().bytes_in_flight == 0
            began = world.now
        assert world.now - began < 1
        assert world.fake.stored == []

    run(scenario)


# --- closing ---


def test_closing_ends_calls_that_wait_for_room():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: SILENCE
        producer = world.producer(max_bytes_in_flight=500, timeout=1)
        await producer.start()
        tasks = [asyncio.create_task(producer.pub("t", bytes(400))) for _ in range(3)]
        await asyncio.sleep(0.1)
        await producer.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [PublishUnknown, PublishRefused, PublishRefused]

    run(scenario)


def test_closing_that_is_cut_short_loses_no_future():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: SILENCE
        producer = world.producer(timeout=60)
        await producer.start()
        task = asyncio.create_task(producer.pub("t", b"x"))
        await asyncio.sleep(1)
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(1)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        with pytest.raises(PublishError, match="CLOSED"):
            await task
        assert world.now < 5

    run(scenario)


def test_closing_twice_and_without_a_start():
    async def scenario(world):
        producer = world.producer()
        await producer.close()
        producer = world.producer()
        async with producer:
            assert "1 nsqd" in repr(producer)
        await producer.close()

    run(scenario)


def test_describe_shows_what_is_on_its_way():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: SILENCE
        async with world.producer(timeout=1) as producer:
            task = asyncio.create_task(producer.pub("t", b"x"))
            await until(lambda: commands(world))
            assert "1 to t, sent to a:4150" in producer.describe()
            await asyncio.gather(task, return_exceptions=True)

    run(scenario)
