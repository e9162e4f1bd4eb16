"""The producer: gathering, the retry table, deadlines, back-pressure, failover. Time is virtual."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.unit.client.fake_nsqd import HANG_UP, OK, SILENCE
from tests.unit.client.world import World, until

from flintmq.client import Producer
from flintmq.errors import LocalProtocolError, OptionError, PublishError, PublishRefused, PublishUnknown


def run(scenario, *names, **options):
    with World(*names, **options) as world:
        world.run(scenario(world))


def commands(world, name="a"):
    return world.fakes[name].commands


# --- what is sent ---


def test_pub_mpub_dpub():
    async def scenario(world):
        async with world.producer() as producer:
            await producer.pub("t", b"one")
            await producer.mpub("t", [b"two", bytearray(b"three")])
            await producer.dpub("t", memoryview(b"four"), timedelta(seconds=1))
            stats = producer.stats()
        assert commands(world) == [("PUB", [b"one"]), ("MPUB", [b"two", b"three"]), ("DPUB", [b"four"])]
        assert (stats.published, stats.commands, stats.failed, stats.bytes_in_flight) == (4, 3, 0, 0)

    run(scenario)


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


def test_a_bad_message_is_final():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: "E_BAD_MESSAGE PUB message too big 9 > 8"
        async with world.producer() as producer:
            with pytest.raises(PublishRefused) as caught:
                await producer.pub("t", b"x")
        assert (caught.value.code, caught.value.nsqd, caught.value.retryable) == ("E_BAD_MESSAGE", "a:4150", False)
        assert len(commands(world)) == 1

    run(scenario)


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


def test_a_refused_publish_does_not_keep_the_others_waiting():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: OK if bodies == [b"good"] else "E_BAD_MESSAGE PUB message too big"
        async with world.producer() as producer:
            began = world.now
            for _ in range(20):
                with pytest.raises(PublishRefused):
                    await producer.pub("t", b"bad")
                await producer.pub("t", b"good")
            assert world.now - began < 0.5
        assert world.fake.stored == [b"good"] * 20

    run(scenario)


def test_an_mpub_with_a_bad_message_fails_as_a_whole():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: "E_BAD_MESSAGE MPUB message too big"
        async with world.producer() as producer:
            with pytest.raises(PublishRefused):
                await producer.mpub("t", [b"1", b"2"])
        assert len(commands(world)) == 1
        assert world.fake.stored == []

    run(scenario)


@pytest.mark.parametrize(
    ("error", "kind"), [("E_INVALID cannot", PublishRefused), ("E_PUB_FAILED PUB failed exiting", PublishUnknown)]
)
def test_errors_that_can_pass_are_tried_again_and_then_told(error, kind):
    async def scenario(world):
        answers = [error, error, OK]
        world.fake.answer = lambda command, bodies: answers.pop(0)
        async with world.producer() as producer:
            await producer.pub("t", b"x")
            assert producer.stats().retries == 2
            world.fake.answer = lambda command, bodies: error
            with pytest.raises(kind) as caught:
                await producer.pub("t", b"y", timeout=60)
        assert type(caught.value) is kind
        assert caught.value.retryable
        assert len(commands(world)) == 6

    run(scenario)


def test_an_unknown_error_code_is_final():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: "E_FROM_THE_FUTURE what"
        async with world.producer() as producer:
            with pytest.raises(PublishRefused, match="E_FROM_THE_FUTURE what"):
                await producer.pub("t", b"x")

    run(scenario)


def test_an_answer_that_makes_no_sense():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: SILENCE
        async with world.producer() as producer:
            task = asyncio.create_task(producer.pub("t", b"x"))
            await until(lambda: commands(world))
            world.fake.deliver_unasked(b"\x00\x00\x00\x06\x00\x00\x00\x00NO")
            with pytest.raises(PublishUnknown, match="b'NO'"):
                await task

    run(scenario)


# --- lost connections ---


def test_what_was_not_answered_is_sent_again():
    async def scenario(world):
        answers = [HANG_UP, OK]
        world.fake.answer = lambda command, bodies: answers.pop(0)
        async with world.producer() as producer:
            await producer.pub("t", b"x")
        assert commands(world) == [("PUB", [b"x"])] * 2

    run(scenario)


def test_or_is_told_at_once():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: HANG_UP
        async with world.producer(retry_unknown=False) as producer:
            began = world.now
            with pytest.raises(PublishUnknown, match="CONNECTION_LOST"):
                await producer.pub("t", b"x")
            assert world.now - began < 0.5
        assert len(commands(world)) == 1

    run(scenario)


def test_what_was_certainly_not_executed_is_sent_again_in_any_case():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: "E_BAD_MESSAGE PUB too big" if bodies == [b"bad"] else OK
        async with world.producer(retry_unknown=False, batch=False) as producer:
            results = await asyncio.gather(
                *(producer.pub("t", body) for body in (b"1", b"bad", b"2")), return_exceptions=True
            )
        assert [type(result) for result in results] == [type(None), PublishRefused, type(None)]
        assert world.fake.stored == [b"1", b"2"]

    run(scenario)


def test_a_killed_nsqd_that_comes_back():
    async def scenario(world):
        async with world.producer(timeout=30) as producer:
            await producer.pub("t", b"1")
            world.kill("a")
            task = asyncio.create_task(producer.pub("t", b"2"))
            await asyncio.sleep(3)
            assert not task.done()
            assert producer.stats().connections == 0
            world.start("a")
            began = world.now
            await task
            assert world.now - began < 4, "the delay after 3 s without it is 4 s at most"
        assert world.fake.stored == [b"1", b"2"]

    run(scenario)


def test_after_a_short_outage_the_producer_is_back_within_a_second():
    async def scenario(world):
        async with world.producer() as producer:
            await asyncio.sleep(10)
            world.fake.drop_all()
            began = world.now
            await producer.pub("t", b"1")
            assert world.now - began < 1.0

    run(scenario)


def test_several_nsqd_are_used_in_turn():
    async def scenario(world):
        async with world.producer() as producer:
            for number in range(9):
                await producer.pub("t", b"%d" % number)
        assert [len(fake.stored) for fake in world.fakes.values()] == [3, 3, 3]

    run(scenario, "a", "b", "c")


def test_a_dead_nsqd_is_left_out():
    async def scenario(world):
        world.kill("b")
        async with world.producer() as producer:
            for number in range(4):
                await producer.pub("t", b"%d" % number)
            world.kill("a")
            world.start("b")
            await asyncio.gather(*(producer.pub("t", b"late", timeout=30) for _ in range(4)))
        assert len(world.fakes["a"].stored) == 4
        assert world.fakes["b"].stored == [b"late"] * 4

    run(scenario, "a", "b")


def test_what_a_killed_nsqd_did_not_answer_goes_to_another():
    async def scenario(world):
        world.fakes["a"].answer = lambda command, bodies: SILENCE
        async with world.producer(batch=False) as producer:
            tasks = [asyncio.create_task(producer.pub("t", b"%d" % number)) for number in range(6)]
            await until(lambda: len(commands(world, "a")) == 3)
            world.kill("a")
            await asyncio.gather(*tasks)
        assert sorted(world.fakes["b"].stored) == [b"%d" % number for number in range(6)]

    run(scenario, "a", "b")


# --- deadlines ---


def test_nobody_there():
    async def scenario(world):
        world.kill("a")
        async with world.producer(timeout=3) as producer:
            began = world.now
            with pytest.raises(PublishRefused, match="a:4150") as caught:
                await producer.pub("t", b"x")
            assert 2.9 < world.now - began <= 3.01
            assert caught.value.code == "TIMEOUT"
            assert caught.value.__cause__ is not None
            assert producer.stats().bytes_in_flight == 0

    run(scenario)


def test_an_nsqd_that_does_not_answer_is_given_up_with_the_deadline():
    async def scenario(world):
        world.fake.answer = lambda command, bodies: SILENCE
        async with world.producer(timeout=2) as producer:
            began = world.now
            with pytest.raises(PublishUnknown, match="no answer within"):
                await producer.pub("t", b"x")
            assert world.now - began <= 2.01
            world.fake.answer = lambda command, bodies: OK
            await producer.pub("t", b"y")
        assert world.fake.stored == [b"y"]
        assert world.fake.session_count == 2

    run(scenario)


def test_a_short_deadline_of_one_call_does_not_break_the_connection():
    async def scenario(world):
        answers = [SILENCE, OK]
        world.fake.answer = lambda command, bodies: answers.pop(0)
        async with world.producer(timeout=5) as producer:
            with pytest.raises(PublishUnknown):
                await producer.pub("t", b"x", timeout=0.1)
            assert world.fake.session_count == 1

    run(scenario)


def test_a_stuck_nsqd_is_left_for_another_before_the_deadline():
    async def scenario(world):
        world.fakes["a"].answer = lambda command, bodies: SILENCE
        async with world.producer(timeout=4) as producer:
            began = world.now
            await asyncio.gather(*(producer.pub("t", b"%d" % number) for number in range(5)))
            for _ in range(2):
                await producer.pub("t", b"x")
            assert world.now - began < 4.5
        assert len(world.fakes["b"].stored) == 7

    run(scenario, "a", "b")


def test_a_paused_machine_is_noticed_and_everything_ends():
    async def scenario(world):
        async with world.producer(timeout=2) as producer:
            await producer.pub("t", b"1")
            world.sim.node("a").pause()
            results = await asyncio.gather(*(producer.pub("t", b"x") for _ in range(10)), return_exceptions=True)
            assert all(isinstance(result, PublishUnknown) for result in results)
            world.sim.node("a").resume()

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


# --- closing ---


def test_closing_waits_for_what_was_taken():
    async def scenario(world):
        producer = world.producer()
        await producer.start()
        tasks = [asyncio.create_task(producer.pub("t", b"%d" % number)) for number in range(5)]
        await asyncio.sleep(0)
        await producer.close()
        await asyncio.gather(*tasks)
        assert len(world.fake.stored) == 5

    run(scenario)


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


# --- discovery ---


class ListedNodes:
    """Answers /lookup and /nodes of one nsqlookupd."""

    def __init__(self) -> None:
        self.topics: dict[str, list[str]] = {}
        self.all: list[str] = []
        self.asked: list[str] = []
        self.is_down = False

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        self.asked.append(url)
        await asyncio.sleep(0.01)
        if self.is_down:
            raise OSError("refused")
        if "/nodes" in url:
            names = self.all
        else:
            topic = parse_qs(urlsplit(url).query).get("topic", [""])[0]
            if topic not in self.topics:
                return 404, b'{"message":"TOPIC_NOT_FOUND"}'
            names = self.topics[topic]
        nodes = ",".join(f'{{"broadcast_address":"{name}","tcp_port":4150}}' for name in names)
        return 200, b'{"producers":[' + nodes.encode() + b"]}"

    async def close(self) -> None:
        self.asked.append("closed")


def discovering(world, listed, **options):
    return Producer(nsqlookupd_http_addresses="l:4161", env=world.env, fetch=listed, **options)


def test_a_known_topic_goes_where_it_is_and_a_new_one_anywhere():
    async def scenario(world):
        listed = ListedNodes()
        listed.topics["old"] = ["a"]
        listed.all = ["a", "b"]
        async with discovering(world, listed) as producer:
            await producer.pub("new", b"first")
            await until(lambda: producer.stats().connections == 2)
            for _ in range(4):
                await producer.pub("old", b"old")
                await producer.pub("new", b"new")
        assert world.fakes["a"].stored.count(b"old") == 4
        assert world.fakes["a"].stored.count(b"new") == world.fakes["b"].stored.count(b"new") == 2
        assert listed.asked[-1] == "closed"

    run(scenario, "a", "b")


def test_new_homes_of_a_topic_are_found():
    async def scenario(world):
        listed = ListedNodes()
        listed.topics["t"] = ["a"]
        async with discovering(world, listed, lookup_interval=5) as producer:
            await producer.pub("t", b"1")
            listed.topics["t"] = ["b"]
            await asyncio.sleep(15)
            await producer.pub("t", b"2")
        assert (world.fakes["a"].stored, world.fakes["b"].stored) == ([b"1"], [b"2"])

    run(scenario, "a", "b")


def test_a_publish_waits_for_nsqlookupd_and_nsqd_to_come_up():
    async def scenario(world):
        listed = ListedNodes()
        listed.is_down = True
        async with discovering(world, listed, timeout=10) as producer:
            task = asyncio.create_task(producer.pub("t", b"1"))
            await asyncio.sleep(2)
            listed.is_down = False
            await asyncio.sleep(2)
            listed.all = ["a"]
            await task
        assert world.fake.stored == [b"1"]

    run(scenario)


def test_no_nsqd_anywhere_is_said():
    async def scenario(world):
        listed = ListedNodes()
        async with discovering(world, listed, timeout=2) as producer:
            with pytest.raises(PublishRefused, match="list no nsqd"):
                await producer.pub("t", b"1")
            listed.is_down = True
            with pytest.raises(PublishRefused, match="refused"):
                await producer.pub("other", b"1")

    run(scenario)


def test_an_error_that_asks_for_it_refreshes_the_lookup():
    async def scenario(world):
        listed = ListedNodes()
        listed.topics["t"] = ["a"]
        world.fakes["a"].answer = lambda command, bodies: "E_TOPIC_NOT_EXIST"
        async with discovering(world, listed, lookup_interval=3600) as producer:
            task = asyncio.create_task(producer.pub("t", b"1"))
            await until(lambda: commands(world))
            listed.topics["t"] = ["b"]
            await task
        assert world.fakes["b"].stored == [b"1"]

    run(scenario, "a", "b")
