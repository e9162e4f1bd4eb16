"""In order, nothing of a partition is handed out while something of it is in hand. Time is virtual."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.client.cluster_world import ClusterWorld, play
from tests.unit.client.world import until

from flintmq import Message
from flintmq.client.core.attempts import Attempts
from flintmq.client.core.gate import Gate
from flintmq.client.core.inbox import Inbox
from flintmq.client.core.message import Delivery, finish_all
from flintmq.client.core.pace import Pace

MSG_TIMEOUT_S = 60
MAX_MSG_TIMEOUT_S = 900


def publish(world: ClusterWorld, count: int, partitions: int = 1) -> None:
    """Create the topic, with numbers in each of its partitions."""
    topic = world.cluster.create("t", partitions, is_ordered=True)
    for partition in topic.partitions.values():
        for number in range(count):
            partition.append(number, b"", 0, b"%d" % number, False)


def take_back(world: ClusterWorld) -> None:
    """Let the time of every message be over, and deliver them again."""
    for node in world.cluster.nodes.values():
        for session in node.sessions:
            session.take_back()
    world.cluster.pump()


def hang_up(world: ClusterWorld) -> None:
    for node in world.cluster.nodes.values():
        for session in [*node.sessions]:
            session.hang_up()


def lead_elsewhere(world: ClusterWorld) -> None:
    world.cluster.move("t", 0, "b", closes=False)


def has_received(consumer: Any, count: int) -> bool:
    return bool(consumer.stats().received == count)


def test_a_turn_ends_in_the_thread_that_the_consumer_belongs_to():
    """A message that is answered in another thread, where nothing of the gate may be touched."""
    calls: list[Callable[[], object]] = []
    link: Any = SimpleNamespace(address="a:1", msg_timeout_s=60.0, is_lost=False, forget_touched=lambda _: None)
    gate = Gate("t", False, nullcontext, _unexpected, lambda: None, calls.append)
    gate.inbox = Inbox(gate.make, Attempts(5), Pace(), _unexpected, _unexpected)
    gate.start(cast(Any, SimpleNamespace(call_later=lambda *_: None)))

    def put(number: int) -> None:
        delivery = Delivery(link, cast(Any, None), 0.0, [(1, 1, b"%016d" % number, b"x")])
        delivery.partition = 0
        gate.put(delivery)

    put(1)
    message = gate.inbox.take(0.0)
    put(2)
    assert message is not None and (gate.inbox.count, gate.count) == (0, 1)
    message._delivery.hold.answered(is_finished=True)  # type: ignore[union-attr]
    assert (gate.inbox.count, gate.count) == (0, 1)
    (call,) = calls
    call()
    assert (gate.inbox.count, gate.count) == (1, 0)


def _unexpected(*_: object) -> None:
    raise AssertionError


class Handled:
    """A handler whose first call lasts until it is let go on.

    Attributes:
        calls: (body, attempts), as they began.
        overlaps: calls that began while another of their partition had not ended.
    """

    def __init__(self, answers_early: bool = False) -> None:
        self.calls: list[tuple[bytes, int]] = []
        self.overlaps: list[tuple[bytes, int]] = []
        self.may_end = asyncio.Event()
        self.error: Exception | None = None
        self._answers_early = answers_early
        self._running: dict[int | None, int] = {}

    async def __call__(self, message: Message) -> None:
        call = message.body, message.attempts
        if self._running.get(message.partition):
            self.overlaps.append(call)
        self._running[message.partition] = self._running.get(message.partition, 0) + 1
        self.calls.append(call)
        if self._answers_early:
            message.finish()
        if len(self.calls) == 1:
            await self.may_end.wait()
            if self.error is not None:
                self._running[message.partition] -= 1
                raise self.error
        self._running[message.partition] -= 1


def finished(world: ClusterWorld) -> list[bytes]:
    return [stored.body for stored in world.cluster.topics["t"].partitions[0].channels["ch"].finished]


@pytest.mark.parametrize(
    ("happens", "attempts_after"), [(take_back, 0), (hang_up, 2), (lead_elsewhere, 2)], ids=["time", "lost", "moved"]
)
def test_what_comes_while_a_handler_runs_waits_for_it(happens, attempts_after, client, caplog):
    caplog.set_level(logging.DEBUG, "flintmq.client")

    async def scenario(world):
        publish(world, 4)
        handled = Handled()
        async with world.consumer(ordered=True, handler=handled, concurrency=3) as consumer:
            await until(lambda: handled.calls)
            happens(world)
            await until(lambda: "is held back" in caplog.text)
            await asyncio.sleep(MSG_TIMEOUT_S)
            assert handled.calls == [(b"0", 1)]
            assert consumer.stats().queued == 1
            handled.may_end.set()
            await until(lambda: finished(world) == [b"0", b"1", b"2", b"3"])
            await until(lambda: consumer.stats().in_flight == 0)
            assert consumer.stats().queued == 0
        again = [(b"0", attempts_after)] if attempts_after else []  # else the FIN was for both
        assert handled.calls == [(b"0", 1), *again, (b"1", 1), (b"2", 1), (b"3", 1)]
        assert handled.overlaps == []
        levels = [each.levelno for each in caplog.records if "is held back" in each.getMessage()]
        assert levels[0] == logging.WARNING

    play(scenario, client=client)


def test_what_comes_again_is_handed_out_when_the_handler_has_failed(client):
    async def scenario(world):
        publish(world, 2)
        handled = Handled()
        handled.error = ValueError("not this time")
        async with world.consumer(ordered=True, handler=handled, concurrency=3, backoff=0) as consumer:
            await until(lambda: handled.calls)
            take_back(world)
            await until(lambda: consumer.stats().queued == 1)
            await asyncio.sleep(MSG_TIMEOUT_S)
            handled.may_end.set()
            await until(lambda: finished(world) == [b"0", b"1"])
        assert handled.calls == [(b"0", 1), (b"0", 2), (b"1", 1)]
        assert handled.overlaps == []

    play(scenario, client=client)


def test_a_handler_that_has_answered_and_goes_on_holds_its_partition_and_no_other(client):
    async def scenario(world):
        publish(world, 3, partitions=2)
        handled = Handled(answers_early=True)
        async with world.consumer(ordered=True, handler=handled, concurrency=3) as consumer:
            await until(lambda: len(handled.calls) == 4)
            await until(lambda: consumer.stats().queued == 1)
            handled.may_end.set()
            await until(lambda: len(handled.calls) == 6)
        assert handled.overlaps == []

    play(scenario, client=client)


def test_what_waits_is_touched_as_long_as_nsqd_allows(client, caplog):
    async def scenario(world):
        publish(world, 2)
        handled = Handled()
        async with world.consumer(ordered=True, handler=handled, concurrency=3) as consumer:
            await until(lambda: handled.calls)
            take_back(world)
            await asyncio.sleep(MAX_MSG_TIMEOUT_S / 2)
            assert consumer.stats().queued == 1
            touched = [body for node in world.cluster.nodes.values() for body in node.touched]
            assert set(touched) == {b"0"}
            assert 10 < len(touched) < 30
            await asyncio.sleep(MAX_MSG_TIMEOUT_S)
            assert consumer.stats().queued == 0
            handled.may_end.set()
            await until(lambda: finished(world) == [b"0", b"1"])
        told = [each.getMessage() for each in caplog.records if "stands still" in each.getMessage()]
        assert len(told) == 1
        assert "t partition 0 stands still: the handler of message" in told[0]

    play(scenario, client=client)


def test_a_touch_that_came_too_late_lets_what_waits_go(client):
    async def scenario(world):
        publish(world, 1)
        handled = Handled()
        async with world.consumer(ordered=True, handler=handled, concurrency=3) as consumer:
            await until(lambda: handled.calls)
            take_back(world)
            await until(lambda: consumer.stats().queued == 1)
            for node in world.cluster.nodes.values():
                for session in node.sessions:
                    session.in_flight.clear()  # it is somebody else's now
            await until(lambda: consumer.stats().queued == 0, MSG_TIMEOUT_S)
            handled.may_end.set()

    play(scenario, client=client)


def test_what_comes_later_takes_the_place_of_what_waits(client):
    async def scenario(world):
        publish(world, 1)
        handled = Handled()
        async with world.consumer(ordered=True, handler=handled, concurrency=3) as consumer:
            await until(lambda: handled.calls)
            for number in range(5):
                take_back(world)
                await until(partial(has_received, consumer, number + 2))
                assert consumer.stats().queued == 1
            handled.may_end.set()
            await until(lambda: finished(world) == [b"0"])
            await until(lambda: consumer.stats().in_flight == 0)
        assert handled.calls == [(b"0", 1)]

    play(scenario, client=client)


def test_closing_gives_back_what_waits_and_does_not_wait_for_ever(client):
    async def scenario(world):
        publish(world, 2)
        handled = Handled()
        consumer = world.consumer(ordered=True, handler=handled, concurrency=1, drain_timeout=5)
        async with consumer:
            await until(lambda: handled.calls)
            hang_up(world)
            await until(lambda: consumer.stats().queued == 1)
            began = world.now
            consumer.stop()
            closing = asyncio.ensure_future(consumer.close())
            await until(lambda: [each for node in world.cluster.nodes.values() for each in node.requeued])
            if client == "asyncio":
                await closing
                assert world.now - began < 10
            else:  # the thread that runs the handler closes when that has ended
                await until(lambda: world.now - began > 5)
            handled.may_end.set()
            await closing
        assert handled.calls == [(b"0", 1)]

    play(scenario, client=client)


# --- iterated over ---


async def next_of(iterator: Any) -> Message:
    """The next message, however long it takes."""
    return await anext(iterator)


def test_a_message_that_was_taken_holds_its_partition_until_it_is_answered(client):
    async def scenario(world):
        publish(world, 2)
        async with world.consumer(ordered=True) as consumer:
            iterator = aiter(consumer)
            message = await next_of(iterator)
            hang_up(world)
            await until(lambda: consumer.stats().queued == 1)
            coming = asyncio.ensure_future(next_of(aiter(consumer)))
            await asyncio.sleep(2 * MSG_TIMEOUT_S)
            assert not coming.done()
            message.finish()
            again = await coming
            assert (again.body, again.attempts) == (b"0", 2)
            again.finish()

    play(scenario, client=client)


@pytest.mark.parametrize("in_batches", [False, True], ids=["one by one", "batches"])
def test_a_loop_that_does_not_answer_gets_what_nsqd_takes_back(in_batches, client, caplog):
    """As without order: what the loop variable refers to is not waited for when the loop has gone on."""

    async def scenario(world):
        publish(world, 1)
        taken: list[tuple[bytes, int]] = []

        async def forget(consumer: Any) -> None:
            if in_batches:
                async for batch in consumer.batches(1):
                    taken.extend((each.body, each.attempts) for each in batch)
            else:
                async for message in consumer:
                    taken.append((message.body, message.attempts))  # noqa: PERF401 - the loop is what is tried

        async with world.consumer(ordered=True) as consumer:
            forgetting = asyncio.ensure_future(forget(consumer))
            for count in range(1, 5):
                await until(lambda count=count: len(taken) == count, MSG_TIMEOUT_S)  # type: ignore[misc]
                take_back(world)
            consumer.stop()
            await forgetting
        assert {body for body, _ in taken} == {b"0"}
        assert "is held back" not in caplog.text

    play(scenario, client=client)


def test_a_loop_that_goes_on_late_without_an_answer_gets_what_waits(client):
    async def scenario(world):
        publish(world, 1)
        taken: list[tuple[bytes, int]] = []
        may_go_on = asyncio.Event()

        async def forget(consumer: Any) -> None:
            async for message in consumer:
                taken.append((message.body, message.attempts))
                if message.attempts > 1:
                    message.finish()
                await may_go_on.wait()

        async with world.consumer(ordered=True) as consumer:
            forgetting = asyncio.ensure_future(forget(consumer))
            await until(lambda: taken)
            hang_up(world)
            await until(lambda: consumer.stats().queued == 1)
            await asyncio.sleep(2 * MSG_TIMEOUT_S)
            assert len(taken) == 1
            may_go_on.set()
            await until(lambda: finished(world) == [b"0"], MSG_TIMEOUT_S)
            consumer.stop()
            await forgetting
        assert taken == [(b"0", 1), (b"0", 2)]

    play(scenario, client=client)


def test_a_block_in_a_task_of_its_own_holds_its_partition(client):
    async def scenario(world):
        publish(world, 1)
        began: list[int] = []
        may_end, tasks = asyncio.Event(), []

        async def handle(message: Message) -> None:
            with message:
                began.append(message.attempts)
                await may_end.wait()

        async def spread(consumer: Any) -> None:
            async for message in consumer:
                tasks.append(asyncio.ensure_future(handle(message)))  # noqa: PERF401 - the loop is what is tried

        async with world.consumer(ordered=True) as consumer:
            spreading = asyncio.ensure_future(spread(consumer))
            await until(lambda: began)
            take_back(world)
            await until(lambda: consumer.stats().queued == 1)
            await asyncio.sleep(2 * MSG_TIMEOUT_S)
            assert began == [1]
            may_end.set()
            await until(lambda: finished(world) == [b"0"])
            consumer.stop()
            await spreading
        await asyncio.gather(*tasks)

    play(scenario, client=client)


def test_messages_that_are_finished_together_hold_nothing(client):
    async def scenario(world):
        publish(world, 3)
        kept: list[Message] = []

        async def finish(consumer: Any) -> None:
            async for batch in consumer.batches(2):
                kept.extend(batch)  # so that it is the answer that counts
                finish_all(batch)

        async with world.consumer(ordered=True) as consumer:
            finishing = asyncio.ensure_future(finish(consumer))
            await until(lambda: finished(world) == [b"0", b"1", b"2"], 5)
            consumer.stop()
            await finishing
        assert [message.body for message in kept] == [b"0", b"1", b"2"]

    play(scenario, client=client)


def test_a_message_that_nothing_refers_to_holds_nothing(client):
    async def scenario(world):
        publish(world, 1)
        taken: list[tuple[bytes, int]] = []

        async def forget(consumer: Any) -> None:
            async for message in consumer:
                taken.append((message.body, message.attempts))
                if message.attempts > 1:
                    message.finish()
                del message
                gc.collect()

        async with world.consumer(ordered=True) as consumer:
            forgetting = asyncio.ensure_future(forget(consumer))
            await until(lambda: taken)
            hang_up(world)
            await until(lambda: finished(world) == [b"0"], MAX_MSG_TIMEOUT_S / 2)
            consumer.stop()
            await forgetting
        assert taken == [(b"0", 1), (b"0", 2)]

    play(scenario, client=client)


def test_a_message_that_the_application_forgot_holds_its_partition_as_long_as_nsqd_allows_at_most(client, caplog):
    async def scenario(world):
        publish(world, 1)
        async with world.consumer(ordered=True) as consumer:
            message = await next_of(aiter(consumer))
            hang_up(world)
            await until(lambda: consumer.stats().queued == 1)
            coming = asyncio.ensure_future(next_of(aiter(consumer)))
            await asyncio.sleep(MAX_MSG_TIMEOUT_S - 10)
            assert not coming.done()
            await until(lambda: "t partition 0 goes on: message" in caplog.text, 20)
            if not coming.done():  # it was over for what waited, too: nsqd sends it again
                take_back(world)
            again = await coming
            assert again.body == b"0"
            with message:  # too late to change anything
                pass
            again.finish()
            await until(lambda: finished(world) == [b"0"])

    play(scenario, client=client)


@pytest.mark.parametrize("answer", [Message.finish, lambda message: None], ids=["finished", "open"])
def test_a_block_holds_its_partition_until_it_ends(answer: Callable[[Message], None], client):
    async def scenario(world):
        publish(world, 2)
        async with world.consumer(ordered=True) as consumer:
            message = await next_of(aiter(consumer))
            with message:
                answer(message)
                if not message.is_answered:
                    hang_up(world)
                await until(lambda: consumer.stats().queued == 1)
                coming = asyncio.ensure_future(next_of(aiter(consumer)))
                await asyncio.sleep(2 * MAX_MSG_TIMEOUT_S)
                has_come = coming.done()  # an exception does not leave the block
                take_back(world)  # nsqd has, for a while
            assert not has_come
            (await coming).finish()

    play(scenario, client=client)


def test_what_was_not_handed_out_in_time_gives_its_place_to_what_comes_again(client):
    async def scenario(world):
        publish(world, 2)
        async with world.consumer(ordered=True) as consumer:
            await until(lambda: consumer.stats().queued == 1)
            await asyncio.sleep(MSG_TIMEOUT_S / 2)
            take_back(world)
            await until(lambda: consumer.stats().received == 2)
            assert consumer.stats().queued == 1
            assert [body for node in world.cluster.nodes.values() for body in node.touched] == []
            message = await next_of(aiter(consumer))
            assert (message.body, message.attempts) == (b"0", 2)
            message.finish()
            (await next_of(aiter(consumer))).finish()
            await until(lambda: consumer.stats().in_flight == 0)

    play(scenario, client=client)
