"""The producers of both clients: the retry table, unknown outcomes, deadlines, failover, discovery. Time is virtual."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.unit.client.blocking_client import ASYNCIO, SYNC
from tests.unit.client.fake_nsqd import HANG_UP, OK, SILENCE
from tests.unit.client.world import World, until

from flintmq.errors import PublishError, PublishRefused, PublishUnknown


def run(scenario, *names, **options):
    with World(*names, **options) as world:
        world.run(scenario(world))


def commands(world, name="a"):
    return world.fakes[name].commands


# --- what is sent ---


def test_pub_mpub_dpub(client):
    async def scenario(world):
        async with world.producer() as producer:
            await producer.pub("t", b"one")
            await producer.mpub("t", [b"two", bytearray(b"three")])
            await producer.dpub("t", memoryview(b"four"), timedelta(seconds=1))
            stats = producer.stats()
        assert commands(world) == [("PUB", [b"one"]), ("MPUB", [b"two", b"three"]), ("DPUB", [b"four"])]
        assert (stats.published, stats.commands, stats.failed, stats.bytes_in_flight) == (4, 3, 0, 0)

    run(scenario, client=client)


# --- the retry table ---


def test_a_bad_message_is_final(client):
    async def scenario(world):
        world.fake.answer = lambda command, bodies: "E_BAD_MESSAGE PUB message too big 9 > 8"
        async with world.producer() as producer:
            with pytest.raises(PublishRefused) as caught:
                await producer.pub("t", b"x")
        assert (caught.value.code, caught.value.nsqd, caught.value.retryable) == ("E_BAD_MESSAGE", "a:4150", False)
        assert len(commands(world)) == 1

    run(scenario, client=client)


def test_a_refused_publish_does_not_keep_the_others_waiting(client):
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

    run(scenario, client=client)


def test_an_mpub_with_a_bad_message_fails_as_a_whole(client):
    async def scenario(world):
        world.fake.answer = lambda command, bodies: "E_BAD_MESSAGE MPUB message too big"
        async with world.producer() as producer:
            with pytest.raises(PublishRefused):
                await producer.mpub("t", [b"1", b"2"])
        assert len(commands(world)) == 1
        assert world.fake.stored == []

    run(scenario, client=client)


@pytest.mark.parametrize(
    ("error", "kind"), [("E_INVALID cannot", PublishRefused), ("E_PUB_FAILED PUB failed exiting", PublishUnknown)]
)
def test_errors_that_can_pass_are_tried_again_and_then_told(error, kind, client):
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

    run(scenario, client=client)


def test_an_unknown_error_code_is_final(client):
    async def scenario(world):
        world.fake.answer = lambda command, bodies: "E_FROM_THE_FUTURE what"
        async with world.producer() as producer:
            with pytest.raises(PublishRefused, match="E_FROM_THE_FUTURE what"):
                await producer.pub("t", b"x")

    run(scenario, client=client)


def test_an_answer_that_makes_no_sense(client):
    async def scenario(world):
        world.fake.answer = lambda command, bodies: SILENCE
        async with world.producer() as producer:
            task = asyncio.create_task(producer.pub("t", b"x"))
            await until(lambda: commands(world))
            world.fake.deliver_unasked(b"\x00\x00\x00\x06\x00\x00\x00\x00NO")
            with pytest.raises(PublishUnknown, match="b'NO'"):
                await task

    run(scenario, client=client)


# --- lost connections ---


def test_what_was_not_answered_is_sent_again(client):
    async def scenario(world):
        answers = [HANG_UP, OK]
        world.fake.answer = lambda command, bodies: answers.pop(0)
        async with world.producer() as producer:
            await producer.pub("t", b"x")
        assert commands(world) == [("PUB", [b"x"])] * 2

    run(scenario, client=client)


def test_or_is_told_at_once(client):
    async def scenario(world):
        world.fake.answer = lambda command, bodies: HANG_UP
        async with world.producer(retry_unknown=False) as producer:
            began = world.now
            with pytest.raises(PublishUnknown, match="CONNECTION_LOST"):
                await producer.pub("t", b"x")
            assert world.now - began < 0.5
        assert len(commands(world)) == 1

    run(scenario, client=client)


def test_what_was_certainly_not_executed_is_sent_again_in_any_case(client):
    async def scenario(world):
        world.fake.answer = lambda command, bodies: "E_BAD_MESSAGE PUB too big" if bodies == [b"bad"] else OK
        async with world.producer(retry_unknown=False, batch=False) as producer:
            results = await asyncio.gather(
                *(producer.pub("t", body) for body in (b"1", b"bad", b"2")), return_exceptions=True
            )
        assert [type(result) for result in results] == [type(None), PublishRefused, type(None)]
        assert world.fake.stored == [b"1", b"2"]

    run(scenario, client=client)


def test_a_killed_nsqd_that_comes_back(client):
    async def scenario(world):
        async with world.producer(timeout=30) as producer:
            await producer.pub("t", b"1")
            world.kill("a")
            task = asyncio.create_task(producer.pub("t", b"2"))
            await asyncio.sleep(3)
            assert not task.done()
            assert producer.stats().connections == 0 and producer.connections == ()
            world.start("a")
            began = world.now
            await task
            assert world.now - began < 4, "the delay after 3 s without it is 4 s at most"
        assert world.fake.stored == [b"1", b"2"]

    run(scenario, client=client)


def test_after_a_short_outage_the_producer_is_back_within_a_second(client):
    async def scenario(world):
        async with world.producer() as producer:
            await asyncio.sleep(10)
            world.fake.drop_all()
            began = world.now
            await producer.pub("t", b"1")
            assert world.now - began < 1.0

    run(scenario, client=client)


def test_after_a_long_outage_a_publish_finds_nsqd_within_a_second(client, caplog):
    async def scenario(world):
        async with world.producer(timeout=2) as producer:
            await producer.pub("t", b"1")
            world.kill("a")
            await asyncio.sleep(600)
            world.start("a")
            began = world.now
            await producer.pub("t", b"2")
            assert world.now - began < 1.1
            world.kill("a")
            caplog.clear()
            for _ in range(60):
                with pytest.raises(PublishError):
                    await producer.pub("t", b"3")
            lines = caplog.text.count("cannot publish to nsqd a:4150")
            world.start("a")
            began = world.now
            await producer.pub("t", b"4")
            assert world.now - began < 1.1
        assert 1 <= lines <= 12, "120 s of attempts every second, of which not each one is told"

    run(scenario, client=client)


def test_several_nsqd_are_used_in_turn(client):
    async def scenario(world):
        async with world.producer() as producer:
            for number in range(9):
                await producer.pub("t", b"%d" % number)
        assert [len(fake.stored) for fake in world.fakes.values()] == [3, 3, 3]

    run(scenario, "a", "b", "c", client=client)


def test_a_dead_nsqd_is_left_out(client):
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

    run(scenario, "a", "b", client=client)


def test_what_a_killed_nsqd_did_not_answer_goes_to_another(client):
    async def scenario(world):
        world.fakes["a"].answer = lambda command, bodies: SILENCE
        async with world.producer(batch=False) as producer:
            tasks = [asyncio.create_task(producer.pub("t", b"%d" % number)) for number in range(6)]
            await until(lambda: len(commands(world, "a")) == 3)
            world.kill("a")
            await asyncio.gather(*tasks)
        assert sorted(world.fakes["b"].stored) == [b"%d" % number for number in range(6)]

    run(scenario, "a", "b", client=client)


# --- deadlines ---


def test_nobody_there(client):
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

    run(scenario, client=client)


def test_an_nsqd_that_is_being_connected_is_named(client):
    async def scenario(world):
        world.kill("a", power_loss=True)
        producer = world.producer(timeout=1)
        starting = asyncio.create_task(producer.start())
        await asyncio.sleep(0)
        with pytest.raises(PublishRefused, match="connecting to a:4150 takes long"):
            await producer.pub("t", b"x")
        await starting
        await producer.close()

    run(scenario, client=client)


def test_an_nsqd_that_does_not_answer_is_given_up_with_the_deadline(client):
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

    run(scenario, client=client)


def test_a_stuck_nsqd_is_left_for_another_before_the_deadline(client):
    async def scenario(world):
        world.fakes["a"].answer = lambda command, bodies: SILENCE
        async with world.producer(timeout=4) as producer:
            began = world.now
            await asyncio.gather(*(producer.pub("t", b"%d" % number) for number in range(5)))
            for _ in range(2):
                await producer.pub("t", b"x")
            assert world.now - began < 4.5
        assert len(world.fakes["b"].stored) == 7

    run(scenario, "a", "b", client=client)


def test_a_paused_machine_is_noticed_and_everything_ends(client):
    async def scenario(world):
        async with world.producer(timeout=2) as producer:
            await producer.pub("t", b"1")
            world.sim.node("a").pause()
            results = await asyncio.gather(*(producer.pub("t", b"x") for _ in range(10)), return_exceptions=True)
            unsent = {PublishRefused} if client == SYNC else set()  # they found no connection
            assert set(map(type, results)) == {PublishUnknown} | unsent
            world.sim.node("a").resume()

    run(scenario, client=client)


# --- closing ---


def test_closing_waits_for_what_was_taken(client):
    async def scenario(world):
        producer = world.producer()
        await producer.start()
        tasks = [asyncio.create_task(producer.pub("t", b"%d" % number)) for number in range(5)]
        await asyncio.sleep(0)
        await producer.close()
        await asyncio.gather(*tasks)
        assert len(world.fake.stored) == 5

    run(scenario, client=client)


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


HANGS_S = 3600.0


class HangingLookup(ListedNodes):
    """Two nsqlookupd; the one on the host ``dead`` answers nothing."""

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        if urlsplit(url).hostname == "dead":
            await asyncio.sleep(min(HANGS_S, timeout_s))
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        return await super().__call__(url, timeout_s)


def discovering(world, listed, **options):
    return world.producer(nsqlookupd_http_addresses="l:4161", fetch=listed, **options)


def test_a_known_topic_goes_where_it_is_and_a_new_one_anywhere(client):
    async def scenario(world):
        listed = ListedNodes()
        listed.topics["old"] = ["a"]
        listed.all = ["a", "b"]
        async with discovering(world, listed) as producer:
            await producer.pub("new", b"first")
            await until(lambda: producer.stats().connections == 2)
            assert sorted(producer.connections) == ["a:4150", "b:4150"]
            for _ in range(4):
                await producer.pub("old", b"old")
                await producer.pub("new", b"new")
        assert world.fakes["a"].stored.count(b"old") == 4
        assert world.fakes["a"].stored.count(b"new") == world.fakes["b"].stored.count(b"new") == 2
        if client == ASYNCIO:
            if client == ASYNCIO:
                assert listed.asked[-1] == "closed"

    run(scenario, "a", "b", client=client)


def test_new_homes_of_a_topic_are_found(client):
    async def scenario(world):
        listed = ListedNodes()
        listed.topics["t"] = ["a"]
        async with discovering(world, listed, lookup_interval=5) as producer:
            await producer.pub("t", b"1")
            listed.topics["t"] = ["b"]
            await asyncio.sleep(15)
            await producer.pub("t", b"2")
        assert (world.fakes["a"].stored, world.fakes["b"].stored) == ([b"1"], [b"2"])

    run(scenario, "a", "b", client=client)


def test_a_publish_waits_for_nsqlookupd_and_nsqd_to_come_up(client):
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

    run(scenario, client=client)


def test_no_nsqd_anywhere_is_said(client):
    async def scenario(world):
        listed = ListedNodes()
        async with discovering(world, listed, timeout=2) as producer:
            with pytest.raises(PublishRefused, match="list no nsqd"):
                await producer.pub("t", b"1")
            listed.is_down = True
            with pytest.raises(PublishRefused, match="refused"):
                await producer.pub("other", b"1")

    run(scenario, client=client)


def test_an_error_that_asks_for_it_refreshes_the_lookup(client):
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

    run(scenario, "a", "b", client=client)


def test_an_nsqlookupd_that_hangs_holds_up_a_publish_for_little_more_than_a_second(client):
    async def scenario(world):
        listed = HangingLookup()
        listed.topics["old"] = ["a"]
        listed.all = ["a"]
        async with discovering_of_two(world, listed, timeout=3) as producer:
            for topic, limit_s in [("new", 2.0), ("old", 1.0), ("newer", 1.0)]:
                began = world.now
                await producer.pub(topic, b"x")
                assert world.now - began < limit_s, topic
        assert len(world.fake.stored) == 3

    run(scenario, client=client)


def test_what_an_nsqlookupd_says_late_moves_a_publish_that_was_anywhere():
    """Of the asyncio client; the blocking one goes by it with the next question."""

    async def scenario(world):
        listed = LateLookup()
        listed.all = ["a"]
        async with discovering_of_two(world, listed, lookup_interval=3600) as producer:
            await producer.pub("t", b"1")
            await until(lambda: listed.is_late_told)
            await until(lambda: producer.stats().connections == 1 and "b" in producer.describe())
            await producer.pub("t", b"2")
        assert (world.fakes["a"].stored, world.fakes["b"].stored) == ([b"1"], [b"2"])

    run(scenario, "a", "b")


class LateLookup(ListedNodes):
    """Two nsqlookupd; the one on the host ``dead`` knows where topics are, and says so after 3 s."""

    is_late_told = False

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        if urlsplit(url).hostname != "dead" or "/lookup?" not in url:
            return await super().__call__(url, timeout_s)
        await asyncio.sleep(3)
        self.is_late_told = True
        return 200, b'{"producers":[{"broadcast_address":"b","tcp_port":4150}]}'


def discovering_of_two(world, listed, **options):
    return world.producer(nsqlookupd_http_addresses=["l:4161", "dead:4161"], fetch=listed, **options)


def test_that_no_nsqlookupd_answers_is_told_now_and_then(client, caplog):
    """While they are asked every second, because a publish waits."""

    async def scenario(world):
        listed = ListedNodes()
        listed.is_down = True
        async with discovering(world, listed, timeout=65) as producer:
            waiting = asyncio.create_task(producer.pub("t", b"x"))
            await asyncio.sleep(50)
            assert len(listed.asked) >= 40
            assert 2 <= caplog.text.count("discovery of t failed") <= 5
            listed.is_down = False
            listed.all = ["a"]
            began = world.now
            await waiting
            assert world.now - began < 3

    with caplog.at_level(logging.WARNING):
        run(scenario, "a", client=client)


@pytest.mark.parametrize("host", ["l", "dead"])
def test_no_password_of_an_nsqlookupd_is_told(client, caplog, host):
    async def scenario(world):
        listed = HangingLookup()
        listed.is_down = True
        address = f"http://somebody:pass@word@{host}:4161"
        async with world.producer(nsqlookupd_http_addresses=address, fetch=listed, timeout=2) as producer:
            with pytest.raises(PublishRefused, match=rf"http://\*\*\*@{host}:4161") as refused:
                await producer.pub("t", b"x")
            await asyncio.sleep(10)
            assert "word" not in f"{refused.value!r} {refused.value} {refused.value.__cause__} {producer!r}"

    with caplog.at_level(logging.DEBUG):
        run(scenario, client=client)
    assert f"http://***@{host}:4161" in caplog.text
    assert "word" not in caplog.text


def test_an_nsqlookupd_that_has_not_answered_is_named(client):
    async def scenario(world):
        listed = HangingLookup()
        async with world.producer(nsqlookupd_http_addresses="dead:4161", fetch=listed, timeout=2) as producer:
            with pytest.raises(PublishRefused, match="there is no answer yet of http://dead:4161"):
                await producer.pub("t", b"x")

    run(scenario, client=client)
