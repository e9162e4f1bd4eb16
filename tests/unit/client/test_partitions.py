"""Publishing to topics with partitions: where it goes, in which order, what is retried. Time is virtual."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import msgspec
import pytest
from tests.unit.client.blocking_client import ASYNCIO
from tests.unit.client.cluster_world import PlainLookup, play
from tests.unit.client.fake_cluster import HANG_UP, OK, SILENCE, STORE_AND_HANG_UP
from tests.unit.client.world import World, until

from flintmq import Producer
from flintmq.client.core.publish import Published
from flintmq.client.core.sharding import partition_of
from flintmq.errors import LocalProtocolError, OptionError, PublishError, PublishRefused, PublishUnknown


def ids_of(partition: int, count: int, partition_count: int = 3) -> list[str]:
    """Sharding ids that belong to a partition."""
    found = (f"id{number}" for number in range(10_000))
    return [each for each in found if partition_of(each, partition_count) == partition][:count]


def trace_lines(caplog) -> list[dict[str, Any]]:
    return [msgspec.json.decode(record.message) for record in caplog.records if record.name == "flintmq.trace"]


async def outcomes(*calls) -> list[object]:
    return await asyncio.gather(*calls, return_exceptions=True)


# --- without order ---


def test_publishes_take_turns_over_the_partitions(client):
    async def scenario(world):
        topic = world.cluster.create("t", 4)
        async with world.producer() as producer:
            await producer.pub("t", b"first")
            await until(lambda: producer.stats().connections == 3)
            for number in range(8):
                await producer.pub("t", b"%d" % number)
        assert sorted(len(partition.log) for partition in topic.partitions.values()) in ([2, 2, 2, 3], [1, 2, 3, 3])
        assert {command for node in world.cluster.nodes.values() for command, _, _ in node.commands} == {"PUB"}

    play(scenario, client=client)


def test_one_connection_per_nsqd(client):
    async def scenario(world):
        world.cluster.create("t", 8)
        async with world.producer() as producer:
            for number in range(30):
                await producer.pub("t", b"%d" % number)
            assert [len(node.sessions) for node in world.cluster.nodes.values()] == [1, 1, 1]
            assert producer.stats().connections == 3

    play(scenario, client=client)


def test_the_publishes_of_one_turn_go_to_one_partition_as_one_command():
    async def scenario(world):
        world.cluster.create("t", 3)
        async with world.producer() as producer:
            await producer.pub("t", b"first")
            await asyncio.gather(*(producer.pub("t", b"%d" % number) for number in range(50)))
            await producer.mpub("t", [b"x", b"y"])
        commands = [each for node in world.cluster.nodes.values() for each in node.commands]
        assert sorted((command, len(bodies)) for command, _, bodies in commands) == [
            ("MPUB", 2),
            ("MPUB", 50),
            ("PUB", 1),
        ]

    play(scenario)


@pytest.mark.parametrize("is_enveloped", [False, True])
def test_what_is_asked_of_nsqlookupd(is_enveloped, client):
    async def scenario(world):
        world.cluster.create("t", 1)
        world.cluster.is_enveloped = is_enveloped
        async with world.producer() as producer:
            await producer.pub("t", b"x")
        how = "/lookup?topic=t&access=w&metainfo=true"
        assert world.cluster.asked[:3] == ["http://l1:4161/listlookup", f"http://l1:4161{how}", f"http://l2:4161{how}"]

    play(scenario, client=client)


def test_a_partition_that_takes_nothing_is_left_out(client):
    async def scenario(world):
        topic = world.cluster.create("t", 3)
        async with world.producer(lookup_interval=3600) as producer:
            await producer.pub("t", b"first")
            await until(lambda: producer.stats().connections == 3)
            topic.partitions[1].is_writable = False
            for number in range(30):
                await producer.pub("t", b"%d" % number)
            refused = [each for each in world.cluster.nodes["b"].commands if each[2] != [b"first"]]
            assert len(refused) < 6, "it is asked again now and then only"
            topic.partitions[1].is_writable = True
            await asyncio.sleep(20)
            for number in range(30):
                await producer.pub("t", b"%d" % number)
            assert len(topic.partitions[1].log) > 5
        assert len(world.cluster.stored("t")) == 61

    play(scenario, client=client)


def test_nothing_is_published_to_a_topic_that_exists_no_more(client):
    async def scenario(world):
        world.cluster.create("t", 2)
        async with world.producer(timeout=3) as producer:
            await producer.pub("t", b"x")
            del world.cluster.topics["t"]
            with pytest.raises(PublishRefused, match="E_TOPIC_NOT_EXIST") as caught:
                await producer.pub("t", b"y")
            assert caught.value.retryable
            assert not any(
                command == "PUB" and number < 0
                for node in world.cluster.nodes.values()
                for command, number, _ in node.commands
            )

    play(scenario, client=client)


def test_a_delayed_publish_goes_to_a_node_of_the_topic(client):
    """Youzan's nsqd has no DPUB; ours takes it for any of its partitions."""

    async def scenario(world):
        world.cluster.create("t", 1)
        async with world.producer() as producer:
            with pytest.raises(PublishRefused, match="E_INVALID"):
                await producer.dpub("t", b"x", 1)
        world.cluster.nodes["a"].violations.clear()

    play(scenario, client=client)


def test_a_delayed_publish_without_a_partition_is_not_sent_to_a_topic_in_order(client):
    async def scenario(world):
        world.cluster.create("t", 2, is_ordered=True)
        async with world.producer() as producer:
            with pytest.raises(PublishRefused, match=r"mpub.*sharding_id") as caught:
                await producer.dpub("t", b"x", 1)
            assert (caught.value.code, caught.value.retryable) == ("E_BAD_PARTITION", False)
            await producer.pub("t", b"y")
            assert producer.stats().connections == 2
        assert [command for node in world.cluster.nodes.values() for command, _, _ in node.commands] == ["PUB"]

    play(scenario, client=client)


# --- in order ---


def test_a_sharding_id_belongs_to_a_partition(client):
    async def scenario(world):
        topic = world.cluster.create("t", 3)
        async with world.producer() as producer:
            for number in range(5):
                for name in ("key0", "key1", "order-12345", 17):
                    await producer.pub("t", f"{name}/{number}".encode(), sharding_id=name)
        for number, partition in topic.partitions.items():
            assert {partition_of(body.decode().partition("/")[0], 3) for body in partition.bodies} <= {number}
        assert topic.partitions[2].bodies[:2] == [b"key0/0", b"key1/0"], "the vectors of Youzan's client"

    play(scenario, client=client)


@pytest.mark.parametrize(
    ("sharding", "sharding_id", "partition"), [("java", "key0", 2), ("java", "key1", 0), ("mod", 4, 1)]
)
def test_the_function_can_be_chosen(sharding, sharding_id, partition, client):
    async def scenario(world):
        topic = world.cluster.create("t", 3)
        async with world.producer(sharding=sharding) as producer:
            await producer.pub("t", b"x", sharding_id=sharding_id)
        assert topic.partitions[partition].bodies == [b"x"]

    play(scenario, client=client)


def test_the_calls_of_one_turn_keep_their_order_and_travel_together():
    async def scenario(world):
        topic = world.cluster.create("t", 3)
        name = ids_of(1, 1)[0]
        async with world.producer() as producer:
            await asyncio.gather(*(producer.pub("t", b"%d" % number, sharding_id=name) for number in range(500)))
        assert [int(body) for body in topic.partitions[1].bodies] == list(range(500))
        assert len(world.cluster.nodes["b"].commands) == 3, "MPUBs of at most 200"

    play(scenario)


def test_without_batches_each_is_a_command(client):
    async def scenario(world):
        topic = world.cluster.create("t", 3)
        async with world.producer(batch=False) as producer:
            await asyncio.gather(*(producer.pub("t", b"%d" % number, partition=2) for number in range(20)))
        assert [int(body) for body in topic.partitions[2].bodies] == list(range(20))
        assert {command for command, _, _ in world.cluster.nodes["c"].commands} == {"PUB"}

    play(scenario, client=client)


def test_order_holds_from_the_first_call_on(client):
    """The number of partitions is not known yet when the first calls are made."""

    async def scenario(world):
        topic = world.cluster.create("t", 3)
        async with world.producer() as producer:
            calls: list[asyncio.Task[None]] = []
            for number in range(40):
                calls.append(asyncio.create_task(producer.pub("t", b"%d" % number, sharding_id="x")))
                await asyncio.sleep(0.001)
            await asyncio.gather(*calls)
        partition = topic.partitions[partition_of("x", 3)]
        assert [int(body) for body in partition.bodies] == list(range(40))

    play(scenario, client=client)


def test_an_mpub_stays_whole_and_in_order(client):
    async def scenario(world):
        topic = world.cluster.create("t", 3)
        async with world.producer() as producer:
            await asyncio.gather(
                producer.pub("t", b"1", partition=0),
                producer.mpub("t", [b"2", b"3"], partition=0),
                producer.pub("t", b"4", partition=0),
            )
        assert topic.partitions[0].bodies == [b"1", b"2", b"3", b"4"]
        assert ("MPUB", 0, [b"2", b"3"]) in world.cluster.nodes["a"].commands

    play(scenario, client=client)


@pytest.mark.slow
@pytest.mark.parametrize("answer", [HANG_UP, STORE_AND_HANG_UP, "E_FAILED_ON_NOT_LEADER", "E_PUB_FAILED", "E_INVALID"])
def test_order_holds_over_a_retry(answer, client):
    async def scenario(world):
        topic = world.cluster.create("t", 1)
        scripted = iter([OK, answer])
        world.cluster.answer = lambda *_: next(scripted, OK)
        async with world.producer() as producer:
            await asyncio.gather(*(producer.pub("t", b"%d" % number, sharding_id="x") for number in range(300)))
        bodies = [int(body) for body in topic.partitions[0].bodies]
        assert list(dict.fromkeys(bodies)) == list(range(300))
        again = 100 if client == ASYNCIO else 1  # as many as travel together
        assert len(bodies) == (300 if answer != STORE_AND_HANG_UP else 300 + again)

    play(scenario, client=client)


def test_a_leader_that_moved_is_found_and_no_other_partition_is_taken(client):
    async def scenario(world):
        topic = world.cluster.create("t", 3)
        name = ids_of(1, 1)[0]
        async with world.producer(lookup_interval=3600) as producer:
            await producer.pub("t", b"1", sharding_id=name)
            world.cluster.move("t", 1, "c", listed="b")
            task = asyncio.create_task(producer.pub("t", b"2", sharding_id=name))
            await asyncio.sleep(1)
            assert not task.done()
            topic.partitions[1].listed = "c"
            await task
        assert topic.partitions[1].bodies == [b"1", b"2"]
        assert len(world.cluster.stored("t")) == 2

    play(scenario, client=client)


def test_a_dead_leader_is_waited_for_until_the_deadline(client):
    async def scenario(world):
        topic = world.cluster.create("t", 3)
        name = ids_of(1, 1)[0]
        async with world.producer(timeout=10, lookup_interval=3600) as producer:
            await producer.pub("t", b"1", sharding_id=name)
            world.kill("b")
            topic.partitions[1].listed = ""
            began = world.now
            task = asyncio.create_task(producer.pub("t", b"2", sharding_id=name))
            await asyncio.sleep(4)
            world.cluster.move("t", 1, "a")
            await task
            assert world.now - began < 6
            world.cluster.move("t", 1, "", listed="")
            world.cluster.nodes["a"].stop()
            with pytest.raises(PublishError) as caught:
                await producer.pub("t", b"3", sharding_id=name, timeout=2)
            assert caught.value.retryable
        assert topic.partitions[1].bodies == [b"1", b"2"]

    play(scenario, client=client)


def test_incomplete_metadata_fail_what_has_no_leader_and_are_asked_for_again(client):
    async def scenario(world):
        topic = world.cluster.create("t", 3)
        topic.partitions[1].listed = ""
        known, missing = ids_of(0, 1)[0], ids_of(1, 1)[0]
        async with world.producer(timeout=3, lookup_interval=3600) as producer:
            await producer.pub("t", b"known", sharding_id=known)
            with pytest.raises(PublishRefused, match="partition 1 of 3 of topic t has no nsqd") as caught:
                await producer.pub("t", b"missing", sharding_id=missing)
            assert caught.value.code == "PARTITION_UNAVAILABLE"
            assert caught.value.retryable
            assert sum("/lookup" in url for url in world.cluster.asked) >= 6, "asked again and again"
            topic.partitions[1].listed = "b"
            await producer.pub("t", b"found", sharding_id=missing)
        assert world.cluster.stored("t") == [b"known", b"found"]

    play(scenario, client=client)


def test_a_number_of_partitions_that_nobody_says(client):
    async def scenario(world):
        topic = world.cluster.create("t", 3)
        topic.partition_num = 0
        async with world.producer(timeout=2) as producer:
            with pytest.raises(PublishRefused, match="how many partitions") as caught:
                await producer.pub("t", b"x", sharding_id="x")
            assert caught.value.retryable
            await producer.pub("t", b"y", partition=1)
            task = asyncio.create_task(producer.pub("t", b"z", sharding_id=ids_of(2, 1)[0], timeout=5))
            await asyncio.sleep(1)
            topic.partition_num = 3
            await task
        assert topic.partitions[1].bodies == [b"y"]
        assert topic.partitions[2].bodies == [b"z"]

    play(scenario, client=client)


def test_writing_is_switched_off_for_a_while(client):
    async def scenario(world):
        topic = world.cluster.create("t", 2)
        for partition in topic.partitions.values():
            partition.is_writable = False
        async with world.producer(timeout=2) as producer:
            for options in ({}, {"sharding_id": "x"}):
                with pytest.raises(PublishRefused) as caught:
                    await producer.pub("t", b"x", **options)
                assert caught.value.retryable
            for partition in topic.partitions.values():
                partition.is_writable = True
            await producer.pub("t", b"1")
            await producer.pub("t", b"2", sharding_id="x")
        assert sorted(world.cluster.stored("t")) == [b"1", b"2"]

    play(scenario, client=client)


def test_what_failed_is_not_overtaken(client):
    async def scenario(world):
        topic = world.cluster.create("t", 1)
        async with world.producer() as producer:
            await producer.pub("t", b"0", sharding_id="x")
            world.cluster.answer = lambda name, command, number, bodies: "E_BAD_MESSAGE" if b"bad" in bodies else OK
            found = await outcomes(
                producer.pub("t", b"1", sharding_id="x"),
                producer.pub("t", b"bad", sharding_id="x"),
                producer.pub("t", b"y1", sharding_id="y"),
                producer.pub("t", b"2", sharding_id="x"),
                producer.mpub("t", [b"3"], sharding_id="x"),
                producer.pub("t", b"y2", sharding_id="y"),
            )
            codes = [getattr(each, "code", None) for each in found]
            assert codes == [None, "E_BAD_MESSAGE", None, "E_ORDER", "E_ORDER", None]
            assert [getattr(each, "retryable", None) for each in found] == [None, False, None, True, True, None]
            await producer.pub("t", b"4", sharding_id="x")
            assert producer.stats().bytes_in_flight == 0
            assert producer.stats().failed == 3
        assert topic.partitions[0].bodies == [b"0", b"1", b"y1", b"y2", b"4"]

    play(scenario, client=client)


def test_what_was_not_answered_is_not_overtaken_either(client):
    async def scenario(world):
        topic = world.cluster.create("t", 1)
        async with world.producer(timeout=10) as producer:
            await producer.pub("t", b"0", partition=0)
            world.cluster.answer = lambda *_: SILENCE
            first = asyncio.create_task(producer.pub("t", b"1", partition=0, timeout=1))
            await asyncio.sleep(0.1)
            second = asyncio.create_task(producer.pub("t", b"2", partition=0))
            with pytest.raises(PublishUnknown):
                await first
            with pytest.raises(PublishRefused, match="E_ORDER"):
                await second
            third = asyncio.create_task(producer.pub("t", b"3", partition=0, timeout=30))
            await asyncio.sleep(1)
            if client == ASYNCIO:  # the other one has closed the connection by then
                assert [bodies for _, _, bodies in world.cluster.nodes["a"].commands] == [[b"0"], [b"1"]], (
                    "it may be stored yet"
                )
            world.cluster.answer = lambda *_: OK
            for session in [*world.cluster.nodes["a"].sessions]:
                session.hang_up()
            await third
        assert topic.partitions[0].bodies == [b"0", b"3"]

    play(scenario, client=client)


def test_what_waits_for_the_number_of_partitions_is_not_overtaken(client):
    async def scenario(world):
        world.cluster.create("t", 1)
        world.cluster.broken_lookups.update(world.cluster.lookups)
        async with world.producer() as producer:
            first = asyncio.create_task(producer.pub("t", b"1", sharding_id="x", timeout=1))
            await asyncio.sleep(0.1)
            second = asyncio.create_task(producer.pub("t", b"2", sharding_id="x", timeout=10))
            other = asyncio.create_task(producer.pub("t", b"3", sharding_id="y", timeout=10))
            with pytest.raises(PublishRefused, match="PARTITION_UNAVAILABLE"):
                await first
            with pytest.raises(PublishRefused, match="E_ORDER"):
                await second
            world.cluster.broken_lookups.clear()
            await other
        assert world.cluster.stored("t") == [b"3"]

    play(scenario, client=client)


def test_a_fetch_that_raises_anything_ends_nothing(client, caplog):
    """It is told with its trace, the other nsqlookupd are asked, and later all of them again."""

    async def scenario(world):
        world.cluster.create("t", 1)
        world.cluster.lookup_error = ZeroDivisionError("a mistake in it")
        world.cluster.broken_lookups.update(world.cluster.lookups)
        got: list[bytes] = []
        async with (
            world.consumer(handler=lambda message: got.append(message.body), lookup_interval=1),
            world.producer(lookup_interval=1, timeout=60) as producer,
        ):
            publishing = asyncio.create_task(producer.pub("t", b"x"))
            await asyncio.sleep(5)
            assert not publishing.done()
            world.cluster.broken_lookups = {world.cluster.lookups[1]}
            await publishing
            await until(lambda: got == [b"x"])

    play(scenario, client=client)
    told = [record for record in caplog.records if record.exc_info and "by a mistake" in record.getMessage()]
    assert told and all("a mistake in it" in record.getMessage() for record in told)


def test_a_partition_that_was_added_since_the_last_lookup(client):
    async def scenario(world):
        topic = world.cluster.create("t", 1)
        async with world.producer(lookup_interval=3600) as producer:
            await producer.pub("t", b"x", partition=0)
            world.cluster.topics["t"] = more = world.cluster.create("t", 3)
            more.partitions[0] = topic.partitions[0]
            await producer.pub("t", b"y", partition=2, timeout=5)
            with pytest.raises(PublishRefused, match="partitions 0 to 2, not 3"):
                await producer.pub("t", b"z", partition=3, timeout=5)
        assert more.partitions[2].bodies == [b"y"]

    play(scenario, client=client)


def test_a_cancelled_call_holds_up_nobody():
    async def scenario(world):
        topic = world.cluster.create("t", 1)
        async with world.producer() as producer:
            await producer.pub("t", b"0", sharding_id="x")
            world.cluster.answer = lambda *_: SILENCE
            first = asyncio.create_task(producer.pub("t", b"1", sharding_id="x"))
            await asyncio.sleep(0.1)
            waiting = [asyncio.create_task(producer.pub("t", b"%d" % number, sharding_id="x")) for number in (2, 3)]
            await asyncio.sleep(0.1)
            waiting[0].cancel()
            world.cluster.answer = lambda *_: OK
            world.cluster.nodes["a"].sessions[0].hang_up()
            await asyncio.gather(first, waiting[1])
            assert producer.stats().bytes_in_flight == 0
        assert topic.partitions[0].bodies == [b"0", b"1", b"3"]

    play(scenario)


def test_closing_ends_everything(client):
    async def scenario(world):
        topic = world.cluster.create("t", 1)
        topic.partitions[0].listed = ""
        producer = world.producer(timeout=2)
        await producer.start()
        calls = [
            asyncio.create_task(producer.pub("t", b"x", sharding_id="x")),
            asyncio.create_task(producer.pub("t", b"x", trace_id=1)),
            asyncio.create_task(producer.pub("t", b"x")),
        ]
        await asyncio.sleep(0.5)
        began = world.now
        await producer.close()
        assert world.now - began < 2
        assert all(isinstance(each, PublishRefused) for each in await outcomes(*calls))

    play(scenario, client=client)


# --- what cannot be ---


def test_a_topic_without_partitions(client):
    async def scenario(world):
        async with Producer(nsqlookupd_http_addresses="l:4161", env=world.env, fetch=PlainLookup()) as producer:
            for options in ({"sharding_id": "x"}, {"partition": 0}, {"trace_id": 1}, {"headers": {"a": "b"}}):
                with pytest.raises(PublishRefused, match="has no partitions") as caught:
                    await producer.pub("t", b"x", **options)
                assert not caught.value.retryable
            producer.trace("t")
            await producer.pub("t", b"plain")
            await producer.mpub("t", [b"plain"])
        assert world.fake.stored == [b"plain", b"plain"]

    with World(client=client) as world:
        world.run(scenario(world))


def test_what_is_refused_before_anything_is_sent(client):
    async def scenario(world):
        world.cluster.create("t", 2)
        async with world.producer() as producer:
            cases: list[tuple[dict[str, Any], type[Exception]]] = [
                ({"partition": -1}, OptionError),
                ({"partition": 1024}, OptionError),
                ({"partition": 1, "sharding_id": "x"}, OptionError),
                ({"sharding_id": 1.5}, OptionError),
                ({"sharding_id": ["x"]}, OptionError),
                ({"sharding_id": True}, OptionError),
                ({"trace_id": -1}, OptionError),
                ({"trace_id": 2**64}, OptionError),
                ({"headers": {"##trace_id": "1"}}, LocalProtocolError),
                ({"headers": {"a": "x" * 70_000}}, LocalProtocolError),
                ({"headers": {"a": object()}}, TypeError),
            ]
            for options, error in cases:
                with pytest.raises(error):
                    await producer.pub("t", b"x", **options)
            with pytest.raises(PublishRefused, match="partitions 0 to 1, not 2"):
                await producer.pub("t", b"x", partition=2)
            assert producer.stats().bytes_in_flight == 0
        assert world.cluster.stored("t") == []
        with pytest.raises(OptionError, match="sharding"):
            world.producer(sharding="md5")
        async with Producer("a:4150", env=world.sim.driver.env) as producer:
            with pytest.raises(OptionError, match="nsqlookupd_http_addresses"):
                await producer.pub("t", b"x", sharding_id="x")
            with pytest.raises(
                OptionError, match=r"^argument: trace_id=1 is not allowed; it needs a partition, or nsqlook"
            ):
                await producer.pub("t", b"x", trace_id=1)

    play(scenario, client=client)


def test_a_partition_without_nsqlookupd(client):
    async def scenario(world):
        topic = world.cluster.create("t", 2)
        addresses = [node.address for node in world.cluster.nodes.values()]
        async with Producer(addresses, env=world.sim.driver.env) as producer:
            for number in range(10):
                await producer.pub("t", b"%d" % number, partition=1)
        assert [int(body) for body in topic.partitions[1].bodies] == list(range(10))
        assert topic.partitions[0].bodies == []

    play(scenario, client=client)


# --- trace ---


def test_a_trace_id_goes_with_the_message_and_says_where_it_is(client):
    async def scenario(world):
        topic = world.cluster.create("t", 3)
        async with world.producer() as producer:
            found = await producer.pub("t", b"traced", trace_id=12345, partition=1)
            assert found == Published("b:4150", 1, (1 << 50) + 2, 12345, 0, 36)
            again = await producer.pub("t", b"traced", trace_id=2**64 - 1, partition=1)
            assert (again.internal_id, again.offset) == ((1 << 50) + 3, 36)
            assert (await producer.pub("t", b"x", trace_id=1)).partition in topic.partitions
            assert await producer.pub("t", b"x") is None
        assert [stored.trace_id for stored in topic.partitions[1].log][:2] == [12345, 2**64 - 1]

    play(scenario, client=client)


def test_traced_publishes_keep_their_order(client):
    async def scenario(world):
        topic = world.cluster.create("t", 1)
        async with world.producer() as producer:
            found = await asyncio.gather(
                *(producer.pub("t", b"%d" % number, trace_id=number, sharding_id="x") for number in range(20))
            )
        assert [int(body) for body in topic.partitions[0].bodies] == list(range(20))
        assert [each.trace_id for each in found] == list(range(20))

    play(scenario, client=client)


def test_tracing_is_switched_while_running(caplog, client):
    caplog.set_level(logging.INFO, "flintmq.trace")

    async def scenario(world):
        topic = world.cluster.create("t", 1)
        world.cluster.create("u", 1)
        async with world.producer(trace=["u"]) as producer:
            await producer.pub("t", b"1")
            producer.trace("t")
            assert producer.traced == ("t", "u")
            await producer.pub("t", b"2")
            await producer.mpub("t", [b"3", b"33"])
            await producer.pub("t", b"4", trace_id=99, sharding_id="x")
            producer.trace("t", False)
            await producer.pub("t", b"5")
            await producer.pub("u", b"6")
        log = topic.partitions[0].log
        assert [stored.body for stored in log] == [b"1", b"2", b"3", b"33", b"4", b"5"]
        assert [bool(stored.trace_id) for stored in log] == [False, True, True, True, True, False]
        lines = trace_lines(caplog)
        expected = [(log[1], 1), (log[2], 2), (log[4], 1)]
        for line, (stored, count) in zip(lines, expected, strict=False):
            assert line == {
                "event": "publish",
                "topic": "t",
                "partition": 0,
                "nsqd": "a:4150",
                "internal_id": stored.internal_id,
                "trace_id": stored.trace_id,
                "offset": stored.offset,
                "raw_size": stored.raw_size if count == 1 else stored.raw_size + log[3].raw_size,
                "count": count,
            }
        assert [line["topic"] for line in lines] == ["t", "t", "t", "u"]

    play(scenario, client=client)


def test_tracing_a_topic_without_partitions_says_what_is_known(caplog, client):
    caplog.set_level(logging.INFO, "flintmq.trace")

    async def scenario(world):
        async with world.producer(trace=["t"]) as producer:
            await producer.pub("t", b"1")
        assert world.fake.commands == [("PUB", [b"1"])]

    with World(client=client) as world:
        world.run(scenario(world))
    (line,) = trace_lines(caplog)
    assert (line["topic"], line["nsqd"], line["internal_id"], line["trace_id"]) == ("t", "a:4150", None, None)


# --- headers ---


def test_headers_on_a_topic_that_has_them(client):
    async def scenario(world):
        topic = world.cluster.create("t", 2, is_extended=True)
        async with world.producer() as producer:
            assert await producer.pub("t", b"1", headers={"color": "red"}, partition=0) is None
            found = await producer.pub("t", b"2", headers={"color": "blue"}, trace_id=7, partition=0)
            assert (found.trace_id, found.partition) == (7, 0)
            await producer.pub("t", b"3", partition=0)
        log = topic.partitions[0].log
        headers = [msgspec.json.decode(stored.headers) if stored.headers else None for stored in log]
        assert headers == [{"color": "red"}, {"color": "blue", "##trace_id": "7"}, None]
        assert [each[0] for each in world.cluster.nodes["a"].commands] == ["PUB_EXT", "PUB_EXT", "PUB"]

    play(scenario, client=client)


def test_headers_on_a_topic_without(client):
    async def scenario(world):
        world.cluster.create("t", 1)
        async with world.producer() as producer:
            await producer.pub("t", b"1")
            with pytest.raises(PublishRefused, match=r"takes no headers: .*flintmq topic create --headers") as caught:
                await producer.pub("t", b"2", headers={"a": "b"})
            assert caught.value.code == "E_EXT_NOT_SUPPORT"
        async with Producer("a:4150", env=world.sim.driver.env) as producer:
            with pytest.raises(PublishRefused, match="E_EXT_NOT_SUPPORT"):
                await producer.pub("t", b"2", headers={"a": "b"}, partition=0)

    play(scenario, client=client)


# --- the retry table (Youzan's smart client) ---


@pytest.mark.parametrize(
    ("error", "tries", "refreshes", "reconnects"),
    [
        ("E_BAD_MESSAGE too big", 1, False, True),
        ("E_BAD_TOPIC", 1, False, True),
        ("E_BAD_BODY", 1, False, True),
        ("E_EXT_NOT_SUPPORT", 1, False, False),
        ("E_FAILED_ON_NOT_LEADER", 5, True, False),
        ("E_FAILED_ON_NOT_WRITABLE", 5, True, False),
        ("E_TOPIC_NOT_EXIST", 5, True, True),
        ("E_INVALID", 3, True, True),
        ("E_PUB_FAILED", 3, True, False),
        ("E_MPUB_FAILED", 3, True, False),
        ("E_PUB_TOO_MUCH_WAITING", 3, False, True),
    ],
)
def test_retry_table(error, tries, refreshes, reconnects, client):
    async def scenario(world):
        world.cluster.create("t", 1)
        async with world.producer(lookup_interval=3600) as producer:
            await producer.pub("t", b"first", sharding_id="x")
            (session,) = world.cluster.nodes["a"].sessions
            world.cluster.answer = lambda *_: error
            world.cluster.asked.clear()
            with pytest.raises(PublishError) as caught:
                await producer.pub("t", b"x", sharding_id="x")
            count = len(world.cluster.nodes["a"].commands) - 1
            assert count == tries if tries < 5 else count >= tries
            assert any("/lookup?" in url for url in world.cluster.asked) == refreshes
            assert isinstance(caught.value, PublishUnknown) == (error in ("E_PUB_FAILED", "E_MPUB_FAILED"))
            assert caught.value.retryable == (tries > 1)
            assert (session in world.cluster.nodes["a"].sessions) == (not reconnects)

    play(scenario, client=client)


def test_congestion_is_waited_out_for_longer(client):
    async def scenario(world):
        world.cluster.create("t", 1)
        times: list[float] = []
        async with world.producer(timeout=60, max_tries=4) as producer:
            await producer.pub("t", b"first", partition=0)

            def answer(*_: object) -> str:
                times.append(world.now)
                return "E_PUB_TOO_MUCH_WAITING"

            world.cluster.answer = answer
            with pytest.raises(PublishRefused):
                await producer.pub("t", b"x", partition=0)
        assert all(later - earlier > 0.15 for earlier, later in itertools.pairwise(times))

    play(scenario, client=client)


def test_an_nsqd_that_is_silent_is_left_for_the_new_leader(client):
    async def scenario(world):
        topic = world.cluster.create("t", 1)
        async with world.producer(timeout=6, lookup_interval=1) as producer:
            await producer.pub("t", b"1", sharding_id="x")
            world.sim.node("a").pause()
            task = asyncio.create_task(producer.pub("t", b"2", sharding_id="x"))
            await asyncio.sleep(0.5)
            world.cluster.move("t", 0, "b", closes=False)
            await task
        assert topic.partitions[0].bodies == [b"1", b"2"]

    play(scenario, client=client)


# --- once, in a cluster that keeps copies ---


def replicated(world, count: int = 3) -> Any:
    """A topic whose logs stay the same whoever leads them."""
    topic = world.cluster.create("t", count)
    for number, partition in topic.partitions.items():
        partition.log_id = f"{number + 0xA1:016x}"
    return topic


@pytest.mark.parametrize("answer", [HANG_UP, STORE_AND_HANG_UP])
@pytest.mark.parametrize("how", [{}, {"partition": 1}])
def test_what_was_not_answered_is_sent_again_to_the_next_leader(answer, how, client):
    """Whether the leader that died had stored it or not, the next one has it once."""

    async def scenario(world):
        topic = replicated(world)
        died: list[bytes] = []

        def answers(name, command, number, bodies):
            if bodies == [b"7"] and not died:
                died.append(bodies[0])
                asyncio.get_running_loop().call_soon(world.cluster.move, "t", number, "c" if name != "c" else "a")
                asyncio.get_running_loop().call_soon(world.kill, name)
                return answer
            return OK

        world.cluster.answer = answers
        async with world.producer(idempotent=True) as producer:
            for number in range(20):
                await producer.pub("t", b"%d" % number, **how)
        assert died
        stored = [stored.body for partition in topic.partitions.values() for stored in partition.log]
        assert sorted(stored) == sorted(b"%d" % number for number in range(20))
        if how:
            assert topic.partitions[1].bodies == [b"%d" % number for number in range(20)]

    play(scenario, client=client)


def test_a_leader_that_hands_over_costs_no_identity(client):
    """It is the same log: its sequences go on."""

    async def scenario(world):
        topic = replicated(world, 1)
        async with world.producer(idempotent=True) as producer:
            for number in range(6):
                if number % 2:
                    world.cluster.move("t", 0, "abc"[number % 3])
                await producer.pub("t", b"%d" % number, partition=0)
        assert topic.partitions[0].bodies == [b"%d" % number for number in range(6)]
        assert [*topic.partitions[0].producers.values()] == [6]

    play(scenario, client=client)


def test_a_log_that_is_another_one_is_not_taken_for_the_same(client):
    """The topic was deleted and created again meanwhile: what was not answered cannot be found out any more."""

    async def scenario(world):
        topic = replicated(world, 1)

        def answers(name, command, number, bodies):
            topic.partitions[0].log_id = "00000000000000ff"
            world.cluster.move("t", 0, "b")
            world.cluster.answer = lambda *_: OK
            return HANG_UP

        async with world.producer(idempotent=True, timeout=3) as producer:
            await producer.pub("t", b"x")
            world.cluster.answer = answers
            with pytest.raises(PublishUnknown):
                await producer.pub("t", b"y")
            await producer.pub("t", b"z")
        assert topic.partitions[0].bodies == [b"x", b"z"]

    play(scenario, client=client)


def test_without_the_identity_of_the_log_nothing_goes_to_another_nsqd(client):
    """Another nsqd may have another log under the same number, which knows nothing of the first try."""

    async def scenario(world):
        topic = world.cluster.create("t", 1)

        def answers(name, command, number, bodies):
            world.cluster.move("t", 0, "b")
            world.cluster.answer = lambda *_: OK
            return HANG_UP

        async with world.producer(idempotent=True, timeout=3) as producer:
            await producer.pub("t", b"x")
            world.cluster.answer = answers
            with pytest.raises(PublishUnknown):
                await producer.pub("t", b"y")
            await producer.pub("t", b"z")
        assert topic.partitions[0].bodies == [b"x", b"z"]

    play(scenario, client=client)
