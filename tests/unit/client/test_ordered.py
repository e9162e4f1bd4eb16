"""Consuming topics with partitions: a connection each, in order or not, headers, trace. Time is virtual."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec
import pytest
from tests.unit.client.cluster_world import PlainLookup, play
from tests.unit.client.world import World, until

from flintmq import Consumer, Message
from flintmq.client.core.message import take_apart
from flintmq.client.core.order import Order, OrderViolation
from flintmq.errors import DiscoveryError, NsqdError, OptionError, RemoteProtocolError
from flintmq.wire.extended import Extension


async def fill(world, topic: str, count: int, first: int = 0) -> None:
    """Publish numbers to every partition in order, as some producer."""
    for number in range(first, first + count):
        for partition in world.cluster.topics[topic].partitions.values():
            partition.append(number, b"", 0, b"%d" % number, world.cluster.topics[topic].is_extended)
    world.cluster.pump()


def seen_of(messages, partition: int) -> list[int]:
    return [int(message.body) for message in messages if message.partition == partition]


def has_come(messages: list[Message], count: int) -> bool:
    return len(messages) >= count


def finished(world, topic: str) -> int:
    partitions = world.cluster.topics[topic].partitions.values()
    return sum(len(channel.finished) for partition in partitions for channel in partition.channels.values())


# --- a connection per partition ---


def test_each_partition_has_a_connection(client):
    async def scenario(world):
        world.cluster.create("t", 5)
        await fill(world, "t", 20)
        messages: list[Message] = []
        async with world.consumer(handler=messages.append, inline=True, max_in_flight=50) as consumer:
            await until(lambda: len(messages) == 100)
            assert consumer.partitions == {0: "a:4150", 1: "b:4150", 2: "c:4150", 3: "a:4150", 4: "b:4150"}
            assert sorted(consumer.connections) == ["a:4150", "b:4150", "c:4150"]
            assert consumer.stats().connections == 5
        assert sorted(world.cluster.nodes["a"].subscribed) == ["SUB t ch 0", "SUB t ch 3"]
        for partition in range(5):
            assert seen_of(messages, partition) == list(range(20))
        assert finished(world, "t") == 100
        message = messages[0]
        assert message.partition is not None
        assert message.internal_id == message.partition << 50 | 2 + int(message.body)
        assert message.trace_id == int(message.body)
        assert (message.offset, message.raw_size, message.headers, message.tag) == (None, None, {}, "")

    play(scenario, client=client)


def test_a_message_without_partition(client):
    async def scenario(world):
        world.fake.add(b"x")
        async with world.consumer() as consumer:
            async for message in consumer:
                found = (message.partition, message.internal_id, message.trace_id, message.offset, message.headers)
                assert found == (None, None, None, None, {})
                assert message.tag == ""
                message.finish()
                break
            assert consumer.partitions == {}

    with World(client=client) as world:
        world.run(scenario(world))


def test_what_is_asked_of_nsqlookupd(client):
    async def scenario(world):
        world.cluster.create("t", 1)
        async with world.consumer():
            pass
        how = "/lookup?topic=t&access=r&metainfo=true"
        assert world.cluster.asked[:3] == ["http://l1:4161/listlookup", f"http://l1:4161{how}", f"http://l2:4161{how}"]

    play(scenario, client=client)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_leader_that_moved_is_followed_within_seconds(ordered, client):
    async def scenario(world):
        world.cluster.create("t", 3)
        messages: list[Message] = []
        options = {"ordered": ordered, "handler": messages.append, "inline": True}
        async with world.consumer(lookup_interval=3600, **options) as consumer:
            await fill(world, "t", 5)
            await until(lambda: len(messages) == 15)
            for leader, closes, first in (("b", False, 5), ("c", True, 10)):
                world.cluster.move("t", 0, leader, closes=closes)
                await fill(world, "t", 5, first=first)
                began = world.now
                await until(partial(has_come, messages, 3 * (first + 5)))
                assert consumer.partitions[0] == f"{leader}:4150"
                assert world.now - began < 8
            await until(lambda: finished(world, "t") == 45)
            assert seen_of(messages, 0) == list(range(15))
            assert consumer.stats().order_violations == 0

    play(scenario, client=client)


def test_an_old_leader_is_not_kept_beside_the_new_one(client):
    async def scenario(world):
        world.cluster.create("t", 1)
        async with world.consumer() as consumer:
            await until(lambda: consumer.partitions)
            world.cluster.move("t", 0, "b", closes=False)
            await until(lambda: consumer.partitions == {0: "b:4150"}, 8)
            assert [len(world.cluster.nodes[name].sessions) for name in "ab"] == [0, 1]

    play(scenario, client=client)


def test_a_partition_without_leader_is_found_again(client):
    async def scenario(world):
        topic = world.cluster.create("t", 2)
        messages: list[Message] = []
        async with world.consumer(handler=messages.append, inline=True, lookup_interval=3600) as consumer:
            await until(lambda: len(consumer.partitions) == 2)
            world.kill("b")
            topic.partitions[1].listed = ""
            await asyncio.sleep(60)
            world.cluster.move("t", 1, "a")
            await fill(world, "t", 3)
            began = world.now
            await until(lambda: len(messages) == 6)
            assert world.now - began < 5

    play(scenario, client=client)


# --- in order ---


def test_in_order_one_message_at_a_time(client):
    async def scenario(world):
        topic = world.cluster.create("t", 3, is_ordered=True)
        await fill(world, "t", 10)
        messages: list[Message] = []
        held: list[int | None] = []

        async def handle(message: Message) -> None:
            held.append(message.partition)
            assert len(set(held)) == len(held)
            await asyncio.sleep(0.01)
            messages.append(message)
            held.remove(message.partition)

        async with world.consumer(ordered=True, handler=handle, concurrency=10, max_in_flight=100) as consumer:
            await until(lambda: len(messages) == 30)
            assert consumer.stats().order_violations == 0
        for number, partition in topic.partitions.items():
            assert seen_of(messages, number) == list(range(10))
            found = [(each.offset, each.raw_size) for each in messages if each.partition == number]
            assert found == [(stored.offset, stored.raw_size) for stored in partition.log]
        lines = [line for node in world.cluster.nodes.values() for line in node.subscribed]
        assert sorted(lines) == [f"SUB_ORDER t ch {number}" for number in range(3)]
        counts = {count for node in world.cluster.nodes.values() for _, count in node.rdy}
        assert counts <= {0, 1}

    play(scenario, client=client)


def test_youzans_name_of_the_command_is_tried_first_where_it_is_youzans_nsqd(client):
    """It answers E_INVALID to the other name, and closes: each connection was made twice."""

    async def scenario(world):
        world.cluster.create("t", 3, is_ordered=True)
        await fill(world, "t", 2)
        for name in "ab":
            world.cluster.nodes[name].knows_sub_order = False
        messages: list[Message] = []
        async with world.consumer(ordered=True, handler=messages.append, inline=True) as consumer:
            await until(lambda: len(messages) == 6)
            world.cluster.nodes["a"].sessions[0].hang_up()
            await until(lambda: len(consumer.partitions) == 3 and len(world.cluster.nodes["a"].subscribed) == 2)
        nodes = world.cluster.nodes
        assert [line.split()[0] for line in nodes["a"].subscribed] == ["SUB_ORDERED", "SUB_ORDERED"]
        assert [line.split()[0] for line in nodes["c"].subscribed] == ["SUB_ORDER"]
        assert [violation for node in nodes.values() for violation in node.violations] == []

    play(scenario, client=client)


def test_an_nsqd_that_knows_neither_name_is_not_asked_without_end(client):
    """Two connections, then the usual delay between attempts."""

    async def scenario(world):
        world.cluster.create("t", 1, is_ordered=True)
        for node in world.cluster.nodes.values():
            node.knows_sub_order = node.knows_sub_ordered = False
        async with world.consumer(ordered=True, handler=lambda message: None, inline=True):
            await asyncio.sleep(10)
        (tries,) = [len(node.subscribed) for node in world.cluster.nodes.values() if node.subscribed]
        assert 2 <= tries <= 30

    play(scenario, client=client)


def test_the_name_of_the_command_is_remembered_per_nsqd_where_its_version_does_not_tell(client):
    async def scenario(world):
        world.cluster.create("t", 3, is_ordered=True)
        await fill(world, "t", 2)
        for name in "ab":
            world.cluster.nodes[name].knows_sub_order = False
            world.cluster.nodes[name].version = "1.3.0"
        messages: list[Message] = []
        async with world.consumer(ordered=True, handler=messages.append, inline=True) as consumer:
            await until(lambda: len(messages) == 6)
            world.cluster.nodes["a"].sessions[0].hang_up()
            await until(lambda: len(consumer.partitions) == 3 and len(world.cluster.nodes["a"].subscribed) == 3)
        assert [line.split()[0] for line in world.cluster.nodes["a"].subscribed] == [
            "SUB_ORDER",
            "SUB_ORDERED",
            "SUB_ORDERED",
        ]
        assert [line.split()[0] for line in world.cluster.nodes["c"].subscribed] == ["SUB_ORDER"]

    play(scenario, client=client)


def test_a_failed_message_blocks_its_partition_until_it_is_done(caplog, client):
    caplog.set_level(logging.WARNING, "flintmq.client")

    async def scenario(world):
        world.cluster.create("t", 2, is_ordered=True)
        await fill(world, "t", 4)
        done: list[tuple[int | None, int]] = []

        def handle(message: Message) -> None:
            if message.partition == 0 and message.body == b"1" and message.attempts <= 13:
                raise ValueError("not yet")
            done.append((message.partition, int(message.body)))

        options = {"ordered": True, "handler": handle, "inline": True, "max_attempts": 2, "max_backoff": 2}
        async with world.consumer(blocked_error_attempts=12, **options) as consumer:
            await until(lambda: consumer.stats().blocked == 1)
            await until(lambda: len(done) == 8)
            assert consumer.stats().given_up == 0
            assert consumer.stats().order_violations == 0
            assert consumer.stats().blocked == 0
            assert consumer.stats().failed == 13
        assert [number for partition, number in done if partition == 0] == [0, 1, 2, 3]
        assert {timeout for _, timeout in world.cluster.nodes["a"].requeued} == {0}, "RDY 0 holds it back, not REQ"
        levels = [record.levelname for record in caplog.records if "is blocked" in record.message]
        assert levels == ["WARNING", "ERROR"], "attempts 11 and 13"

    play(scenario, client=client)


def test_a_failed_message_comes_again_only_after_the_backoff(client):
    async def scenario(world):
        world.cluster.create("t", 1, is_ordered=True)
        await fill(world, "t", 1)
        times: list[float] = []

        def handle(message: Message) -> None:
            times.append(world.now)
            if len(times) < 3:
                raise ValueError("not yet")

        async with world.consumer(ordered=True, handler=handle, inline=True, backoff=10):
            await until(lambda: finished(world, "t") == 1)
        assert times[1] - times[0] > 7
        assert times[2] - times[1] > 14

    play(scenario, client=client)


def test_while_one_partition_waits_the_others_go_on(client):
    async def scenario(world):
        world.cluster.create("t", 3, is_ordered=True)
        messages: list[Message] = []

        def handle(message: Message) -> None:
            if message.partition == 0:
                raise ValueError("not yet")
            messages.append(message)

        options = {"backoff": 100, "max_in_flight": 2, "low_rdy_idle_timeout": 0.5, "low_rdy_timeout": 1}
        async with world.consumer(ordered=True, handler=handle, inline=True, **options) as consumer:
            await fill(world, "t", 1)
            await until(lambda: consumer.stats().failed == 1)
            await fill(world, "t", 20, first=1)
            await until(lambda: len(messages) == 42, 10)
            assert consumer.stats().backoff == "normal"
            assert consumer.stats().failed == 1
            world.cluster.nodes["a"].sessions[0].hang_up()
            await until(lambda: consumer.stats().failed == 2, 10)  # a new connection has not failed yet

    play(scenario, client=client)


def test_a_body_that_cannot_be_read_is_not_skipped(client):
    async def scenario(world):
        world.cluster.create("t", 1, is_ordered=True)
        for body in (b"1", b"not a number", b"3"):
            world.cluster.topics["t"].partitions[0].append(0, b"", 0, body, False)
        values: list[int] = []

        def handle(message: Message[int]) -> None:
            values.append(message.value)

        async with world.consumer(ordered=True, handler=handle, inline=True, type=int, max_backoff=1) as consumer:
            await asyncio.sleep(30)
            assert consumer.stats().given_up == 0
        assert values == [1]
        assert finished(world, "t") == 1

    play(scenario, client=client)


def test_discarding_is_the_handlers_decision(client):
    from flintmq import Discard

    async def scenario(world):
        world.cluster.create("t", 1, is_ordered=True)
        await fill(world, "t", 3)

        def handle(message: Message) -> None:
            raise Discard("seen before")

        async with world.consumer(ordered=True, handler=handle, inline=True):
            await until(lambda: finished(world, "t") == 3)

    play(scenario, client=client)


def test_pausing_in_order(client):
    async def scenario(world):
        world.cluster.create("t", 2, is_ordered=True)
        await fill(world, "t", 2)
        messages: list[Message] = []
        async with world.consumer(ordered=True, handler=messages.append, inline=True) as consumer:
            await until(lambda: len(messages) == 4)
            consumer.pause()
            await asyncio.sleep(1)
            await fill(world, "t", 2, first=2)
            await asyncio.sleep(30)
            assert len(messages) == 4
            consumer.unpause()
            await until(lambda: len(messages) == 8)

    play(scenario, client=client)


def test_fewer_permits_than_partitions(client):
    async def scenario(world):
        world.cluster.create("t", 6, is_ordered=True)
        await fill(world, "t", 5)
        messages: list[Message] = []
        options = {"max_in_flight": 2, "low_rdy_idle_timeout": 0.5, "low_rdy_timeout": 1}
        async with world.consumer(ordered=True, handler=messages.append, inline=True, **options):
            await until(lambda: len(messages) == 30)
        for number in range(6):
            assert seen_of(messages, number) == list(range(5))

    play(scenario, client=client)


def test_messages_out_of_order_are_told(client):
    async def scenario(world):
        topic = world.cluster.create("t", 1, is_ordered=True)
        await fill(world, "t", 6)
        log = topic.partitions[0].log
        log[2], log[3] = log[3], log[2]
        messages: list[Message] = []
        told: list[object] = []
        options = {"handler": messages.append, "inline": True, "on_error": told.append}
        async with world.consumer(ordered=True, **options) as consumer:
            await until(lambda: len(messages) == 6)
            assert consumer.stats().order_violations == 1
        (violation,) = told
        assert isinstance(violation, OrderViolation)
        assert (violation.found[0], violation.before[0]) == (4, 5)
        assert "t partition 0: message with id 4 at offset" in str(violation)

    play(scenario, client=client)


def record(internal_id: int, attempts: int = 1) -> tuple[int, int, bytes, bytes]:
    return 0, attempts, internal_id.to_bytes(8, "big") + bytes(8), b""


def test_what_counts_as_out_of_order():
    order = Order("t", 10, 50)

    def check(*found: tuple[int, int]) -> int:
        records = [record(internal_id) for internal_id, _ in found]
        extensions = {record(internal_id)[2]: Extension(0, b"", offset, 1) for internal_id, offset in found}
        return len([*order.check("a:1", 0, records, extensions)])

    assert check((2, 0), (3, 10)) == 0
    assert check((3, 10)) == 0, "the last one again"
    assert check((5, 30)) == 0, "gaps are none of our business: messages may have been finished before"
    assert check((5, 31)) == 1, "same id, another offset"
    assert check((6, 31)) == 1, "another id at the same offset"
    assert check((4, 20)) == 1
    assert check((5, 30)) == 0, "compared with what came last"


# --- what the topic says ---


def test_a_topic_that_must_be_consumed_in_order_is_told_to_the_user(client):
    async def scenario(world):
        world.cluster.create("t", 3, is_ordered=True)
        world.kill("c")
        with pytest.raises(NsqdError, match="E_SUB_ORDER_IS_MUST"):
            await world.consumer().start()
        consumer = world.consumer()
        with pytest.raises(NsqdError, match="E_SUB_ORDER_IS_MUST"):
            async with consumer:
                pass

    play(scenario, client=client)


def test_a_topic_without_partitions_cannot_be_consumed_in_order(client):
    async def scenario(world):
        consumer = Consumer("t", "c", nsqlookupd_http_addresses="l", env=world.env, fetch=PlainLookup(), ordered=True)
        with pytest.raises(DiscoveryError, match="has no partitions"):
            await consumer.start()

    with World(client=client) as world:
        world.run(scenario(world))


@pytest.mark.parametrize(
    "options",
    [
        {"nsqd_tcp_addresses": "a:4150"},
        {"nsqlookupd_http_addresses": "l", "sample_rate": 10},
        {"nsqlookupd_http_addresses": "l", "dead_letter": "dead"},
        {"nsqlookupd_http_addresses": "l", "on_giving_up": print},
    ],
)
def test_what_does_not_go_with_order(options):
    with pytest.raises(OptionError, match="ordered"):
        Consumer("t", "c", ordered=True, **options)


@pytest.mark.parametrize("tag", ["a b", "é", "x" * 101])
def test_wrong_tags(tag):
    with pytest.raises(OptionError, match="desired_tag"):
        Consumer("t", "c", nsqd_tcp_addresses="a", desired_tag=tag)


# --- headers ---


@pytest.mark.parametrize("ordered", [False, True])
def test_headers_and_tags(ordered, client):
    async def scenario(world):
        topic = world.cluster.create("t", 1, is_extended=True)
        partition = topic.partitions[0]
        partition.append(0, b'{"color":"red","##client_dispatch_tag":"x"}', 4, b"json", True)
        partition.append(0, b"blue", 2, b"tag", True)
        partition.append(0, b"", 0, b"none", True)
        messages: list[Message] = []
        options = {"handler": messages.append, "inline": True, "ordered": ordered, "desired_tag": "x"}
        async with world.consumer(**options):
            await until(lambda: len(messages) == 3)
        assert [message.body for message in messages] == [b"json", b"tag", b"none"]
        assert [message.headers for message in messages] == [{"color": "red", "##client_dispatch_tag": "x"}, {}, {}]
        assert [message.tag for message in messages] == ["x", "blue", ""]
        assert [message.offset for message in messages] == (
            [0, *(each.offset for each in partition.log[1:])] if ordered else [None] * 3
        )
        (request,) = world.cluster.nodes["a"].identified
        assert (request["extend_support"], request["desired_tag"]) == (True, "x")

    play(scenario, client=client)


def test_a_topic_without_headers_is_not_told_of_any(client):
    async def scenario(world):
        world.cluster.create("t", 1)
        async with world.consumer(desired_tag="x") as consumer:
            await until(lambda: consumer.partitions)
        (request,) = world.cluster.nodes["a"].identified
        assert "extend_support" not in request
        assert "desired_tag" not in request

    play(scenario, client=client)


def test_a_topic_that_is_given_headers_while_it_is_consumed(client):
    async def scenario(world):
        topic = world.cluster.create("t", 1)
        async with world.consumer(lookup_interval=3600) as consumer:
            await until(lambda: consumer.partitions)
            topic.is_extended = True
            world.cluster.nodes["a"].sessions[0].hang_up()
            await until(lambda: any(session.is_extended for session in world.cluster.nodes["a"].sessions), 20)
            await until(lambda: consumer.partitions)

    play(scenario, client=client)


def test_an_nsqd_that_disagrees_for_long_is_told_to_the_user(client):
    async def scenario(world):
        world.cluster.create("t", 1)
        topic = world.cluster.topics["t"]
        async with world.consumer() as consumer:
            await until(lambda: consumer.partitions)
            topic.is_extended = True
            world.cluster.http = lambda path, query: (503, b"")
            world.cluster.nodes["a"].sessions[0].hang_up()
            with pytest.raises(NsqdError, match="E_SUB_EXTEND_NEED"):
                async for _ in consumer:
                    pass

    play(scenario, client=client)


def test_headers_that_are_no_json(client):
    async def scenario(world):
        topic = world.cluster.create("t", 1, is_extended=True)
        topic.partitions[0].append(0, b"[1]", 4, b"x", True)
        given_up: list[Message] = []

        def handle(message: Message) -> None:
            assert message.headers

        async with world.consumer(handler=handle, inline=True, on_giving_up=given_up.append):
            await until(lambda: given_up)
        assert given_up[0].body == b"x"

    play(scenario, client=client)


@pytest.mark.parametrize(
    ("is_extended", "is_ordered", "data"),
    [(True, False, b""), (True, False, b"\x04\x00\x09x"), (False, True, b"short")],
)
def test_messages_that_are_too_short(is_extended, is_ordered, data):
    with pytest.raises(RemoteProtocolError, match="of headers alone"):
        take_apart([(0, 1, bytes(16), data)], is_extended, is_ordered)


def test_nonsense_from_nsqd_ends_the_connection(client):
    async def scenario(world):
        world.cluster.create("t", 1, is_ordered=True)
        async with world.consumer(ordered=True) as consumer:
            await until(lambda: consumer.partitions)
            (session,) = world.cluster.nodes["a"].sessions
            session.frame(2, bytes(10 + 16) + b"short")
            await until(lambda: session not in world.cluster.nodes["a"].sessions)
            assert consumer.stats().received == 0

    play(scenario, client=client)


# --- trace ---


@pytest.mark.parametrize("ordered", [False, True])
def test_tracing_is_switched_while_running(caplog, ordered, client):
    caplog.set_level(logging.INFO, "flintmq.trace")

    async def scenario(world):
        topic = world.cluster.create("t", 1)
        await fill(world, "t", 1)
        messages: list[Message] = []
        async with world.consumer(handler=messages.append, inline=True, ordered=ordered) as consumer:
            await until(lambda: len(messages) == 1)
            consumer.trace = True
            await fill(world, "t", 1, first=77)
            await until(lambda: len(messages) == 2)
            consumer.trace = False
            await fill(world, "t", 1, first=78)
            await until(lambda: len(messages) == 3)
        (line,) = (msgspec.json.decode(each.message) for each in caplog.records if each.name == "flintmq.trace")
        stored = topic.partitions[0].log[1]
        assert line == {
            "event": "receive",
            "topic": "t",
            "channel": "ch",
            "partition": 0,
            "internal_id": stored.internal_id,
            "trace_id": 77,
            "attempts": 1,
            "offset": stored.offset if ordered else None,
            "raw_size": stored.raw_size if ordered else None,
            "local_ip": world.sim.driver.address,
            "nsqd_ip": world.sim.node("a").address,
            "nsqd": "a:4150",
        }

    play(scenario, client=client)
