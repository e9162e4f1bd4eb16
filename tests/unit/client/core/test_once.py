"""Writers, and idempotent producers against scripted nsqd: what goes where, with which sequence."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.unit.client.blocking_client import ASYNCIO
from tests.unit.client.fake_nsqd import HANG_UP, OK, SILENCE
from tests.unit.client.world import World, until

from flintmq.client.core.once import NAME_SIZE_MAX, Home, WriterKey, Writers, new_writers
from flintmq.client.options import system_env
from flintmq.errors import OptionError, PublishRefused, PublishUnknown
from flintmq.wire.identify import ServerFeatures
from flintmq.wire.params import is_producer_id

SPOT = WriterKey(Home("a:1", "", "t", None))
OTHER = WriterKey(Home("a:1", "", "t", None), True)


def test_writers_are_used_one_at_a_time():
    writers = Writers("name", system_env(), 2)
    first, second = writers.take(SPOT), writers.take(SPOT)
    assert first is not None and second is not None
    assert first.producer_id != second.producer_id
    assert writers.take(SPOT) is None and not writers.has_free(SPOT)
    assert writers.take(OTHER) is not None and writers.has_free(OTHER)
    writers.release(first, 3, False)
    assert writers.take(SPOT) is first and first.sequence == 4
    writers.release(first, 0, False)
    assert writers.take(SPOT) is first and first.sequence == 4, "nothing was stored"
    writers.release(first, 0, True)
    third = writers.take(SPOT)
    assert third is not None and third is not first and third.sequence == 1


def test_ids_are_valid_and_nobody_else_s():
    env = system_env()
    seen = set()
    for _ in range(50):
        env.random.seed(1)  # as children of one process that forked
        writers = Writers("n" * NAME_SIZE_MAX, env, 1000)
        for _ in range(3):
            writer = writers.take(SPOT)
            assert writer is not None and is_producer_id(writer.producer_id.encode())
            assert writer.producer_id not in seen
            seen.add(writer.producer_id)
    with pytest.raises(OptionError, match="producer_id"):
        Writers("n" * (NAME_SIZE_MAX + 1), env)


def test_writers_of_many_topics_are_bounded(monkeypatch):
    monkeypatch.setattr("flintmq.client.core.once.SPOT_COUNT_MAX", 10)
    writers = Writers("", system_env())
    for number in range(100):
        spot = WriterKey(Home("a:1", "", str(number), None))
        writer = writers.take(spot)
        assert writer is not None
        writers.release(writer, 1, False)
    assert len(writers._free) == 10 and not writers._taken


def test_no_name_no_writers():
    assert new_writers(None, system_env(), 1000) is None


def sequences(fake) -> list[tuple[int, int, int]]:
    """Writer, sequence and count of every publish; writers by number in the order they came."""
    numbers: dict[bytes, int] = {}
    found = []
    for producer_id, sequence, count in fake.onces:
        found.append((numbers.setdefault(producer_id, len(numbers) + 1), sequence, count))
    return found


def test_an_nsqd_of_another_kind_is_refused_at_once(client):
    with World(features=ServerFeatures("nsq", producer_sequences=False), client=client) as world:

        async def main():
            async with world.producer(idempotent=True) as producer:
                begun = world.now
                with pytest.raises(PublishRefused, match="publish with idempotent=False"):
                    await producer.pub("t", b"x")
                assert world.now - begun < 1

        world.run(main())
    assert not world.fakes["a"].commands


def test_sequences_follow_one_another():
    with World() as world:

        async def main():
            async with world.producer(idempotent=True) as producer:
                for number in range(3):
                    await producer.pub("t", b"%d" % number)
                await producer.mpub("t", [b"a", b"b"])
                await asyncio.gather(*(producer.pub("t", b"x") for _ in range(7)))
                await producer.pub("u", b"y")

        world.run(main())
        assert sequences(world.fake) == [(1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 2), (1, 6, 7), (2, 1, 1)]


def test_what_was_not_answered_is_sent_again_as_it_was_to_the_same_nsqd(client):
    with World("a", "b", client=client) as world:
        answers = [HANG_UP]
        world.fakes["a"].answer = lambda command, bodies: answers.pop() if answers else OK

        async def main():
            async with world.producer(idempotent=True) as producer:
                for number in range(4):
                    await producer.pub("t", b"%d" % number)

        world.run(main())
        found = sequences(world.fakes["a"])
        assert found[:2] == [(1, 1, 1)] * 2
        assert found[2:] == [(1, number, 1) for number in range(2, len(found))]
        assert world.fakes["a"].commands[0] == world.fakes["a"].commands[1]
        stored = [body for fake in world.fakes.values() for body in fake.stored]
        assert sorted(stored) == [b"0", b"1", b"2", b"3"]


def test_after_an_unknown_outcome_another_identity_goes_on(client):
    with World(client=client) as world:
        answers = [SILENCE, SILENCE]
        world.fake.answer = lambda command, bodies: answers.pop(0) if answers else OK

        async def main():
            async with world.producer(idempotent=True, timeout=2) as producer:
                with pytest.raises(PublishUnknown):
                    await producer.pub("t", b"x")
                world.fake.drop_all()  # an answer that never came would be taken for the next one
                await producer.pub("t", b"y")

        world.run(main())
        assert sequences(world.fake) == [(1, 1, 1), (1, 1, 1), (2, 1, 1)]


def test_a_sequence_that_is_not_expected_makes_another_identity(client):
    with World(client=client) as world:
        answers = [OK, "E_SEQUENCE_GAP PUB_ONCE producer p sequence 2, expected 1", OK]
        world.fake.answer = lambda command, bodies: answers.pop(0) if answers else OK

        async def main():
            async with world.producer(idempotent=True) as producer:
                await producer.pub("t", b"x")
                await producer.pub("t", b"y")

        world.run(main())
        assert sequences(world.fake) == [(1, 1, 1), (1, 2, 1), (2, 1, 1)]


def test_what_was_refused_leaves_the_sequence_free(client):
    with World(client=client) as world:
        answers = [OK, "E_PUB_ONCE_FAILED PUB_ONCE failed draining", "E_BAD_TOPIC no", OK]
        world.fake.answer = lambda command, bodies: answers.pop(0) if answers else OK

        async def main():
            async with world.producer(idempotent=True) as producer:
                await producer.pub("t", b"x")
                with pytest.raises(PublishRefused):
                    await producer.pub("t", b"y")
                await until(lambda: producer.stats().connections == 1)
                await producer.pub("t", b"z")

        world.run(main())
        assert sequences(world.fake) == [(1, 1, 1), (1, 2, 1), (1, 2, 1), (1, 2, 1)]


def test_a_call_that_was_cancelled_leaves_no_hole():
    """Its message was sent with the others, so it is sent again with them."""
    with World() as world:
        answers = [HANG_UP, OK, OK]
        world.fake.answer = lambda command, bodies: answers.pop(0) if answers else OK

        async def main():
            async with world.producer(idempotent=True) as producer:
                calls = [asyncio.create_task(producer.pub("t", b"%d" % number)) for number in range(3)]
                await until(lambda: world.fake.commands)
                calls[1].cancel()
                await asyncio.gather(*calls, return_exceptions=True)
                await producer.pub("t", b"x")

        world.run(main())
        assert sequences(world.fake) == [(1, 1, 3), (1, 1, 3), (1, 4, 1)]


def test_an_nsqd_that_is_stuck_holds_up_only_so_many(client):
    with World("a", "b", client=client) as world:
        world.fakes["a"].answer = lambda command, bodies: SILENCE
        chance = random.Random(1)

        async def main():
            async with world.producer(idempotent=True, batch=False, timeout=4) as producer:
                calls = []
                for number in range(40):
                    calls.append(asyncio.create_task(producer.pub("t", b"%d" % number)))
                    await asyncio.sleep(chance.random() / 100)
                done = await asyncio.gather(*calls, return_exceptions=True)
                return [outcome for outcome in done if outcome is not None]

        failed = world.run(main())
        if client == ASYNCIO:
            assert len(failed) == 4, "as many as there are writers"
        assert 0 < len(failed) <= 4
        assert all(isinstance(error, PublishUnknown) for error in failed)
        assert len(world.fakes["b"].stored) == 40 - len(failed)
